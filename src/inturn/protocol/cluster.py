"""Between meta and brokers only."""

from __future__ import annotations

import msgspec

from inturn.model.subject import Subject
from inturn.protocol.command import Command
from inturn.protocol.keys import KeyRequest


class ReportBroker(Command, frozen=True, gc=False):
    """A broker is alive. Sent every second or so; answered with BrokerOrders."""

    broker_group: str
    identity: str  # of its folder: a broker group is one, and another one of the same name is refused
    address: str  # where clients reach it
    life_s: float  # of its leases; all brokers and meta have the same
    seals: tuple[str, ...] = ()  # growths that it has sealed partitions for, and not heard the end of


class BrokerOrders(msgspec.Struct, frozen=True, gc=False):
    """What a broker has to know. If its catalogue is not `version`, it reads that of meta."""

    number: int  # of the broker group; counts up, and is never given twice
    version: str  # of the catalogue
    state: str  # one of BrokerGroupState
    void: tuple[str, ...] = ()  # growths that came to nothing: their seals are to be broken


class ReadCatalogue(Command, frozen=True, gc=False):
    """All subjects, and the epochs of producers that have a name. Answered with the Catalogue."""

    broker_group: str = ""  # of the broker that asks


class NamedProducer(msgspec.Struct, frozen=True, gc=False):
    name: str
    producer_id: int
    epoch: int


class Catalogue(msgspec.Struct, frozen=True, gc=False):
    version: str
    subjects: tuple[Subject, ...]
    producers: tuple[NamedProducer, ...]
    identity: str = ""  # of the folder that the broker group is; nothing if nobody has reported as it yet
    state: str = ""  # one of BrokerGroupState, if somebody has


class LearnSubject(Command, frozen=True, gc=False):
    """To a broker: a subject is new, or has a new route. Answered with Done, once its logs are there."""

    subject: Subject


class LearnProducer(Command, frozen=True, gc=False):
    """To a broker: a producer of this name was opened; from now on older epochs are fenced. Answered with Done."""

    producer: NamedProducer


class SealSubject(Command, frozen=True, gc=False):
    """To a broker: take no more appends by routes before this version. Answered with Sealed, once that is durable.

    It holds until the broker learns of a route of that version, or hears that the growth is void.
    """

    name: str
    version: int
    growth: str  # names this attempt


class Sealed(msgspec.Struct, frozen=True, gc=False):
    """The ends of the broker's partitions of the subject: (partition, offset)."""

    barriers: tuple[tuple[int, int], ...]


class OpenGroup(Command, frozen=True, gc=False):
    """To a broker: a group is joined; it begins at `start` where it is new. Answered with GroupOpened."""

    subject: str
    group: str
    start: str
    mode: str  # one of GroupMode


class GroupOpened(msgspec.Struct, frozen=True, gc=False):
    """How the group was made, and who holds live leases of it at this broker: (member, partitions)."""

    start: str
    mode: str
    holders: tuple[tuple[str, tuple[int, ...]], ...] = ()


class FindGroup(Command, frozen=True, gc=False):
    """To meta: how a group was made. Answered with GroupOpened."""

    subject: str
    group: str


class ForgetMember(Command, frozen=True, gc=False):
    """To a broker: the member has left the group; its leases are free. Answered with Done."""

    subject: str
    group: str
    member: str


class ListRequests(Command, frozen=True, gc=False):
    """To a broker: the key requests of a group that wait for somebody to act upon them. Answered with RequestList."""

    subject: str
    group: str


class RequestList(msgspec.Struct, frozen=True, gc=False):
    requests: tuple[KeyRequest, ...]


class FindMessage(Command, frozen=True, gc=False):
    """To a broker: whether there is a message at this place. Answered with Done, or NotFound that says why not."""

    subject: str
    partition: int
    offset: int
