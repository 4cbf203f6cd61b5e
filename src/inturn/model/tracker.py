"""Commit tracking: how far one partition is done when its messages finish in any order.

`low` is the lowest offset that is not finished; `finished` holds those above it that are. Both are committed together,
so a successor repeats only what was not finished.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap64


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
