"""A full look at a log, for `inturn doctor`: every header, every payload, every offset."""

from __future__ import annotations

from collections.abc import Iterator

from inturn.log.segment import Segment
from inturn.model.errors import LogDamaged


def verify(name: str, segments: list[Segment], sizes: list[int]) -> Iterator[LogDamaged]:
    """Yield each place that is damaged, and go on behind it where a batch is intact again."""
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
    """(position, base offset) of the next batch that is whole; the end of the segment if there is none."""
    for at, header in segment.headers_after(position, size):
        if header.base_offset > expected and next(segment.scan(at, size), None) is not None:
            return at, header.base_offset
    return size, expected
