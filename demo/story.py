"""What happens in the demo: producers, consumers of one group, one of them dies, another joins."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter, deque
from pathlib import Path

import msgspec

from demo.act import LIMIT_S, Act
from demo.board import Board, OrderStep
from demo.orders import GROUP, PARTITION_COUNT, SUBJECT, Scale, key_of, life_cycles, troubles
from inturn.client import Connection, connect
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.model.errors import ProducerFenced
from inturn.model.message import Message
from inturn.model.result import Suspend, suspend
from inturn.model.routing import slot_of
from inturn.model.settings import ConsumerSettings
from inturn.producer.producer import Producer
from inturn.producer.send_batch import SendHandle

FIRST_CONSUMERS = ("ada", "ben", "cleo")
LATE_CONSUMER = "dora"
NAMED_PRODUCER = "till-4"
PRODUCERS = ("till-1", "till-2", "till-3", NAMED_PRODUCER)
DEATH_AT, JOIN_AT = 0.25, 0.5  # of all messages handled
WINDOW = 500  # messages of one producer that are not acknowledged yet


class _Dead(Exception):
    """Ends the thread of a consumer that died: in one process nothing else can."""


class Story(Act):
    """The first act. `stored` is what the log held in the end."""

    def __init__(self, scale: Scale, folder: Path, board: Board) -> None:
        super().__init__()
        self.stored: dict[tuple[str, int, int], str | None] = {}
        self.victim: str | None = None
        self._scale = scale
        self._folder = folder
        self._board = board
        self._troubles = troubles(scale.orders)
        self._consumers: dict[str, Consumer] = {}

    def play(self) -> None:
        with connect(self._folder, lease=self._scale.lease, observer=self._board) as connection:
            self._tell(connection)

    def _tell(self, connection: Connection) -> None:
        subject = connection.create_subject(SUBJECT, PARTITION_COUNT)
        route = Counter(subject.route.by_slot[slot_of(key_of(order).encode())] for order in range(self._scale.orders))
        share = self._scale.messages // self._scale.orders
        self._board.expect([route[partition] * share for partition in range(PARTITION_COUNT)])
        for name in FIRST_CONSUMERS:
            self._join(connection, name)
            self._wait(self._is_shared)
        self._board.events.say(f"{', '.join(FIRST_CONSUMERS)} share the {PARTITION_COUNT} partitions")
        tills = [self._open_till(connection, name, number) for number, name in enumerate(PRODUCERS)]
        try:
            self._wait(lambda: self._handled_share() >= DEATH_AT)
            self._kill()
            self._wait(lambda: self._is_shared() and self._handled_share() >= JOIN_AT)
            self._board.events.say(f"{LATE_CONSUMER} joined the group")
            self._join(connection, LATE_CONSUMER)
            self._wait(lambda: not any(till.is_alive() for till in tills) and self._handled_share() >= 1.0)
        finally:
            self._stop.set()  # nobody sends any more when the connection is closed
            for till in tills:
                till.join()
        self._board.events.say("everything is handled: the consumers commit, give their leases back and leave")
        for consumer in self._consumers.values():
            consumer.stop()
        self.stored = {(SUBJECT, one.partition, one.offset): one.message_id for one in connection.reader(SUBJECT)}

    # What is waited for

    def _handled_share(self) -> float:
        return self._board.look().done / self._scale.messages

    def _is_shared(self) -> bool:
        """Every living consumer has its share: they differ by one at most."""
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
        """Whoever has most to do. First killed, then noted: what is noted as over must not be committed later."""
        owners = Counter(one.owner for one in self._board.look().partitions if one.owner is not None)
        self.victim = owners.most_common(1)[0][0]
        consumer = self._consumers[self.victim]
        consumer.kill()
        self._board.died(consumer.name)

    # Producers

    def _open_till(self, connection: Connection, name: str, number: int) -> threading.Thread:
        def send() -> None:
            try:
                self._send(connection, name, number)
            except Exception as error:
                self.error = error
                self._stop.set()

        thread = threading.Thread(target=send, name=name, daemon=True)
        thread.start()
        return thread

    def _send(self, connection: Connection, name: str, number: int) -> None:
        """The orders of one till: pipelined, and paced so that there is something to see."""
        orders = range(number, self._scale.orders, len(PRODUCERS))
        steps = list(life_cycles(orders, random.Random(number)))
        producer = connection.producer(name if name == NAMED_PRODUCER else None)
        window: deque[tuple[SendHandle, str, str]] = deque()
        started_at_s = time.monotonic()
        for count, (order, step) in enumerate(steps):
            if name == NAMED_PRODUCER and count == len(steps) // 8:
                self._acknowledge(window, down_to=0)
                producer = self._replace(connection, producer)
            body, key, message_id = msgspec.json.encode(OrderStep(order, step)), key_of(order), f"{order}/{step}"
            window.append((producer.send(SUBJECT, body, key=key, message_id=message_id), key, message_id))
            self._acknowledge(window, down_to=WINDOW)
            due_s = started_at_s + self._scale.sending_s * count / len(steps)
            if count % 8 == 0 and self._stop.wait(max(0.0, due_s - time.monotonic())):
                return
        self._acknowledge(window, down_to=0)

    def _acknowledge(self, window: deque[tuple[SendHandle, str, str]], down_to: int) -> None:
        while window and (len(window) > down_to or window[0][0].done):
            handle, key, message_id = window.popleft()
            self._board.sent(handle.result(timeout_s=LIMIT_S), key, message_id)

    def _replace(self, connection: Connection, before: Producer) -> Producer:
        """A second process with the same name would do just this; what the first still sends is refused."""
        after = connection.producer(NAMED_PRODUCER)
        try:
            before.send_sync(SUBJECT, b"{}", key=key_of(0))
        except ProducerFenced:
            self._board.events.say(f"{NAMED_PRODUCER} was opened a second time: its former self is refused from now on")
        with contextlib.suppress(ProducerFenced):
            before.close()
        return after
