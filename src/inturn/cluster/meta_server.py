"""How meta hears members: without an errand, but for the first of a group, which makes it known to the brokers.

Meta: subjects and their routes, groups and their members, broker groups; no logs.

What is about several brokers is an errand: asked of each of them in a thread, and put together. Heartbeats, which are
many, are answered without one. All the rest it answers as any node does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from inturn.cluster.broker_links import Answers, Brokers, homes_of
from inturn.cluster.fan_out import Errands, ErrandTable, GroupErrands, Here, KeyErrands, SubjectErrands
from inturn.log.engine import LogEngine
from inturn.model.errors import GroupConflict, InturnError, InvalidInput
from inturn.model.offsets import LAST, parse_position
from inturn.model.settings import GroupMode, LeaseSettings, one_of
from inturn.model.subject import check_name
from inturn.model.time import Clock, Timers
from inturn.node.acceptance import Try
from inturn.node.catalog import Known, Neighbours
from inturn.node.node import InProcessNode
from inturn.protocol.commands import (
    Answer,
    Assignment,
    BrokerGroupDescription,
    BrokerOrders,
    Catalogue,
    Command,
    DiskRoom,
    Done,
    FindGroup,
    FindRequest,
    GroupOpened,
    Heartbeat,
    LearnProducer,
    ListRequests,
    NamedProducer,
    OpenGroup,
    OpenProducer,
    ProducerOpened,
    ReadCatalogue,
    ReadyPart,
    Reply,
    ReportBroker,
    RequestList,
    SetBrokerGroup,
)
from inturn.protocol.observer import Observer
from inturn.protocol.reply import WrappedReply
from inturn.security.credentials import Credentials
from inturn.store.database import Database
from inturn.store.groups import GroupRecord
from inturn.store.producers import Producers
from inturn.transport.address import parse_address


class HoldersThere:
    """Who holds leases at the brokers, as they said when a group was opened. Call it under the node's lock."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Mapping[str, tuple[int, ...]]] = {}

    def of(self, group: GroupRecord) -> Mapping[str, tuple[int, ...]]:
        """The partitions by member."""
        return self._held.get((group.subject, group.name), {})

    def note(self, name: tuple[str, str], opened: Mapping[str, GroupOpened]) -> None:
        held: dict[str, tuple[int, ...]] = {}
        for one in opened.values():
            for member, partitions in one.holders:
                held[member] = tuple(sorted((*held.get(member, ()), *partitions)))
        self._held[name] = held


class Hearing:
    def __init__(self, known: Known, holders: HoldersThere, brokers: Brokers, here: Here, errands: Errands) -> None:
        self._known = known
        self._holders = holders
        self._brokers = brokers
        self._here = here
        self._errands = errands
        self._opened: set[tuple[str, str]] = set()  # groups that all brokers of their subject know
        self._opening: dict[tuple[str, str], threading.Lock] = {}

    def hear(self, command: Heartbeat, reply: Reply) -> None:
        with_requests = _WithRequests(self._add_requests, command, reply)
        if (command.subject, command.group) in self._opened or command.subject not in self._known.subjects:
            self._here.submit(command, with_requests)
            return

        def told(answer: Answer | InturnError) -> None:
            if isinstance(answer, InturnError):
                reply(answer)
            else:
                self._here.submit(command, with_requests)

        self._errands.go(lambda: self._open_group(command), told)

    def _open_group(self, command: Heartbeat) -> Answer:
        """Let all brokers know of the group before anybody else does: a new one begins there where it is now."""
        name = command.subject, command.group
        with self._brokers.lock:
            lock = self._opening.setdefault(name, threading.Lock())
        with lock:
            if name in self._opened:
                return Done()
            with self._brokers.lock:
                known = self._known.groups.get(name)
            start, mode = (command.start, one_of(GroupMode, "mode", command.mode))
            if known is not None:
                start, mode = known.start, known.mode
            check_name("group", command.group)
            parse_position(start)
            homes = self._brokers.homes(command.subject)
            open_group = OpenGroup(*name, start, mode.value)
            if known is None and parse_position(start) == LAST:
                # One that is told later would begin at what is last by then, and pass by what was sent since.
                opened = self._brokers.ask_all(homes, open_group, GroupOpened)
            else:
                told = self._brokers.tell(homes, open_group)
                opened = {home: one for home, one in told.items() if isinstance(one, GroupOpened)}
            for one in opened.values():
                if one.mode != mode.value:
                    raise GroupConflict(command.group, f"it was made with mode={one.mode!r}; use the same, or another")
            with self._brokers.lock:
                self._holders.note(name, opened)
            if len(opened) == len(homes):
                self._opened.add(name)
        return Done()

    def _add_requests(self, command: Heartbeat, assignment: Assignment, reply: Reply) -> None:
        """What waits for somebody to act upon it is with the brokers."""

        def told(answers: Answers) -> None:
            found = [one for each in answers.values() if isinstance(each, RequestList) for one in each.requests]
            requests = tuple(sorted(found, key=lambda one: one.id))
            reply(msgspec.structs.replace(assignment, requests=requests))

        self._brokers.gather(homes_of(assignment.subject), ListRequests(command.subject, command.group), told)


class _WithRequests(WrappedReply):
    """The reply to a heartbeat: adds the key requests of the brokers."""

    __slots__ = ("_add", "_command")

    def __init__(self, add: Callable[[Heartbeat, Assignment, Reply], None], command: Heartbeat, reply: Reply) -> None:
        super().__init__(reply)
        self._add = add
        self._command = command

    def __call__(self, answer: Answer | InturnError) -> None:
        if isinstance(answer, Assignment):
            self._add(self._command, answer, self._reply)
        else:
            self._reply(answer)


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
        holders = HoldersThere()
        neighbours = Neighbours(holders=holders.of)
        super().__init__(
            database, engine, clock, timers, lease, observer, room=room, broker_group="", neighbours=neighbours
        )
        self.registry.silent_s = silent_s
        self._producers = Producers(database)
        self._producer_changes = self._count_producer_changes()
        self._here = here = Here(super().submit)
        self._errands = Errands()
        self._brokers = brokers = Brokers(self.known, self.registry, self.lock, clock, credentials)
        self._hearing = Hearing(self.known, holders, brokers, here, self._errands)
        self._subject_errands = SubjectErrands(self.known, self.growth, brokers, here)
        self._keys = KeyErrands(self.known, self.steering, self.registry, brokers, here, self.waking)
        group_errands = GroupErrands(self.known, self.groups, self._keys, brokers, here, self.waking)
        self._by_errand: ErrandTable = {
            **self._subject_errands.errands,
            **group_errands.errands,
            **self._keys.errands,
            OpenProducer: self._open_named,
            SetBrokerGroup: self._set_broker_group,
        }
        self.answers |= {
            ReportBroker: self._report_broker,
            ReadCatalogue: self._read_catalogue,
            FindGroup: self._find_group,
        }

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        errand = self._by_errand.get(type(command))
        if isinstance(command, Heartbeat):
            self._hearing.hear(command, reply)
        elif isinstance(command, FindRequest):
            self._keys.find_request(command, reply)
        elif errand is None or (isinstance(command, OpenProducer) and command.name is None):
            super().submit(command, reply)
        else:
            self._errands.go(lambda: errand(command), reply)

    # Producers

    def _open_named(self, command: OpenProducer) -> Answer:
        """Whoever had the name is fenced at all brokers before the new one is told."""
        opened = self._here.ask(command, ProducerOpened)
        with self.lock:
            self._producer_changes = self._count_producer_changes()
        assert command.name is not None
        self._brokers.ask_heard(LearnProducer(NamedProducer(command.name, opened.producer_id, opened.epoch)), Done)
        return opened

    def _count_producer_changes(self) -> int:
        return sum(one.epoch + 1 for one in self._producers.named())

    # Brokers

    @property
    def _catalogue_version(self) -> str:
        """Another one whenever there is something new: nothing of it ever goes down."""
        versions = sum(subject.route.version for subject in self.known.subjects.values())
        return f"{len(self.known.subjects)}-{versions}-{self._producer_changes}"

    def _read_catalogue(self, command: ReadCatalogue, _: Try) -> Answer:
        subjects, producers = tuple(self.known.subjects.values()), tuple(self._producers.named())
        identity = state = ""
        if command.broker_group in self.registry.names:
            row = self.registry.get(command.broker_group)
            identity, state = row.folder_id, row.state.value
        return Catalogue(self._catalogue_version, subjects, producers, identity, state)

    def _find_group(self, command: FindGroup, _: Try) -> Answer:
        group = self.known.group(command.subject, command.group)
        return GroupOpened(group.start, group.mode.value)

    def _report_broker(self, command: ReportBroker, _: Try) -> Answer:
        if command.life_s != self.broker.leases.life_s:
            raise InvalidInput(
                f"broker group {command.broker_group!r} has leases of {command.life_s:g} s, meta of "
                f"{self.broker.leases.life_s:g} s; give all of them the same --lease-s"
            )
        if parse_address(command.address).path is not None:  # it would be dialled here, with what meta shows to brokers
            raise InvalidInput(f"a broker at {command.address!r} is reached by nobody else; advertise another address")
        row = self.registry.report(command)
        void = tuple(one for one in command.seals if one not in self._subject_errands.growths)
        return BrokerOrders(row.number, self._catalogue_version, row.state.value, void)

    def _set_broker_group(self, command: SetBrokerGroup) -> Answer:
        """Its broker hears of it at once, or with its next report."""
        changed = self._here.ask(command, BrokerGroupDescription)
        self._brokers.tell([command.name], command)
        return changed

    def readiness(self) -> tuple[ReadyPart, ...]:
        """With the brokers: ready while one of them is heard, or there is none yet."""
        with self.lock:
            silent = [name for name in self.registry.names if not self.registry.is_heard(name)]
            count = len(self.registry.names)
        why = f"{len(silent)} of {count} brokers are not heard: {', '.join(silent)}" if silent else ""
        return *super().readiness(), ReadyPart("brokers", not count or len(silent) < count, why)

    # The end

    def stop_gently(self) -> None:
        """Members keep what they have: somebody else is meta soon, or it is this one again."""

    def close(self) -> None:
        self._errands.close()
        super().close()
        self._brokers.close()

    def disown(self) -> None:
        super().disown()
        self._brokers.disown()
