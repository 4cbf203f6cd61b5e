"""`inturn drain --dry-run`: estimate the duration of a drain from a sample of the backlog. Changes nothing.

The largest of three bounds counts: the time of all handlers divided by the number of handlers at once; the longest
lane, because messages of a lane run in sequence; and the cost of reading and ordering per core, measured on the
sample.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inturn.model.batch import StoredBatch, decode, is_intact
from inturn.model.message import Origin
from inturn.model.settings import KIB, ConsumerSettings, Keyless, Order
from inturn.protocol.commands import (
    Acquire,
    Assignment,
    Command,
    Commit,
    Committed,
    Done,
    Granted,
    Heartbeat,
    Pull,
    Pulled,
    Read,
    Renew,
    Renewed,
    Reply,
)
from inturn.protocol.request import ask

if TYPE_CHECKING:
    from inturn.client import Connection
    from inturn.model.subject import Subject
    from inturn.protocol.commands import GroupDescription

PLACES = 8  # samples per partition, spread from the first waiting message to the last
PLACE_BYTES = 64 * KIB
HANDLER_MS = (0.0, 1.0, 5.0, 20.0)
KEYS_SHOWN = 5
MEASURE_S = 10.0
_LONG_S = 1e9


@dataclass(frozen=True, slots=True)
class LongLane:
    """A key, or a partition in order by partition, with the estimated number of its messages."""

    name: str
    partition: int
    messages: int
    share: float  # of all waiting messages


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one duration of a handler. `bound` is the bound that counts: "handlers", "lane" or "reading"."""

    handler_ms: float
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog, estimated from a sample. `cost_us` is the cost per core of reading and ordering a message."""

    messages: int
    sampled: int
    keys_seen: int
    members: int
    done_per_s: float
    cost_us: float
    lanes: tuple[LongLane, ...]  # the longest first

    @property
    def online_s(self) -> float | None:
        """Time that the consumers need at their present rate; None if the rate is 0."""
        return self.messages / self.done_per_s if self.done_per_s > 0 else None

    def estimate(self, handler_ms: float, tasks: int, concurrency: int) -> Estimate:
        handling_s = handler_ms / 1000
        longest = self.lanes[0].messages if self.lanes else 0
        bounds = {
            "reading": self.messages * self.cost_us / 1e6 / tasks,
            "handlers": self.messages * handling_s / (tasks * concurrency),
            "lane": longest * handling_s,
        }
        bound = max(bounds, key=lambda name: bounds[name])
        return Estimate(handler_ms, bounds[bound], bound)


@dataclass(frozen=True, slots=True)
class _Sample:
    partition: int
    waiting: int
    batches: tuple[StoredBatch, ...]
    keys: Counter[bytes | None]


def look(connection: Connection, subject: Subject, described: GroupDescription, order: Order) -> Backlog:
    """Read a sample of every partition, and run the sample through lanes with an empty handler."""
    began_s = time.monotonic()
    samples = [
        _sample(connection, subject, one.partition, one.committed, one.end_offset, one.lag)
        for one in described.partitions
        if one.lag > 0
    ]
    sampled = sum(sample.keys.total() for sample in samples)
    read_s = time.monotonic() - began_s
    spent_s = read_s + sum(_lanes_s(subject, sample, order) for sample in samples if sample.batches)
    total = sum(sample.waiting for sample in samples)
    return Backlog(
        total,
        sampled,
        len({key for sample in samples for key in sample.keys if key is not None}),
        len(described.members),
        sum(one.done_per_s for one in described.partitions),
        spent_s / sampled * 1e6 if sampled else 0.0,
        _long_lanes(subject, samples, order, total),
    )


def _sample(connection: Connection, subject: Subject, partition: int, first: int, end: int, waiting: int) -> _Sample:
    found: dict[int, StoredBatch] = {}
    for place in range(PLACES):
        offset = first + (end - first) * place // PLACES
        pulled = ask(connection.node, Read(subject.name, partition, offset, PLACE_BYTES), Pulled)
        found.update({one.header.base_offset: one for one in pulled.batches if is_intact(one)})
    batches = tuple(found[offset] for offset in sorted(found))
    keys: Counter[bytes | None] = Counter()
    for batch in batches:
        keys.update([one.key for one in decode(batch, Origin(subject.name, partition)) if first <= one.offset])
    return _Sample(partition, waiting, batches, keys)


def _long_lanes(subject: Subject, samples: Sequence[_Sample], order: Order, total: int) -> tuple[LongLane, ...]:
    found: list[LongLane] = []
    for sample in samples:
        if order is Order.PARTITION:
            name = f"partition {sample.partition}"
            found.append(LongLane(name, sample.partition, sample.waiting, sample.waiting / total))
        elif order is Order.KEY:
            for key, count in sample.keys.items():
                if key is None and subject.keyless is Keyless.INDEPENDENT:
                    continue
                messages = round(sample.waiting * count / sample.keys.total())
                name = "messages without a key" if key is None else key.decode(errors="backslashreplace")
                found.append(LongLane(name, sample.partition, messages, messages / total))
    return tuple(sorted(found, key=lambda lane: (-lane.messages, lane.name))[:KEYS_SHOWN])


def _lanes_s(subject: Subject, sample: _Sample, order: Order) -> float:
    """The time of a consumer for the whole sample."""
    from inturn.consumer.consumer import Consumer
    from inturn.consumer.options import Scope
    from inturn.model.time import SystemClock

    node = _SampleNode(subject, sample)
    duty = Scope(until={sample.partition: sample.batches[-1].header.next_offset})
    settings = ConsumerSettings(concurrency=8)
    consumer = Consumer(
        node,
        SystemClock(),
        subject.name,
        "estimate",
        lambda message, context: None,
        order=order,
        settings=settings,
        duty=duty,
    )
    began_s = time.monotonic()
    consumer.start()
    consumer.wait_until_through(MEASURE_S, MEASURE_S)
    taken_s = time.monotonic() - began_s
    consumer.stop()
    return taken_s


class _SampleNode:
    """A node with only the sample; see `inturn.protocol.commands.Node`."""

    def __init__(self, subject: Subject, sample: _Sample) -> None:
        self._subject = subject
        self._sample = sample

    def submit(self, command: Command, reply: Reply) -> None:
        batches = self._sample.batches
        end = batches[-1].header.next_offset
        match command:
            case Heartbeat(generation=0):
                reply(Assignment(1, (self._sample.partition,), self._subject, _LONG_S))
            case Heartbeat():
                pass
            case Acquire():
                reply(Granted(1, batches[0].header.base_offset, _LONG_S))
            case Pull():
                left = tuple(one for one in batches if one.header.next_offset > command.offset)
                reply(Pulled(left, end, end, 0))
            case Commit():
                reply(Committed(tuple(one.partition for one in command.progress)))
            case Renew():
                reply(Renewed(tuple(index for index, _ in command.held)))
            case _:
                reply(Done())
