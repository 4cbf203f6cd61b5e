"""The log of one partition: appends, the group commit, and reading.

Locking: `_lock` is held for bookkeeping and for the write, never during a sync, a read or a callback. Replies pass
through `_outbox`. A single thread at a time empties `_outbox`, so replies keep the order of the appends.

Syncing: at most 1 sync is in flight. Appends that arrive during a sync wait for the next sync. The next sync starts as
soon as the present sync ends, and covers all waiting appends. Flush.ALWAYS uses no timer.

This module is longer than most: the steps of an append share a lock and a set of fields, and are easier to read
together. `recovery` opens logs, `segment` reads segments.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inturn.log.batch_reader import read_batches
from inturn.log.checkpoint import (
    RESERVE_AHEAD_COUNT,
    Checkpoint,
    clear_reserve,
    reserve_floor,
    save_checkpoint,
    save_reserve,
)
from inturn.log.disk import Disk
from inturn.log.engine import AppendReply
from inturn.log.recovery import recover, verify
from inturn.log.segment import Segment
from inturn.model.batch import HEADER_BYTES, Batch, StoredBatch, partition_seed
from inturn.model.errors import Closed, DiskFull, InturnError, LogDamaged, LogStopped, RouteChanged
from inturn.model.logs import get_logger
from inturn.model.routing import Partition
from inturn.model.settings import MIB, Flush, LogSettings
from inturn.model.time import Clock, Timer, Timers
from inturn.protocol.commands import Appended

_log = get_logger("inturn.log")

# EFBIG: a quota by file size (ulimit -f). Like a full disk, the condition may pass without any change to the log.
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_FREE_CHECK_BYTES = 1 * MIB
_HINT_COUNT = 64  # readers that continue at their last position, without a search in the index


@dataclass(slots=True)
class _SyncPoint:
    """A point of the log to sync up to, with the content of a checkpoint at this point."""

    end_offset: int
    sealed: list[Segment]
    active: Segment
    rolls: int
    checkpoint: Checkpoint | None
    indexes: list[tuple[Segment, bytes]]


class PartitionLog:
    """See `inturn.log.engine.Log` for the contract. All methods may be called from any thread.

    `submit` runs a job soon, in a different thread (or as an event of a simulation). `timers` is only used under
    Flush.INTERVAL.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        partition: Partition,
        settings: LogSettings,
        clock: Clock,
        submit: Callable[[Callable[[], None]], None],
        timers: Timers,
        floor: int = 0,
    ) -> None:
        """Recovers the log; blocks. Raises OSError. A damaged log opens, and raises at `read` and `append`."""
        self.partition = partition
        self._name = str(partition)
        self._disk = disk
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self._submit = submit
        self._timers = timers
        self._seed = partition_seed(partition.name)
        self._always = settings.flush is Flush.ALWAYS
        self._lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()

        found = recover(disk, folder, self._name, self._seed, settings.index_every_bytes)
        self.scanned_bytes = found.scanned_bytes  # read by recovery
        self._damage = found.damage
        self._stopped: str | None = None
        self._closed = False
        self._segments = found.segments
        self._producers = found.producers
        self._end = self._synced = found.end_offset
        self._stored_at_ms = found.stored_at_ms
        self._checkpointed = found.checkpoint

        self._sealed: tuple[str, int] | None = None  # the subject, and the only accepted route version
        self._outbox: list[tuple[AppendReply, Appended | InturnError]] = []
        self._delivering = False
        self._grown = False
        self._grown_callbacks: list[Callable[[], None]] = []
        self._waiting: deque[tuple[int, AppendReply, Appended | InturnError]] = deque()  # with the offset to be synced
        self._syncing = False
        self._timer: Timer | None = None
        self._unsynced: list[Segment] = []  # sealed segments
        self._rolls = self._rolls_synced = 0  # the number of new segments, and of those with synced folder entries
        self._since_checkpoint_bytes = 0
        self._checkpoint_at_s = self._clock.monotonic()
        self._since_free_check_bytes = 0
        self._free_bytes: int | None = None  # set while the disk is low
        self._hints: dict[int, tuple[Segment, int]] = {}
        self.appended_count = self.appended_bytes = 0

        self._reserved = 0  # offsets below are recorded as used; stays 0 under Flush.ALWAYS
        if self._damage is None:
            self._begin(max(floor, reserve_floor(disk, folder, self._seed)))
            if self._always:
                clear_reserve(disk, folder)
            self._check_free()
        self._bases = [segment.base for segment in self._segments]

    def _begin(self, floor: int) -> None:
        """Make an active segment that starts or continues at or above `floor`. Write a checkpoint if recovery had to
        scan."""
        if not self._segments or floor > self._end:
            base = max(self._end, floor)
            self._segments.append(self._create_segment(base, after_gap=bool(self._segments)))
            self._end = self._synced = base
            self._disk.sync_folder(self._folder)
            recovered = len(self._segments) > 1
        else:
            recovered = self.scanned_bytes > 0
        self._active = self._segments[-1]
        if recovered:
            self._write_checkpoint(self._sync_point(with_checkpoint=True))

    def _create_segment(self, base: int, after_gap: bool) -> Segment:
        every_bytes = self._settings.index_every_bytes
        return Segment.create(
            disk=self._disk,
            folder=self._folder,
            base=base,
            after_gap=after_gap,
            seed=self._seed,
            every_bytes=every_bytes,
            stored_at_ms=self._stored_at_ms,
        )

    # Offsets and size

    @property
    def start_offset(self) -> int:
        segments = self._segments
        return segments[0].base if segments else self._end

    @property
    def end_offset(self) -> int:
        return self._synced if self._always else self._end

    @property
    def synced_offset(self) -> int:
        """One past the newest offset that is known to survive a power loss."""
        return self._synced

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def trouble(self) -> LogDamaged | LogStopped | None:
        """Why appends are refused until the log is reopened or repaired, or None."""
        if self._damage is not None:
            return self._damaged()
        return None if self._stopped is None else LogStopped(self._name, self._stopped)

    def on_grown(self, callback: Callable[[], None]) -> None:
        self._grown_callbacks.append(callback)

    # Appending

    def append(self, batch: Batch, reply: AppendReply, gap: bool = False, inline: bool = False) -> None:
        with self._lock:
            answer: Appended | InturnError
            try:
                base_offset = self._store(batch, gap)
                answer, synced_first = Appended(base_offset), base_offset + batch.count
            except InturnError as error:
                answer, synced_first = error, 0
            if self._always and (synced_first > self._synced or self._waiting):
                self._waiting.append((synced_first, reply, answer))
            else:
                self._outbox.append((reply, answer))
            start_sync = not self._syncing and self._wants_sync()
            if start_sync:
                self._syncing = True
            start_timer = self._wants_timer()
            deliver = self._may_deliver()
        if start_sync and not inline:
            self._submit(self._sync)
        if start_timer:
            self._start_timer()
        if deliver:
            self._deliver()
        if start_sync and inline:
            self._sync()

    def _store(self, batch: Batch, gap: bool) -> int:
        """Write the batch unless already stored. Returns its base offset. Raises the error for the reply."""
        if self._closed or self._stopped is not None or self._damage is not None:
            raise self._refusal()
        duplicate = self._producers.duplicate_of(batch, gap)
        if duplicate is not None:
            return duplicate  # also for an older route version: the batch must not be stored in a second partition
        if self._sealed is not None and batch.route_version != self._sealed[1]:
            raise RouteChanged(self._sealed[0], batch.route_version, self._sealed[1])
        total_bytes = HEADER_BYTES + len(batch.payload)
        active = self._active
        if active.size and active.size + total_bytes > self._settings.segment_bytes:
            active = self._roll()
        if self._free_bytes is not None or self._since_free_check_bytes >= _FREE_CHECK_BYTES:
            self._check_free()
        if self._free_bytes is not None:
            raise DiskFull(self._name, self._free_bytes)

        base_offset, position = self._end, active.size
        if not self._always and base_offset + batch.count > self._reserved:
            self._reserve(base_offset + batch.count)
        # Times never go back, so that times can be searched like offsets.
        stored_at_ms = max(self._clock.time_ms(), self._stored_at_ms)
        header = batch.header(base_offset, stored_at_ms, self._synced, self._seed)
        try:
            active.file.write_at(position, (header, batch.payload))
        except OSError as error:
            raise self._write_failed(active, position, error) from error
        if position >= active.index.next_at:
            active.index.add(base_offset, position, stored_at_ms)
        self._producers.record(batch, base_offset, stored_at_ms)
        self._end = active.end_offset = base_offset + batch.count
        self._stored_at_ms = active.stored_at_ms = stored_at_ms
        active.size = position + total_bytes
        self._since_free_check_bytes += total_bytes
        self._since_checkpoint_bytes += total_bytes
        self.appended_count += batch.count
        self.appended_bytes += total_bytes
        if not self._always:
            self._grown = True
        return base_offset

    def seal(self, subject: str, route_version: int) -> int:
        with self._lock:
            self._sealed = subject, route_version
            return self._end

    def _refusal(self) -> InturnError:
        return self.trouble or Closed(f"log of partition {self._name}")

    def _write_failed(self, segment: Segment, position: int, error: OSError) -> InturnError:
        """Remove the written part of a batch, so that the next batch starts at the same position."""
        try:
            segment.file.truncate(position)
        except OSError as second:
            self._stop(f"a failed append could not be taken back: {second}")
            return LogStopped(self._name, str(second))
        if error.errno in _NO_SPACE:
            return DiskFull(self._name)
        self._stop(f"an append failed: {error}")
        return LogStopped(self._name, str(error))

    def _roll(self) -> Segment:
        """Seal the active segment and begin the next. The folder entry of the new segment is synced with its first
        batches."""
        sealed = self._active
        try:
            active = self._create_segment(self._end, after_gap=False)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise DiskFull(self._name) from error
            self._stop(f"a new segment could not be made: {error}")
            raise LogStopped(self._name, str(error)) from error
        self._unsynced.append(sealed)
        self._rolls += 1
        self._segments = [*self._segments, active]
        self._bases = [*self._bases, active.base]
        self._active = active
        # A checkpoint with every segment: retention deletes only below the checkpoint, and is not delayed for long.
        self._since_checkpoint_bytes = max(self._since_checkpoint_bytes, self._settings.checkpoint_every_bytes)
        self._since_free_check_bytes = _FREE_CHECK_BYTES
        return active

    def _reserve(self, end_offset: int) -> None:
        end_offset += RESERVE_AHEAD_COUNT
        try:
            save_reserve(self._disk, self._folder, end_offset, self._seed)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise DiskFull(self._name) from error
            self._stop(f"the reserve could not be written: {error}")
            raise LogStopped(self._name, str(error)) from error
        self._reserved = end_offset

    def _check_free(self) -> None:
        self._since_free_check_bytes = 0
        try:
            free_bytes = self._disk.free_bytes(self._folder)
        except OSError:
            return  # a write on a full disk will raise
        self._free_bytes = free_bytes if free_bytes < self._settings.reserve_bytes else None

    # Syncing

    def _wants_sync(self) -> bool:
        if self._stopped is not None or self._closed:
            return False
        return bool(self._waiting) or self._wants_checkpoint()

    def _wants_checkpoint(self) -> bool:
        if self._since_checkpoint_bytes < self._settings.checkpoint_every_bytes:
            return False
        if self._settings.flush is not Flush.OS:
            return True
        return self._clock.monotonic() >= self._checkpoint_at_s + self._settings.checkpoint_interval_s

    def sync(self) -> None:
        """Sync all written batches, in the calling thread."""
        with self._lock:
            if self._closed or self._stopped is not None or self._damage is not None:
                return
            point = self._sync_point()
        self._sync_to(point)

    def _sync(self) -> None:
        """The job that holds `_syncing`. Submits the next job if unsynced appends remain."""
        with self._lock:
            if self._closed or self._stopped is not None:
                self._syncing = False
                return
            point = self._sync_point(self._wants_checkpoint())
        self._sync_to(point, holding=True)

    def _sync_point(self, with_checkpoint: bool = False) -> _SyncPoint:
        active = self._active
        point = _SyncPoint(self._end, list(self._unsynced), active, self._rolls, None, [])
        if with_checkpoint:
            self._since_checkpoint_bytes = 0
            self._checkpoint_at_s = self._clock.monotonic()
            self._producers.expire(self._clock.time_ms() - int(self._settings.producer_expiry_s * 1000))
            point.checkpoint = Checkpoint(
                active.base, active.size, self._end, self._stored_at_ms, self._producers.snapshot()
            )
            for segment in (*point.sealed, active):
                if not segment.index_saved:
                    point.indexes.append((segment, segment.encode_index()))
        return point

    def _sync_to(self, point: _SyncPoint, holding: bool = False) -> None:
        failed = None
        try:
            # Oldest first: recovery trusts a later segment only if all earlier segments are whole.
            for segment in point.sealed:
                segment.file.sync()
            point.active.file.sync()
            if point.rolls > self._rolls_synced:
                self._disk.sync_folder(self._folder)
        except OSError as error:
            failed = f"a sync failed: {error}"
        with self._lock:
            if failed is not None:
                self._stop(failed)
            elif self._stopped is None:
                self._settle(point)
            again = holding and self._wants_sync()
            if holding:
                self._syncing = again
            deliver = self._may_deliver()
        if again:
            self._submit(self._sync)
        if deliver:
            self._deliver()
        if failed is None and point.checkpoint is not None:
            self._write_checkpoint(point)

    def _settle(self, point: _SyncPoint) -> None:
        """All batches up to the point are synced: answer the appends that waited for this sync."""
        self._rolls_synced = max(self._rolls_synced, point.rolls)
        self._unsynced = [segment for segment in self._unsynced if segment not in point.sealed]
        if point.end_offset > self._synced:
            self._synced = point.end_offset
            if self._always:
                self._grown = True
        waiting, outbox = self._waiting, self._outbox
        while waiting and waiting[0][0] <= self._synced:
            _, reply, answer = waiting.popleft()
            outbox.append((reply, answer))

    def _stop(self, cause: str) -> None:
        """Called under the lock. After a failed sync the content of the disk is unknown, so no sync is retried."""
        if self._stopped is None:
            self._stopped = cause
            _log.error("log.stopped", partition=self._name, end_offset=self._end, error=cause)
        for _, reply, answer in self._waiting:
            refused = isinstance(answer, InturnError)
            self._outbox.append((reply, answer if refused else LogStopped(self._name, self._stopped)))
        self._waiting.clear()

    def _write_checkpoint(self, point: _SyncPoint) -> None:
        """Called after the point was synced. On a full disk the old checkpoint stays, and opening scans more bytes."""
        checkpoint = point.checkpoint
        assert checkpoint is not None
        with self._checkpoint_lock:
            newest = self._checkpointed
            if newest is not None and newest.next_offset > checkpoint.next_offset:
                return
            for segment, data in point.indexes:
                segment.save_index(data)
                segment.index_saved = segment is not point.active
            try:
                save_checkpoint(self._disk, self._folder, checkpoint, self._seed)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    with self._lock:
                        self._stop(f"a checkpoint could not be written: {error}")
                        deliver = self._may_deliver()
                    if deliver:
                        self._deliver()
                return
            self._checkpointed = checkpoint

    def _wants_timer(self) -> bool:
        if self._settings.flush is not Flush.INTERVAL or self._timer is not None:
            return False
        return self._end > self._synced and self._stopped is None and not self._closed

    def _start_timer(self) -> None:
        due_s = self._clock.monotonic() + self._settings.flush_interval_s
        self._timer = self._timers.at(due_s, self._interval_over)

    def _interval_over(self) -> None:
        with self._lock:
            self._timer = None
            start_sync = not self._syncing and not self._closed and self._stopped is None and self._end > self._synced
            if start_sync:
                self._syncing = True
            start_timer = not start_sync and self._wants_timer()
        if start_sync:
            self._submit(self._sync)
        if start_timer:  # the sync in flight may have begun before the newest append
            self._start_timer()

    # Calling back

    def _may_deliver(self) -> bool:
        """Whether the calling thread must empty the outbox now. Called under the lock."""
        if self._delivering or not (self._outbox or self._grown):
            return False
        self._delivering = True
        return True

    def _deliver(self) -> None:
        while True:
            with self._lock:
                outbox, self._outbox = self._outbox, []
                grown, self._grown = self._grown, False
                if not outbox and not grown:
                    self._delivering = False
                    return
            try:
                for reply, answer in outbox:
                    _call(reply, answer)
                if grown:
                    for callback in self._grown_callbacks:
                        _call(callback)
            except BaseException:
                # Interrupted (Ctrl-C in an inline append): a different thread must be able to deliver the rest.
                with self._lock:
                    self._delivering = False
                raise

    # Reading

    def read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        with self._lock:
            if self._closed:
                raise Closed(f"log of partition {self._name}")
            end_offset = self._synced if self._always else self._end
            if offset >= end_offset:
                if self._damage is not None:
                    raise self._damaged()
                return []
            segments = self._segments
            hint = self._hints.get(offset)
            number = max(bisect_right(self._bases, offset) - 1, 0)
            limit = segments[-1].size
        if hint is not None and hint[0].base < segments[0].base:
            hint = None  # deleted by retention meanwhile
        # By position: called for every read of a consumer.
        batches, next_hint = read_batches(
            self._name, self._seed, segments, number, limit, hint, max(offset, 0), end_offset, max_bytes
        )
        if batches:
            with self._lock:
                self._hints[batches[-1].header.next_offset] = next_hint
                if len(self._hints) > _HINT_COUNT:
                    del self._hints[next(iter(self._hints))]
        elif self._damage is not None:
            raise self._damaged()
        return batches

    def offset_at(self, timestamp_ms: int) -> int:
        with self._lock:
            segments, end_offset = self._segments, self.end_offset
            limit = segments[-1].size if segments else 0
        number = bisect_left(segments, timestamp_ms, key=_stored_at_ms)
        for segment in segments[number:]:
            size = limit if segment is segments[-1] else segment.size
            for _, header in segment.walk(segment.index.before_time(timestamp_ms), size):
                if header.stored_at_ms >= timestamp_ms:
                    return min(header.base_offset, end_offset)
        return end_offset

    def _damaged(self) -> LogDamaged:
        damage = self._damage
        assert damage is not None
        return LogDamaged(self._name, damage.offset, damage.detail)

    def verify(self) -> Iterator[LogDamaged]:
        """Read the whole log and yield every damaged place. Blocks; takes long."""
        with self._lock:
            segments, sizes = self._segments, [segment.size for segment in self._segments]
        yield from verify(self._name, segments, sizes)
        if self._damage is not None:
            yield self._damaged()

    # Retention and closing

    def apply_retention(self, now_ms: int) -> int:
        """Delete the oldest sealed segments while the oldest is too old, or the log is larger than `retention_bytes`.

        Returns the number of deleted segments. Blocks; to be called at intervals, from a single thread. Only whole
        segments below the checkpoint are deleted, so recovery never misses a segment.
        """
        deleted = 0
        while (oldest := self._expired(now_ms)) is not None:
            with self._lock:
                self._segments = self._segments[1:]
                self._bases = self._bases[1:]
                self._hints = {at: hint for at, hint in self._hints.items() if hint[0] is not oldest}
            # Oldest first, with a sync after every removal: a crash never leaves a hole.
            if self._disk.exists(oldest.index_path):
                self._disk.remove(oldest.index_path)
            oldest.file  # noqa: B018  # opened before the removal: present readers keep the open file
            self._disk.remove(oldest.path)
            self._disk.sync_folder(self._folder)
            deleted += 1
        return deleted

    def _expired(self, now_ms: int) -> Segment | None:
        settings, checkpoint = self._settings, self._checkpointed
        with self._lock:
            segments = self._segments
            if self._closed or self.trouble is not None or checkpoint is None or len(segments) < 2:
                return None
            total_bytes = sum(segment.size for segment in segments)
        oldest = segments[0]
        if oldest.base >= checkpoint.segment:
            return None
        if settings.retention_bytes is not None and total_bytes > settings.retention_bytes:
            return oldest
        if settings.retention_s is not None and _stored_at_ms(oldest) < now_ms - int(settings.retention_s * 1000):
            return oldest
        return None

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            timer, self._timer = self._timer, None
            point = None
            if self._stopped is None and self._damage is None:
                point = self._sync_point(with_checkpoint=True)
        if timer is not None:
            timer.cancel()
        if point is not None:
            if self._is_checkpointed(point):
                point.checkpoint = None
            self._sync_to(point)
            if self._stopped is None:
                self._clear_reserve()
        for segment in self._segments:
            segment.drop_file()

    def _clear_reserve(self) -> None:
        try:
            clear_reserve(self._disk, self._folder)
        except OSError:
            _log.warning("log.reserve_not_cleared", partition=self._name, error="some offsets will be skipped")

    def _is_checkpointed(self, point: _SyncPoint) -> bool:
        done = self._checkpointed
        if done is None:
            return point.end_offset == self._segments[0].base  # nothing was ever written
        return (done.segment, done.position) == (point.active.base, point.active.size)


def _stored_at_ms(segment: Segment) -> int:
    segment.know()
    return segment.stored_at_ms


def _call(callback: Callable[..., None], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        _log.exception("log.callback_failed")
