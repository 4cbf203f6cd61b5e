"""Meta: subjects and their routes, groups and their members, broker groups; no logs.

What is about several brokers is an errand: asked of each of them in a thread of a few, and put together. Heartbeats,
which are many, are answered without one, but for the first of a group, which makes it known to the brokers.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from inturn.broker.long_polls import Try
from inturn.cluster.brokers import Brokers
from inturn.cluster.gathering import Answers
from inturn.log.engine import LogEngine
from inturn.meta.growth import check_growth
from inturn.model.clock import Clock
from inturn.model.commands import (
    Answer,
    Assignment,
    BrokerGroupDescription,
    BrokerOrders,
    Catalogue,
    Command,
    CreateSubject,
    DescribeGroup,
    DescribeKey,
    DescribeSubject,
    DiskRoom,
    Done,
    FindGroup,
    FindMessage,
    FindRequest,
    ForgetMember,
    GroupDescription,
    GroupOpened,
    GrowSubject,
    Heartbeat,
    KeyDetails,
    KeyList,
    KeyRequest,
    LearnProducer,
    LearnSubject,
    Leave,
    ListKeys,
    ListRequests,
    NamedProducer,
    Offsets,
    OpenDeadLetters,
    OpenGroup,
    OpenProducer,
    OpenRetry,
    ProducerOpened,
    ReadCatalogue,
    ReadyPart,
    Reply,
    ReportBroker,
    RequestList,
    ResetGroup,
    ResolvePosition,
    Sealed,
    SealSubject,
    SetBrokerGroup,
    SetOrder,
    SteerKey,
    SubjectDescription,
    Trial,
    TryMessage,
)
from inturn.model.errors import GroupConflict, InturnError, InvalidInput, NotFound
from inturn.model.logs import get_logger
from inturn.model.names import check_name
from inturn.model.observer import Observer
from inturn.model.position import parse_position
from inturn.model.request import ask
from inturn.model.settings import GroupMode, LeaseSettings, Order, Routing, one_of
from inturn.model.slot import slot_of
from inturn.model.subject import Subject
from inturn.model.timers import Timers
from inturn.node import InProcessNode, check_parked
from inturn.security.credentials import Credentials
from inturn.state.database import Database
from inturn.state.groups import GroupRecord
from inturn.state.node_role import REQUEST_IDS
from inturn.wire.address import parse_address

_log = get_logger("inturn.meta")
ERRANDS_MAX = 16  # at a time
_Wanted = TypeVar("_Wanted")


class MetaNode(InProcessNode):
    def __init__(
        self,
        database: Database,
        engine: LogEngine,
        clock: Clock,
        timers: Timers,
        lease: LeaseSettings,
        observer: Observer | None,
        *,
        room: Callable[[], DiskRoom | None],
        credentials: Credentials,
        silent_s: float,
    ) -> None:
        self._held_at_brokers: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        super().__init__(
            database, engine, clock, timers, lease, observer, room=room, broker_group="", holders=self._holders
        )
        self.registry.silent_s = silent_s
        self._brokers = Brokers(self.registry, self._lock, clock, credentials)
        self._opened: set[tuple[str, str]] = set()  # groups that all brokers of their subject know
        self._opening: dict[tuple[str, str], threading.Lock] = {}
        self._growing = threading.Lock()
        self._growths: set[str] = set()  # attempts that may still come to something
        self._producer_changes = sum(one.epoch + 1 for one in self._producers.named())
        self._pool = ThreadPoolExecutor(ERRANDS_MAX, "inturn-errand")
        self._answers |= {
            ReportBroker: self._report_broker,
            ReadCatalogue: lambda _, __: Catalogue(
                self._catalogue_version, tuple(self._known_subjects.values()), tuple(self._producers.named())
            ),
            FindGroup: self._find_group,
        }
        self._errands: dict[type[Command], Callable[[Any], Answer]] = {
            CreateSubject: self._make_subject,
            OpenRetry: self._make_subject,
            OpenDeadLetters: self._make_subject,
            GrowSubject: self._grow,
            OpenProducer: self._open_named,
            Leave: self._see_off,
            DescribeSubject: self._look_at_subject,
            DescribeGroup: self._look_at_group,
            ResolvePosition: self._resolve,
            ResetGroup: self._reset,
            SetOrder: self._decide_order,
            SteerKey: self._steer,
            ListKeys: self._all_keys,
            DescribeKey: self._look_at_key,
            TryMessage: self._try,
            SetBrokerGroup: self._change_broker_group,
        }

    # Commands

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.model.commands.Node`."""
        kind = type(command)
        if kind is Heartbeat:
            self._hear(command, reply)  # type: ignore[arg-type]
        elif kind is FindRequest:
            self._pass_on(command, reply)  # type: ignore[arg-type]
        elif kind is OpenProducer and command.name is None:  # type: ignore[attr-defined]
            super().submit(command, reply)
        elif kind in self._errands:
            self._go(lambda: self._errands[kind](command), reply)
        else:
            super().submit(command, reply)

    def _go(self, errand: Callable[[], Answer], reply: Reply) -> None:
        """In a thread. What it raises is the answer."""

        def run() -> None:
            answer: Answer | InturnError
            try:
                answer = errand()
            except InturnError as error:
                answer = error
            except Exception as error:
                _log.exception("meta.errand_failed")
                answer = InturnError(f"meta failed: {error!r}")
            reply(answer)

        try:
            self._pool.submit(run)
        except RuntimeError:  # it was closed just now
            super().submit(ReadCatalogue(), reply)  # which says so

    def _here(self, command: Command, wanted: type[_Wanted]) -> _Wanted:
        """What the node itself says, which is at once."""
        return ask(_Inner(super().submit), command, wanted, patience_s=0.0)

    def _homes(self, name: str) -> list[str]:
        """The broker groups of a subject. NotFound."""
        with self._lock:
            partitions = self._subject(name).route.partitions
        return list(dict.fromkeys(one.broker_group for one in partitions))

    def _home(self, name: str, partition: int) -> str:
        """That of a partition; of one that is not there, any that can say so."""
        with self._lock:
            partitions = self._subject(name).route.partitions
        return partitions[partition if 0 <= partition < len(partitions) else 0].broker_group

    # Subjects

    def _make_subject(self, command: CreateSubject | OpenRetry | OpenDeadLetters) -> Answer:
        subject = self._here(command, Subject)
        self._tell(subject)
        return subject

    def _tell(self, subject: Subject) -> None:
        """Brokers that cannot be asked now learn it later by themselves."""
        homes = dict.fromkeys(one.broker_group for one in subject.route.partitions)
        self._brokers.tell(homes, LearnSubject(subject))

    def _grow(self, command: GrowSubject) -> Answer:
        """Seal the parents at all brokers, store route and barriers here, tell the brokers. Before the second step
        nothing has happened, and the seals are broken; after it, it has, whoever dies."""
        with self._growing:
            subject = self._settled(command.name)
            check_growth(subject, command.partitions)
            if command.partitions == subject.partition_count:
                return subject
            self._tell(subject)  # one that was away may not have caught up
            growth = uuid.uuid4().hex
            self._growths.add(growth)
            grown: Subject | None = None
            try:
                seal = SealSubject(subject.name, subject.route.version + 1, growth)
                sealed = self._brokers.ask_all(self._homes(subject.name), seal, Sealed)
                barriers = dict(place for one in sealed.values() for place in one.barriers)
                grown = self._store_grown(subject, command.partitions, barriers)
            finally:
                if grown is not None or self._subjects.get(subject.name).route.version == subject.route.version:
                    self._growths.discard(growth)  # else nobody knows whether it is stored: it stays sealed
            self._tell(grown)
            return grown

    def _settled(self, name: str) -> Subject:
        """As it is stored: perhaps the database took a growth, and its answer was lost."""
        with self._lock:
            subject, stored = self._subject(name), self._subjects.get(name)
            if stored.route.version > subject.route.version:
                self._grown(subject, stored)
            return stored

    def _store_grown(self, subject: Subject, partition_count: int, barriers: Mapping[int, int]) -> Subject:
        with self._lock:
            self._subjects.grow(subject.route.grown(partition_count, barriers), self._clock.time_ms())
            return self._settled(subject.name)

    def _look_at_subject(self, command: DescribeSubject) -> Answer:
        found = self._here(command, SubjectDescription)
        told = self._brokers.ask_all(self._homes(command.name), command, SubjectDescription)
        partitions = sorted((one for each in told.values() for one in each.partitions), key=lambda one: one.index)
        return SubjectDescription(found.subject, tuple(partitions))

    def _resolve(self, command: ResolvePosition) -> Answer:
        parse_position(command.position)
        told = self._brokers.ask_all(self._homes(command.subject), command, Offsets)
        with self._lock:
            partitions = self._subject(command.subject).route.partitions
        offsets = [told[one.broker_group].offsets for one in partitions]
        return Offsets(tuple(each[index] if index < len(each) else 0 for index, each in enumerate(offsets)))

    # Producers

    def _open_named(self, command: OpenProducer) -> Answer:
        """Whoever had the name is fenced at all brokers before the new one is told."""
        opened = self._here(command, ProducerOpened)
        with self._lock:
            self._producer_changes = sum(one.epoch + 1 for one in self._producers.named())
        assert command.name is not None
        self._brokers.ask_heard(LearnProducer(NamedProducer(command.name, opened.producer_id, opened.epoch)), Done)
        return opened

    # Groups

    def _holders(self, group: GroupRecord) -> Mapping[str, tuple[int, ...]]:
        return self._held_at_brokers.get((group.subject, group.name), {})

    def _hear(self, command: Heartbeat, reply: Reply) -> None:
        name = command.subject, command.group
        if name in self._opened or command.subject not in self._known_subjects:
            super().submit(command, _WithRequests(self, command, reply))
            return
        heard = super().submit

        def told(answer: Answer | InturnError) -> None:
            if isinstance(answer, InturnError):
                reply(answer)
            else:
                heard(command, _WithRequests(self, command, reply))

        self._go(lambda: self._open_group(command), told)

    def _open_group(self, command: Heartbeat) -> Answer:
        """Let all brokers know of the group before anybody else does: a new one begins there where it is now."""
        name = command.subject, command.group
        with self._lock:
            lock = self._opening.setdefault(name, threading.Lock())
        with lock:
            if name in self._opened:
                return Done()
            with self._lock:
                known = self._known_groups.get(name)
            start, mode = (command.start, one_of(GroupMode, "mode", command.mode))
            if known is not None:
                start, mode = known.start, known.mode
            check_name("group", command.group)
            parse_position(start)
            homes = self._homes(command.subject)
            told = self._brokers.tell(homes, OpenGroup(*name, start, mode.value))
            opened = {home: one for home, one in told.items() if isinstance(one, GroupOpened)}
            for one in opened.values():
                if one.mode != mode.value:
                    raise GroupConflict(command.group, f"it was made with mode={one.mode!r}; use the same, or another")
            self._note_holders(name, opened)
            if len(opened) == len(homes):
                self._opened.add(name)
        return Done()

    def _note_holders(self, name: tuple[str, str], opened: Mapping[str, GroupOpened]) -> None:
        held: dict[str, tuple[int, ...]] = {}
        for one in opened.values():
            for member, partitions in one.holders:
                held[member] = tuple(sorted((*held.get(member, ()), *partitions)))
        with self._lock:
            self._held_at_brokers[name] = held

    def add_requests(self, command: Heartbeat, assignment: Assignment, reply: Reply) -> None:
        """What waits for somebody to act upon it is with the brokers."""

        def told(answers: Answers) -> None:
            found = [one for each in answers.values() if isinstance(each, RequestList) for one in each.requests]
            requests = tuple(sorted(found, key=lambda one: one.id))
            reply(msgspec.structs.replace(assignment, requests=requests))

        homes = list(dict.fromkeys(one.broker_group for one in assignment.subject.route.partitions))
        self._brokers.gather(homes, ListRequests(command.subject, command.group), told)

    def _find_group(self, command: FindGroup, _: Try) -> Answer:
        group = self._group(command.subject, command.group)
        return GroupOpened(group.start, group.mode.value)

    def _see_off(self, command: Leave) -> Answer:
        done = self._here(command, Done)
        self._brokers.tell(self._homes(command.subject), ForgetMember(command.subject, command.group, command.member))
        return done

    def _look_at_group(self, command: DescribeGroup) -> Answer:
        found = self._here(command, GroupDescription)
        told = self._brokers.ask_all(self._homes(command.subject), command, GroupDescription)
        partitions = sorted((one for each in told.values() for one in each.partitions), key=lambda one: one.partition)
        claims = sorted((one for each in told.values() for one in each.claims), key=lambda one: one.partition)
        held: dict[str, tuple[int, ...]] = {}
        for one in partitions:
            if one.owner is not None and one.remaining_s:
                held[one.owner] = (*held.get(one.owner, ()), one.partition)
        members = tuple(msgspec.structs.replace(one, held=held.get(one.name, ())) for one in found.member_details)
        return msgspec.structs.replace(
            found, partitions=tuple(partitions), claims=tuple(claims), member_details=members
        )

    def _reset(self, command: ResetGroup) -> Answer:
        """First it is looked whether all brokers may, then each does it."""
        with self._lock:
            group = self._group(command.subject, command.group)
            self._check_reset(group)
        parse_position(command.position)
        homes = self._homes(command.subject)
        look = DescribeGroup(command.subject, command.group)
        for told in self._brokers.ask_all(homes, look, GroupDescription).values():
            for one in told.partitions:
                if one.owner is not None and one.remaining_s:
                    raise GroupConflict(
                        group.name,
                        f"{one.owner} holds the lease of partition {one.partition}; stop the group's consumers before "
                        "a reset",
                    )
        try:
            self._brokers.ask_all(homes, command, Done)
        except InturnError as error:
            raise GroupConflict(
                group.name,
                f"it may be reset in a part of its partitions only ({error}); repeat the reset before it is used",
            ) from error
        self._tell_members(group)
        return Done()

    def _tell_members(self, group: GroupRecord) -> None:
        with self._lock:
            self._announce(group)

    def _decide_order(self, command: SetOrder) -> Answer:
        with self._lock:
            group = self._group(command.subject, command.group)
        order = one_of(Order, "order", command.order) if command.order else None
        if order not in (None, Order.KEY):
            check_parked(group, order, self._all_keys(ListKeys(command.subject, command.group)))
        return self._here(command, Done)

    # Keys

    def _steer(self, command: SteerKey) -> Answer:
        with self._lock:
            subject, group = self._subject(command.subject), self._group(command.subject, command.group)
            self._check_steering(group, command)
        partition = command.partition
        if partition is None:
            partition = subject.route.by_slot[slot_of(command.key)]
        request = self._brokers.ask(self._home(command.subject, partition), command, KeyRequest)
        self._tell_members(group)
        return request

    def _pass_on(self, command: FindRequest, reply: Reply) -> None:
        """To the broker whose number the id begins with."""
        number = command.id // REQUEST_IDS
        with self._lock:
            home = self.registry.name_of(number)
        if home is None:
            reply(NotFound("request", str(command.id), "it was taken back, or never made"))
        else:
            self._brokers.to(home).submit(command, reply)

    def _all_keys(self, command: ListKeys) -> KeyList:
        with self._lock:
            self._group(command.subject, command.group)
        told = self._brokers.ask_all(self._homes(command.subject), command, KeyList)
        keys = [one for each in told.values() for one in each.keys]
        keys.sort(key=lambda one: (one.since_ms, one.partition, one.key or b"", one.offset or 0))
        return KeyList(tuple(keys))

    def _look_at_key(self, command: DescribeKey) -> Answer:
        with self._lock:
            subject = self._subject(command.subject)
            self._group(command.subject, command.group)
        if subject.routing is Routing.SLOTS:
            home = self._home(command.subject, subject.route.by_slot[slot_of(command.key)])
            return self._brokers.ask(home, command, KeyDetails)
        told = self._brokers.tell(self._homes(command.subject), command)
        found = [one for one in told.values() if isinstance(one, KeyDetails)]
        if found:
            return min(found, key=lambda one: one.description.since_ms)
        raise next(one for one in told.values() if isinstance(one, InturnError))

    def _try(self, command: TryMessage) -> Answer:
        with self._lock:
            self._group(command.subject, command.group)
        message = FindMessage(command.subject, command.partition, command.offset)
        self._brokers.ask(self._home(command.subject, command.partition), message, Done)
        return self._here(command, Trial)

    def _check_stored(self, subject: Subject, partition: int, offset: int) -> None:
        """Its broker was asked before."""

    # Brokers

    @property
    def _catalogue_version(self) -> str:
        """Another one whenever there is something new: nothing of it ever goes down."""
        versions = sum(subject.route.version for subject in self._known_subjects.values())
        return f"{len(self._known_subjects)}-{versions}-{self._producer_changes}"

    def _report_broker(self, command: ReportBroker, _: Try) -> Answer:
        if command.life_s != self.broker.leases.life_s:
            raise InvalidInput(
                f"broker group {command.broker_group!r} has leases of {command.life_s:g} s, meta of "
                f"{self.broker.leases.life_s:g} s; give all of them the same --lease-s"
            )
        if parse_address(command.address).path is not None:  # it would be dialled here, with what meta shows to brokers
            raise InvalidInput(f"a broker at {command.address!r} is reached by nobody else; advertise another address")
        row = self.registry.report(command)
        void = tuple(one for one in command.seals if one not in self._growths)
        return BrokerOrders(row.number, self._catalogue_version, row.state.value, void)

    def _change_broker_group(self, command: SetBrokerGroup) -> Answer:
        """Its broker hears of it at once, or with its next report."""
        changed = self._here(command, BrokerGroupDescription)
        self._brokers.tell([command.name], command)
        return changed

    def readiness(self) -> tuple[ReadyPart, ...]:
        """With the brokers: ready while one of them is heard, or there is none yet."""
        with self._lock:
            silent = [name for name in self.registry.names if not self.registry.is_heard(name)]
            count = len(self.registry.names)
        why = f"{len(silent)} of {count} brokers are not heard: {', '.join(silent)}" if silent else ""
        return *super().readiness(), ReadyPart("brokers", not count or len(silent) < count, why)

    # The end

    def stop_gently(self) -> None:
        """Members keep what they have: somebody else is meta soon, or it is this one again."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()
        self._brokers.close()

    def disown(self) -> None:
        super().disown()
        self._brokers.disown()


class _Inner:
    """A node that is asked without its errands."""

    def __init__(self, submit: Callable[[Command, Reply], None]) -> None:
        self.submit = submit


class _WithRequests:
    """The reply to a heartbeat. It knows its session, as the reply underneath does."""

    __slots__ = ("_command", "_node", "_reply", "session")

    def __init__(self, node: MetaNode, command: Heartbeat, reply: Reply) -> None:
        self.session = getattr(reply, "session", None)
        self._node = node
        self._command = command
        self._reply = reply

    def __call__(self, answer: Answer | InturnError) -> None:
        if isinstance(answer, Assignment):
            self._node.add_requests(self._command, answer, self._reply)
        else:
            self._reply(answer)
