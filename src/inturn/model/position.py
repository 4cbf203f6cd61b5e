"""Where a group starts reading."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from inturn.model.errors import InvalidInput

_KINDS = ("first", "last", "committed", "timestamp", "offset")
_TIMESTAMP_MS_MAX = 253_402_300_799_000  # the end of the year 9999: later ones cannot be written as text


@dataclass(frozen=True, slots=True)
class Position:
    """`kind` is "first", "last", "committed", "timestamp" (then `value` is milliseconds) or "offset"."""

    kind: str
    value: int = 0

    def __post_init__(self) -> None:
        limit = _TIMESTAMP_MS_MAX if self.kind == "timestamp" else 2**63 - 1
        if self.kind not in _KINDS or not 0 <= self.value <= limit:
            raise InvalidInput(f"Position({self.kind!r}, {self.value}): no such position")


FIRST = Position("first")
LAST = Position("last")
COMMITTED = Position("committed")


def parse_position(text: str | int | datetime | Position) -> Position:
    """Understands "first", "last", "committed", a datetime or its ISO form, or an offset number."""
    match text:
        case Position():
            return text
        case bool():
            pass
        case int() if text >= 0:
            return Position("offset", text)
        case datetime():
            try:
                return Position("timestamp", round(text.timestamp() * 1000))
            except (ValueError, OverflowError):
                pass
        case "first" | "last" | "committed":
            return Position(text)
        case str() if text.isascii() and text.isdigit() and len(text) <= 19:
            return Position("offset", int(text))
        case str():
            try:
                return parse_position(datetime.fromisoformat(text))
            except (ValueError, OverflowError):
                pass
    raise InvalidInput(
        f"start position {text!r}: use 'first', 'last', 'committed', a time such as '2026-01-31T12:00', or an offset"
    )


def position_text(position: Position) -> str:
    """The same position as text that `parse_position` reads."""
    match position.kind:
        case "timestamp":
            return datetime.fromtimestamp(position.value / 1000, UTC).isoformat()
        case "offset":
            return str(position.value)
    return position.kind
