"""The judge of lanes: within a lane, messages are started in log order, never overlap, and no message is skipped.

After growth, a key also has elders: the former partitions of the key.
"""

from __future__ import annotations

import sys
from bisect import bisect_left

from inturn.testing.judges.case import Case
from inturn.testing.track import LaneKey, RunTrack, Track
from inturn.testing.verdict import ViolationKind, name_offsets

_REPEATED = frozenset({"failed", "exception", "rollback"})


class LaneJudge:
    def __init__(self, case: Case) -> None:
        self._case = case
        self.leftover_overlaps = 0

    def judge(self, track: Track, holder: Track, lane_key: LaneKey, run: RunTrack) -> None:
        """`holder` is the partition of the run's lease: the own partition, except for messages that were parked before
        their key moved."""
        lane, key = run.lane, run.key
        if lane.open is not None:
            self._judge_overlap(track, holder, lane.open, run)
        lane.open = run
        self.leftover_overlaps += lane.leftovers
        term = run.term
        last_runs = track.last.get(term)
        if last_runs is None:
            last_runs = track.last[term] = {}
        if self._case.by_key or key not in track.lots:
            last = last_runs.get(lane_key)
            self._judge_order(track, last, last, run)
        else:  # under order by partition, a parking lot is a lane within the lane
            last_of_key = last_runs.get(key)
            if run.offset in track.parked:
                lane_key = key
            last = last_runs.get(lane_key)
            is_same = last_of_key is not None and last is not None and last.key == key
            self._judge_order(track, last, last_of_key if is_same else last, run)
            last_runs[key] = run
        last_runs[lane_key] = run
        if run.attempt is not None and (run.under is not None or run.epoch >= track.epoch_max):
            self._judge_attempt(track, run, run.attempt)

    def _judge_overlap(self, track: Track, holder: Track, earlier: RunTrack, run: RunTrack) -> None:
        """`earlier` is still open. `earlier` is checked once; afterwards only its being left over is tracked."""
        if earlier.under == run.under:
            granted = holder.grants.get(run.epoch)
            is_of_lost_lease = earlier.epoch < run.epoch and granted is not None and earlier.index < granted
        else:
            is_of_lost_lease = self._is_left_over(track, holder, earlier, run)
        if is_of_lost_lease or _is_of_lost_claim(earlier, run):
            earlier.leftover = True
            earlier.lane.leftovers += 1
            return
        self._case.violation_on(
            track,
            ViolationKind.OVERLAP,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started {run} while "
            f"{earlier.consumer!r} (epoch {earlier.epoch}) was still running offset {earlier.offset} of the same lane",
            (earlier.offset, run.offset),
            (earlier.index, run.index),
        )

    def _judge_order(self, track: Track, last: RunTrack | None, tried: RunTrack | None, run: RunTrack) -> None:
        """`last` is the last run of the lane; `tried` is the run that must not be overtaken after a failure."""
        offset = run.offset
        if last is not None and offset <= last.offset and not _may_repeat(last, offset):
            self._out_of_order(track, last, run)

        lane, finished, parked = run.lane, track.finished, track.parked
        position, offsets = lane.position, lane.offsets
        while position < len(offsets) and offsets[position] < offset:
            if offsets[position] not in finished and offsets[position] not in parked:
                break
            position += 1
        lane.position = position
        if position < len(offsets) and offsets[position] < offset and (self._case.by_key or offset not in parked):
            self._skipped(track, run)
        elif track.lots and run.key is not None and (overtaken := track.overtaken(run.key, offset)):
            self._overtook_parked(track, run, tuple(overtaken))
        elif (
            tried is not None and tried.offset < offset and tried.result in _REPEATED and not _let_on(track, tried, run)
        ):
            self._moved_on_after_failure(track, tried, run)

    def _out_of_order(self, track: Track, last: RunTrack, run: RunTrack) -> None:
        how = f"which ended in {last.result!r}" if last.result else "which had not ended"
        self._case.violation_on(
            track,
            ViolationKind.OUT_OF_ORDER,
            f"{track}: in epoch {run.epoch}, {run.consumer!r} started {run} after offset {last.offset}, {how}",
            (last.offset, run.offset),
            (last.index, run.index),
        )

    def _skipped(self, track: Track, run: RunTrack) -> None:
        lane = run.lane
        here = bisect_left(lane.offsets, run.offset, lane.position)
        missing = tuple(
            offset
            for offset in lane.offsets[lane.position : here]
            if offset not in track.finished and offset not in track.parked
        )
        lane.position = here  # every gap is reported once
        self._case.violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started {run} although "
            f"{name_offsets(missing)} of the same lane had not been finished",
            missing,
            (*track.log.where(missing), run.index),
        )

    def _moved_on_after_failure(self, track: Track, last: RunTrack, run: RunTrack) -> None:
        self._case.violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started {run} although "
            f"offset {last.offset} of the same lane ended in {last.result!r} and was not repeated",
            (last.offset,),
            (last.index, run.index),
        )

    def _overtook_parked(self, track: Track, run: RunTrack, overtaken: tuple[int, ...]) -> None:
        self._case.violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started {run} although "
            f"{name_offsets(overtaken)} of the same key waited in the parking lot",
            overtaken,
            (*track.log.where(overtaken), run.index),
        )

    def _judge_attempt(self, track: Track, run: RunTrack, attempt: int) -> None:
        tried = track.attempts.setdefault(run.key, {})
        highest = tried.get(run.offset)
        if highest is None or highest.attempt is None:
            tried[run.offset] = run
            return
        has_failed = highest.term == run.term and highest.result in _REPEATED
        if attempt < highest.attempt or (attempt == highest.attempt and has_failed):
            how = f"which ended in {highest.result!r}" if highest.result else "which had not ended"
            self._case.violation_on(
                track,
                ViolationKind.ATTEMPT_LOST,
                f"{track}: {run.consumer!r} (epoch {run.epoch}) started {run} as attempt "
                f"{attempt}, after attempt {highest.attempt} in epoch {highest.epoch}, {how}",
                (run.offset,),
                (highest.index, run.index),
            )
        if attempt >= highest.attempt:
            tried[run.offset] = run

    def judge_elders(self, track: Track, holder: Track, key: bytes, run: RunTrack) -> None:
        """Check the older messages of the key in other partitions: all must be finished, or wait in the parking lot."""
        for partition in self._case.elders_of(track.subject, track.partition, key):
            elder = self._case.track(track.subject, track.group, partition)
            assert elder is not None
            missing = elder.unfinished(key)
            if missing:
                self._overtook_elders(elder, track, run, tuple(missing), "had not been finished there")
            elif overtaken := elder.overtaken(key, sys.maxsize):
                self._overtook_elders(elder, track, run, tuple(overtaken), "waited in the parking lot")
            lane = elder.lanes.get(key if self._case.by_key else None)
            earlier = None if lane is None else lane.open
            if earlier is not None and earlier.key == key and not self._is_left_over(elder, holder, earlier, run):
                self._judge_overlap(track, holder, earlier, run)

    def _is_left_over(self, elder: Track, holder: Track, earlier: RunTrack, run: RunTrack) -> bool:
        """Whether `earlier` was started under a lease that has been lost since."""
        if earlier.under == holder.partition:
            granted = holder.grants.get(run.epoch)
            return earlier.epoch < run.epoch and granted is not None and earlier.index < granted
        lease = elder.lease if earlier.under is None else None
        return lease is None or lease.epoch > earlier.epoch or lease.ended_index is not None

    def _overtook_elders(self, elder: Track, track: Track, run: RunTrack, offsets: tuple[int, ...], how: str) -> None:
        self._case.violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started {run} although "
            f"{name_offsets(offsets)} of partition {elder.partition}, of the same key and older, {how}",
            offsets,
            (*elder.log.where(offsets), run.index),
        )


def _may_repeat(last: RunTrack, offset: int) -> bool:
    """Whether `offset`, at or below `last`, may follow `last` in the same lane and epoch. The commits limit a rollback:
    messages that a commit reported as finished must not be repeated.
    """
    return last.result == "rollback" or (offset == last.offset and last.result in _REPEATED)


def _is_of_lost_claim(earlier: RunTrack, run: RunTrack) -> bool:
    """Whether `earlier` was started before its claim was lost to the claim of `run`, or to a claim before that."""
    claim = earlier.claim
    if claim is None or run.claim is None or earlier.epoch != run.epoch or earlier.consumer == run.consumer:
        return False
    return claim.lost_index is not None and earlier.index < claim.lost_index <= run.claim.index


def _let_on(track: Track, last: RunTrack, run: RunTrack) -> bool:
    """Whether `run` may follow the failed run `last`: `last` was skipped, or parked with a different key."""
    return last.offset in track.skipped or (last.offset in track.ever_parked and last.key != run.key)
