"""Who works on what: from what waits in the partitions to tasks of about the same size. Pure.

A task has slices: some slots of a partition, up to an offset. A key has one slot, so it is in one task. Every slice of
a partition reads past what the others have, so a partition is cut only where tasks would be uneven otherwise.

Which keys most of a backlog belongs to, from samples of what comes next.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inturn.client import Connection
from inturn.model.batch import decode, is_intact
from inturn.model.errors import InturnError, InvalidInput
from inturn.model.message import Origin
from inturn.model.routing import ALL_SLOTS, SlotSet
from inturn.model.settings import KIB, Keyless, Order, Routing
from inturn.model.subject import Subject
from inturn.protocol.commands import Pulled, Read
from inturn.protocol.request import ask

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


SAMPLE_S = 1.0
SAMPLE_BYTES = 64 * KIB
SHOWN = 5


@dataclass(frozen=True, slots=True)
class HotKey:
    key: str
    share: float  # of the sampled messages


class HotKeys:
    """Reads a little at where the group is, a partition at a time, and counts."""

    def __init__(self, connection: Connection, subject: Subject) -> None:
        self._connection = connection
        self._subject = subject
        self._counts: Counter[bytes] = Counter()
        self._sampled = 0
        self._next = 0
        self._at_s = float("-inf")

    def sample(self, places: Mapping[int, int]) -> None:
        """One partition, if it is time; its offsets by partition are where to look."""
        now_s = time.monotonic()
        if now_s - self._at_s < SAMPLE_S or not places:
            return
        self._at_s = now_s
        partition = sorted(places)[self._next % len(places)]
        self._next += 1
        self.read(partition, places[partition], SAMPLE_BYTES)

    def read(self, partition: int, offset: int, max_bytes: int) -> int:
        """Count what is stored from there on; how many messages that were."""
        try:
            command = Read(self._subject.name, partition, offset, max_bytes)
            pulled = ask(self._connection.node, command, Pulled)
        except InturnError:
            return 0  # it is only a look
        count = 0
        for batch in pulled.batches:
            with contextlib.suppress(InvalidInput):  # whoever handles them will tell
                messages = decode(batch, Origin(self._subject.name, partition)) if is_intact(batch) else []
                self._counts.update([one.key for one in messages if one.key is not None])
                count += len(messages)
        self._sampled += count
        return count

    def top(self) -> tuple[HotKey, ...]:
        return tuple(
            HotKey(key.decode(errors="backslashreplace"), count / self._sampled)
            for key, count in self._counts.most_common(SHOWN)
            if count > 1
        )
