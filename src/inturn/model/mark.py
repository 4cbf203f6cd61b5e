"""Marks: what tells the messages apart that are handled under one lease.

That is their offset; but a parking lot follows its key to another partition when the subject grows, and its messages
keep the offsets that they had. The mark of such a message has the partition that it was read from in its upper bits.
"""

from __future__ import annotations

_SHIFT = 44  # offsets of one partition stay below that: 17 million million
FOREIGN_MIN = 1 << _SHIFT


def mark_of(partition: int, offset: int, held: int) -> int:
    """The mark of a message among those that are handled under the lease of the partition `held`."""
    return offset if partition == held else (partition + 1) << _SHIFT | offset


def offset_of(mark: int) -> int:
    return mark & FOREIGN_MIN - 1


def place_of(mark: int, held: int) -> tuple[int, int]:
    """Partition and offset."""
    partition = mark >> _SHIFT
    return (partition - 1 if partition else held), offset_of(mark)
