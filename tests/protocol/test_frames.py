"""Frames: cut at any byte, bounded before buffering, and refused when damaged."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inturn.model.errors import ProtocolError
from inturn.protocol.frames import HEADER_BYTES, NUMBER_MAX, Frame, FrameReader, frame_of

BYTES_MAX = 10_000


frame = frame_of


def plain(frames: list[Frame]) -> list[tuple[int, int, bytes]]:
    return [(one.number, one.code, bytes(one.body)) for one in frames]


@given(
    st.lists(st.tuples(st.integers(0, NUMBER_MAX), st.integers(0, 65535), st.binary(max_size=300)), max_size=8),
    st.lists(st.integers(1, 400), min_size=1, max_size=50),
)
def test_frames_come_out_as_they_went_in_wherever_the_stream_is_cut(
    sent: list[tuple[int, int, bytes]], pieces: list[int]
) -> None:
    stream = b"".join(frame(*one) for one in sent)
    reader, got, at, turn = FrameReader(BYTES_MAX), [], 0, 0
    while at < len(stream):
        size = pieces[turn % len(pieces)]
        got += plain(reader.feed(stream[at : at + size]))
        at, turn = at + size, turn + 1
    assert got == sent


def test_frames_cut_into_single_bytes() -> None:
    stream = frame(1, 2, b"one") + frame(2, 3, b"") + frame(3, 4, b"three")
    reader = FrameReader(BYTES_MAX)
    got = [one for byte in stream for one in plain(reader.feed(bytes([byte])))]
    assert got == [(1, 2, b"one"), (2, 3, b""), (3, 4, b"three")]


def test_a_length_over_the_limit_is_refused_by_its_first_four_bytes() -> None:
    with pytest.raises(ProtocolError, match="over the limit of 10000"):
        FrameReader(BYTES_MAX).feed(struct.pack("<I", BYTES_MAX + 1))
    reader = FrameReader(BYTES_MAX)
    reader.feed(struct.pack("<I", 2**32 - 1)[:3])
    with pytest.raises(ProtocolError, match="4294967295"):
        reader.feed(b"\xff")


def test_a_length_that_has_no_room_for_the_header_is_refused() -> None:
    with pytest.raises(ProtocolError, match="shorter than its header"):
        FrameReader(BYTES_MAX).feed(struct.pack("<I", 3) + b"abc")


def test_any_flipped_bit_behind_the_length_is_found() -> None:
    whole = frame(7, 12, b"a body of some bytes")
    for place in range(4, len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            with pytest.raises(ProtocolError, match="checksum"):
                FrameReader(BYTES_MAX).feed(bytes(damaged))


def test_the_largest_frame_is_taken() -> None:
    body = bytes(BYTES_MAX - HEADER_BYTES + 4)
    assert plain(FrameReader(BYTES_MAX).feed(frame(1, 1, body))) == [(1, 1, body)]
