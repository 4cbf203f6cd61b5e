"""The judge of handlers: which messages a consumer may start, and the ends of handlers."""

from __future__ import annotations

from inturn.model.routing import slot_of
from inturn.testing.history import ConsumerCrashed, HandlerEnd, HandlerStart, SendAcknowledged
from inturn.testing.judges.case import Case
from inturn.testing.judges.lanes import LaneJudge
from inturn.testing.track import Identity, LaneKey, RunTrack, Track, differ, ids_differ, name_message
from inturn.testing.verdict import ViolationKind

_FINISHED = frozenset({"success", "moved"})


class HandlerJudge:
    def __init__(self, case: Case, lanes: LaneJudge) -> None:
        self._case, self._lanes = case, lanes
        self.started = self.finished = self.duplicates = 0

    def start(self, index: int, event: HandlerStart) -> None:
        place = (event.subject, event.group, event.partition)
        track = self._case.tracks.get(place) or self._case.track(*place)
        if track is None:
            return
        self.started += 1
        offset, epoch = event.offset, event.epoch
        message = track.log.messages.get(offset)
        if (
            message is None
            or message.message_id != event.message_id
            or message.key != event.key
            or self._case.stored is not None
        ):
            self._judge_identity(track, index, event, message)
        if offset in track.unwanted:
            self._unwanted_start(track, index, event)
        key = event.key if message is None else message.key
        lane_key: LaneKey = None
        if self._case.by_key:
            lane_key = offset if key is None else key
        lane = track.lanes.get(lane_key) or track.lane(lane_key, self._case.by_key)
        # By position: made for every message.
        run = RunTrack(index, offset, key, epoch, event.consumer, event.attempt, lane)
        holder = track  # of the lease
        if event.under is not None and event.under != event.partition:
            run.under = event.under
            holder = self._case.track(event.subject, event.group, event.under) or track

        if holder.claims:
            run.claim = holder.claim_of(event.consumer, epoch)
            self._judge_claim(holder, run)
        if epoch != holder.epoch_max and holder.epoch_max >= 0:
            self._stale_start(holder, run)
        is_newest = epoch >= holder.epoch_max
        if (offset < track.committed or offset in track.claimed) and is_newest and track.is_done(offset):
            self._repeated(track, run)
        if self._case.has_lanes:
            self._lanes.judge(track, holder, lane_key, run)
            if key is not None and event.subject in self._case.descents:
                self._lanes.judge_elders(track, holder, key, run)
        track.open.setdefault(event.consumer, {})[offset, epoch] = run

    def _judge_identity(self, track: Track, index: int, event: HandlerStart, message: Identity | None) -> None:
        stored = self._case.stored
        kept = None if stored is None else stored.get((event.subject, event.partition, event.offset))
        known = track.log.where((event.offset,))
        if message is None:
            if not self._case.complete:
                return
            reason = "which is neither acknowledged nor in the log"
        elif differ(message, event):
            how = "acknowledged" if type(message) is SendAcknowledged else "seen before"
            reason = f"which was {how} there as {name_message(message)}"
        elif ids_differ(event.message_id, kept):
            reason = f"but the log holds {kept!r} there"
        else:
            return
        started = f"{event.consumer!r} (epoch {event.epoch}) started offset {event.offset}"
        about = f"{track}: {started} with {name_message(event)}"
        self._case.violation_on(track, ViolationKind.UNEXPECTED, f"{about}, {reason}", (event.offset,), (*known, index))

    def _unwanted_start(self, track: Track, index: int, event: HandlerStart) -> None:
        self._case.violation_on(
            track,
            ViolationKind.UNEXPECTED,
            f"{track}: {event.consumer!r} (epoch {event.epoch}) started offset {event.offset}, whose tags the group "
            "does not want",
            (event.offset,),
            (*track.log.where((event.offset,)), index),
        )

    def _stale_start(self, track: Track, run: RunTrack) -> None:
        newest = track.grants[track.epoch_max]
        if run.epoch < track.epoch_max:
            reason = f"after epoch {track.epoch_max} had been granted to {self._case.owner(newest)!r}"
        else:
            reason = f"but the highest epoch granted is {track.epoch_max}"
        self._case.violation_on(
            track,
            ViolationKind.STALE_START,
            f"{track}: {run.consumer!r} started {run} in epoch {run.epoch}, {reason}",
            (run.offset,),
            (newest, run.index),
        )

    def _judge_claim(self, track: Track, run: RunTrack) -> None:
        claim = run.claim
        evidence: tuple[int, ...]
        if claim is None:
            slot = None if run.key is None else slot_of(run.key)
            others = (one for one in track.claims.values() if one.epoch == run.epoch and one.ended_index is None)
            other = next((one for one in others if slot is None or slot in one.slots), None)
            if other is None:
                return
            reason, evidence = f"which {other.claimant!r} had claimed", (other.index,)
        elif claim.ended_index is not None:
            how = "given back" if claim.lost_index is None else "lost to another"
            reason, evidence = f"after its claim had been {how}", (claim.index, claim.ended_index)
        elif run.key is not None and slot_of(run.key) not in claim.slots:
            reason, evidence = f"of slot {slot_of(run.key)}, which it had not claimed", (claim.index,)
        else:
            return
        self._case.violation_on(
            track,
            ViolationKind.STALE_START,
            f"{track}: {run.consumer!r} started {run} in epoch {run.epoch}, {reason}",
            (run.offset,),
            (*evidence, run.index),
        )

    def _repeated(self, track: Track, run: RunTrack) -> None:
        commit = track.claimed.get(run.offset, track.commit_index)
        said = (
            "it was committed as done" if run.offset in track.claimed else f"all below {track.committed} was committed"
        )
        self._case.violation_on(
            track,
            ViolationKind.REPEATED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started {run}, although {said}",
            (run.offset,),
            (run.index,) if commit is None else (commit, run.index),
        )

    def end(self, index: int, event: HandlerEnd) -> None:
        place = (event.subject, event.group, event.partition)
        track = self._case.tracks.get(place) or self._case.track(*place)
        if track is None:
            return
        offset = event.offset
        running = track.open.get(event.consumer)
        run = None if running is None else running.pop((offset, event.epoch), None)
        if run is None:  # the consumer crashed, or the run never started
            return
        run.close(event.result)
        if event.result not in _FINISHED:
            if event.result == "rollback" and track.lots and not self._case.by_key:
                last_runs = track.last.get(run.term, {})
                if last_runs.get(None) is run:  # rolled back messages may be parked and run again
                    track.last[run.term] = {None: run}
            return
        self.finished += 1
        if offset in track.ever_finished:
            self.duplicates += 1
        track.finish(run, index)

    def crash(self, index: int, event: ConsumerCrashed) -> None:
        for track in self._case.wanted_tracks():
            for run in track.open.pop(event.consumer, {}).values():
                run.close("crashed")
