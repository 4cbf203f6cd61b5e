"""Bugs on purpose, to see that the simulation finds them.

    with BUGS["acknowledges_before_sync"].injected():
        assert not simulate(seed=7).ok

Each is a mistake that somebody could make, put in the place of a small piece of the product while the block runs.
The product itself has no switches for this. Not for several threads: what is replaced is replaced for all.

Longer than a usual file: it is a list, read entry by entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, update

import inturn.consumer.outcome
import inturn.log.producers
import inturn.log.recovery
import inturn.log.reserve
import inturn.log.segment
import inturn.meta.membership
import inturn.producer.queue
import inturn.state.leases
import inturn.state.offsets
from inturn.broker.broker import Broker
from inturn.broker.leases import Lease, LeaseKey, LeaseTable
from inturn.consumer.core import ConsumerCore
from inturn.consumer.held import HeldPartition, Stage
from inturn.consumer.outcome import DONE, Next, Outcome
from inturn.consumer.run import Run
from inturn.log.disk import Disk
from inturn.log.engine import AppendReply
from inturn.log.partition_log import PartitionLog
from inturn.log.producers import ProducerTable
from inturn.log.segment import Segment
from inturn.meta.assignment import assign_sticky
from inturn.meta.membership import Membership
from inturn.model.batch import Batch, BatchHeader, StoredBatch
from inturn.model.clock import Clock
from inturn.model.commands import Acquire, Append, Appended, Command, Progress, Reply
from inturn.model.errors import DiskFull, InturnError, StaleEpoch
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings
from inturn.model.subject import Subject
from inturn.producer.flight import Flight
from inturn.producer.queue import PartitionQueue
from inturn.state.groups import GroupRecord
from inturn.state.leases import LeaseRows
from inturn.state.producers import OpenedProducer, Producers
from inturn.state.schema import leases, offsets
from inturn.testing.sim_disk import SimCrash
from inturn.testing.simulation import simulate

SEEDS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Patch:
    """`owner` is a class or a module of the product."""

    owner: Any
    attribute: str
    replacement: Any


@dataclass(frozen=True, slots=True)
class SeededBug:
    """`layer` is the package of the product in which the mistake is made."""

    name: str
    layer: str
    description: str
    patches: tuple[Patch, ...]

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        """The product has the bug in this block, and is exactly what it was afterwards."""
        originals = [vars(patch.owner)[patch.attribute] for patch in self.patches]
        for patch in self.patches:
            setattr(patch.owner, patch.attribute, patch.replacement)
        try:
            yield
        finally:
            for patch, original in zip(self.patches, originals, strict=True):
                setattr(patch.owner, patch.attribute, original)

    def __str__(self) -> str:
        return self.name


BUGS: dict[str, SeededBug] = {}


def finding(bug: SeededBug, seed: int) -> str | None:
    """What the simulation says about a history with this bug; None if it did not notice."""
    with bug.injected():
        try:
            report = simulate(seed)
        except (Exception, SimCrash) as error:
            return f"{type(error).__name__}: {error}"
    return None if report.ok else report.problems[0]


def seeds_to_find(bug: SeededBug, seeds_max: int = SEEDS_MAX, first_seed: int = 0) -> int | None:
    """How many histories it takes until one shows the bug; None if none of them does."""
    for count in range(1, seeds_max + 1):
        if finding(bug, first_seed + count - 1) is not None:
            return count
    return None


def _add(name: str, layer: str, description: str, *patches: Patch) -> None:
    for patch in patches:
        assert patch.attribute in vars(patch.owner), f"{name}: the product has no {patch.attribute} any more"
    BUGS[name] = SeededBug(name, layer, description, patches)


def _instead_of(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function as a bug: its name and its docstring are the bug's."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        assert function.__doc__ is not None
        layer = (owner.__module__ if isinstance(owner, type) else owner.__name__).split(".")[1]
        _add(function.__name__, layer, function.__doc__, Patch(owner, attribute, function))
        return function

    return register


# Broker: leases and fencing

_lease_acquire = LeaseTable.acquire
_lease_load = LeaseTable.load
_lease_init = LeaseTable.__init__
_broker_append = Broker.append


@_instead_of(LeaseTable, "check")
def lease_is_not_checked(self: LeaseTable, key: LeaseKey, owner: str, epoch: int) -> Lease:
    """Pulls, renewals, commits and releases are taken from anybody, whoever holds the lease."""
    lease = self.get(key)
    if lease is None:
        raise StaleEpoch(key.group.name, str(key.partition), epoch, 0)
    return lease


@_instead_of(LeaseTable, "check")
def epoch_is_not_checked(self: LeaseTable, key: LeaseKey, owner: str, epoch: int) -> Lease:
    """Whoever holds the lease may pull, commit and release with an epoch of its own that is over."""
    lease = self.get(key)
    if lease is None or lease.owner != owner:
        raise StaleEpoch(key.group.name, str(key.partition), epoch, 0 if lease is None else lease.epoch)
    return lease


@_instead_of(Broker, "_holds")
def commit_is_not_checked_by_the_broker(self: Broker, group: GroupRecord, member: str, progress: Progress) -> bool:
    """The broker takes commits without a look at the lease, and leaves it to the database to refuse some."""
    return True


@_instead_of(Lease, "is_live")
def live_lease_is_granted(self: Lease, now_s: float) -> bool:
    """A lease is given to whoever asks, even if its holder has just renewed it."""
    return False


@_instead_of(LeaseTable, "load")
def lease_is_over_after_a_restart(self: LeaseTable, groups: dict[int, GroupRecord]) -> None:
    """After a restart of the node every lease counts as expired instead of just renewed."""
    _lease_load(self, groups)
    for lease in self._leases.values():
        lease.deadline_s = self._clock.monotonic()


@_instead_of(LeaseTable, "acquire")
def old_ask_is_granted_again(self: LeaseTable, key: LeaseKey, command: Acquire) -> int:
    """A late repetition of an old ask takes the lease away from its holder, who has asked again since."""
    lease = self.get(key)
    if lease is not None and lease.owner == command.member and lease.ask > command.ask:
        lease.ask = 0
    return _lease_acquire(self, key, command)


class _WallClock:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.time_ms() / 1000

    def time_ms(self) -> int:
        return self._clock.time_ms()


@_instead_of(LeaseTable, "__init__")
def lease_ends_by_the_wall_clock(
    self: LeaseTable, rows: LeaseRows, clock: Clock, *arguments: Any, **options: Any
) -> None:
    """Leases are timed by the wall clock, which somebody may set."""
    _lease_init(self, rows, _WallClock(clock), *arguments, **options)


@_instead_of(Broker, "append")
def fenced_producer_is_accepted(self: Broker, subject: Subject, command: Append, reply: Reply) -> None:
    """The broker does not know that a newer producer of the same name has opened."""
    self._producer_epochs.pop(command.batch.producer_id, None)
    _broker_append(self, subject, command, reply)


# State: what must survive

_grant = LeaseRows.grant
_release = LeaseRows.release
_open_producer = Producers.open


@_instead_of(LeaseRows, "grant")
def epoch_is_not_raised(self: LeaseRows, group_id: int, partition: int, owner: str, local: bool, now_ms: int) -> int:
    """A grant to the same owner as before keeps the epoch."""
    before = next((row for row in self.all() if (row.group_id, row.partition) == (group_id, partition)), None)
    epoch = _grant(self, group_id, partition, owner, local, now_ms)
    if before is None or before.owner not in (None, owner):
        return epoch
    _set_epoch(self, group_id, partition, before.epoch)
    return before.epoch


@_instead_of(LeaseRows, "grant")
def epoch_lives_in_memory(self: LeaseRows, group_id: int, partition: int, owner: str, local: bool, now_ms: int) -> int:
    """Epochs are counted in memory, so they begin again with every start of the node."""
    _grant(self, group_id, partition, owner, local, now_ms)
    epochs: dict[tuple[int, int], int] = self.__dict__.setdefault("epochs", {})
    epoch = epochs[group_id, partition] = epochs.get((group_id, partition), 0) + 1
    _set_epoch(self, group_id, partition, epoch)
    return epoch


def _set_epoch(rows: LeaseRows, group_id: int, partition: int, epoch: int) -> None:
    with rows._database.transaction() as connection:
        place = {
            "of_group": group_id,
            "of_partition": rows._partition_ids.one(connection, group_id, partition),
            "to_epoch": epoch,
        }
        connection.execute(_SET_EPOCH, place)


_SET_EPOCH = (
    update(leases)
    .where(leases.c.group_id == bindparam("of_group"), leases.c.partition_id == bindparam("of_partition"))
    .values(epoch=bindparam("to_epoch"))
)


@_instead_of(LeaseRows, "release")
def release_forgets_the_offset(
    self: LeaseRows, group_id: int, partition: int, epoch: int, offset: int | None, now_ms: int
) -> bool:
    """A release gives the lease back, but does not commit."""
    return _release(self, group_id, partition, epoch, None, now_ms)


@_instead_of(Producers, "open")
def producer_id_is_given_twice(self: Producers, name: str | None) -> OpenedProducer:
    """All producers without a name get the same id."""
    opened = _open_producer(self, name)
    return opened if name is not None else opened._replace(id=1_000_000)


_PUT = (
    update(offsets)
    .where(offsets.c.group_id == bindparam("of_group"), offsets.c.partition_id == bindparam("of_partition"))
    .values(next_offset=bindparam("offset"), epoch=bindparam("by_epoch"), updated_at_ms=bindparam("now_ms"))
)
_PUT_FORWARD = _PUT.where(offsets.c.next_offset < bindparam("offset"))


def _advance_unfenced(
    connection: Connection, group_id: int, partition_id: int, offset: int, epoch: int, now_ms: int
) -> bool:
    place = {"of_group": group_id, "of_partition": partition_id}
    values = {**place, "offset": offset, "by_epoch": epoch, "now_ms": now_ms}
    return bool(connection.execute(_PUT_FORWARD, values).rowcount)


_add(
    "commit_goes_back",
    "state",
    "A commit that arrives late moves the group back.",
    Patch(inturn.state.offsets, "_ADVANCE", _PUT),
)
_add(
    "commit_is_not_fenced_anywhere",
    "state",
    "A commit is taken whatever its epoch, by the broker and by the database.",
    Patch(Broker, "_holds", commit_is_not_checked_by_the_broker),
    Patch(inturn.state.offsets, "_advance", _advance_unfenced),
)


# Meta: who should consume what


@_instead_of(Membership, "next_deadline_s")
def silent_member_keeps_its_share(self: Membership) -> float | None:
    """Nobody watches for members that vanished, and their partitions wait for them."""
    return None


@_instead_of(inturn.meta.membership, "assign_sticky")
def last_partition_belongs_to_nobody(
    members: Any, partition_count: int, previous: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The assignment leaves one partition out when it cannot be divided evenly."""
    names = list(members)
    left_out = bool(names) and partition_count % len(names) != 0
    return assign_sticky(names, partition_count - left_out, previous)


# Log: appending and syncing

_append = PartitionLog.append
_read = PartitionLog.read
_begin = PartitionLog._begin
_mark = PartitionLog._mark
_sync_to = PartitionLog._sync_to


@_instead_of(PartitionLog, "append")
def acknowledges_before_sync(
    self: PartitionLog, batch: Batch, reply: AppendReply, gap: bool = False, inline: bool = False
) -> None:
    """A batch is acknowledged when it is written, and synced later."""
    _append(self, batch, reply, gap, inline)
    with self._lock:
        early = list(self._waiting)
        self._waiting = deque((offset, _nobody, answer) for offset, _, answer in early)
    for _, early_reply, answer in early:
        early_reply(answer)


def _nobody(answer: Appended | InturnError) -> None:
    """Was answered before."""


def _read_unsynced(self: PartitionLog, offset: int, max_bytes: int) -> list[StoredBatch]:
    always, self._always = self._always, False
    try:
        return _read(self, offset, max_bytes)
    finally:
        self._always = always


_add(
    "readers_see_unsynced",
    "log",
    "Consumers are given messages that a power loss may still take back.",
    Patch(PartitionLog, "read", _read_unsynced),
    Patch(PartitionLog, "end_offset", property(lambda log: log._end)),
)


@_instead_of(PartitionLog, "_begin")
def lost_offsets_are_used_again(self: PartitionLog, floor: int) -> None:
    """After a power loss the log goes on where it ends, though later offsets had been given out."""
    _begin(self, 0)


@_instead_of(PartitionLog, "_mark")
def sealed_segment_is_not_synced(self: PartitionLog, with_checkpoint: bool = False) -> Any:
    """After a roll only the new segment is synced, not the end of the one before."""
    mark = _mark(self, with_checkpoint)
    mark.sealed = []
    return mark


@_instead_of(PartitionLog, "_sync_to")
def failed_sync_counts_as_done(self: PartitionLog, mark: Any, holding: bool = False) -> None:
    """An error of a sync is ignored."""
    active = mark.active
    _sync_to(self, dataclasses.replace(mark, active=_Careless(active)), holding)


class _Careless:
    """A segment whose syncs never fail."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.file = self

    def sync(self) -> None:
        with contextlib.suppress(OSError):
            self._segment.file.sync()


def _take_nothing_back(self: PartitionLog, segment: Segment, position: int, error: OSError) -> InturnError:
    segment.size = segment.file.size()
    return DiskFull(self._name)


_add(
    "partial_batch_stays",
    "log",
    "What was written of a batch when the disk ran full stays, and the next batch comes behind it.",
    Patch(PartitionLog, "_write_failed", _take_nothing_back),
)


# Log: the producers' order


@_instead_of(ProducerTable, "duplicate_of")
def duplicates_are_stored(self: ProducerTable, batch: Batch, gap: bool = False) -> int | None:
    """A batch that is sent again is stored again."""
    return None


@_instead_of(ProducerTable, "restore")
def producers_are_forgotten_at_a_restart(self: ProducerTable, snapshot: bytes) -> None:
    """What the checkpoint knows of producers is not read, only what comes after it."""


_add(
    "one_batch_is_remembered",
    "log",
    "The log recognises only a producer's last batch, though several may be on their way.",
    Patch(inturn.log.producers, "RECENT_COUNT", 1),
)

_duplicate_of = ProducerTable.duplicate_of


@_instead_of(ProducerTable, "duplicate_of")
def missing_batch_is_not_noticed(self: ProducerTable, batch: Batch, gap: bool = False) -> int | None:
    """A batch is stored though one before it has not arrived."""
    return _duplicate_of(self, batch, gap=True)


# Log: recovery

_scan = Segment.scan


@_instead_of(inturn.log.segment, "is_intact")
def torn_payload_is_kept(batch: StoredBatch) -> bool:
    """Recovery looks at headers only, so a batch whose end was lost counts as whole."""
    return True


@_instead_of(Segment, "scan")
def recovery_cuts_a_good_batch(self: Segment, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
    """Recovery takes the last batch for torn, always."""
    held: tuple[int, BatchHeader] | None = None
    for found in _scan(self, position, limit):
        if held is not None:
            yield held
        held = found


@_instead_of(inturn.log.recovery, "_cut")
def torn_tail_is_not_cut(disk: Disk, folder: str, scan: Any) -> None:
    """Recovery leaves a torn tail on the disk, where the next batches are written over it."""


@_instead_of(inturn.log.recovery, "_make_durable")
def recovered_tail_is_not_synced(disk: Disk, folder: str, scan: Any, was_clean: bool) -> None:
    """After a crash of the process, what it had written is taken as synced."""


# Producer: sending again

_send = PartitionQueue._send
_failed = PartitionQueue.failed
_queue_poll = PartitionQueue.poll


@_instead_of(PartitionQueue, "_send")
def retry_gets_new_numbers(self: PartitionQueue, flight: Flight, now_s: float) -> tuple[Flight, Append]:
    """A batch that is sent again is numbered like a new one, so the log cannot recognise it."""
    if flight.tries:
        self._encode(flight)
        flight.gap = True
    return _send(self, flight, now_s)


@_instead_of(PartitionQueue, "failed")
def failed_batch_goes_to_the_end(
    self: PartitionQueue, flight: Flight, tries: int, error: InturnError, now_s: float
) -> list[Flight]:
    """A batch that failed is queued again behind the others, which overtake it."""
    given_up = _failed(self, flight, tries, error, now_s)
    if self.error is None and flight in self._sent and not flight.done and not flight.is_awaited:
        self._sent.remove(flight)
        self._closed.append(flight)
        self._gap = True
        self._phase = inturn.producer.queue._Phase.FLOWING
    return given_up


@_instead_of(PartitionQueue, "poll")
def new_batches_overtake_a_failed_one(self: PartitionQueue, now_s: float) -> list[tuple[Flight, Append]]:
    """While a failed batch waits to be sent again, new ones are sent, and say that the gap is meant."""
    commands = _queue_poll(self, now_s)
    if self._phase is inturn.producer.queue._Phase.SETTLING and self.error is None and not commands:
        flight = self._next_flight() if len(self._sent) < self._settings.in_flight else None
        if flight is not None:
            self._encode(flight)
            flight.gap = True
            self._sent.append(flight)
            commands = [self._send(flight, now_s)]
    return commands


# Consumer: the lease

_answered = ConsumerCore.answered
_poll_partition = ConsumerCore._poll_partition
_settle = ConsumerCore._settle
_put_back = ConsumerCore._put_back
_give_up = HeldPartition.give_up
_granted = HeldPartition.granted
_next = Run.next
_run_settle = Run.settle


@_instead_of(ConsumerCore, "answered")
def deadline_counts_from_the_answer(self: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
    """The lease is taken to live from when the answer came, not from before it was asked for."""
    for pending in (self._pending, *(held.pending for held in self.held.values())):
        waited = pending.get(type(command))
        if waited is not None and waited.command is command:
            waited.sent_at_s = now_s
    _answered(self, command, answer, now_s)


@_instead_of(Run, "next")
def deadline_is_not_checked_before_a_start(self: Run, now_s: float) -> Message | None:
    """A worker goes on with what it has taken, though the lease is over or given up."""
    held, self.held = self.held, _Endless()  # type: ignore[assignment]
    try:
        return _next(self, now_s)
    finally:
        self.held = held


class _Endless:
    deadline_s = float("inf")


@_instead_of(ConsumerCore, "_poll_partition")
def released_while_a_handler_runs(
    self: ConsumerCore, held: HeldPartition, commands: list[Command], now_s: float
) -> None:
    """A partition that is taken away is released at once, though its handler has not ended."""
    if held.stage in (Stage.DRAINING, Stage.RELEASING):
        run, held.run = held.run, None
        _poll_partition(self, held, commands, now_s)
        held.run = run
    else:
        _poll_partition(self, held, commands, now_s)


def _ask_again_as_it_is(self: ConsumerCore, held: HeldPartition, commands: list[Command], now_s: float) -> None:
    if held.stage is Stage.LOST and held.run is None and held.index in self._assigned:
        held.stage = Stage.ASKING
        held.pending.clear()
    _poll_partition(self, held, commands, now_s)


def _give_up_but_keep(self: HeldPartition, stage: Stage) -> None:
    chunks, count, size_bytes = self.chunks.copy(), self.waiting_count, self.waiting_bytes
    _give_up(self, stage)
    self.chunks, self.waiting_count, self.waiting_bytes = chunks, count, size_bytes


def _go_on_where_it_was(self: HeldPartition, epoch: int, offset: int, deadline_s: float, now_s: float) -> None:
    pulled, ran, done = self.pull_offset, self.run_offset, self.done_offset
    _granted(self, epoch, offset, deadline_s, now_s)
    if pulled:
        self.pull_offset, self.run_offset, self.done_offset = pulled, ran, done


_add(
    "buffer_survives_the_lease",
    "consumer",
    "A consumer that gets a lost lease back goes on with what it had pulled before.",
    Patch(ConsumerCore, "_poll_partition", _ask_again_as_it_is),
    Patch(HeldPartition, "give_up", _give_up_but_keep),
    Patch(HeldPartition, "granted", _go_on_where_it_was),
)


# Consumer: what is done


@_instead_of(ConsumerCore, "_settle")
def commits_what_was_pulled(self: ConsumerCore, held: HeldPartition, run: Run) -> None:
    """The offset that was pulled is committed instead of the one that was handled."""
    _settle(self, held, run)
    held.done_offset = held.pull_offset


@_instead_of(ConsumerCore, "_settle")
def kept_messages_count_as_done(self: ConsumerCore, held: HeldPartition, run: Run) -> None:
    """With manual acknowledgement, what was handled but not committed is committed all the same."""
    _settle(self, held, run)
    held.done_offset = max(held.done_offset, held.run_offset)


@_instead_of(Run, "settle")
def failed_message_counts_as_done(self: Run, outcome: Outcome) -> bool:
    """A message whose handler failed is not repeated."""
    return _run_settle(self, DONE if outcome.next is Next.REPEAT else outcome)


@_instead_of(inturn.consumer.outcome, "of_exception")
def exception_is_a_success(error: BaseException, settings: ConsumerSettings) -> Outcome:
    """An exception of the handler is logged and forgotten."""
    return DONE


@_instead_of(ConsumerCore, "_put_back")
def rollback_forgets_what_was_kept(self: ConsumerCore, held: HeldPartition, run: Run, now_s: float) -> None:
    """A rollback repeats only the message that asked for it."""
    if run.is_rollback:
        held.kept = []
    _put_back(self, held, run, now_s)


@_instead_of(ConsumerCore, "_put_back")
def suspended_message_is_overtaken(self: ConsumerCore, held: HeldPartition, run: Run, now_s: float) -> None:
    """A message that is to be repeated goes behind those that wait."""
    before = len(held.chunks)
    _put_back(self, held, run, now_s)
    if len(held.chunks) > before:
        held.chunks.rotate(-1)


@_instead_of(ConsumerCore, "_put_back")
def rest_of_a_run_is_dropped(self: ConsumerCore, held: HeldPartition, run: Run, now_s: float) -> None:
    """When a message fails, those that were taken with it and wait behind it are forgotten."""
    del run.messages[run.done + 1 :]
    _put_back(self, held, run, now_s)
