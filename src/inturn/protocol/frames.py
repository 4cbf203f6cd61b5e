"""Frames: what a stream between a client and a server is cut into.

    length    u32, little endian: how many bytes follow
    guard     u16: a checksum of the length
    code      u16: what the body is, see `inturn.protocol.codec`
    checksum  u32: the low half of xxh3-64 of the body, seeded with number and code
    number    u32: given by the client, counts up; an answer has the number of what it answers
    body      msgpack

The length is looked at before anything of the frame is kept, so that nobody can make us allocate what we do not want.
It has a guard of its own: whoever believed a damaged length would take all that follows for a part of that frame, and
wait for the rest of it while the other end seems to be alive.
"""

from __future__ import annotations

import struct

import msgspec
from xxhash import xxh3_64_intdigest

from inturn.model.errors import ProtocolError

_HEADER = struct.Struct("<IHHII")
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
_LENGTH_BYTES = _LENGTH.size
_BODY_AT = HEADER_BYTES - _LENGTH_BYTES
NUMBER_MAX = 2**32 - 1
SMALL_BYTES = 4096  # up to this a copy costs less than a view


class Frame(msgspec.Struct, frozen=True, gc=False):
    number: int
    code: int
    body: bytes | memoryview  # a view of what was read, if it is large


def frame_of(number: int, code: int, body: bytes) -> bytes:
    """The bytes that a FrameReader makes a Frame of."""
    length = len(body) + _BODY_AT
    checksum = xxh3_64_intdigest(body, number << 16 | code) & 0xFFFFFFFF
    return _HEADER.pack(length, _guard(length), code, checksum, number) + body


def _guard(length: int) -> int:
    """Any single bit of the length changes it."""
    return length * 0x9E3779B1 >> 16 & 0xFFFF


def _check_guard(length: int, guard: int) -> None:
    if guard != _guard(length):
        raise ProtocolError("the checksum of a frame's length does not fit")


class FrameReader:
    """Gets the bytes of a stream as they come, gives whole frames. A ProtocolError is the end of the stream."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max  # of one frame; may be changed between calls of `feed`
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        if self._rest:
            self._rest += data
            if not self._has_frame(self._rest):
                return []
            data = bytes(self._rest)
            self._rest = bytearray()
        return self._cut(data)

    def _cut(self, data: bytes) -> list[Frame]:
        frames = []
        view = memoryview(data)
        at, size = 0, len(data)
        while size - at >= HEADER_BYTES:
            length, guard, code, checksum, number = _HEADER.unpack_from(data, at)
            if not _BODY_AT <= length <= self.bytes_max:
                self._check(length)
            _check_guard(length, guard)
            stop = at + _LENGTH_BYTES + length
            if stop > size:
                break
            body = data[at + HEADER_BYTES : stop] if length < SMALL_BYTES else view[at + HEADER_BYTES : stop]
            if xxh3_64_intdigest(body, number << 16 | code) & 0xFFFFFFFF != checksum:
                raise ProtocolError(f"the checksum of frame {number} does not fit")
            frames.append(Frame(number, code, body))
            at = stop
        self._rest += view[at:]
        if self._rest:
            self._has_frame(self._rest)  # a length that cannot be is refused by its first bytes
        return frames

    def _has_frame(self, data: bytearray) -> bool:
        if len(data) < _LENGTH_BYTES:
            return False
        (length,) = _LENGTH.unpack_from(data, 0)
        self._check(length)
        if len(data) < HEADER_BYTES:
            return False
        _check_guard(length, _HEADER.unpack_from(data, 0)[1])
        return bool(len(data) >= _LENGTH_BYTES + length)

    def _check(self, length: int) -> None:
        if length < _BODY_AT:
            raise ProtocolError(f"a frame of {length} bytes is shorter than its header")
        if length > self.bytes_max:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.bytes_max}")
