"""Commands between meta and brokers."""

from __future__ import annotations

import msgspec

from inturn.model.subject import Subject
from inturn.protocol.command import Command
from inturn.protocol.keys import KeyRequest


class ReportBroker(Command, frozen=True, gc=False):
    """The report of a broker, about every second. Answered with BrokerOrders."""

    broker_group: str
    identity: str  # of the broker's folder: a broker group has one folder, and meta refuses any other
    address: str  # for clients
    life_s: float  # of leases; equal at all brokers and meta
    seals: tuple[str, ...] = ()  # growths with sealed partitions whose end the broker does not know


class BrokerOrders(msgspec.Struct, frozen=True, gc=False):
    """The broker reads the catalogue if its own version differs from `version`."""

    number: int  # of the broker group; rises, and is never used twice
    version: str  # of the catalogue
    state: str  # one of BrokerGroupState
    void: tuple[str, ...] = ()  # void growths: the broker breaks their seals


class ReadCatalogue(Command, frozen=True, gc=False):
    """Read all subjects, and the epochs of named producers. Answered with the Catalogue."""

    broker_group: str = ""  # of the sender


class NamedProducer(msgspec.Struct, frozen=True, gc=False):
    name: str
    producer_id: int
    epoch: int


class Catalogue(msgspec.Struct, frozen=True, gc=False):
    version: str
    subjects: tuple[Subject, ...]
    producers: tuple[NamedProducer, ...]
    identity: str = ""  # of the broker group's folder; empty before the first report
    state: str = ""  # one of BrokerGroupState; empty before the first report


class LearnSubject(Command, frozen=True, gc=False):
    """To a broker: a subject is new, or has a new route. Answered with Done, once the logs are open."""

    subject: Subject


class LearnProducer(Command, frozen=True, gc=False):
    """To a broker: a named producer was opened; fence older epochs from now on. Answered with Done."""

    producer: NamedProducer


class SealSubject(Command, frozen=True, gc=False):
    """To a broker: take no more appends by routes below this version. Answered with Sealed, once durable.

    The seal holds until the broker knows a route of this version, or the growth is void.
    """

    name: str
    version: int
    growth: str  # names this attempt


class Sealed(msgspec.Struct, frozen=True, gc=False):
    """The ends of the broker's partitions of the subject: (partition, offset)."""

    barriers: tuple[tuple[int, int], ...]


class OpenGroup(Command, frozen=True, gc=False):
    """To a broker: a group was joined. A new group begins at `start`. Answered with GroupOpened."""

    subject: str
    group: str
    start: str
    mode: str  # one of GroupMode


class GroupOpened(msgspec.Struct, frozen=True, gc=False):
    """The settings of the group, and the holders of its live leases at this broker: (member, partitions)."""

    start: str
    mode: str
    holders: tuple[tuple[str, tuple[int, ...]], ...] = ()


class FindGroup(Command, frozen=True, gc=False):
    """To meta: read the settings of a group. Answered with GroupOpened."""

    subject: str
    group: str


class ForgetMember(Command, frozen=True, gc=False):
    """To a broker: the member has left the group; release the member's leases. Answered with Done."""

    subject: str
    group: str
    member: str


class ListRequests(Command, frozen=True, gc=False):
    """To a broker: list the waiting key requests of a group. Answered with RequestList."""

    subject: str
    group: str


class RequestList(msgspec.Struct, frozen=True, gc=False):
    requests: tuple[KeyRequest, ...]


class FindMessage(Command, frozen=True, gc=False):
    """To a broker: check that a message is stored at this offset. Answered with Done, or NotFound with the reason."""

    subject: str
    partition: int
    offset: int
