"""Where a group starts reading."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from inturn.model.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Position:
    """`kind` is "first", "last", "committed", "timestamp" (then `value` is milliseconds) or "offset"."""

    kind: str
    value: int = 0


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
            return Position("timestamp", int(text.timestamp() * 1000))
        case "first" | "last" | "committed":
            return Position(text)
        case str() if text.isascii() and text.isdigit():
            return Position("offset", int(text))
        case str():
            try:
                return parse_position(datetime.fromisoformat(text))
            except ValueError:
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
