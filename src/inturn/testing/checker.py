"""The order checker: judges a history against the contract.

    verdict = check(history, order="key")
    verdict.raise_if_bad()

Per subject and group, a *lane* is what must run one after the other: a partition, or one key of a partition.
The contract: within a lane, messages are started in log order, never overlap, and none is skipped. See `ViolationKind`
for what exactly is checked, and `history.py` for how the named weakenings are written down.

How: one pass to learn what the log holds, one pass over the events with a few dictionary look-ups each. Per lane it
remembers the run that is open, the last run of each epoch, and how far all is finished; per partition how far all is
finished and committed. These marks only move on (but for a reset), so the whole is linear in the number of events.

Longer than a usual file, because the kinds share one state and are read best beside each other.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from inturn.model.errors import InturnError, InvalidInput
from inturn.testing.history import (
    Committed,
    ConsumerCrashed,
    Event,
    HandlerEnd,
    HandlerStart,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)

StoredMessages: TypeAlias = Mapping[tuple[str, int, int], str | None]
_LaneKey: TypeAlias = bytes | int | None
_Identity: TypeAlias = SendAcknowledged | HandlerStart

_FINISHED = frozenset({"success", "moved"})
_REPEATED = frozenset({"failed", "exception", "rollback"})
_STR_VIOLATIONS_MAX = 20
_STR_OFFSETS_MAX = 8


class ViolationKind(enum.StrEnum):
    LOST = "lost"
    """Acknowledged, but never finished by this group; or acknowledged, but not in the log."""
    UNEXPECTED = "unexpected"
    """A handler got a message that is not the one stored there: an offset used twice, or out of nowhere."""
    OUT_OF_ORDER = "out of order"
    """A start at or below the last start of its lane and epoch, or below what had been committed."""
    OVERLAP = "overlap"
    """Two handlers ran in one lane at once, and not because the first was left over from a lost lease."""
    STALE_START = "stale start"
    """A handler started in an epoch when a higher one had been granted, or in one that was never granted."""
    SKIPPED = "skipped"
    """A start although an earlier message of the lane was not finished, or its last try in this epoch failed."""
    PREMATURE_COMMIT = "premature commit"
    """A commit past a message that nobody had finished, or only a handler that the committer cannot know of:
    one of another epoch, which ended after the committer's lease was granted."""
    STALE_COMMIT = "stale commit"
    """A commit was accepted from somebody who did not hold the lease at that time."""
    TWO_OWNERS = "two owners"
    """A lease was granted while the one before had not ended."""
    EPOCH_NOT_RAISED = "epoch not raised"
    """A lease was granted with an epoch that is not above all earlier ones."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """An event and its place in the history."""

    index: int
    event: Event

    def __str__(self) -> str:
        return f"#{self.index} {self.event}"


@dataclass(frozen=True, slots=True)
class Violation:
    """`group` is None where the log itself is at fault. `evidence` is in the order of the history."""

    kind: ViolationKind
    message: str
    subject: str
    group: str | None
    partition: int
    offsets: tuple[int, ...]
    evidence: tuple[Evidence, ...]

    def __str__(self) -> str:
        lines = [f"{self.kind.upper()}: {self.message}", *(f"    {item}" for item in self.evidence)]
        return "\n".join(lines)


class OrderViolated(InturnError, AssertionError):
    """Raised by `Verdict.raise_if_bad`; the message is the verdict's text."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(str(verdict))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker found. The counts are those of the chosen subject and group; look at them too: an empty
    history breaks no order.

    `finished` counts handler runs that ended in "success" or "moved", `duplicates` those among them that finished a
    message which this group had finished before. `overlaps_after_lease_loss` counts pairs of runs.
    """

    violations: list[Violation]
    sent: int
    started: int
    finished: int
    duplicates: int
    lease_grants: int
    commits: int
    overlaps_after_lease_loss: int

    @property
    def ok(self) -> bool:
        return not self.violations

    def raise_if_bad(self) -> None:
        """Raise `OrderViolated` unless the order was kept."""
        if self.violations:
            raise OrderViolated(self)

    def kinds(self) -> set[ViolationKind]:
        return {violation.kind for violation in self.violations}

    def __str__(self) -> str:
        counts = (
            f"{self.sent} sent, {self.started} started, {self.finished} finished "
            f"({_count(self.duplicates, 'duplicate')}), {_count(self.lease_grants, 'lease grant')}, "
            f"{_count(self.commits, 'commit')}, {_count(self.overlaps_after_lease_loss, 'overlap')} after lease loss"
        )
        if self.ok:
            return f"order kept: {counts}"
        shown = [str(violation) for violation in self.violations[:_STR_VIOLATIONS_MAX]]
        more = len(self.violations) - len(shown)
        tail = [f"... and {_count(more, 'more violation')}"] if more else []
        return "\n".join([f"order broken, {_count(len(self.violations), 'violation')}: {counts}", *shown, *tail])


def check(
    history: Iterable[Event],
    *,
    subject: str | None = None,
    group: str | None = None,
    order: Literal["partition", "key"],
    complete: bool = True,
    stored: StoredMessages | None = None,
) -> Verdict:
    """Judge a history; `subject` and `group` restrict it to these.

    order     what runs one after the other: a partition, or a key of a partition (messages without a key: nothing).
    complete  all work was done when the history ended; only then can a message be lost.
    stored    the final content of the log, (subject, partition, offset) → message id. Without it, a message that
              was handled but never acknowledged is taken as stored: the acknowledgement may have got lost on its way.

    Where an id is None it is not compared. Groups are those that appear in the history, or the one given.
    """
    if order not in ("partition", "key"):
        raise InvalidInput(f"check(order={order!r}): use 'partition' or 'key'")
    return _Check(list(history), subject, group, order == "key", complete, stored).run()


class _Log:
    """What one partition holds, as far as it is known: acknowledged, in `stored`, or seen by a handler."""

    __slots__ = ("acknowledged", "by_key", "messages", "offsets", "seen", "stored")

    def __init__(self) -> None:
        self.acknowledged: dict[int, int] = {}  # offset → index of the first such event
        self.seen: dict[int, int] = {}  # the same of handler starts
        self.stored: set[int] = set()
        self.messages: dict[int, _Identity] = {}
        self.offsets: list[int] = []
        self.by_key: dict[bytes, list[int]] = {}

    def settle(self, events: list[Event], by_key: bool, has_stored: bool) -> None:
        """All was learnt: put it in order."""
        for offset, index in self.seen.items():
            event = events[index]
            if offset not in self.messages and (not has_stored or offset in self.stored):
                assert type(event) is HandlerStart
                self.messages[offset] = event
        self.offsets = sorted(self.messages.keys() | self.stored)
        if by_key:
            for offset in self.offsets:
                message = self.messages.get(offset)
                if message is not None and message.key is not None:
                    self.by_key.setdefault(message.key, []).append(offset)

    def where(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """Indexes of the events from which these messages are known, of the first few of them."""
        found = (self.acknowledged.get(offset, self.seen.get(offset)) for offset in offsets[:_STR_OFFSETS_MAX])
        return tuple(index for index in found if index is not None)


class _Lane:
    """`position` is how far, in `offsets`, all messages are finished."""

    __slots__ = ("leftovers", "offsets", "open", "position")

    def __init__(self, offsets: list[int], position: int) -> None:
        self.offsets = offsets
        self.position = position
        self.open: _Run | None = None  # the latest one; those before it have been judged
        self.leftovers = 0  # runs of lost leases that are still open


class _Run(msgspec.Struct):
    index: int
    offset: int
    epoch: int
    consumer: str
    lane: _Lane
    result: str = ""
    leftover: bool = False


class _Lease(msgspec.Struct):
    index: int
    owner: str
    epoch: int
    ended_index: int | None = None


class _Track:
    """One group on one partition."""

    __slots__ = (
        *("subject", "group", "partition", "log", "lanes", "open", "last", "finished", "finished_by", "ever_finished"),
        *("floor", "committed", "commit_index", "position", "lease", "grants", "epoch_max"),
    )

    def __init__(self, subject: str, group: str, partition: int, log: _Log) -> None:
        self.subject, self.group, self.partition, self.log = subject, group, partition, log
        self.lanes: dict[_LaneKey, _Lane] = {}
        self.open: dict[str, dict[tuple[int, int], _Run]] = {}  # by consumer; by offset and epoch
        self.last: dict[int, dict[_LaneKey, _Run]] = {}  # by epoch, the last run of each lane
        self.finished: dict[int, int] = {}  # offset → index of its first finish since the last reset
        self.finished_by: dict[int, _Run] = {}  # offset → the finishing run of the highest epoch since then
        self.ever_finished: set[int] = set()
        self.floor = 0  # the last reset went here
        self.committed = 0
        self.commit_index: int | None = None
        self.position = 0  # in log.offsets: how far commits have been judged
        self.lease: _Lease | None = None
        self.grants: dict[int, int] = {}  # epoch → index
        self.epoch_max = -1

    def __str__(self) -> str:
        return f"subject {self.subject!r}, group {self.group!r}, partition {self.partition}"

    def lane(self, key: _LaneKey, by_key: bool) -> _Lane:
        lane = self.lanes.get(key)
        if lane is None:
            offsets = self.log.offsets
            if by_key:
                offsets = self.log.by_key.get(key, []) if isinstance(key, bytes) else []
            lane = self.lanes[key] = _Lane(offsets, bisect_left(offsets, self.floor))
        return lane

    def finishes(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """Indexes of the first ends that finished these messages, of the first few of them."""
        return tuple(self.finished[offset] for offset in offsets[:_STR_OFFSETS_MAX] if offset in self.finished)

    def reset(self, offset: int) -> None:
        self.floor = self.committed = offset
        self.commit_index = None
        self.finished, self.finished_by, self.last = {}, {}, {}
        self.position = bisect_left(self.log.offsets, offset)
        for lane in self.lanes.values():
            lane.position = bisect_left(lane.offsets, offset)


class _Check:
    def __init__(
        self,
        events: list[Event],
        subject: str | None,
        group: str | None,
        by_key: bool,
        complete: bool,
        stored: StoredMessages | None,
    ) -> None:
        self.events = events
        self.subject, self.group = subject, group
        self.by_key, self.complete, self.stored = by_key, complete, stored
        self.logs: dict[tuple[str, int], _Log] = {}
        self.tracks: dict[tuple[str, str, int], _Track | None] = {}  # None: not asked for
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
            OffsetsReset: self._reset,
            ConsumerCrashed: self._crash,
            SendAcknowledged: None,
            ProcessRestarted: None,
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
            elif type(event) is HandlerStart:
                log = logs.get((event.subject, event.partition)) or self._log(event.subject, event.partition)
                log.seen.setdefault(event.offset, index)
        for subject, partition, offset in self.stored or ():
            self._log(subject, partition).stored.add(offset)
        if self.subject is not None:
            self.logs = {place: log for place, log in logs.items() if place[0] == self.subject}
        for log in self.logs.values():
            log.settle(self.events, self.by_key, self.stored is not None)

    def _log(self, subject: str, partition: int) -> _Log:
        return self.logs.setdefault((subject, partition), _Log())

    def _acknowledged_again(self, log: _Log, index: int, event: SendAcknowledged) -> None:
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

    def _track(self, subject: str, group: str, partition: int) -> _Track | None:
        place = (subject, group, partition)
        if place not in self.tracks:
            wanted = self.subject in (None, subject) and self.group in (None, group)
            log = self.logs.get((subject, partition)) or _Log()
            self.tracks[place] = _Track(subject, group, partition, log) if wanted else None
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
        lane_key: _LaneKey = None
        if self.by_key:
            key = event.key if message is None else message.key
            lane_key = offset if key is None else key
        lane = track.lanes.get(lane_key) or track.lane(lane_key, self.by_key)
        run = _Run(index, offset, epoch, event.consumer, lane)

        if epoch != track.epoch_max and track.epoch_max >= 0:
            self._stale_start(track, run)
        if lane.open is not None:
            self._judge_overlap(track, lane.open, run)
        self.leftover_overlaps += lane.leftovers
        last_runs = track.last.get(epoch)
        if last_runs is None:
            last_runs = track.last[epoch] = {}
        self._judge_order(track, last_runs.get(lane_key), run)
        last_runs[lane_key] = run
        lane.open = run
        track.open.setdefault(event.consumer, {})[offset, epoch] = run

    def _judge_identity(self, track: _Track, index: int, event: HandlerStart, message: _Identity | None) -> None:
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

    def _stale_start(self, track: _Track, run: _Run) -> None:
        newest = track.grants[track.epoch_max]
        if run.epoch < track.epoch_max:
            reason = f"after epoch {track.epoch_max} had been granted to {self._owner(newest)!r}"
        else:
            reason = f"but the highest epoch granted is {track.epoch_max}"
        self._violation_on(
            track,
            ViolationKind.STALE_START,
            f"{track}: {run.consumer!r} started offset {run.offset}{self._key(run)} in epoch {run.epoch}, {reason}",
            (run.offset,),
            (newest, run.index),
        )

    def _judge_overlap(self, track: _Track, earlier: _Run, run: _Run) -> None:
        """`earlier` is still open. It is judged once; after that only its being left over is remembered."""
        granted = track.grants.get(run.epoch)
        if earlier.epoch < run.epoch and granted is not None and earlier.index < granted:
            earlier.leftover = True
            earlier.lane.leftovers += 1
            return
        self._violation_on(
            track,
            ViolationKind.OVERLAP,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{self._key(run)} while "
            f"{earlier.consumer!r} (epoch {earlier.epoch}) was still running offset {earlier.offset} of the same lane",
            (earlier.offset, run.offset),
            (earlier.index, run.index),
        )

    def _judge_order(self, track: _Track, last: _Run | None, run: _Run) -> None:
        offset = run.offset
        lane = run.lane
        gave_up = False
        if last is None:
            if offset < track.committed and run.epoch >= track.epoch_max:
                self._started_below_commit(track, run)
        elif offset > last.offset:
            gave_up = last.result in _REPEATED
        elif not _may_repeat(last, offset, track.committed):
            self._out_of_order(track, last, run)

        position, offsets = lane.position, lane.offsets
        while position < len(offsets) and offsets[position] < offset and offsets[position] in track.finished:
            position += 1
        lane.position = position
        if position < len(offsets) and offsets[position] < offset:
            self._skipped(track, run)
        elif gave_up and last is not None:
            self._moved_on_after_failure(track, last, run)

    def _started_below_commit(self, track: _Track, run: _Run) -> None:
        commits = () if track.commit_index is None else (track.commit_index,)
        self._violation_on(
            track,
            ViolationKind.OUT_OF_ORDER,
            f"{track}: {run.consumer!r} began its lane in epoch {run.epoch} at offset {run.offset}{self._key(run)}, "
            f"although all below {track.committed} was committed",
            (run.offset,),
            (*commits, run.index),
        )

    def _out_of_order(self, track: _Track, last: _Run, run: _Run) -> None:
        how = f"which ended in {last.result!r}" if last.result else "which had not ended"
        bound = f" (a rollback goes back to {track.committed} at most)" if last.result == "rollback" else ""
        self._violation_on(
            track,
            ViolationKind.OUT_OF_ORDER,
            f"{track}: in epoch {run.epoch}, {run.consumer!r} started offset {run.offset}{self._key(run)} after offset "
            f"{last.offset}, {how}{bound}",
            (last.offset, run.offset),
            (last.index, run.index),
        )

    def _skipped(self, track: _Track, run: _Run) -> None:
        lane = run.lane
        here = bisect_left(lane.offsets, run.offset, lane.position)
        missing = tuple(offset for offset in lane.offsets[lane.position : here] if offset not in track.finished)
        lane.position = here  # each gap is reported once
        self._violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{self._key(run)} although "
            f"{_offsets(missing)} of the same lane had not been finished",
            missing,
            (*track.log.where(missing), run.index),
        )

    def _moved_on_after_failure(self, track: _Track, last: _Run, run: _Run) -> None:
        self._violation_on(
            track,
            ViolationKind.SKIPPED,
            f"{track}: {run.consumer!r} (epoch {run.epoch}) started offset {run.offset}{self._key(run)} although "
            f"offset {last.offset} of the same lane ended in {last.result!r} and was not repeated",
            (last.offset,),
            (last.index, run.index),
        )

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
        _close(run, event.result)
        if event.result not in _FINISHED:
            return
        self.finished += 1
        if offset in track.ever_finished:
            self.duplicates += 1
        track.ever_finished.add(offset)
        track.finished.setdefault(offset, index)
        before = track.finished_by.get(offset)
        if before is None or before.epoch <= run.epoch:
            track.finished_by[offset] = run

    def _crash(self, index: int, event: ConsumerCrashed) -> None:
        for track in self._wanted_tracks():
            for run in track.open.pop(event.consumer, {}).values():
                _close(run, "crashed")

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
        track.lease = _Lease(index, event.owner, event.epoch)
        track.grants[event.epoch] = index
        track.epoch_max = max(track.epoch_max, event.epoch)

    def _lease_end(self, index: int, event: LeaseEnded) -> None:
        track = self._track(event.subject, event.group, event.partition)
        lease = None if track is None else track.lease
        if lease is not None and (lease.owner, lease.epoch) == (event.owner, event.epoch) and lease.ended_index is None:
            lease.ended_index = index

    def _commit(self, index: int, event: Committed) -> None:
        track = self._track(event.subject, event.group, event.partition)
        if track is None:
            return
        self.commits += 1
        self._judge_committer(track, index, event)
        self._judge_commit(track, index, event)
        if event.offset > track.committed:
            track.committed, track.commit_index = event.offset, index

    def _judge_committer(self, track: _Track, index: int, event: Committed) -> None:
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

    def _judge_commit(self, track: _Track, index: int, event: Committed) -> None:
        offsets, position = track.log.offsets, track.position
        granted = track.grants.get(event.epoch, index)
        missing: list[int] = []
        while position < len(offsets) and offsets[position] < event.offset:
            offset = offsets[position]
            position += 1
            finished = track.finished.get(offset)
            if finished is None or (finished > granted and not _known_to(event, track.finished_by[offset])):
                missing.append(offset)
        track.position = position
        if missing:
            self._violation_on(
                track,
                ViolationKind.PREMATURE_COMMIT,
                f"{track}: {event.owner!r} (epoch {event.epoch}) committed to offset {event.offset} although "
                f"{_offsets(missing)} had not been finished"
                + (" as far as it could know" if missing[0] in track.finished else ""),
                tuple(missing),
                (*track.log.where(missing), *track.finishes(missing), index),
            )

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

    def _gone_from_log(self, subject: str, partition: int, log: _Log) -> set[int]:
        if self.stored is None:
            return set()
        gone = sorted(offset for offset in log.acknowledged if not self._in_log(subject, partition, offset, log))
        if gone:
            self._violation(
                ViolationKind.LOST,
                f"subject {subject!r}, partition {partition}: {_offsets(gone)} acknowledged, but the log does not hold "
                f"{'it' if len(gone) == 1 else 'them'}",
                (subject, None, partition),
                tuple(gone),
                log.where(gone),
            )
        return set(gone)

    def _in_log(self, subject: str, partition: int, offset: int, log: _Log) -> bool:
        assert self.stored is not None
        place = (subject, partition, offset)
        return place in self.stored and not _ids_differ(log.messages[offset].message_id, self.stored[place])

    def _groups_of(self, subject: str) -> set[str]:
        groups = {track.group for track in self._wanted_tracks() if track.subject == subject}
        if self.group is not None and (self.subject is not None or not any(self._wanted_tracks())):
            groups.add(self.group)
        return groups

    def _lost_by_group(self, subject: str, group: str, partition: int, log: _Log, gone: set[int]) -> None:
        track = self._track(subject, group, partition)
        assert track is not None
        lost = sorted(
            offset
            for offset in log.acknowledged
            if offset not in track.ever_finished and offset >= track.floor and offset not in gone
        )
        if lost:
            self._violation_on(
                track,
                ViolationKind.LOST,
                f"{track}: {_offsets(lost)} acknowledged, but never finished ({len(lost)} of {len(log.acknowledged)})",
                tuple(lost),
                track.log.where(lost),
            )

    # Words and evidence.

    def _wanted_tracks(self) -> Iterator[_Track]:
        return (track for track in self.tracks.values() if track is not None)

    def _owner(self, index: int) -> str:
        event = self.events[index]
        assert isinstance(event, LeaseGranted)
        return event.owner

    def _key(self, run: _Run) -> str:
        event = self.events[run.index]
        assert isinstance(event, HandlerStart)
        return "" if event.key is None else f" (key {event.key!r})"

    def _violation_on(
        self, track: _Track, kind: ViolationKind, message: str, offsets: tuple[int, ...], indexes: tuple[int, ...]
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


def _close(run: _Run, result: str) -> None:
    run.result = result
    if run.lane.open is run:
        run.lane.open = None
    if run.leftover:
        run.lane.leftovers -= 1


def _may_repeat(last: _Run, offset: int, committed: int) -> bool:
    """May `offset`, which is not above it, follow `last` in the same lane and epoch?"""
    if last.result == "rollback":
        return offset >= committed
    return offset == last.offset and last.result in _REPEATED


def _known_to(commit: Committed, finisher: _Run) -> bool:
    return finisher.epoch == commit.epoch or finisher.consumer == commit.owner


def _ids_differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _differ(one: _Identity, other: _Identity) -> bool:
    return one.key != other.key or _ids_differ(one.message_id, other.message_id)


def _name(event: _Identity) -> str:
    return f"message {event.message_id!r} of key {event.key!r}"


def _offsets(every: Sequence[int]) -> str:
    shown = ", ".join(map(str, every[:_STR_OFFSETS_MAX]))
    more = f" and {len(every) - _STR_OFFSETS_MAX} more" if len(every) > _STR_OFFSETS_MAX else ""
    return f"offset{'s' if len(every) != 1 else ''} {shown}{more}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
