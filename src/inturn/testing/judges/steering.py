"""Actions of operators: skipped and resumed keys, and resets. The actions update the tracks; there are no checks."""

from __future__ import annotations

from inturn.testing.history import KeyResumed, KeySkipped, OffsetsReset
from inturn.testing.judges.case import Case


class OperatorActions:
    def __init__(self, case: Case) -> None:
        self._case = case

    def skip(self, index: int, event: KeySkipped) -> None:
        track = self._case.track(event.subject, event.group, event.partition)
        if track is not None:
            track.skip(event.offset, index)

    def resume(self, index: int, event: KeyResumed) -> None:
        elders: tuple[int, ...] = ()
        if event.key is not None and event.subject in self._case.descents:
            elders = self._case.elders_of(event.subject, event.partition, event.key)
        for partition in (*elders, event.partition):
            track = self._case.track(event.subject, event.group, partition)
            if track is not None:
                track.attempts.pop(event.key, None)

    def reset(self, index: int, event: OffsetsReset) -> None:
        for partition, offset in event.offsets.items():
            track = self._case.track(event.subject, event.group, partition)
            if track is not None:
                track.reset(offset)
