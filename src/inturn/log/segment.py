"""Segments: files of consecutive batches. The name of a segment is its first offset.

`00000000000000000042.log` continues at the end of the previous segment. `00000000000000000042-gap.log` may skip
offsets, because the offsets were used before and lost. A segment with `-gap` is only made when all earlier segments
are synced.

A segment has a sparse index: the position to start the search for an offset or a time. The index is only a hint. An
index is rebuilt from the segment when its file is missing or does not fit, and is never synced.
"""

from __future__ import annotations

import contextlib
import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from inturn.log.disk import Disk, DiskFile
from inturn.model.batch import HEADER_BYTES, MAGIC, BatchHeader, StoredBatch, is_intact, parse_header

_NAME = re.compile(r"(\d{20})(-gap)?\.log\Z", re.ASCII)
_WALK_BYTES = 32 * 1024
_SCAN_BYTES = 1024 * 1024
_INDEX_MAGIC = b"iTindex1"
# magic, base offset, covered bytes, end offset, last stored at, number of entries; then three arrays, the checksum
_INDEX_HEAD = struct.Struct("<8sQQQQQ")
_CHECKSUM = struct.Struct("<Q")


class Segment:
    """A segment of a log. Only a single thread appends (the log, under its lock). Any thread may read below `size`.

    The log changes `size`, `end_offset` and `stored_at_ms` (of the last batch) of the active segment. For a sealed
    segment, `know` finds `end_offset` and `stored_at_ms` in the index file, or by walking the segment.
    """

    __slots__ = (
        "_disk",
        "_file",
        "_folder",
        "_seed",
        "after_gap",
        "base",
        "end_offset",
        "index",
        "index_saved",
        "known",
        "size",
        "stored_at_ms",
    )

    def __init__(
        self, disk: Disk, folder: str, base: int, after_gap: bool, size: int, seed: int, every_bytes: int
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._seed = seed
        self._file: DiskFile | None = None
        self.base = base
        self.after_gap = after_gap
        self.size = size
        self.end_offset = base
        self.stored_at_ms = 0
        self.index = Index(every_bytes)
        self.index_saved = False
        self.known = False

    @classmethod
    def create(
        cls, disk: Disk, folder: str, base: int, after_gap: bool, seed: int, every_bytes: int, stored_at_ms: int
    ) -> Segment:
        """A new empty segment. The folder entry of the segment is not synced yet."""
        segment = cls(
            disk=disk, folder=folder, base=base, after_gap=after_gap, size=0, seed=seed, every_bytes=every_bytes
        )
        segment.stored_at_ms = stored_at_ms
        segment.known = True
        segment._file = disk.open(segment.path, create=True)
        return segment

    @property
    def path(self) -> str:
        return f"{self._folder}/{self.base:020d}{'-gap' if self.after_gap else ''}.log"

    @property
    def index_path(self) -> str:
        return f"{self._folder}/{self.base:020d}.index"

    @property
    def file(self) -> DiskFile:
        file = self._file
        if file is None:
            file = self._file = self._disk.open(self.path)
        return file

    def drop_file(self) -> None:
        """Drop the file. The file closes when no thread reads from the file any more."""
        self._file = None

    # Reading headers

    def walk(self, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
        """(position, header) of the batches up to `limit` or the first place without a header. Skips payloads."""
        start, buffer = position, b""
        while position < limit:
            if len(buffer) - (position - start) < HEADER_BYTES:
                start, buffer = position, self.file.read_at(position, min(_WALK_BYTES, limit - position))
            header = parse_header(buffer, position - start, self._seed)
            if header is None or position + header.total_bytes > limit:
                return
            yield position, header
            position += header.total_bytes

    def scan(self, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
        """Like `walk`, but also verifies payloads, and ends at the first batch with a damaged payload."""
        start, buffer = position, b""
        while position < limit:
            if len(buffer) - (position - start) < HEADER_BYTES:
                start, buffer = position, self.file.read_at(position, min(_SCAN_BYTES, limit - position))
            header = parse_header(buffer, position - start, self._seed)
            if header is None or position + header.total_bytes > limit:
                return
            if len(buffer) - (position - start) < header.total_bytes:
                wanted = min(max(_SCAN_BYTES, header.total_bytes), limit - position)
                start, buffer = position, self.file.read_at(position, wanted)
            payload_at = position - start + HEADER_BYTES
            payload = memoryview(buffer)[payload_at : payload_at + header.payload_bytes]
            if not is_intact(StoredBatch(header, payload)):
                return
            yield position, header
            position += header.total_bytes

    def headers_after(self, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
        """All intact headers that start at or after this position, at any byte. Skips payloads."""
        while position < limit:
            buffer = self.file.read_at(position, min(_SCAN_BYTES, limit - position))
            if len(buffer) < HEADER_BYTES:
                return
            at = buffer.find(MAGIC)
            while at >= 0 and len(buffer) - at >= HEADER_BYTES:
                header = parse_header(buffer, at, self._seed)
                if header is not None:
                    yield position + at, header
                at = buffer.find(MAGIC, at + 1)
            # The last bytes may be the beginning of a header, so the next read repeats them.
            position += len(buffer) - HEADER_BYTES + 1

    # The index

    def know(self) -> None:
        """Find the end and the index of a sealed segment. The first call blocks; later calls return at once."""
        if self.known:
            return
        whole = self.load_index(self.size)
        self.known = True
        if whole and not self.index_saved:
            self.save_index(self.encode_index())

    def load_index(self, covered: int) -> bool:
        """Fill `index`, `end_offset`, `stored_at_ms` for the bytes below `covered`, from the index file as far as
        possible.

        Returns whether all headers could be walked. Bytes behind a damaged header stay without index; a reader raises
        at the damaged header.
        """
        found = self._read_index_file()
        position = 0
        if found is not None and found.covered_bytes <= covered:
            self.index, position = found.index, found.covered_bytes
            self.end_offset, self.stored_at_ms = found.end_offset, found.stored_at_ms
        self.index_saved = position == covered
        for at, header in self.walk(position, covered):
            self.note(at, header)
            position = at + header.total_bytes
        return position == covered

    def note(self, position: int, header: BatchHeader) -> None:
        """Add the batch at this position, behind all batches so far."""
        if position >= self.index.next_at:
            self.index.add(header.base_offset, position, header.stored_at_ms)
        self.end_offset = header.next_offset
        self.stored_at_ms = header.stored_at_ms

    def forget_index(self) -> None:
        """Drop a wrong index. The segment works without an index, and rebuilds the file at its next opening."""
        index = Index(self.index.every_bytes)
        index.next_at = self.index.next_at
        self.index = index
        with contextlib.suppress(OSError):
            self._disk.remove(self.index_path)

    def encode_index(self) -> bytes:
        return self.index.encode(self.base, self.size, self.end_offset, self.stored_at_ms)

    def save_index(self, data: bytes) -> None:
        """Write the index file without a sync; ignores errors. The checksum shows later whether the file is whole."""
        with contextlib.suppress(OSError):
            if self._disk.exists(self.index_path):
                self._disk.remove(self.index_path)
            file = self._disk.open(self.index_path, create=True)
            file.write_at(0, [data])
            file.close()

    def _read_index_file(self) -> IndexFile | None:
        try:
            if not self._disk.exists(self.index_path):
                return None
            file = self._disk.open(self.index_path)
            data = file.read_at(0, file.size())
            file.close()
        except OSError:
            return None
        return decode_index(data, self.base, self.index.every_bytes)


def parse_name(name: str) -> tuple[int, bool] | None:
    """(base offset, whether the segment may skip offsets), or None if the name is no segment's name."""
    match = _NAME.match(name)
    return None if match is None else (int(match[1]), match[2] is not None)


class Index:
    """Entries (offset, position, stored at) of batches at least `every_bytes` apart.

    A single thread adds entries. Other threads may search at the same time.
    """

    __slots__ = ("_offsets", "_positions", "_times", "every_bytes", "next_at")

    def __init__(self, every_bytes: int) -> None:
        self.every_bytes = every_bytes
        self.next_at = 0  # the next entry is due from this position on
        self._offsets = array("Q")
        self._positions = array("Q")
        self._times = array("Q")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, position: int, stored_at_ms: int) -> None:
        # The offset last: a search that finds the offset finds the position and time, too.
        self._positions.append(position)
        self._times.append(stored_at_ms)
        self._offsets.append(offset)
        self.next_at = position + self.every_bytes

    def before_offset(self, offset: int) -> int:
        """The position of a batch at or before the batch with this offset."""
        at = bisect_right(self._offsets, offset)
        return self._positions[at - 1] if at else 0

    def before_time(self, timestamp_ms: int) -> int:
        """The position of a batch at or before the first batch that was stored at or after this time."""
        at = bisect_left(self._times, timestamp_ms, 0, len(self._offsets))
        return self._positions[at - 1] if at else 0

    def encode(self, base_offset: int, covered_bytes: int, end_offset: int, stored_at_ms: int) -> bytes:
        count = len(self._offsets)
        head = _INDEX_HEAD.pack(_INDEX_MAGIC, base_offset, covered_bytes, end_offset, stored_at_ms, count)
        body = head + self._offsets.tobytes() + self._positions[:count].tobytes() + self._times[:count].tobytes()
        return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


class IndexFile:
    """A decoded index file: the index, and the part of the segment that the index covers."""

    __slots__ = ("covered_bytes", "end_offset", "index", "stored_at_ms")

    def __init__(self, index: Index, covered_bytes: int, end_offset: int, stored_at_ms: int) -> None:
        self.index = index
        self.covered_bytes = covered_bytes
        self.end_offset = end_offset
        self.stored_at_ms = stored_at_ms


def decode_index(data: bytes, base_offset: int, every_bytes: int) -> IndexFile | None:
    """The index of the segment with this base offset; None if the bytes are no whole index of that segment."""
    if len(data) < _INDEX_HEAD.size + _CHECKSUM.size:
        return None
    magic, base, covered_bytes, end_offset, stored_at_ms, count = _INDEX_HEAD.unpack_from(data)
    if magic != _INDEX_MAGIC or base != base_offset or len(data) != _INDEX_HEAD.size + 24 * count + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if xxh3_64_intdigest(data[: -_CHECKSUM.size]) != checksum:
        return None
    index = Index(every_bytes)
    at = _INDEX_HEAD.size
    for entries in (index._offsets, index._positions, index._times):
        entries.frombytes(data[at : at + 8 * count])
        at += 8 * count
    index.next_at = index._positions[-1] + every_bytes if count else 0
    return IndexFile(index, covered_bytes, end_offset, stored_at_ms)
