"""The order checker: judges a history against the contract.

    verdict = check(history, order="key")
    verdict.raise_if_bad()

Per subject and group, a *lane* is what must run one after the other: a partition, or one key of a partition.
The contract: within a lane, messages are started in log order, never overlap, and none is skipped. See `ViolationKind`
for what exactly is checked, and `history.py` for how the named weakenings are written down.

A parked message holds back the later ones of its key, and nothing else. Under order by partition it leaves its lane
when a commit has put it into the lot, and runs in the order of its key instead; still not beside another of its lane.

How: one pass to learn what the log holds, one pass over the events with a few dictionary look-ups each. Per lane it
remembers the run that is open, the last run of each epoch, and how far all is finished; per partition how far all is
finished and committed (`track.py`). These marks only move on (but for a reset), and of the finished set of a commit
only what is new is looked at, so the whole is linear in the length of the history.

Longer than a usual file, because the rules share one state and are read best beside each other.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from inturn.model.errors import InvalidInput
from inturn.model.slot import SlotSet, slot_of
from inturn.testing.history import (
    ClaimEnded,
    ClaimGranted,
    Committed,
    ConsumerCrashed,
    Event,
    GroupFiltered,
    Grown,
    HandlerEnd,
    HandlerStart,
    KeyResumed,
    KeySkipped,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)
from inturn.testing.track import Claim, Identity, LaneKey, Lease, Log, Run, Track
from inturn.testing.verdict import Evidence, OrderViolated, Verdict, Violation, ViolationKind, name_offsets

__all__ = ["Evidence", "OrderViolated", "StoredMessages", "Verdict", "Violation", "ViolationKind", "check"]

StoredMessages: TypeAlias = Mapping[tuple[str, int, int], str | None]

_FINISHED = frozenset({"success", "moved"})
_REPEATED = frozenset({"failed", "exception", "rollback"})


def check(
    history: Iterable[Event],
    *,
    subject: str | None = None,
    group: str | None = None,
    order: Literal["partition", "key", "none"],
    complete: bool = True,
    stored: StoredMessages | None = None,
) -> Verdict:
    """Judge a history; `subject` and `group` restrict it to these.

    order     what runs one after the other: a partition, or a key of a partition (messages without a key: nothing).
              With "none" there are no lanes: neither order, overlaps, skips nor attempts are judged.
    complete  all work was done when the history ended; only then can a message be lost.
    stored    the final content of the log, (subject, partition, offset) → message id. Without it, a message that
              was handled but never acknowledged is taken as stored: the acknowledgement may have got lost on its way.

    Where an id is None it is not compared. Groups are those that appear in the history, or the one given.
    """
    if order not in ("partition", "key", "none"):
        raise InvalidInput(f"check(order={order!r}): use 'partition', 'key' or 'none'")
    return _Check(list(history), subject, group, order, complete, stored).run()


class _Check:
    def __init__(
        self,
        events: list[Event],
        subject: str | None,
        group: str | None,
        order: str,
        complete: bool,
        stored: StoredMessages | None,
    ) -> None:
        self.events = events
        self.subject, self.group = subject, group
        self.by_key, self.has_lanes = order == "key", order != "none"
        self.complete, self.stored = complete, stored
        self.logs: dict[tuple[str, int], Log] = {}
        self.tracks: dict[tuple[str, str, int], Track | None] = {}  # None: not asked for
        self.descents: dict[str, list[tuple[int, int, SlotSet]]] = {}  # by subject: child, parent, slots
        self.elders: dict[tuple[str, int, bytes], tuple[int, ...]] = {}
        self.filters: dict[tuple[str, str], GroupFiltered] = {}  # by subject and group
        self.violations: list[Violation] = []
        self.started = self.finished = self.duplicates = self.grants = self.commits = self.leftover_overlaps = 0

    def run(self) -> Verdict:
        self._learn_log()
        act: dict[type[Event], Callable[[int, Any], None] | None] = {
            HandlerStart: self._start,
            HandlerEnd: self._end,
            Committed: self._commit,
            LeaseGranted: self._grant,
            LeaseEnded: self._lease_end,
            ClaimGranted: self._claim_grant,
            ClaimEnded: self._claim_end,
            OffsetsReset: self._reset,
            GroupFiltered: None,
            KeySkipped: self._key_skip,
            KeyResumed: self._key_resume,
            ConsumerCrashed: self._crash,
            SendAcknowledged: None,
            ProcessRestarted: None,
            Grown: None,
        }
        for index, event in enumerate(self.events):
            action = act[type(event)]
            if action is not None:
                action(index, event)
        if self.complete:
            self._find_lost()
        return Verdict(
            violations=self.violations,
            sent=sum(len(log.acknowledged) for log in self.logs.values()),
            started=self.started,
            finished=self.finished,
            duplicates=self.duplicates,
            lease_grants=self.grants,
            commits=self.commits,
            overlaps_after_lease_loss=self.leftover_overlaps,
            parked=sum(track.waiting_in_lots() for track in self._wanted_tracks()),
            skipped=sum(len(track.ever_skipped) for track in self._wanted_tracks()),
        )

    # What the log holds. Log order counts, not the time of the acknowledgement, so this is learnt beforehand.

    def _learn_log(self) -> None:
        logs = self.logs
        for index, event in enumerate(self.events):
            if type(event) is SendAcknowledged:
                log = logs.get((event.subject, event.partition)) or self._log(event.subject, event.partition)
                if event.offset in log.acknowledged:
                    self._acknowledged_again(log, index, event)
                else:
                    log.acknowledged[event.offset] = index
                    log.messages[event.offset] = event
            elif type(event) is GroupFiltered:
                self.filters[event.subject, event.group] = event
            elif type(event) is HandlerStart:
                log = logs.get((event.subject, event.partition)) or self._log(event.subject, event.partition)
                log.seen.setdefault(event.offset, index)
            elif type(event) is Grown:
                self.descents[event.subject] = [
                    (child, parent, SlotSet.from_bytes(slots)) for child, parent, slots, _ in event.descents
                ]
        for subject, partition, offset in self.stored or ():
            self._log(subject, partition).stored.add(offset)
        if self.subject is not None:
            self.logs = {place: log for place, log in logs.items() if place[0] == self.subject}
        for (subject, _), log in self.logs.items():
            log.settle(self.events, self.by_key or subject in self.descents, self.stored is not None)

    def _log(self, subject: str, partition: int) -> Log:
        return self.logs.setdefault((subject, partition), Log())

    def _acknowledged_again(self, log: Log, index: int, event: SendAcknowledged) -> None:
        before = log.messages[event.offset]
        if self.subject not in (None, event.subject) or not _differ(before, event):
            return
        self._violation(
            ViolationKind.UNEXPECTED,
            f"subject {event.subject!r}, partition {event.partition}: offset {event.offset} was acknowledged for "
            f"{_name(before)} and again for {_name(event)}",
            (event.subject, None, event.partition),
            (event.offset,),
            (log.acknowledged[event.offset], index),
        )

    def _track(self, subject: str, group: str, partition: int) -> Track | None:
        place = (subject, group, partition)
        if place not in self.tracks:
            wanted = self.subject in (None, subject) and self.group in (None, group)
            log = self.logs.get((subject, partition)) or Log()
            self.tracks[place] = track = Track(subject, group, partition, log) if wanted else None
            known = self.filters.get((subject, group))
            if track is not None and known is not None:
                track.unwanted = log.unwanted(known.tags) | frozenset(known.unwanted.get(partition, ()))
        return self.tracks[place]

    # Handlers.

    def _start(self, index: int, event: HandlerStart) -> None:
        place = (event.subject, event.group, event.partition)
        track = self.tracks.get(place) or self._track(*place)
        if track is None:
            return
        self.started += 1
        offset, epoch = event.offset, event.epoch
        message = track.log.messages.get(offset)
        if (
            message is None
            or message.message_id != event.message_id
            or message.key != event.key
            or self.stored is not None
        ):
            self._judge_identity(track, index, event, message)
        if offset in track.unwanted:
            self._unwanted_start(track, index, event)
        key = event.key if message is None else message.key
        lane_key: LaneKey = None
        if self.by_key:
            lane_key = offset if key is None else key
        lane = track.lanes.get(lane_key) or track.lane(lane_key, self.by_key)
        run = Run(index, offset, key, epoch, event.consumer, event.attempt, lane)
        holder = track  # of the lease
        if event.under is not None and event.under != event.partition:
            run.under = event.under
            holder = self._track(event.subject, event.group, event.under) or track

        if holder.claims:
            run.claim = holder.claim_of(event.consumer, epoch)
            self._judge_claim(holder, run)
        if epoch != holder.epoch_max and holder.epoch_max >= 0:
            self._stale_start(holder, run)
        is_newest = epoch >= holder.epoch_max
        if (offset < track.committed or offset in track.claimed) and is_newest and track.is_done(offset):
            self._repeated(track, run)
        if self.has_lanes:
            self._judge_lane(track, lane_key, run)
            if key is not None and event.subject in self.descents:
                self._judge_elders(track, holder, key, run)
        track.open.setdefault(event.consumer, {})[offset, epoch] = run

    def _judge_identity(self, track: Track, index: int, event: HandlerStart, message: Identity | None) -> None:
        kept = None if self.stored is None else self.stored.get((event.subject, event.partition, event.offset))
        known = track.log.where((event.offset,))
        if message is None:
            if not self.complete:
                return
            reason = "which is neither acknowledged nor in the log"
        elif _differ(message, event):
            how = "acknowledged" if type(message) is SendAcknowledged else "seen before"
            reason = f"which was {how} there as {_name(message)}"
        elif _ids_differ(event.message_id, kept):
            reason = f"but the log holds {kept!r} there"
        else:
            return
        about = f"{track}: {event.consumer!r} (epoch {event.epoch}) started offset {event.offset} with {_name(event)}"
        self._violation_on(track, ViolationKind.UNEXPECTED, f"{about}, {reason}", (event.offset,), (*known, index))

    def _unwanted_start(self, track: Track, index: int, event: HandlerStart) -> None:
        self._violation_on(
            track,
            ViolationKind.UNEXPECTED,
            f"{track}: {event.consumer!r} (epoch {event.epoch}) started offset {event.offset}, whose tags the group "
            "does not want",
            (event.offset,),
            (*track.log.where((event.offset,)), index),
        )

    def _stale_start(self, track: Track, run: Run) -> None:
        newest = track.grants[track.epoch_max]
        if run.epoch < track.epoch_max:
            reason = f"after epoch {track.epoch_max} had been granted to {self._owner(newest)!r}"
        else:
            reason = f"but the highest epoch granted is {track.epoch_max}"
        self._violation_on(
            track,
            ViolationKind.STALE_START,
            f"{track}: {run.consumer!r} started offset {run.offset}{_key(run)} in epoch {run.epoch}, {reason}",
            (run.offset,),
            (newest, run.index),
        )

    def _judge_claim(self, track: Track, run: Run) -> None:
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
        self._violation_on(
            track,
            ViolationKind.STALE_START,
            f"{track}: {run.consumer!r} started offset {run.offset}{_key(run)} in epoch {run.epoch}, {reason}",
            (run.offset,),
            (*evidence, run.index),
        )

    def _repeated(self, track: Track, run: Run) -> None:
        commit = track.claimed.get(run.offset, track.commit_index)
        said = (
            "it was committed as done" if run.offset in track.claimed else f"all below {track.committed} was committed"
        )
        self._violation_on(
            track,
            ViolationKind.REPEATED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{_key(run)}, although {said}",
            (run.offset,),
            (run.index,) if commit is None else (commit, run.index),
        )

    def _judge_lane(self, track: Track, lane_key: LaneKey, run: Run) -> None:
        lane, key = run.lane, run.key
        if lane.open is not None:
            self._judge_overlap(track, lane.open, run)
        lane.open = run
        self.leftover_overlaps += lane.leftovers
        term = run.term
        last_runs = track.last.get(term)
        if last_runs is None:
            last_runs = track.last[term] = {}
        if self.by_key or key not in track.lots:
            last = last_runs.get(lane_key)
            self._judge_order(track, last, last, run)
        else:  # under order by partition, a lot is a lane within the lane
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

    def _judge_elders(self, track: Track, holder: Track, key: bytes, run: Run) -> None:
        """What is older of the key may be in other partitions: all of it must be over, or wait in the lot."""
        for partition in self._elders_of(track.subject, track.partition, key):
            elder = self._track(track.subject, track.group, partition)
            assert elder is not None
            missing = elder.unfinished(key)
            if missing:
                self._overtook_elders(elder, track, run, tuple(missing), "had not been finished there")
            elif overtaken := elder.overtaken(key, sys.maxsize):
                self._overtook_elders(elder, track, run, tuple(overtaken), "waited in the parking lot")
            lane = elder.lanes.get(key if self.by_key else None)
            earlier = None if lane is None else lane.open
            if earlier is not None and earlier.key == key and not self._is_left_over(elder, holder, earlier, run):
                self._judge_overlap(track, earlier, run)

    def _elders_of(self, subject: str, partition: int, key: bytes) -> tuple[int, ...]:
        """The partitions that had the key before, oldest first."""
        found = self.elders.get((subject, partition, key))
        if found is None:
            slot, lineage = slot_of(key), [partition]
            for child, parent, slots in reversed(self.descents[subject]):
                if child == lineage[0] and slot in slots:
                    lineage.insert(0, parent)
            found = self.elders[subject, partition, key] = tuple(lineage[:-1])
        return found

    def _is_left_over(self, elder: Track, holder: Track, earlier: Run, run: Run) -> bool:
        """Was it started under a lease that has been lost since?"""
        if earlier.under == holder.partition:
            granted = holder.grants.get(run.epoch)
            return earlier.epoch < run.epoch and granted is not None and earlier.index < granted
        lease = elder.lease if earlier.under is None else None
        return lease is None or lease.epoch > earlier.epoch or lease.ended_index is not None

    def _overtook_elders(self, elder: Track, track: Track, run: Run, offsets: tuple[int, ...], how: str) -> None:
        self._violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{_key(run)} although "
            f"{name_offsets(offsets)} of partition {elder.partition}, of the same key and older, {how}",
            offsets,
            (*elder.log.where(offsets), run.index),
        )

    def _judge_overlap(self, track: Track, earlier: Run, run: Run) -> None:
        """`earlier` is still open. It is judged once; after that only its being left over is remembered."""
        granted = track.grants.get(run.epoch)
        is_of_lost_lease = earlier.epoch < run.epoch and granted is not None and earlier.index < granted
        if is_of_lost_lease or _is_of_lost_claim(earlier, run):
            earlier.leftover = True
            earlier.lane.leftovers += 1
            return
        self._violation_on(
            track,
            ViolationKind.OVERLAP,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{_key(run)} while "
            f"{earlier.consumer!r} (epoch {earlier.epoch}) was still running offset {earlier.offset} of the same lane",
            (earlier.offset, run.offset),
            (earlier.index, run.index),
        )

    def _judge_order(self, track: Track, last: Run | None, tried: Run | None, run: Run) -> None:
        """`last` is the last run of the lane; `tried` the one that must not be passed if it failed."""
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
        if position < len(offsets) and offsets[position] < offset and (self.by_key or offset not in parked):
            self._skipped(track, run)
        elif track.lots and run.key is not None and (overtaken := track.overtaken(run.key, offset)):
            self._overtook_parked(track, run, tuple(overtaken))
        elif (
            tried is not None and tried.offset < offset and tried.result in _REPEATED and not _let_on(track, tried, run)
        ):
            self._moved_on_after_failure(track, tried, run)

    def _out_of_order(self, track: Track, last: Run, run: Run) -> None:
        how = f"which ended in {last.result!r}" if last.result else "which had not ended"
        self._violation_on(
            track,
            ViolationKind.OUT_OF_ORDER,
            f"{track}: in epoch {run.epoch}, {run.consumer!r} started offset {run.offset}{_key(run)} after offset "
            f"{last.offset}, {how}",
            (last.offset, run.offset),
            (last.index, run.index),
        )

    def _skipped(self, track: Track, run: Run) -> None:
        lane = run.lane
        here = bisect_left(lane.offsets, run.offset, lane.position)
        missing = tuple(
            offset
            for offset in lane.offsets[lane.position : here]
            if offset not in track.finished and offset not in track.parked
        )
        lane.position = here  # each gap is reported once
        self._violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{_key(run)} although "
            f"{name_offsets(missing)} of the same lane had not been finished",
            missing,
            (*track.log.where(missing), run.index),
        )

    def _moved_on_after_failure(self, track: Track, last: Run, run: Run) -> None:
        self._violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{_key(run)} although "
            f"offset {last.offset} of the same lane ended in {last.result!r} and was not repeated",
            (last.offset,),
            (last.index, run.index),
        )

    def _overtook_parked(self, track: Track, run: Run, overtaken: tuple[int, ...]) -> None:
        self._violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{_key(run)} although "
            f"{name_offsets(overtaken)} of the same key waited in the parking lot",
            overtaken,
            (*track.log.where(overtaken), run.index),
        )

    def _judge_attempt(self, track: Track, run: Run, attempt: int) -> None:
        tried = track.attempts.setdefault(run.key, {})
        highest = tried.get(run.offset)
        if highest is None or highest.attempt is None:
            tried[run.offset] = run
            return
        has_failed = highest.term == run.term and highest.result in _REPEATED
        if attempt < highest.attempt or (attempt == highest.attempt and has_failed):
            how = f"which ended in {highest.result!r}" if highest.result else "which had not ended"
            self._violation_on(
                track,
                ViolationKind.ATTEMPT_LOST,
                f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{_key(run)} as attempt "
                f"{attempt}, after attempt {highest.attempt} in epoch {highest.epoch}, {how}",
                (run.offset,),
                (highest.index, run.index),
            )
        if attempt >= highest.attempt:
            tried[run.offset] = run

    def _end(self, index: int, event: HandlerEnd) -> None:
        place = (event.subject, event.group, event.partition)
        track = self.tracks.get(place) or self._track(*place)
        if track is None:
            return
        offset = event.offset
        running = track.open.get(event.consumer)
        run = None if running is None else running.pop((offset, event.epoch), None)
        if run is None:  # its consumer crashed, or it never started
            return
        run.close(event.result)
        if event.result not in _FINISHED:
            if event.result == "rollback" and track.lots and not self.by_key:
                last_runs = track.last.get(run.term, {})
                if last_runs.get(None) is run:  # what the lane goes back over may be parked then, and run again
                    track.last[run.term] = {None: run}
            return
        self.finished += 1
        if offset in track.ever_finished:
            self.duplicates += 1
        track.finish(run, index)

    def _crash(self, index: int, event: ConsumerCrashed) -> None:
        for track in self._wanted_tracks():
            for run in track.open.pop(event.consumer, {}).values():
                run.close("crashed")

    # Leases, commits, resets.

    def _grant(self, index: int, event: LeaseGranted) -> None:
        track = self._track(event.subject, event.group, event.partition)
        if track is None:
            return
        self.grants += 1
        before = track.lease
        if before is not None and before.ended_index is None:
            self._violation_on(
                track,
                ViolationKind.TWO_OWNERS,
                f"{track}: granted to {event.owner!r} (epoch {event.epoch}) while {before.owner!r} "
                f"(epoch {before.epoch}) still held it",
                (),
                (before.index, index),
            )
        if event.epoch <= track.epoch_max:
            self._violation_on(
                track,
                ViolationKind.EPOCH_NOT_RAISED,
                f"{track}: granted to {event.owner!r} with epoch {event.epoch}, "
                f"although epoch {track.epoch_max} had been granted before",
                (),
                (track.grants[track.epoch_max], index),
            )
        track.lease = Lease(index, event.owner, event.epoch)
        track.grants[event.epoch] = index
        track.epoch_max = max(track.epoch_max, event.epoch)

    def _lease_end(self, index: int, event: LeaseEnded) -> None:
        track = self._track(event.subject, event.group, event.partition)
        lease = None if track is None else track.lease
        if lease is not None and (lease.owner, lease.epoch) == (event.owner, event.epoch) and lease.ended_index is None:
            lease.ended_index = index

    def _claim_grant(self, index: int, event: ClaimGranted) -> None:
        track = self._track(event.subject, event.group, event.partition)
        if track is not None:
            track.claim(Claim(index, event.claimant, event.epoch, SlotSet.from_bytes(event.slots)))

    def _claim_end(self, index: int, event: ClaimEnded) -> None:
        track = self._track(event.subject, event.group, event.partition)
        claim = None if track is None else track.claim_of(event.claimant, event.epoch)
        if claim is not None and claim.ended_index is None:
            claim.ended_index = index

    def _commit(self, index: int, event: Committed) -> None:
        track = self._track(event.subject, event.group, event.partition)
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
            reason = f"after epoch {track.epoch_max} had been granted to {self._owner(newest)!r}"
            evidence = (newest, index)
        elif (lease.owner, lease.epoch) != (event.owner, event.epoch):
            reason, evidence = f"but the lease is {lease.owner!r}'s, epoch {lease.epoch}", (lease.index, index)
        elif lease.ended_index is not None:
            reason, evidence = "after that lease had ended", (lease.index, lease.ended_index, index)
        else:
            return
        self._violation_on(
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
        """Commits tell all that is finished, again and again: each message is judged once."""
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
        self._violation_on(
            track,
            ViolationKind.PREMATURE_COMMIT,
            f"{track}: {event.owner!r} (epoch {event.epoch}) {how} although {name_offsets(missing)} "
            "had not been finished" + (" as far as it could know" if missing[0] in track.finished else ""),
            tuple(missing),
            (*track.log.where(missing), *track.finishes(missing), index),
        )

    # Parking lots, and what operators ask.

    def _park(self, event: Committed) -> None:
        passed_through = set(event.unparked)
        for partition, offset in event.parked:
            track = self._track(event.subject, event.group, partition)
            if track is not None and (partition, offset) not in passed_through:
                track.park(offset, event.epoch if partition == event.partition else -1)

    def _unpark(self, index: int, event: Committed) -> None:
        for partition, offset in event.unparked:
            track = self._track(event.subject, event.group, partition)
            if track is None or track.is_done(offset):
                continue
            # Epochs of another partition tell nothing about what the committer could know.
            granted = track.grants.get(event.epoch, index) if partition == event.partition else index
            if not _is_over(track, offset, event, granted):
                how = f"took offset {offset} out of the parking lot"
                self._premature(track, index, event, how, [offset])
            track.unpark(offset, index)

    def _key_skip(self, index: int, event: KeySkipped) -> None:
        track = self._track(event.subject, event.group, event.partition)
        if track is not None:
            track.skip(event.offset, index)

    def _key_resume(self, index: int, event: KeyResumed) -> None:
        elders: tuple[int, ...] = ()
        if event.key is not None and event.subject in self.descents:
            elders = self._elders_of(event.subject, event.partition, event.key)
        for partition in (*elders, event.partition):
            track = self._track(event.subject, event.group, partition)
            if track is not None:
                track.attempts.pop(event.key, None)

    def _reset(self, index: int, event: OffsetsReset) -> None:
        for partition, offset in event.offsets.items():
            track = self._track(event.subject, event.group, partition)
            if track is not None:
                track.reset(offset)

    # The end.

    def _find_lost(self) -> None:
        for (subject, partition), log in self.logs.items():
            gone = self._gone_from_log(subject, partition, log)
            for group in sorted(self._groups_of(subject)):
                self._lost_by_group(subject, group, partition, log, gone)

    def _gone_from_log(self, subject: str, partition: int, log: Log) -> set[int]:
        if self.stored is None:
            return set()
        gone = sorted(offset for offset in log.acknowledged if not self._in_log(subject, partition, offset, log))
        if gone:
            self._violation(
                ViolationKind.LOST,
                f"subject {subject!r}, partition {partition}: {name_offsets(gone)} acknowledged, but the log does not "
                f"hold {'it' if len(gone) == 1 else 'them'}",
                (subject, None, partition),
                tuple(gone),
                log.where(gone),
            )
        return set(gone)

    def _in_log(self, subject: str, partition: int, offset: int, log: Log) -> bool:
        assert self.stored is not None
        place = (subject, partition, offset)
        return place in self.stored and not _ids_differ(log.messages[offset].message_id, self.stored[place])

    def _groups_of(self, subject: str) -> set[str]:
        groups = {track.group for track in self._wanted_tracks() if track.subject == subject}
        if self.group is not None and (self.subject is not None or not any(self._wanted_tracks())):
            groups.add(self.group)
        return groups

    def _lost_by_group(self, subject: str, group: str, partition: int, log: Log, gone: set[int]) -> None:
        track = self._track(subject, group, partition)
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
            self._violation_on(
                track,
                ViolationKind.LOST,
                f"{track}: {name_offsets(lost)} acknowledged, but never finished "
                f"({len(lost)} of {len(log.acknowledged)})",
                tuple(lost),
                track.log.where(lost),
            )

    # Words and evidence.

    def _wanted_tracks(self) -> Iterator[Track]:
        return (track for track in self.tracks.values() if track is not None)

    def _owner(self, index: int) -> str:
        event = self.events[index]
        assert isinstance(event, LeaseGranted)
        return event.owner

    def _violation_on(
        self, track: Track, kind: ViolationKind, message: str, offsets: tuple[int, ...], indexes: tuple[int, ...]
    ) -> None:
        self._violation(kind, message, (track.subject, track.group, track.partition), offsets, indexes)

    def _violation(
        self,
        kind: ViolationKind,
        message: str,
        place: tuple[str, str | None, int],
        offsets: tuple[int, ...],
        indexes: tuple[int, ...],
    ) -> None:
        evidence = tuple(Evidence(index, self.events[index]) for index in sorted(set(indexes)))
        subject, group, partition = place
        self.violations.append(Violation(kind, message, subject, group, partition, offsets, evidence))


def _may_repeat(last: Run, offset: int) -> bool:
    """May `offset`, which is not above it, follow `last` in the same lane and epoch? How far back a rollback may go is
    judged by the commits: what they said is done must not be repeated.
    """
    return last.result == "rollback" or (offset == last.offset and last.result in _REPEATED)


def _is_of_lost_claim(earlier: Run, run: Run) -> bool:
    """Was `earlier` started before its claim was lost to another, under whom, or somebody after it, this one runs?"""
    claim = earlier.claim
    if claim is None or run.claim is None or earlier.epoch != run.epoch or earlier.consumer == run.consumer:
        return False
    return claim.lost_index is not None and earlier.index < claim.lost_index <= run.claim.index


def _let_on(track: Track, last: Run, run: Run) -> bool:
    """May `run` come after `last`, which failed, because that was given up, or parked without holding back this key?"""
    return last.offset in track.skipped or (last.offset in track.ever_parked and last.key != run.key)


def _is_over(track: Track, offset: int, commit: Committed, granted: int) -> bool:
    """Had the message been finished or given up, as far as the committer, whose lease is of `granted`, could know?"""
    finished = track.finished.get(offset)
    if finished is None:
        return False
    return finished <= granted or offset in track.skipped or _known_to(commit, track.finished_by[offset])


def _known_to(commit: Committed, finisher: Run) -> bool:
    return finisher.epoch == commit.epoch or finisher.consumer == commit.owner


def _ids_differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _differ(one: Identity, other: Identity) -> bool:
    return one.key != other.key or _ids_differ(one.message_id, other.message_id)


def _name(event: Identity) -> str:
    return f"message {event.message_id!r} of key {event.key!r}"


def _key(run: Run) -> str:
    return "" if run.key is None else f" (key {run.key!r})"
