"""The queue of one partition: messages to send, batches on the way, and their order. No I/O.

Batches are numbered. Several batches are on the way at once. When a batch fails, no new batch is sent until all other
batches have been answered; then all unacknowledged batches are sent again, in order, with the same numbers. The log
refuses a batch that leaves out a number, and recognises a batch already stored. So no message overtakes another
message, and no message is stored twice.
"""

from __future__ import annotations

import enum
from collections import deque

from inturn.model.batch import encode
from inturn.model.errors import BrokerGroupClosed, InturnError, OutOfSequence, RouteChanged, StorageError
from inturn.model.message import Outgoing
from inturn.model.settings import ProducerSettings, Strategy
from inturn.producer.send_batch import SendBatch
from inturn.protocol.commands import Append


class _Phase(enum.Enum):
    FLOWING = enum.auto()
    SETTLING = enum.auto()  # a batch failed: wait for the other answers, then send again


class PartitionQueue:
    """Called by one thread at a time, through `ProducerCore`."""

    def __init__(
        self,
        subject: str,
        partition: int,
        producer_id: int,
        producer_epoch: int,
        route_version: int,
        strategy: Strategy,
        settings: ProducerSettings,
    ) -> None:
        self.subject = subject
        self.partition = partition
        self.place = 0, partition  # among all queues of a producer
        self.error: InturnError | None = None  # set: the queue has stopped, and why
        self.diverted_count = 0  # batches moved to other partitions since the last stored batch
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch
        self._route_version = route_version
        self._strategy = strategy
        self._settings = settings
        self._batch_bytes, self._batch_count = settings.batch_bytes, settings.batch_count
        self._open = SendBatch(subject, partition)
        self._closed: deque[SendBatch] = deque()
        # A window: acknowledged batches stay in the window behind an unacknowledged batch, because the log remembers a
        # limited number of batches per producer, and must still know the unacknowledged batch when it is sent again.
        self._sent: deque[SendBatch] = deque()
        self._next_sequence = 0
        self._phase = _Phase.FLOWING
        self._failures = 0
        self._resume_at_s = 0.0
        self._gap = False
        self.is_held = False  # the route has changed: no new batch is sent before the sent batches are settled

    @property
    def is_idle(self) -> bool:
        return not (self._sent or self._closed or self._open.messages)

    @property
    def waiting_count(self) -> int:
        """Messages that are not acknowledged."""
        sent = sum(len(batch.messages) for batch in self._sent if not batch.done)
        return sent + sum(len(batch.messages) for batch in self._closed) + len(self._open.messages)

    def add(self, message: Outgoing, slot: int, size_bytes: int) -> SendBatch:
        """Queue a message; the message is the last of the returned batch."""
        batch = self._open
        messages = batch.messages
        total_bytes = batch.size_bytes + size_bytes
        if messages and (total_bytes > self._batch_bytes or len(messages) >= self._batch_count):
            self._closed.append(batch)
            batch = self._open = SendBatch(self.subject, self.partition)
            messages, total_bytes = batch.messages, size_bytes
        messages.append(message)
        batch.slots.append(slot)
        batch.size_bytes = total_bytes
        return batch

    def take_over(self, batch: SendBatch) -> None:
        """Best effort: append a batch that another partition could not store."""
        batch.moves += 1
        self.take_back(batch)

    def poll(self, now_s: float, gathers: bool = False) -> list[tuple[SendBatch, Append]]:
        """The batches to send now, in this order.

        If `gathers`, a batch that is not full waits while another batch is on the way: many partitions with a few
        messages each would make many small batches, and a small batch costs as much as a large batch.
        """
        if self.error is not None:
            return []
        commands = []
        if self._phase is _Phase.SETTLING:
            if any(batch.is_awaited for batch in self._sent) or now_s < self._resume_at_s:
                return []
            self._phase = _Phase.FLOWING
            commands = [self._send(batch, now_s) for batch in self._sent if not batch.done]
            if commands:
                return commands  # no new batch before the result of these is known
        while len(self._sent) < self._settings.in_flight and not self.is_held:
            if gathers and self._sent and not self._closed:
                break
            batch = self._next_batch()
            if batch is None:
                break
            self._encode(batch)
            self._sent.append(batch)
            commands.append(self._send(batch, now_s))
        return commands

    def expire(self, now_s: float) -> list[SendBatch]:
        """Treat a missing answer as a failure; the next try finds out whether the batch was stored.

        Returns the batches that the queue gives up (best effort only).
        """
        overdue = [
            batch
            for batch in self._sent
            if batch.is_awaited and now_s >= batch.sent_at_s + self._settings.answer_timeout_s
        ]
        given_up: list[SendBatch] = []
        for batch in overdue:
            batch.is_awaited = False
            self._phase = _Phase.SETTLING
            self._resume_at_s = now_s
            if self._strategy is Strategy.BEST_EFFORT and batch.tries >= self._settings.tries_max:
                given_up += self._give_up(batch)
        return given_up

    def next_due_s(self) -> float | None:
        """When `poll` should be called again even without other events."""
        awaited = [batch.sent_at_s + self._settings.answer_timeout_s for batch in self._sent if batch.is_awaited]
        if awaited:
            return min(awaited)
        return self._resume_at_s if self._phase is _Phase.SETTLING else None

    def succeeded(self, batch: SendBatch, base_offset: int) -> int:
        """The batch is stored. Returns the bytes that no longer wait; a repeated answer changes nothing."""
        if batch.done or batch not in self._sent:
            return 0
        self._failures = 0
        batch.is_awaited = False
        batch.finish(base_offset)
        self._move_window()
        return batch.size_bytes

    def failed(self, batch: SendBatch, tries: int, error: InturnError, now_s: float) -> list[SendBatch]:
        """The batch is not stored, or the result is unknown. Returns the batches that the queue gives up (best effort
        only)."""
        if batch.done or batch not in self._sent or tries != batch.tries or not batch.is_awaited:
            return []  # an answer to an earlier try
        batch.is_awaited = False
        batch.is_refused = isinstance(error, RouteChanged)
        batch.last_error = error
        self._phase = _Phase.SETTLING
        if isinstance(error, OutOfSequence) and batch is self._sent[0] and error.got > error.expected:
            # All earlier batches were acknowledged, but the log does not know them: lost, or forgotten.
            batch.gap = True
        if self._strategy is Strategy.BEST_EFFORT and self._is_hopeless(batch, error):
            return self._give_up(batch)
        if not error.retriable:
            self.error = error
            return []
        self._failures += 1
        wait_s = self._settings.backoff_min_s * 2 ** min(self._failures - 1, 20)
        self._resume_at_s = now_s + min(wait_s, self._settings.backoff_max_s)
        return []

    @property
    def is_settled(self) -> bool:
        """Whether the result of every sent batch is known.

        If the first batch without a result was refused for the route, no later batch can be stored: the log would miss
        the first.
        """
        first = next((batch for batch in self._sent if not batch.done), None)
        return first is None or first.is_refused

    def reroute(self, route_version: int) -> list[SendBatch]:
        """Switch to another route. Returns all unstored batches, in order, for this queue or other queues."""
        first = next((batch for batch in self._sent if not batch.done), None)
        if first is not None and first.encoded is not None:
            self._next_sequence = first.encoded.first_sequence
            self._gap = self._gap or first.gap
        self._route_version = route_version
        self._phase, self._failures, self.is_held = _Phase.FLOWING, 0, False
        return self.abandon()

    def take_back(self, batch: SendBatch) -> None:
        """Append a batch that was not stored."""
        batch.partition = self.partition
        batch.encoded = None
        batch.tries = 0
        batch.gap = batch.is_awaited = batch.is_refused = False
        if self._open.messages:
            self._closed.append(self._open)
            self._open = SendBatch(self.subject, self.partition)
        self._closed.append(batch)

    def abandon(self) -> list[SendBatch]:
        """All batches that are not acknowledged, in order; the queue is empty afterwards."""
        unacknowledged = [batch for batch in self._sent if not batch.done]
        batches = [*unacknowledged, *self._closed, *([self._open] if self._open.messages else [])]
        self._sent.clear()
        self._closed.clear()
        self._open = SendBatch(self.subject, self.partition)
        return batches

    def withdraw(self) -> list[SendBatch]:
        """As `abandon`, but the queue stays in use: numbers sent without an answer stay unused."""
        if any(not batch.done for batch in self._sent):
            self._gap = True
        return self.abandon()

    def _next_batch(self) -> SendBatch | None:
        if self._closed:
            return self._closed.popleft()
        if not self._open.messages:
            return None
        batch, self._open = self._open, SendBatch(self.subject, self.partition)
        return batch

    def _encode(self, batch: SendBatch) -> None:
        batch.encoded = encode(
            batch.messages,
            batch.slots,
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            first_sequence=self._next_sequence,
            route_version=self._route_version,
            compression=self._settings.compression,
        )
        self._next_sequence += len(batch.messages)
        batch.gap, self._gap = self._gap, False

    def _send(self, batch: SendBatch, now_s: float) -> tuple[SendBatch, Append]:
        assert batch.encoded is not None
        batch.is_awaited, batch.is_refused = True, False
        batch.sent_at_s = now_s
        batch.tries += 1
        return batch, Append(self.subject, self.partition, batch.encoded, batch.gap)

    def _is_hopeless(self, batch: SendBatch, error: InturnError) -> bool:
        if batch.tries >= self._settings.tries_max or isinstance(error, BrokerGroupClosed):
            return True  # closed by an operator, or the broker is dead: retries are useless
        return not error.retriable and isinstance(error, StorageError)

    def _give_up(self, batch: SendBatch) -> list[SendBatch]:
        """The numbers of the batch stay unused: the next batch declares the gap."""
        place = self._sent.index(batch)
        self._sent.remove(batch)
        after = next((one for one in list(self._sent)[place:] if not one.done), None)
        if after is not None:
            after.gap = True
        else:
            self._gap = True
        self._move_window()
        return [batch]

    def _move_window(self) -> None:
        while self._sent and self._sent[0].done:
            self._sent.popleft()
