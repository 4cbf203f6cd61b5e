"""A partition that a consumer asked for, holds, or is giving back; and what of it waits to be handled. No I/O."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from inturn.consumer.run import Run
from inturn.model.batch import Batch, StoredBatch
from inturn.model.commands import Command
from inturn.model.errors import InturnError
from inturn.model.message import Message

NEVER = float("-inf")


class Stage(enum.Enum):
    ASKING = "asking"  # for the lease
    ACTIVE = "active"  # pulling and handling
    DRAINING = "draining"  # nothing new is started; then commit and release
    RELEASING = "releasing"
    LOST = "lost"  # somebody else may have it: wait for a handler that still runs, commit nothing


@dataclass(slots=True)
class Chunk:
    """Pulled messages, decoded by whoever handles them."""

    content: StoredBatch | list[Message]
    count: int
    size_bytes: int
    due_s: float = NEVER  # not to be handled before


@dataclass(slots=True)
class Pending:
    """A command on its way, and until when its answer is waited for."""

    command: Command
    sent_at_s: float
    until_s: float


@dataclass(slots=True, eq=False)
class HeldPartition:
    index: int
    delay_s: float = 0.0  # a retry subject: how long its messages wait before they are handled
    stage: Stage = Stage.ASKING
    epoch: int = 0
    life_s: float = 0.0  # of the lease, as the grantor said; it is the one that counts
    lease_ends_s: float = NEVER
    # No handler is started at or after this: the end of the lease, or NEVER once the partition is being given up.
    deadline_s: float = NEVER
    chunks: deque[Chunk] = field(default_factory=deque)
    waiting_count: int = 0
    waiting_bytes: int = 0
    kept: list[Message] = field(default_factory=list)  # manual: handled, not committed
    moving: list[Message] = field(default_factory=list)  # best effort: on their way to the retry subject
    moving_batch: Batch | None = None
    pull_offset: int = 0  # the next to be pulled
    run_offset: int = 0  # the next to be handled
    done_offset: int = 0  # everything below is done
    committed: int = 0
    end_offset: int = 0
    attempts: dict[int, int] = field(default_factory=dict)  # of messages that are repeated, by offset
    suspended_until_s: float = NEVER
    run: Run | None = None
    pending: dict[type[Command], Pending] = field(default_factory=dict)
    pulled_at_s: float = 0.0
    retry_at_s: float = NEVER  # after an error
    error: InturnError | None = None
    is_damaged: bool = False  # the error is about what was pulled, and a pull does not mend it
    missing: int = 0  # offsets that were gone before they could be pulled
    gap_count: int = 0  # of those, the ones that are not behind us yet

    def granted(self, epoch: int, offset: int, deadline_s: float, now_s: float) -> None:
        self.stage = Stage.ACTIVE
        self.epoch = epoch
        self.deadline_s = self.lease_ends_s = deadline_s
        self.pull_offset = self.run_offset = self.done_offset = self.committed = self.end_offset = offset
        self.pulled_at_s = now_s

    def renewed(self, deadline_s: float) -> None:
        self.lease_ends_s = max(self.lease_ends_s, deadline_s)
        if self.stage is Stage.ACTIVE:
            self.deadline_s = self.lease_ends_s

    def give_up(self, stage: Stage) -> None:
        """Start nothing any more; what waits is left to the successor."""
        self.stage = stage
        self.deadline_s = NEVER
        self.chunks.clear()
        self.retry_at_s = NEVER
        if stage is Stage.LOST:
            self.moving, self.moving_batch = [], None
        self.waiting_count = self.waiting_bytes = 0

    @property
    def is_delayed(self) -> bool:
        return self.delay_s > 0

    def add(self, batch: StoredBatch, due_s: float = NEVER) -> None:
        header = batch.header
        self.skip_to(header.base_offset)
        count = header.next_offset - max(header.base_offset, self.pull_offset)
        if count > 0:
            self.chunks.append(Chunk(batch, count, header.payload_bytes, due_s))
            self.waiting_count += count
            self.waiting_bytes += header.payload_bytes
            self.pull_offset = header.next_offset

    def is_ready(self, now_s: float) -> bool:
        if self.run is not None or not self.chunks or self.moving:
            return False
        return self.suspended_until_s <= now_s < self.deadline_s and self.chunks[0].due_s <= now_s

    def skip_to(self, offset: int) -> None:
        """Nothing is stored between the last pull and this offset."""
        if offset > self.pull_offset:
            self.missing += offset - self.pull_offset
            self.gap_count += offset - self.pull_offset
            self.pull_offset = offset

    def skip_gap(self) -> None:
        """When everything before a gap at the end of the log is done, so is the gap."""
        if self.stage is Stage.ACTIVE and not (self.run or self.chunks or self.kept or self.moving):
            self.done_offset = self.run_offset = self.pull_offset
            self.gap_count = 0
