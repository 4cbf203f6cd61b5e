"""The horizon: how far one may go while things that began earlier have not ended yet. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable
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
