"""A sparse index of one segment: the position to start the search for an offset or a time.

The index is only a hint. An index is rebuilt from the segment when its file is missing or does not fit, and is never
synced.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right

from xxhash import xxh3_64_intdigest

_MAGIC = b"iTindex1"
# magic, base offset, covered bytes, end offset, last stored at, number of entries; then three arrays, the checksum
_HEAD = struct.Struct("<8sQQQQQ")
_CHECKSUM = struct.Struct("<Q")


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
        head = _HEAD.pack(_MAGIC, base_offset, covered_bytes, end_offset, stored_at_ms, count)
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


def decode(data: bytes, base_offset: int, every_bytes: int) -> IndexFile | None:
    """The index of the segment with this base offset; None if the bytes are no whole index of that segment."""
    if len(data) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, base, covered_bytes, end_offset, stored_at_ms, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or base != base_offset or len(data) != _HEAD.size + 24 * count + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if xxh3_64_intdigest(data[: -_CHECKSUM.size]) != checksum:
        return None
    index = Index(every_bytes)
    at = _HEAD.size
    for entries in (index._offsets, index._positions, index._times):
        entries.frombytes(data[at : at + 8 * count])
        at += 8 * count
    index.next_at = index._positions[-1] + every_bytes if count else 0
    return IndexFile(index, covered_bytes, end_offset, stored_at_ms)
