"""Offsets: marks, start positions, and the tracking of finished offsets.

A mark identifies a message among all messages that are handled under one lease. The mark of a message of the leased
partition is the message's offset. When a subject grows, a parking lot moves with its key to a child partition, and the
parked messages keep the offsets of the parent partition. The mark of such a message has the partition of its offset in
the upper bits.

A `Position` says where a group starts reading.

A `CommitTracker` tracks the progress of one partition while messages finish in any order: `low` is the lowest offset
that is not finished, and the finished set holds the finished offsets above `low`. Both are committed together, so the
next lease holder repeats only messages that were not finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from pyroaring import BitMap64

from inturn.model.errors import InvalidInput

_SHIFT = 44  # offsets of one partition stay below 2**44: 17 million million
FOREIGN_MIN = 1 << _SHIFT


def mark_of(partition: int, offset: int, held: int) -> int:
    """The mark of a message under the lease of the partition `held`: unique among the messages of that lease."""
    return offset if partition == held else (partition + 1) << _SHIFT | offset


def offset_of(mark: int) -> int:
    """The offset of a marked message, in the partition that stored the message."""
    return mark & FOREIGN_MIN - 1


def place_of(mark: int, held: int) -> tuple[int, int]:
    """The partition and offset of a marked message under the lease of the partition `held`."""
    partition = mark >> _SHIFT
    return (partition - 1 if partition else held), offset_of(mark)


_KINDS = ("first", "last", "committed", "timestamp", "offset")
_TIMESTAMP_MS_MAX = 253_402_300_799_000  # the end of the year 9999: later times cannot be written as text


@dataclass(frozen=True, slots=True)
class Position:
    """`kind` is "first", "last", "committed", "timestamp" (then `value` is milliseconds) or "offset"."""

    kind: str
    value: int = 0

    def __post_init__(self) -> None:
        limit = _TIMESTAMP_MS_MAX if self.kind == "timestamp" else 2**63 - 1
        if self.kind not in _KINDS or not 0 <= self.value <= limit:
            raise InvalidInput(
                f"Position({self.kind!r}, {self.value}): no such position; use one of {', '.join(_KINDS)}, and a value "
                f"from 0 to {limit}"
            )


FIRST = Position("first")
LAST = Position("last")
COMMITTED = Position("committed")


def parse_position(text: str | int | datetime | Position) -> Position:
    """Parse "first", "last", "committed", a datetime or its ISO form, or an offset. Raises InvalidInput."""
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
    """The finished offsets of one partition. Offsets without a message count as finished after `skip`."""

    __slots__ = ("_finished", "_low", "version")

    def __init__(self, low: int = 0, finished: bytes = b"") -> None:
        self._low = low
        self._finished = BitMap64.deserialize(finished) if finished else BitMap64()
        if self._finished and self._finished.min() < low:
            self._finished.remove_range(0, low)
        self.version = 0  # rises with every change

    def add(self, offsets: Iterable[int]) -> None:
        """Mark offsets as finished. Offsets may be repeated."""
        self._finished.update(offsets)
        self.version += 1

    def skip(self, start: int, stop: int) -> None:
        """No message is stored from `start` up to `stop`: these offsets count as finished."""
        if start < stop:
            self._finished.add_range(start, stop)
            self.version += 1

    @property
    def low(self) -> int:
        finished, low = self._finished, self._low
        if not finished:
            return low
        if finished.min() < low:  # added again
            finished.remove_range(0, low)
        if low not in finished:
            return low
        # Double the step up to the end of the finished range, then search by halves.
        step = 1
        while finished.contains_range(low, low + 2 * step):
            step *= 2
        first, last = low + step, low + 2 * step  # all offsets below `first` are finished, below `last` not all
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
        """`low` as last computed: never too high, and without any cost."""
        return self._low

    def __contains__(self, offset: int) -> bool:
        return offset < self._low or offset in self._finished

    @property
    def last(self) -> int:
        """The highest finished offset."""
        return max(self._finished.max(), self._low - 1) if self._finished else self._low - 1

    @property
    def count_above(self) -> int:
        """How many offsets are finished above `low`."""
        _ = self.low  # drops the offsets below `low`
        return len(self._finished)

    def snapshot(self) -> tuple[int, bytes]:
        """`low`, and the finished offsets above `low` as bytes: empty if there are none."""
        low = self.low
        if not self._finished:
            return low, b""
        self._finished.run_optimize()
        return low, self._finished.serialize()

    def stored(self) -> None:
        """The last snapshot is stored."""


class ClaimTracker(CommitTracker):
    """The tracker of a claim: some of the messages of a partition, while other claimants finish the rest.

    Messages of other claimants count as finished here, and are never reported: `snapshot` returns only the offsets
    that were finished under this claim and are not stored yet. The first value of the snapshot has no meaning.
    """

    __slots__ = ("_first", "_reported", "_unreported")

    def __init__(self, low: int = 0, finished: bytes = b"") -> None:
        super().__init__(low, finished)
        self._first = low
        self._unreported = BitMap64()
        self._reported = BitMap64()

    def add(self, offsets: Iterable[int]) -> None:
        offsets = BitMap64(offsets)
        super().add(offsets)
        self._unreported |= offsets

    def skip(self, start: int, stop: int) -> None:
        super().skip(start, stop)
        if start < stop:
            self._unreported.add_range(start, stop)

    def leave_to_others(self, start: int, stop: int, own: Iterable[int]) -> None:
        """From `start` up to `stop`, other claimants finish all offsets except `own`."""
        others = BitMap64()
        others.add_range(start, stop)
        others -= BitMap64(own)
        self._finished |= others  # `version` stays: there is no new progress to commit

    def snapshot(self) -> tuple[int, bytes]:
        _ = self.low  # drops the offsets below `low`
        self._reported = self._unreported.copy()
        self._reported.run_optimize()
        return self._first, self._reported.serialize() if self._reported else b""

    def stored(self) -> None:
        self._unreported -= self._reported
        self._reported = BitMap64()
