"""Marks: what tells the messages apart that are handled under one lease.

That is their offset; but a parking lot follows its key to another partition when the subject grows, and its messages
keep the offsets that they had. The mark of such a message has the partition that it was read from in its upper bits.

Where a group starts reading.

Commit tracking: how far one partition is done when its messages finish in any order.

`low` is the lowest offset that is not finished; `finished` holds those above it that are. Both are committed together,
so a successor repeats only what was not finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from pyroaring import BitMap64

from inturn.model.errors import InvalidInput

_SHIFT = 44  # offsets of one partition stay below that: 17 million million
FOREIGN_MIN = 1 << _SHIFT


def mark_of(partition: int, offset: int, held: int) -> int:
    """The mark of a message among those that are handled under the lease of the partition `held`."""
    return offset if partition == held else (partition + 1) << _SHIFT | offset


def offset_of(mark: int) -> int:
    return mark & FOREIGN_MIN - 1


def place_of(mark: int, held: int) -> tuple[int, int]:
    """Partition and offset."""
    partition = mark >> _SHIFT
    return (partition - 1 if partition else held), offset_of(mark)


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


class CommitTracker:
    """Offsets that nothing is stored at count as finished, once `skip` has told of them."""

    __slots__ = ("_finished", "_low", "version")

    def __init__(self, low: int = 0, finished: bytes = b"") -> None:
        self._low = low
        self._finished = BitMap64.deserialize(finished) if finished else BitMap64()
        if self._finished and self._finished.min() < low:
            self._finished.remove_range(0, low)
        self.version = 0  # rises with every change

    def add(self, offsets: Iterable[int]) -> None:
        """These are finished. Any of them may be known already."""
        self._finished.update(offsets)
        self.version += 1

    def skip(self, start: int, stop: int) -> None:
        """Nothing is stored from `start` up to `stop`."""
        if start < stop:
            self._finished.add_range(start, stop)
            self.version += 1

    @property
    def low(self) -> int:
        finished, low = self._finished, self._low
        if not finished:
            return low
        if finished.min() < low:  # told twice
            finished.remove_range(0, low)
        if low not in finished:
            return low
        # Gallop to an end of the stretch of finished ones, then halve.
        step = 1
        while finished.contains_range(low, low + 2 * step):
            step *= 2
        first, last = low + step, low + 2 * step  # everything below `first` is finished, below `last` is not
        while last - first > 1:
            middle = (first + last) // 2
            if finished.contains_range(low, middle):
                first = middle
            else:
                last = middle
        finished.remove_range(low, first)
        self._low = first
        return first

    @property
    def known_low(self) -> int:
        """`low` as it was when last asked for: never too high, and free of charge."""
        return self._low

    def __contains__(self, offset: int) -> bool:
        return offset < self._low or offset in self._finished

    @property
    def last(self) -> int:
        """The highest that is finished; what is above it was never seen."""
        return max(self._finished.max(), self._low - 1) if self._finished else self._low - 1

    @property
    def count_above(self) -> int:
        """How many are finished above `low`."""
        _ = self.low  # forgets what is below
        return len(self._finished)

    def snapshot(self) -> tuple[int, bytes]:
        """`low` and what is finished above, as bytes: empty if nothing is."""
        low = self.low
        if not self._finished:
            return low, b""
        self._finished.run_optimize()
        return low, self._finished.serialize()

    def stored(self) -> None:
        """What the last snapshot said is stored."""


class ClaimTracker(CommitTracker):
    """The same for some of the messages of a partition, while others finish the rest.

    What others have to do counts as finished here, and is not told to anybody: `snapshot` has what was finished here
    and is not stored yet, and its offset says nothing.
    """

    __slots__ = ("_first", "_told", "_untold")

    def __init__(self, low: int = 0, finished: bytes = b"") -> None:
        super().__init__(low, finished)
        self._first = low
        self._untold = BitMap64()
        self._told = BitMap64()

    def add(self, offsets: Iterable[int]) -> None:
        offsets = BitMap64(offsets)
        super().add(offsets)
        self._untold |= offsets

    def skip(self, start: int, stop: int) -> None:
        super().skip(start, stop)
        if start < stop:
            self._untold.add_range(start, stop)

    def leave_to_others(self, start: int, stop: int, own: Iterable[int]) -> None:
        """From `start` up to `stop`, all but its own are for others to finish."""
        others = BitMap64()
        others.add_range(start, stop)
        others -= BitMap64(own)
        self._finished |= others  # there is nothing new to commit

    def snapshot(self) -> tuple[int, bytes]:
        _ = self.low  # forgets what is below
        self._told = self._untold.copy()
        self._told.run_optimize()
        return self._first, self._told.serialize() if self._told else b""

    def stored(self) -> None:
        self._untold -= self._told
        self._told = BitMap64()
