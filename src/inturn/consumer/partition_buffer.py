"""The pulled messages of a partition: lanes, counts for flow control, and the place of the next pull. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyroaring import BitMap64

from inturn.consumer.lane import Lane, LaneKey
from inturn.model.message import Message


@dataclass(slots=True, eq=False)
class PartitionBuffer:
    """Workers append to `inbox` without a lock; every other field is written under the lock of the consumer."""

    delay_s: float = 0.0  # a retry subject: how long messages wait before a handler runs
    until: int | None = None  # no message at or above this offset is handled
    pull_offset: int = 0  # of the next pull
    end_offset: int = 0
    pulled_at_s: float = 0.0
    lanes: dict[LaneKey, Lane] = field(default_factory=dict)
    lanes_in_runs: int = 0
    delayed: deque[tuple[float, list[Message]]] = field(default_factory=deque)  # not to be handled before that time
    inbox: list[Message] = field(default_factory=list)  # finished, as reported by workers
    waiting_count: int = 0  # messages pulled and not finished
    waiting_bytes: int = 0
    is_paused: bool = False
    limit: str | None = None  # the limit of FlowControl that pauses the partition because of one key
    missing: int = 0  # offsets that were gone before they could be pulled
    gaps: deque[tuple[int, int]] = field(default_factory=deque)  # missing offsets above the lowest unfinished offset
    filtered_out: BitMap64 = field(default_factory=BitMap64)  # by tags, above the lowest unfinished offset
    filtered_out_count: int = 0  # since the grant

    @property
    def is_delayed(self) -> bool:
        return self.delay_s > 0

    def begin_at(self, offset: int, now_s: float) -> None:
        self.pull_offset = self.end_offset = offset
        self.pulled_at_s = now_s

    def bounded(self, offset: int) -> int:
        """The offset, or `until` if lower."""
        return offset if self.until is None else min(offset, max(self.until, self.pull_offset))

    @property
    def lag(self) -> int:
        """Messages that are not finished, as far as known."""
        return max(0, self.end_offset - self.pull_offset) + self.waiting_count

    # Counts

    def add(self, messages: Sequence[Message]) -> None:
        self.waiting_count += len(messages)
        self.waiting_bytes += sum([len(message.body) for message in messages])

    def remove(self, messages: Sequence[Message]) -> None:
        self.waiting_count -= len(messages)
        self.waiting_bytes -= sum([len(message.body) for message in messages])

    def take_inbox(self) -> list[Message]:
        """The messages that workers have reported as finished. A worker may append meanwhile: count first."""
        count = len(self.inbox)
        messages = self.inbox[:count]
        del self.inbox[:count]
        return messages

    # Offsets without messages to handle

    def skip_to(self, offset: int) -> None:
        """Count the missing offsets from `pull_offset` up to `offset`, and pull from there."""
        first = self.pull_offset
        missing = offset - first - self.filtered_out.range_cardinality(first, offset)
        if missing:
            self.missing += missing
            self.gaps.append((first, offset))
            self.filtered_out.remove_range(first, offset)  # so that no offset is counted twice
        self.pull_offset = offset

    def leave_out(self, offsets: BitMap64, low: int) -> None:
        """Count offsets that the tags filter out. `low` is the lowest unfinished offset."""
        self.filtered_out_count += len(offsets)
        self.filtered_out.remove_range(0, low)
        self.filtered_out |= offsets

    def span(self, low: int) -> int:
        """Offsets with messages, from the lowest unfinished offset `low` to the highest pulled offset."""
        while self.gaps and self.gaps[0][1] <= low:
            self.gaps.popleft()
        without = self.filtered_out.range_cardinality(low, max(low, self.pull_offset)) if self.filtered_out else 0
        return self.pull_offset - low - without - sum(stop - max(start, low) for start, stop in self.gaps)
