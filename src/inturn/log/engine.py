"""What every log engine offers: a log per partition, to append to and to read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from inturn.model.batch import Batch, StoredBatch
from inturn.model.errors import InturnError, LogDamaged, LogStopped
from inturn.model.routing import Partition
from inturn.protocol.commands import Appended

AppendReply: TypeAlias = Callable[[Appended | InturnError], None]


class Log(Protocol):
    """The messages of one partition in the order they were stored. Offsets grow and are never used twice."""

    @property
    def partition(self) -> Partition: ...

    @property
    def start_offset(self) -> int:
        """The oldest still there."""
        ...

    @property
    def end_offset(self) -> int:
        """One past the newest that may be read: synced under Flush.ALWAYS, else written."""
        ...

    @property
    def size_bytes(self) -> int:
        """What is stored, on disk."""
        ...

    @property
    def appended_count(self) -> int:
        """Messages that were stored since it was opened."""
        ...

    @property
    def appended_bytes(self) -> int:
        """The same in bytes, as stored."""
        ...

    @property
    def trouble(self) -> LogDamaged | LogStopped | None:
        """Why appends are refused until the log is reopened or repaired, or None."""
        ...

    def append(self, batch: Batch, reply: AppendReply, gap: bool = False, inline: bool = False) -> None:
        """Store a batch. `reply` is called once, from any thread, maybe before this returns, and never under a lock;
        replies come in the order of the appends. A batch that is there already is answered with its old offset.

        `gap`: the producer gave up the sequences that are missing before this batch.
        `inline`: the caller is going to wait for the reply anyway, so the sync may run in its thread.
        """
        ...

    def seal(self, subject: str, route_version: int) -> int:
        """From now on refuse batches of other route versions with RouteChanged, unless they are there already. Returns
        the end: nothing that was routed by an older version is ever stored at or above it."""
        ...

    def sync(self) -> None:
        """Sync what is written by now, in this thread."""
        ...

    def read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        """Whole batches from the one with `offset` on (or the next there is, after a gap or retention): at least
        one even if it is larger than `max_bytes`, none at the end. Raises LogDamaged, or OSError from the disk.

        Headers are verified here, payloads by whoever decodes them (`is_intact`).
        """
        ...

    def offset_at(self, timestamp_ms: int) -> int:
        """The first offset stored at or after this time; `end_offset` if there is none."""
        ...

    def on_grown(self, callback: Callable[[], None]) -> None:
        """Have this called, outside of any lock, whenever `end_offset` grew; several growths may be one call."""
        ...

    def close(self) -> None:
        """Sync, answer everything that waits, and refuse what comes later. Blocks."""
        ...


class LogEngine(Protocol):
    def open(self, partition: Partition, floor: int) -> Log:
        """Open the log of a partition, or make it. Offsets below `floor` were given out before and are not used
        again, even if the messages that had them were lost. Blocks while it recovers."""
        ...

    def close(self) -> None:
        """Close every log."""
        ...
