"""The small files of a log: the checkpoint and the reserve. Each is replaced as a whole: a crash leaves the old file or
the new file.

Up to a **checkpoint** the log was synced and whole. Opening a log scans only the bytes after the checkpoint.

The **reserve** keeps offsets from being used again after a power loss. Where acknowledging does not wait for the disk,
a power loss takes a tail that consumers may have read already. Later messages must not get the same offsets. So the log
records durably and ahead of time up to which offset it may append, and continues behind the record after a restart of
the machine. Without a restart of the machine, written bytes are as safe as synced bytes, and no offset is skipped.
"""

from __future__ import annotations

import struct

import msgspec
from xxhash import xxh3_64_intdigest

from inturn.log.disk import Disk

CHECKPOINT = "checkpoint"
RESERVE = "reserve"
RESERVE_AHEAD_COUNT = 1 << 20
_CHECKPOINT_MAGIC = b"iTcheck1"
_RESERVE_MAGIC = b"iTreser1"
_CHECKSUM = struct.Struct("<Q")


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    segment: int  # the base offset of the segment
    position: int  # in that segment
    next_offset: int
    stored_at_ms: int  # of the last batch before
    producers: bytes


class _Reserve(msgspec.Struct, frozen=True, array_like=True):
    end_offset: int
    boot_id: str  # the run of the machine that wrote the record; empty if unknown


_checkpoint_decoder = msgspec.msgpack.Decoder(Checkpoint)
_reserve_decoder = msgspec.msgpack.Decoder(_Reserve)


def save_checkpoint(disk: Disk, folder: str, checkpoint: Checkpoint, seed: int) -> None:
    """Replace the checkpoint; durable when this returns. Blocks. Raises OSError."""
    _save(disk, folder, CHECKPOINT, _CHECKPOINT_MAGIC, msgspec.msgpack.encode(checkpoint), seed)


def load_checkpoint(disk: Disk, folder: str, seed: int) -> Checkpoint | None:
    """The checkpoint, or None if the file is missing or not whole: then opening scans the whole log."""
    body = _load(disk, folder, CHECKPOINT, _CHECKPOINT_MAGIC, seed)
    if body is None:
        return None
    try:
        return _checkpoint_decoder.decode(body)
    except msgspec.DecodeError:
        return None


def save_reserve(disk: Disk, folder: str, end_offset: int, seed: int) -> None:
    """Record the reserved offsets; durable when this returns. Blocks. Raises OSError."""
    body = msgspec.msgpack.encode(_Reserve(end_offset, disk.boot_id()))
    _save(disk, folder, RESERVE, _RESERVE_MAGIC, body, seed)


def reserve_floor(disk: Disk, folder: str, seed: int) -> int:
    """The lowest offset that was certainly not used before a power loss; 0 without a power loss."""
    body = _load(disk, folder, RESERVE, _RESERVE_MAGIC, seed)
    if body is None:
        return 0
    noted = _reserve_decoder.decode(body)
    is_same_run = noted.boot_id != "" and noted.boot_id == disk.boot_id()
    return 0 if is_same_run else noted.end_offset


def clear_reserve(disk: Disk, folder: str) -> None:
    """Delete the record: all used offsets are synced. Raises OSError."""
    path = f"{folder}/{RESERVE}"
    if disk.exists(path):
        disk.remove(path)
        disk.sync_folder(folder)


def _save(disk: Disk, folder: str, name: str, magic: bytes, body: bytes, seed: int) -> None:
    temporary = f"{folder}/{name}.tmp"
    if disk.exists(temporary):
        disk.remove(temporary)
    file = disk.open(temporary, create=True)
    try:
        file.write_at(0, [magic, _CHECKSUM.pack(xxh3_64_intdigest(body, seed)), body])
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, f"{folder}/{name}")
    disk.sync_folder(folder)


def _load(disk: Disk, folder: str, name: str, magic: bytes, seed: int) -> bytes | None:
    """The body, or None if the file is missing or not whole."""
    path = f"{folder}/{name}"
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        data = file.read_at(0, file.size())
    finally:
        file.close()
    prefix_bytes = len(magic) + _CHECKSUM.size
    if len(data) < prefix_bytes or not data.startswith(magic):
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, len(magic))
    body = data[prefix_bytes:]
    return body if xxh3_64_intdigest(body, seed) == checksum else None
