"""From where a successor has to read the logs to find what was stored of rows that are still in the table. Pure.

A mark is an offset per partition: every row that was sent and is not deleted yet stands at it or behind it, if it is
stored at all. Marks are written before rows are sent, in the transaction that deletes the rows before them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from inturn.outbox.horizon import Horizon

Offsets = dict[str, list[int]]  # by subject, one offset for each partition; a partition that is missing begins at 0


class Marks:
    def __init__(self, stored: Offsets) -> None:
        """`stored` is what the one before has left."""
        self._horizon = Horizon[Offsets](stored)
        self._learned: Offsets = {}  # where subjects ended when they were first sent to
        self._ends: Offsets = {}  # what is sent from now on stands behind these

    def knows(self, subject: str) -> bool:
        return subject in self._ends

    def learn(self, subject: str, ends: Sequence[int]) -> None:
        """Where the logs of a subject end, before anything is sent to it."""
        self._ends[subject] = list(ends)
        self._learned[subject] = list(ends)

    def acknowledged(self, subject: str, partition: int, offset: int) -> None:
        ends = self._ends.get(subject)
        if ends is None:
            return
        ends += [0] * (partition + 1 - len(ends))  # partitions that came later
        ends[partition] = max(ends[partition], offset + 1)

    def to_store(self, unaccounted: Collection[Hashable]) -> Offsets:
        """The marks for what is unaccounted: sent or about to be, and not deleted. Nothing is: there are none."""
        if not unaccounted:
            self._horizon = Horizon[Offsets]({})
            self._learned.clear()
            self._ends.clear()
            return {}
        before = self._horizon.settled
        now = {subject: list(ends) for subject, ends in self._ends.items()}
        settled = self._horizon.look(now, unaccounted)
        if settled is not before:
            for subject in settled:
                self._learned.pop(subject, None)
        return {**self._learned, **settled}
