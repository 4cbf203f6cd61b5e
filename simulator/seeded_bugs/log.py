"""Bugs of the log: appending and syncing, the producers' order, recovery."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import inturn.log.producer_table
import inturn.log.recovery
import inturn.log.segment
from inturn.log.disk import Disk
from inturn.log.engine import AppendReply
from inturn.log.partition_log import PartitionLog
from inturn.log.producer_table import ProducerTable
from inturn.log.segment import Segment
from inturn.model.batch import Batch, BatchHeader, StoredBatch
from inturn.model.errors import DiskFull, InturnError
from inturn.protocol.commands import Appended
from simulator.seeded_bugs.bug import Bugs, Patch

BUGS = Bugs()
_instead_of, _add = BUGS.instead_of, BUGS.add

# Appending and syncing

_append = PartitionLog.append
_read = PartitionLog.read
_begin = PartitionLog._begin
_sync_point = PartitionLog._sync_point
_sync_to = PartitionLog._sync_to


@_instead_of(PartitionLog, "append")
def acknowledges_before_sync(
    self: PartitionLog, batch: Batch, reply: AppendReply, gap: bool = False, inline: bool = False
) -> None:
    """A batch is acknowledged after the write, and synced later."""
    _append(self, batch, reply, gap, inline)
    with self._lock:
        early = list(self._waiting)
        self._waiting = deque((offset, _nobody, answer) for offset, _, answer in early)
    for _, early_reply, answer in early:
        early_reply(answer)


def _nobody(answer: Appended | InturnError) -> None:
    """Was answered before."""


def _read_unsynced(self: PartitionLog, offset: int, max_bytes: int) -> list[StoredBatch]:
    always, self._always = self._always, False
    try:
        return _read(self, offset, max_bytes)
    finally:
        self._always = always


_add(
    "readers_see_unsynced",
    "log",
    "Consumers get messages that a power loss may still take back.",
    Patch(PartitionLog, "read", _read_unsynced),
    Patch(PartitionLog, "end_offset", property(lambda log: log._end)),
)


@_instead_of(PartitionLog, "_begin")
def lost_offsets_are_used_again(self: PartitionLog, floor: int) -> None:
    """After a power loss the log continues at its end, though later offsets had been delivered."""
    _begin(self, 0)


@_instead_of(PartitionLog, "_sync_point")
def sealed_segment_is_not_synced(self: PartitionLog, with_checkpoint: bool = False) -> Any:
    """After a roll only the new segment is synced, not the end of the old segment."""
    point = _sync_point(self, with_checkpoint)
    point.sealed = []
    return point


@_instead_of(PartitionLog, "_sync_to")
def failed_sync_counts_as_done(self: PartitionLog, point: Any, holding: bool = False) -> None:
    """An error of a sync is ignored."""
    active = point.active
    _sync_to(self, dataclasses.replace(point, active=_Careless(active)), holding)


class _Careless:
    """A segment whose syncs never fail."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.file = self

    def sync(self) -> None:
        with contextlib.suppress(OSError):
            self._segment.file.sync()


def _take_nothing_back(self: PartitionLog, segment: Segment, position: int, error: OSError) -> InturnError:
    segment.size = segment.file.size()
    return DiskFull(self._name)


_add(
    "partial_batch_stays",
    "log",
    "The written part of a batch stays when the disk is full, and the next batch comes behind.",
    Patch(PartitionLog, "_write_failed", _take_nothing_back),
)


# The producers' order


@_instead_of(ProducerTable, "duplicate_of")
def duplicates_are_stored(self: ProducerTable, batch: Batch, gap: bool = False) -> int | None:
    """A batch that is sent again is stored again."""
    return None


@_instead_of(ProducerTable, "restore")
def producers_are_forgotten_at_a_restart(self: ProducerTable, snapshot: bytes) -> None:
    """The producers in the checkpoint are not read, only later batches."""


_add(
    "one_batch_is_remembered",
    "log",
    "The log recognises only a producer's last batch, though several may be on their way.",
    Patch(inturn.log.producer_table, "RECENT_COUNT", 1),
)

_duplicate_of = ProducerTable.duplicate_of


@_instead_of(ProducerTable, "duplicate_of")
def missing_batch_is_not_noticed(self: ProducerTable, batch: Batch, gap: bool = False) -> int | None:
    """A batch is stored though an earlier batch has not arrived."""
    return _duplicate_of(self, batch, gap=True)


# Recovery

_scan = Segment.scan


@_instead_of(inturn.log.segment, "is_intact")
def torn_payload_is_kept(batch: StoredBatch) -> bool:
    """Recovery checks headers only: a batch without its end counts as whole."""
    return True


@_instead_of(Segment, "scan")
def recovery_cuts_a_good_batch(self: Segment, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
    """Recovery takes the last batch for torn, always."""
    held: tuple[int, BatchHeader] | None = None
    for found in _scan(self, position, limit):
        if held is not None:
            yield held
        held = found


@_instead_of(inturn.log.recovery, "_cut")
def torn_tail_is_not_cut(disk: Disk, folder: str, scan: Any) -> None:
    """Recovery leaves a torn tail on the disk, and the next batches overwrite the tail."""


@_instead_of(inturn.log.recovery, "_make_durable")
def recovered_tail_is_not_synced(disk: Disk, folder: str, scan: Any) -> None:
    """After a crash of the process, unsynced writes count as synced."""
