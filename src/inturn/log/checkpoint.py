"""The recovery point: up to here the log was synced and whole, so reopening scans only what comes after."""

from __future__ import annotations

import struct

import msgspec
from xxhash import xxh3_64_intdigest

from inturn.log.disk import Disk

NAME = "checkpoint"
_TEMPORARY = "checkpoint.tmp"
_MAGIC = b"iTcheck1"
_CHECKSUM = struct.Struct("<Q")
_PREFIX_BYTES = len(_MAGIC) + _CHECKSUM.size


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    segment: int  # the base offset of the segment
    position: int  # in that segment
    next_offset: int
    stored_at_ms: int  # of the last batch before
    producers: bytes


_decoder = msgspec.msgpack.Decoder(Checkpoint)


def save(disk: Disk, folder: str, checkpoint: Checkpoint, seed: int) -> None:
    """Replace the checkpoint; a crash leaves the old one or the new one. Blocks. Raises OSError."""
    body = msgspec.msgpack.encode(checkpoint)
    temporary = f"{folder}/{_TEMPORARY}"
    if disk.exists(temporary):
        disk.remove(temporary)
    file = disk.open(temporary, create=True)
    try:
        file.write_at(0, [_MAGIC, _CHECKSUM.pack(xxh3_64_intdigest(body, seed)), body])
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, f"{folder}/{NAME}")
    disk.sync_folder(folder)


def load(disk: Disk, folder: str, seed: int) -> Checkpoint | None:
    """The checkpoint, or None if there is none or it is not whole: then everything has to be scanned."""
    path = f"{folder}/{NAME}"
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        data = file.read_at(0, file.size())
    finally:
        file.close()
    if len(data) < _PREFIX_BYTES or not data.startswith(_MAGIC):
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, len(_MAGIC))
    body = data[_PREFIX_BYTES:]
    if xxh3_64_intdigest(body, seed) != checksum:
        return None
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError:
        return None
