"""The fallback of a producer: messages that could not be sent go to an outbox, and are sent from there later.

`FallbackQueue` decides, without I/O, which send batches are written and which keys must go behind rows of the outbox.
`FallbackThread` writes the batches to a `FallbackStore`, and checks which rows were sent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inturn.model.errors import SendFailed
from inturn.model.logs import get_logger
from inturn.model.message import Outgoing
from inturn.model.settings import ProducerSettings
from inturn.producer.send_batch import SendBatch

if TYPE_CHECKING:
    from inturn.producer.core import ProducerCore


@dataclass(frozen=True, slots=True)
class FallbackRow:
    """One message to be written into an outbox.

    Where senders choose the partition (routing "selector"), the row has the chosen partition.
    """

    subject: str
    partition: int | None
    message: Outgoing


class FallbackStore(Protocol):
    """Stores messages that could not be sent. Called by one thread of the producer."""

    def waiting(self) -> list[tuple[str, bytes, int]]:
        """The keys with rows now: subject, key, and the id of the last row."""
        ...

    def write(self, rows: Sequence[FallbackRow]) -> list[int]:
        """Write rows, all or none, in this order; return the ids. Durable when the call returns."""
        ...

    def gone(self, row_ids: Sequence[int]) -> set[int]:
        """The subset of these rows that are no longer in the table: such rows were sent."""
        ...

    def close(self) -> None: ...


class _Key:
    __slots__ = ("last_row", "pending")

    def __init__(self, pending: int, last_row: int | None) -> None:
        self.pending = pending  # messages that are not written yet
        self.last_row = last_row


class FallbackQueue:
    """Called under the producer's lock.

    A key with messages in the outbox, or on the way there, is a fallback key: newer messages of the key go behind,
    until the last row of the key is gone.
    """

    def __init__(self, waiting: Iterable[tuple[str, bytes, int]], settings: ProducerSettings) -> None:
        self._settings = settings
        self._keys = {(subject, key): _Key(0, row) for subject, key, row in waiting}
        self._queue: deque[SendBatch] = deque()
        self._open: SendBatch | None = None  # the last of the queue, while messages may be added
        self._being_written = 0

    def has(self, subject: str, key: bytes) -> bool:
        return (subject, key) in self._keys

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    @property
    def is_idle(self) -> bool:
        """No batch waits to be written."""
        return not (self._queue or self._being_written)

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def divert(self, subject: str, partition: int, message: Outgoing, slot: int, size_bytes: int) -> SendBatch:
        """Queue a message behind the fallback messages of the key. The message is the last of the returned batch."""
        batch = self._open
        if batch is None or not self._fits(batch, subject, partition, size_bytes):
            batch = self._open = SendBatch(subject, partition)
            batch.is_diverted = True
            self._queue.append(batch)
        batch.messages.append(message)
        batch.slots.append(slot)
        batch.size_bytes += size_bytes
        self._note(subject, message)
        return batch

    def _fits(self, batch: SendBatch, subject: str, partition: int, size_bytes: int) -> bool:
        """The batch stays a batch of one partition: it can be sent as a whole if the keys are free before the write."""
        return (
            batch.subject == subject
            and batch.home == partition
            and len(batch.messages) < self._settings.batch_count
            and batch.size_bytes + size_bytes <= self._settings.batch_bytes
        )

    def add(self, batches: Iterable[SendBatch]) -> None:
        """Queue batches that could not be sent. Batches of one subject given together are sorted into order."""
        self._open = None
        for batch in sorted(batches, key=lambda one: one.number):
            self._queue.append(batch)
            for message in batch.messages:
                self._note(batch.subject, message)

    def take(self) -> list[SendBatch]:
        """The batches to write next, in order. Report every batch by `written`, `refused` or `released`."""
        taken = list(self._queue)
        self._queue.clear()
        self._open = None
        self._being_written += len(taken)
        return taken

    def written(self, batch: SendBatch, row_ids: Sequence[int]) -> None:
        self._being_written -= 1
        for message, row_id in zip(batch.messages, row_ids, strict=True):
            if message.key is not None:
                key = self._keys[batch.subject, message.key]
                key.pending -= 1
                key.last_row = row_id

    def refused(self, batch: SendBatch) -> None:
        """The messages could not be written: they are in no outbox."""
        self._being_written -= 1
        for message in batch.messages:
            if message.key is not None:
                self._keys[batch.subject, message.key].pending -= 1
                self._free_if_empty((batch.subject, message.key))

    def released(self, batch: SendBatch) -> None:
        """The batch need not be written: the producer sends the batch after all."""
        batch.is_diverted = False
        self.refused(batch)

    def places(self, batch: SendBatch) -> set[tuple[str, bytes]]:
        return {(batch.subject, message.key) for message in batch.messages if message.key is not None}

    def has_rows(self, places: Iterable[tuple[str, bytes]]) -> bool:
        """Whether one of these keys has a row, as far as is known."""
        return any(self._keys[place].last_row is not None for place in places)

    def last_rows_of(self, batches: Iterable[SendBatch]) -> list[int]:
        rows = {self._keys[place].last_row for batch in batches for place in self.places(batch)}
        return sorted(row for row in rows if row is not None)

    def last_rows(self) -> list[int]:
        """The last rows of fallback keys: the key has to wait while the row is there."""
        return [key.last_row for key in self._keys.values() if key.last_row is not None and not key.pending]

    def forget(self, gone: set[int]) -> None:
        """These rows were sent."""
        for place, key in list(self._keys.items()):
            if key.last_row in gone:
                key.last_row = None
                self._free_if_empty(place)

    def _note(self, subject: str, message: Outgoing) -> None:
        if message.key is not None:
            self._keys.setdefault((subject, message.key), _Key(0, None)).pending += 1

    def _free_if_empty(self, place: tuple[str, bytes]) -> None:
        key = self._keys.get(place)
        if key is not None and not key.pending and key.last_row is None:
            del self._keys[place]


_log = get_logger("inturn.producer")
LOOK_S = 0.1  # interval of checks for sent rows, while a key waits behind a row
# Catching up: while the scanner sends rows, batches behind the rows wait so long for the last row. If the row is sent
# by then, the batches need not go through the outbox; otherwise a busy key would never leave the outbox.
CLOSING_S = 0.1
CLOSING_LOOK_S = 0.005
MOVING_S = 1.0  # the scanner is sending, if a row was sent within this time


class FallbackThread:
    """Shares the producer's lock. A handle is answered once the row of the message is durable, not before."""

    def __init__(
        self,
        store: FallbackStore,
        core: ProducerCore,
        lock: threading.Lock,
        roomier: threading.Condition,
        wake_sender: Callable[[], None],
    ) -> None:
        """`wake_sender` is called under the lock when the producer has something to send again."""
        self._store = store
        self._core = core
        self._lock = lock
        self._roomier = roomier
        self._wake_sender = wake_sender
        self._work = threading.Condition(lock)
        self._moved_at_s = -MOVING_S
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"inturn-fallback-{core.producer_id}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Called under the lock."""
        self._work.notify()

    def close(self) -> None:
        """Write the remaining batches, then end the thread."""
        with self._lock:
            self._is_closed = True
            self._work.notify()
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        fallback = self._core.fallback
        assert fallback is not None
        while True:
            with self._lock:
                if not fallback.has_work:
                    if self._is_closed:
                        return
                    self._work.wait(LOOK_S if fallback.has_keys else None)
                batches = fallback.take()
                last_rows = fallback.last_rows()
            if batches:
                self._write(self._not_released(batches))
            elif last_rows:
                self._forget_sent(last_rows)

    def _not_released(self, batches: list[SendBatch]) -> list[SendBatch]:
        """The batches to be written. The other batches are sent after all, since all earlier messages of the keys were
        sent."""
        if self._is_closed:
            return batches
        left = self._release(batches)
        until_s = time.monotonic() + CLOSING_S
        while left and time.monotonic() < until_s and self._is_closing(left):
            time.sleep(CLOSING_LOOK_S)
            left = self._release(left)
        return left

    def _is_closing(self, batches: Sequence[SendBatch]) -> bool:
        is_moving = time.monotonic() < self._moved_at_s + MOVING_S
        return is_moving and not self._is_closed and all(batch.is_diverted for batch in batches)

    def _release(self, batches: Sequence[SendBatch]) -> list[SendBatch]:
        fallback = self._core.fallback
        assert fallback is not None
        with self._lock:
            last_rows = fallback.last_rows_of(batches)
        self._forget_sent(last_rows)
        left: list[SendBatch] = []
        blocked: set[tuple[str, bytes]] = set()
        with self._lock:
            for batch in batches:
                places = fallback.places(batch)
                is_free = batch.is_diverted and places.isdisjoint(blocked) and not fallback.has_rows(places)
                if not is_free or not self._core.release(batch):
                    left.append(batch)
                    blocked |= places
            if len(left) < len(batches):
                self._wake_sender()
        return left

    def _write(self, batches: list[SendBatch]) -> None:
        if not batches:
            return
        rows = [row for batch in batches for row in self._core.fallback_rows(batch)]
        try:
            row_ids = self._store.write(rows)
        except Exception as error:  # any error: callers are notified, and the thread continues
            self._not_written(batches, error)
            return
        _log.warning("producer.kept_in_outbox", messages=len(rows), subject=rows[0].subject)
        with self._lock:
            start = 0
            for batch in batches:
                end = start + len(batch.messages)
                self._core.written_to_fallback(batch, row_ids[start:end])
                start = end
            self._roomier.notify_all()

    def _not_written(self, batches: list[SendBatch], error: Exception) -> None:
        _log.error("producer.outbox_failed", messages=sum(len(one.messages) for one in batches), error=str(error))
        with self._lock:
            for batch in batches:
                cause = f"the outbox could not keep it either: {error}"
                self._core.fallback_failed(batch, SendFailed(batch.subject, str(batch.home), cause))
            self._roomier.notify_all()

    def _forget_sent(self, last_rows: list[int]) -> None:
        try:
            gone = self._store.gone(last_rows) if last_rows else set()
        except Exception as error:  # the keys stay fallback keys
            _log.warning("producer.outbox_not_read", error=str(error))
            return
        if gone:
            self._moved_at_s = time.monotonic()
            with self._lock:
                assert self._core.fallback is not None
                self._core.fallback.forget(gone)
