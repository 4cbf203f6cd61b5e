"""What is known while the second act runs: one group, ordered by key, many handlers at once, one poisoned key.

As on the first board, everything is recorded for the order checker in the order in which it is told here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from demo.board import OrderStep, recorded_as
from demo.events import Event, Events
from demo.orders import KEY_GROUP, PARTITION_COUNT, STEPS, SUBJECT, Ledger, key_of
from inturn.consumer.context import Context, Hook
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import LotState
from inturn.model.subject import Subject
from inturn.model.time import SystemClock
from inturn.producer.send_batch import Stored
from inturn.protocol.commands import KeyDescription, Progress
from inturn.testing.history import SendAcknowledged
from inturn.testing.recorder import Recorder


@dataclass(slots=True)
class Share:
    """What one partition holds, and how much of it is handled: in the order of each key, not of the offsets."""

    stored: int = 0
    handled: int = 0
    last: OrderStep | None = None


@dataclass(slots=True)
class Crowd:
    """How many handlers run at once."""

    running: int = 0
    running_max: int = 0
    _since_s: float = 0.0
    _handler_s: float = 0.0  # running × time, added up

    def change(self, by: int, now_s: float) -> None:
        self._handler_s += self.running * (now_s - self._since_s)
        self._since_s = now_s
        self.running += by
        self.running_max = max(self.running_max, self.running)

    def mean(self, during_s: float) -> float:
        return self._handler_s / during_s if during_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Flood:
    """All orders but the poisoned one: how fast, with how many handlers at once. None while it lasts."""

    handled: int
    took_s: float
    running_mean: float
    running_max: int

    @property
    def rate(self) -> float:
        return self.handled / self.took_s if self.took_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class KeyLook:
    """A copy of the board at one moment."""

    at_s: float
    begun_at_s: float  # when the first handler started
    partitions: tuple[Share, ...]
    running: int
    flood: Flood | None
    keys: tuple[KeyDescription, ...]
    events: tuple[Event, ...]

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.partitions)

    @property
    def handled(self) -> int:
        return sum(one.handled for one in self.partitions)


@dataclass(slots=True)
class KeyBoard(Hook):
    """The observer of the connection and the hook of the consumer. From any thread; never calls the node."""

    poisoned: int  # the order
    events: Events
    recorder: Recorder = field(default_factory=lambda: Recorder(SystemClock()))
    ledger: Ledger = field(default_factory=Ledger)
    partitions: list[Share] = field(default_factory=lambda: [Share() for _ in range(PARTITION_COUNT)])
    poisoned_steps: list[str] = field(default_factory=list)  # those handled, as they came
    failed_attempts: int = 0
    flood: Flood | None = None
    _keys: tuple[KeyDescription, ...] = ()
    _lot_states: dict[bytes, str] = field(default_factory=dict)
    _crowd: Crowd = field(default_factory=Crowd)
    _begun_at_s: float | None = None
    _others: int = 0  # messages of other orders
    _others_left: int = 0
    _done: set[tuple[int, int]] = field(default_factory=set)  # (partition, offset): what is repeated counts once
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_begun(self) -> bool:
        return self._begun_at_s is not None

    def look(self) -> KeyLook:
        with self._lock:
            now_s = self.events.now_s
            return KeyLook(
                now_s,
                now_s if self._begun_at_s is None else self._begun_at_s,
                tuple(replace(one) for one in self.partitions),
                self._crowd.running,
                self.flood,
                self._keys,
                self.events.so_far(),
            )

    # Told by the story

    def found(self, acknowledged: Iterable[SendAcknowledged]) -> None:
        """What the first act has left in the log."""
        with self._lock:
            for one in acknowledged:
                self._stored(one.subject, one.partition, one.offset, one.key, one.message_id)
                self._others += one.key != key_of(self.poisoned).encode()
            self._others_left = self._others

    def sent(self, stored: Stored, key: str, message_id: str) -> None:
        with self._lock:
            self._stored(stored.subject, stored.partition, stored.offset, key.encode(), message_id)

    def _stored(self, subject: str, partition: int, offset: int, key: bytes | None, message_id: str | None) -> None:
        self.recorder.sent(subject, partition, offset, key, message_id)
        self.partitions[partition].stored = max(self.partitions[partition].stored, offset + 1)

    def listed(self, keys: Sequence[KeyDescription]) -> None:
        """What `Connection.keys` says now."""
        self._keys = tuple(keys)

    # Told by the node: of the group's retry and dead-letter subjects, too, which are empty here

    def lease_granted(self, subject: str, group: str, partition: int, owner: str, epoch: int) -> None:
        if (subject, group) == (SUBJECT, KEY_GROUP):
            self.recorder.lease_granted(subject, group, partition, owner, epoch)

    def lease_ended(self, subject: str, group: str, partition: int, owner: str, epoch: int, why: str) -> None:
        if (subject, group) == (SUBJECT, KEY_GROUP):
            self.recorder.lease_ended(subject, group, partition, owner, epoch, why)

    def claim_granted(self, subject: str, group: str, partition: int, claimant: str, epoch: int, slots: bytes) -> None:
        pass

    def grown(self, subject: Subject) -> None:
        """The demo does not grow."""

    def claim_ended(self, subject: str, group: str, partition: int, claimant: str, epoch: int) -> None:
        pass

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        if (subject, group) != (SUBJECT, KEY_GROUP):
            return
        self.recorder.committed(subject, group, owner, progress)
        for lot in progress.lots:
            if self._lot_states.get(lot.key) != lot.state:
                self._lot_states[lot.key] = lot.state
                self._lot_changed(lot.key.decode(), lot.state, lot.reason)

    def _lot_changed(self, key: str, state: str, reason: str) -> None:
        if state == LotState.PARKED:
            self.events.say(f"{key} is parked ({reason}); all other keys go on")
        elif state == LotState.FREE:
            self.events.say(f"{key}: its parking lot is empty, it is an ordinary key again")

    # Told by the consumer

    def before(self, messages: Sequence[Message], context: Context) -> None:
        with self._lock:
            now_s = self.events.now_s
            if self._begun_at_s is None:
                self._begun_at_s = now_s
            self._crowd.change(1, now_s)
            for message in messages:
                where = (SUBJECT, context.group, context.partition, message.offset, message.key)
                who = (context.consumer, context.epoch, message.message_id)
                self.recorder.started(*where, *who, attempt=context.attempt)

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        with self._lock:
            self._crowd.change(-1, self.events.now_s)
            result = recorded_as(kind)
            for message in messages:
                where = (SUBJECT, context.group, context.partition, message.offset, message.key)
                self.recorder.ended(*where, context.consumer, context.epoch, message.message_id, result=result)
                body = msgspec.json.decode(message.body, type=OrderStep)
                if result == "success":
                    self._handled(message, body, context)
                else:
                    self.failed_attempts += 1
                    self.events.say(f"order {body.order} {body.step}: attempt {context.attempt} failed ({error})")

    def _handled(self, message: Message, body: OrderStep, context: Context) -> None:
        place, share = (context.partition, message.offset), self.partitions[context.partition]
        if place in self._done:
            return
        self._done.add(place)
        share.handled += 1
        share.stored = max(share.stored, share.handled)  # a handler may be quicker than the acknowledgement
        share.last = body
        if body.step in STEPS:
            self.ledger.note(body.order, body.step)
        if body.order != self.poisoned:
            self._others_left -= 1
            if self._others_left == 0:
                self._end_flood()
        else:
            self.poisoned_steps.append(body.step)

    def _end_flood(self) -> None:
        assert self._begun_at_s is not None
        took_s = self.events.now_s - self._begun_at_s
        self.flood = Flood(self._others, took_s, self._crowd.mean(took_s), self._crowd.running_max)
