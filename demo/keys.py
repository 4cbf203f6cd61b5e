"""The second act: the messages of the first act again, ordered by key. A poisoned key is parked and resumed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from demo.act import Act, ActLook, ActResult, Events, HandlerBoard, checked_fields, stored_ids
from demo.orders import (
    ATTEMPTS_MAX,
    CONCURRENCY,
    KEY_GROUP,
    LATER_STEPS,
    PARTITION_COUNT,
    POISONED_STEP,
    STEPS,
    SUBJECT,
    OrderStep,
    Scale,
    key_of,
    order_message,
)
from inturn.client import Connection, connect
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, LotState, OnExhausted, Order
from inturn.producer.producer import Producer
from inturn.producer.send_batch import Stored
from inturn.protocol.commands import KeyDescription, Progress
from inturn.testing.checker import check
from inturn.testing.history import SendAcknowledged

CONSUMER = "emil"
LIST_S = 0.1  # interval between two lists of the keys that are held back
KEY_HEADINGS = ("key", "partition", "state", "head offset", "attempts", "last error", "waiting behind")


@dataclass(slots=True)
class KeyPartition:
    """Messages are handled in the order of their keys, not of the offsets."""

    stored: int = 0
    handled: int = 0
    last: OrderStep | None = None


@dataclass(slots=True)
class Crowd:
    """The number of handlers that run at once."""

    running: int = 0
    running_max: int = 0
    _since_s: float = 0.0
    _handler_s: float = 0.0  # running × time, summed up

    def change(self, by: int, now_s: float) -> None:
        self._handler_s += self.running * (now_s - self._since_s)
        self._since_s = now_s
        self.running += by
        self.running_max = max(self.running_max, self.running)

    def mean(self, during_s: float) -> float:
        return self._handler_s / during_s if during_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Flood:
    """All orders except the poisoned order: their rate, and the number of handlers at once."""

    handled: int
    took_s: float
    running_mean: float
    running_max: int

    @property
    def rate(self) -> float:
        return self.handled / self.took_s if self.took_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class KeyLook(ActLook):
    begun_at_s: float  # start of the first handler
    partitions: tuple[KeyPartition, ...]
    running: int
    flood: Flood | None  # None until all other orders are handled
    keys: tuple[KeyDescription, ...]

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.partitions)

    @property
    def handled(self) -> int:
        return sum(one.handled for one in self.partitions)


class KeyBoard(HandlerBoard):
    def __init__(self, poisoned: int, events: Events) -> None:
        super().__init__(events, SUBJECT, KEY_GROUP)
        self.poisoned = poisoned  # the order
        self.partitions = [KeyPartition() for _ in range(PARTITION_COUNT)]
        self.poisoned_steps: list[str] = []  # handled steps of the poisoned order, in their order
        self.failed_attempts = 0
        self.flood: Flood | None = None
        self._keys: tuple[KeyDescription, ...] = ()
        self._lot_states: dict[bytes, str] = {}
        self._crowd = Crowd()
        self._begun_at_s: float | None = None
        self._flood_count = 0  # messages of all orders except the poisoned order
        self._flood_left = 0
        self._done: set[tuple[int, int]] = set()  # (partition, offset): a repeated message counts once

    @property
    def is_begun(self) -> bool:
        return self._begun_at_s is not None

    def look(self) -> KeyLook:
        with self._lock:
            now_s = self.events.now_s
            return KeyLook(
                now_s,
                self.events.so_far(),
                now_s if self._begun_at_s is None else self._begun_at_s,
                tuple(replace(one) for one in self.partitions),
                self._crowd.running,
                self.flood,
                self._keys,
            )

    # Calls of the act

    def found(self, acknowledged: Iterable[SendAcknowledged]) -> None:
        """The messages that the first act left in the log."""
        with self._lock:
            for one in acknowledged:
                self._stored(one.subject, one.partition, one.offset, one.key, one.message_id)
                self._flood_count += one.key != key_of(self.poisoned).encode()
            self._flood_left = self._flood_count

    def sent(self, stored: Stored, key: str, message_id: str) -> None:
        with self._lock:
            self._stored(stored.subject, stored.partition, stored.offset, key.encode(), message_id)

    def _stored(self, subject: str, partition: int, offset: int, key: bytes | None, message_id: str | None) -> None:
        self.recorder.sent(subject, partition, offset, key, message_id)
        self.partitions[partition].stored = max(self.partitions[partition].stored, offset + 1)

    def listed(self, keys: Sequence[KeyDescription]) -> None:
        """The answer of `Connection.keys`."""
        self._keys = tuple(keys)

    # Calls of the node and of the consumer

    def _commit_seen(self, progress: Progress) -> None:
        for lot in progress.lots:
            if self._lot_states.get(lot.key) == lot.state:
                continue
            self._lot_states[lot.key] = lot.state
            key = lot.key.decode()
            if lot.state == LotState.PARKED:
                self.events.say(f"{key} is parked ({lot.reason}); all other keys go on")
            elif lot.state == LotState.FREE:
                self.events.say(f"{key}: its parking lot is empty, {key} is an ordinary key again")

    def _starting(self, messages: Sequence[Message], context: Context) -> None:
        now_s = self.events.now_s
        if self._begun_at_s is None:
            self._begun_at_s = now_s
        self._crowd.change(1, now_s)

    def _ending(self) -> None:
        self._crowd.change(-1, self.events.now_s)

    def _failed(self, body: OrderStep, context: Context, error: BaseException | None) -> None:
        self.failed_attempts += 1
        self.events.say(f"order {body.order} {body.step}: attempt {context.attempt} failed ({error})")

    def _handled(self, message: Message, body: OrderStep, context: Context) -> None:
        place, partition = (context.partition, message.offset), self.partitions[context.partition]
        if place in self._done:
            return
        self._done.add(place)
        partition.handled += 1
        partition.stored = max(partition.stored, partition.handled)  # a handler may be quicker than the acknowledgement
        partition.last = body
        if body.step in STEPS:
            self.ledger.note(body.order, body.step)
        if body.order == self.poisoned:
            self.poisoned_steps.append(body.step)
            return
        self._flood_left -= 1
        if self._flood_left == 0:
            assert self._begun_at_s is not None
            took_s = self.events.now_s - self._begun_at_s
            self.flood = Flood(self._flood_count, took_s, self._crowd.mean(took_s), self._crowd.running_max)


class KeyAct(Act):
    """`stored` is the log at the end, `parked` the poisoned key as listed before it was resumed."""

    def __init__(self, scale: Scale, folder: Path, board: KeyBoard, acknowledged: Sequence[SendAcknowledged]) -> None:
        super().__init__(folder)
        self.stored: dict[tuple[str, int, int], str | None] = {}
        self.parked: KeyDescription | None = None
        self.left: tuple[KeyDescription, ...] = ()  # keys that are held back at the end: should be empty
        self._scale = scale
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
            self._wait(lambda: self._is_flood_done(connection), LIST_S)
            self._show_parked(connection)
            self._resume(connection, producer)
            self._wait(lambda: self._is_finished(connection), LIST_S)
            self._board.events.say("everything is handled, and no key is parked")
        self.left = tuple(connection.group(SUBJECT, KEY_GROUP).keys())
        self.stored = stored_ids(connection, SUBJECT)

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

    # Conditions

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

    def _is_flood_done(self, connection: Connection) -> bool:
        self._list(connection)
        return self._board.flood is not None and self._is_all_committed(connection)

    def _is_all_committed(self, connection: Connection) -> bool:
        """Every message of the log is handled or parked."""
        return all(one.lag == 0 for one in connection.group(SUBJECT, KEY_GROUP).describe().partitions)

    def _is_finished(self, connection: Connection) -> bool:
        keys = self._list(connection)
        is_handled = set(self._board.poisoned_steps) == {*STEPS, *LATER_STEPS}
        return is_handled and not keys and self._is_all_committed(connection)

    # The poisoned key

    def _send(self, producer: Producer, step: str, when: str) -> None:
        body, key, message_id = order_message(self._board.poisoned, step)
        self._board.sent(producer.send_sync(SUBJECT, body, key=key, message_id=message_id), key, message_id)
        self._board.events.say(f'{key}: a newer message, "{step}", was sent {when}')

    def _show_parked(self, connection: Connection) -> None:
        keys = self._list(connection)
        flood = self._board.flood
        assert flood is not None
        names = ", ".join((one.key or b"").decode() for one in keys)
        self._board.events.say(
            f"all other keys are done, {flood.rate:,.0f} messages/s; held back: {names}", key_lines(keys)
        )
        self.on_quiet()
        self._pause(self._scale.reading_s)

    def _resume(self, connection: Connection, producer: Producer) -> None:
        """Record the resume before the request: no message of a parked key starts in between."""
        self._is_fixed.set()
        self._board.events.say(f"the bug is fixed: inturn key resume {SUBJECT} {self._key} --group {KEY_GROUP}")
        assert self.parked is not None
        self._board.recorder.key_resumed(SUBJECT, KEY_GROUP, self.parked.partition, self._key.encode())
        connection.group(SUBJECT, KEY_GROUP).resume(self._key, by="demo", why="the bug is fixed")
        self._send(producer, LATER_STEPS[1], "while it is resumed")


def key_rows(keys: Sequence[KeyDescription]) -> list[tuple[str, ...]]:
    """The keys that are held back, with the columns of `inturn key list` except the age."""
    return [
        (
            "–" if one.key is None else one.key.decode(errors="backslashreplace"),
            str(one.partition),
            one.state,
            "–" if one.offset is None else f"{one.offset:,}",
            str(one.attempts),
            one.error or "–",
            str(one.waiting),
        )
        for one in keys
    ]


def key_lines(keys: Sequence[KeyDescription]) -> list[str]:
    """The same rows as a table in text."""
    rows = [KEY_HEADINGS, *key_rows(keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(KEY_HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class PoisonedKey(msgspec.Struct, frozen=True):
    """The key as listed while it was parked, and the handled steps of its order."""

    key: str
    attempts: int
    error: str
    waiting: int  # behind the message that failed
    steps: list[str]
    is_in_order: bool


class KeyActResult(ActResult, frozen=True, kw_only=True):
    """The second act: `by_key` in the output of `inturn demo --json`."""

    group: str
    orders: int
    orders_in_order: int
    failed_attempts: int
    concurrency: int
    running_max: int  # handlers at once, until all keys but the parked key were done
    running_mean: float
    rate: float  # messages per second in the same time
    first_act_rate: float  # the best rate of the first act, with one handler at a time per partition
    poisoned: PoisonedKey | None  # None: no key was parked
    still_held_back: list[str]  # keys, at the end


def judge_keys(act: KeyAct, board: KeyBoard, scale: Scale, first_act_rate: float, elapsed_s: float) -> KeyActResult:
    """Call only after the act is over."""
    stored = act.stored if act.is_complete else None
    verdict = check(board.recorder.snapshot(), subject=SUBJECT, group=KEY_GROUP, order="key", stored=stored)
    poisoned, flood, in_order = _poisoned(act, board), board.flood, board.ledger.complete_count
    is_resumed = poisoned is not None and poisoned.is_in_order and not act.left and verdict.parked == 0
    is_all = verdict.sent == scale.messages + len(LATER_STEPS) and in_order == scale.orders
    return KeyActResult(
        **checked_fields(act, board, verdict, ok=is_resumed and is_all, elapsed_s=elapsed_s),
        group=KEY_GROUP,
        orders=scale.orders,
        orders_in_order=in_order,
        failed_attempts=board.failed_attempts,
        concurrency=CONCURRENCY,
        running_max=0 if flood is None else flood.running_max,
        running_mean=0.0 if flood is None else round(flood.running_mean, 1),
        rate=0.0 if flood is None else round(flood.rate, 1),
        first_act_rate=first_act_rate,
        poisoned=poisoned,
        still_held_back=[(one.key or b"").decode(errors="backslashreplace") for one in act.left],
    )


def _poisoned(act: KeyAct, board: KeyBoard) -> PoisonedKey | None:
    parked = act.parked
    if parked is None:
        return None
    steps = list(board.poisoned_steps)
    return PoisonedKey(
        *(key_of(board.poisoned), parked.attempts, parked.error, parked.waiting, steps),
        is_in_order=steps == [*STEPS, *LATER_STEPS],
    )
