"""The seals of a broker: meta is about to grow subjects, whose partitions take nothing by the old route meanwhile.

What a broker learns from meta: subjects and their growth, named producers, groups.

A broker: a node with the logs of one broker group, that knows what meta has told it.

It has the leases, epochs, offsets, lots and gates of its partitions, and goes on without meta. What it does not know
yet it asks meta for; every second it says that it is alive, and hears what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from inturn.broker.broker import Broker
from inturn.cluster.broker_links import BrokerLinks, Whereabouts
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
from inturn.node.acceptance import AnswerTable, Try
from inturn.node.catalog import Known, Neighbours
from inturn.node.group_commands import GroupCommands
from inturn.node.node import InProcessNode
from inturn.node.subject_commands import GrowthCommands, SubjectCommands
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
    RequestList,
    ResolvePosition,
    Sealed,
    SealSubject,
)
from inturn.protocol.observer import Observer
from inturn.protocol.request import ask
from inturn.security.credentials import Credentials
from inturn.store.cluster import Seal, SealRows, count_requests_from
from inturn.store.database import Database
from inturn.store.groups import GroupRecord
from inturn.transport.client import RemoteNode


class Seals:
    """Durable. Call it under the node's lock."""

    def __init__(self, rows: SealRows) -> None:
        self._rows = rows
        self._seals = rows.all()

    @property
    def growths(self) -> tuple[str, ...]:
        return tuple(seal.growth for seal in self._seals.values())

    def sealed_for(self, subject: Subject) -> int:
        """The route version before which its logs take no appends: that of a growth that has begun, or its own."""
        seal = self._seals.get(subject.name)
        return subject.route.version if seal is None else seal.version

    def put(self, seal: Seal) -> None:
        self._rows.put(seal)
        self._seals[seal.subject] = seal

    def settle(self, subject: Subject) -> None:
        """The route that it was sealed for is known: that is over."""
        seal = self._seals.get(subject.name)
        if seal is not None and seal.version <= subject.route.version:
            self._remove(seal)

    def break_void(self, growths: Container[str]) -> list[str]:
        """These growths came to nothing. Returns the subjects that were sealed for them."""
        void = [seal for seal in self._seals.values() if seal.growth in growths]
        for seal in void:
            self._remove(seal)
        return [seal.subject for seal in void]

    def _remove(self, seal: Seal) -> None:
        self._rows.remove(seal.subject)
        del self._seals[seal.subject]


class LearningCommands:
    def __init__(
        self,
        known: Known,
        subjects: SubjectCommands,
        growth: GrowthCommands,
        groups: GroupCommands,
        broker: Broker,
        seals: Seals,
        clock: Clock,
    ) -> None:
        self._known = known
        self._subjects = subjects
        self._growth = growth
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
        """Open it, or go on with its newer route; nothing if that is known."""
        before = self._known.subjects.get(subject.name)
        if before is not None and before.route.version >= subject.route.version:
            return
        learnt = self._subjects.rows.learn(subject, self._clock.time_ms())
        self._seals.settle(learnt)
        if before is None:
            self._subjects.open(learnt)
        else:
            self._growth.grown(before, learnt)

    def _learn_subject(self, command: LearnSubject, _: Try) -> Answer:
        self.subject(command.subject)
        return Done()

    def _seal_subject(self, command: SealSubject, _: Try) -> Answer:
        """Durable before the ends are told: whatever happens to this process, nothing more comes below them."""
        subject = self._known.subject(command.name)
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
        """These growths came to nothing: the old routes hold again."""
        for name in self._seals.break_void(void):
            subject = self._known.subject(name)
            self._broker.seal(subject, subject.route.version)

    # Producers and groups

    def _learn_producer(self, command: LearnProducer, _: Try) -> Answer:
        self._broker.producer_ids.learn(command.producer)
        return Done()

    def group(self, subject: str, name: str, start: str, mode: str) -> GroupRecord:
        """The group, which begins here now unless it is known."""
        known = self._known.groups.get((subject, name))
        if known is not None:
            return known
        return self._groups.make(self._known.subject(subject), name, start, one_of(GroupMode, "mode", mode))

    def _open_group(self, command: OpenGroup, _: Try) -> Answer:
        group = self.group(command.subject, command.group, command.start, command.mode)
        holders = self._broker.leases.holders(group)
        return GroupOpened(group.start, group.mode.value, tuple(sorted(holders.items())))


_log = get_logger("inturn.broker")
REPORT_S = 1.0
CATCH_UP_S = 2.0  # how long a broker that starts waits for meta
_OF_META = (CreateSubject, GrowSubject, Heartbeat, Leave, OpenRetry, OpenDeadLetters, OpenProducer)
_NO_GROUP_NEEDED = (OpenGroup, Read, ResolvePosition)  # which makes it, or names it for the sake of a right


class BrokerNode(InProcessNode):
    """It owns the stream to meta. `report` begins to tell meta of it."""

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
        self._lease = lease
        self._report_s = report_s
        self._address = ""
        self._catalogue_version = ""
        self._is_counting = False
        self._void: tuple[str, ...] = ()  # growths whose seals are broken once the catalogue is read
        self._links = BrokerLinks(Whereabouts(meta).locate, clock, credentials)
        self._seals = Seals(SealRows(database))
        super().__init__(
            database,
            engine,
            clock,
            timers,
            lease,
            observer,
            local=False,
            room=room,
            broker_group=broker_group,
            neighbours=Neighbours(forward=self._forward, sealed_for=self._seals.sealed_for),
        )
        self.broker.producer_ids.gives_out = False
        # Whether meta knows this folder as that of the group. It tells nobody else of subjects.
        self._is_accepted = bool(self.known.subjects)
        self._learning = LearningCommands(
            self.known, self.subjects, self.growth, self.groups, self.broker, self._seals, clock
        )
        self.answers |= dict.fromkeys(_OF_META, self._refuse)
        self.answers |= self._learning.answers
        self.answers |= {
            ForgetMember: self._forget_member,
            ListRequests: self._list_requests,
            FindMessage: self._find_message,
        }

    # Clients

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        self._when_known(command, reply, super().submit)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        self._when_known(command, reply, super().submit_remote)

    def _when_known(
        self, command: Command, reply: Reply, then: Callable[[Command, Reply], None], asked: Command | None = None
    ) -> None:
        """What is about a subject, partition or group that is not known here waits until meta has told of it; it is not
        asked the same twice."""
        if not self._is_accepted:
            reply(BrokerGroupClosed(self.broker.broker_group, "unavailable", "see the log of its broker"))
            return
        question = self._question(command)
        if question is None or question == asked:
            then(command, reply)
            return

        def told(answer: Answer | InturnError) -> None:
            if isinstance(answer, InturnError):
                reply(answer)
                return
            try:
                with self.lock:
                    self._told(question, answer)
            except InturnError as error:
                reply(error)
            else:
                self._when_known(command, reply, then, question)

        self._meta.submit(question, told)

    def _question(self, command: Any) -> FindSubject | FindGroup | None:
        """What has to be asked first; None: nothing."""
        if isinstance(command, LearnSubject):
            return None
        for name in (getattr(command, "subject", None), getattr(command, "to_subject", None)):
            if isinstance(name, str) and name not in self.known.subjects:
                return FindSubject(name)
        partition = getattr(command, "partition", None)
        if partition is not None and partition >= self.known.subjects[command.subject].partition_count:
            return FindSubject(command.subject)  # it has grown, and clients may have heard of that before
        group = None if isinstance(command, _NO_GROUP_NEEDED) else getattr(command, "group", None)
        if group is None or (command.subject, group) in self.known.groups:
            return None
        return FindGroup(command.subject, group)

    def _told(self, question: FindSubject | FindGroup, answer: Answer) -> None:
        if isinstance(question, FindSubject) and isinstance(answer, Subject):
            self._learning.subject(answer)
        elif isinstance(question, FindGroup) and isinstance(answer, GroupOpened):
            self._learning.group(question.subject, question.group, answer.start, answer.mode)
        else:
            raise InturnError(f"meta answered {question!r} with {answer!r}")

    def _refuse(self, command: Command, _: Try) -> Answer:
        raise InvalidInput(
            f"{type(command).__name__} is for the meta server; this is the broker of group {self.broker.broker_group!r}"
        )

    def _forward(self, broker_group: str, command: Append, reply: Reply) -> None:
        self._links.to(broker_group).submit(command, reply)

    # For meta

    def _forget_member(self, command: ForgetMember, _: Try) -> Answer:
        return self.leaving.leave(Leave(command.subject, command.group, command.member))

    def _list_requests(self, command: ListRequests, _: Try) -> Answer:
        return RequestList(self.broker.keys.waiting(self.known.group(command.subject, command.group)))

    def _find_message(self, command: FindMessage, _: Try) -> Answer:
        self.broker.check_stored(self.known.subject(command.subject), command.partition, command.offset)
        return Done()

    # Reports

    def catch_up(self) -> None:
        """Before anybody is served: hear what was decided while it was away. If meta is away, too, what it knew has to
        do. Raises what will not pass by itself: InvalidInput if that is no meta server, AlreadyExists if the group is
        that of another folder, AuthenticationFailed…"""
        try:
            catalogue = ask(self._meta, ReadCatalogue(self.broker.broker_group), Catalogue, patience_s=CATCH_UP_S)
        except (ConnectionLost, ServerStopping) as error:
            _log.warning("broker.without_meta", broker_group=self.broker.broker_group, error=str(error))
            return
        except InvalidInput as error:  # it does not know the command
            raise InvalidInput(f"{self._meta!r} is no meta server of this version; look at --meta") from error
        if catalogue.identity not in ("", self._folder_id):
            raise AlreadyExists("broker group", self.broker.broker_group, "another folder (is its disk mounted?)")
        self._take_over(catalogue)
        self._is_accepted = True
        if catalogue.state:
            with self.lock:
                self._be(catalogue.state)

    def report(self, address: str) -> None:
        """Tell meta from now on that it is here, and reached at this address."""
        self._address = address
        self._report()

    def _report(self) -> None:
        if self.intake.is_closed:
            return
        with self.lock:
            seals = self._seals.growths
        report = ReportBroker(self.broker.broker_group, self._folder_id, self._address, self._lease.life_s, seals)
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
            if not self.intake.is_closed:
                self._timers.at(self._clock.monotonic() + self._report_s, self._report)

    def _obey(self, orders: BrokerOrders) -> None:
        with self.lock:
            if self.intake.is_closed:
                raise Closed("node")
            if not self._is_counting:
                count_requests_from(self._database, orders.number)
                self._is_counting = True
            self._is_accepted = True
            self._be(orders.state)
            is_current = orders.version == self._catalogue_version
            if is_current:
                self._learning.break_seals(orders.void)
            else:
                self._void = orders.void
        if not is_current:
            self._meta.submit(ReadCatalogue(self.broker.broker_group), self._read_catalogue)

    def _be(self, state: str) -> None:
        wanted = one_of(BrokerGroupState, "state", state)
        if wanted is not self.broker.state:
            self.broker_groups.set(self.broker.broker_group, wanted)

    def _read_catalogue(self, answer: Answer | InturnError) -> None:
        if not isinstance(answer, Catalogue):
            return  # the next report tells again that it is needed
        try:
            self._take_over(answer)
            with self.lock:  # it is newer than the orders: what came of a growth that they called void is in it
                self._learning.break_seals(self._void)
        except InturnError as error:
            _log.error("broker.not_updated", broker_group=self.broker.broker_group, error=str(error))

    def _take_over(self, catalogue: Catalogue) -> None:
        with self.lock:
            with self._database.transaction():
                for producer in catalogue.producers:
                    self.broker.producer_ids.learn(producer)
            for subject in catalogue.subjects:
                if any(one.broker_group == self.broker.broker_group for one in subject.route.partitions):
                    self._learning.subject(subject)
            self._catalogue_version = catalogue.version

    # The end

    def stop_gently(self) -> None:
        """Take no new work. Leases stay with their holders, who go on when it is back."""
        with self.lock:
            self.intake.is_stopping = True

    @property
    def held_count(self) -> int:
        """None that anybody would have to give back before it ends: they are durable."""
        return 0

    def close(self) -> None:
        super().close()
        self._meta.close()
        self._links.close()

    def disown(self) -> None:
        super().disown()
        self._meta.disown()
        self._links.disown()
