"""The producer table of a log: recent batches of every producer, to store a batch once and in the producer's order.

Sequences count messages: after a batch with `first_sequence` s and `count` n, the next batch starts at s + n.
Batches with the producer id 0 have no producer and are always new.

An unknown producer (or a producer with a higher epoch) must start at sequence 0. A producer whose state expired
continues at a higher sequence and is refused with OutOfSequence, like a producer whose first batches have not arrived.
The log cannot tell the two cases apart, and accepting would break the order in the second case. The producer can tell:
if all batches before the refused batch were acknowledged, no batch is missing, and the producer repeats the batch with
`gap`.
"""

from __future__ import annotations

import msgspec

from inturn.model.batch import Batch, BatchHeader
from inturn.model.errors import OutOfSequence, ProducerFenced
from inturn.model.settings import IN_FLIGHT_MAX

NOBODY = 0
# A producer has at most this many batches in flight; only those can be sent twice.
RECENT_COUNT = IN_FLIGHT_MAX


class _State(msgspec.Struct, array_like=True):
    producer_id: int
    epoch: int
    next_sequence: int
    stored_at_ms: int
    recent: list[tuple[int, int, int]]  # first sequence, count, base offset


_decoder = msgspec.msgpack.Decoder(list[_State])
_encoder = msgspec.msgpack.Encoder()


class ProducerTable:
    """Not thread-safe: the log calls all methods under its lock."""

    def __init__(self, partition: str) -> None:
        self._partition = partition
        self._states: dict[int, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def duplicate_of(self, batch: Batch, gap: bool = False) -> int | None:
        """The base offset of a batch that is already stored, or None for a new batch that is next in order.

        Raises ProducerFenced for an older epoch; OutOfSequence if an earlier batch is missing, or if the batch is too
        old to be remembered. Does not change the table: `record` does, after the batch was written.
        """
        if batch.producer_id == NOBODY:
            return None
        state = self._states.get(batch.producer_id)
        first = batch.first_sequence
        if state is None or batch.producer_epoch > state.epoch:
            if first == 0 or gap:
                return None
            raise OutOfSequence(self._partition, 0, first)
        if batch.producer_epoch < state.epoch:
            raise ProducerFenced(str(batch.producer_id), batch.producer_epoch, state.epoch)
        if first == state.next_sequence or (gap and first > state.next_sequence):
            return None
        if first < state.next_sequence:
            for known_first, known_count, base_offset in state.recent:
                if known_first == first and known_count == batch.count:
                    return base_offset
        raise OutOfSequence(self._partition, state.next_sequence, first)

    def record(self, batch: Batch | BatchHeader, base_offset: int, stored_at_ms: int) -> None:
        """The batch was written at this offset."""
        if batch.producer_id == NOBODY:
            return
        first, count = batch.first_sequence, batch.count
        state = self._states.get(batch.producer_id)
        if state is None or state.epoch != batch.producer_epoch:
            state = _State(batch.producer_id, batch.producer_epoch, 0, 0, [])
            self._states[batch.producer_id] = state
        state.next_sequence = first + count
        state.stored_at_ms = stored_at_ms
        state.recent.append((first, count, base_offset))
        if len(state.recent) > RECENT_COUNT:
            del state.recent[0]

    def expire(self, before_ms: int) -> None:
        """Drop producers whose last batch is older."""
        for producer_id in [state.producer_id for state in self._states.values() if state.stored_at_ms < before_ms]:
            del self._states[producer_id]

    def snapshot(self) -> bytes:
        return _encoder.encode(list(self._states.values()))

    def restore(self, snapshot: bytes) -> None:
        """Replace the table by a snapshot. Raises msgspec.DecodeError for other bytes."""
        self._states = {state.producer_id: state for state in _decoder.decode(snapshot)}
