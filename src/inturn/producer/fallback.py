"""What a producer gives to its outbox because it could not be sent, and the keys that must go there until it is empty.

No I/O: somebody takes flights from here, writes their messages as rows, and says what became of them.

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
from inturn.producer.send_batch import Flight

if TYPE_CHECKING:
    from inturn.producer.core import ProducerCore


@dataclass(frozen=True, slots=True)
class KeptRow:
    """One message on its way into an outbox. Where senders choose the partition (routing "selector"), it has the one
    that was chosen: nobody could tell it later."""

    subject: str
    partition: int | None
    message: Outgoing


class Keeper(Protocol):
    """Where a producer keeps what could not be sent. Called by one thread of the producer."""

    def waiting(self) -> list[tuple[str, bytes, int]]:
        """The keys that have rows now: subject, key, and the id of their last row."""
        ...

    def keep(self, rows: Sequence[KeptRow]) -> list[int]:
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


class Keeping:
    """Called under the producer's lock. A key that is in the outbox, or on its way there, is a kept key: its newer
    messages go behind, until its last row is gone."""

    def __init__(self, waiting: Iterable[tuple[str, bytes, int]], settings: ProducerSettings) -> None:
        self._settings = settings
        self._keys = {(subject, key): _Key(0, row) for subject, key, row in waiting}
        self._queue: deque[Flight] = deque()
        self._open: Flight | None = None  # the last of the queue, if messages may still be added to it
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

    def divert(self, subject: str, partition: int, message: Outgoing, slot: int, size_bytes: int) -> Flight:
        """A message of a kept key goes behind what is kept; it is the last of the returned flight."""
        flight = self._open
        if flight is None or not self._fits(flight, subject, partition, size_bytes):
            flight = self._open = Flight(subject, partition)
            flight.is_diverted = True
            self._queue.append(flight)
        flight.messages.append(message)
        flight.slots.append(slot)
        flight.size_bytes += size_bytes
        self._note(subject, message)
        return flight

    def _fits(self, flight: Flight, subject: str, partition: int, size_bytes: int) -> bool:
        """A flight that can be sent as it is, should its keys be free before it is written."""
        return (
            flight.subject == subject
            and flight.home == partition
            and len(flight.messages) < self._settings.batch_count
            and flight.size_bytes + size_bytes <= self._settings.batch_bytes
        )

    def keep(self, flights: Iterable[Flight]) -> None:
        """Flights that could not be sent. Those of one subject that are given together are put into their order."""
        self._open = None
        for flight in sorted(flights, key=lambda one: one.number):
            self._queue.append(flight)
            for message in flight.messages:
                self._note(flight.subject, message)

    def take(self) -> list[Flight]:
        """What is to be written next, in order; each has to come back by `written`, `refused` or `released`."""
        taken = list(self._queue)
        self._queue.clear()
        self._open = None
        self._being_written += len(taken)
        return taken

    def written(self, flight: Flight, row_ids: Sequence[int]) -> None:
        self._being_written -= 1
        for message, row_id in zip(flight.messages, row_ids, strict=True):
            if message.key is not None:
                key = self._keys[flight.subject, message.key]
                key.pending -= 1
                key.last_row = row_id

    def refused(self, flight: Flight) -> None:
        """Its messages could not be written: they are in no outbox."""
        self._being_written -= 1
        for message in flight.messages:
            if message.key is not None:
                self._keys[flight.subject, message.key].pending -= 1
                self._free_if_empty((flight.subject, message.key))

    def released(self, flight: Flight) -> None:
        """It need not be written: it is sent after all."""
        flight.is_diverted = False
        self.refused(flight)

    def places(self, flight: Flight) -> set[tuple[str, bytes]]:
        return {(flight.subject, message.key) for message in flight.messages if message.key is not None}

    def has_rows(self, places: Iterable[tuple[str, bytes]]) -> bool:
        """Whether one of these keys has a row, as far as is known."""
        return any(self._keys[place].last_row is not None for place in places)

    def last_rows_of(self, flights: Iterable[Flight]) -> list[int]:
        rows = {self._keys[place].last_row for flight in flights for place in self.places(flight)}
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


class KeeperThread:
    """Shares the producer's lock. A handle is answered when its row is durable, not before."""

    def __init__(
        self,
        keeper: Keeper,
        core: ProducerCore,
        lock: threading.Lock,
        roomier: threading.Condition,
        wake_sender: Callable[[], None],
    ) -> None:
        """`wake_sender` is called under the lock when the producer has something to send again."""
        self._keeper = keeper
        self._core = core
        self._lock = lock
        self._roomier = roomier
        self._wake_sender = wake_sender
        self._work = threading.Condition(lock)
        self._moved_at_s = -MOVING_S
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"inturn-keeper-{core.producer_id}", daemon=True)
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
        self._keeper.close()

    def _run(self) -> None:
        keeping = self._core.keeping
        assert keeping is not None
        while True:
            with self._lock:
                if not keeping.has_work:
                    if self._is_closed:
                        return
                    self._work.wait(LOOK_S if keeping.has_keys else None)
                flights = keeping.take()
                last_rows = keeping.last_rows()
            if flights:
                self._keep(self._not_released(flights))
            elif last_rows:
                self._look(last_rows)

    def _not_released(self, flights: list[Flight]) -> list[Flight]:
        """Those that have to be written; the others are sent after all, since all before them was."""
        if self._is_closed:
            return flights
        left = self._release(flights)
        until_s = time.monotonic() + CLOSING_S
        while left and time.monotonic() < until_s and self._is_closing(left):
            time.sleep(CLOSING_LOOK_S)
            left = self._release(left)
        return left

    def _is_closing(self, flights: Sequence[Flight]) -> bool:
        is_moving = time.monotonic() < self._moved_at_s + MOVING_S
        return is_moving and not self._is_closed and all(flight.is_diverted for flight in flights)

    def _release(self, flights: Sequence[Flight]) -> list[Flight]:
        keeping = self._core.keeping
        assert keeping is not None
        with self._lock:
            last_rows = keeping.last_rows_of(flights)
        self._look(last_rows)
        left: list[Flight] = []
        blocked: set[tuple[str, bytes]] = set()
        with self._lock:
            for flight in flights:
                places = keeping.places(flight)
                is_free = flight.is_diverted and places.isdisjoint(blocked) and not keeping.has_rows(places)
                if not is_free or not self._core.release(flight):
                    left.append(flight)
                    blocked |= places
            if len(left) < len(flights):
                self._wake_sender()
        return left

    def _keep(self, flights: list[Flight]) -> None:
        if not flights:
            return
        rows = [row for flight in flights for row in self._core.to_keep(flight)]
        try:
            row_ids = self._keeper.keep(rows)
        except Exception as error:  # whatever it is, those who wait are told, and the thread lives on
            self._not_kept(flights, error)
            return
        _log.warning("producer.kept_in_outbox", messages=len(rows), subject=rows[0].subject)
        with self._lock:
            start = 0
            for flight in flights:
                end = start + len(flight.messages)
                self._core.kept(flight, row_ids[start:end])
                start = end
            self._roomier.notify_all()

    def _not_kept(self, flights: list[Flight], error: Exception) -> None:
        _log.error("producer.outbox_failed", messages=sum(len(one.messages) for one in flights), error=str(error))
        with self._lock:
            for flight in flights:
                cause = f"the outbox could not keep it either: {error}"
                self._core.not_kept(flight, SendFailed(flight.subject, str(flight.home), cause))
            self._roomier.notify_all()

    def _look(self, last_rows: list[int]) -> None:
        try:
            gone = self._keeper.gone(last_rows) if last_rows else set()
        except Exception as error:  # then the keys stay where they are
            _log.warning("producer.outbox_not_read", error=str(error))
            return
        if gone:
            self._moved_at_s = time.monotonic()
            with self._lock:
                assert self._core.keeping is not None
                self._core.keeping.forget(gone)
