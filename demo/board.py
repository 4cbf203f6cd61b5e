"""What is known while the demo runs: told by the node, the consumers' hook and the producers; read by the views.

Everything is recorded for the order checker too, in the order in which it is told here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from demo.events import Event, Events
from demo.orders import PARTITION_COUNT, SUBJECT, Ledger
from inturn.consumer.context import Context, Hook
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.subject import Subject
from inturn.model.time import SystemClock
from inturn.producer.send_batch import Stored
from inturn.protocol.commands import Progress
from inturn.testing.recorder import Recorder

RATE_PART_S = 0.25
# `failed` and `exception` are repeated in place; a slow success is a success.
_RECORDED_AS = {ResultKind.SUCCESS: "success", ResultKind.TIMEOUT: "success", ResultKind.FAILED: "failed"}


def recorded_as(kind: ResultKind) -> str:
    """The word of the order checker for how a handler ended."""
    return _RECORDED_AS.get(kind, "exception")


def short(member: str) -> str:
    """The name a consumer was opened with: its group knows it by a longer one, which is never used twice."""
    return member.partition("-")[0]


class OrderStep(msgspec.Struct):
    """The body of a message."""

    order: int
    step: str


@dataclass(slots=True)
class PartitionLook:
    expected: int = 0  # messages that will have been sent in the end
    stored: int = 0
    done: int = 0  # everything below this offset was handled
    owner: str | None = None
    epoch: int = 0
    begun_epoch: int = 0  # the epoch of the last start: a higher one in `epoch` has not begun yet
    begun_by: str | None = None
    last: OrderStep | None = None
    trouble: str | None = None  # why `last` is to be repeated


@dataclass(slots=True)
class ConsumerLook:
    name: str
    handled: int = 0
    retries: int = 0
    died_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    partition: int
    before: str
    after: str
    epoch: int
    offset: int
    repeated: int
    is_after_crash: bool
    took_s: float  # since the crash, or since the release


@dataclass(frozen=True, slots=True)
class Look:
    """A copy of the board at one moment."""

    at_s: float
    partitions: tuple[PartitionLook, ...]
    consumers: tuple[ConsumerLook, ...]
    events: tuple[Event, ...]
    life_s: float

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.partitions)

    @property
    def done(self) -> int:
        return sum(one.done for one in self.partitions)


@dataclass(slots=True)
class Board(Hook):
    """The observer of the connection and the hook of all consumers. From any thread; never calls the node."""

    life_s: float
    events: Events
    recorder: Recorder = field(default_factory=lambda: Recorder(SystemClock()))
    ledger: Ledger = field(default_factory=Ledger)
    hand_overs: list[HandOver] = field(default_factory=list)
    partitions: list[PartitionLook] = field(default_factory=lambda: [PartitionLook() for _ in range(PARTITION_COUNT)])
    consumers: dict[str, ConsumerLook] = field(default_factory=dict)
    _handled_in: Counter[int] = field(default_factory=Counter)  # by RATE_PART_S
    _released_at_s: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def now_s(self) -> float:
        return self.events.now_s

    @property
    def rate_max(self) -> float:
        """Messages per second, when it was best: the crash is not to spoil a comparison."""
        return max(self._handled_in.values(), default=0) / RATE_PART_S

    def look(self) -> Look:
        with self._lock:
            return Look(
                self.now_s,
                tuple(replace(one) for one in self.partitions),
                tuple(replace(one) for one in self.consumers.values()),
                self.events.so_far(),
                self.life_s,
            )

    # Told by the story

    def expect(self, counts: Sequence[int]) -> None:
        with self._lock:
            for partition, count in zip(self.partitions, counts, strict=True):
                partition.expected = count

    def joined(self, name: str) -> None:
        with self._lock:
            self.consumers[name] = ConsumerLook(name)

    def died(self, member: str) -> None:
        """From here on nothing that the consumer's left-over threads do counts."""
        name = short(member)
        with self._lock:
            self.consumers[name].died_at_s = self.now_s
            self.recorder.crashed(member)
            self.events.say(f"{name} died: no commit, no release; its leases end within {self.life_s:.1f} s")

    def is_dead(self, member: str) -> bool:
        return self.consumers[short(member)].died_at_s is not None

    def sent(self, stored: Stored, key: str, message_id: str) -> None:
        with self._lock:
            partition = self.partitions[stored.partition]
            partition.stored = max(partition.stored, stored.offset + 1)
            self.recorder.sent(stored.subject, stored.partition, stored.offset, key.encode(), message_id)

    # Told by the node

    def lease_granted(self, subject: str, group: str, partition: int, owner: str, epoch: int) -> None:
        with self._lock:
            self.recorder.lease_granted(subject, group, partition, owner, epoch)
            self.partitions[partition].owner = short(owner)
            self.partitions[partition].epoch = epoch

    def lease_ended(self, subject: str, group: str, partition: int, owner: str, epoch: int, why: str) -> None:
        with self._lock:
            self.recorder.lease_ended(subject, group, partition, owner, epoch, why)
            self.partitions[partition].owner = None
            self._released_at_s[partition] = self.now_s

    def claim_granted(self, subject: str, group: str, partition: int, claimant: str, epoch: int, slots: bytes) -> None:
        pass

    def grown(self, subject: Subject) -> None:
        """The demo does not grow."""

    def claim_ended(self, subject: str, group: str, partition: int, claimant: str, epoch: int) -> None:
        pass

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        self.recorder.committed(subject, group, owner, progress)

    # Told by the consumers

    def before(self, messages: Sequence[Message], context: Context) -> None:
        with self._lock:
            if self.is_dead(context.consumer):
                return
            for message in messages:
                self._record(self.recorder.started, message, context, attempt=context.attempt)
            partition = self.partitions[context.partition]
            if context.epoch > partition.begun_epoch:
                self._begin(partition, messages[0].offset, context)

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        with self._lock:
            if self.is_dead(context.consumer):
                return
            result = recorded_as(kind)
            for message in messages:
                self._record(self.recorder.ended, message, context, result=result)
                body = msgspec.json.decode(message.body, type=OrderStep)
                if result == "success":
                    self._handled(message, body, context)
                else:
                    self._failed(body, context, error)

    def _record(self, record: Callable[..., None], message: Message, context: Context, **more: object) -> None:
        where = (SUBJECT, context.group, context.partition, message.offset, message.key)
        record(*where, context.consumer, context.epoch, message.message_id, **more)

    def _handled(self, message: Message, body: OrderStep, context: Context) -> None:
        partition = self.partitions[context.partition]
        partition.done = max(partition.done, message.offset + 1)
        partition.stored = max(partition.stored, partition.done)  # a handler may be quicker than the acknowledgement
        self.consumers[short(context.consumer)].handled += 1
        self._handled_in[int(self.now_s / RATE_PART_S)] += 1
        self.ledger.note(body.order, body.step)
        if partition.trouble is not None and context.attempt > 1:
            self.events.say(
                f"order {body.order} {body.step} at attempt {context.attempt} ({partition.trouble}): "
                f"partition {context.partition} waited"
            )
        partition.last, partition.trouble = body, None

    def _failed(self, body: OrderStep, context: Context, error: BaseException | None) -> None:
        partition = self.partitions[context.partition]
        partition.last = body
        partition.trouble = "suspended" if error is None else f"exception: {error}"
        self.consumers[short(context.consumer)].retries += 1

    def _begin(self, partition: PartitionLook, offset: int, context: Context) -> None:
        """The first start in an epoch: only now is it known where the new owner goes on."""
        before, after, repeated = partition.begun_by, short(context.consumer), partition.done - offset
        partition.begun_epoch, partition.begun_by = context.epoch, after
        if before is None or before == after:
            return
        died_at_s = self.consumers[before].died_at_s
        since_s = self._released_at_s.get(context.partition, self.now_s) if died_at_s is None else died_at_s
        self.hand_overs.append(
            HandOver(
                *(context.partition, before, after, context.epoch, offset, repeated),
                is_after_crash=died_at_s is not None,
                took_s=self.now_s - since_s,
            )
        )
        again = f"{repeated} repeated" if repeated else "none repeated"
        self.events.say(
            f"{after} took partition {context.partition} from {before}: epoch {context.epoch}, "
            f"continuing at offset {offset:,} ({again})"
        )
