"""The meta server: subjects, routes, groups, members, broker groups, producer ids; no logs.

Meta answers most commands as any node. Commands about several brokers are fan-outs. Heartbeats are frequent, so meta
answers without a fan-out; only the first heartbeat of a group makes the group known to the brokers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping

import msgspec

from inturn.broker.producer_ids import ProducerIds
from inturn.cluster.broker_links import Answers, Brokers, homes_of
from inturn.cluster.fan_out import (
    FanOutService,
    FanOutTable,
    FanOutThreads,
    GroupFanOuts,
    KeyFanOuts,
    LocalAnswers,
    SubjectFanOuts,
)
from inturn.log.engine import LogEngine
from inturn.model.errors import GroupConflict, InturnError, InvalidInput, NotFound
from inturn.model.offsets import LAST, parse_position
from inturn.model.settings import GroupMode, LeaseSettings, one_of
from inturn.model.subject import check_name
from inturn.model.time import Clock, Timers
from inturn.node.acceptance import AnswerTable, CommandService, SubmitTable, Try, not_for_this_server
from inturn.node.catalog import Catalog
from inturn.node.service_node import ServiceNode
from inturn.node.services import MetaServices
from inturn.node.subject_commands import Routes
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Append,
    Assignment,
    BrokerGroupDescription,
    BrokerOrders,
    Catalogue,
    Claim,
    Command,
    DiskRoom,
    Done,
    Fetch,
    FindGroup,
    GroupOpened,
    Heartbeat,
    LearnProducer,
    ListRequests,
    Move,
    NamedProducer,
    OpenGroup,
    OpenProducer,
    ProducerOpened,
    Pull,
    Read,
    ReadCatalogue,
    ReadLot,
    ReadyPart,
    Release,
    Reply,
    ReportBroker,
    RequestList,
    SetBrokerGroup,
)
from inturn.protocol.observer import Observer
from inturn.protocol.request import WrappedReply
from inturn.security.credentials import Credentials
from inturn.store.database import Database
from inturn.store.groups import GroupRecord
from inturn.store.producers import Producers
from inturn.transport.address import parse_address

_OF_PARTITION = Append | Acquire | Claim | Pull | Release | Fetch | ReadLot | Move | Read


class ReportedHolders:
    """The members that hold leases at the brokers, as reported when a group was opened. Call under the node's lock."""

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


class HeartbeatFanOut(CommandService):
    """Heartbeats at meta: open the group at the brokers first, and add the brokers' key requests to the answer."""

    def __init__(
        self,
        threads: FanOutThreads,
        catalog: Catalog,
        holders: ReportedHolders,
        brokers: Brokers,
        local: LocalAnswers,
    ) -> None:
        self._threads = threads
        self._catalog = catalog
        self._holders = holders
        self._brokers = brokers
        self._local = local
        self._opened: set[tuple[str, str]] = set()  # groups that all brokers of their subject know
        self._opening: dict[tuple[str, str], threading.Lock] = {}

    @property
    def submits(self) -> SubmitTable:
        return {Heartbeat: self._heartbeat}

    def _heartbeat(self, command: Heartbeat, reply: Reply) -> None:
        with_requests = _WithRequests(self._add_requests, command, reply)
        if (command.subject, command.group) in self._opened or command.subject not in self._catalog.subjects:
            self._local.submit(command, with_requests)
            return

        def opened(answer: Answer | InturnError) -> None:
            if isinstance(answer, InturnError):
                reply(answer)
            else:
                self._local.submit(command, with_requests)

        self._threads.submit(self._open_group, command, opened)

    def _open_group(self, command: Heartbeat) -> Answer:
        """Open the group at all brokers before meta makes the group: a new group starts at the present offsets."""
        name = command.subject, command.group
        with self._brokers.lock:
            lock = self._opening.setdefault(name, threading.Lock())
        with lock:
            if name in self._opened:
                return Done()
            with self._brokers.lock:
                known = self._catalog.groups.get(name)
            start, mode = (command.start, one_of(GroupMode, "mode", command.mode))
            if known is not None:
                start, mode = known.start, known.mode
            check_name("group", command.group)
            parse_position(start)
            homes = self._brokers.homes(command.subject)
            open_group = OpenGroup(*name, start, mode.value)
            if known is None and parse_position(start) == LAST:
                # A broker that opens the group later would start at a later end, and skip messages sent since.
                opened = self._brokers.ask_all(homes, open_group, GroupOpened)
            else:
                answers = self._brokers.tell(homes, open_group)
                opened = {home: one for home, one in answers.items() if isinstance(one, GroupOpened)}
            for one in opened.values():
                if one.mode != mode.value:
                    raise GroupConflict(command.group, f"it was made with mode={one.mode!r}; use the same, or another")
            with self._brokers.lock:
                self._holders.note(name, opened)
            if len(opened) == len(homes):
                self._opened.add(name)
        return Done()

    def _add_requests(self, command: Heartbeat, assignment: Assignment, reply: Reply) -> None:
        """Key requests wait at the brokers."""

        def listed(answers: Answers) -> None:
            lists = [answer for answer in answers.values() if isinstance(answer, RequestList)]
            requests = tuple(sorted((one for found in lists for one in found.requests), key=lambda one: one.id))
            reply(msgspec.structs.replace(assignment, requests=requests))

        self._brokers.gather(homes_of(assignment.subject), ListRequests(command.subject, command.group), listed)


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


class ProducerFanOuts(FanOutService):
    """Named producers: all brokers fence the former producer of the name before the new producer is answered."""

    def __init__(
        self, threads: FanOutThreads, rows: Producers, brokers: Brokers, local: LocalAnswers, lock: threading.RLock
    ) -> None:
        super().__init__(threads)
        self._rows = rows
        self._brokers = brokers
        self._local = local
        self._lock = lock
        self.change_count = self._count_changes()

    @property
    def submits(self) -> SubmitTable:
        return {OpenProducer: self._open}

    def _open(self, command: OpenProducer, reply: Reply) -> None:
        if command.name is None:
            self._local.submit(command, reply)
        else:
            self._threads.submit(self._open_named, command, reply)

    def _open_named(self, command: OpenProducer) -> Answer:
        opened = self._local.ask(command, ProducerOpened)
        with self._lock:
            self.change_count = self._count_changes()
        assert command.name is not None
        self._brokers.ask_heard(LearnProducer(NamedProducer(command.name, opened.producer_id, opened.epoch)), Done)
        return opened

    def _count_changes(self) -> int:
        return sum(one.epoch + 1 for one in self._rows.named())


class BrokerReports(FanOutService):
    """Reports of brokers, and the catalogue for brokers. `growths` holds the growths that may still succeed."""

    def __init__(
        self,
        threads: FanOutThreads,
        node: ServiceNode,
        rows: Producers,
        producers: ProducerFanOuts,
        brokers: Brokers,
        local: LocalAnswers,
        growths: Container[str],
    ) -> None:
        super().__init__(threads)
        self._catalog = node.catalog
        self._registry = node.registry
        self._life_s = node.lease.life_s
        self._rows = rows
        self._producers = producers
        self._brokers = brokers
        self._local = local
        self._growths = growths

    @property
    def answers(self) -> AnswerTable:
        return {
            ReportBroker: self._report_broker,
            ReadCatalogue: self._read_catalogue,
            FindGroup: self._find_group,
        }

    @property
    def fan_outs(self) -> FanOutTable:
        return {SetBrokerGroup: self._set_broker_group}

    @property
    def _version(self) -> str:
        """The version of the catalogue: differs after every change, since no part ever decreases."""
        versions = sum(subject.route.version for subject in self._catalog.subjects.values())
        return f"{len(self._catalog.subjects)}-{versions}-{self._producers.change_count}"

    def _read_catalogue(self, command: ReadCatalogue, _: Try) -> Answer:
        subjects, producers = tuple(self._catalog.subjects.values()), tuple(self._rows.named())
        identity = state = ""
        if command.broker_group in self._registry.names:
            row = self._registry.get(command.broker_group)
            identity, state = row.folder_id, row.state.value
        return Catalogue(self._version, subjects, producers, identity, state)

    def _find_group(self, command: FindGroup, _: Try) -> Answer:
        group = self._catalog.group(command.subject, command.group)
        return GroupOpened(group.start, group.mode.value)

    def _report_broker(self, command: ReportBroker, _: Try) -> Answer:
        if command.life_s != self._life_s:
            raise InvalidInput(
                f"broker group {command.broker_group!r} has leases of {command.life_s:g} s, meta of "
                f"{self._life_s:g} s; give all of them the same --lease-s"
            )
        if parse_address(command.address).path is not None:  # meta would dial it, and show it the brokers' token
            raise InvalidInput(f"a broker at {command.address!r} is reached by nobody else; advertise another address")
        row = self._registry.report(command)
        void = tuple(one for one in command.seals if one not in self._growths)
        return BrokerOrders(row.number, self._version, row.state.value, void)

    def _set_broker_group(self, command: SetBrokerGroup) -> Answer:
        """The broker of the group gets the state at once, or with its next report."""
        changed = self._local.ask(command, BrokerGroupDescription)
        self._brokers.tell([command.name], command)
        return changed


class MetaServer(ServiceNode):
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
        holders = ReportedHolders()
        super().__init__(
            database,
            engine,
            clock,
            timers,
            lease,
            room=room,
            broker=None,
            holders=holders.of,
            refusal=self._refusal,
        )
        self.registry.silent_s = silent_s
        producers = Producers(database)
        routes = Routes(self.catalog, None, self.membership, self.wake, observer)
        at_meta = MetaServices(self, routes, ProducerIds(producers))
        self._threads = threads = FanOutThreads()
        self._brokers = brokers = Brokers(self.catalog, self.registry, self.lock, clock, credentials)
        local = LocalAnswers(self.answer)
        keys = KeyFanOuts(threads, self.catalog, self.membership, self.registry, brokers, local, self.wake)
        subjects = SubjectFanOuts(threads, self.catalog, at_meta.growth, brokers, local)
        named = ProducerFanOuts(threads, producers, brokers, local, self.lock)
        self.serve(
            routes,
            keys,
            subjects,
            named,
            GroupFanOuts(threads, self.catalog, self.groups, keys, brokers, local, self.wake),
            HeartbeatFanOut(threads, self.catalog, holders, brokers, local),
            BrokerReports(threads, self, producers, named, brokers, local, subjects.growths),
        )
        at_meta.load()
        self.load_groups()
        for subject in self.subject_rows.all():
            routes.open(subject)

    def _refusal(self, command: Command) -> InturnError:
        """A client that sends a partition's command to meta learns the partition's broker group."""
        if not isinstance(command, _OF_PARTITION):
            return not_for_this_server(command)
        try:
            subject = self.catalog.subject(command.subject)
        except InturnError as error:
            return error
        place = f"{subject.name}/{command.partition}"
        if not 0 <= command.partition < subject.partition_count:
            return NotFound("partition", place, f"the subject has partitions 0 to {subject.partition_count - 1}")
        home = subject.route.partitions[command.partition].broker_group
        return InvalidInput(f"partition {place} is in broker group {home!r}, not here; ask there")

    def readiness(self) -> tuple[ReadyPart, ...]:
        """With the part `brokers`: ready while at least one broker is heard, or while there are no brokers."""
        with self.lock:
            silent = [name for name in self.registry.names if not self.registry.is_heard(name)]
            count = len(self.registry.names)
        why = f"{len(silent)} of {count} brokers are not heard: {', '.join(silent)}" if silent else ""
        return *super().readiness(), ReadyPart("brokers", not count or len(silent) < count, why)

    # Life cycle

    def stop_gently(self) -> None:
        """Members keep their partitions: a meta server is back soon."""

    def close(self) -> None:
        self._threads.close()
        super().close()
        self._brokers.close()

    def disown(self) -> None:
        super().disown()
        self._brokers.disown()
