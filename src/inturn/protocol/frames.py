"""Frames: the units of a stream between a client and a server.

    length    u32, little endian: the number of bytes that follow
    guard     u16: a checksum of the length
    code      u16: the kind of the body, see `inturn.protocol.codec`
    checksum  u32: the low half of xxh3-64 of the body, seeded with number and code
    number    u32: set by the client, rises; an answer has the number of the command
    body      msgpack

The reader checks the length before buffering the frame, so that no peer can force a large allocation. The length has a
separate checksum: with a damaged length, the reader would take all later frames for a part of that frame, and wait for
the rest while the other end seems to be alive.
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
    body: bytes | memoryview  # a view of the received bytes if large


def frame_of(number: int, code: int, body: bytes) -> bytes:
    """The bytes of one frame, for a FrameReader."""
    length = len(body) + _BODY_AT
    checksum = xxh3_64_intdigest(body, number << 16 | code) & 0xFFFFFFFF
    return _HEADER.pack(length, _guard(length), code, checksum, number) + body


def _guard(length: int) -> int:
    """Changes with any single bit of the length."""
    return length * 0x9E3779B1 >> 16 & 0xFFFF


def _check_guard(length: int, guard: int) -> None:
    if guard != _guard(length):
        raise ProtocolError("the checksum of a frame's length does not fit")


class FrameReader:
    """Makes whole frames of the bytes of a stream. After a ProtocolError the stream cannot be read further."""

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
            self._has_frame(self._rest)  # refuses a wrong length as early as possible
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
