"""What a server is in its cluster, and the node that makes it so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from inturn.cluster.broker_server import REPORT_S, BrokerNode
from inturn.cluster.meta_server import MetaNode
from inturn.meta.broker_registry import SILENT_S
from inturn.model.errors import InvalidInput
from inturn.model.settings import Role
from inturn.model.subject import check_name
from inturn.model.time import Clock
from inturn.node.node import InProcessNode
from inturn.security.credentials import NONE, Credentials
from inturn.transport.address import dialled, parse_address
from inturn.transport.client import RemoteNode
from inturn.version import SOFTWARE


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A broker has a `broker_group` and the address of `meta`. `credentials` are what meta and brokers show to each
    other; `advertise` is where clients and meta reach a broker, if not where it listens."""

    role: Role = Role.NODE
    broker_group: str = ""
    meta: str = ""
    advertise: str = ""
    credentials: Credentials = NONE
    silent_s: float = SILENT_S  # meta: a broker that was not heard for so long counts as dead
    report_s: float = REPORT_S  # a broker: how often it says that it is alive

    def __post_init__(self) -> None:
        if self.role is Role.BROKER:
            check_name("broker group", self.broker_group)
            parse_address(self.meta)
            if self.advertise:
                parse_address(self.advertise)
        elif self.broker_group or self.meta or self.advertise:
            raise InvalidInput("a broker group, the address of meta and one to advertise are those of a broker only")


def node_maker(settings: ClusterSettings, clock: Clock) -> Callable[..., InProcessNode]:
    """Takes what an InProcessNode takes, and for a broker the id of its folder."""
    match settings.role:
        case Role.META:
            return partial(MetaNode, credentials=settings.credentials, silent_s=settings.silent_s)
        case Role.BROKER:
            return partial(_broker, settings, clock)
    return InProcessNode


def _broker(settings: ClusterSettings, clock: Clock, *args: object, **options: object) -> InProcessNode:
    address, tls = dialled(settings.meta, settings.credentials)
    token = settings.credentials.token or ""
    meta = RemoteNode(address.dial, str(address), SOFTWARE, clock, token=token, tls=tls)
    try:
        return BrokerNode(
            *args,  # type: ignore[arg-type]
            meta=meta,
            credentials=settings.credentials,
            report_s=settings.report_s,
            **options,  # type: ignore[arg-type]
        )
    except BaseException:
        meta.close()
        raise
