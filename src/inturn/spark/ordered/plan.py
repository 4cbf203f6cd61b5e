"""Plans: divide the backlog of all partitions into tasks of about the same size. `HotKeys` estimates the keys with the
most messages of a backlog.

A task has slices: some slots of a partition, up to an offset. A key has one slot, so one task handles all its messages.
Every slice of a partition reads the whole partition and skips the slots of the other slices. So a partition is divided
only where tasks would be uneven otherwise. Planning is pure: no connection, no clock. `HotKeys` reads samples through a
connection.
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

TOLERANCE = 0.1  # of a task's fair share: a task may exceed its share by so much before a partition is divided


@dataclass(frozen=True, slots=True)
class Slice:
    """Messages of these slots, up to an offset."""

    partition: int
    slots: SlotSet
    until: int


@dataclass(frozen=True, slots=True)
class PartitionBacklog:
    """The unfinished messages of a partition: about `count`, all below `until`. `is_cut`: there are more above."""

    partition: int
    count: int
    until: int
    is_cut: bool = False


def is_divisible(subject: Subject, order: Order) -> bool:
    """Whether several tasks may work on one partition. False if the partition, or all messages without a key, form one
    lane."""
    return order is not Order.PARTITION and (order is Order.NONE or subject.keyless is Keyless.INDEPENDENT)


def plan(
    subject: Subject, order: Order, backlogs: Sequence[PartitionBacklog], task_count: int
) -> list[tuple[Slice, ...]]:
    """The slices of every task: at most `task_count` tasks, and no task without work."""
    backlogs = sorted((one for one in backlogs if one.count > 0), key=lambda one: (-one.count, one.partition))
    if not backlogs:
        return []
    if not is_divisible(subject, order):
        return _whole(backlogs, task_count)
    share = sum(one.count for one in backlogs) / task_count
    tasks: list[list[Slice]] = [[]]
    room = share
    slots_of = _slots_by_partition(subject)
    for one in backlogs:
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
        # The last slice also has all other slots: best-effort sends may have put any slot into this partition.
        rest = ALL_SLOTS if first == 0 else SlotSet(ALL_SLOTS.bits & ~SlotSet.of(slots[:first]).bits)
        tasks[-1].append(Slice(one.partition, rest, one.until))
        room -= left
        if room < TOLERANCE * share and len(tasks) < task_count:
            tasks.append([])
            room = share
    return [tuple(task) for task in tasks if task]


def _whole(backlogs: Sequence[PartitionBacklog], task_count: int) -> list[tuple[Slice, ...]]:
    """Whole partitions: the largest first, always to the task with the smallest load."""
    tasks: list[list[Slice]] = [[] for _ in range(task_count)]
    loads = [0] * task_count
    for one in backlogs:
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
    """Counts keys in samples that start at the group's committed offsets, one partition per sample."""

    def __init__(self, connection: Connection, subject: Subject) -> None:
        self._connection = connection
        self._subject = subject
        self._counts: Counter[bytes] = Counter()
        self._sampled = 0
        self._next = 0
        self._at_s = float("-inf")

    def sample(self, offsets: Mapping[int, int]) -> None:
        """Sample the next partition at its offset, at most once per `SAMPLE_S`."""
        now_s = time.monotonic()
        if now_s - self._at_s < SAMPLE_S or not offsets:
            return
        self._at_s = now_s
        partition = sorted(offsets)[self._next % len(offsets)]
        self._next += 1
        self.read(partition, offsets[partition], SAMPLE_BYTES)

    def read(self, partition: int, offset: int, max_bytes: int) -> int:
        """Count the keys of the messages from `offset` on. Returns the number of messages."""
        try:
            command = Read(self._subject.name, partition, offset, max_bytes)
            pulled = ask(self._connection.node, command, Pulled)
        except InturnError:
            return 0  # a sample is optional
        count = 0
        for batch in pulled.batches:
            with contextlib.suppress(InvalidInput):  # the handling task reports damaged batches
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
