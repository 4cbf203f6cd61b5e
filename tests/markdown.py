"""The parts of Markdown that tests of the documentation read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def sections(text: str) -> dict[str, str]:
    """The text below every heading, up to the next heading of any level."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all rows of all tables, without heads and the lines below the heads."""
    lines = text.splitlines()
    for line, before, behind in zip(lines, ["", *lines], [*lines[1:], ""], strict=False):
        if line.startswith("|") and not _is_rule(line) and not (_is_rule(behind) and not before.startswith("|")):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _is_rule(line: str) -> bool:
    return re.fullmatch(r"\|(\s*-+\s*\|)+", line.strip()) is not None


def code(cell: str) -> str:
    """The text of a cell that contains only code."""
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found is not None, f"{cell!r} should be code"
    return found[1]
