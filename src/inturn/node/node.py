"""The node in this process: broker and meta in one, behind one `submit`."""

from __future__ import annotations

from collections.abc import Callable

from inturn.log.engine import LogEngine
from inturn.model.settings import LeaseSettings
from inturn.model.time import Clock, Timers
from inturn.node.group_commands import MemberCommands, OrderCommands
from inturn.node.service_node import ServiceNode
from inturn.node.services import BrokerServices, MetaServices, new_broker
from inturn.node.subject_commands import GrowthCommands
from inturn.protocol.commands import DiskRoom
from inturn.protocol.observer import Observer
from inturn.store.cluster import LOCAL_BROKER_GROUP
from inturn.store.database import Database


class InProcessNode(ServiceNode):
    """All commands of clients, with all logs at this node.

    `local`: the consumers live in this process, so their leases end when the node is opened again.
    """

    members: MemberCommands

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
    ) -> None:
        lease = lease if lease is not None else LeaseSettings()
        broker = self.broker = new_broker(
            database, engine, clock, lease, observer, local=local, broker_group=LOCAL_BROKER_GROUP
        )
        super().__init__(
            database, engine, clock, timers, lease, room=room, broker=broker, holders=broker.leases.holders
        )
        at_broker = BrokerServices(self, broker, observer)
        at_meta = MetaServices(self, at_broker.routes, broker.producer_ids, broker, at_broker.member_leases)
        self.serve(
            GrowthCommands(at_meta.growth, at_broker.routes, broker), OrderCommands(self.catalog, self.groups, broker)
        )
        at_meta.load()
        at_broker.load()
