"""What happens in the second act: the messages of the first again, ordered by key; a key is parked and resumed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from demo.act import Act
from demo.board import OrderStep
from demo.key_board import KeyBoard
from demo.key_list import list_lines
from demo.orders import ATTEMPTS_MAX, CONCURRENCY, KEY_GROUP, LATER_STEPS, POISONED_STEP, STEPS, SUBJECT, Scale, key_of
from inturn.client import Connection, connect
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, LotState, OnExhausted, Order
from inturn.producer.producer import Producer
from inturn.protocol.commands import KeyDescription
from inturn.testing.history import SendAcknowledged

CONSUMER = "emil"
LIST_S = 0.1  # how often it is looked which keys are held back


class KeyStory(Act):
    """`stored` is what the log held in the end, `parked` the poisoned key as it was listed before it was resumed."""

    def __init__(self, scale: Scale, folder: Path, board: KeyBoard, acknowledged: Sequence[SendAcknowledged]) -> None:
        super().__init__()
        self.stored: dict[tuple[str, int, int], str | None] = {}
        self.parked: KeyDescription | None = None
        self.left: tuple[KeyDescription, ...] = ()  # keys that are held back in the end: there should be none
        self._scale = scale
        self._folder = folder
        self._board = board
        self._acknowledged = acknowledged
        self._key = key_of(board.poisoned)
        self._is_fixed = threading.Event()

    def play(self) -> None:
        with connect(self._folder, lease=self._scale.lease, observer=self._board) as connection:
            self._tell(connection)

    def _tell(self, connection: Connection) -> None:
        self._board.found(self._acknowledged)
        self._board.events.say(f'the same messages, a new group with order="key": {CONCURRENCY} handlers at once')
        consumer = connection.consumer(
            SUBJECT,
            KEY_GROUP,
            self._handle,
            order=Order.KEY,
            settings=self._settings(),
            hooks=[self._board],
            name=CONSUMER,
        )
        self._watched.append(consumer)
        producer = connection.producer()
        with consumer:
            self._wait(lambda: self._board.is_begun)
            self._wait(lambda: self._is_parked(connection), LIST_S)
            self._send(producer, LATER_STEPS[0], "while it is parked")
            self._wait(lambda: self._is_all_else_done(connection), LIST_S)
            self._show_parked(connection)
            self._resume(connection, producer)
            self._wait(lambda: self._is_over(connection), LIST_S)
            self._board.events.say("everything is handled, and no key is parked")
        self.left = tuple(connection.group(SUBJECT, KEY_GROUP).keys())
        self.stored = {(SUBJECT, one.partition, one.offset): one.message_id for one in connection.reader(SUBJECT)}

    # The consumer

    def _settings(self) -> ConsumerSettings:
        return ConsumerSettings(
            concurrency=CONCURRENCY,
            max_attempts=ATTEMPTS_MAX,
            on_exhausted=OnExhausted.PARK,
            backoff_min_s=self._scale.retry_s / 5,
            backoff_max_s=self._scale.retry_s,
            commit_interval_s=0.05,
            heartbeat_s=self._scale.lease.renew_s,
        )

    def _handle(self, message: Message, context: Context) -> None:
        body = msgspec.json.decode(message.body, type=OrderStep)
        if body.order != self._board.poisoned:
            time.sleep(self._scale.handling_s)  # the work, as in the first act
        elif self._is_fixed.is_set():
            time.sleep(self._scale.resumed_step_s)
        elif body.step == POISONED_STEP:
            raise ValueError("no exchange rate for XAU")

    # What is waited for

    def _list(self, connection: Connection) -> list[KeyDescription]:
        keys = connection.group(SUBJECT, KEY_GROUP).keys()
        self._board.listed(keys)
        for one in keys:
            if one.state == LotState.PARKED:
                self.parked = one
        return keys

    def _is_parked(self, connection: Connection) -> bool:
        self._list(connection)
        return self.parked is not None

    def _is_all_else_done(self, connection: Connection) -> bool:
        self._list(connection)
        return self._board.flood is not None and self._is_all_committed(connection)

    def _is_all_committed(self, connection: Connection) -> bool:
        """Nothing of the log is left to do: it is handled, or parked."""
        return all(one.lag == 0 for one in connection.group(SUBJECT, KEY_GROUP).describe().partitions)

    def _is_over(self, connection: Connection) -> bool:
        keys = self._list(connection)
        is_handled = set(self._board.poisoned_steps) == {*STEPS, *LATER_STEPS}
        return is_handled and not keys and self._is_all_committed(connection)

    # The poisoned key

    def _send(self, producer: Producer, step: str, when: str) -> None:
        order = self._board.poisoned
        body, message_id = msgspec.json.encode(OrderStep(order, step)), f"{order}/{step}"
        self._board.sent(producer.send_sync(SUBJECT, body, key=self._key, message_id=message_id), self._key, message_id)
        self._board.events.say(f'{self._key}: a newer message, "{step}", was sent {when}')

    def _show_parked(self, connection: Connection) -> None:
        keys = self._list(connection)
        flood = self._board.flood
        assert flood is not None
        names = ", ".join((one.key or b"").decode() for one in keys)
        self._board.events.say(
            f"all other keys are done, {flood.rate:,.0f} messages/s; held back: {names}", list_lines(keys)
        )
        self._pause(self._scale.reading_s)

    def _resume(self, connection: Connection, producer: Producer) -> None:
        """Noted before it is asked for: nothing of a parked key starts between the two."""
        self._is_fixed.set()
        self._board.events.say(f"the bug is fixed: inturn key resume {SUBJECT} {self._key} --group {KEY_GROUP}")
        assert self.parked is not None
        self._board.recorder.key_resumed(SUBJECT, KEY_GROUP, self.parked.partition, self._key.encode())
        connection.group(SUBJECT, KEY_GROUP).resume(self._key, by="demo", why="the bug is fixed")
        self._send(producer, LATER_STEPS[1], "while it is resumed")
