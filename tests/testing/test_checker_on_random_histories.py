"""Random legal histories must pass; the same with one thing made wrong must not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inturn.testing.checker import ViolationKind, check
from inturn.testing.history import (
    Committed,
    ConsumerCrashed,
    Event,
    HandlerEnd,
    HandlerResult,
    HandlerStart,
    LeaseEnd,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)

Order: TypeAlias = Literal["partition", "key"]
LaneKey: TypeAlias = bytes | int | None
SEEDS = range(60)


@dataclass(eq=False)
class Run:
    offset: int
    epoch: int
    consumer: str
    lane: LaneKey


@dataclass
class Holder:
    """What the owner of a lease knows: which messages of each lane are still to be run, and which are finished."""

    consumer: str
    epoch: int
    done: set[int]
    waiting: dict[LaneKey, list[int]] = field(default_factory=dict)
    running: dict[LaneKey, Run] = field(default_factory=dict)


class Partition:
    """A correct system, as simple as it can be: one partition of one group."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.dice = world, number, world.dice
        offset = 0
        self.keys: dict[int, bytes | None] = {}
        for _ in range(self.dice.randint(4, 25)):
            self.keys[offset] = self.dice.choice([b"x", b"y", b"z", None])
            offset += self.dice.choice([1, 1, 1, 3])
        self.acknowledgements = [offset for offset in self.keys if self.dice.random() < 0.9]
        self.committed = self.floor = self.epoch = 0
        self.finished: set[int] = set()  # by anybody, since the last reset
        self.holder: Holder | None = None
        self.leftovers: list[Run] = []

    def lane(self, offset: int) -> LaneKey:
        if self.world.order == "partition":
            return None
        key = self.keys[offset]
        return offset if key is None else key

    def step(self, faults: bool) -> None:
        if self.acknowledgements and self.dice.random() < 0.5:
            self.acknowledge()
        if self.leftovers and self.dice.random() < 0.3:
            run = self.leftovers.pop(self.dice.randrange(len(self.leftovers)))
            self.end(run, self.dice.choice(["success", "failed", "exception"]))
        elif self.holder is None:
            if faults and self.dice.random() < 0.1:
                self.reset()
            self.grant()
        else:
            self.work(self.holder, faults)

    def acknowledge(self) -> None:
        offset = self.acknowledgements.pop(0)
        self.world.add(SendAcknowledged("s", self.number, offset, self.keys[offset], self.name(offset)))

    def name(self, offset: int) -> str:
        return f"{self.number}@{offset}"

    def reset(self) -> None:
        self.floor = self.committed = self.dice.choice(list(self.keys))
        self.finished = set()
        self.world.add(OffsetsReset("s", "g", {self.number: self.floor}))

    def grant(self) -> None:
        self.epoch += self.dice.choice([1, 1, 2])
        consumer = self.dice.choice(self.world.consumers)
        done = set(self.finished) if self.dice.random() < 0.5 else set()
        self.holder = holder = Holder(consumer, self.epoch, done)
        for offset in self.keys:
            if offset >= self.committed and offset not in done:
                holder.waiting.setdefault(self.lane(offset), []).append(offset)
        self.world.add(LeaseGranted("s", "g", self.number, consumer, self.epoch))

    def work(self, holder: Holder, faults: bool) -> None:
        dice = self.dice.random()
        ready = [lane for lane, offsets in holder.waiting.items() if offsets and lane not in holder.running]
        if faults and dice < 0.04:
            self.lose(dice < 0.02)
        elif dice < 0.12:
            self.commit(holder)
        elif holder.running and (dice < 0.55 or not ready):
            lane = self.dice.choice(list(holder.running))
            self.finish(holder, holder.running.pop(lane), faults)
        elif ready:
            self.start(holder, self.dice.choice(ready))

    def start(self, holder: Holder, lane: LaneKey) -> None:
        offset = holder.waiting[lane].pop(0)
        holder.running[lane] = Run(offset, holder.epoch, holder.consumer, lane)
        place = ("s", "g", self.number, offset, self.keys[offset], holder.consumer, holder.epoch)
        self.world.add(HandlerStart(*place, self.name(offset)))

    def end(self, run: Run, result: HandlerResult) -> None:
        place = ("s", "g", self.number, run.offset, self.keys[run.offset], run.consumer, run.epoch)
        self.world.add(HandlerEnd(*place, self.name(run.offset), result))
        if result in ("success", "moved"):
            self.finished.add(run.offset)

    def finish(self, holder: Holder, run: Run, faults: bool) -> None:
        results: list[HandlerResult] = ["success", "success", "success", "moved", "failed", "exception", "rollback"]
        result = self.dice.choice(results) if faults else "success"
        self.end(run, result)
        if result in ("success", "moved"):
            holder.done.add(run.offset)
        elif result == "rollback":
            self.roll_back(holder, run)
        else:
            holder.waiting[run.lane].insert(0, run.offset)

    def roll_back(self, holder: Holder, run: Run) -> None:
        again = [o for o in self.keys if self.committed <= o <= run.offset and self.lane(o) == run.lane]
        again = again[self.dice.randrange(len(again)) :]
        holder.waiting[run.lane] = again + holder.waiting[run.lane]
        holder.done.difference_update(again)

    def commit(self, holder: Holder) -> None:
        unfinished = (o for o in self.keys if o >= self.committed and o not in holder.done)
        self.committed = max(self.committed, next(unfinished, max(self.keys) + 1))
        self.world.add(Committed("s", "g", self.number, holder.consumer, holder.epoch, self.committed))

    def lose(self, politely: bool) -> None:
        holder = self.holder
        assert holder is not None
        if politely:
            for run in list(holder.running.values()):
                self.finish(holder, run, faults=False)
            self.commit(holder)
        self.leftovers += [] if politely else holder.running.values()
        self.end_lease("released" if politely else "expired")

    def end_lease(self, why: LeaseEnd) -> None:
        assert self.holder is not None
        self.world.add(LeaseEnded("s", "g", self.number, self.holder.consumer, self.holder.epoch, why))
        self.holder = None

    def consumer_died(self, consumer: str) -> None:
        self.leftovers = [run for run in self.leftovers if run.consumer != consumer]
        if self.holder is not None and self.holder.consumer == consumer:
            self.end_lease("gone")

    @property
    def complete(self) -> bool:
        holder = self.holder
        at_rest = holder is not None and not holder.running and not any(holder.waiting.values())
        return at_rest and not self.leftovers and not self.acknowledgements


class World:
    def __init__(self, seed: int, order: Order) -> None:
        self.dice = random.Random(seed)
        self.order = order
        self.events: list[Event] = []
        self.consumers = ["a", "b", "c"]
        self.births = 0
        self.partitions = [Partition(self, number) for number in range(self.dice.randint(1, 3))]

    def add(self, event: Event) -> None:
        self.events.append(event)

    def crash(self) -> None:
        consumer = self.consumers.pop(self.dice.randrange(len(self.consumers)))
        self.births += 1
        self.consumers.append(f"{consumer[0]}{self.births}")
        self.add(ConsumerCrashed(consumer))
        if self.dice.random() < 0.3:
            self.add(ProcessRestarted())
        for partition in self.partitions:
            partition.consumer_died(consumer)

    def live(self) -> list[Event]:
        for _ in range(self.dice.randint(50, 300)):
            if self.dice.random() < 0.02:
                self.crash()
            self.dice.choice(self.partitions).step(faults=True)
        for partition in self.partitions:
            while not partition.complete:
                partition.step(faults=False)
            assert partition.holder is not None
            partition.commit(partition.holder)
        return self.events

    def stored(self) -> dict[tuple[str, int, int], str | None]:
        return {("s", p.number, offset): p.name(offset) for p in self.partitions for offset in p.keys}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.sampled_from(["partition", "key"]))
def test_every_legal_history_passes(seed: int, order: Order) -> None:
    world = World(seed, order)
    events = world.live()
    check(events, order=order).raise_if_bad()
    check(events, order=order, stored=world.stored()).raise_if_bad()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.sampled_from(["partition", "key"]), share=st.floats(0, 1))
def test_every_beginning_of_a_legal_history_passes_as_incomplete(seed: int, order: Order, share: float) -> None:
    events = World(seed, order).live()
    check(events[: int(share * len(events))], order=order, complete=False).raise_if_bad()


def test_legal_histories_have_what_makes_checking_hard() -> None:
    verdicts = [check(World(seed, "key").live(), order="key") for seed in SEEDS]
    assert sum(verdict.overlaps_after_lease_loss for verdict in verdicts) > 10
    assert sum(verdict.duplicates for verdict in verdicts) > 100
    assert sum(verdict.lease_grants for verdict in verdicts) > 3 * len(verdicts)


# Mutations: each finds the places where it must do harm, chooses one, and gives the spoilt history.


@dataclass
class Subject:
    events: list[Event]
    order: Order
    dice: random.Random

    def lane(self, event: HandlerStart | HandlerEnd) -> tuple[int, LaneKey]:
        if self.order == "partition":
            return event.partition, None
        return event.partition, event.offset if event.key is None else event.key

    def starts(self) -> Iterator[tuple[int, HandlerStart]]:
        return ((index, event) for index, event in enumerate(self.events) if isinstance(event, HandlerStart))

    def neighbours(self) -> Iterator[tuple[int, int]]:
        """Indexes of starts that follow each other in one lane and epoch."""
        last: dict[object, int] = {}
        for index, start in self.starts():
            place = (self.lane(start), start.epoch)
            if place in last:
                yield last[place], index
            last[place] = index

    def end_of(self, start_index: int) -> int | None:
        start = self.events[start_index]
        assert isinstance(start, HandlerStart)
        for index in range(start_index + 1, len(self.events)):
            event = self.events[index]
            if isinstance(event, HandlerEnd) and _place(event) == _place(start):
                return index
            if isinstance(event, ConsumerCrashed) and event.consumer == start.consumer:
                return None
        return None

    def acknowledged(self) -> set[tuple[int, int]]:
        return {(e.partition, e.offset) for e in self.events if isinstance(e, SendAcknowledged)}

    def without(self, *indexes: int) -> list[Event]:
        return [event for index, event in enumerate(self.events) if index not in indexes]

    def with_changed(self, index: int, **changes: object) -> list[Event]:
        events = list(self.events)
        events[index] = msgspec.structs.replace(events[index], **changes)
        return events


Mutation: TypeAlias = Callable[[Subject], list[Event] | None]


def _place(event: HandlerStart | HandlerEnd) -> tuple[int, int, str, int]:
    return event.partition, event.offset, event.consumer, event.epoch


def _choose(subject: Subject, places: list[int]) -> int | None:
    return subject.dice.choice(places) if places else None


def swap_two_starts(subject: Subject) -> list[Event] | None:
    events = subject.events
    rising = [pair for pair in subject.neighbours() if events[pair[0]].offset < events[pair[1]].offset]  # type: ignore[union-attr]
    if not rising:
        return None
    one, other = subject.dice.choice(rising)
    events = list(events)
    events[one], events[other] = events[other], events[one]
    return events


def drop_an_end(subject: Subject) -> list[Event] | None:
    ends = [end for one, _ in subject.neighbours() if (end := subject.end_of(one)) is not None]
    index = _choose(subject, ends)
    return None if index is None else subject.without(index)


def repeat_a_finished_message(subject: Subject) -> list[Event] | None:
    events = subject.events
    done: list[tuple[int, int]] = []
    for start, _ in subject.starts():
        end = subject.end_of(start)
        event = None if end is None else events[end]
        if end is not None and isinstance(event, HandlerEnd) and event.result == "success":
            outlived_its_lease = any(isinstance(between, LeaseEnded) for between in events[start:end])
            done += [] if outlived_its_lease else [(start, end)]
    if not done:
        return None
    start, end = subject.dice.choice(done)
    return [*events[: end + 1], events[start], events[end], *events[end + 1 :]]


def move_a_commit_forward(subject: Subject) -> list[Event] | None:
    acknowledged = subject.acknowledged()
    if any(isinstance(event, OffsetsReset) for event in subject.events):
        return None
    finished: set[tuple[int, int]] = set()
    places: list[tuple[int, int]] = []
    for index, event in enumerate(subject.events):
        if isinstance(event, HandlerEnd) and event.result in ("success", "moved"):
            finished.add((event.partition, event.offset))
        elif isinstance(event, Committed):
            open_ = [o for p, o in acknowledged - finished if p == event.partition]
            places += [(index, offset + 1) for offset in open_]
    if not places:
        return None
    index, offset = subject.dice.choice(places)
    return subject.with_changed(index, offset=offset)


def lower_the_epoch_of_a_start(subject: Subject) -> list[Event] | None:
    index = _choose(subject, [index for index, _ in subject.starts()])
    return None if index is None else subject.with_changed(index, epoch=0)


def raise_the_epoch_of_a_start(subject: Subject) -> list[Event] | None:
    index = _choose(subject, [index for index, _ in subject.starts()])
    return None if index is None else subject.with_changed(index, epoch=1000)


def grant_an_epoch_again(subject: Subject) -> list[Event] | None:
    seen: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for index, event in enumerate(subject.events):
        if isinstance(event, LeaseGranted):
            if event.partition in seen:
                places.append((index, seen[event.partition]))
            seen[event.partition] = event.epoch
    if not places:
        return None
    index, epoch = subject.dice.choice(places)
    return subject.with_changed(index, epoch=epoch)


def forget_the_end_of_a_lease(subject: Subject) -> list[Event] | None:
    ends = [index for index, event in enumerate(subject.events) if isinstance(event, LeaseEnded)]
    index = _choose(subject, ends)
    return None if index is None else subject.without(index)


def commit_after_the_lease_ended(subject: Subject) -> list[Event] | None:
    places: list[tuple[int, int]] = []
    for end, event in enumerate(subject.events):
        if isinstance(event, LeaseEnded):
            places += [
                (index, end)
                for index, commit in enumerate(subject.events[:end])
                if isinstance(commit, Committed) and (commit.partition, commit.epoch) == (event.partition, event.epoch)
            ]
    if not places:
        return None
    index, end = subject.dice.choice(places)
    events = subject.without(index)
    return [*events[:end], subject.events[index], *events[end:]]


def commit_as_somebody_else(subject: Subject) -> list[Event] | None:
    index = _choose(subject, [i for i, event in enumerate(subject.events) if isinstance(event, Committed)])
    return None if index is None else subject.with_changed(index, owner="nobody")


def commit_in_an_older_epoch(subject: Subject) -> list[Event] | None:
    index = _choose(subject, [i for i, event in enumerate(subject.events) if isinstance(event, Committed)])
    return None if index is None else subject.with_changed(index, epoch=0)


def lose_a_message(subject: Subject) -> list[Event] | None:
    floor = {p: o for e in subject.events if isinstance(e, OffsetsReset) for p, o in e.offsets.items()}
    candidates = sorted((p, o) for p, o in subject.acknowledged() if o >= floor.get(p, 0))
    if not candidates:
        return None
    lost = subject.dice.choice(candidates)
    handled = (HandlerStart, HandlerEnd)
    return [e for e in subject.events if not (isinstance(e, handled) and (e.partition, e.offset) == lost)]


def hand_out_another_message(subject: Subject) -> list[Event] | None:
    acknowledged = subject.acknowledged()
    starts = [index for index, start in subject.starts() if (start.partition, start.offset) in acknowledged]
    index = _choose(subject, starts)
    return None if index is None else subject.with_changed(index, message_id="another")


def start_again_below_a_commit(subject: Subject) -> list[Event] | None:
    places: list[tuple[int, Committed, HandlerStart]] = []
    for index, event in enumerate(subject.events):
        if isinstance(event, Committed):
            below = [
                start
                for _, start in subject.starts()
                if start.partition == event.partition and start.offset < event.offset
            ]
            places += [(index, event, start) for start in below[-1:]]
    if not places:
        return None
    index, commit, start = subject.dice.choice(places)
    lease = ("s", "g", commit.partition)
    again: list[Event] = [
        LeaseEnded(*lease, commit.owner, commit.epoch, "expired"),
        LeaseGranted(*lease, "late", 1000),
        msgspec.structs.replace(start, consumer="late", epoch=1000),
    ]
    return [*subject.events[: index + 1], *again]


MUTATIONS: list[tuple[Mutation, ViolationKind]] = [
    (swap_two_starts, ViolationKind.OUT_OF_ORDER),
    (drop_an_end, ViolationKind.OVERLAP),
    (repeat_a_finished_message, ViolationKind.OUT_OF_ORDER),
    (move_a_commit_forward, ViolationKind.PREMATURE_COMMIT),
    (lower_the_epoch_of_a_start, ViolationKind.STALE_START),
    (raise_the_epoch_of_a_start, ViolationKind.STALE_START),
    (grant_an_epoch_again, ViolationKind.EPOCH_NOT_RAISED),
    (forget_the_end_of_a_lease, ViolationKind.TWO_OWNERS),
    (commit_after_the_lease_ended, ViolationKind.STALE_COMMIT),
    (commit_as_somebody_else, ViolationKind.STALE_COMMIT),
    (commit_in_an_older_epoch, ViolationKind.STALE_COMMIT),
    (lose_a_message, ViolationKind.LOST),
    (hand_out_another_message, ViolationKind.UNEXPECTED),
    (start_again_below_a_commit, ViolationKind.OUT_OF_ORDER),
]


@pytest.mark.parametrize("order", ["partition", "key"])
@pytest.mark.parametrize(("mutate", "kind"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_every_mutation_of_a_legal_history_is_caught(mutate: Mutation, kind: ViolationKind, order: Order) -> None:
    applied = 0
    for seed in SEEDS:
        subject = Subject(World(seed, order).live(), order, random.Random(seed))
        spoilt = mutate(subject)
        if spoilt is not None:
            applied += 1
            verdict = check(spoilt, order=order)
            assert kind in verdict.kinds(), f"seed {seed}: {verdict}"
    assert applied > len(SEEDS) // 4
