"""Reading batches from segments: one read of the file, verified headers, payloads as slices of the read bytes."""

from __future__ import annotations

from inturn.log.segment import Segment
from inturn.model.batch import HEADER_BYTES, BatchHeader, StoredBatch, parse_header
from inturn.model.errors import LogDamaged

Hint = tuple[Segment, int]


def read_batches(
    name: str,
    seed: int,
    segments: list[Segment],
    number: int,
    limit: int,
    hint: Hint | None,
    offset: int,
    end_offset: int,
    max_bytes: int,
) -> tuple[list[StoredBatch], Hint]:
    """The batches of one segment from `offset` on and below `end_offset`, and a hint for the next read.

    `number` is the index of the segment for `offset` by the segments' names, `limit` the size of the last segment,
    `hint` the known place of `offset`. Raises LogDamaged.
    """
    segment, position = hint or (segments[number], -1)
    if position < 0:
        position = _find(name, segment, limit if segment is segments[-1] else segment.size, offset)
    while position >= (limit if segment is segments[-1] else segment.size):
        if segment is segments[-1]:
            return [], (segment, position)
        following = segments[segments.index(segment) + 1]
        end = offset if hint is not None else _end_of(segment)
        if following.base != end and not following.after_gap:
            raise LogDamaged(name, end, f"the next segment begins at {following.base}")
        segment, position, offset, hint = following, 0, max(offset, following.base), None

    size = limit if segment is segments[-1] else segment.size
    # By position: called for every read of a consumer.
    batches, position = _parse(name, seed, segment, position, size, offset, end_offset, max_bytes)
    return batches, (segment, position)


def _end_of(segment: Segment) -> int:
    segment.know()
    return segment.end_offset


def _find(name: str, segment: Segment, size: int, offset: int) -> int:
    """The position of the batch with this offset, or the end of a segment that ends before the offset."""
    segment.know()
    start = segment.index.before_offset(offset)
    position, expected, found = _walk_to(segment, start, size, offset)
    if not found and start > 0:
        # Either the index or the segment is wrong: a walk without the index finds out.
        position, expected, found = _walk_to(segment, 0, size, offset)
        if found:
            segment.forget_index()
    if not found:
        raise LogDamaged(name, expected, f"no intact header at byte {position} of {segment.path}")
    return position


def _walk_to(segment: Segment, start: int, size: int, offset: int) -> tuple[int, int, bool]:
    """The final position of the walk, the offset expected there, and whether the walk found the offset (or the end of
    the segment)."""
    position, expected = start, segment.base
    for at, header in segment.walk(start, size):
        if at == start > 0 and header.base_offset > offset:
            break
        if header.next_offset > offset:
            return at, header.base_offset, True
        position, expected = at + header.total_bytes, header.next_offset
    return position, expected, position >= size


def _parse(
    name: str, seed: int, segment: Segment, position: int, size: int, offset: int, end_offset: int, max_bytes: int
) -> tuple[list[StoredBatch], int]:
    file = segment.file
    data = file.read_at(position, min(max(max_bytes, HEADER_BYTES), size - position))
    header = parse_header(data, 0, seed)
    if header is None or not _is_expected(header, offset, segment):
        raise LogDamaged(name, offset, f"no intact header at byte {position} of {segment.path}")
    if header.total_bytes > len(data):
        data = file.read_at(position, min(header.total_bytes, size - position))
        if header.total_bytes > len(data):
            raise LogDamaged(name, offset, f"{segment.path} ends within the batch at byte {position}")
    view = memoryview(data)
    batches = []
    at, available = 0, len(data)
    while header.base_offset < end_offset:
        stop = at + header.total_bytes
        if stop > available:
            break
        batches.append(StoredBatch(header, view[at + HEADER_BYTES : stop]))
        at = stop
        if available - at < HEADER_BYTES:
            break
        expected = header.next_offset
        following = parse_header(data, at, seed)
        if following is None or following.base_offset != expected:
            # Return the intact batches; the read of the next batch raises.
            break
        header = following
    return batches, position + at


def _is_expected(header: BatchHeader, offset: int, segment: Segment) -> bool:
    return header.base_offset <= offset < header.next_offset or header.base_offset == segment.base > offset
