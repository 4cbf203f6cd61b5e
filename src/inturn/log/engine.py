"""The interface of log engines: a log per partition, for appending and reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from inturn.model.batch import Batch, StoredBatch
from inturn.model.errors import InturnError, LogDamaged, LogStopped
from inturn.model.routing import Partition
from inturn.protocol.commands import Appended

AppendReply: TypeAlias = Callable[[Appended | InturnError], None]


class Log(Protocol):
    """The messages of one partition in the order of storing. Offsets rise and are never used twice."""

    @property
    def partition(self) -> Partition: ...

    @property
    def start_offset(self) -> int:
        """The oldest stored offset."""
        ...

    @property
    def end_offset(self) -> int:
        """One past the newest readable offset: synced under Flush.ALWAYS, else written."""
        ...

    @property
    def size_bytes(self) -> int:
        """The size of the log on disk."""
        ...

    @property
    def appended_count(self) -> int:
        """The number of messages stored since the log was opened."""
        ...

    @property
    def appended_bytes(self) -> int:
        """The stored size of the messages stored since the log was opened."""
        ...

    @property
    def trouble(self) -> LogDamaged | LogStopped | None:
        """Why appends are refused until the log is reopened or repaired, or None."""
        ...

    def append(self, batch: Batch, reply: AppendReply, gap: bool = False, inline: bool = False) -> None:
        """Store a batch. `reply` is called once, from any thread, maybe before `append` returns, and never under a
        lock. Replies come in the order of the appends. A batch that is already stored is answered with its old offset.

        `gap`: the producer gave up the sequences that are missing before this batch.
        `inline`: the caller waits for the reply anyway, so the sync may run in the caller's thread.
        """
        ...

    def seal(self, subject: str, route_version: int) -> int:
        """Refuse batches of other route versions from now on with RouteChanged, unless already stored.

        Returns the end offset: no message routed by an older version is ever stored at or above this offset.
        """
        ...

    def sync(self) -> None:
        """Sync all written batches, in the calling thread."""
        ...

    def read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        """Whole batches, beginning with the batch of `offset` (or the next stored batch after a gap or retention).

        Returns at least 1 batch, even a batch larger than `max_bytes`, and no batch at the end. Raises LogDamaged, or
        OSError from the disk. `read` verifies headers; the caller verifies payloads with `is_intact`.
        """
        ...

    def offset_at(self, timestamp_ms: int) -> int:
        """The first offset stored at or after this time, or else `end_offset`."""
        ...

    def on_grown(self, callback: Callable[[], None]) -> None:
        """Register a callback for growth of `end_offset`. The callback runs outside of any lock; several growths may
        result in a single call."""
        ...

    def close(self) -> None:
        """Sync, answer all waiting appends, and refuse later appends. Blocks."""
        ...


class LogEngine(Protocol):
    def open(self, partition: Partition, floor: int) -> Log:
        """Open or make the log of a partition. Offsets below `floor` may have been used and are not used again,
        even if their messages were lost. Blocks during recovery."""
        ...

    def close(self) -> None:
        """Close every log."""
        ...
