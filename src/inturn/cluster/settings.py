"""The role of a server in a cluster, and the node of each role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from inturn.cluster.broker_server import REPORT_S, BrokerServer
from inturn.cluster.meta_server import MetaServer
from inturn.meta.broker_registry import SILENT_S
from inturn.model.errors import InvalidInput
from inturn.model.settings import Role
from inturn.model.subject import check_name
from inturn.model.time import Clock
from inturn.node.node import InProcessNode
from inturn.node.service_node import ServiceNode
from inturn.security.credentials import NONE, Credentials
from inturn.transport.address import dialled, parse_address
from inturn.transport.client import RemoteNode
from inturn.version import SOFTWARE


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A broker has a `broker_group` and the address of `meta`. Meta and brokers authenticate to each other with
    `credentials`. `advertise` is the address of a broker for clients and meta, unless equal to the listen address."""

    role: Role = Role.NODE
    broker_group: str = ""
    meta: str = ""
    advertise: str = ""
    credentials: Credentials = NONE
    silent_s: float = SILENT_S  # meta: a broker without a report for this time counts as dead
    report_s: float = REPORT_S  # a broker: time between two reports

    def __post_init__(self) -> None:
        if self.role is Role.BROKER:
            check_name("broker group", self.broker_group)
            parse_address(self.meta)
            if self.advertise:
                parse_address(self.advertise)
        elif self.broker_group or self.meta or self.advertise:
            raise InvalidInput("a broker group, the address of meta and one to advertise are those of a broker only")


def node_maker(settings: ClusterSettings, clock: Clock) -> Callable[..., ServiceNode]:
    """Takes the arguments of an InProcessNode, and for a broker the broker group and the id of the folder."""
    match settings.role:
        case Role.META:
            return partial(MetaServer, credentials=settings.credentials, silent_s=settings.silent_s)
        case Role.BROKER:
            return partial(_broker, settings, clock)
    return InProcessNode


def _broker(settings: ClusterSettings, clock: Clock, *args: object, **options: object) -> ServiceNode:
    address, tls = dialled(settings.meta, settings.credentials)
    token = settings.credentials.token or ""
    meta = RemoteNode(address.dial, str(address), SOFTWARE, clock, token=token, tls=tls)
    try:
        return BrokerServer(
            *args,  # type: ignore[arg-type]
            meta=meta,
            credentials=settings.credentials,
            report_s=settings.report_s,
            **options,  # type: ignore[arg-type]
        )
    except BaseException:
        meta.close()
        raise
