"""A key leads to a slot, a slot to a partition. The slot of a key never changes."""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh64_intdigest

SLOT_COUNT = 1024
# Spark SQL's xxhash64() uses seed 42: pmod(xxhash64(key), 1024) there is the same slot.
_SEED = 42


def key_bytes(key: str | bytes) -> bytes:
    """Keys are equal when their UTF-8 bytes are."""
    return key.encode() if isinstance(key, str) else key


def slot_of(key: bytes) -> int:
    """The slot of a key, 0 to 1023; the same in every language and version."""
    return xxh64_intdigest(key, _SEED) % SLOT_COUNT


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots `start <= slot < stop` belong to the partition with this index."""

    start: int
    stop: int
    partition: int


def even_ranges(partitions: int) -> tuple[SlotRange, ...]:
    """Cut all slots into as many ranges as there are partitions; sizes differ by one at most."""
    cuts = [SLOT_COUNT * index // partitions for index in range(partitions + 1)]
    return tuple(SlotRange(cuts[i], cuts[i + 1], i) for i in range(partitions))
