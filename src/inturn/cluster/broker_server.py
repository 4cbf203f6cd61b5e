"""A broker server: the logs of one broker group, with the subjects and groups that meta has announced.

The broker has the leases, epochs, offsets, parking lots and growth gates of its partitions, and goes on without meta.
The broker asks meta for unknown subjects and groups. Every second the broker reports to meta, and reads the catalogue
after a change. While meta grows a subject, the parents of the growth are sealed: sealed logs take no appends by the old
route.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from inturn.broker.broker import Broker
from inturn.cluster.broker_links import BrokerAddresses, BrokerStreams
from inturn.log.engine import LogEngine
from inturn.model.errors import (
    AlreadyExists,
    BrokerGroupClosed,
    Closed,
    ConnectionLost,
    InturnError,
    InvalidInput,
    ServerStopping,
)
from inturn.model.logs import get_logger
from inturn.model.settings import BrokerGroupState, GroupMode, LeaseSettings, one_of
from inturn.model.subject import Subject
from inturn.model.time import Clock, Timers
from inturn.node.acceptance import AnswerTable, CommandService, Try, not_for_this_server
from inturn.node.catalog import Catalog
from inturn.node.group_commands import GroupCommands, MemberLeases
from inturn.node.service_node import ServiceNode
from inturn.node.services import BrokerServices, new_broker
from inturn.node.subject_commands import Routes
from inturn.protocol.commands import (
    Answer,
    Append,
    BrokerOrders,
    Catalogue,
    Command,
    CreateSubject,
    DiskRoom,
    Done,
    FindGroup,
    FindMessage,
    FindSubject,
    FindTrial,
    ForgetMember,
    GroupOpened,
    GrowSubject,
    Heartbeat,
    LearnProducer,
    LearnSubject,
    Leave,
    ListRequests,
    OpenDeadLetters,
    OpenGroup,
    OpenProducer,
    OpenRetry,
    Read,
    ReadCatalogue,
    Reply,
    ReportBroker,
    ReportTrial,
    RequestList,
    ResolvePosition,
    Sealed,
    SealSubject,
    SetOrder,
    TryMessage,
)
from inturn.protocol.observer import Observer
from inturn.protocol.request import ask
from inturn.security.credentials import Credentials
from inturn.store.cluster import Seal, SealRows, count_requests_from
from inturn.store.database import Database
from inturn.store.groups import GroupRecord
from inturn.store.subjects import Subjects
from inturn.transport.client import RemoteNode


class Seals:
    """The seals of growths that meta has begun. Durable. Call under the node's lock."""

    def __init__(self, rows: SealRows) -> None:
        self._rows = rows
        self._seals = rows.all()

    @property
    def growths(self) -> tuple[str, ...]:
        return tuple(seal.growth for seal in self._seals.values())

    def sealed_for(self, subject: Subject) -> int:
        """The route version below which the subject's logs take no appends: the version of a growth that has begun, or
        the present version."""
        seal = self._seals.get(subject.name)
        return subject.route.version if seal is None else seal.version

    def put(self, seal: Seal) -> None:
        self._rows.put(seal)
        self._seals[seal.subject] = seal

    def settle(self, subject: Subject) -> None:
        """Remove the seal if the broker knows the route that the subject was sealed for."""
        seal = self._seals.get(subject.name)
        if seal is not None and seal.version <= subject.route.version:
            self._remove(seal)

    def break_void(self, growths: Container[str]) -> list[str]:
        """Remove the seals of void growths. Returns the subjects of these seals."""
        void = [seal for seal in self._seals.values() if seal.growth in growths]
        for seal in void:
            self._remove(seal)
        return [seal.subject for seal in void]

    def _remove(self, seal: Seal) -> None:
        self._rows.remove(seal.subject)
        del self._seals[seal.subject]


class CatalogUpdates(CommandService):
    """Subjects, growths, named producers and groups that meta announces."""

    def __init__(
        self,
        catalog: Catalog,
        rows: Subjects,
        routes: Routes,
        groups: GroupCommands,
        broker: Broker,
        seals: Seals,
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._rows = rows
        self._routes = routes
        self._groups = groups
        self._broker = broker
        self._seals = seals
        self._clock = clock

    @property
    def answers(self) -> AnswerTable:
        return {
            LearnSubject: self._learn_subject,
            LearnProducer: self._learn_producer,
            SealSubject: self._seal_subject,
            OpenGroup: self._open_group,
        }

    # Subjects

    def subject(self, subject: Subject) -> None:
        """Open the subject, or use the newer route. A known route has no effect."""
        before = self._catalog.subjects.get(subject.name)
        if before is not None and before.route.version >= subject.route.version:
            return
        stored = self._rows.learn(subject, self._clock.time_ms())
        self._seals.settle(stored)
        if before is None:
            self._routes.open(stored)
        else:
            self._routes.replace(before, stored)

    def _learn_subject(self, command: LearnSubject, _: Try) -> Answer:
        self.subject(command.subject)
        return Done()

    def _seal_subject(self, command: SealSubject, _: Try) -> Answer:
        """The seal is durable before meta gets the ends: no append ever lands below an end, even after a crash."""
        subject = self._catalog.subject(command.name)
        if command.version != subject.route.version + 1:
            raise InvalidInput(
                f"subject {subject.name!r} has route version {subject.route.version} at broker group "
                f"{self._broker.broker_group!r}, and cannot be sealed for version {command.version}; grow it again"
            )
        self._seals.put(Seal(subject.name, command.version, command.growth))
        barriers = self._broker.seal(subject, command.version)
        for index in barriers:
            self._broker.log(subject, index).sync()
        return Sealed(tuple(sorted(barriers.items())))

    def break_seals(self, void: Container[str]) -> None:
        """These growths are void: the old routes hold again."""
        for name in self._seals.break_void(void):
            subject = self._catalog.subject(name)
            self._broker.seal(subject, subject.route.version)

    # Producers and groups

    def _learn_producer(self, command: LearnProducer, _: Try) -> Answer:
        self._broker.producer_ids.learn(command.producer)
        return Done()

    def group(self, subject: str, name: str, start: str, mode: str) -> GroupRecord:
        """The group. An unknown group starts now."""
        known = self._catalog.groups.get((subject, name))
        if known is not None:
            return known
        return self._groups.make(self._catalog.subject(subject), name, start, one_of(GroupMode, "mode", mode))

    def _open_group(self, command: OpenGroup, _: Try) -> Answer:
        group = self.group(command.subject, command.group, command.start, command.mode)
        holders = self._broker.leases.holders(group)
        return GroupOpened(group.start, group.mode.value, tuple(sorted(holders.items())))


_log = get_logger("inturn.broker")
REPORT_S = 1.0
CATCH_UP_S = 2.0  # how long a starting broker waits for meta
_OF_META = (
    CreateSubject,
    GrowSubject,
    Heartbeat,
    Leave,
    OpenRetry,
    OpenDeadLetters,
    OpenProducer,
    SetOrder,
    TryMessage,
    FindTrial,
    ReportTrial,
)
_NO_GROUP_NEEDED = (OpenGroup, Read, ResolvePosition)  # makes the group, or names the group for an access rule


class MetaCommands(CommandService):
    """Commands that meta sends to a broker."""

    def __init__(self, catalog: Catalog, broker: Broker, member_leases: MemberLeases) -> None:
        self._catalog = catalog
        self._broker = broker
        self._member_leases = member_leases

    @property
    def answers(self) -> AnswerTable:
        return {
            ForgetMember: self._forget_member,
            ListRequests: self._list_requests,
            FindMessage: self._find_message,
        }

    def _forget_member(self, command: ForgetMember, _: Try) -> Answer:
        group = self._catalog.group(command.subject, command.group)
        self._member_leases.leave(group, Leave(command.subject, command.group, command.member))
        return Done()

    def _list_requests(self, command: ListRequests, _: Try) -> Answer:
        return RequestList(self._broker.keys.waiting(self._catalog.group(command.subject, command.group)))

    def _find_message(self, command: FindMessage, _: Try) -> Answer:
        self._broker.check_stored(self._catalog.subject(command.subject), command.partition, command.offset)
        return Done()


class BrokerServer(ServiceNode):
    """Owns the stream to meta. `report` starts the reports to meta."""

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
        broker_group: str,
        folder_id: str,
        meta: RemoteNode,
        credentials: Credentials,
        report_s: float = REPORT_S,
    ) -> None:
        self._database = database
        self._folder_id = folder_id
        self._meta = meta
        self._report_s = report_s
        self._address = ""
        self._catalogue_version = ""
        self._is_counting = False
        self._void: tuple[str, ...] = ()  # growths whose seals are broken once the catalogue is read
        self._streams = BrokerStreams(BrokerAddresses(meta).locate, clock, credentials)
        self._seals = Seals(SealRows(database))
        broker = self.broker = new_broker(
            database, engine, clock, lease, observer, local=False, broker_group=broker_group
        )
        super().__init__(
            database,
            engine,
            clock,
            timers,
            lease,
            room=room,
            broker=broker,
            holders=broker.leases.holders,
            refusal=self._refusal,
        )
        at_broker = BrokerServices(self, broker, observer, forward=self._forward, sealed_for=self._seals.sealed_for)
        at_broker.load()
        broker.producer_ids.gives_out = False
        # Whether meta knows this folder as that of the group. Meta announces subjects to no other folder.
        self._is_accepted = bool(self.catalog.subjects)
        self._updates = CatalogUpdates(
            self.catalog, self.subject_rows, at_broker.routes, self.groups, broker, self._seals, clock
        )
        self.serve(self._updates, MetaCommands(self.catalog, broker, at_broker.member_leases))

    # Clients

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        self._when_known(command, reply, super().submit)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        self._when_known(command, reply, super().submit_remote)

    def _when_known(
        self, command: Command, reply: Reply, then: Callable[[Command, Reply], None], asked: Command | None = None
    ) -> None:
        """A command about an unknown subject, partition or group waits until meta has answered a question. The same
        question is not asked twice for a command."""
        if not self._is_accepted:
            reply(BrokerGroupClosed(self.broker.broker_group, "unavailable", "see the log of its broker"))
            return
        question = self._question(command)
        if question is None or question == asked:
            then(command, reply)
            return

        def answered(answer: Answer | InturnError) -> None:
            if isinstance(answer, InturnError):
                reply(answer)
                return
            try:
                with self.lock:
                    self._update(question, answer)
            except InturnError as error:
                reply(error)
            else:
                self._when_known(command, reply, then, question)

        self._meta.submit(question, answered)

    def _question(self, command: Any) -> FindSubject | FindGroup | None:
        """The question to meta before this command; None: no question."""
        if isinstance(command, LearnSubject):
            return None
        for name in (getattr(command, "subject", None), getattr(command, "to_subject", None)):
            if isinstance(name, str) and name not in self.catalog.subjects:
                return FindSubject(name)
        partition = getattr(command, "partition", None)
        if partition is not None and partition >= self.catalog.subjects[command.subject].partition_count:
            return FindSubject(command.subject)  # the subject has grown, and the client may know that before
        group = None if isinstance(command, _NO_GROUP_NEEDED) else getattr(command, "group", None)
        if group is None or (command.subject, group) in self.catalog.groups:
            return None
        return FindGroup(command.subject, group)

    def _update(self, question: FindSubject | FindGroup, answer: Answer) -> None:
        if isinstance(question, FindSubject) and isinstance(answer, Subject):
            self._updates.subject(answer)
        elif isinstance(question, FindGroup) and isinstance(answer, GroupOpened):
            self._updates.group(question.subject, question.group, answer.start, answer.mode)
        else:
            raise InturnError(f"meta answered {question!r} with {answer!r}")

    def _refusal(self, command: Command) -> InturnError:
        if not isinstance(command, _OF_META):
            return not_for_this_server(command)
        return InvalidInput(
            f"{type(command).__name__} is for the meta server; this is the broker of group {self.broker.broker_group!r}"
        )

    def _forward(self, broker_group: str, command: Append, reply: Reply) -> None:
        self._streams.to(broker_group).submit(command, reply)

    # Reports

    def catch_up(self) -> None:
        """Read the catalogue before the first client is served. If meta is away, the broker uses the last catalogue.

        Raise permanent errors: InvalidInput if the address is not that of a meta server, AlreadyExists if the broker
        group belongs to another folder, AuthenticationFailed and the like.
        """
        try:
            catalogue = ask(self._meta, ReadCatalogue(self.broker.broker_group), Catalogue, patience_s=CATCH_UP_S)
        except (ConnectionLost, ServerStopping) as error:
            _log.warning("broker.without_meta", broker_group=self.broker.broker_group, error=str(error))
            return
        except InvalidInput as error:  # the server does not know the command
            raise InvalidInput(f"{self._meta!r} is no meta server of this version; check --meta") from error
        if catalogue.identity not in ("", self._folder_id):
            raise AlreadyExists("broker group", self.broker.broker_group, "another folder (is its disk mounted?)")
        self._take_over(catalogue)
        self._is_accepted = True
        if catalogue.state:
            with self.lock:
                self._set_state(catalogue.state)

    def report(self, address: str) -> None:
        """Report to meta from now on, with the address that clients and meta use."""
        self._address = address
        self._report()

    def _report(self) -> None:
        if self.admission.is_closed:
            return
        with self.lock:
            seals = self._seals.growths
        report = ReportBroker(self.broker.broker_group, self._folder_id, self._address, self.lease.life_s, seals)
        self._meta.submit(report, self._reported)

    def _reported(self, answer: Answer | InturnError) -> None:
        try:
            if isinstance(answer, BrokerOrders):
                self._obey(answer)
            elif not isinstance(answer, InturnError) or not answer.retriable:
                self._is_accepted &= not isinstance(answer, AlreadyExists)
                _log.error("broker.refused", broker_group=self.broker.broker_group, error=str(answer))
        except InturnError as error:
            _log.error("broker.not_updated", broker_group=self.broker.broker_group, error=str(error))
        finally:
            if not self.admission.is_closed:
                self.timers.at(self.clock.monotonic() + self._report_s, self._report)

    def _obey(self, orders: BrokerOrders) -> None:
        with self.lock:
            if self.admission.is_closed:
                raise Closed("node")
            if not self._is_counting:
                count_requests_from(self._database, orders.number)
                self._is_counting = True
            self._is_accepted = True
            self._set_state(orders.state)
            is_current = orders.version == self._catalogue_version
            if is_current:
                self._updates.break_seals(orders.void)
            else:
                self._void = orders.void
        if not is_current:
            self._meta.submit(ReadCatalogue(self.broker.broker_group), self._read_catalogue)

    def _set_state(self, state: str) -> None:
        wanted = one_of(BrokerGroupState, "state", state)
        if wanted is not self.broker.state:
            self.broker_groups.set(self.broker.broker_group, wanted)

    def _read_catalogue(self, answer: Answer | InturnError) -> None:
        if not isinstance(answer, Catalogue):
            return  # the answer to the next report asks for it again
        try:
            self._take_over(answer)
            with self.lock:  # newer than the orders: has the result of a growth that the orders called void
                self._updates.break_seals(self._void)
        except InturnError as error:
            _log.error("broker.not_updated", broker_group=self.broker.broker_group, error=str(error))

    def _take_over(self, catalogue: Catalogue) -> None:
        with self.lock:
            with self._database.transaction():
                for producer in catalogue.producers:
                    self.broker.producer_ids.learn(producer)
            for subject in catalogue.subjects:
                if any(one.broker_group == self.broker.broker_group for one in subject.route.partitions):
                    self._updates.subject(subject)
            self._catalogue_version = catalogue.version

    # Life cycle

    def stop_gently(self) -> None:
        """Accept no new work. Members keep their leases, and go on when the broker is back."""
        with self.lock:
            self.admission.is_stopping = True

    @property
    def held_count(self) -> int:
        """0: leases are durable, so no consumer has to release a lease before the broker ends."""
        return 0

    def close(self) -> None:
        super().close()
        self._meta.close()
        self._streams.close()

    def disown(self) -> None:
        super().disown()
        self._meta.disown()
        self._streams.disown()
