"""The horizon: how far one may go while things that began earlier have not ended yet. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

_Mark = TypeVar("_Mark")


class Horizon(Generic[_Mark]):
    """The newest mark such that all that was open when it was taken has ended since.

    A mark is taken together with what is open; once none of these is open any more, the mark is settled, whatever has
    been opened meanwhile. So things that overlap without end do not stop it, only one that does not end does.
    """

    def __init__(self, settled: _Mark) -> None:
        self.settled = settled
        self.waits_for: frozenset[Hashable] = frozenset()
        self._mark = settled

    def look(self, mark: _Mark, open_now: Collection[Hashable]) -> _Mark:
        """`open_now` has to be read after `mark`."""
        if self.waits_for:
            if not self.waits_for.isdisjoint(open_now):
                return self.settled
            self.settled = self._mark
        self.waits_for = frozenset(open_now)
        if self.waits_for:
            self._mark = mark
        else:
            self.settled = mark
        return self.settled


def settled_id(newest: int, lows: Iterable[int]) -> int:
    """Up to which id no open transaction has a row, or will have one.

    `newest` is the highest id that can be seen. `lows` are of the transactions that are open, read later than that: the
    ids of each are above its low one, of which only the lowest 32 bits are known.
    """
    return min([newest, *(newest + _signed(low - newest) for low in lows)])


def _signed(number: int) -> int:
    """The lowest 32 bits as a number with a sign: how far two ids are from each other."""
    return (number + 2**31) % 2**32 - 2**31
