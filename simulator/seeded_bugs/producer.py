"""Bugs of the producer: sending again."""

from __future__ import annotations

import inturn.producer.partition_queue
from inturn.model.errors import InturnError
from inturn.producer.partition_queue import PartitionQueue
from inturn.producer.send_batch import Flight
from inturn.protocol.commands import Append
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_instead_of = BUGS.instead_of

_send = PartitionQueue._send
_failed = PartitionQueue.failed
_queue_poll = PartitionQueue.poll


@_instead_of(PartitionQueue, "_send")
def retry_gets_new_numbers(self: PartitionQueue, flight: Flight, now_s: float) -> tuple[Flight, Append]:
    """A batch that is sent again gets a new number: the log cannot recognise the batch."""
    if flight.tries:
        self._encode(flight)
        flight.gap = True
    return _send(self, flight, now_s)


@_instead_of(PartitionQueue, "failed")
def failed_batch_goes_to_the_end(
    self: PartitionQueue, flight: Flight, tries: int, error: InturnError, now_s: float
) -> list[Flight]:
    """A failed batch is queued again behind later batches."""
    given_up = _failed(self, flight, tries, error, now_s)
    if self.error is None and flight in self._sent and not flight.done and not flight.is_awaited:
        self._sent.remove(flight)
        self._closed.append(flight)
        self._gap = True
        self._phase = inturn.producer.partition_queue._Phase.FLOWING
    return given_up


@_instead_of(PartitionQueue, "poll")
def new_batches_overtake_a_failed_one(
    self: PartitionQueue, now_s: float, gathers: bool = False
) -> list[tuple[Flight, Append]]:
    """While a failed batch waits for its retry, new batches are sent, with the gap marked as intended."""
    commands = _queue_poll(self, now_s, gathers)
    if self._phase is inturn.producer.partition_queue._Phase.SETTLING and self.error is None and not commands:
        flight = self._next_flight() if len(self._sent) < self._settings.in_flight else None
        if flight is not None:
            self._encode(flight)
            flight.gap = True
            self._sent.append(flight)
            commands = [self._send(flight, now_s)]
    return commands
