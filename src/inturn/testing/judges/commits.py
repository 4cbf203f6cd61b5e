"""The judge of commits: whether the committer holds the lease, and whether the committed messages are finished, parked
or removed from a parking lot as reported."""

from __future__ import annotations

from inturn.testing.history import Committed
from inturn.testing.judges.case import Case
from inturn.testing.track import RunTrack, Track
from inturn.testing.verdict import ViolationKind, name_offsets


class CommitJudge:
    def __init__(self, case: Case) -> None:
        self._case = case
        self.commits = 0

    def commit(self, index: int, event: Committed) -> None:
        track = self._case.track(event.subject, event.group, event.partition)
        if track is None:
            return
        self.commits += 1
        self._judge_committer(track, index, event)
        if event.parked:
            self._park(event)
        self._judge_commit(track, index, event)
        if event.offset > track.committed:
            track.committed, track.commit_index = event.offset, index
        if event.unparked:
            self._unpark(index, event)

    def _judge_committer(self, track: Track, index: int, event: Committed) -> None:
        lease = track.lease
        evidence: tuple[int, ...]
        if lease is None:
            reason, evidence = "without any lease granted", (index,)
        elif event.epoch < track.epoch_max:
            newest = track.grants[track.epoch_max]
            reason = f"after epoch {track.epoch_max} had been granted to {self._case.owner(newest)!r}"
            evidence = (newest, index)
        elif (lease.owner, lease.epoch) != (event.owner, event.epoch):
            reason, evidence = f"but the lease is {lease.owner!r}'s, epoch {lease.epoch}", (lease.index, index)
        elif lease.ended_index is not None:
            reason, evidence = "after that lease had ended", (lease.index, lease.ended_index, index)
        else:
            return
        self._case.violation_on(
            track,
            ViolationKind.STALE_COMMIT,
            f"{track}: a commit to offset {event.offset} by {event.owner!r} (epoch {event.epoch}) was accepted, "
            f"{reason}",
            (event.offset,),
            evidence,
        )

    def _judge_commit(self, track: Track, index: int, event: Committed) -> None:
        offsets, position, epoch = track.log.offsets, track.position, event.epoch
        granted = track.grants.get(epoch, index)
        missing: list[int] = []
        while position < len(offsets) and offsets[position] < event.offset:
            offset = offsets[position]
            position += 1
            finisher = track.finished_by.get(offset)
            if finisher is not None and finisher.epoch == epoch:  # the usual case
                continue
            if offset in track.claimed or offset in track.parked or _is_over(track, offset, event, granted):
                continue
            if offset not in track.unwanted:
                missing.append(offset)
        track.position = position
        if missing:
            self._premature(track, index, event, f"committed to offset {event.offset}", missing)
        if event.finished:
            self._judge_claims(track, index, event, granted)

    def _judge_claims(self, track: Track, index: int, event: Committed, granted: int) -> None:
        """Check the finished set. Commits repeat finished offsets; every offset is checked once."""
        judged_below = max(event.offset, track.committed)
        missing: list[int] = []
        for offset in sorted(set(event.finished).difference(track.claimed)):
            track.claimed[offset] = index
            if (
                offset >= judged_below
                and offset not in track.parked
                and offset not in track.unwanted
                and track.log.holds(offset)
                and not _is_over(track, offset, event, granted)
            ):
                missing.append(offset)
        if missing:
            how = f"committed {name_offsets(missing)} as finished, above {event.offset},"
            self._premature(track, index, event, how, missing)

    def _premature(self, track: Track, index: int, event: Committed, how: str, missing: list[int]) -> None:
        self._case.violation_on(
            track,
            ViolationKind.PREMATURE_COMMIT,
            f"{track}: {event.owner!r} (epoch {event.epoch}) {how} although {name_offsets(missing)} "
            "had not been finished" + (" as far as the committer could know" if missing[0] in track.finished else ""),
            tuple(missing),
            (*track.log.where(missing), *track.finishes(missing), index),
        )

    def _park(self, event: Committed) -> None:
        passed_through = set(event.unparked)
        for partition, offset in event.parked:
            track = self._case.track(event.subject, event.group, partition)
            if track is not None and (partition, offset) not in passed_through:
                track.park(offset, event.epoch if partition == event.partition else -1)

    def _unpark(self, index: int, event: Committed) -> None:
        for partition, offset in event.unparked:
            track = self._case.track(event.subject, event.group, partition)
            if track is None or track.is_done(offset):
                continue
            # Epochs of a different partition do not show what the committer could know.
            granted = track.grants.get(event.epoch, index) if partition == event.partition else index
            if not _is_over(track, offset, event, granted):
                how = f"took offset {offset} out of the parking lot"
                self._premature(track, index, event, how, [offset])
            track.unpark(offset, index)


def _is_over(track: Track, offset: int, commit: Committed, granted: int) -> bool:
    """Whether the message was finished or skipped, as far as the committer could know. `granted` is the index of the
    committer's grant."""
    finished = track.finished.get(offset)
    if finished is None:
        return False
    return finished <= granted or offset in track.skipped or _known_to(commit, track.finished_by[offset])


def _known_to(commit: Committed, finisher: RunTrack) -> bool:
    return finisher.epoch == commit.epoch or finisher.consumer == commit.owner
