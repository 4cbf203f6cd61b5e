"""Which partition a slot belongs to, in one version of a subject's route."""

from __future__ import annotations

from dataclasses import dataclass, field

from inturn.model.errors import InvalidInput
from inturn.model.slot import SLOT_COUNT, SlotRange

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
class Route:
    """Maps every slot to exactly one of the subject's partitions (which are counted from 0)."""

    subject: str
    version: int
    partitions: tuple[Partition, ...]
    ranges: tuple[SlotRange, ...]
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
