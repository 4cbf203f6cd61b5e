"""The output of a command: results on stdout, notes and errors on stderr; for people, or as JSON for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from inturn.model.errors import InturnError

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 240  # width of a table in a pipe, where rich assumes 80 columns


class Screen:
    """A command has one screen. Colours only where stdout or stderr is a terminal."""

    def __init__(self, is_json: bool) -> None:
        self.is_json = is_json

    @cached_property
    def out(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def err(self) -> Console:
        return _console(stderr=True)

    def json(self, value: object) -> None:
        """Print a JSON value as a line on stdout, always UTF-8."""
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
        """A heading with a leading ">" is for a column of numbers."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
        for heading in headings:
            is_number = heading.startswith(">")
            # Long texts may be folded, never cut: owners and ranges stay complete.
            table.add_column(heading.lstrip(">"), justify="right" if is_number else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.out.print(table)

    def note(self, text: str) -> None:
        """A remark for people, on stderr; not with --json."""
        if not self.is_json:
            self.err.print(text, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        if self.is_json:
            _write_stderr(msgspec.json.encode({"warning": text}).decode())
            return
        from rich.text import Text

        self.err.print(Text.assemble(("warning: ", "bold yellow"), (printable(text), "yellow")), soft_wrap=True)

    def error(self, error: Exception) -> None:
        if self.is_json:
            _write_stderr(msgspec.json.encode({"error": error_fields(error)}).decode())
            return
        from rich.text import Text

        text = Text.assemble(("error: ", "bold red"), (printable(str(error)), "red"))
        self.err.print(text, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        sys.stdout.flush()

    def drop_stdout(self) -> None:
        """The reader of stdout is gone: the rest of the buffer must not fail at exit."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def error_fields(error: Exception) -> dict[str, object]:
    """An error as JSON fields: type, message, whether a retry may help, and the fields of the error."""
    fields: dict[str, object] = {
        "type": type(error).__name__,
        "message": str(error),
        "retriable": isinstance(error, InturnError) and error.retriable,
    }
    for name, value in vars(error).items():
        if not name.startswith("_") and name not in fields:
            fields[name] = value if isinstance(value, str | int | float | bool | None) else repr(value)
    return fields


def printable(text: str) -> str:
    """The text with control characters escaped: stored text cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def plain(text: str) -> str:
    """Text for a place where rich would read markup."""
    from rich.markup import escape

    return escape(printable(text))


def counted(count: int, what: str) -> str:
    """1 → "1 message", 2000 → "2,000 messages"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def size_text(size_bytes: int) -> str:
    """1234567 → "1.2 MB"; small sizes are exact."""
    from rich.filesize import decimal

    return decimal(size_bytes)


def rate_text(per_s: float) -> str:
    """0.25 → "0.2", 1234.5 → "1,234": low rates with one more digit."""
    if per_s == 0:
        return "[dim]0[/dim]"
    return f"{per_s:.1f}" if per_s < 10 else f"{per_s:,.0f}"


def age_text(age_s: float) -> str:
    """75 → "1 min": the largest unit that fits."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= unit_s:
            return f"{int(age_s / unit_s)} {unit}"
    return f"{max(0, int(age_s))} s"


def fields_text(fields: Mapping[str, object]) -> str:
    return "  ".join(f"[dim]{name}[/dim] {plain(str(value))}" for name, value in fields.items())


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_COLUMNS
    return console


def _write_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
