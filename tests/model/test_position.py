"""C15: where a group starts reading."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inturn.model.errors import InvalidInput
from inturn.model.offsets import Position, parse_position, position_text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("first", Position("first")),
        ("last", Position("last")),
        ("committed", Position("committed")),
        (0, Position("offset", 0)),
        (17, Position("offset", 17)),
        ("17", Position("offset", 17)),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), Position("timestamp", 1_769_860_800_000)),
        ("2026-01-31T12:00+00:00", Position("timestamp", 1_769_860_800_000)),
        ("2026-01-31T12:00Z", Position("timestamp", 1_769_860_800_000)),
        (Position("last"), Position("last")),
    ],
)
def test_a_position_is_understood(given: str | int | datetime | Position, meant: Position) -> None:
    assert parse_position(given) == meant


@pytest.mark.parametrize("nonsense", ["", "First", "now", "-1", -1, True, 1.5, None, "²", "2026-13-01", b"first", []])
def test_nonsense_is_refused_with_what_can_be_used(nonsense: object) -> None:
    with pytest.raises(InvalidInput, match="'first', 'last', 'committed'"):
        parse_position(nonsense)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "value"), [("bogus", 0), ("offset", -3), ("timestamp", 1 << 60)])
def test_a_position_made_by_hand_is_checked_too(kind: str, value: int) -> None:
    with pytest.raises(InvalidInput):
        Position(kind, value)


@given(st.integers(0, 4_000_000_000_000))
def test_a_time_survives_being_written_as_text(milliseconds: int) -> None:
    position = Position("timestamp", milliseconds)
    assert parse_position(position_text(position)) == position


@given(st.integers(0, 2**63 - 1))
def test_an_offset_survives_being_written_as_text(offset: int) -> None:
    assert parse_position(position_text(Position("offset", offset))) == Position("offset", offset)


@pytest.mark.parametrize("kind", ["first", "last", "committed"])
def test_a_word_survives_being_written_as_text(kind: str) -> None:
    assert parse_position(position_text(Position(kind))) == Position(kind)
