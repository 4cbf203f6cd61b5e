"""Recovery of a log: find the good part on disk, and tell a torn tail from damage. `verify` checks a whole log.

Recovery reads and checks every batch from the checkpoint on (or from the beginning without a checkpoint). At the first
bad place, with offset E expected there, the rest is

- *damage in the middle*, if there is evidence that E had been synced: a checkpoint above E, a later header with a
  `synced_end` above E, or a later segment after a gap (made only when all earlier segments are synced). Recovery
  changes no file; the log opens damaged at E.
- *a torn tail* otherwise, never acknowledged as synced. Recovery cuts the tail, and syncs the cut before the log
  accepts appends.

A header is evidence even if its own payload is torn: the log that wrote the header knew how far it was synced.

`verify` serves `inturn doctor` and checks every header, every payload and every offset.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from inturn.log.checkpoint import Checkpoint, load_checkpoint
from inturn.log.disk import Disk
from inturn.log.producer_table import ProducerTable
from inturn.log.segment import Segment, parse_name
from inturn.model.errors import LogDamaged


def verify(name: str, segments: list[Segment], sizes: list[int]) -> Iterator[LogDamaged]:
    """Yield every damaged place, and continue at the next intact batch."""
    expected = segments[0].base if segments else 0
    for segment, size in zip(segments, sizes, strict=True):
        if segment.base < expected:
            yield LogDamaged(name, segment.base, f"{segment.path} repeats offsets up to {expected}")
        elif segment.base > expected and not segment.after_gap:
            yield LogDamaged(name, expected, f"the next segment begins at {segment.base}")
        expected, position = segment.base, 0
        while position < size:
            for at, header in segment.scan(position, size):
                if header.base_offset != expected:
                    break
                expected, position = header.next_offset, at + header.total_bytes
            if position < size:
                yield LogDamaged(name, expected, f"no intact batch at byte {position} of {segment.path}")
                position, expected = _next_intact(segment, position + 1, size, expected)


def _next_intact(segment: Segment, position: int, size: int, expected: int) -> tuple[int, int]:
    """(position, base offset) of the next whole batch, or of the end of the segment."""
    for at, header in segment.headers_after(position, size):
        if header.base_offset > expected and next(segment.scan(at, size), None) is not None:
            return at, header.base_offset
    return size, expected


_REWRITE_BYTES = 1024 * 1024


@dataclass(slots=True)
class Recovered:
    """The good part of a log. The last of the `segments` is the active segment. No segments for a new log."""

    segments: list[Segment]
    end_offset: int
    stored_at_ms: int
    producers: ProducerTable
    checkpoint: Checkpoint | None = None
    damage: LogDamaged | None = None
    scanned_bytes: int = 0


@dataclass(slots=True)
class _Scan:
    segments: list[Segment]  # all segments on disk
    end_offset: int
    stored_at_ms: int
    good: int = 0  # the number of good segments; the last good segment is good up to `bad_at`
    bad_at: int | None = None
    detail: str = ""
    scanned: list[tuple[Segment, int, int]] = field(default_factory=list)  # from, to


def recover(disk: Disk, folder: str, partition: str, seed: int, every_bytes: int) -> Recovered:
    """Find the good part of a log and cut a torn tail. The good part is synced when this returns. Raises OSError."""
    disk.make_folder(folder)
    segments = _segments(disk, folder, seed, every_bytes)
    checkpoint = load_checkpoint(disk, folder, seed)
    producers = ProducerTable(partition)
    if not segments:
        damage = None
        if checkpoint is not None:
            damage = LogDamaged(partition, 0, f"all segments are gone, there were {checkpoint.next_offset} offsets")
        return Recovered([], 0, 0, producers, checkpoint, damage)

    first, position, scan = _start(segments, checkpoint, producers)
    _scan(scan, first, position, producers)
    known_end = 0 if checkpoint is None else checkpoint.next_offset
    damage = _damage(scan, known_end, partition)
    if damage is None:
        _cut(disk, folder, scan)
        _make_durable(disk, folder, scan)
    del segments[scan.good :]
    if scan.bad_at is not None:
        segments[-1].size = scan.bad_at
    return Recovered(
        segments=segments,
        end_offset=scan.end_offset,
        stored_at_ms=scan.stored_at_ms,
        producers=producers,
        checkpoint=checkpoint,
        damage=damage,
        scanned_bytes=sum(end - begin for _, begin, end in scan.scanned),
    )


def _segments(disk: Disk, folder: str, seed: int, every_bytes: int) -> list[Segment]:
    segments = []
    for name in sorted(disk.names(folder)):
        parsed = parse_name(name)
        if parsed is not None:
            base, after_gap = parsed
            size = disk.size(f"{folder}/{name}")
            segment = Segment(
                disk=disk,
                folder=folder,
                base=base,
                after_gap=after_gap,
                size=size,
                seed=seed,
                every_bytes=every_bytes,
            )
            segments.append(segment)
    # A log that is opened twice with a rising floor leaves an empty segment behind. The empty segment is removed.
    for segment, following in itertools.pairwise(list(segments)):
        if segment.size == 0 and following.after_gap:
            disk.remove(segment.path)
            segments.remove(segment)
    return segments


def _start(segments: list[Segment], checkpoint: Checkpoint | None, producers: ProducerTable) -> tuple[int, int, _Scan]:
    """The start of the scan: (index of the segment, position in the segment, the initial scan)."""
    if checkpoint is not None:
        for number, segment in enumerate(segments):
            if segment.base == checkpoint.segment and segment.size >= checkpoint.position:
                try:
                    producers.restore(checkpoint.producers)
                except msgspec.DecodeError:
                    break
                segment.load_index(checkpoint.position)
                return number, checkpoint.position, _Scan(segments, checkpoint.next_offset, checkpoint.stored_at_ms)
    return 0, 0, _Scan(segments, segments[0].base, 0)


def _scan(scan: _Scan, first: int, position: int, producers: ProducerTable) -> None:
    for number in range(first, len(scan.segments)):
        segment = scan.segments[number]
        if number > first:
            if segment.base != scan.end_offset and not (segment.after_gap and segment.base > scan.end_offset):
                scan.bad_at, scan.detail = scan.segments[number - 1].size, f"the next segment begins at {segment.base}"
                return
            scan.end_offset, position = segment.base, 0
        scan.good = number + 1
        begin = position
        for at, header in segment.scan(position, segment.size):
            if header.base_offset != scan.end_offset:
                break
            segment.note(at, header)
            producers.record(header, header.base_offset, header.stored_at_ms)
            scan.end_offset, scan.stored_at_ms = header.next_offset, header.stored_at_ms
            position = at + header.total_bytes
        scan.scanned.append((segment, begin, position))
        segment.end_offset, segment.stored_at_ms, segment.known = scan.end_offset, scan.stored_at_ms, True
        if position < segment.size:
            scan.bad_at, scan.detail = position, f"no intact batch at byte {position} of {segment.path}"
            return


def _damage(scan: _Scan, known_end: int, partition: str) -> LogDamaged | None:
    expected = scan.end_offset
    if expected < known_end:
        detail = scan.detail or "the log ends here"
        return LogDamaged(partition, expected, f"{detail}, but the log was whole up to offset {known_end}")
    if scan.bad_at is None:
        return None
    for segment in scan.segments[scan.good :]:
        if segment.after_gap:
            return LogDamaged(partition, expected, f"{scan.detail}, but a later segment begins at {segment.base}")
    position = scan.bad_at
    for segment in scan.segments[scan.good - 1 :]:
        for at, header in segment.headers_after(position, segment.size):
            if header.base_offset > expected and header.synced_end > expected:
                return LogDamaged(
                    partition, expected, f"{scan.detail}, but an intact batch follows at byte {at} of {segment.path}"
                )
        position = 0
    return None


def _cut(disk: Disk, folder: str, scan: _Scan) -> None:
    """Remove the torn tail durably: else its bytes could appear again below the next written batches."""
    if scan.bad_at is None:
        return
    for segment in reversed(scan.segments[scan.good :]):
        segment.drop_file()
        disk.remove(segment.path)
        if disk.exists(segment.index_path):
            disk.remove(segment.index_path)
    disk.sync_folder(folder)
    last = scan.segments[scan.good - 1]
    if scan.bad_at < last.size:
        last.file.truncate(scan.bad_at)
        last.file.sync_all()


def _make_durable(disk: Disk, folder: str, scan: _Scan) -> None:
    """Write the scanned bytes again and sync them.

    The bytes may be only in the page cache. If a sync failed in the previous process, the system may treat these pages
    as clean although the pages never reached the disk: then a sync alone would have no effect. The last segment and
    the folder are synced even without scanned bytes: an earlier recovery may have crashed right after its cut.
    """
    for segment, begin, end in scan.scanned:
        for position in range(begin, end, _REWRITE_BYTES):
            data = segment.file.read_at(position, min(_REWRITE_BYTES, end - position))
            segment.file.write_at(position, [data])
        if end > begin:
            segment.file.sync()
    scan.segments[scan.good - 1].file.sync_all()
    disk.sync_folder(folder)
