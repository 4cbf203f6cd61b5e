"""The producer without I/O: routes messages to the queues of partitions, and decides what is sent when."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from inturn.model.errors import BrokerGroupClosed, InturnError, InvalidInput, LimitExceeded, RouteChanged, SendFailed
from inturn.model.logs import get_logger
from inturn.model.message import Outgoing
from inturn.model.routing import SLOT_COUNT, slot_of
from inturn.model.settings import ProducerSettings, Routing, Strategy
from inturn.model.subject import Subject
from inturn.producer.fallback import FallbackQueue, FallbackRow
from inturn.producer.partition_queue import PartitionQueue
from inturn.producer.send_batch import SendBatch
from inturn.producer.validation import Selector, as_bytes, checked_id, checked_properties, checked_tags, not_text
from inturn.protocol.commands import Append, Appended

# Counted for a message beside body, key and properties, so that empty messages count for the buffer, too.
MESSAGE_OVERHEAD_BYTES = 32
_FAILED_COUNT = 1000
GATHERING_MIN = 8  # while more partitions than this have something to send, a partition gathers until answered
_NEVER = float("inf")
_log = get_logger("inturn.producer")


class SendAttempt:
    """One sending of a batch; give the attempt back to `answered`."""

    __slots__ = ("batch", "command", "queue", "tries")

    def __init__(self, queue: PartitionQueue, batch: SendBatch, command: Append) -> None:
        self.queue = queue
        self.batch = batch
        self.command = command
        self.tries = batch.tries


class ProducerCore:
    """Called by one thread at a time. `waiting_bytes` counts unacknowledged bytes."""

    def __init__(self, producer_id: int, epoch: int, settings: ProducerSettings, rng: random.Random) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.waiting_bytes = 0
        self.acknowledged_count = 0
        self.failed_count = 0
        self.resent_count = 0  # batches that were sent again
        self.failed: list[SendBatch] = []  # since the list was last cleared; limited in number
        self.fallback: FallbackQueue | None = None  # set: batches that best effort gives up go to an outbox
        self._settings = settings
        self._random = rng.random
        self._subjects: dict[str, Subject] = {}
        self._by_slot: dict[str, list[int]] = {}  # in growth, slots of a parent move once it is settled
        self._grown: dict[str, Subject] = {}  # routes that not all queues follow yet
        self._outdated: set[str] = set()  # subjects with an outdated route
        self._queues: dict[str, list[PartitionQueue]] = {}
        # The work per message must not grow with the number of partitions. `_busy`: queues with something to send, or
        # waiting for an answer. `_changed`: busy queues that changed since the last poll. `_look_at_s`: when the other
        # busy queues have to be checked.
        self._busy: dict[PartitionQueue, None] = {}
        self._changed: dict[PartitionQueue, None] = {}
        self._look_at_s = _NEVER

    def knows(self, subject: str) -> bool:
        return subject in self._subjects

    def learn(self, subject: Subject) -> None:
        """Set the route of a subject, or a newer route.

        A newer route is followed once the results of all sent batches are known.
        """
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
        queue = PartitionQueue(
            subject=subject.name,
            partition=index,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            route_version=subject.route.version,
            strategy=subject.strategy,
            settings=self._settings,
        )
        queue.place = list(self._queues).index(subject.name), index
        return queue

    def take_outdated(self) -> set[str]:
        """Subjects with a newer route: find each subject, and give the answer to `learn`."""
        outdated, self._outdated = self._outdated, set()
        return outdated

    def _follow(self, name: str) -> None:
        """Let every settled queue continue by the new route. A queue that waits delays no other queue."""
        grown = self._grown.get(name)
        if grown is None:
            return
        queues, by_slot, route = self._queues[name], self._by_slot[name], grown.route
        for queue in queues:
            if queue.is_held and queue.error is None and queue.is_settled:
                for slot, partition in enumerate(by_slot):
                    if partition == queue.partition:
                        by_slot[slot] = route.by_slot[slot]
                for batch in queue.reroute(route.version):
                    self._divide(queues, batch, [route.by_slot[slot] for slot in batch.slots])
        if not any(queue.is_held and queue.error is None for queue in queues):
            self._subjects[name] = grown
            del self._grown[name]

    def _divide(self, queues: list[PartitionQueue], batch: SendBatch, places: list[int]) -> None:
        parts = {places[0]: batch} if len(set(places)) == 1 else batch.divide(places)
        for partition, part in parts.items():
            part.home = partition
            queues[partition].take_back(part)
            self._note(queues[partition])

    def add(
        self,
        subject_name: str,
        body: bytes,
        key: str | bytes | None = None,
        born_at_ms: int = 0,
        tags: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        message_id: str | None = None,
        selector: Selector | None = None,
        arg: object = None,
        reserved: dict[str, str] | None = None,
    ) -> SendBatch:
        """Queue a message; the message is the last of the returned batch. If the message is not accepted, the call
        raises and changes nothing.

        `reserved` are properties of inturn's own, without limits.
        """
        subject = self._subjects[subject_name]
        limits = subject.limits
        if type(body) is not bytes:
            body = as_bytes("body", body)
        size_bytes = len(body)
        if size_bytes > limits.body_bytes:
            raise LimitExceeded("the body", size_bytes, limits.body_bytes, "Limits.body_bytes")
        if selector is not None and key is None:
            key = _order_key(arg)
        if key is not None:
            try:
                key = key.encode() if type(key) is str else as_bytes("key", key)
            except UnicodeEncodeError as error:
                raise not_text("key", key, error) from None
            if len(key) > limits.key_bytes:
                raise LimitExceeded("the key", len(key), limits.key_bytes, "Limits.key_bytes")
            size_bytes += len(key)
            slot = slot_of(key)
        else:
            slot = int(self._random() * SLOT_COUNT)
        if properties:
            size_bytes += checked_properties(properties, limits.properties_bytes)
        if tags != ():
            tags, tags_bytes = checked_tags(tags, limits.properties_bytes)
            size_bytes += tags_bytes
        if message_id is not None:
            size_bytes += checked_id(message_id, limits.key_bytes)
        kept_properties = dict(properties) if properties else {}
        if reserved:
            kept_properties |= reserved
        message = Outgoing(body, key, born_at_ms, tags, kept_properties, message_id)
        if subject.routing is Routing.SLOTS and selector is None:
            partition = self._by_slot[subject_name][slot]
        else:
            partition = self._select(subject, message, slot, selector, arg)
        if self.fallback is not None and key is not None and self.fallback.has(subject_name, key):
            size_bytes += MESSAGE_OVERHEAD_BYTES
            self.waiting_bytes += size_bytes
            return self.fallback.divert(subject_name, partition, message, slot, size_bytes)
        queue = self._queues[subject_name][partition]
        if queue.error is not None:
            other = self._other_queue(queue) if subject.strategy is Strategy.BEST_EFFORT else None
            if other is None:
                raise copy.copy(queue.error)  # a copy: a raised error keeps the traceback
            queue = other
        size_bytes += MESSAGE_OVERHEAD_BYTES
        self.waiting_bytes += size_bytes
        self._busy[queue] = self._changed[queue] = None
        return queue.add(message, slot, size_bytes)

    def _note(self, queue: PartitionQueue) -> None:
        """The queue has something to send, or was answered."""
        self._busy[queue] = self._changed[queue] = None

    def poll(self, now_s: float) -> list[SendAttempt]:
        """The attempts to send now; attempts of one partition are in order."""
        if now_s >= self._look_at_s:
            self._look_at_s = _NEVER
            self._changed |= self._busy
        for queue in self._take_changed():
            self._give_up(queue, queue.expire(now_s), InturnError("no answer came"))
            self._changed[queue] = None
        gathers = len(self._busy) > GATHERING_MIN
        attempts = []
        for queue in self._take_changed():
            attempts += [SendAttempt(queue, batch, command) for batch, command in queue.poll(now_s, gathers)]
            self._look_at_s = min(self._look_at_s, _or_never(queue.next_due_s()))
            if queue.is_idle:
                self._busy.pop(queue, None)
        self.resent_count += sum(attempt.tries > 1 for attempt in attempts)
        return attempts

    def _take_changed(self) -> list[PartitionQueue]:
        """In the order of the partitions: the order of sending does not depend on the order of answers."""
        changed, self._changed = self._changed, {}
        return sorted(changed, key=lambda queue: queue.place) if len(changed) > 1 else list(changed)

    def answered(self, attempt: SendAttempt, answer: object, now_s: float) -> None:
        queue, batch = attempt.queue, attempt.batch
        if isinstance(answer, Appended):
            size_bytes = queue.succeeded(batch, answer.base_offset)
            if size_bytes:  # 0: a repeated answer
                self.waiting_bytes -= size_bytes
                self.acknowledged_count += len(batch.messages)
                queue.diverted_count = 0
            self._answered(queue)
            self._follow(queue.subject)
            return
        error = answer if isinstance(answer, InturnError) else InturnError(f"unexpected answer {answer!r}")
        self._give_up(queue, queue.failed(batch, attempt.tries, error, now_s), error)
        self._answered(queue)
        if isinstance(error, RouteChanged):
            self._outdated.add(queue.subject)
        self._follow(queue.subject)
        if queue.error is not None:
            for left in queue.abandon():
                self._fail(left, queue.error)

    def _answered(self, queue: PartitionQueue) -> None:
        if queue.is_idle:
            self._busy.pop(queue, None)
        else:
            self._note(queue)

    def next_due_s(self) -> float | None:
        """When `poll` should be called again even without other events; with many partitions possibly earlier than
        needed."""
        if len(self._busy) > GATHERING_MIN:
            return None if self._look_at_s == _NEVER else self._look_at_s
        due = [queue.next_due_s() for queue in self._busy if not queue.is_idle]
        return min((at_s for at_s in due if at_s is not None), default=None)

    @property
    def waiting_count(self) -> int:
        """Messages that are not acknowledged."""
        return sum(queue.waiting_count for queue in self._busy)

    @property
    def is_idle(self) -> bool:
        """All messages are acknowledged, have failed, or are in the outbox."""
        if self.fallback is not None and not self.fallback.is_idle:
            return False
        return all(queue.is_idle for queue in self._busy)

    def abandon(self, error: InturnError) -> int:
        """Fail every unacknowledged message unless the fallback takes the message; return the number of failed
        messages."""
        left = [batch for queues in self._queues.values() for queue in queues for batch in queue.abandon()]
        if self.fallback is not None:
            self.fallback.add(batch for batch in left if self._has_fallback(batch.subject))
            left = [batch for batch in left if not self._has_fallback(batch.subject)]
        for batch in left:
            self._fail(batch, error)
        return sum(len(batch.messages) for batch in left)

    def written_to_fallback(self, batch: SendBatch, row_ids: Sequence[int]) -> None:
        """The messages of the batch are rows of the outbox."""
        assert self.fallback is not None
        self.fallback.written(batch, row_ids)
        self.waiting_bytes -= batch.size_bytes
        batch.row_ids = row_ids
        batch.finish(-1)

    def fallback_rows(self, batch: SendBatch) -> list[FallbackRow]:
        chosen = batch.home if self._subjects[batch.subject].routing is Routing.SELECTOR else None
        return [FallbackRow(batch.subject, chosen, message) for message in batch.messages]

    def release(self, batch: SendBatch) -> bool:
        """Send a batch after all, because the keys are free before the batch was written.

        The messages go where the keys belong now, since the subject may have grown. False: a partition of the keys has
        stopped.
        """
        assert self.fallback is not None
        queues, by_slot = self._queues[batch.subject], self._by_slot[batch.subject]
        places = [batch.home] * len(batch.slots)
        if self._subjects[batch.subject].routing is Routing.SLOTS:
            places = [by_slot[slot] for slot in batch.slots]
        if any(queues[partition].error is not None for partition in set(places)):
            return False
        self.fallback.released(batch)
        batch.moves = 0
        self._divide(queues, batch, places)
        return True

    def fallback_failed(self, batch: SendBatch, error: InturnError) -> None:
        """The outbox could not take the messages."""
        assert self.fallback is not None
        self.fallback.refused(batch)
        self._fail(batch, error)

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

    def _give_up(self, queue: PartitionQueue, batches: Sequence[SendBatch], error: InturnError) -> None:
        """Move the batches to another partition, else to the outbox, else fail them."""
        failed = [batch for batch in batches if not self._moves(queue, batch, error)]
        if failed and self.fallback is not None and self._has_fallback(queue.subject):
            # With all unacknowledged messages of the subject: else later messages of a key would overtake.
            behind = [batch for one in self._queues[queue.subject] for batch in one.withdraw()]
            self.fallback.add([*failed, *behind])
            return
        for batch in failed:
            self._fail(batch, SendFailed(batch.subject, str(batch.partition), str(error)))

    def _moves(self, queue: PartitionQueue, batch: SendBatch, error: InturnError) -> bool:
        other = self._other_queue(queue, batch, error)
        if other is None or batch.moves >= len(self._queues[queue.subject]) - 1:
            return False
        queue.diverted_count += 1
        if queue.diverted_count & (queue.diverted_count - 1) == 0:
            _log.warning(
                "producer.routed_around",
                subject=queue.subject,
                partition=queue.partition,
                to_partition=other.partition,
                batches=queue.diverted_count,
                error=str(error),
            )
        other.take_over(batch)
        self._note(other)
        return True

    def _has_fallback(self, subject: str) -> bool:
        return self._subjects[subject].strategy is Strategy.BEST_EFFORT

    def _other_queue(
        self, queue: PartitionQueue, batch: SendBatch | None = None, error: InturnError | None = None
    ) -> PartitionQueue | None:
        """The next partition that takes messages; in another broker group, if the broker group is closed."""
        queues = self._queues[queue.subject]
        others = [queues[(queue.partition + step) % len(queues)] for step in range(1, len(queues))]
        if isinstance(error, BrokerGroupClosed) and batch is not None:
            batch.closed_groups = {*batch.closed_groups, error.broker_group}
            homes = self._grown.get(queue.subject, self._subjects[queue.subject]).route.partitions
            others = [one for one in others if homes[one.partition].broker_group not in batch.closed_groups]
        return next((one for one in others if one.error is None), None)

    def _fail(self, batch: SendBatch, error: InturnError) -> None:
        self.waiting_bytes -= batch.size_bytes
        self.failed_count += len(batch.messages)
        if len(self.failed) < _FAILED_COUNT:
            self.failed.append(batch)
        batch.finish(-1, error)


def _order_key(arg: object) -> str | bytes | None:
    """The argument of a selector is the order key, unless a key is given."""
    if arg is None or isinstance(arg, str | bytes):
        return arg
    if isinstance(arg, int):
        return str(arg)
    raise InvalidInput(f"arg= is a {type(arg).__name__}; give a str, bytes or int, or the order key as key=")


def _or_never(at_s: float | None) -> float:
    return _NEVER if at_s is None else at_s
