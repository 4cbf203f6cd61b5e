"""A key leads to a slot, a slot to a partition. The slot of a key never changes.

Which partition a slot belongs to, in one version of a subject's route, and which it belonged to before.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


PARTITION_COUNT_MAX = SLOT_COUNT


def check_partition_count(subject: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= PARTITION_COUNT_MAX:
        raise InvalidInput(
            f"subject {subject!r} with {count!r} partitions: use a whole number from 1 to {PARTITION_COUNT_MAX}"
        )


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """A log in a broker group. The name is given by us and says nothing about the subject."""

    broker_group: str
    name: str

    def __str__(self) -> str:
        return f"{self.broker_group}/{self.name}"


@dataclass(frozen=True, slots=True)
class Descent:
    """Slots that went from a parent to a child when the subject grew.

    Nothing of them is in the parent at or above the barrier, and nothing is in the child that is not newer.
    """

    child: int
    parent: int
    slots: bytes  # a SlotSet
    barrier: int

    def has(self, slot: int) -> bool:
        return slot in SlotSet.from_bytes(self.slots)


@dataclass(frozen=True, slots=True)
class Route:
    """Maps every slot to exactly one of the subject's partitions (which are counted from 0)."""

    subject: str
    version: int
    partitions: tuple[Partition, ...]
    ranges: tuple[SlotRange, ...]
    descents: tuple[Descent, ...] = ()  # in the order in which the slots moved
    by_slot: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_slot = [-1] * SLOT_COUNT
        for slots in self.ranges:
            if not 0 <= slots.start < slots.stop <= SLOT_COUNT or not 0 <= slots.partition < len(self.partitions):
                raise InvalidInput(f"route of {self.subject!r}: {slots} is outside the slots or the partitions")
            for slot in range(slots.start, slots.stop):
                if by_slot[slot] != -1:
                    raise InvalidInput(f"route of {self.subject!r}: slot {slot} belongs to two partitions")
                by_slot[slot] = slots.partition
        if -1 in by_slot:
            raise InvalidInput(f"route of {self.subject!r}: slot {by_slot.index(-1)} belongs to no partition")
        object.__setattr__(self, "by_slot", tuple(by_slot))

    def descents_of(self, child: int) -> tuple[Descent, ...]:
        """Where the slots of a partition came from; none if it was there from the beginning."""
        return tuple(one for one in self.descents if one.child == child)

    def descents_from(self, parent: int) -> tuple[Descent, ...]:
        """Where slots of a partition went."""
        return tuple(one for one in self.descents if one.parent == parent)

    def lineage(self, slot: int) -> tuple[int, ...]:
        """The partitions that messages of a slot may be in, the oldest messages first."""
        found = [self.by_slot[slot]]
        for one in reversed(self.descents):
            if one.child == found[0] and one.has(slot):
                found.insert(0, one.parent)
        return tuple(found)

    def grown(self, partition_count: int, barriers: Mapping[int, int]) -> Route:
        """The next version, with more partitions. `barriers` are the ends of the parents, sealed.

        A child is in the broker group of its parents: whoever has their logs decides when it opens.
        """
        homes = [one.broker_group for one in self.partitions]
        children = children_of(homes, self.by_slot, partition_count)
        by_slot = grown_slots(self.by_slot, partition_count, [*homes, *children])
        moved: dict[tuple[int, int], list[int]] = {}
        for slot, child in enumerate(by_slot):
            if child != self.by_slot[slot]:
                moved.setdefault((child, self.by_slot[slot]), []).append(slot)
        new = [
            Descent(child, parent, SlotSet.of(slots).to_bytes(), barriers[parent])
            for (child, parent), slots in sorted(moved.items())
        ]
        added = tuple(Partition(broker_group, "") for broker_group in children)
        return Route(
            self.subject,
            self.version + 1,
            (*self.partitions, *added),
            ranges_of(by_slot),
            (*self.descents, *new),
        )

    def slots_in(self, partition: int) -> SlotSet:
        """The slots of which there may be messages in a partition: those it has, and those it had."""
        bits = sum(1 << slot for slot, owner in enumerate(self.by_slot) if owner == partition)
        for one in self.descents_from(partition):
            bits |= SlotSet.from_bytes(one.slots).bits
        return SlotSet(bits)


def children_of(homes: Sequence[str], by_slot: Sequence[int], partition_count: int) -> list[str]:
    """The broker groups of the partitions that are added: each goes where a partition has most slots by then."""
    slot_counts = Counter(homes[partition] for partition in by_slot)
    partition_counts = Counter(homes)
    children = []
    for _ in range(partition_count - len(homes)):
        fullest = max(dict.fromkeys(homes), key=lambda home: slot_counts[home] / partition_counts[home])
        partition_counts[fullest] += 1
        children.append(fullest)
    return children


def grown_slots(by_slot: Sequence[int], partition_count: int, homes: Sequence[str] = ()) -> list[int]:
    """The partition of every slot when there are more partitions: each gives away what is over an even share, the
    last of its slots first, and the new ones get even shares of that. No slot moves to a partition that was there, nor
    to another broker group. `homes` are the broker groups of all partitions; one and the same unless given."""
    homes = homes or [""] * partition_count
    before = max(by_slot) + 1
    grown = list(by_slot)
    for home in dict.fromkeys(homes):
        parents = [partition for partition in range(before) if homes[partition] == home]
        children = [partition for partition in range(before, partition_count) if homes[partition] == home]
        if children:
            _give(grown, parents, children)
    return grown


def _give(by_slot: list[int], parents: Sequence[int], children: Sequence[int]) -> None:
    owned: dict[int, list[int]] = {partition: [] for partition in parents}
    for slot, partition in enumerate(by_slot):
        if partition in owned:
            owned[partition].append(slot)
    share, larger = divmod(sum(map(len, owned.values())), len(parents) + len(children))
    given = []
    for rank, partition in enumerate(parents):
        given += owned[partition][share + (rank < larger) :]
    for place, slot in enumerate(sorted(given)):
        by_slot[slot] = children[place * len(children) // len(given)]


def ranges_of(by_slot: Sequence[int]) -> tuple[SlotRange, ...]:
    """The same as ranges, each as long as can be."""
    cuts = [slot for slot in range(1, SLOT_COUNT) if by_slot[slot] != by_slot[slot - 1]]
    return tuple(
        SlotRange(start, stop, by_slot[start]) for start, stop in zip([0, *cuts], [*cuts, SLOT_COUNT], strict=True)
    )
