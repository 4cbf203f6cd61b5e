"""Keys as they are shown: to people, or to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inturn.cli.message_line import text_or_base64
from inturn.cli.screen import counted, plain

if TYPE_CHECKING:
    from inturn.protocol.commands import KeyDescription

_STATE_STYLE = {"failing": "yellow", "blocked": "bold red", "parked": "red", "resuming": "green", "requested": "cyan"}


def key_text(key: bytes | None) -> str:
    return "[dim]–[/dim]" if key is None else plain(key.decode(errors="backslashreplace"))


def state_text(state: str) -> str:
    return f"[{_STATE_STYLE.get(state, 'yellow')}]{state}[/]"


def key_fields(key: bytes | None) -> dict[str, object]:
    return {"key": None} if key is None else text_or_base64("key", key)


def blocking_text(found: KeyDescription | None) -> str:
    """Which key it is, and how bad: `c-7 failing, 3 attempts, 12 waiting`."""
    if found is None:
        return "[dim]–[/dim]"
    name = "[dim]no key[/dim]" if found.key is None else f"[bold]{key_text(found.key)}[/bold]"
    attempts = f", {counted(found.attempts, 'attempt')}" if found.attempts else ""
    return f"{name} {state_text(found.state)}{attempts}, {found.waiting:,} waiting"


def blocking_fields(found: KeyDescription | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        **key_fields(found.key),
        "partition": found.partition,
        "state": found.state,
        "offset": found.offset,
        "attempts": found.attempts,
        "error": found.error,
        "since_ms": found.since_ms,
        "waiting": found.waiting,
    }
