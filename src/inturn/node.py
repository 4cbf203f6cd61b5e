"""The node: broker and meta in one process, behind one `submit`.

Commands are answered in the caller's thread, but for two things: an append is answered when it is durable, and a
command with `wait_s` is held back until there is something to say. One lock guards everything but the logs, which
have their own; replies are called outside of it. The lock order is node, then log; never the other way round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from types import UnionType
from typing import Any

import msgspec

from inturn.broker.broker import Broker
from inturn.broker.cutting import CuttingReply
from inturn.broker.filtering import FilteringReply
from inturn.broker.keys import Keys
from inturn.broker.leases import LeaseKey, LeaseTable
from inturn.broker.long_polls import LongPolls, Try
from inturn.broker.move_targets import check_target, origin_of
from inturn.broker.trials import Trials, chosen_member
from inturn.log.engine import LogEngine
from inturn.meta.broker_registry import BrokerRegistry
from inturn.meta.growth import check_growth
from inturn.meta.membership import Holders, Membership
from inturn.model.clock import Clock
from inturn.model.commands import (
    Acknowledge,
    Acquire,
    Answer,
    Append,
    BrokerGroupList,
    Claim,
    Command,
    Commit,
    CreateSubject,
    DescribeGroup,
    DescribeKey,
    DescribeNode,
    DescribeSubject,
    DiskRoom,
    Done,
    Fetch,
    FindRequest,
    FindSubject,
    FindTrial,
    GroupDescription,
    GroupList,
    GroupName,
    GrowSubject,
    Heartbeat,
    KeyList,
    Leave,
    ListBrokerGroups,
    ListGroups,
    ListKeys,
    ListSubjects,
    Move,
    NodeDescription,
    Offsets,
    OpenDeadLetters,
    OpenProducer,
    OpenRetry,
    ProducerOpened,
    Pull,
    Pulled,
    Read,
    ReadLot,
    ReadyPart,
    Release,
    Renew,
    Reply,
    ReportTrial,
    ResetGroup,
    ResolvePosition,
    SetBrokerGroup,
    SetOrder,
    SteerKey,
    SubjectDescription,
    SubjectList,
    TryMessage,
)
from inturn.model.errors import (
    BrokerGroupClosed,
    Closed,
    GateClosed,
    GroupConflict,
    InturnError,
    InvalidInput,
    LeaseHeld,
    NotFound,
    ServerStopping,
)
from inturn.model.names import check_name, dead_letter_subject, retry_subject
from inturn.model.observer import Observer
from inturn.model.position import parse_position
from inturn.model.settings import (
    BrokerGroupState,
    GroupMode,
    KeyAction,
    Keyless,
    LeaseSettings,
    Limits,
    LotState,
    Order,
    Routing,
    Strategy,
    one_of,
)
from inturn.model.subject import Subject
from inturn.model.tags import tag_filter
from inturn.model.timers import Timer, Timers
from inturn.node_survey import Survey
from inturn.state.broker_groups import BrokerGroupRows
from inturn.state.database import Database
from inturn.state.failures import Failures
from inturn.state.gates import GateRows
from inturn.state.groups import GroupRecord, Groups
from inturn.state.key_requests import KeyRequests
from inturn.state.leases import LeaseRows
from inturn.state.lots import Lots
from inturn.state.members import Members
from inturn.state.node_role import LOCAL_BROKER_GROUP
from inturn.state.offsets import Offsets as OffsetRows
from inturn.state.producers import Producers
from inturn.state.progress import ProgressRows
from inturn.state.subjects import Subjects
from inturn.state.survey import SurveyRows
from inturn.version import SOFTWARE

_NEW_WORK = Append | OpenProducer | CreateSubject | Acquire | Claim | Pull | Read | Fetch
# What a broker group does not do for its clients, by its state.
_REFUSED: dict[BrokerGroupState, tuple[type[Command], ...]] = {
    BrokerGroupState.READ_ONLY: (Append,),
    BrokerGroupState.UNAVAILABLE: (Append, Move, Acquire, Claim, Pull, Read, Fetch),
}
_OF_MEMBER = Acquire | Claim | Pull | Heartbeat | Fetch
LOOK_ON_S = 0.01  # a gate that was not looked at to the end is looked at again after this
COME_BACK_S = 1.0  # a member whose stream was lost has so long to be heard again before others are asked


class InProcessNode:
    """`local` says that its consumers live in this very process: when it is opened again, they are gone. `room` tells
    how full the disk is. `broker_group` is the one whose logs it has; in a cluster others have others, and `holders`
    tells meta who holds leases there."""

    def __init__(
        self,
        database: Database,
        engine: LogEngine,
        clock: Clock,
        timers: Timers,
        lease: LeaseSettings | None = None,
        observer: Observer | None = None,
        *,
        local: bool = True,
        room: Callable[[], DiskRoom | None] = lambda: None,
        broker_group: str = LOCAL_BROKER_GROUP,
        holders: Holders | None = None,
    ) -> None:
        lease = lease if lease is not None else LeaseSettings()
        self._database = database
        self._observer = observer
        self._engine = engine
        self._clock = clock
        self._timers = timers
        self._room = room
        self._started_at_s = clock.monotonic()
        self._lock = threading.RLock()
        self._closed = False
        self._is_stopping = False
        self._subjects = Subjects(database)
        self._groups = Groups(database)
        self._producers = Producers(database)
        self._known_subjects: dict[str, Subject] = {}
        self._known_groups: dict[tuple[str, str], GroupRecord] = {}
        self._held = LongPolls(self._lock, clock, timers, self._answer, self._wake_at_expiry)
        self._expiry_timers: dict[Hashable, Timer] = {}
        self._watch_timer: Timer | None = None
        self._spoke_through: dict[Leave, object] = {}  # the stream that a member in another process was last heard on
        members = Members(database)
        leases = LeaseTable(LeaseRows(database), clock, lease, observer, local=local)
        holders = holders if holders is not None else leases.holders
        self.membership = Membership(members, clock, lease, holders, self._groups.orders())
        self.registry = BrokerRegistry(BrokerGroupRows(database), clock, broker_group)
        self.trials = Trials()
        self.keys = Keys(Failures(database), Lots(database), KeyRequests(database), clock)
        self.broker = Broker(
            engine,
            OffsetRows(database),
            ProgressRows(database),
            self._producers,
            leases,
            self.keys,
            GateRows(database),
            clock,
            observer,
            broker_group,
        )
        self.survey = Survey(
            self._known_subjects, self._known_groups, self.broker, self.membership, self._held, SurveyRows(database)
        )
        if broker_group:
            self.broker.state = self.registry.get(broker_group).state
        members.all_offline(clock.time_ms())
        for group in self._groups.all():
            self._known_groups[group.subject, group.name] = group
        leases.load({group.id: group for group in self._known_groups.values()})
        for subject in self._subjects.all():
            self._open_subject(subject)
        self._answers: dict[type[Command], Callable[[Any, Try], Answer | None]] = {
            OpenProducer: self._open_producer,
            OpenRetry: self._open_retry,
            OpenDeadLetters: self._open_dead_letters,
            Heartbeat: self._heartbeat,
            Leave: self._leave,
            Acquire: self._acquire,
            Claim: self._claim,
            Renew: self._renew,
            Pull: self._pull,
            Commit: self._commit,
            Release: self._release,
            Fetch: self._fetch,
            Acknowledge: self._acknowledge,
            ReadLot: lambda command, _: self.broker.read_lot(self._group(command.subject, command.group), command),
            Read: self._read,
            CreateSubject: self._create_subject,
            GrowSubject: self._grow_subject,
            FindSubject: lambda command, _: self._subject(command.name),
            ListSubjects: lambda _, __: SubjectList(tuple(self._known_subjects.values())),
            DescribeSubject: self._describe_subject,
            ResolvePosition: self._resolve_position,
            ListGroups: lambda _, __: GroupList(tuple(GroupName(*name) for name in sorted(self._known_groups))),
            DescribeGroup: self._describe_group,
            ResetGroup: self._reset_group,
            SetOrder: self._set_order,
            SteerKey: self._steer_key,
            FindRequest: self._find_request,
            TryMessage: self._try_message,
            FindTrial: self._find_trial,
            ReportTrial: self._report_trial,
            ListKeys: lambda command, _: self.keys.list_keys(self._group(command.subject, command.group)),
            DescribeKey: self._describe_key,
            DescribeNode: self._describe_node,
            ListBrokerGroups: lambda _, __: BrokerGroupList(self.registry.describe(self._known_subjects.values())),
            SetBrokerGroup: self._set_broker_group,
        }

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.model.commands.Node`."""
        answer: Answer | InturnError | None
        try:
            if type(command) is Append:
                self._check_open(command)
                self.broker.append(self._subject(command.subject), command, reply)
                return
            if type(command) is Move:
                self._move(command, reply)
                return
            if isinstance(command, Pull | Read) and command.tags and (tags := tag_filter(command.tags)) is not None:
                reply = FilteringReply(reply, tags)
            elif type(command) is Fetch:
                reply = CuttingReply(reply)
            with self._lock:
                answer = self._answer(command, Try.FIRST)
                if answer is None:
                    self._hold(command, reply)
                    return
        except InturnError as error:
            answer = error
        reply(answer)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        """As `submit`, for a client in another process: its consumers outlive this node."""
        if type(command) is Acquire:
            if (command.subject, command.group) in self._known_groups:
                self.broker.leases.remote.add(command.member)
        elif type(command) is Claim:
            self._outlive(command)
        elif type(command) is Heartbeat:
            self.submit(command, reply)
            self._note_stream(command, getattr(reply, "session", None))
            return
        elif isinstance(command, Commit | Release):
            try:
                subject = self._subject(command.subject)
                for progress in command.progress if isinstance(command, Commit) else (command.progress,):
                    self.broker.check_places(subject, progress)
            except InturnError as error:
                reply(error)
                return
        self.submit(command, reply)

    def _note_stream(self, command: Heartbeat, session: object) -> None:
        """Through which stream a member speaks; nothing of one that was refused."""
        with self._lock:
            group = self._known_groups.get((command.subject, command.group))
            if group is not None and self.membership.is_member(group, command.member):
                self._spoke_through[Leave(command.subject, command.group, command.member)] = session

    def _outlive(self, command: Claim) -> None:
        """Somebody in another process is to work under the lease: it must not end with the process of its owner."""
        with self._lock:
            group = self._known_groups.get((command.subject, command.group))
            if group is not None:
                self.broker.leases.outlive_owner(LeaseKey(group, command.partition), command.owner, command.epoch)

    def hung_up(self, session: object) -> None:
        """A client is gone, or its stream is: nothing is answered to it any more. Its members keep their leases for as
        long as these live, but are counted out unless they are heard again soon."""
        with self._lock:
            if self._closed:
                return
            self._held.abandon(lambda reply: getattr(reply, "session", None) is session)
            for one in [member for member, through in self._spoke_through.items() if through is session]:
                del self._spoke_through[one]
                group = self._known_groups.get((one.subject, one.group))
                if group is not None:
                    self.membership.hasten(group, one.member, COME_BACK_S)
            if self._watch_timer is not None:
                self._watch_timer.cancel()
                self._watch_timer = None
            self._watch_members()

    def stop_gently(self) -> None:
        """Take no new work, and ask all consumers to give their partitions back."""
        with self._lock:
            self._is_stopping = True
            for group in self.membership.groups():
                self._announce(group)
            waiting = self._held.keys(_NEW_WORK)
        for key in waiting:
            self.wake(key)

    def readiness(self) -> tuple[ReadyPart, ...]:
        """Which of its parts can do their work. Waits while the node is busy."""
        refusal = "it is closed" if self._closed else "it is stopping" if self._is_stopping else ""
        return ReadyPart("work", not refusal, refusal), *self.survey.ready_parts()

    @property
    def held_count(self) -> int:
        """How many leases are live."""
        with self._lock:
            return self.broker.leases.live_count()

    def close(self) -> None:
        """Answer what is held back with Closed, then close the logs. The database stays the caller's."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._held.close(lambda: Closed("node"))
        self._engine.close()

    def disown(self) -> None:
        """In a forked child: refuse everything, touch nothing. The locks may be held by threads that are not here."""
        self._lock = self._held.lock = threading.RLock()
        self._closed = True

    # Holding back

    def _answer(self, command: Command, attempt: Try) -> Answer | None:
        """None: nothing to say yet. The last try always gives an answer or an error."""
        self._check_open(command)
        answer = self._answers.get(type(command))
        if answer is None:
            raise InvalidInput(
                f"{type(command).__name__} is not for this server: it is another part of a cluster, or none"
            )
        return answer(command, attempt)

    def _check_open(self, command: Command) -> None:
        if self._closed:
            raise Closed("node")
        if self._is_stopping and isinstance(command, _NEW_WORK):
            raise ServerStopping
        if self.broker.state is not BrokerGroupState.AVAILABLE and isinstance(command, _REFUSED[self.broker.state]):
            raise BrokerGroupClosed(self.broker.broker_group, self.broker.state.value)

    def _hold(self, command: Command, reply: Reply) -> None:
        wait_s: float = command.wait_s  # type: ignore[attr-defined]
        if isinstance(command, Heartbeat):
            # A member that waits for its answer is silent: let it speak well before its time is over.
            wait_s = min(wait_s, self.broker.leases.life_s / 3)
        self._held.hold(command, reply, self._wake_key(command), wait_s)

    def _wake_key(self, command: Command) -> Hashable:
        match command:
            case Pull() | Read() | Fetch():
                return "log", command.subject, command.partition
            case Acquire() | Claim():
                return "lease", command.subject, command.group, command.partition
            case Heartbeat():
                return "group", command.subject, command.group
            case FindRequest():
                return "request", command.subject, command.group, command.id
            case FindTrial():
                return "trial", command.subject, command.group
        raise TypeError(f"{type(command).__name__} is never held back")

    def _wake_at_expiry(self, command: Command, key: Hashable) -> None:
        if not isinstance(command, Acquire | Claim | Fetch):
            return
        lease_key = LeaseKey(self._group(command.subject, command.group), command.partition)
        at_s: float | None
        if isinstance(command, Fetch):
            at_s = self.broker.sharing.next_due_s(lease_key.group, command.partition)
        elif isinstance(command, Claim):
            at_s = self.broker.claims.expires_at_s(lease_key, command)
        else:
            at_s = self.broker.leases.expires_at_s(lease_key)
        timer = self._expiry_timers.get(key)
        if at_s is None or (timer is not None and timer.at_s <= at_s):
            return
        if timer is not None:
            timer.cancel()
        self._expiry_timers[key] = self._timers.at(at_s, partial(self._lease_over, key))

    def _lease_over(self, key: Hashable) -> None:
        with self._lock:
            self._expiry_timers.pop(key, None)
        self.wake(key)

    def wake(self, key: Hashable) -> None:
        """Try again to answer what waits for this."""
        self._held.wake(key)

    # Meta

    def _heartbeat(self, command: Heartbeat, attempt: Try) -> Answer | None:
        subject = self._subject(command.subject)
        group = self._group_or_new(subject, command)
        came = attempt is Try.FIRST and self.membership.heartbeat(group, subject, command)
        self._watch_members()
        if came:
            self._held.wake_later(("group", command.subject, command.group))
        waits = attempt is not Try.LAST and command.wait_s > 0
        if came or not waits or self.membership.generation(group) != command.generation:
            trials = self.trials.waiting(group, command.member)
            answer = self.membership.answer(group, subject, command.member, self.keys.waiting(group), trials)
            return msgspec.structs.replace(answer, partitions=()) if self._is_stopping else answer
        return None

    def _leave(self, command: Leave, _: Try) -> Answer:
        group = self._group(command.subject, command.group)
        if self.membership.leave(group, self._subject(command.subject), command.member):
            self._held.wake_later(("group", command.subject, command.group))
            self._held.wake_later(("trial", command.subject, command.group))
        self._forget_member(command, _OF_MEMBER)
        for partition in self.broker.sharing.leave(group, command.member):
            self._held.wake_later(("log", command.subject, partition))
        claims = self.broker.claims
        released = claims.release_all(group, command.member)
        released += self.broker.leases.release_all(
            group, command.member, lambda key: bool(claims.live(key)) or claims.may_be_forgotten(key)
        )
        for partition in released:
            self._held.wake_later(("lease", command.subject, command.group, partition))
        return Done()

    def _forget_member(self, leave: Leave, kinds: type[Command] | UnionType) -> None:
        """Nothing of these kinds is held back any more for a member that left; it is answered with LeaseHeld."""
        self._spoke_through.pop(leave, None)
        self.broker.leases.remote.discard(leave.member)

        def left(command: Command) -> LeaseHeld:
            return LeaseHeld(leave.group, str(getattr(command, "partition", "")), "nobody: the member left")

        self._held.dismiss(lambda command: isinstance(command, kinds) and _is_of(command, leave), left)

    def _watch_members(self) -> None:
        """Look at all groups every third of a lease's life, and at the moment when somebody is silent for too long."""
        if self._watch_timer is None:
            deadline_s = self.membership.next_deadline_s()
            if deadline_s is not None:
                at_s = min(deadline_s, self._clock.monotonic() + self.broker.leases.life_s / 3)
                self._watch_timer = self._timers.at(at_s, self._look_at_members)

    def _look_at_members(self) -> None:
        with self._lock:
            if self._watch_timer is not None:
                self._watch_timer.cancel()  # it may be a newer one than the one that called this
            self._watch_timer = None
            if self._closed:
                return
            for group, member in self.membership.silent(self._clock.monotonic()):
                self.membership.leave(group, self._subject(group.subject), member)
                # If it lives on, it asks again. If not, nothing is to be granted to it.
                self._forget_member(Leave(group.subject, group.name, member), Acquire)
                self.broker.sharing.forget_member(group, member)
                self._held.wake_later(("group", group.subject, group.name))
                self._held.wake_later(("trial", group.subject, group.name))
            for group in self.membership.groups():
                if self.membership.reassign(group, self._subject(group.subject)):
                    self._held.wake_later(("group", group.subject, group.name))
            self._watch_members()

    # Consuming

    def _acquire(self, command: Acquire, attempt: Try) -> Answer | None:
        subject = self._subject(command.subject)
        self.broker.log(subject, command.partition)
        group = self._group(command.subject, command.group)
        _check_mode(group, GroupMode.EXCLUSIVE)
        try:
            self._check_gate(subject, group, command.partition)
            granted = self.broker.acquire(group, command)
        except LeaseHeld:
            if attempt is Try.LAST or command.wait_s <= 0:
                raise
            return None
        # A pull of the former owner may be waiting: it is to hear at once that its epoch is over.
        self._held.wake_later(("log", command.subject, command.partition))
        return granted

    def _check_gate(self, subject: Subject, group: GroupRecord, partition: int) -> None:
        closed = self.broker.gates.closed(subject, group, partition)
        if closed is None:
            return
        key = "lease", subject.name, group.name, partition
        if closed.is_cut and key not in self._expiry_timers:
            at_s = self._clock.monotonic() + LOOK_ON_S
            self._expiry_timers[key] = self._timers.at(at_s, partial(self._lease_over, key))
        raise GateClosed(group.name, str(partition), closed.parent, closed.offset)

    def _wake_children(self, command: Commit | Release | SteerKey, parents: Iterable[int]) -> None:
        """What was committed may be what a child has waited for."""
        descents = self._subject(command.subject).route.descents
        for child in {one.child for one in descents if one.parent in set(parents)} if descents else ():
            self._held.wake_later(("lease", command.subject, command.group, child))

    def _claim(self, command: Claim, attempt: Try) -> Answer | None:
        self.broker.log(self._subject(command.subject), command.partition)
        group = self._group(command.subject, command.group)
        try:
            return self.broker.claim(group, command)
        except LeaseHeld:
            if attempt is Try.LAST or command.wait_s <= 0:
                raise
            return None

    def _renew(self, command: Renew, _: Try) -> Answer:
        return self.broker.renew(self._group(command.subject, command.group), command)

    def _pull(self, command: Pull, attempt: Try) -> Answer | None:
        group = self._group(command.subject, command.group)
        pulled = self.broker.pull(self._subject(command.subject), group, command, renews=attempt is Try.FIRST)
        return _if_any(pulled, command, attempt)

    def _read(self, command: Read, attempt: Try) -> Answer | None:
        return _if_any(self.broker.read(self._subject(command.subject), command), command, attempt)

    def _commit(self, command: Commit, _: Try) -> Answer:
        subject, group = self._subject(command.subject), self._group(command.subject, command.group)
        told = tuple(self.broker.gates.without_moved(subject, group, one) for one in command.progress)
        committed = self.broker.commit(group, msgspec.structs.replace(command, progress=told))
        for progress in command.progress:
            self._wake_askers(command, progress.requests)
        self._wake_children(command, committed.partitions)
        return committed

    def _release(self, command: Release, _: Try) -> Answer:
        subject, group = self._subject(command.subject), self._group(command.subject, command.group)
        told = self.broker.gates.without_moved(subject, group, command.progress)
        self.broker.release(group, msgspec.structs.replace(command, progress=told))
        self._held.wake_later(("lease", command.subject, command.group, command.partition))
        self._wake_askers(command, command.progress.requests)
        self._wake_children(command, [command.partition])
        return Done()

    def _fetch(self, command: Fetch, attempt: Try) -> Answer | None:
        group = self._group(command.subject, command.group)
        _check_mode(group, GroupMode.SHARED)
        fetched = self.broker.fetch(self._subject(command.subject), group, command, is_first=attempt is Try.FIRST)
        part = self.broker.sharing.find(group, command.partition)
        is_waited_for = part is not None and part.is_newest(command.member, command.ask)
        waits = attempt is not Try.LAST and command.wait_s > 0 and is_waited_for
        return None if waits and not fetched.deliveries else fetched

    def _acknowledge(self, command: Acknowledge, _: Try) -> Answer:
        group = self._group(command.subject, command.group)
        _check_mode(group, GroupMode.SHARED)
        for receipts in command.receipts:
            self.broker.log(self._subject(command.subject), receipts.partition)
        acknowledged = self.broker.sharing.acknowledge(group, command)
        for receipts in command.receipts:
            if receipts.returned:
                self._held.wake_later(("log", command.subject, receipts.partition))
        return acknowledged

    def _wake_askers(self, command: Commit | Release | ResetGroup, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._held.wake_later(("request", command.subject, command.group, request_id))

    def _open_retry(self, command: OpenRetry, _: Try) -> Answer:
        subject = self._subject(command.subject)
        name = retry_subject(check_name("group", command.group), command.subject)
        known = self._known_subjects.get(name)
        if known is not None and known.partition_count != command.levels:
            raise GroupConflict(
                command.group,
                f"its retry subject has {known.partition_count} delays, this consumer asks for {command.levels}; "
                "use as many RetryDelays.levels_s",
            )
        return known if known is not None else self._new_derived(name, command.levels, Routing.SELECTOR, subject)

    def _open_dead_letters(self, command: OpenDeadLetters, _: Try) -> Answer:
        subject = self._subject(command.subject)
        name = dead_letter_subject(check_name("group", command.group), origin_of(command.group, subject.name))
        known = self._known_subjects.get(name)
        if known is not None:
            return known
        return self._new_derived(name, 1, Routing.SLOTS, subject, subject.limits)

    def _new_derived(
        self, name: str, partitions: int, routing: Routing, subject: Subject, limits: Limits | None = None
    ) -> Subject:
        """A subject of ours, in the broker group of the first partition of the one it is for."""
        home = (subject.route.partitions[0].broker_group,)
        return self._new_subject(name, partitions, routing, limits=limits, broker_groups=home, reserved=True)

    def _move(self, command: Move, reply: Reply) -> None:
        with self._lock:
            self._check_open(command)
            group = self._group(command.subject, command.group)
            check_target(group, command.to_subject)
            target = self._subject(command.to_subject)
            if not group.is_exclusive:
                _check_mode(group, GroupMode.SHARED)
                self.broker.log(self._subject(command.subject), command.partition)
                self.broker.sharing.check(group, command.partition, command.epoch, command.member, command.receipts)
        self._store_moved(group, target, command, reply)

    def _store_moved(self, group: GroupRecord, target: Subject, command: Move, reply: Reply) -> None:
        if self.broker.state is not BrokerGroupState.AVAILABLE:
            raise BrokerGroupClosed(self.broker.broker_group, self.broker.state.value)
        self.broker.move(group, target, command, reply)

    # Producing

    def _open_producer(self, command: OpenProducer, _: Try) -> Answer:
        if command.name is not None:
            check_name("producer", command.name)
        return ProducerOpened(*self.broker.producer_ids.open(command.name, command.nonce))

    # Looking and steering

    def _create_subject(self, command: CreateSubject, _: Try) -> Answer:
        return self._new_subject(
            command.name,
            command.partitions,
            one_of(Routing, "routing", command.routing),
            one_of(Strategy, "strategy", command.strategy),
            command.limits,
            one_of(Keyless, "keyless", command.keyless),
            broker_groups=command.broker_groups,
        )

    def _new_subject(
        self,
        name: str,
        partitions: int,
        routing: Routing,
        strategy: Strategy = Strategy.STRICT,
        limits: Limits | None = None,
        keyless: Keyless = Keyless.INDEPENDENT,
        *,
        broker_groups: Sequence[str] = (),
        reserved: bool = False,
    ) -> Subject:
        limits = limits if limits is not None else Limits()
        known = self._known_subjects.get(name)
        homes: Sequence[str] = broker_groups
        if known is None or broker_groups:
            homes = self.registry.chosen(partitions, broker_groups, self._known_subjects.values())
        subject = self._subjects.create(
            name,
            partitions,
            routing,
            strategy,
            limits,
            self._clock.time_ms(),
            homes or (LOCAL_BROKER_GROUP,),  # where it is, if it is there
            keyless=keyless,
            reserved=reserved,
            is_chosen=bool(broker_groups),
        )
        if subject.name not in self._known_subjects:
            self._open_subject(subject)
        return subject

    def _grow_subject(self, command: GrowSubject, _: Try) -> Answer:
        """Seal the parents, store route and barriers, tell everybody. Before the second step nothing has happened."""
        subject, stored = self._subject(command.name), self._subjects.get(command.name)
        if stored.route.version > subject.route.version:  # the database took it, and its answer was lost
            self._grown(subject, stored)
            subject = stored
        check_growth(subject, command.partitions)
        if command.partitions == subject.partition_count:
            return subject
        logs = [self.broker.log(subject, index) for index in range(subject.partition_count)]
        barriers = {index: log.seal(subject.name, subject.route.version + 1) for index, log in enumerate(logs)}
        try:
            for log in logs:
                log.sync()  # a gate looks at what is below the barrier, and readers see only what is synced
            route = subject.route.grown(command.partitions, barriers)
            grown = self._subjects.grow(route, self._clock.time_ms())
        except BaseException:
            if self._subjects.get(command.name).route.version == subject.route.version:
                for log in logs:
                    log.seal(subject.name, subject.route.version)
            raise
        self._grown(subject, grown)
        return grown

    def _grown(self, before: Subject, subject: Subject) -> None:
        for index in self.broker.owned(before):
            self.broker.log(before, index).seal(subject.name, subject.route.version)
        if self._observer is not None:
            self._observer.grown(subject)
        self._open_subject(subject, before.partition_count)
        for group in self.membership.groups():
            if group.subject == subject.name:
                self.membership.reassign(group, subject)
                self._announce(group)

    def _set_broker_group(self, command: SetBrokerGroup, _: Try) -> Answer:
        state = one_of(BrokerGroupState, "state", command.state)
        self.registry.set_state(command.name, state)
        if command.name == self.broker.broker_group:
            self._be(state)
        groups = self.registry.describe(self._known_subjects.values())
        return next(one for one in groups if one.name == command.name)

    def _be(self, state: BrokerGroupState) -> None:
        """What is held back hears of it at once."""
        self.broker.state = state
        for key in self._held.keys(_NEW_WORK):
            self._held.wake_later(key)

    def _describe_subject(self, command: DescribeSubject, _: Try) -> Answer:
        subject = self._subject(command.name)
        return SubjectDescription(subject, self.broker.describe(subject))

    def _describe_node(self, _: DescribeNode, __: Try) -> Answer:
        up_s = self._clock.monotonic() - self._started_at_s
        restless = self.broker.leases.changes.restless()
        return NodeDescription(SOFTWARE, self._clock.time_ms(), up_s, self.readiness(), self._room(), restless)

    def _resolve_position(self, command: ResolvePosition, _: Try) -> Answer:
        return Offsets(self.broker.resolve(self._subject(command.subject), parse_position(command.position)))

    def _describe_group(self, command: DescribeGroup, _: Try) -> Answer:
        subject = self._subject(command.subject)
        group = self._group(command.subject, command.group)
        # What a broadcast group has done is known to its members only.
        is_known = group.mode is not GroupMode.BROADCAST
        partitions = self.broker.group_partitions(subject, group) if is_known else ()
        return GroupDescription(
            subject.name,
            group.name,
            self.membership.members(group),
            partitions,
            self.membership.describe(group),
            self.membership.order(group),
            self.membership.strategy(group),
            self.broker.group_claims(subject, group),
            self.membership.taken_over_by(group),
            group.mode.value,
            self.membership.decided_order(group),
            self.membership.tags(group),
        )

    def _reset_group(self, command: ResetGroup, _: Try) -> Answer:
        subject = self._subject(command.subject)
        position = parse_position(command.position)
        group = self._group(command.subject, command.group)
        self._check_reset(group)
        taken_back = self.broker.reset(subject, group, position)
        if taken_back:
            self._announce(group)
            self._wake_askers(command, taken_back)
        return Done()

    def _check_reset(self, group: GroupRecord) -> None:
        if group.mode is GroupMode.BROADCAST:
            raise GroupConflict(
                group.name, "its members keep their own offsets; stop one, remove its offset file, and start it anew"
            )
        members = self.membership.members(group)
        if members and not group.is_exclusive:
            raise GroupConflict(group.name, f"{members[0]} consumes it; stop the group's consumers before a reset")

    def _set_order(self, command: SetOrder, _: Try) -> Answer:
        group = self._group(command.subject, command.group)
        order = one_of(Order, "order", command.order) if command.order else None
        if group.mode is GroupMode.SHARED:
            raise GroupConflict(group.name, "it is a shared group, which keeps no order; use another group for that")
        check_parked(group, order, self.keys.list_keys(group))
        self._groups.set_order(group.id, order)
        self.membership.decide_order(group, order)
        self._held.wake_later(("group", group.subject, group.name))
        return Done()

    # Keys

    def _steer_key(self, command: SteerKey, _: Try) -> Answer:
        subject, group = self._subject(command.subject), self._group(command.subject, command.group)
        self._check_steering(group, command)
        request, is_new = self.keys.steer(subject, group, command, partial(self.broker.gates.home, subject, group))
        if is_new:
            self._announce(group)
        return request

    def _check_steering(self, group: GroupRecord, command: SteerKey) -> None:
        if not group.is_exclusive:
            raise GroupConflict(
                group.name,
                f"it is a {group.mode.value} group, in which no key waits for anything; there is nothing to do",
            )
        order = self.membership.order(group)
        if command.action == KeyAction.PARK and order not in (None, Order.KEY):
            raise GroupConflict(
                group.name, f"its members use order={order!r}; a key can be parked only with order='key'"
            )

    def _announce(self, group: GroupRecord) -> None:
        self.membership.announce(group)
        self._held.wake_later(("group", group.subject, group.name))

    def _find_request(self, command: FindRequest, attempt: Try) -> Answer | None:
        group = self._group(command.subject, command.group)
        waits = attempt is not Try.LAST and command.wait_s > 0
        return None if waits and self.keys.is_waiting(group, command.id) else self.keys.find(group, command.id)

    def _describe_key(self, command: DescribeKey, _: Try) -> Answer:
        group = self._group(command.subject, command.group)
        return self.keys.describe(self._subject(command.subject), group, command)

    # Trials

    def _try_message(self, command: TryMessage, _: Try) -> Answer:
        subject, group = self._subject(command.subject), self._group(command.subject, command.group)
        members = self.membership.members(group)
        member = chosen_member(group, members, command.member)
        self.trials.forget(group, members)
        self._check_stored(subject, command.partition, command.offset)
        trial, is_new = self.trials.ask(group, member, command)
        if is_new:
            self._announce(group)
        return trial

    def _check_stored(self, subject: Subject, partition: int, offset: int) -> None:
        self.broker.check_stored(subject, partition, offset)

    def _find_trial(self, command: FindTrial, attempt: Try) -> Answer | None:
        group = self._group(command.subject, command.group)
        state = self.trials.find(group, command.id)
        if state.result is None and state.member not in self.membership.members(group):
            self.trials.give_up(group, command.id)
            raise NotFound(
                "member",
                state.member,
                "it left before it told a result; the message may have been handled",
            )
        if state.result is None and attempt is not Try.LAST and command.wait_s > 0:
            return None
        if command.gives_up:
            self.trials.give_up(group, command.id)
            self._announce(group)  # its member is to forget it
        return state

    def _report_trial(self, command: ReportTrial, _: Try) -> Answer:
        if self.trials.report(self._group(command.subject, command.group), command):
            self._held.wake_later(("trial", command.subject, command.group))
        return Done()

    # Names

    def _subject(self, name: str) -> Subject:
        subject = self._known_subjects.get(check_name("subject", name, reserved=True))
        if subject is None:
            raise NotFound("subject", name, "create it first: create_subject(), or `inturn subject create`")
        return subject

    def _open_subject(self, subject: Subject, first: int = 0) -> None:
        """`first`: the partitions before are open already."""
        self._known_subjects[subject.name] = subject
        for index in self.broker.owned(subject):
            if index < first:
                continue
            log = self.broker.open_log(subject.route.partitions[index])
            log.on_grown(partial(self.wake, ("log", subject.name, index)))
            log.seal(subject.name, subject.route.version)

    def _group(self, subject: str, name: str) -> GroupRecord:
        group = self._known_groups.get((check_name("subject", subject, reserved=True), check_name("group", name)))
        if group is None:
            raise NotFound("group", name, f"no consumer has joined it on subject {subject!r} yet")
        return group

    def _group_or_new(self, subject: Subject, command: Heartbeat) -> GroupRecord:
        known = self._known_groups.get((subject.name, command.group))
        mode = one_of(GroupMode, "mode", command.mode)
        if known is not None:
            _check_mode(known, mode)
            return known
        check_name("group", command.group)
        return self._new_group(subject, command.group, command.start, mode)

    def _new_group(self, subject: Subject, name: str, start: str, mode: GroupMode) -> GroupRecord:
        starts = self.broker.resolve(subject, parse_position(start))
        group_id = self._groups.create(subject.name, name, start, starts, self._clock.time_ms(), mode)
        group = GroupRecord(subject.name, name, group_id, start, mode)
        self._known_groups[subject.name, name] = group
        return group


def check_parked(group: GroupRecord, order: Order | None, found: KeyList) -> None:
    """GroupConflict if keys are parked, of which that order knows nothing."""
    parked = [one for one in found.keys if one.state in (LotState.PARKED, LotState.RESUMING)]
    if parked and order not in (None, Order.KEY):
        raise GroupConflict(
            group.name,
            f"{len(parked)} of its keys are parked, which order={order!r} knows nothing of; resume them first: "
            "`inturn key list`",
        )


def _check_mode(group: GroupRecord, mode: GroupMode) -> None:
    if group.mode is not mode:
        raise GroupConflict(
            group.name,
            f"it was made with mode={group.mode.value!r}, this asks for {mode.value!r}; use the same, or another group",
        )


def _if_any(pulled: Pulled, command: Pull | Read, attempt: Try) -> Pulled | None:
    has_news = pulled.next_offset > command.offset
    return pulled if has_news or attempt is Try.LAST or command.wait_s <= 0 else None


def _is_of(command: Command, leave: Leave) -> bool:
    """Whether the command came from the member that leaves."""
    if not isinstance(command, _OF_MEMBER):
        return False
    return (command.subject, command.group, command.member) == (leave.subject, leave.group, leave.member)
