"""The queue of one partition: what is to be sent, what is on its way, and in which order. No I/O.

Batches are numbered. Several are on their way at once; when one fails, nothing new is sent until all others have
been answered, then everything unacknowledged goes again, in order, under the same numbers. The log refuses a number
that leaves one out and recognises one that it has. So nothing overtakes and nothing is stored twice.
"""

from __future__ import annotations

import enum
from collections import deque

from inturn.model.batch import encode
from inturn.model.errors import BrokerGroupClosed, InturnError, OutOfSequence, RouteChanged, StorageError
from inturn.model.message import Outgoing
from inturn.model.settings import ProducerSettings, Strategy
from inturn.producer.send_batch import Flight
from inturn.protocol.commands import Append


class _Phase(enum.Enum):
    FLOWING = enum.auto()
    SETTLING = enum.auto()  # something failed: wait for the other answers, then send again


class PartitionQueue:
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
        self.diverted_count = 0  # batches that went to other partitions since it stored one
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch
        self._route_version = route_version
        self._strategy = strategy
        self._settings = settings
        self._batch_bytes, self._batch_count = settings.batch_bytes, settings.batch_count
        self._open = Flight(subject, partition)
        self._closed: deque[Flight] = deque()
        # A window: what is acknowledged stays in it behind a flight that is not, because the log remembers only
        # so many batches of a producer, and must still know that one when it is sent again.
        self._sent: deque[Flight] = deque()
        self._next_sequence = 0
        self._phase = _Phase.FLOWING
        self._failures = 0
        self._resume_at_s = 0.0
        self._gap = False
        self.is_held = False  # the route has changed: nothing new is sent before what was sent is settled

    @property
    def is_idle(self) -> bool:
        return not (self._sent or self._closed or self._open.messages)

    @property
    def waiting_count(self) -> int:
        """Messages that are not acknowledged."""
        sent = sum(len(flight.messages) for flight in self._sent if not flight.done)
        return sent + sum(len(flight.messages) for flight in self._closed) + len(self._open.messages)

    def add(self, message: Outgoing, slot: int, size_bytes: int) -> Flight:
        """Queue a message; its index in the flight is the last one."""
        flight = self._open
        messages = flight.messages
        total_bytes = flight.size_bytes + size_bytes
        if messages and (total_bytes > self._batch_bytes or len(messages) >= self._batch_count):
            self._closed.append(flight)
            flight = self._open = Flight(self.subject, self.partition)
            messages, total_bytes = flight.messages, size_bytes
        messages.append(message)
        flight.slots.append(slot)
        flight.size_bytes = total_bytes
        return flight

    def take_over(self, flight: Flight) -> None:
        """Best effort: a flight that another partition could not store goes to the end of this queue."""
        flight.moves += 1
        self.take_back(flight)

    def poll(self, now_s: float, gathers: bool = False) -> list[tuple[Flight, Append]]:
        """What to send now, in this order. If it `gathers`, a batch that is not full waits while another is on its way:
        many partitions with a few messages each would make many small batches, each of which costs as much as a large
        one."""
        if self.error is not None:
            return []
        commands = []
        if self._phase is _Phase.SETTLING:
            if any(flight.is_awaited for flight in self._sent) or now_s < self._resume_at_s:
                return []
            self._phase = _Phase.FLOWING
            commands = [self._send(flight, now_s) for flight in self._sent if not flight.done]
            if commands:
                return commands  # nothing new before it is known whether this works
        while len(self._sent) < self._settings.in_flight and not self.is_held:
            if gathers and self._sent and not self._closed:
                break
            flight = self._next_flight()
            if flight is None:
                break
            self._encode(flight)
            self._sent.append(flight)
            commands.append(self._send(flight, now_s))
        return commands

    def expire(self, now_s: float) -> list[Flight]:
        """An answer that does not come counts as a failure; whether the batch was stored, the next try tells.

        Returns the flights that this queue gives up (best effort only).
        """
        overdue = [
            flight
            for flight in self._sent
            if flight.is_awaited and now_s >= flight.sent_at_s + self._settings.answer_timeout_s
        ]
        given_up: list[Flight] = []
        for flight in overdue:
            flight.is_awaited = False
            self._phase = _Phase.SETTLING
            self._resume_at_s = now_s
            if self._strategy is Strategy.BEST_EFFORT and flight.tries >= self._settings.tries_max:
                given_up += self._give_up(flight)
        return given_up

    def next_due_s(self) -> float | None:
        """When `poll` should be called again though nothing else happens."""
        awaited = [flight.sent_at_s + self._settings.answer_timeout_s for flight in self._sent if flight.is_awaited]
        if awaited:
            return min(awaited)
        return self._resume_at_s if self._phase is _Phase.SETTLING else None

    def succeeded(self, flight: Flight, base_offset: int) -> int:
        """Stored. Returns how many bytes are no longer waiting; a repeated answer changes nothing."""
        if flight.done or flight not in self._sent:
            return 0
        self._failures = 0
        flight.is_awaited = False
        flight.finish(base_offset)
        self._move_window()
        return flight.size_bytes

    def failed(self, flight: Flight, tries: int, error: InturnError, now_s: float) -> list[Flight]:
        """Not stored, or not known. Returns the flights that this queue gives up (best effort only)."""
        if flight.done or flight not in self._sent or tries != flight.tries or not flight.is_awaited:
            return []  # an answer to an earlier try
        flight.is_awaited = False
        flight.is_refused = isinstance(error, RouteChanged)
        flight.last_error = error
        self._phase = _Phase.SETTLING
        if isinstance(error, OutOfSequence) and flight is self._sent[0] and error.got > error.expected:
            # Everything before it was acknowledged, but the log no longer knows: it lost it, or forgot us.
            flight.gap = True
        if self._strategy is Strategy.BEST_EFFORT and self._is_hopeless(flight, error):
            return self._give_up(flight)
        if not error.retriable:
            self.error = error
            return []
        self._failures += 1
        wait_s = self._settings.backoff_min_s * 2 ** min(self._failures - 1, 20)
        self._resume_at_s = now_s + min(wait_s, self._settings.backoff_max_s)
        return []

    @property
    def is_settled(self) -> bool:
        """Whether it is known of everything that was sent if it is stored.

        If the first that is not was refused for its route, none behind it can be: the log would miss the first.
        """
        first = next((flight for flight in self._sent if not flight.done), None)
        return first is None or first.is_refused

    def reroute(self, route_version: int) -> list[Flight]:
        """Go on by another route: all that is not stored, in order, to be given back to this queue or to others."""
        first = next((flight for flight in self._sent if not flight.done), None)
        if first is not None and first.batch is not None:
            self._next_sequence = first.batch.first_sequence
            self._gap = self._gap or first.gap
        self._route_version = route_version
        self._phase, self._failures, self.is_held = _Phase.FLOWING, 0, False
        return self.abandon()

    def take_back(self, flight: Flight) -> None:
        """A flight that was not stored goes to the end of this queue."""
        flight.partition = self.partition
        flight.batch = None
        flight.tries = 0
        flight.gap = flight.is_awaited = flight.is_refused = False
        if self._open.messages:
            self._closed.append(self._open)
            self._open = Flight(self.subject, self.partition)
        self._closed.append(flight)

    def abandon(self) -> list[Flight]:
        """Everything that is not acknowledged, in order; the queue is empty afterwards."""
        unacknowledged = [flight for flight in self._sent if not flight.done]
        flights = [*unacknowledged, *self._closed, *([self._open] if self._open.messages else [])]
        self._sent.clear()
        self._closed.clear()
        self._open = Flight(self.subject, self.partition)
        return flights

    def withdraw(self) -> list[Flight]:
        """As `abandon`, but this queue goes on: the numbers of what was sent without an answer stay unused."""
        if any(not flight.done for flight in self._sent):
            self._gap = True
        return self.abandon()

    def _next_flight(self) -> Flight | None:
        if self._closed:
            return self._closed.popleft()
        if not self._open.messages:
            return None
        flight, self._open = self._open, Flight(self.subject, self.partition)
        return flight

    def _encode(self, flight: Flight) -> None:
        flight.batch = encode(
            flight.messages,
            flight.slots,
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            first_sequence=self._next_sequence,
            route_version=self._route_version,
            compression=self._settings.compression,
        )
        self._next_sequence += len(flight.messages)
        flight.gap, self._gap = self._gap, False

    def _send(self, flight: Flight, now_s: float) -> tuple[Flight, Append]:
        assert flight.batch is not None
        flight.is_awaited, flight.is_refused = True, False
        flight.sent_at_s = now_s
        flight.tries += 1
        return flight, Append(self.subject, self.partition, flight.batch, flight.gap)

    def _is_hopeless(self, flight: Flight, error: InturnError) -> bool:
        if flight.tries >= self._settings.tries_max or isinstance(error, BrokerGroupClosed):
            return True  # an operator has said so, or its broker is dead: no use in trying again and again
        return not error.retriable and isinstance(error, StorageError)

    def _give_up(self, flight: Flight) -> list[Flight]:
        """The numbers of what is given up stay unused: the batch after it says that the gap is meant."""
        place = self._sent.index(flight)
        self._sent.remove(flight)
        after = next((one for one in list(self._sent)[place:] if not one.done), None)
        if after is not None:
            after.gap = True
        else:
            self._gap = True
        self._move_window()
        return [flight]

    def _move_window(self) -> None:
        while self._sent and self._sent[0].done:
            self._sent.popleft()
