"""Who works on what: from what waits in the partitions to tasks of about the same size. Pure.

A task has slices: some slots of a partition, up to an offset. A key has one slot, so it is in one task. Every slice of
a partition reads past what the others have, so a partition is cut only where tasks would be uneven otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inturn.model.settings import Keyless, Order, Routing
from inturn.model.slot import ALL_SLOTS, SlotSet
from inturn.model.subject import Subject

TOLERANCE = 0.1  # of a task's fair share: what it may have more, before a partition is cut


@dataclass(frozen=True, slots=True)
class Slice:
    """Messages of these slots, up to an offset."""

    partition: int
    slots: SlotSet
    until: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is to be done of a partition: about so many messages, all below `until`. `is_cut`: there is more."""

    partition: int
    count: int
    until: int
    is_cut: bool = False


def is_divisible(subject: Subject, order: Order) -> bool:
    """Whether several tasks may work on one partition: not where all of it, or all without a key, is one lane."""
    return order is not Order.PARTITION and (order is Order.NONE or subject.keyless is Keyless.INDEPENDENT)


def plan(subject: Subject, order: Order, waiting: Sequence[Waiting], task_count: int) -> list[tuple[Slice, ...]]:
    """The slices of each task; no more tasks than asked for, and none without work."""
    waiting = sorted((one for one in waiting if one.count > 0), key=lambda one: (-one.count, one.partition))
    if not waiting:
        return []
    if not is_divisible(subject, order):
        return _whole(waiting, task_count)
    share = sum(one.count for one in waiting) / task_count
    tasks: list[list[Slice]] = [[]]
    room = share
    slots_of = _slots_by_partition(subject)
    for one in waiting:
        slots = slots_of[one.partition]
        left, first = float(one.count), 0
        while left > room + TOLERANCE * share and len(tasks) < task_count and len(slots) - first > 1:
            taken = round(len(slots) * room / one.count)
            if taken > 0:
                taken = min(taken, len(slots) - first - 1)
                tasks[-1].append(Slice(one.partition, SlotSet.of(slots[first : first + taken]), one.until))
                first += taken
                left -= room
            tasks.append([])
            room = share
        # The last one also has all other slots: where best effort went elsewhere, any may be here.
        rest = ALL_SLOTS if first == 0 else SlotSet(ALL_SLOTS.bits & ~SlotSet.of(slots[:first]).bits)
        tasks[-1].append(Slice(one.partition, rest, one.until))
        room -= left
        if room < TOLERANCE * share and len(tasks) < task_count:
            tasks.append([])
            room = share
    return [tuple(task) for task in tasks if task]


def _whole(waiting: Sequence[Waiting], task_count: int) -> list[tuple[Slice, ...]]:
    """The largest first, each to the task that has least."""
    tasks: list[list[Slice]] = [[] for _ in range(task_count)]
    loads = [0] * task_count
    for one in waiting:
        lightest = loads.index(min(loads))
        tasks[lightest].append(Slice(one.partition, ALL_SLOTS, one.until))
        loads[lightest] += one.count
    return [tuple(task) for task in tasks if task]


def _slots_by_partition(subject: Subject) -> Mapping[int, Sequence[int]]:
    if subject.routing is not Routing.SLOTS:
        return {index: range(len(subject.route.by_slot)) for index in range(subject.partition_count)}
    return {index: list(subject.route.slots_in(index)) for index in range(subject.partition_count)}
