"""The keys that are held back, as `inturn key list` shows them, but for their age."""

from __future__ import annotations

from collections.abc import Sequence

from inturn.protocol.commands import KeyDescription

HEADINGS = ("key", "partition", "state", "head offset", "attempts", "last error", "waiting behind")


def list_rows(keys: Sequence[KeyDescription]) -> list[tuple[str, ...]]:
    """The head is the first message of the key that is not over."""
    return [
        (
            "–" if one.key is None else one.key.decode(errors="backslashreplace"),
            str(one.partition),
            one.state,
            "–" if one.offset is None else f"{one.offset:,}",
            str(one.attempts),
            one.error or "–",
            str(one.waiting),
        )
        for one in keys
    ]


def list_lines(keys: Sequence[KeyDescription]) -> list[str]:
    """A table as text."""
    rows = [HEADINGS, *list_rows(keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
