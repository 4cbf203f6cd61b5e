"""A broker: a node with the logs of one broker group, that knows what meta has told it.

It has the leases, epochs, offsets, lots and gates of its partitions, and goes on without meta. What it does not know
yet it asks meta for; every second it says that it is alive, and hears what has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inturn.broker.long_polls import Try
from inturn.cluster.links import BrokerLinks
from inturn.log.engine import LogEngine
from inturn.model.clock import Clock
from inturn.model.commands import (
    Answer,
    Append,
    Appended,
    BrokerGroupList,
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
    ListBrokerGroups,
    ListRequests,
    Move,
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
from inturn.model.errors import Closed, ConnectionLost, InturnError, InvalidInput, ServerStopping
from inturn.model.logs import get_logger
from inturn.model.observer import Observer
from inturn.model.request import ask
from inturn.model.settings import BrokerGroupState, GroupMode, LeaseSettings, one_of
from inturn.model.subject import Subject
from inturn.model.timers import Timers
from inturn.node import InProcessNode
from inturn.security.credentials import Credentials
from inturn.state.database import Database
from inturn.state.groups import GroupRecord
from inturn.state.node_role import count_requests_from
from inturn.state.seals import Seal, SealRows
from inturn.wire.client import RemoteNode

_log = get_logger("inturn.broker")
REPORT_S = 1.0
CATCH_UP_S = 2.0  # how long a broker that starts waits for meta
_NEEDS_NO_GROUP = (OpenGroup, Read, ResolvePosition)  # one makes it; the others name it for the guard alone
_OF_META = (CreateSubject, GrowSubject, Heartbeat, Leave, OpenRetry, OpenDeadLetters, OpenProducer)


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
        self._seal_rows = SealRows(database)
        self._seals = self._seal_rows.all()
        self._state_database = database
        self._folder_id = folder_id
        self._meta = meta
        self._lease = lease
        self._report_s = report_s
        self._address = ""
        self._catalogue_version = ""
        self._is_counting = False
        self._links = BrokerLinks(self._locate, clock, credentials)
        super().__init__(
            database, engine, clock, timers, lease, observer, local=False, room=room, broker_group=broker_group
        )
        self.broker.producer_ids.gives_out = False
        self._answers |= dict.fromkeys(_OF_META, self._refuse)
        self._answers |= {
            LearnSubject: self._learn_subject,
            LearnProducer: self._learn_producer,
            SealSubject: self._seal_subject,
            OpenGroup: self._open_group,
            ForgetMember: lambda command, attempt: self._leave(
                Leave(command.subject, command.group, command.member), attempt
            ),
            ListRequests: self._list_requests,
            FindMessage: self._find_message,
        }

    # Clients

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.model.commands.Node`."""
        self._when_known(command, reply, super().submit)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        self._when_known(command, reply, super().submit_remote)

    def _when_known(
        self, command: Command, reply: Reply, then: Callable[[Command, Reply], None], asked: Command | None = None
    ) -> None:
        """What is about a subject, partition or group that is not known here waits until meta has told of it; it is not
        asked the same twice."""
        question = self._question(command)
        if question is None or question == asked:
            then(command, reply)
            return

        def told(answer: Answer | InturnError) -> None:
            if isinstance(answer, InturnError):
                reply(answer)
                return
            try:
                with self._lock:
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
            if isinstance(name, str) and name not in self._known_subjects:
                return FindSubject(name)
        partition = getattr(command, "partition", None)
        if partition is not None and partition >= self._known_subjects[command.subject].partition_count:
            return FindSubject(command.subject)  # it has grown, and clients may have heard of that before
        group = getattr(command, "group", None)
        if group is None or isinstance(command, _NEEDS_NO_GROUP) or (command.subject, group) in self._known_groups:
            return None
        return FindGroup(command.subject, group)

    def _told(self, question: FindSubject | FindGroup, answer: Answer) -> None:
        if isinstance(question, FindSubject) and isinstance(answer, Subject):
            self._learn(answer)
        elif isinstance(question, FindGroup) and isinstance(answer, GroupOpened):
            self._group_of(question.subject, question.group, answer.start, answer.mode)
        else:
            raise InturnError(f"meta answered {question!r} with {answer!r}")

    def _refuse(self, command: Command, _: Try) -> Answer:
        raise InvalidInput(
            f"{type(command).__name__} is for the meta server; this is the broker of group {self.broker.broker_group!r}"
        )

    def _store_moved(self, group: GroupRecord, target: Subject, command: Move, reply: Reply) -> None:
        """The retry and dead-letter subjects of a group are in one broker group, for all partitions of the subject."""
        if not 0 <= command.to_partition < target.partition_count or command.to_partition in self.broker.owned(target):
            super()._store_moved(group, target, command, reply)
            return
        self.broker.check_mover(group, command)
        home = target.route.partitions[command.to_partition].broker_group
        self._links.to(home).submit(
            Append(command.to_subject, command.to_partition, command.batch),
            lambda answer: reply(Done() if isinstance(answer, Appended) else answer),
        )

    def _locate(self, broker_group: str) -> str | None:
        try:
            listed = ask(self._meta, ListBrokerGroups(), BrokerGroupList, patience_s=0.0)
        except InturnError:
            return None
        return next((one.address for one in listed.groups if one.name == broker_group), None)

    # What meta says

    def _learn_subject(self, command: LearnSubject, _: Try) -> Answer:
        self._learn(command.subject)
        return Done()

    def _learn(self, subject: Subject) -> None:
        before = self._known_subjects.get(subject.name)
        if before is not None and before.route.version >= subject.route.version:
            return
        learnt = self._subjects.learn(subject, self._clock.time_ms())
        seal = self._seals.get(subject.name)
        if seal is not None and seal.version <= learnt.route.version:
            self._seal_rows.remove(subject.name)
            del self._seals[subject.name]
        if before is None:
            self._open_subject(learnt)
        else:
            self._grown(before, learnt)

    def _open_subject(self, subject: Subject, first: int = 0) -> None:
        super()._open_subject(subject, first)
        self._seal_logs(subject)

    def _seal_logs(self, subject: Subject) -> dict[int, int]:
        """As it has to be: by its route, or by a growth that has begun. Returns the ends."""
        seal = self._seals.get(subject.name)
        version = subject.route.version if seal is None else seal.version
        return {
            index: self.broker.log(subject, index).seal(subject.name, version) for index in self.broker.owned(subject)
        }

    def _learn_producer(self, command: LearnProducer, _: Try) -> Answer:
        self.broker.producer_ids.learn(command.producer)
        return Done()

    def _seal_subject(self, command: SealSubject, _: Try) -> Answer:
        """Durable before the ends are told: whatever happens to this process, nothing more comes below them."""
        subject = self._subject(command.name)
        if command.version != subject.route.version + 1:
            raise InvalidInput(
                f"subject {subject.name!r} has route version {subject.route.version} at broker group "
                f"{self.broker.broker_group!r}, and cannot be sealed for version {command.version}; grow it again"
            )
        seal = Seal(subject.name, command.version, command.growth)
        self._seal_rows.put(seal)
        self._seals[subject.name] = seal
        barriers = self._seal_logs(subject)
        for index in barriers:
            self.broker.log(subject, index).sync()
        return Sealed(tuple(sorted(barriers.items())))

    def _break_seal(self, seal: Seal) -> None:
        self._seal_rows.remove(seal.subject)
        del self._seals[seal.subject]
        self._seal_logs(self._subject(seal.subject))

    def _open_group(self, command: OpenGroup, _: Try) -> Answer:
        group = self._group_of(command.subject, command.group, command.start, command.mode)
        holders = self.broker.leases.holders(group)
        return GroupOpened(group.start, group.mode.value, tuple(sorted(holders.items())))

    def _group_of(self, subject: str, name: str, start: str, mode: str) -> GroupRecord:
        known = self._known_groups.get((subject, name))
        if known is not None:
            return known
        return self._new_group(self._subject(subject), name, start, one_of(GroupMode, "mode", mode))

    def _list_requests(self, command: ListRequests, _: Try) -> Answer:
        return RequestList(self.keys.waiting(self._group(command.subject, command.group)))

    def _find_message(self, command: FindMessage, _: Try) -> Answer:
        self.broker.check_stored(self._subject(command.subject), command.partition, command.offset)
        return Done()

    # Reports

    def catch_up(self) -> None:
        """Before anybody is served: hear what was decided while it was away. If meta is away, too, what it knew has to
        do. Raises what will not pass by itself: InvalidInput if that is no meta server, AuthenticationFailed…"""
        try:
            catalogue = ask(self._meta, ReadCatalogue(), Catalogue, patience_s=CATCH_UP_S)
        except (ConnectionLost, ServerStopping) as error:
            _log.warning("broker.without_meta", broker_group=self.broker.broker_group, error=str(error))
            return
        except InvalidInput as error:  # it does not know the command
            raise InvalidInput(f"{self._meta!r} is no meta server of this version; look at --meta") from error
        self._take_over(catalogue)

    def report(self, address: str) -> None:
        """Tell meta from now on that it is here, and reached at this address."""
        self._address = address
        self._report()

    def _report(self) -> None:
        if self._closed:
            return
        with self._lock:
            seals = tuple(seal.growth for seal in self._seals.values())
        report = ReportBroker(self.broker.broker_group, self._folder_id, self._address, self._lease.life_s, seals)
        self._meta.submit(report, self._reported)

    def _reported(self, answer: Answer | InturnError) -> None:
        try:
            if isinstance(answer, BrokerOrders):
                self._obey(answer)
            elif not isinstance(answer, InturnError) or not answer.retriable:
                _log.error("broker.refused", broker_group=self.broker.broker_group, error=str(answer))
        except InturnError as error:
            _log.error("broker.not_updated", broker_group=self.broker.broker_group, error=str(error))
        finally:
            if not self._closed:
                self._timers.at(self._clock.monotonic() + self._report_s, self._report)

    def _obey(self, orders: BrokerOrders) -> None:
        with self._lock:
            if self._closed:
                raise Closed("node")
            if not self._is_counting:
                count_requests_from(self._state_database, orders.number)
                self._is_counting = True
            state = one_of(BrokerGroupState, "state", orders.state)
            if state is not self.broker.state:
                self.registry.set_state(self.broker.broker_group, state)
                self._be(state)
            is_current = orders.version == self._catalogue_version
            if is_current:
                for seal in [one for one in self._seals.values() if one.growth in orders.void]:
                    self._break_seal(seal)
        if not is_current:
            self._meta.submit(ReadCatalogue(), self._read_catalogue)

    def _read_catalogue(self, answer: Answer | InturnError) -> None:
        if not isinstance(answer, Catalogue):
            return  # the next report tells again that it is needed
        try:
            self._take_over(answer)
        except InturnError as error:
            _log.error("broker.not_updated", broker_group=self.broker.broker_group, error=str(error))

    def _take_over(self, catalogue: Catalogue) -> None:
        with self._lock:
            with self._state_database.transaction():
                for producer in catalogue.producers:
                    self.broker.producer_ids.learn(producer)
            for subject in catalogue.subjects:
                if any(one.broker_group == self.broker.broker_group for one in subject.route.partitions):
                    self._learn(subject)
            self._catalogue_version = catalogue.version

    # The end

    def stop_gently(self) -> None:
        """Take no new work. Leases stay with their holders, who go on when it is back."""
        with self._lock:
            self._is_stopping = True

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
