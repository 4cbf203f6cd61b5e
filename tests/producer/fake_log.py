"""A log in memory that checks producer sequences, and a network that loses, doubles and reorders."""

from __future__ import annotations

import random

from inturn.log.producer_table import ProducerTable
from inturn.model.batch import Batch, BatchHeader, StoredBatch, decode
from inturn.model.errors import InturnError
from inturn.model.message import Message, Origin
from inturn.model.routing import Partition, Route, even_ranges
from inturn.model.settings import Limits, ProducerSettings, Routing, Strategy
from inturn.model.subject import Subject
from inturn.producer.core import ProducerCore
from inturn.protocol.commands import Append, Appended


class FakeLog:
    """While `refusal` is set, every append is answered with `refusal`."""

    def __init__(self, name: str = "p0") -> None:
        self.producers = ProducerTable(name)
        self.bodies: list[bytes] = []
        self.refusal: InturnError | None = None

    def append(self, command: Append) -> Appended | InturnError:
        batch = command.batch
        if self.refusal is not None:
            return self.refusal
        try:
            known = self.producers.duplicate_of(batch, command.gap)
        except InturnError as error:
            return error
        if known is not None:
            return Appended(known)
        base_offset = len(self.bodies)
        self.producers.record(batch, base_offset, 0)
        self.bodies += [message.body for message in messages_of(batch)]
        return Appended(base_offset)


def messages_of(batch: Batch) -> list[Message]:
    header = BatchHeader(batch.compression, len(batch.payload), batch.count, 1, 0, 0, 0, 0, 0, 0, batch.checksum)
    return decode(StoredBatch(header, memoryview(batch.payload)), Origin("orders", 0))


def bodies_of(command: Append) -> list[bytes]:
    return [message.body for message in messages_of(command.batch)]


def some_subject(
    partitions: int = 1,
    strategy: Strategy = Strategy.STRICT,
    routing: Routing = Routing.SLOTS,
    limits: Limits | None = None,
) -> Subject:
    route = Route(
        "orders", 1, tuple(Partition("local", f"p{index}") for index in range(partitions)), even_ranges(partitions)
    )
    return Subject("orders", route, routing, strategy, limits if limits is not None else Limits())


def some_core(subject: Subject | None = None, **settings: object) -> ProducerCore:
    core = ProducerCore(7, 0, ProducerSettings(**settings), random.Random(1))  # type: ignore[arg-type]
    core.learn(subject if subject is not None else some_subject())
    return core


def key_for(subject: Subject, partition: int) -> bytes:
    """A key of the given partition."""
    from inturn.model.routing import slot_of

    for number in range(100_000):
        key = b"%d" % number
        if subject.route.by_slot[slot_of(key)] == partition:
            return key
    raise AssertionError("no key found")
