"""The judge of losses, for complete histories: acknowledged messages must be in the log and finished by all groups."""

from __future__ import annotations

from inturn.testing.judges.case import Case
from inturn.testing.track import LogTrack, ids_differ
from inturn.testing.verdict import ViolationKind, name_offsets


class LossJudge:
    def __init__(self, case: Case) -> None:
        self._case = case

    def find(self) -> None:
        for (subject, partition), log in self._case.logs.items():
            gone = self._gone_from_log(subject, partition, log)
            for group in sorted(self._groups_of(subject)):
                self._lost_by_group(subject, group, partition, log, gone)

    def _gone_from_log(self, subject: str, partition: int, log: LogTrack) -> set[int]:
        if self._case.stored is None:
            return set()
        gone = sorted(offset for offset in log.acknowledged if not self._in_log(subject, partition, offset, log))
        if gone:
            self._case.violation(
                ViolationKind.LOST,
                f"subject {subject!r}, partition {partition}: {name_offsets(gone)} acknowledged, but the log does not "
                f"hold {'it' if len(gone) == 1 else 'them'}",
                (subject, None, partition),
                tuple(gone),
                log.where(gone),
            )
        return set(gone)

    def _in_log(self, subject: str, partition: int, offset: int, log: LogTrack) -> bool:
        assert self._case.stored is not None
        place = (subject, partition, offset)
        return place in self._case.stored and not ids_differ(log.messages[offset].message_id, self._case.stored[place])

    def _groups_of(self, subject: str) -> set[str]:
        groups = {track.group for track in self._case.wanted_tracks() if track.subject == subject}
        if self._case.group is not None and (self._case.subject is not None or not any(self._case.wanted_tracks())):
            groups.add(self._case.group)
        return groups

    def _lost_by_group(self, subject: str, group: str, partition: int, log: LogTrack, gone: set[int]) -> None:
        track = self._case.track(subject, group, partition)
        assert track is not None
        lost = sorted(
            offset
            for offset in log.acknowledged
            if offset not in track.ever_finished
            and offset >= track.floor
            and offset not in gone
            and offset not in track.parked
            and offset not in track.ever_skipped
            and offset not in track.unwanted
        )
        if lost:
            self._case.violation_on(
                track,
                ViolationKind.LOST,
                f"{track}: {name_offsets(lost)} acknowledged, but never finished "
                f"({len(lost)} of {len(log.acknowledged)})",
                tuple(lost),
                track.log.where(lost),
            )
