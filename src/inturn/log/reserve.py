"""Offsets that may have been given out: after a power loss none of them is given out again.

Where acknowledging does not wait for the disk, a power loss takes a tail that others have read already. What came
after it must not get the same offsets. So the log notes, ahead of time and durably, up to where it will give them
out, and goes on behind that if the machine was started anew in between. As long as it was not, written is as good
as synced, and nothing has to be skipped.
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
    boot_id: str  # of the machine's run in which it was noted; empty if unknown


_decoder = msgspec.msgpack.Decoder(Reserve)


def save(disk: Disk, folder: str, end_offset: int, seed: int) -> None:
    """Durable when this returns. Blocks. Raises OSError."""
    body = msgspec.msgpack.encode(Reserve(end_offset, disk.boot_id()))
    small_file.save(disk, folder, NAME, _MAGIC, body, seed)


def floor(disk: Disk, folder: str, seed: int) -> int:
    """The lowest offset that certainly was not given out before a power loss; 0 if there was none."""
    body = small_file.load(disk, folder, NAME, _MAGIC, seed)
    if body is None:
        return 0
    noted = _decoder.decode(body)
    is_same_run = noted.boot_id != "" and noted.boot_id == disk.boot_id()
    return 0 if is_same_run else noted.end_offset


def clear(disk: Disk, folder: str) -> None:
    """Everything given out is synced. Raises OSError."""
    path = f"{folder}/{NAME}"
    if disk.exists(path):
        disk.remove(path)
        disk.sync_folder(folder)
