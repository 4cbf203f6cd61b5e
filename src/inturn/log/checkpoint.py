"""Checkpoints: up to a checkpoint the log was synced and whole. Opening a log scans only the bytes after it."""

from __future__ import annotations

import msgspec

from inturn.log import small_file
from inturn.log.disk import Disk

NAME = "checkpoint"
_MAGIC = b"iTcheck1"


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    segment: int  # the base offset of the segment
    position: int  # in that segment
    next_offset: int
    stored_at_ms: int  # of the last batch before
    producers: bytes


_decoder = msgspec.msgpack.Decoder(Checkpoint)


def save(disk: Disk, folder: str, checkpoint: Checkpoint, seed: int) -> None:
    """Replace the checkpoint; a crash leaves the old one or the new one. Blocks. Raises OSError."""
    small_file.save(disk, folder, NAME, _MAGIC, msgspec.msgpack.encode(checkpoint), seed)


def load(disk: Disk, folder: str, seed: int) -> Checkpoint | None:
    """The checkpoint, or None if the file is missing or not whole: then opening scans the whole log."""
    body = small_file.load(disk, folder, NAME, _MAGIC, seed)
    if body is None:
        return None
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError:
        return None
