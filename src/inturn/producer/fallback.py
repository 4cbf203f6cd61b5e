"""What a producer gives to its outbox because it could not be sent, and the keys that must go there until it is empty.

No I/O: somebody takes batches from here, writes their messages as rows, and says what became of them.

The thread that writes what a producer could not send to its outbox, and notices when it was sent from there.
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
    """One message on its way into an outbox. Where senders choose the partition (routing "selector"), it has the one
    that was chosen: nobody could tell it later."""

    subject: str
    partition: int | None
    message: Outgoing


class FallbackStore(Protocol):
    """Where a producer keeps what could not be sent. Called by one thread of the producer."""

    def waiting(self) -> list[tuple[str, bytes, int]]:
        """The keys that have rows now: subject, key, and the id of their last row."""
        ...

    def write(self, rows: Sequence[FallbackRow]) -> list[int]:
        """Write rows, all or none, in this order; their ids. Durable when this returns."""
        ...

    def gone(self, row_ids: Sequence[int]) -> set[int]:
        """Those of these rows that are not there any more: they were sent."""
        ...

    def close(self) -> None: ...


class _Key:
    __slots__ = ("last_row", "pending")

    def __init__(self, pending: int, last_row: int | None) -> None:
        self.pending = pending  # messages that are not written yet
        self.last_row = last_row


class FallbackQueue:
    """Called under the producer's lock. A key that is in the outbox, or on its way there, is a kept key: its newer
    messages go behind, until its last row is gone."""

    def __init__(self, waiting: Iterable[tuple[str, bytes, int]], settings: ProducerSettings) -> None:
        self._settings = settings
        self._keys = {(subject, key): _Key(0, row) for subject, key, row in waiting}
        self._queue: deque[SendBatch] = deque()
        self._open: SendBatch | None = None  # the last of the queue, if messages may still be added to it
        self._being_written = 0

    def has(self, subject: str, key: bytes) -> bool:
        return (subject, key) in self._keys

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be written."""
        return not (self._queue or self._being_written)

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def divert(self, subject: str, partition: int, message: Outgoing, slot: int, size_bytes: int) -> SendBatch:
        """A message of a kept key goes behind what is kept; it is the last of the returned batch."""
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
        """A batch that can be sent as it is, should its keys be free before it is written."""
        return (
            batch.subject == subject
            and batch.home == partition
            and len(batch.messages) < self._settings.batch_count
            and batch.size_bytes + size_bytes <= self._settings.batch_bytes
        )

    def add(self, batches: Iterable[SendBatch]) -> None:
        """Flights that could not be sent. Those of one subject that are given together are put into their order."""
        self._open = None
        for batch in sorted(batches, key=lambda one: one.number):
            self._queue.append(batch)
            for message in batch.messages:
                self._note(batch.subject, message)

    def take(self) -> list[SendBatch]:
        """What is to be written next, in order; each has to come back by `written`, `refused` or `released`."""
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
        """Its messages could not be written: they are in no outbox."""
        self._being_written -= 1
        for message in batch.messages:
            if message.key is not None:
                self._keys[batch.subject, message.key].pending -= 1
                self._free_if_empty((batch.subject, message.key))

    def released(self, batch: SendBatch) -> None:
        """It need not be written: it is sent after all."""
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
        """While any of these is there, its key has to wait behind it."""
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
LOOK_S = 0.1  # how often is looked for rows that are gone, while some key waits for that
# Closing: while rows are being sent from the outbox, what comes behind them waits so long for the last of them. If that
# is gone by then, it needs not go through the outbox; a key that is always busy would else never leave it.
CLOSING_S = 0.1
CLOSING_LOOK_S = 0.005
MOVING_S = 1.0  # rows are being sent, if one was within this time


class FallbackThread:
    """Shares the producer's lock. A handle is answered when its row is durable, not before."""

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
        """Write what is left, then end."""
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
        """Those that have to be written; the others are sent after all, since all before them was."""
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
        except Exception as error:  # whatever it is, those who wait are told, and the thread lives on
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
        except Exception as error:  # then the keys stay where they are
            _log.warning("producer.outbox_not_read", error=str(error))
            return
        if gone:
            self._moved_at_s = time.monotonic()
            with self._lock:
                assert self._core.fallback is not None
                self._core.fallback.forget(gone)
