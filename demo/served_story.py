"""What happens in the third act: a server and three consumers, each a process; one of them is killed with kill -9."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from demo.act import LIMIT_S, Act
from demo.board import OrderStep
from demo.children import GRACE_S, Children
from demo.orders import PARTITION_COUNT, SERVED_GROUP, SUBJECT, ServedScale, key_of, life_cycles
from demo.served_board import ServedBoard
from demo.story import FIRST_CONSUMERS
from inturn.client import Connection, connect
from inturn.model.errors import NotFound
from inturn.model.routing import slot_of
from inturn.producer.send_batch import SendHandle

SERVER = "server"
KILL_AT = 0.35  # of all messages handled
LOOK_S = 0.05


class ServedStory(Act):
    """`stored` is what the log held in the end."""

    def __init__(self, scale: ServedScale, folder: Path, board: ServedBoard) -> None:
        super().__init__()
        self.stored: dict[tuple[str, int, int], str | None] = {}
        self._scale = scale
        self._folder = folder
        self._board = board
        self._lag = scale.messages

    def play(self) -> None:
        with Children(self._folder) as children:
            self._start(children)
            with connect(self._board.address, wait_s=GRACE_S) as connection:
                self._tell(children, connection)
            self._board.events.say("everything is handled: the consumers stop, then the server; nobody is left behind")

    def _tell(self, children: Children, connection: Connection) -> None:
        self._expect(connection)
        for name in FIRST_CONSUMERS:
            children.tell(name, self._board.address)
        self._await(children, connection, self._is_shared)
        self._board.events.say(f"{', '.join(FIRST_CONSUMERS)}, each a process, share the {PARTITION_COUNT} partitions")
        till = threading.Thread(target=self._send_all, args=[connection], name="till", daemon=True)
        till.start()
        try:
            self._await(children, connection, lambda: self._is_done(KILL_AT) and self._is_shared())
            self._kill(children)
            self._await(children, connection, lambda: self._board.is_taken_over)
            self._await(children, connection, lambda: not till.is_alive() and self._is_done(1.0) and self._lag == 0)
        finally:
            self._stop.set()  # nobody sends any more when the connection is closed
            till.join()
        children.stop(*(name for name in FIRST_CONSUMERS if name != self._board.killed))
        self._board.read()
        self.stored = {(SUBJECT, one.partition, one.offset): one.message_id for one in connection.reader(SUBJECT)}

    # The processes

    def _start(self, children: Children) -> None:
        """The consumers at the same time as the server: they are told its address when there is one."""
        data, scale = str(self._folder / "data"), self._scale
        pid = children.start(SERVER, "demo.server", data, str(scale.lease_s))
        for name in FIRST_CONSUMERS:
            records = self._folder / f"{name}.jsonl"
            how = (name, str(records), str(scale.handling_s), str(scale.lease_s / 5))
            self._board.joined(name, children.start(name, "demo.consumer", *how), records)
        said = children.first_line(SERVER, self._wait)
        self._board.address, self._board.server_pid = msgspec.json.decode(said)["address"], pid
        self._board.events.say(f"inturn serve listens at {self._board.address}, process {pid}")

    def _kill(self, children: Children) -> None:
        """Whoever has most to do."""
        victim = self._board.owned().most_common(1)[0][0]
        held = [index for index, one in enumerate(self._board.look().partitions) if one.owner == victim]
        at_ns = time.monotonic_ns()
        children.kill(victim)
        self._board.died(victim, held, at_ns)

    # What is waited for

    def _await(self, children: Children, connection: Connection, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            children.check()
            self._look(connection)
            return condition()

        self._wait(look, LOOK_S)

    def _look(self, connection: Connection) -> None:
        self._board.read()
        try:
            partitions = connection.group(SUBJECT, SERVED_GROUP).describe().partitions
        except NotFound:  # nobody has joined yet
            return
        self._board.described(partitions)
        self._lag = sum(one.lag for one in partitions)

    def _is_shared(self) -> bool:
        owned = self._board.owned()
        return len(owned) == len(FIRST_CONSUMERS) and sum(owned.values()) == PARTITION_COUNT

    def _is_done(self, share: float) -> bool:
        return self._board.look().done >= share * self._scale.messages

    # The producer

    def _expect(self, connection: Connection) -> None:
        route = connection.create_subject(SUBJECT, PARTITION_COUNT).route
        orders = Counter(route.by_slot[slot_of(key_of(order).encode())] for order in range(self._scale.orders))
        steps = self._scale.messages // self._scale.orders
        self._board.expect([orders[index] * steps for index in range(PARTITION_COUNT)])

    def _send_all(self, connection: Connection) -> None:
        try:
            self._send(connection)
        except Exception as error:
            self.error = error
            self._stop.set()

    def _send(self, connection: Connection) -> None:
        """Pipelined, and paced so that there is something to see."""
        steps = list(life_cycles(range(self._scale.orders), random.Random(7)))
        producer = connection.producer()
        window: deque[tuple[SendHandle, str, str]] = deque()
        started_at_s = time.monotonic()
        for count, (order, step) in enumerate(steps):
            body, key, message_id = msgspec.json.encode(OrderStep(order, step)), key_of(order), f"{order}/{step}"
            window.append((producer.send(SUBJECT, body, key=key, message_id=message_id), key, message_id))
            while window and window[0][0].done:
                self._acknowledge(window)
            due_s = started_at_s + self._scale.sending_s * count / len(steps)
            if count % 8 == 0 and self._stop.wait(max(0.0, due_s - time.monotonic())):
                return
        while window:
            self._acknowledge(window)

    def _acknowledge(self, window: deque[tuple[SendHandle, str, str]]) -> None:
        handle, key, message_id = window.popleft()
        self._board.sent(handle.result(timeout_s=LIMIT_S), key, message_id)
