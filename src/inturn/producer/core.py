"""The producer without I/O: routes messages to the queues of partitions and decides what is sent when."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from inturn.model.commands import Append, Appended
from inturn.model.errors import InturnError, InvalidInput, LimitExceeded, RouteChanged, SendFailed
from inturn.model.message import Outgoing
from inturn.model.names import RESERVED
from inturn.model.route import Partition
from inturn.model.settings import ProducerSettings, Routing, Strategy
from inturn.model.slot import SLOT_COUNT, slot_of
from inturn.model.subject import Subject
from inturn.producer.flight import Flight
from inturn.producer.queue import PartitionQueue

Selector: TypeAlias = Callable[[Sequence[Partition], Outgoing, object], int]

# What a message weighs beside body, key and properties: enough that empty ones do not fill a buffer for free.
MESSAGE_OVERHEAD_BYTES = 32
_FAILED_COUNT = 1000


class SendAttempt:
    """One sending of a flight; give it back to `answered`."""

    __slots__ = ("command", "flight", "queue", "tries")

    def __init__(self, queue: PartitionQueue, flight: Flight, command: Append) -> None:
        self.queue = queue
        self.flight = flight
        self.command = command
        self.tries = flight.tries


class ProducerCore:
    """Called by one thread at a time. `waiting_bytes` is what is not acknowledged yet."""

    def __init__(self, producer_id: int, epoch: int, settings: ProducerSettings, rng: random.Random) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.waiting_bytes = 0
        self.failed: list[Flight] = []  # since it was last cleared; not more than a few
        self._settings = settings
        self._random = rng.random
        self._subjects: dict[str, Subject] = {}
        self._by_slot: dict[str, list[int]] = {}  # while a subject grows, each parent's slots move when it is settled
        self._grown: dict[str, Subject] = {}  # routes that are not followed everywhere yet
        self._outdated: set[str] = set()  # subjects whose route is to be asked for
        self._queues: dict[str, list[PartitionQueue]] = {}

    def knows(self, subject: str) -> bool:
        return subject in self._subjects

    def learn(self, subject: Subject) -> None:
        """Its route; or a newer one, which is followed as soon as it is known what became of all that was sent."""
        known = self._grown.get(subject.name, self._subjects.get(subject.name))
        if known is not None and known.route.version >= subject.route.version:
            return
        queues = self._queues.setdefault(subject.name, [])
        if known is None:
            self._subjects[subject.name] = subject
            self._by_slot[subject.name] = list(subject.route.by_slot)
        else:
            self._grown[subject.name] = subject
            for queue in queues:
                queue.is_held = True
        queues += [self._new_queue(subject, index) for index in range(len(queues), subject.partition_count)]
        self._follow(subject.name)

    def _new_queue(self, subject: Subject, index: int) -> PartitionQueue:
        version = subject.route.version
        return PartitionQueue(
            subject.name, index, self.producer_id, self.epoch, version, subject.strategy, self._settings
        )

    def take_outdated(self) -> set[str]:
        """Subjects that have another route by now: it is to be asked for, and given to `learn`."""
        outdated, self._outdated = self._outdated, set()
        return outdated

    def _follow(self, name: str) -> None:
        """Let every queue that is settled go on by the new route, each on its own: one that waits holds up no other."""
        grown = self._grown.get(name)
        if grown is None:
            return
        queues, by_slot, route = self._queues[name], self._by_slot[name], grown.route
        for queue in queues:
            if queue.is_held and queue.error is None and queue.is_settled:
                for slot, partition in enumerate(by_slot):
                    if partition == queue.partition:
                        by_slot[slot] = route.by_slot[slot]
                for flight in queue.reroute(route.version):
                    self._divide(queues, flight, [route.by_slot[slot] for slot in flight.slots])
        if not any(queue.is_held and queue.error is None for queue in queues):
            self._subjects[name] = grown
            del self._grown[name]

    def _divide(self, queues: list[PartitionQueue], flight: Flight, places: list[int]) -> None:
        parts = {places[0]: flight} if len(set(places)) == 1 else flight.divide(places)
        for partition, part in parts.items():
            queues[partition].take_back(part)

    def add(
        self,
        subject_name: str,
        body: bytes,
        key: str | bytes | None,
        born_at_ms: int,
        tags: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        message_id: str | None = None,
        selector: Selector | None = None,
        arg: object = None,
    ) -> Flight:
        """Queue a message; it is the last of the returned flight. Raises without a trace if it cannot be accepted."""
        subject = self._subjects[subject_name]
        limits = subject.limits
        if type(body) is not bytes:
            body = _as_bytes("body", body)
        size_bytes = len(body)
        if size_bytes > limits.body_bytes:
            raise LimitExceeded("the body", size_bytes, limits.body_bytes, "Limits.body_bytes")
        if selector is not None and key is None:
            key = _order_key(arg)
        if key is not None:
            try:
                key = key.encode() if type(key) is str else _as_bytes("key", key)
            except UnicodeEncodeError as error:
                raise _not_text("key", key, error) from None
            if len(key) > limits.key_bytes:
                raise LimitExceeded("the key", len(key), limits.key_bytes, "Limits.key_bytes")
            size_bytes += len(key)
            slot = slot_of(key)
        else:
            slot = int(self._random() * SLOT_COUNT)
        if properties:
            size_bytes += _checked_properties(properties, limits.properties_bytes)
        if tags != ():
            tags, tags_bytes = _checked_tags(tags, limits.properties_bytes)
            size_bytes += tags_bytes
        if message_id is not None:
            size_bytes += _checked_id(message_id, limits.key_bytes)
        message = Outgoing(body, key, born_at_ms, tags, dict(properties) if properties else {}, message_id)
        if subject.routing is Routing.SLOTS and selector is None:
            partition = self._by_slot[subject_name][slot]
        else:
            partition = self._select(subject, message, slot, selector, arg)
        queue = self._queues[subject_name][partition]
        if queue.error is not None:
            other = self._other_queue(queue) if subject.strategy is Strategy.BEST_EFFORT else None
            if other is None:
                raise copy.copy(queue.error)  # one of its own: a traceback stays on what was raised
            queue = other
        size_bytes += MESSAGE_OVERHEAD_BYTES
        self.waiting_bytes += size_bytes
        return queue.add(message, slot, size_bytes)

    def poll(self, now_s: float) -> list[SendAttempt]:
        """What to send now; what belongs to one partition is in order."""
        every = [queue for queues in self._queues.values() for queue in queues]
        for queue in every:
            for given_up in queue.expire(now_s):
                self._move(queue, given_up, InturnError("no answer came"))
        return [SendAttempt(queue, flight, command) for queue in every for flight, command in queue.poll(now_s)]

    def answered(self, attempt: SendAttempt, answer: object, now_s: float) -> None:
        queue, flight = attempt.queue, attempt.flight
        if isinstance(answer, Appended):
            self.waiting_bytes -= queue.succeeded(flight, answer.base_offset)
            self._follow(queue.subject)
            return
        error = answer if isinstance(answer, InturnError) else InturnError(f"unexpected answer {answer!r}")
        for given_up in queue.failed(flight, attempt.tries, error, now_s):
            self._move(queue, given_up, error)
        if isinstance(error, RouteChanged):
            self._outdated.add(queue.subject)
        self._follow(queue.subject)
        if queue.error is not None:
            for left in queue.abandon():
                self._fail(left, queue.error)

    def next_due_s(self) -> float | None:
        due = [queue.next_due_s() for queues in self._queues.values() for queue in queues if not queue.is_idle]
        return min((at_s for at_s in due if at_s is not None), default=None)

    @property
    def is_idle(self) -> bool:
        """Everything is acknowledged or has failed."""
        return all(queue.is_idle for queues in self._queues.values() for queue in queues)

    def abandon(self, error: InturnError) -> int:
        """Fail everything that is not acknowledged; returns the number of messages."""
        left = [flight for queues in self._queues.values() for queue in queues for flight in queue.abandon()]
        for flight in left:
            self._fail(flight, error)
        return sum(len(flight.messages) for flight in left)

    def _select(self, subject: Subject, message: Outgoing, slot: int, selector: Selector | None, arg: object) -> int:
        if subject.routing is Routing.SLOTS:
            raise InvalidInput(
                f"subject {subject.name!r} routes by slots; leave selector= out, or create it with routing='selector'"
            )
        if selector is None:
            if message.key is not None:
                raise InvalidInput(f"subject {subject.name!r} routes by selector; give selector= (and arg=) with a key")
            return slot * subject.partition_count // SLOT_COUNT
        chosen = selector(subject.route.partitions, message, arg)
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < subject.partition_count:
            raise InvalidInput(
                f"the selector for {subject.name!r} returned {chosen!r}; "
                f"it must be a partition's index, 0 to {subject.partition_count - 1}"
            )
        return chosen

    def _move(self, queue: PartitionQueue, flight: Flight, error: InturnError) -> None:
        other = self._other_queue(queue)
        if other is None or flight.moves >= len(self._queues[queue.subject]) - 1:
            self._fail(flight, SendFailed(flight.subject, str(flight.partition), str(error)))
        else:
            other.take_over(flight)

    def _other_queue(self, queue: PartitionQueue) -> PartitionQueue | None:
        queues = self._queues[queue.subject]
        for step in range(1, len(queues)):
            other = queues[(queue.partition + step) % len(queues)]
            if other.error is None:
                return other
        return None

    def _fail(self, flight: Flight, error: InturnError) -> None:
        self.waiting_bytes -= flight.size_bytes
        if len(self.failed) < _FAILED_COUNT:
            self.failed.append(flight)
        flight.finish(-1, error)


def _as_bytes(what: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        raise InvalidInput(f"the {what} is text; encode it first: {what}.encode()")
    allowed = "str or bytes" if what == "key" else "bytes"
    raise InvalidInput(f"the {what} is of type {type(value).__name__}; give {allowed}")


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _not_text(what, text, error) from None


def _not_text(what: str, text: object, error: UnicodeEncodeError) -> InvalidInput:
    return InvalidInput(f"the {what} {text!r} is not valid text: {error.reason}")


def _order_key(arg: object) -> str | bytes | None:
    """A selector's argument is the order key, unless a key is given too."""
    if arg is None or isinstance(arg, str | bytes):
        return arg
    if isinstance(arg, int):
        return str(arg)
    raise InvalidInput(f"arg= is a {type(arg).__name__}; give a str, bytes or int, or the order key as key=")


def _checked_properties(properties: dict[str, str], limit: int) -> int:
    size = 0
    if not isinstance(properties, dict):
        raise InvalidInput(f"properties is a {type(properties).__name__}; give a dict of str to str")
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"property {name!r} is {value!r}; names and values must be str")
        if name.startswith(RESERVED):
            raise InvalidInput(f"property {name!r} begins with {RESERVED!r}, which is reserved; use another name")
        size += len(_utf8("property", name)) + len(_utf8("property", value))
    if size > limit:
        raise LimitExceeded("properties", size, limit, "Limits.properties_bytes")
    return size


def _checked_tags(tags: Iterable[str], limit: int) -> tuple[tuple[str, ...], int]:
    kept = () if isinstance(tags, str) or not isinstance(tags, Iterable) else tuple(tags)
    if isinstance(tags, str) or not isinstance(tags, Iterable) or not all(isinstance(tag, str) for tag in kept):
        raise InvalidInput(f"tags is {tags!r}; give a tuple of str")
    size = sum(len(_utf8("tag", tag)) for tag in kept)
    if size > limit:
        raise LimitExceeded("tags", size, limit, "Limits.properties_bytes")
    return kept, size


def _checked_id(message_id: str, limit: int) -> int:
    if not isinstance(message_id, str):
        raise InvalidInput(f"message_id is a {type(message_id).__name__}; give a str")
    size = len(_utf8("message_id", message_id))
    if size > limit:
        raise LimitExceeded("message_id", size, limit, "Limits.key_bytes")
    return size
