"""Small files that are replaced as a whole: a crash leaves the old file or the new file."""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

from inturn.log.disk import Disk

_CHECKSUM = struct.Struct("<Q")


def save(disk: Disk, folder: str, name: str, magic: bytes, body: bytes, seed: int) -> None:
    """Replace the file; durable when this returns. Blocks. Raises OSError."""
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


def load(disk: Disk, folder: str, name: str, magic: bytes, seed: int) -> bytes | None:
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
