"""Meta: subjects and their routes, groups and their members, broker groups; no logs.

What is about several brokers is an errand: asked of each of them in a thread, and put together. Heartbeats, which are
many, are answered without one. All the rest it answers as any node does.
"""

from __future__ import annotations

from collections.abc import Callable

from inturn.cluster.brokers import Brokers
from inturn.cluster.errands import Errands, ErrandTable, Here
from inturn.cluster.group_errands import GroupErrands
from inturn.cluster.hearing import Hearing, HoldersThere
from inturn.cluster.key_errands import KeyErrands
from inturn.cluster.subject_errands import SubjectErrands
from inturn.log.engine import LogEngine
from inturn.model.clock import Clock
from inturn.model.commands import (
    Answer,
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
    NamedProducer,
    OpenProducer,
    ProducerOpened,
    ReadCatalogue,
    ReadyPart,
    Reply,
    ReportBroker,
    SetBrokerGroup,
)
from inturn.model.errors import InvalidInput
from inturn.model.observer import Observer
from inturn.model.settings import LeaseSettings
from inturn.model.timers import Timers
from inturn.node.answering import Try
from inturn.node.neighbours import Neighbours
from inturn.node.node import InProcessNode
from inturn.security.credentials import Credentials
from inturn.state.database import Database
from inturn.state.producers import Producers
from inturn.wire.address import parse_address


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
        """See `inturn.model.commands.Node`."""
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
