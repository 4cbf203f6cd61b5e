"""Routing of keys: a key has a slot, and a slot belongs to a partition. The slot of a key never changes.

A route is one version of a subject's slot table: the partition of every slot, and its earlier partitions.
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
    """The bytes of a key. Two keys are equal when their UTF-8 bytes are equal."""
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
    """Divide all slots into one range per partition; sizes differ by at most 1."""
    cuts = [SLOT_COUNT * index // partitions for index in range(partitions + 1)]
    return tuple(SlotRange(cuts[i], cuts[i + 1], i) for i in range(partitions))


@dataclass(frozen=True, slots=True)
class SlotSet:
    """A set of slots. As bytes: slot s is bit s % 8 of byte s // 8; no bytes stand for all slots."""

    bits: int
    flags: bytes = field(init=False, repr=False, compare=False)  # by slot: 1 if the slot is in the set

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
            raise InvalidInput(f"a set of slots in {len(data)} bytes: send {SLOT_COUNT // 8}, or none for all slots")
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
    """A log in a broker group. inturn makes the name; the name does not contain the subject."""

    broker_group: str
    name: str

    def __str__(self) -> str:
        return f"{self.broker_group}/{self.name}"


@dataclass(frozen=True, slots=True)
class Descent:
    """Slots that moved from a parent partition to a child partition when the subject grew.

    In the parent, all messages of these slots are below the barrier. In the child, all messages of these slots are
    newer than those of the parent.
    """

    child: int
    parent: int
    slots: bytes  # a SlotSet
    barrier: int

    def has(self, slot: int) -> bool:
        return slot in SlotSet.from_bytes(self.slots)


@dataclass(frozen=True, slots=True)
class Route:
    """Maps every slot to exactly one partition of the subject (partitions are counted from 0)."""

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
        """The descents that gave slots to a partition; empty for a partition that existed from the beginning."""
        return tuple(one for one in self.descents if one.child == child)

    def descents_from(self, parent: int) -> tuple[Descent, ...]:
        """The descents that took slots from a partition."""
        return tuple(one for one in self.descents if one.parent == parent)

    def lineage(self, slot: int) -> tuple[int, ...]:
        """The partitions that may hold messages of a slot, in the order of the messages' age, oldest first."""
        found = [self.by_slot[slot]]
        for one in reversed(self.descents):
            if one.child == found[0] and one.has(slot):
                found.insert(0, one.parent)
        return tuple(found)

    def grown(self, partition_count: int, barriers: Mapping[int, int]) -> Route:
        """The next version, with more partitions. `barriers` are the end offsets of the sealed parents.

        A child is in the broker group of its parents: the broker of the parents' logs decides when the child opens.
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
        """The slots whose messages a partition may hold: its present slots and its former slots."""
        bits = sum(1 << slot for slot, owner in enumerate(self.by_slot) if owner == partition)
        for one in self.descents_from(partition):
            bits |= SlotSet.from_bytes(one.slots).bits
        return SlotSet(bits)


def children_of(homes: Sequence[str], by_slot: Sequence[int], partition_count: int) -> list[str]:
    """The broker groups of the added partitions, in order: always the group with the most slots per partition."""
    slot_counts = Counter(homes[partition] for partition in by_slot)
    partition_counts = Counter(homes)
    children = []
    for _ in range(partition_count - len(homes)):
        fullest = max(dict.fromkeys(homes), key=lambda home: slot_counts[home] / partition_counts[home])
        partition_counts[fullest] += 1
        children.append(fullest)
    return children


def grown_slots(by_slot: Sequence[int], partition_count: int, homes: Sequence[str] = ()) -> list[int]:
    """The partition of every slot after growth to `partition_count` partitions.

    An old partition keeps an even share and gives up its last slots. The new partitions share the given slots evenly.
    No slot moves to an old partition or to a different broker group. `homes` are the broker groups of all partitions;
    without `homes`, all partitions are in the same broker group.
    """
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
    """The slot table as ranges, as few as possible."""
    cuts = [slot for slot in range(1, SLOT_COUNT) if by_slot[slot] != by_slot[slot - 1]]
    return tuple(
        SlotRange(start, stop, by_slot[start]) for start, stop in zip([0, *cuts], [*cuts, SLOT_COUNT], strict=True)
    )
