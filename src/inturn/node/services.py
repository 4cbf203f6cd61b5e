"""The services of the two roles of a node: `BrokerServices` with logs, `MetaServices` with subjects and members.

A node in this process has both.
"""

from __future__ import annotations

from collections.abc import Callable

from inturn.broker.broker import Broker
from inturn.broker.keys import Keys
from inturn.broker.leases import LeaseTable
from inturn.broker.producer_ids import ProducerIds
from inturn.log.engine import LogEngine
from inturn.model.settings import LeaseSettings
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.node.acceptance import AnswerTable, CommandService
from inturn.node.group_commands import GroupPartitionCommands, HeartbeatCommands, MemberCommands, MemberLeases
from inturn.node.key_commands import KeyCommands, TrialCommands, Trials
from inturn.node.partition_commands import ConsumingCommands, SharedGroupCommands
from inturn.node.service_node import ServiceNode
from inturn.node.subject_commands import (
    DerivedSubjectCommands,
    Forward,
    Growth,
    MessageCommands,
    Routes,
    SubjectCommands,
    SubjectLogs,
    by_route,
)
from inturn.protocol.commands import OpenProducer, ProducerOpened
from inturn.protocol.observer import Observer
from inturn.store.database import Database
from inturn.store.keys import Failures, KeyRequests
from inturn.store.leases import LeaseRows, ProgressRows
from inturn.store.offsets import GateRows, OffsetRows
from inturn.store.parking_lots import ParkingLots
from inturn.store.producers import Producers


def new_broker(
    database: Database,
    engine: LogEngine,
    clock: Clock,
    lease: LeaseSettings,
    observer: Observer | None,
    *,
    local: bool,
    broker_group: str,
) -> Broker:
    """`local`: the consumers live in this process, so their leases end when the node is opened again."""
    return Broker(
        engine,
        OffsetRows(database),
        ProgressRows(database),
        Producers(database),
        LeaseTable(LeaseRows(database), clock, lease, observer, local=local),
        Keys(Failures(database), ParkingLots(database), KeyRequests(database), clock),
        GateRows(database),
        clock,
        observer,
        broker_group,
    )


class BrokerServices:
    """Serve the partitions of one broker group: logs, leases, offsets, parking lots, growth gates.

    `forward` sends a batch to the broker of another broker group. `sealed_for` returns the route version below which
    the logs of a subject take no appends.
    """

    def __init__(
        self,
        node: ServiceNode,
        broker: Broker,
        observer: Observer | None,
        *,
        forward: Forward | None = None,
        sealed_for: Callable[[Subject], int] = by_route,
    ) -> None:
        catalog, held, wake = node.catalog, node.held, node.wake
        self._node = node
        self._broker = broker
        self.logs = SubjectLogs(catalog, broker, held, sealed_for)
        self.routes = Routes(catalog, self.logs, node.membership, wake, observer)
        self.member_leases = MemberLeases(broker, held, wake)
        node.serve(
            self.logs,
            self.routes,
            MessageCommands(catalog, broker, node.admission, held, forward),
            ConsumingCommands(catalog, broker, held, wake, node.clock),
            SharedGroupCommands(catalog, broker, wake),
            GroupPartitionCommands(catalog, node.groups, broker, wake),
            KeyCommands(catalog, broker, node.membership, wake),
        )

    def load(self) -> None:
        """Take the state of the broker group, the groups, their leases and the subjects from the database."""
        node = self._node
        self._broker.state = node.registry.get(self._broker.broker_group).state
        node.load_groups()
        self._broker.leases.load({group.id: group for group in node.catalog.groups.values()})
        for subject in node.subject_rows.all():
            self.routes.open(subject)


class MetaServices:
    """Serve subjects, members, trials and producer ids.

    `broker` and `member_leases` None: keys, messages and leases are at the brokers.
    """

    def __init__(
        self,
        node: ServiceNode,
        routes: Routes,
        producer_ids: ProducerIds,
        broker: Broker | None = None,
        member_leases: MemberLeases | None = None,
    ) -> None:
        catalog, membership, held, wake = node.catalog, node.membership, node.held, node.wake
        self._node = node
        self.growth = Growth(catalog, node.subject_rows, routes, node.clock)
        subjects = SubjectCommands(catalog, node.subject_rows, node.registry, routes, node.clock)
        node.members = self.members = MemberCommands(
            catalog,
            membership,
            member_leases,
            held,
            wake,
            node.admission,
            node.clock,
            node.timers,
            node.lease.life_s,
        )
        trials = Trials()
        node.serve(
            subjects,
            DerivedSubjectCommands(catalog, subjects),
            self.members,
            HeartbeatCommands(
                catalog,
                node.groups,
                membership,
                (lambda _: ()) if broker is None else broker.keys.waiting,
                trials,
                wake,
                node.admission,
                self.members.schedule_check,
            ),
            TrialCommands(catalog, trials, membership, wake, None if broker is None else broker.check_stored),
            ProducerCommands(producer_ids),
        )

    def load(self) -> None:
        """No member of an earlier run of the node is online."""
        self._node.member_rows.all_offline(self._node.clock.time_ms())


class ProducerCommands(CommandService):
    """Assigns producer ids and epochs."""

    def __init__(self, producer_ids: ProducerIds) -> None:
        self._producer_ids = producer_ids

    @property
    def answers(self) -> AnswerTable:
        return {OpenProducer: lambda command, _: ProducerOpened(*self._producer_ids.open(command.name, command.nonce))}
