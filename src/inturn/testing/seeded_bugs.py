"""Bugs on purpose, to see that the simulation finds them.

    with BUGS["acknowledges_before_sync"].injected():
        assert not simulate(seed=7).ok

Each is a mistake that somebody could make, put in the place of a small piece of the product while the block runs.
The product itself has no switches for this. Not for several threads: what is replaced is replaced for all.

Longer than a usual file: it is a list, read entry by entry.
"""

from __future__ import annotations
import __future__

import contextlib
import dataclasses
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import Connection, bindparam, exists, insert, select, update

import inturn.consumer.outcome
import inturn.log.producers
import inturn.log.recovery
import inturn.log.reserve
import inturn.log.segment
import inturn.meta.membership
import inturn.producer.queue
import inturn.state.lots
import inturn.state.offsets
import inturn.wire.frames
import inturn.wire.link
from inturn.broker.broker import Broker
from inturn.broker.claims import ClaimTable
from inturn.broker.gates import Gates
from inturn.broker.leases import Lease, LeaseKey, LeaseTable
from inturn.broker.producer_ids import ProducerIds
from inturn.consumer import claiming
from inturn.consumer.core import ConsumerCore
from inturn.consumer.handling import Handling
from inturn.consumer.held import HeldPartition, Stage
from inturn.consumer.lane import Lane
from inturn.consumer.lot import HeldLot
from inturn.consumer.outcome import DONE, Next, Outcome
from inturn.consumer.run import Run
from inturn.consumer.scheduler import Scheduler
from inturn.log.disk import Disk
from inturn.log.engine import AppendReply
from inturn.log.partition_log import PartitionLog
from inturn.log.producers import ProducerTable
from inturn.log.segment import Segment
from inturn.meta.assignment import assign
from inturn.meta.membership import Membership
from inturn.model.batch import Batch, BatchHeader, StoredBatch
from inturn.model.clock import Clock
from inturn.model.commands import (
    Acquire,
    Answer,
    Append,
    Appended,
    Command,
    Done,
    Failure,
    Granted,
    LotChange,
    Move,
    Progress,
)
from inturn.model.errors import DiskFull, InturnError, StaleEpoch
from inturn.model.message import Message
from inturn.model.settings import AssignmentStrategy, ConsumerSettings, LotState, OnExhausted
from inturn.model.tracker import ClaimTracker, CommitTracker
from inturn.node.consuming import ConsumingCommands
from inturn.node.node import InProcessNode
from inturn.producer.core import ProducerCore
from inturn.producer.flight import Flight
from inturn.producer.queue import PartitionQueue
from inturn.state.failures import Failures
from inturn.state.groups import GroupRecord
from inturn.state.leases import LeaseRows
from inturn.state.lots import Lots
from inturn.state.producers import OpenedProducer, Producers
from inturn.state.schema import leases, offsets
from inturn.testing.sim_disk import SimCrash
from inturn.testing.simulation import simulate
from inturn.wire.frames import Frame, FrameReader
from inturn.wire.link import Delivery, Link
from inturn.wire.session import Session

SEEDS_MAX = 1000
_ANNOTATIONS = __future__.annotations.compiler_flag


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


class BrokenBug(Exception):
    """The bug does not fit the product any more: what happened says nothing about the simulation."""

    def __init__(self, bug: SeededBug, seed: int, error: BaseException) -> None:
        self.bug = bug
        super().__init__(f"{bug} at seed {seed} ended with {error!r}: its patch does not fit the product")


# What Python says of calls and names that do not fit. A bug that leads the product itself to one of these is to be
# written in another way, so that nobody has to tell the two apart.
_MISFITS = (TypeError, AttributeError, NameError, LookupError, UnboundLocalError, ImportError)


def finding(bug: SeededBug, seed: int) -> str | None:
    """What the simulation says about a history with this bug; None if it did not notice.

    That the product ends with an error of its own, or goes round in circles, counts. Raises BrokenBug.
    """
    with bug.injected():
        try:
            report = simulate(seed)
        except _MISFITS as error:
            raise BrokenBug(bug, seed, error) from error
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


def _layer(owner: Any) -> str:
    name: str = owner.__module__ if isinstance(owner, type) else owner.__name__
    return name.split(".")[1]


def _instead_of(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function as a bug: its name and its docstring are the bug's."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        assert function.__doc__ is not None
        _add(function.__name__, _layer(owner), function.__doc__, Patch(owner, attribute, function))
        return function

    return register


def _edited(function: Any, old: str, new: str) -> Any:
    """The function with a piece of its text replaced; for a mistake in the middle of something longer."""
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@property\n")
    assert source.count(old) == 1, f"{function.__qualname__} does not say {old!r} any more"
    code = compile(source.replace(old, new), f"<{function.__qualname__}, edited>", "exec", _ANNOTATIONS)
    names: dict[str, Any] = {}
    exec(code, function.__globals__, names)  # the text is the product's, and ours
    return names[function.__name__]


def _add_edit(name: str, description: str, owner: Any, attribute: str, old: str, new: str) -> None:
    original = vars(owner)[attribute]
    if isinstance(original, property):
        edited: Any = property(_edited(original.fget, old, new))
    else:
        edited = _edited(original, old, new)
    _add(name, _layer(owner), description, Patch(owner, attribute, edited))


# Broker: leases and fencing

_lease_acquire = LeaseTable.acquire
_lease_load = LeaseTable.load
_lease_init = LeaseTable.__init__


@_instead_of(LeaseTable, "check")
def lease_is_not_checked(self: LeaseTable, key: LeaseKey, owner: str, epoch: int) -> Lease:
    """Pulls, renewals, commits and releases are taken from anybody, whoever holds the lease."""
    lease = self.get(key)
    if lease is None:
        raise StaleEpoch(key.group.name, str(key.partition), epoch, 0)
    return lease


def _check_the_owner_only(self: LeaseTable, key: LeaseKey, owner: str, epoch: int) -> Lease:
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
def old_ask_is_granted_again(self: LeaseTable, key: LeaseKey, command: Acquire) -> Lease:
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


@_instead_of(ProducerIds, "check")
def fenced_producer_is_accepted(self: ProducerIds, batch: Batch) -> None:
    """The broker does not know that a newer producer of the same name has opened."""


# State: what must survive

_grant = LeaseRows.grant
_open_producer = Producers.open
_put_failures = Failures.put
_change_lots = Lots.change


@_instead_of(LeaseRows, "grant")
def epoch_is_not_raised(self: LeaseRows, group_id: int, partition: int, owner: str, *rest: Any) -> int:
    """A grant to the same owner as before keeps the epoch."""
    before = next((row for row in self.all() if (row.group_id, row.partition) == (group_id, partition)), None)
    epoch = _grant(self, group_id, partition, owner, *rest)
    if before is None or before.owner not in (None, owner):
        return epoch
    _set_epoch(self, group_id, partition, before.epoch)
    return before.epoch


@_instead_of(LeaseRows, "grant")
def epoch_lives_in_memory(self: LeaseRows, group_id: int, partition: int, owner: str, *rest: Any) -> int:
    """Epochs are counted in memory, so they begin again with every start of the node."""
    _grant(self, group_id, partition, owner, *rest)
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


@_instead_of(LeaseRows, "release_with")
def release_forgets_the_progress(self: LeaseRows, group_id: int, progress: Progress, now_ms: int) -> bool:
    """A release gives the lease back, but does not commit."""
    return self.release(group_id, progress.partition, progress.epoch, now_ms)


@_instead_of(Producers, "open")
def producer_id_is_given_twice(self: Producers, name: str | None, nonce: str | None = None) -> OpenedProducer:
    """All producers without a name get the same id."""
    opened = _open_producer(self, name, nonce)
    return opened if name is not None else opened._replace(id=1_000_000)


_OF_PLACE = (offsets.c.group_id == bindparam("of_group"), offsets.c.partition_id == bindparam("of_partition"))
_PUT = (
    update(offsets)
    .where(*_OF_PLACE)
    .values(
        next_offset=bindparam("to"),
        finished=bindparam("above"),
        epoch=bindparam("by_epoch"),
        commit_number=bindparam("number"),
        updated_at_ms=bindparam("now_ms"),
    )
)
_PUT_FORWARD = _PUT.where(offsets.c.next_offset <= bindparam("to"))
_PUT_FENCED_FORWARD = _PUT_FORWARD.where(
    ~exists().where(
        leases.c.group_id == bindparam("of_group"),
        leases.c.partition_id == bindparam("of_partition"),
        leases.c.epoch > bindparam("by_epoch"),
    )
)


def _advance_unfenced(
    connection: Connection, group_id: int, partition_id: int, progress: Progress, now_ms: int
) -> bool:
    values = {
        "of_group": group_id,
        "of_partition": partition_id,
        "to": progress.offset,
        "above": progress.finished,
        "by_epoch": progress.epoch,
        "number": progress.number,
        "now_ms": now_ms,
    }
    if connection.execute(_PUT_FORWARD, values).rowcount:
        return True
    if connection.execute(select(offsets.c.epoch).where(*_OF_PLACE), values).first() is None:
        connection.execute(insert(offsets).values(_NEW_PLACE), values)
        return True
    return False


_NEW_PLACE: dict[str, Any] = {
    "group_id": bindparam("of_group"),
    "partition_id": bindparam("of_partition"),
    "next_offset": bindparam("to"),
    "finished": bindparam("above"),
    "epoch": bindparam("by_epoch"),
    "commit_number": bindparam("number"),
    "updated_at_ms": bindparam("now_ms"),
}

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
_add(
    "epoch_is_not_checked",
    "broker",
    "Whoever holds the lease may pull and commit with an epoch of its own that is over; the database takes it, too.",
    Patch(LeaseTable, "check", _check_the_owner_only),
    Patch(inturn.state.offsets, "_advance", _advance_unfenced),
)
_add(
    "late_copy_of_a_commit_is_stored",
    "state",
    "A late copy of a commit is stored over newer ones of its epoch, but for the offset, which never goes back.",
    Patch(inturn.state.offsets, "_ADVANCE", _PUT_FENCED_FORWARD),
)


@_instead_of(Failures, "put")
def attempts_are_stored_once(
    self: Failures, connection: Connection, group_id: int, partition_id: int, failed: Iterable[Failure], now_ms: int
) -> None:
    """That a message failed is stored, but not how often."""
    once = [msgspec.structs.replace(one, attempts=min(one.attempts, 1)) for one in failed]
    _put_failures(self, connection, group_id, partition_id, once, now_ms)


@_instead_of(Lots, "change")
def one_message_of_a_commit_is_parked(
    self: Lots,
    connection: Connection,
    group_id: int,
    partition_id: int,
    changes: Iterable[LotChange],
    now_ms: int,
) -> None:
    """Of several messages of a key that are parked with one commit, only the first is stored."""
    first = [msgspec.structs.replace(change, added=change.added[:1]) for change in changes]
    _change_lots(self, connection, group_id, partition_id, first, now_ms)


# Node: clients in other processes

_node_close = InProcessNode.close
_hung_up = InProcessNode.hung_up


_add_edit(
    "remote_lease_counts_as_local",
    "The leases of consumers in other processes are released when the node is opened again, though they live on.",
    ConsumingCommands,
    "outlive_node",
    "if (command.subject, command.group) in self._known.groups:",
    "if False:",
)


@_instead_of(InProcessNode, "hung_up")
def lost_stream_ends_the_leases(self: InProcessNode, session: object) -> None:
    """When a stream is lost, the leases of its members are released, though they may live on."""
    members = [one for one, through in self.leaving._spoke_through.items() if through is session]
    _hung_up(self, session)
    for one in members:
        for partition in self.broker.leases.release_all(self.known.group(one.subject, one.group), one.member):
            self._held.wake(("lease", one.subject, one.group, partition))


_add_edit(
    "asks_of_a_lost_stream_are_granted",
    "What is held back for a client whose stream is lost stays so, and a lease is granted to nobody.",
    InProcessNode,
    "hung_up",
    'self._held.abandon(lambda reply: getattr(reply, "session", None) is session)',
    "pass",
)


@_instead_of(InProcessNode, "close")
def leases_end_with_the_node(self: InProcessNode) -> None:
    """A node that ends in good order takes all leases back, also those that are still in use."""
    for group in self.known.groups.values():
        for owner in self.broker.leases.holders(group):
            self.broker.leases.release_all(group, owner)
    _node_close(self)


# Wire: the client's end

_link_lost = Link.lost

_add(
    "numbers_come_round_too_soon",
    "wire",
    "A request gets the number of another one that is not answered yet.",
    Patch(inturn.wire.link, "NUMBER_MAX", 15),
)


def _lost_but_kept(self: Link, why: str, now_s: float) -> list[Delivery]:
    pending = dict(self._pending)
    _link_lost(self, why, now_s)
    self._pending, self._number = pending, 0
    return []


_add(
    "requests_are_kept_over_a_reconnect",
    "wire",
    "What is unanswered when the stream is lost waits on, and the numbers begin again with the next one.",
    Patch(Link, "lost", _lost_but_kept),
)


@_instead_of(Link, "lost")
def lost_requests_are_not_answered(self: Link, why: str, now_s: float) -> list[Delivery]:
    """What is unanswered when the stream is lost is forgotten."""
    _link_lost(self, why, now_s)
    return []


@_instead_of(Link, "is_silent")
def silence_is_not_noticed(self: Link, now_s: float) -> bool:
    """A client waits for ever on a stream that is cut without its knowledge."""
    return False


_add_edit(
    "second_copy_of_an_answer_ends_the_stream",
    "An answer to something that was answered before is taken for nonsense.",
    Link,
    "received",
    "elif frame.number == 0 and isinstance(answer, InturnError):",
    "else:",
)


# Wire: frames

_add_edit(
    "rest_of_a_read_is_dropped",
    "When a read ends in the middle of a frame, the piece is forgotten.",
    FrameReader,
    "_cut",
    "self._rest += view[at:]",
    "pass",
)
_add_edit(
    "damaged_frames_are_taken",
    "Nobody looks at the checksum of a frame.",
    FrameReader,
    "_cut",
    "& 0xFFFFFFFF != checksum:",
    "< 0:",
)
_add(
    "damaged_length_is_believed",
    "wire",
    "A client waits for the rest of a frame that is not as long as it says, while other answers come.",
    Patch(inturn.wire.frames, "_check_guard", lambda length, guard: None),
)


# Wire: the node's end

_session_handle = Session._handle
_session_answer = Session.answer
_session_go_on = Session.go_on


def _handle_and_note(self: Session, frame: Frame) -> None:
    self.__dict__["newest"] = frame.number
    _session_handle(self, frame)


def _answer_the_newest(self: Session, number: int, size_bytes: int, answer: Answer | InturnError) -> None:
    _session_answer(self, self.__dict__["newest"], size_bytes, answer)


_add(
    "session_answers_the_newest_request",
    "wire",
    "An answer that was held back gets the number of what was asked last.",
    Patch(Session, "_handle", _handle_and_note),
    Patch(Session, "answer", _answer_the_newest),
)


@_instead_of(Session, "go_on")
def full_session_drops_what_it_cannot_take(self: Session) -> None:
    """What comes while too much is unanswered is forgotten."""
    if self.is_full:
        self._inbox.clear()
    _session_go_on(self)


@_instead_of(Session, "lost")
def node_does_not_hear_of_a_lost_stream(self: Session) -> None:
    """A stream is lost, and nobody tells the node."""
    self.is_closed = True
    self._inbox.clear()


# Meta: who should consume what


@_instead_of(Membership, "next_deadline_s")
def silent_member_keeps_its_share(self: Membership) -> float | None:
    """Nobody watches for members that vanished, and their partitions wait for them."""
    return None


@_instead_of(inturn.meta.membership, "assign")
def last_partition_belongs_to_nobody(
    strategy: AssignmentStrategy, members: Any, partition_count: int, previous: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The assignment leaves one partition out when it cannot be divided evenly."""
    names = list(members)
    left_out = bool(names) and partition_count % len(names) != 0
    return assign(strategy, names, partition_count - left_out, previous)


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
def recovered_tail_is_not_synced(disk: Disk, folder: str, scan: Any) -> None:
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
def new_batches_overtake_a_failed_one(
    self: PartitionQueue, now_s: float, gathers: bool = False
) -> list[tuple[Flight, Append]]:
    """While a failed batch waits to be sent again, new ones are sent, and say that the gap is meant."""
    commands = _queue_poll(self, now_s, gathers)
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
_core_granted = ConsumerCore._granted
_poll_partition = ConsumerCore._poll_partition
_drop = Handling.drop
_failed_lane = Handling._failed
_exhausted = Handling._exhausted
_park = Handling._park
_held_granted = HeldPartition.granted
_progress = HeldPartition.progress
_begin_again = HeldLot.begin_again
_run_settle = Run.settle
_take_back = Scheduler.take_back


@_instead_of(ConsumerCore, "answered")
def deadline_counts_from_the_answer(self: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
    """The lease is taken to live from when the answer came, not from before it was asked for, and nobody looks at the
    authorisation, which would end before."""
    for pending in (self._pending, *(held.pending for held in self.held.values())):
        waited = pending.get(type(command))
        if waited is not None and waited.command is command:
            waited.sent_at_s = now_s
    _answered(self, command, answer, now_s)
    self._authorised_until_s = float("inf")
    for held in self.held.values():
        held.authorised(float("inf"))


_add_edit(
    "deadline_is_not_checked_before_a_start",
    "A worker starts what it has taken, though the lease is over or given up.",
    Run,
    "calls",
    "now_s >= held.deadline_s",
    "False",
)


@_instead_of(ConsumerCore, "_poll_partition")
def released_while_a_handler_runs(
    self: ConsumerCore, held: HeldPartition, commands: list[Command], now_s: float
) -> None:
    """A partition that is taken away is released at once, though its handlers have not ended."""
    if held.stage in (Stage.DRAINING, Stage.RELEASING):
        active, held.active = held.active, 0
        _poll_partition(self, held, commands, now_s)
        held.active = active
    else:
        _poll_partition(self, held, commands, now_s)


_Buffer: TypeAlias = tuple[dict[Any, Lane], CommitTracker, int]


def _drop_but_keep(self: Handling, held: HeldPartition, stage: Stage) -> None:
    lanes = held.lanes
    _drop(self, held, stage)
    if stage is Stage.LOST:
        held.lanes = lanes


def _forget_but_keep(self: ConsumerCore, held: HeldPartition, commands: list[Command], now_s: float) -> None:
    _poll_partition(self, held, commands, now_s)
    if held.stage is Stage.LOST and held.index not in self.held:
        buffers: dict[int, _Buffer] = self.__dict__.setdefault("buffers", {})
        buffers[held.index] = held.lanes, held.tracker, held.pull_offset


def _go_on_where_it_was(
    self: ConsumerCore, held: HeldPartition, answer: Granted, sent_at_s: float, now_s: float
) -> None:
    _core_granted(self, held, answer, sent_at_s, now_s)
    buffers: dict[int, _Buffer] = self.__dict__.setdefault("buffers", {})
    if held.index in buffers:
        held.lanes, held.tracker, held.pull_offset = buffers.pop(held.index)
        for lane in list(held.lanes.values()):
            lane.held, lane.inbox = held, held.inbox
            self.handling._go_on(lane)


_add(
    "buffer_survives_the_lease",
    "consumer",
    "A consumer that gets a lost lease back goes on with what it had pulled before.",
    Patch(ConsumerCore, "_poll_partition", _forget_but_keep),
    Patch(Handling, "drop", _drop_but_keep),
    Patch(ConsumerCore, "_granted", _go_on_where_it_was),
)


@_instead_of(Handling, "drop")
def dropped_partition_goes_on(self: Handling, held: HeldPartition, stage: Stage) -> None:
    """Lanes that wait are not taken from the workers when their partition is given up."""
    lanes, held.lanes = held.lanes, {}
    deadline_s = held.deadline_s
    _drop(self, held, stage)
    held.lanes, held.deadline_s = lanes, deadline_s


# Consumer: what is done


@_instead_of(HeldPartition, "progress")
def commits_what_was_pulled(self: HeldPartition) -> Progress:
    """The offset that was pulled is committed instead of the one that was handled."""
    self.tracker.skip(self.tracker.low, self.pull_offset)
    return _progress(self)


@_instead_of(HeldPartition, "progress")
def highest_finished_is_committed(self: HeldPartition) -> Progress:
    """All below the highest message that is finished is committed, whatever still runs or waits below it."""
    self.tracker.skip(self.tracker.low, self.tracker.last + 1)
    return _progress(self)


@_instead_of(HeldPartition, "progress")
def finished_set_is_not_committed(self: HeldPartition) -> Progress:
    """Only the lowest unfinished offset is committed."""
    return msgspec.structs.replace(_progress(self), finished=b"")


@_instead_of(HeldPartition, "granted")
def finished_set_is_ignored(self: HeldPartition, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder goes on from the lowest unfinished offset, and repeats what is finished above it."""
    _held_granted(self, msgspec.structs.replace(answer, finished=b""), deadline_s, now_s)


def _forget_the_sent(self: HeldPartition) -> None:
    if self.sent is not None:
        self.unsure = self.sent.unsure + self.unsure
        self.sent = None


_add(
    "lost_commit_is_not_told_again",
    "consumer",
    "What a commit said besides the offset is forgotten if it is not answered.",
    Patch(HeldPartition, "not_stored", _forget_the_sent),
)


@_instead_of(Run, "settle")
def kept_messages_count_as_done(self: Run, outcome: Outcome) -> bool:
    """With manual acknowledgement, what was handled but not committed is committed all the same."""
    lane, given = self.lane, self.given
    if outcome.next is Next.KEEP and lane is not None:
        lane.held.tracker.add([message.offset for message in given])
    return _run_settle(self, outcome)


@_instead_of(Run, "settle")
def failed_message_counts_as_done(self: Run, outcome: Outcome) -> bool:
    """A message whose handler failed is not repeated."""
    return _run_settle(self, DONE if outcome.next is Next.REPEAT else outcome)


@_instead_of(inturn.consumer.outcome, "of_exception")
def exception_is_a_success(error: BaseException, settings: ConsumerSettings) -> Outcome:
    """An exception of the handler is logged and forgotten."""
    return DONE


@_instead_of(Handling, "_failed")
def rollback_forgets_what_was_kept(
    self: Handling, lane: Lane, outcome: Outcome, failed: Sequence[Message], now_s: float
) -> None:
    """A rollback repeats only the message that asked for it."""
    if outcome.next is Next.ROLLBACK:
        lane.kept = ()
    _failed_lane(self, lane, outcome, failed, now_s)


@_instead_of(Lane, "put_back")
def suspended_message_is_overtaken(self: Lane, messages: Sequence[Message]) -> None:
    """A message that is to be repeated goes behind those of its lane that wait."""
    self.forget_handled()
    self.messages += messages


@_instead_of(Lane, "put_back")
def rest_of_a_lane_is_dropped(self: Lane, messages: Sequence[Message]) -> None:
    """When a message fails, those that wait behind it in its lane are forgotten."""
    self.messages[:] = messages
    self.at = 0


# Consumer: lanes

_add_edit(
    "lane_is_ready_while_it_runs",
    "A lane to which messages come is given to a worker, though another one is busy with it.",
    Handling,
    "offer",
    "if lane.run is None and not lane.waits:",
    "if not lane.waits:",
)
_add_edit(
    "suspended_lane_goes_on_with_the_next_pull",
    "A lane that waits before a repeat is ready at once when messages come to it.",
    Handling,
    "offer",
    "if lane.run is None and not lane.waits:",
    "if lane.run is None:",
)


@_instead_of(Scheduler, "take_back")
def begun_lane_is_taken_back(self: Scheduler, now_s: float) -> list[Lane]:
    """From a slow run even the lane is taken that it is busy with."""
    lanes = _take_back(self, now_s)
    for run in self.runs:
        if run.lane is not None and now_s >= run.until_s:
            run.lane.run = None
            lanes.append(run.lane)
    return lanes


# Consumer: attempts


@_instead_of(HeldPartition, "granted")
def attempts_are_not_handed_over(self: HeldPartition, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder knows of a message that it failed, but not how often."""
    _held_granted(self, answer, deadline_s, now_s)
    self.attempts = dict.fromkeys(self.attempts, 1)


@_instead_of(HeldPartition, "granted")
def blocked_message_is_tried_by_the_next_holder(
    self: HeldPartition, answer: Granted, deadline_s: float, now_s: float
) -> None:
    """The next holder does not know that the attempts at a message are used up, and tries again."""
    _held_granted(self, answer, deadline_s, now_s)
    self.exhausted = set()


_add_edit(
    "repeat_does_not_wait_for_the_commit",
    "A message is tried again before it is stored that it failed.",
    Handling,
    "_failed",
    "held.unsure.append(self._wait(lane, now_s + wait_s))",
    "(one := self._wait(lane, now_s + wait_s), heapq.heappush(self._suspended, (one.until_s, one.number, one)))",
)


@_instead_of(Handling, "_exhausted")
def dead_letter_is_not_waited_for(
    self: Handling,
    lane: Lane,
    outcome: Outcome,
    failed: Sequence[Message],
    repeated: Sequence[Message],
    now_s: float,
) -> None:
    """A message that is given up counts as done before it is stored among the dead letters."""
    _exhausted(self, lane, outcome, failed, repeated, now_s)
    if self._settings.on_exhausted is OnExhausted.DEAD_LETTER and lane.lot is None:
        lane.held.tracker.add([message.offset for message in failed])


@_instead_of(ConsumerCore, "answered")
def failed_move_counts_as_done(self: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
    """A message that is given up counts as done when it could not be stored among the dead letters."""
    if isinstance(command, Move) and isinstance(answer, InturnError) and not isinstance(answer, StaleEpoch):
        answer = Done()
    _answered(self, command, answer, now_s)


# Consumer: parking


@_instead_of(Handling, "_add_to_lot")
def parked_messages_are_not_written(self: Handling, held: HeldPartition, lot: HeldLot, messages: list[Message]) -> None:
    """Messages of a parked key count as passed by, but nobody stores them."""
    held.pass_by(messages)


_add(
    "newer_messages_of_a_parked_key_run",
    "consumer",
    "While a key is parked, its newer messages run.",
    Patch(HeldLot, "takes_to_tail", property(lambda lot: False)),
)
_add(
    "newer_messages_do_not_wait_for_a_resumed_key",
    "consumer",
    "While a key is being resumed, its newer messages go to a lane instead of the tail of its lot.",
    Patch(HeldLot, "takes_to_tail", property(lambda lot: lot.state is LotState.PARKED)),
)


@_instead_of(HeldPartition, "granted")
def parked_keys_are_not_handed_over(self: HeldPartition, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder does not know which keys are parked."""
    _held_granted(self, msgspec.structs.replace(answer, lots=()), deadline_s, now_s)


_add(
    "key_is_free_before_its_last_message",
    "consumer",
    "A key counts as free when its lot was read, though what was read has not been handled; the node believes it.",
    Patch(Handling, "_go_on", _edited(Handling._go_on, " and not lane.lot.rows:", ":")),
    Patch(inturn.state.lots, "_free", _edited(inturn.state.lots._free, "left is not None", "False")),
)
_add_edit(
    "key_is_free_before_its_lot_is_read",
    "A key counts as free when nothing of its lot is at hand, though more may be in it.",
    Handling,
    "_go_on",
    "lane.lot.is_read and not lane.lot.rows:",
    "not lane.lot.rows:",
)
_add_edit(
    "rows_are_removed_when_they_are_read",
    "Messages are taken out of the parking lot when they are read, not when they are over.",
    Handling,
    "lot_read",
    "lane = lot.lane\n",
    "lane = lot.lane; held.news.lot(lot.key, lot.state).removed += [(one.partition, one.offset) for one in read]\n",
)
_add_edit(
    "tail_is_forgotten_when_the_end_is_read",
    "What came to the tail of a lot while its end was being read is not looked for.",
    Handling,
    "lot_read",
    "if content.is_end:",
    "if False:",
)
_add_edit(
    "what_is_over_of_a_lot_is_read_again",
    "A lot is read from its head again, and with it what is over but not stored as such yet.",
    Handling,
    "lot_read",
    "if (one.partition, one.offset) not in lot.not_again]",
    "]",
)


@_instead_of(HeldLot, "begin_again")
def lot_that_is_parked_again_is_read_on(self: HeldLot) -> None:
    """A key that is parked while it is resumed goes on later behind what had been read, not from its head."""
    after = self.after
    _begin_again(self)
    self.after = after


@_instead_of(Handling, "_park")
def rows_at_hand_leave_the_lot_when_it_is_parked_again(self: Handling, lane: Lane, reason: str) -> None:
    """A key that is parked while it is resumed loses the messages of its lot that were at hand."""
    lot, held = lane.lot, lane.held
    if lot is not None:
        held.news.lot(lot.key, LotState.PARKED).removed += list(lot.rows)
    _park(self, lane, reason)


# Consumer: skipping

_add_edit(
    "skip_drops_whatever_is_first",
    "A skip drops the first message of the key, even if it is not the one that somebody looked at.",
    Handling,
    "_act_skip",
    " and (message.partition, message.offset) == (origin, offset):",
    ":",
)


@_instead_of(Handling, "_drop_head")
def skipped_message_is_not_over(self: Handling, lane: Lane, message: Message) -> None:
    """A message that is skipped does not run any more, but nobody notes that it is over."""
    lane.at += 1
    self.scheduler.unready(lane)
    self._go_on(lane)


# Consumer: straight lanes

_add_edit(
    "key_goes_on_beside_its_handler_when_its_lane_is_spread",
    "A straight lane that is spread while it runs lets the rest of the running key go on at once.",
    Handling,
    "spread",
    "if lane.run is not None and at:",
    "if False:",
)
_add_edit(
    "failed_message_of_a_straight_lane_is_passed_by",
    "A message that fails in a straight lane is not repeated.",
    Handling,
    "_after_straight",
    "    if failed:\n",
    "    if False:\n",
)
_add_edit(
    "failed_message_of_a_straight_lane_is_repeated_at_the_end",
    "A message that fails in a straight lane is repeated when the rest of its key has been handled.",
    Handling,
    "_after_straight",
    "self.scheduler.unready(goes_on)\n",
    "goes_on = Lane(held, key, [], held.inbox)\n",
)

# Growth

_add_edit(
    "child_is_opened_early",
    "A child is open though older messages of its keys are unfinished in a parent.",
    Gates,
    "_closed_by",
    "found = self._unfinished(subject, group, descent)",
    "found = None",
)
_add_edit(
    "grandparent_is_forgotten",
    "A child is open as soon as its parent has nothing left, though the parent itself waits for another.",
    Gates,
    "_closed_by",
    "if self.closed(subject, group, descent.parent) is not None:",
    "if False:",
)
_add_edit(
    "barrier_is_passed_by_one",
    "The last message below the barrier is not looked at.",
    Gates,
    "_unfinished",
    "offset <= at < descent.barrier",
    "offset <= at < descent.barrier - 1",
)
_add_edit(
    "gate_looks_at_the_offset_only",
    "A gate does not look at slots: whatever was not finished out of turn is taken as done.",
    Gates,
    "_unfinished",
    "and at not in done:",
    "and at < place.offset:",
)
_add_edit(
    "lots_come_back_to_the_parent",
    "What a holder says again of a lot, since an answer was lost, counts after the lot has moved on.",
    Gates,
    "without_moved",
    "if not subject.route.descents or",
    "if True or",
)
_add_edit(
    "lots_stay_with_the_parent",
    "A parking lot does not move to the child that its key moved to.",
    Gates,
    "_moving",
    "return sorted(key for key in keys if descent.has(slot_of(key)))",
    "return []",
)
_add_edit(
    "lots_move_while_somebody_works_on_them",
    "A gate does not wait until a lot that is being resumed comes to rest.",
    Gates,
    "_closed_by",
    "if found is None and self._is_busy(group, descent):",
    "if False:",
)
_add_edit(
    "route_is_checked_before_duplicates",
    "A batch that is stored already is refused for its old route, and stored in a child, too.",
    PartitionLog,
    "_store",
    "    duplicate = self._producers.duplicate_of(batch, gap)\n",
    "    if self._sealed is not None and batch.route_version != self._sealed[1]:\n"
    "        raise RouteChanged(self._sealed[0], batch.route_version, self._sealed[1])\n"
    "    duplicate = self._producers.duplicate_of(batch, gap)\n",
)
_add_edit(
    "parents_are_not_sealed",
    "A log takes batches that were routed by an older route.",
    PartitionLog,
    "_store",
    "if self._sealed is not None and batch.route_version != self._sealed[1]:",
    "if False:",
)
_add_edit(
    "producer_does_not_wait_for_answers_when_a_subject_grows",
    "A producer divides what it has sent anew, though it may be stored.",
    PartitionQueue,
    "is_settled",
    "return first is None or first.is_refused",
    "return True",
)
_add_edit(
    "new_messages_overtake_what_is_to_be_divided",
    "New messages follow the new route at once, though older ones of their keys still wait for the old one.",
    ProducerCore,
    "learn",
    "self._grown[subject.name] = subject",
    "self._grown[subject.name] = subject; self._by_slot[subject.name] = list(subject.route.by_slot)",
)
_add_edit(
    "foreign_offsets_are_taken_for_own",
    "Attempts of a message that came with a parking lot count for the one with the same offset in the partition.",
    HeldPartition,
    "mark",
    "return mark_of(message.partition, message.offset, self.index)",
    "return message.offset",
)

# Claims: several work on one partition under one lease

_add_edit(
    "claims_overlap",
    "Slots are claimed though another has some of them.",
    ClaimTable,
    "acquire",
    "and other.slots.overlaps(slots):",
    "and False:",
)
_add_edit(
    "claims_are_granted_at_once_after_a_restart",
    "After a restart the node believes that nobody has claimed anything.",
    ClaimTable,
    "acquire",
    "if now_s < lease.claims_from_s:",
    "if False:",
)


@_instead_of(ClaimTable, "renew")
def claim_is_not_renewed_by_use(self: ClaimTable, key: LeaseKey, claimant: str, epoch: int) -> None:
    """A claim is over a life after it was granted, whoever uses it, and so is its lease."""
    self.check(key, claimant, epoch)


_add_edit(
    "claim_does_not_renew_the_lease",
    "While the owner of a lease is silent, the lease runs out under those who work under it.",
    ClaimTable,
    "_renew",
    "lease.deadline_s = max(lease.deadline_s, claim.deadline_s)",
    "pass",
)
_add_edit(
    "lost_claim_is_used_on",
    "Who has lost its claim to another, or given it back, may commit and renew it all the same.",
    ClaimTable,
    "check",
    "not claim.is_over and ",
    "",
)
_add(
    "claims_outlive_their_lease",
    "broker",
    "A claim counts though the lease that it was under is another's by now.",
    Patch(ClaimTable, "_of", _edited(ClaimTable._of, "self._epochs.get(place) != lease.epoch", "False")),
    Patch(ClaimTable, "check", _edited(ClaimTable.check, "lease.epoch != epoch or lease.owner is None", "False")),
)
_add_edit(
    "lease_is_released_under_claims",
    "A lease is given back though others work under it.",
    Broker,
    "release",
    "if claims:",
    "if False:",
)
_add_edit(
    "release_of_a_kept_lease_goes_back",
    "What its owner says when it gives back a lease counts, though others have committed under it since.",
    HeldPartition,
    "nothing_new",
    "low, 0, finished",
    "low, 1 << 40, finished",
)
_add_edit(
    "claimants_commit_replaces_what_is_finished",
    "What one claimant has finished is stored in place of what all have.",
    Broker,
    "_merged",
    "with_finished(place, progress.finished)",
    "place.offset, progress.finished",
)
_add(
    "claimants_offset_is_believed",
    "broker",
    "A claimant tells how far it is, as an owner does, and it is believed, though the rest is not its business.",
    Patch(Broker, "_merged", _edited(Broker._merged, "offset=offset", "offset=max(offset, progress.offset)")),
    Patch(ClaimTracker, "snapshot", _edited(ClaimTracker.snapshot, "return self._first", "return self.low")),
)
_add_edit(
    "late_copy_of_a_claimants_commit_is_stored",
    "A commit of a claimant that comes again, late, is stored again: what failed then has failed now.",
    Broker,
    "_is_late",
    "progress.number <= claim.number",
    "False",
)
_add_edit(
    "former_claim_is_taken_for_the_present_one",
    "What a claimant sent under a claim that it had lost counts under the one that it has now.",
    ClaimTable,
    "check",
    "ask in (None, claim.ask)",
    "True",
)
_add(
    "slots_are_not_chosen",
    "broker",
    "A claimant is given the messages of all slots, and takes them.",
    Patch(Broker, "_read", _edited(Broker._read, "if not slots.is_all:", "if False:")),
    Patch(claiming, "_cut", lambda answer, _: answer),
)
_add_edit(
    "parked_keys_are_not_told_to_claimants",
    "A claimant does not know which of its keys are parked.",
    Broker,
    "claim",
    "tuple(one for one in stored.lots if slot_of(one.key) in slots)",
    "()",
)
_add_edit(
    "parked_keys_are_told_to_all_claimants",
    "Every claimant is told of all keys that are parked, and looks after them.",
    Broker,
    "claim",
    "tuple(one for one in stored.lots if slot_of(one.key) in slots)",
    "stored.lots",
)
_add(
    "others_messages_are_told_as_finished",
    "consumer",
    "A claimant tells of the messages of others, which it passes over, that they are finished.",
    Patch(
        ClaimTracker,
        "leave_to_others",
        _edited(ClaimTracker.leave_to_others, "self._finished |= others", "self.add(others)"),
    ),
)
_add_edit(
    "bound_is_one_too_high",
    "A consumer that is to stop at an offset handles the message there, too.",
    HeldPartition,
    "bounded",
    "max(self.until, self.pull_offset)",
    "max(self.until + 1, self.pull_offset)",
)
_add_edit(
    "batches_behind_the_bound_are_gone_over",
    "What lies between the bound and the next batch that was pulled counts as a gap in the log.",
    ConsumerCore,
    "_pulled",
    "held.skip_to(held.bounded(header.base_offset))",
    "held.skip_to(header.base_offset)",
)
