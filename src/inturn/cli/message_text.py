"""Messages and keys as text for people, and as JSON fields for programs."""

from __future__ import annotations

import base64
import sys
from datetime import datetime
from typing import TYPE_CHECKING

import typer

from inturn.cli.screen import Screen, counted, plain, printable

if TYPE_CHECKING:
    from inturn.model.message import Message
    from inturn.protocol.commands import KeyDescription

KEY_COLUMNS = 12


class MessagePrinter:
    """Prints up to `limit` messages to stdout. `flush` flushes stdout."""

    def __init__(self, screen: Screen, limit: int | None = None) -> None:
        self._screen = screen
        self._limit = limit
        self._is_coloured = not screen.is_json and screen.out.is_terminal and not screen.out.no_color
        self.count = 0

    @property
    def is_full(self) -> bool:
        return self._limit is not None and self.count >= self._limit

    def print(self, message: Message, **more: object) -> None:
        """`more` goes to JSON only."""
        if self._screen.is_json:
            self._screen.json({**message_fields(message), **more})
        else:
            if self.count == 0 and self._is_coloured:
                heading = f"{'part':>4} {'offset':>9}  {'born':<23}  {'key':<{KEY_COLUMNS}}  body"
                sys.stdout.write(typer.style(heading, dim=True) + "\n")
            sys.stdout.write(self._line(message) + "\n")
        self.count += 1

    def flush(self) -> None:
        sys.stdout.flush()

    def _line(self, message: Message) -> str:
        key = "–" if message.key is None else printable(message.key.decode(errors="backslashreplace"))
        columns = [
            f"{message.partition:>4} {message.offset:>9}",
            f"{born_text(message.born_at_ms):<23}",
            f"{key:<{KEY_COLUMNS}}",
            printable(message.body.decode(errors="backslashreplace")),
        ]
        if self._is_coloured:
            columns[0] = typer.style(columns[0], fg="cyan")
            columns[1] = typer.style(columns[1], dim=True)
            columns[2] = typer.style(columns[2], fg="yellow")
        return "  ".join(columns)


def born_text(born_at_ms: int) -> str:
    """Local time to the millisecond."""
    try:
        return datetime.fromtimestamp(born_at_ms / 1000).isoformat(" ", "milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{born_at_ms} ms"


def message_fields(message: Message) -> dict[str, object]:
    """Bytes are text if UTF-8, else base64 in a field NAME_base64."""
    fields: dict[str, object] = {
        "subject": message.subject,
        "partition": message.partition,
        "offset": message.offset,
        "born_at_ms": message.born_at_ms,
    }
    fields.update({"key": None} if message.key is None else text_or_base64("key", message.key))
    fields.update(text_or_base64("body", message.body))
    if message.tags:
        fields["tags"] = message.tags
    if message.properties:
        fields["properties"] = message.properties
    if message.message_id is not None:
        fields["message_id"] = message.message_id
    return fields


def text_or_base64(name: str, data: bytes) -> dict[str, object]:
    """The field `name`, or `name`_base64 for bytes that are not UTF-8."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


_STATE_STYLE = {"failing": "yellow", "blocked": "bold red", "parked": "red", "resuming": "green", "requested": "cyan"}


def key_text(key: bytes | None) -> str:
    return "[dim]–[/dim]" if key is None else plain(key.decode(errors="backslashreplace"))


def state_text(state: str) -> str:
    return f"[{_STATE_STYLE.get(state, 'yellow')}]{state}[/]"


def key_fields(key: bytes | None) -> dict[str, object]:
    return {"key": None} if key is None else text_or_base64("key", key)


def blocking_text(found: KeyDescription | None) -> str:
    """The key and its state: `c-7 failing, 3 attempts, 12 waiting`."""
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
