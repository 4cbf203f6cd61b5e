"""Bugs of the producer: sending again."""

from __future__ import annotations

import inturn.producer.partition_queue
from inturn.model.errors import InturnError
from inturn.producer.partition_queue import PartitionQueue
from inturn.producer.send_batch import SendBatch
from inturn.protocol.commands import Append
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_instead_of = BUGS.instead_of

_send = PartitionQueue._send
_failed = PartitionQueue.failed
_queue_poll = PartitionQueue.poll


@_instead_of(PartitionQueue, "_send")
def retry_gets_new_numbers(self: PartitionQueue, batch: SendBatch, now_s: float) -> tuple[SendBatch, Append]:
    """A batch that is sent again gets a new number: the log cannot recognise the batch."""
    if batch.tries:
        self._encode(batch)
        batch.gap = True
    return _send(self, batch, now_s)


@_instead_of(PartitionQueue, "failed")
def failed_batch_goes_to_the_end(
    self: PartitionQueue, batch: SendBatch, tries: int, error: InturnError, now_s: float
) -> list[SendBatch]:
    """A failed batch is queued again behind later batches."""
    given_up = _failed(self, batch, tries, error, now_s)
    if self.error is None and batch in self._sent and not batch.done and not batch.is_awaited:
        self._sent.remove(batch)
        self._closed.append(batch)
        self._gap = True
        self._phase = inturn.producer.partition_queue._Phase.FLOWING
    return given_up


@_instead_of(PartitionQueue, "poll")
def new_batches_overtake_a_failed_one(
    self: PartitionQueue, now_s: float, gathers: bool = False
) -> list[tuple[SendBatch, Append]]:
    """While a failed batch waits for its retry, new batches are sent, with the gap marked as intended."""
    commands = _queue_poll(self, now_s, gathers)
    if self._phase is inturn.producer.partition_queue._Phase.SETTLING and self.error is None and not commands:
        batch = self._next_batch() if len(self._sent) < self._settings.in_flight else None
        if batch is not None:
            self._encode(batch)
            batch.gap = True
            self._sent.append(batch)
            commands = [self._send(batch, now_s)]
    return commands
