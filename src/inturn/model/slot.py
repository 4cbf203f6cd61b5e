"""A key leads to a slot, a slot to a partition. The slot of a key never changes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from xxhash import xxh64_intdigest

from inturn.model.errors import InvalidInput

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


@dataclass(frozen=True, slots=True)
class SlotSet:
    """Some of the slots. As bytes: one bit for each, that of slot s is bit s % 8 of byte s // 8; empty for all."""

    bits: int
    flags: bytes = field(init=False, repr=False, compare=False)  # by slot, 1 if it is in the set

    def __post_init__(self) -> None:
        flags = bytes(self.bits >> slot & 1 for slot in range(SLOT_COUNT))
        object.__setattr__(self, "flags", flags)

    @classmethod
    def of(cls, slots: Iterable[int]) -> SlotSet:
        bits = 0
        for slot in slots:
            if not 0 <= slot < SLOT_COUNT:
                raise InvalidInput(f"slot {slot}: there are slots 0 to {SLOT_COUNT - 1}")
            bits |= 1 << slot
        return cls(bits)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def from_bytes(cls, data: bytes) -> SlotSet:
        if not data:
            return ALL_SLOTS
        if len(data) != SLOT_COUNT // 8:
            raise InvalidInput(f"a set of slots in {len(data)} bytes: it has {SLOT_COUNT // 8}, or none for all slots")
        return cls(int.from_bytes(data, "little"))

    def to_bytes(self) -> bytes:
        return b"" if self.is_all else self.bits.to_bytes(SLOT_COUNT // 8, "little")

    @property
    def is_all(self) -> bool:
        return self.bits == _ALL_BITS

    def __contains__(self, slot: int) -> bool:
        return bool(self.bits >> slot & 1)

    def __iter__(self) -> Iterator[int]:
        return (slot for slot in range(SLOT_COUNT) if self.flags[slot])

    def __len__(self) -> int:
        return self.bits.bit_count()

    def overlaps(self, other: SlotSet) -> bool:
        return bool(self.bits & other.bits)


_ALL_BITS = (1 << SLOT_COUNT) - 1
ALL_SLOTS = SlotSet(_ALL_BITS)
