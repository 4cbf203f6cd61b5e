"""Consuming under a lease: reading, and saying what is done."""

from __future__ import annotations

import msgspec

from inturn.model.batch import StoredBatch
from inturn.model.commands.command import Command
from inturn.model.commands.leasing import Failure
from inturn.model.commands.parking import LotChange


class Pull(Command, frozen=True, gc=False, array_like=True):
    """Read from an offset on, under a lease, which this renews."""

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    offset: int
    max_bytes: int
    wait_s: float = 0.0
    tags: str = ""  # an expression: other messages are left out (see `inturn.model.batch.tagged`)


class Pulled(msgspec.Struct, frozen=True, gc=False, array_like=True):
    batches: tuple[StoredBatch, ...]
    next_offset: int  # where to go on; behind the last batch, or behind a gap in which nothing is stored
    end_offset: int  # one past the newest that may be read
    now_ms: int = 0  # on the clock that `stored_at_ms` was taken from
    unwanted: bytes = b""  # offsets that were left out for their tags, and count as done: a roaring bitmap, or nothing


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far a member is with a partition that it holds. All of it is stored together, or nothing.

    `number` counts up within an epoch: what comes late, after a higher one, changes nothing.
    """

    partition: int
    epoch: int
    offset: int  # everything below is done
    number: int = 0
    finished: bytes = b""  # offsets above that are done, too: a roaring bitmap, or nothing
    failed: tuple[Failure, ...] = ()  # since the last commit that was answered
    settled: tuple[int, ...] = ()  # offsets that failed before and are over now
    lots: tuple[LotChange, ...] = ()
    requests: tuple[int, ...] = ()  # ids of those that were acted upon
    ask: int = 0  # of a claimant: what its claim was granted for, since all claims under a lease have its epoch


class Commit(Command, frozen=True, gc=False):
    """Store progress. Partitions whose lease is not held with that epoch are refused."""

    subject: str
    group: str
    member: str
    progress: tuple[Progress, ...]


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The partitions whose offset was taken; for the others the epoch is over."""

    partitions: tuple[int, ...]
    unreached: tuple[int, ...] = ()  # their broker could not be asked: whether it was taken is not known


class Release(Command, frozen=True, gc=False):
    """Commit and give the lease back, in one step; whoever waits for it gets it at once."""

    subject: str
    group: str
    member: str
    progress: Progress

    @property
    def partition(self) -> int:
        return self.progress.partition
