"""What a producer gives to its outbox because it could not be sent, and the keys that must go there until it is empty.

No I/O: somebody takes flights from here, writes their messages as rows, and says what became of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from inturn.model.message import Outgoing
from inturn.model.settings import ProducerSettings
from inturn.producer.flight import Flight


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
