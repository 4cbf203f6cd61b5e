"""The first act: four producers, three consumers of one group; a consumer dies, a fourth consumer joins."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from demo.act import (
    Act,
    ActLook,
    ActResult,
    Events,
    HandlerBoard,
    SendWindow,
    checked_fields,
    short_name,
    stored_ids,
)
from demo.orders import (
    FIRST_CONSUMERS,
    GROUP,
    LATE_CONSUMER,
    PARTITION_COUNT,
    SUBJECT,
    OrderStep,
    Scale,
    expected_counts,
    key_of,
    life_cycles,
    order_message,
    troubles,
)
from inturn.client import Connection, connect
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.model.errors import ProducerFenced
from inturn.model.message import Message
from inturn.model.result import Suspend, suspend
from inturn.model.settings import ConsumerSettings
from inturn.producer.producer import Producer
from inturn.producer.send_batch import Stored
from inturn.testing.checker import check

NAMED_PRODUCER = "till-4"
PRODUCERS = ("till-1", "till-2", "till-3", NAMED_PRODUCER)
DEATH_AT, JOIN_AT = 0.25, 0.5  # of all messages handled
WINDOW = 500  # unacknowledged messages of one producer
RATE_PART_S = 0.25


@dataclass(slots=True)
class CrashPartition:
    expected: int = 0  # messages sent by the end of the act
    stored: int = 0
    done: int = 0  # every offset below was handled
    owner: str | None = None
    epoch: int = 0
    begun_epoch: int = 0  # the epoch of the last start: a higher `epoch` has not started a handler yet
    begun_by: str | None = None
    last: OrderStep | None = None
    trouble: str | None = None  # why `last` is to be repeated


@dataclass(slots=True)
class CrashConsumer:
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
class CrashLook(ActLook):
    partitions: tuple[CrashPartition, ...]
    consumers: tuple[CrashConsumer, ...]
    life_s: float

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.partitions)

    @property
    def done(self) -> int:
        return sum(one.done for one in self.partitions)


class CrashBoard(HandlerBoard):
    def __init__(self, life_s: float, events: Events) -> None:
        super().__init__(events, SUBJECT, GROUP)
        self.life_s = life_s
        self.hand_overs: list[HandOver] = []
        self.partitions = [CrashPartition() for _ in range(PARTITION_COUNT)]
        self.consumers: dict[str, CrashConsumer] = {}
        self._handled_in: Counter[int] = Counter()  # by RATE_PART_S
        self._released_at_s: dict[int, float] = {}

    @property
    def rate_max(self) -> float:
        """The best rate in messages per second: the crash must not spoil the comparison with the second act."""
        return max(self._handled_in.values(), default=0) / RATE_PART_S

    def look(self) -> CrashLook:
        with self._lock:
            return CrashLook(
                self.events.now_s,
                self.events.so_far(),
                tuple(replace(one) for one in self.partitions),
                tuple(replace(one) for one in self.consumers.values()),
                self.life_s,
            )

    # Calls of the act

    def expect(self, counts: Sequence[int]) -> None:
        with self._lock:
            for partition, count in zip(self.partitions, counts, strict=True):
                partition.expected = count

    def joined(self, name: str) -> None:
        with self._lock:
            self.consumers[name] = CrashConsumer(name)

    def died(self, member: str) -> None:
        """From now on calls from the remaining threads of the consumer do not count."""
        name = short_name(member)
        with self._lock:
            self.consumers[name].died_at_s = self.events.now_s
            self.recorder.crashed(member)
            self.events.say(f"{name} died: no commit, no release; its leases end within {self.life_s:.1f} s")

    def is_dead(self, member: str) -> bool:
        return self.consumers[short_name(member)].died_at_s is not None

    def sent(self, stored: Stored, key: str, message_id: str) -> None:
        with self._lock:
            partition = self.partitions[stored.partition]
            partition.stored = max(partition.stored, stored.offset + 1)
            self.recorder.sent(stored.subject, stored.partition, stored.offset, key.encode(), message_id)

    # Calls of the node and of the consumers

    def _owner_changed(self, partition: int, owner: str | None, epoch: int) -> None:
        if owner is None:
            self.partitions[partition].owner = None
            self._released_at_s[partition] = self.events.now_s
        else:
            self.partitions[partition].owner = short_name(owner)
            self.partitions[partition].epoch = epoch

    def _is_ignored(self, context: Context) -> bool:
        return self.is_dead(context.consumer)

    def _starting(self, messages: Sequence[Message], context: Context) -> None:
        partition = self.partitions[context.partition]
        if context.epoch > partition.begun_epoch:
            self._take_over(partition, messages[0].offset, context)

    def _handled(self, message: Message, body: OrderStep, context: Context) -> None:
        partition = self.partitions[context.partition]
        partition.done = max(partition.done, message.offset + 1)
        partition.stored = max(partition.stored, partition.done)  # a handler may be quicker than the acknowledgement
        self.consumers[short_name(context.consumer)].handled += 1
        self._handled_in[int(self.events.now_s / RATE_PART_S)] += 1
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
        self.consumers[short_name(context.consumer)].retries += 1

    def _take_over(self, partition: CrashPartition, offset: int, context: Context) -> None:
        """The first start of a handler in an epoch shows where the new owner continues."""
        before, after, repeated = partition.begun_by, short_name(context.consumer), partition.done - offset
        partition.begun_epoch, partition.begun_by = context.epoch, after
        if before is None or before == after:
            return
        now_s, died_at_s = self.events.now_s, self.consumers[before].died_at_s
        since_s = self._released_at_s.get(context.partition, now_s) if died_at_s is None else died_at_s
        self.hand_overs.append(
            HandOver(
                *(context.partition, before, after, context.epoch, offset, repeated),
                is_after_crash=died_at_s is not None,
                took_s=now_s - since_s,
            )
        )
        again = f"{repeated} repeated" if repeated else "none repeated"
        self.events.say(
            f"{after} took partition {context.partition} from {before}: epoch {context.epoch}, "
            f"continuing at offset {offset:,} ({again})"
        )


class _Dead(Exception):
    """Ends the threads of a consumer that died: within a process there is no other way."""


class CrashAct(Act):
    """`stored` is the log at the end of the act."""

    def __init__(self, scale: Scale, folder: Path, board: CrashBoard) -> None:
        super().__init__(folder)
        self.stored: dict[tuple[str, int, int], str | None] = {}
        self.victim: str | None = None
        self._scale = scale
        self._board = board
        self._troubles = troubles(scale.orders)
        self._consumers: dict[str, Consumer] = {}

    def play(self) -> None:
        with connect(self._folder, lease=self._scale.lease, observer=self._board) as connection:
            self._tell(connection)

    def _tell(self, connection: Connection) -> None:
        subject = connection.create_subject(SUBJECT, PARTITION_COUNT)
        self._board.expect(expected_counts(subject, self._scale.orders))
        for name in FIRST_CONSUMERS:
            self._join(connection, name)
            self._wait(self._is_shared)
        self._board.events.say(f"{', '.join(FIRST_CONSUMERS)} share the {PARTITION_COUNT} partitions")
        tills = [
            self._start_till(name, lambda name=name, number=number: self._send(connection, name, number))  # type: ignore[misc]
            for number, name in enumerate(PRODUCERS)
        ]
        try:
            self._wait(lambda: self._handled_share() >= DEATH_AT)
            self._kill()
            self._wait(lambda: self._is_shared() and self._handled_share() >= JOIN_AT)
            self._board.events.say(f"{LATE_CONSUMER} joined the group")
            self._join(connection, LATE_CONSUMER)
            self._wait(lambda: not any(till.is_alive() for till in tills) and self._handled_share() >= 1.0)
        finally:
            self._stop.set()  # no producer sends when the connection is closed
            for till in tills:
                till.join()
        self._board.events.say("everything is handled: the consumers commit, release their leases and leave")
        for consumer in self._consumers.values():
            consumer.stop()
        self.stored = stored_ids(connection, SUBJECT)

    # Conditions

    def _handled_share(self) -> float:
        return self._board.look().done / self._scale.messages

    def _is_shared(self) -> bool:
        """Every living consumer has its share: the shares differ by one partition at most."""
        look = self._board.look()
        alive = [one.name for one in look.consumers if one.died_at_s is None]
        owned = Counter(one.owner for one in look.partitions)
        counts = [owned[name] for name in alive]
        return sum(counts) == PARTITION_COUNT and max(counts) - min(counts) <= 1

    # Consumers

    def _join(self, connection: Connection, name: str) -> None:
        scale = self._scale
        settings = ConsumerSettings(
            concurrency=PARTITION_COUNT,
            backoff_min_s=scale.retry_s,
            backoff_max_s=scale.retry_s,
            commit_interval_s=0.05,
            heartbeat_s=scale.lease.renew_s,
        )
        self._board.joined(name)
        consumer = connection.consumer(SUBJECT, GROUP, self._handle, settings=settings, hooks=[self._board], name=name)
        self._consumers[name] = consumer
        self._watched.append(consumer)
        consumer.start()

    def _handle(self, message: Message, context: Context) -> Suspend | None:
        if self._board.is_dead(context.consumer):
            raise _Dead
        body = msgspec.json.decode(message.body, type=OrderStep)
        if context.attempt == 1 and (body.order, body.step) in self._troubles:
            why = self._troubles[body.order, body.step]
            if why is not None:
                raise RuntimeError(why)
            return suspend(self._scale.retry_s)
        time.sleep(self._scale.handling_s)  # the work
        return None

    def _kill(self) -> None:
        """Kill the consumer with most partitions. First kill, then record: a recorded death allows no later commit."""
        owners = Counter(one.owner for one in self._board.look().partitions if one.owner is not None)
        self.victim = owners.most_common(1)[0][0]
        consumer = self._consumers[self.victim]
        consumer.kill()
        self._board.died(consumer.name)

    # Producers

    def _send(self, connection: Connection, name: str, number: int) -> None:
        """Send the orders of one till: pipelined, and paced so that the act can be watched."""
        orders = range(number, self._scale.orders, len(PRODUCERS))
        steps = list(life_cycles(orders, random.Random(number)))
        producer = connection.producer(name if name == NAMED_PRODUCER else None)
        window = SendWindow(self._board.sent)
        started_at_s = time.monotonic()
        for count, (order, step) in enumerate(steps):
            if name == NAMED_PRODUCER and count == len(steps) // 8:
                window.settle(0)
                producer = self._replace(connection, producer)
            body, key, message_id = order_message(order, step)
            window.add(producer.send(SUBJECT, body, key=key, message_id=message_id), key, message_id)
            window.settle(WINDOW)
            due_s = started_at_s + self._scale.sending_s * count / len(steps)
            if count % 8 == 0 and self._stop.wait(max(0.0, due_s - time.monotonic())):
                return
        window.settle(0)

    def _replace(self, connection: Connection, before: Producer) -> Producer:
        """Open a second producer with the same name, as a second process would. Sends of the first are refused."""
        after = connection.producer(NAMED_PRODUCER)
        try:
            before.send_sync(SUBJECT, b"{}", key=key_of(0))
        except ProducerFenced:
            self._board.events.say(
                f"{NAMED_PRODUCER} was opened a second time: the first producer of this name is refused from now on"
            )
        with contextlib.suppress(ProducerFenced):
            before.close()
        return after


class HandOverResult(msgspec.Struct, frozen=True):
    partition: int
    before: str
    after: str
    epoch: int
    offset: int
    repeated: int
    is_after_crash: bool
    took_s: float


class CrashActResult(ActResult, frozen=True, kw_only=True):
    orders: int
    orders_in_order: int  # orders that saw all five steps in their order
    retries: int
    died: str | None
    joined: str
    hand_overs: list[HandOverResult]
    handled_by: dict[str, int]


def judge_crash(act: CrashAct, board: CrashBoard, scale: Scale, elapsed_s: float) -> CrashActResult:
    """Call only after the act is over."""
    stored = act.stored if act.is_complete else None
    verdict = check(board.recorder.snapshot(), subject=SUBJECT, group=GROUP, order="partition", stored=stored)
    look, in_order = board.look(), board.ledger.complete_count
    was_taken_over = any(one.is_after_crash for one in board.hand_overs)
    is_all = verdict.sent == scale.messages and in_order == scale.orders
    return CrashActResult(
        **checked_fields(act, board, verdict, ok=was_taken_over and is_all, elapsed_s=elapsed_s),
        orders=scale.orders,
        orders_in_order=in_order,
        retries=sum(one.retries for one in look.consumers),
        died=act.victim,
        joined=LATE_CONSUMER,
        hand_overs=[
            HandOverResult(
                *(one.partition, one.before, one.after, one.epoch, one.offset, one.repeated, one.is_after_crash),
                took_s=round(one.took_s, 3),
            )
            for one in board.hand_overs
        ],
        handled_by={one.name: one.handled for one in look.consumers},
    )
