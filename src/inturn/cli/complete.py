"""Names for the shell to complete: those of the folder or the server, if they come quickly. Never an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from inturn.cli.target import chosen

if TYPE_CHECKING:
    from inturn.client import Connection

PATIENCE_S = 1.0


def complete_subject(context: typer.Context, incomplete: str) -> list[str]:
    return _names(context, incomplete, lambda connection: [one.name for one in connection.subjects()])


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    """Of the subject that was typed before, if one was."""
    subject = context.params.get("subject")
    return _names(
        context,
        incomplete,
        lambda connection: [one.group for one in connection.groups() if subject in (None, one.subject)],
    )


def _names(context: typer.Context, incomplete: str, look: Callable[[Connection], list[str]]) -> list[str]:
    """In a thread that is left behind if it takes too long: this process ends right after."""
    from inturn.cli import logs
    from inturn.cli.session import opened

    logs.silence()
    found: list[str] = []

    def fetch() -> None:
        try:
            with opened(chosen(context, context.params.get("data") or "")) as connection:
                found.extend(look(connection))
        except BaseException:  # whatever it is: the shell wants names, or silence
            return

    thread = threading.Thread(target=fetch, name="inturn-complete", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return sorted({name for name in list(found) if name.startswith(incomplete)})
