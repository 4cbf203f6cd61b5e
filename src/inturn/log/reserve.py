"""Reserved offsets: offsets that may have been used are never used again after a power loss.

Where acknowledging does not wait for the disk, a power loss takes a tail that consumers may have read already. Later
messages must not get the same offsets. So the log records durably and ahead of time up to which offset it may append,
and continues behind the record after a restart of the machine. Without a restart of the machine, written bytes are as
safe as synced bytes, and no offset is skipped.
"""

from __future__ import annotations

import msgspec

from inturn.log import small_file
from inturn.log.disk import Disk

NAME = "reserve"
AHEAD_COUNT = 1 << 20
_MAGIC = b"iTreser1"


class Reserve(msgspec.Struct, frozen=True, array_like=True):
    end_offset: int
    boot_id: str  # the run of the machine that wrote the record; empty if unknown


_decoder = msgspec.msgpack.Decoder(Reserve)


def save(disk: Disk, folder: str, end_offset: int, seed: int) -> None:
    """Record the reserved offsets; durable when this returns. Blocks. Raises OSError."""
    body = msgspec.msgpack.encode(Reserve(end_offset, disk.boot_id()))
    small_file.save(disk, folder, NAME, _MAGIC, body, seed)


def floor(disk: Disk, folder: str, seed: int) -> int:
    """The lowest offset that was certainly not used before a power loss; 0 without a power loss."""
    body = small_file.load(disk, folder, NAME, _MAGIC, seed)
    if body is None:
        return 0
    noted = _decoder.decode(body)
    is_same_run = noted.boot_id != "" and noted.boot_id == disk.boot_id()
    return 0 if is_same_run else noted.end_offset


def clear(disk: Disk, folder: str) -> None:
    """Delete the record: all used offsets are synced. Raises OSError."""
    path = f"{folder}/{NAME}"
    if disk.exists(path):
        disk.remove(path)
        disk.sync_folder(folder)
