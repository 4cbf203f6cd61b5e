"""Random legal histories must pass. The same histories with a single mistake must not."""

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
    KeyResumed,
    KeySkipped,
    LeaseEnd,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)

Order: TypeAlias = Literal["partition", "key", "none"]
LaneKey: TypeAlias = bytes | int | None
SEEDS = range(60)


@dataclass(eq=False)
class Run:
    offset: int
    epoch: int
    consumer: str
    lane: LaneKey
    attempt: int
    in_lot: bool


@dataclass
class Holder:
    """The state of a lease holder: the waiting messages of every lane, and the finished messages."""

    consumer: str
    epoch: int
    done: set[int]
    attempts: dict[int, int]  # failed attempts
    lots: dict[bytes, list[int]]  # parked now or with the next commit, and not finished
    waiting: dict[LaneKey, list[int]] = field(default_factory=dict)
    running: dict[LaneKey, Run] = field(default_factory=dict)
    resuming: set[bytes] = field(default_factory=set)
    ever_in_lot: set[int] = field(default_factory=set)


class Partition:
    """A correct system, as simple as possible: a single partition of a single group."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.dice = world, number, world.dice
        offset = 0
        self.keys: dict[int, bytes | None] = {}
        for _ in range(self.dice.randint(4, 25)):
            self.keys[offset] = self.dice.choice([b"x", b"y", b"z", None])
            offset += self.dice.choice([1, 1, 1, 3])
        self.acknowledgements = [offset for offset in self.keys if self.dice.random() < 0.9]
        self.committed = self.floor = self.epoch = 0
        self.claimed: set[int] = set()
        self.lot: set[int] = set()
        self.skipped: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.finished: dict[int, int] = {}  # by any holder since the last reset → the highest epoch
        self.holder: Holder | None = None
        self.leftovers: list[Run] = []

    def lane(self, offset: int) -> LaneKey:
        if self.world.order == "partition":
            return None
        key = self.keys[offset]
        return offset if key is None or self.world.order == "none" else key

    def lane_of_key(self, key: bytes) -> LaneKey:
        return None if self.world.order == "partition" else key

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
        self.claimed, self.lot, self.skipped, self.attempts, self.finished = set(), set(), set(), {}, {}
        self.world.add(OffsetsReset("s", "g", {self.number: self.floor}))

    def grant(self) -> None:
        self.epoch += self.dice.choice([1, 1, 2])
        consumer = self.dice.choice(self.world.consumers)
        done = set(self.finished) if self.dice.random() < 0.5 else set()
        done |= (self.claimed - self.lot) | self.skipped
        self.holder = holder = Holder(consumer, self.epoch, done, dict(self.attempts), {})
        for offset, key in self.keys.items():
            if offset in done:
                continue
            if offset in self.lot:
                assert key is not None
                holder.lots.setdefault(key, []).append(offset)
                holder.ever_in_lot.add(offset)
            elif offset >= self.committed:
                holder.waiting.setdefault(self.lane(offset), []).append(offset)
        self.world.add(LeaseGranted("s", "g", self.number, consumer, self.epoch))

    def work(self, holder: Holder, faults: bool) -> None:
        dice = self.dice.random()
        ready = [
            lane
            for lane, offsets in holder.waiting.items()
            if offsets and lane not in holder.running and self.keys[offsets[0]] not in holder.lots
        ]
        lots = [key for key in holder.resuming if self.lane_of_key(key) not in holder.running]
        if faults and dice < 0.04:
            self.lose(dice < 0.02)
        elif dice < 0.12:
            self.commit(holder)
        elif dice < 0.22 or not (ready or lots or holder.running):
            self.steer(holder, faults)
        elif holder.running and (dice < 0.6 or not (ready or lots)):
            lane = self.dice.choice(list(holder.running))
            self.finish(holder, holder.running.pop(lane), faults)
        elif lots and (dice < 0.8 or not ready):
            key = self.dice.choice(sorted(lots))
            self.start(holder, self.lane_of_key(key), holder.lots[key][0], in_lot=True)
        elif ready:
            lane = self.dice.choice(ready)
            self.start(holder, lane, holder.waiting[lane].pop(0), in_lot=False)

    def steer(self, holder: Holder, faults: bool) -> None:
        """Park, resume and skip keys, and add newer messages of parked keys to the end of the lots."""
        choice = self.dice.random()
        parked = sorted(key for key in holder.lots if key not in holder.resuming)
        if parked and choice < 0.4 and (faults or not self.world.leaves_parked):
            self.resume(holder, self.dice.choice(parked))
        elif faults and choice < 0.5:
            self.skip(holder)
        elif faults and choice < 0.6:
            keys = {self.keys[offset] for offsets in holder.waiting.values() for offset in offsets[:1]}
            self.park(holder, self.dice.choice([b"x", b"y", b"z"]) if keys else None)
        else:
            self.absorb(holder)

    def resume(self, holder: Holder, key: bytes) -> None:
        holder.resuming.add(key)
        for offset in (offset for offset, other in self.keys.items() if other == key):
            holder.attempts.pop(offset, None)
            self.attempts.pop(offset, None)
        self.world.add(KeyResumed("s", "g", self.number, key))

    def skip(self, holder: Holder) -> None:
        heads = [
            (offsets, offsets[0])
            for lane, offsets in holder.waiting.items()
            if offsets and lane not in holder.running and self.keys[offsets[0]] not in (None, *holder.lots)
        ]
        for key, offsets in holder.lots.items():
            if self.lane_of_key(key) not in holder.running:
                heads.append((offsets, offsets[0]))
        if heads:
            offsets, offset = self.dice.choice(heads)
            offsets.remove(offset)
            holder.done.add(offset)
            self.skipped.add(offset)
            self.forget_empty_lots(holder)
            self.world.add(KeySkipped("s", "g", self.number, offset, self.keys[offset]))

    def park(self, holder: Holder, key: bytes | None) -> None:
        if key is None or key in holder.lots or self.world.order == "none":
            return
        lane = self.lane_of_key(key)
        mine = [offset for offset in holder.waiting.get(lane, []) if self.keys[offset] == key]
        if mine and lane not in holder.running:
            self.into_lot(holder, lane, key, mine[: self.dice.randint(1, len(mine))])

    def absorb(self, holder: Holder) -> None:
        for lane, offsets in holder.waiting.items():
            key = self.keys[offsets[0]] if offsets else None
            if key is not None and key in holder.lots:
                self.into_lot(holder, lane, key, offsets[:1])
                return

    def into_lot(self, holder: Holder, lane: LaneKey, key: bytes, offsets: list[int]) -> None:
        holder.lots[key] = sorted(holder.lots.get(key, []) + offsets)
        holder.ever_in_lot.update(offsets)
        holder.waiting[lane] = [offset for offset in holder.waiting[lane] if offset not in offsets]
        if self.world.order == "partition" or self.dice.random() < 0.5:
            self.commit(holder)

    def forget_empty_lots(self, holder: Holder) -> None:
        holder.lots = {key: offsets for key, offsets in holder.lots.items() if offsets}
        holder.resuming &= holder.lots.keys()

    def start(self, holder: Holder, lane: LaneKey, offset: int, in_lot: bool) -> None:
        failed = holder.attempts.get(offset, 0)
        if failed:
            self.attempts[offset] = failed  # durable before the next attempt
        holder.running[lane] = Run(offset, holder.epoch, holder.consumer, lane, failed + 1, in_lot)
        place = ("s", "g", self.number, offset, self.keys[offset], holder.consumer, holder.epoch)
        self.world.add(HandlerStart(*place, self.name(offset), failed + 1))

    def end(self, run: Run, result: HandlerResult) -> None:
        place = ("s", "g", self.number, run.offset, self.keys[run.offset], run.consumer, run.epoch)
        self.world.add(HandlerEnd(*place, self.name(run.offset), result))
        if result in ("success", "moved"):
            self.finished[run.offset] = max(run.epoch, self.finished.get(run.offset, 0))

    def finish(self, holder: Holder, run: Run, faults: bool) -> None:
        results: list[HandlerResult] = ["success", "success", "success", "moved", "failed", "exception", "rollback"]
        result = self.dice.choice(results) if faults else "success"
        self.end(run, result)
        key = self.keys[run.offset]
        if result in ("success", "moved"):
            holder.done.add(run.offset)
            if run.in_lot:
                assert key is not None
                holder.lots[key].remove(run.offset)
                self.forget_empty_lots(holder)
            return
        holder.attempts[run.offset] = run.attempt
        if self.dice.random() < 0.5:
            self.attempts[run.offset] = run.attempt
        if run.in_lot:
            if key is not None and self.dice.random() < 0.3:
                holder.resuming.discard(key)
        elif result == "rollback":
            self.roll_back(holder, run)
        else:
            holder.waiting[run.lane].insert(0, run.offset)
            if self.dice.random() < 0.3:
                self.park(holder, key)

    def roll_back(self, holder: Holder, run: Run) -> None:
        over = self.claimed | self.skipped | holder.ever_in_lot
        again = [o for o in self.keys if self.committed <= o <= run.offset and self.lane(o) == run.lane]
        again = [o for o in again[self.dice.randrange(len(again)) :] if o not in over]
        holder.waiting[run.lane] = again + holder.waiting[run.lane]
        holder.done.difference_update(again)

    def commit(self, holder: Holder) -> None:
        in_lots = {offset for offsets in holder.lots.values() for offset in offsets}
        over = holder.done | in_lots
        unfinished = (o for o in self.keys if o >= self.committed and o not in over)
        self.committed = max(self.committed, next(unfinished, max(self.keys) + 1))
        finished = [o for o in self.keys if o > self.committed and o in over]
        # A commit may leave out some finished messages, but no message in front of a lot may come again behind the lot.
        if self.dice.random() < 0.2:
            in_front = {self.keys[o] for o in in_lots | self.lot}
            finished = [o for o in finished if self.keys[o] in in_front or self.dice.random() < 0.7]
        parked, unparked = sorted(in_lots - self.lot), sorted(self.lot & holder.done)
        passed_through = sorted(holder.ever_in_lot & holder.done - self.lot - self.claimed)
        if self.dice.random() < 0.5:  # otherwise the commit does not mention the messages
            parked, unparked = parked + passed_through, unparked + passed_through
            self.claimed.update(passed_through)
        self.claimed.update(finished, unparked)
        self.lot = (self.lot | in_lots) - holder.done
        for offset in in_lots.intersection(parked):
            if self.finished.get(offset, holder.epoch) < holder.epoch:
                del self.finished[offset]  # a parked message is due again
        lots = (tuple((self.number, o) for o in parked), tuple((self.number, o) for o in unparked))
        who = (holder.consumer, holder.epoch)
        self.world.add(Committed("s", "g", self.number, *who, self.committed, tuple(finished), *lots))

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
        if holder is None or holder.running or any(holder.waiting.values()):
            return False
        lots = holder.resuming if self.world.leaves_parked else holder.lots
        return not lots and not self.leftovers and not self.acknowledgements


class World:
    def __init__(self, seed: int, order: Order) -> None:
        self.dice = random.Random(seed)
        self.order = order
        self.events: list[Event] = []
        self.consumers = ["a", "b", "c"]
        self.births = 0
        self.leaves_parked = self.dice.random() < 0.5
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
@given(seed=st.integers(0, 2**32), order=st.sampled_from(["partition", "key", "none"]))
def test_every_legal_history_passes(seed: int, order: Order) -> None:
    world = World(seed, order)
    events = world.live()
    verdict = check(events, order=order)
    verdict.raise_if_bad()
    assert verdict.parked == sum(len(p.lot - p.finished.keys() - p.skipped) for p in world.partitions)
    assert world.leaves_parked or not verdict.parked
    check(events, order=order, stored=world.stored()).raise_if_bad()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.sampled_from(["partition", "key"]), share=st.floats(0, 1))
def test_every_beginning_of_a_legal_history_passes_as_incomplete(seed: int, order: Order, share: float) -> None:
    events = World(seed, order).live()
    check(events[: int(share * len(events))], order=order, complete=False).raise_if_bad()


@pytest.mark.parametrize("order", ["partition", "key"])
def test_legal_histories_have_what_makes_checking_hard(order: Order) -> None:
    histories = [World(seed, order).live() for seed in SEEDS]
    verdicts = [check(history, order=order) for history in histories]
    assert sum(verdict.overlaps_after_lease_loss for verdict in verdicts) > 10
    assert sum(verdict.duplicates for verdict in verdicts) > 100
    assert sum(verdict.lease_grants for verdict in verdicts) > 3 * len(verdicts)
    assert sum(verdict.parked for verdict in verdicts) > 20
    assert sum(verdict.skipped for verdict in verdicts) > 20
    commits = [event for history in histories for event in history if isinstance(event, Committed)]
    assert sum(len(commit.parked) for commit in commits) > 3 * len(SEEDS)
    assert sum(len(commit.unparked) for commit in commits) > 2 * len(SEEDS)
    assert sum(len(commit.finished) for commit in commits) > 3 * len(SEEDS)


# Mutations: every mutation finds the places of certain harm, chooses a place, and returns the changed history.


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
        """Indexes of consecutive starts in the same lane and epoch."""
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

    def parked(self) -> set[tuple[int, int]]:
        return {place for e in self.events if isinstance(e, Committed) for place in e.parked}

    def skipped(self) -> set[tuple[int, int]]:
        return {(e.partition, e.offset) for e in self.events if isinstance(e, KeySkipped)}

    def has_reset(self) -> bool:
        return any(isinstance(event, OffsetsReset) for event in self.events)

    def finished_before(self, index: int) -> set[tuple[int, int]]:
        ends = (event for event in self.events[:index] if isinstance(event, HandlerEnd))
        return {(end.partition, end.offset) for end in ends if end.result in ("success", "moved")}

    def commits(self) -> Iterator[tuple[int, Committed]]:
        return ((index, event) for index, event in enumerate(self.events) if isinstance(event, Committed))

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
    parked = subject.parked()
    rising = []
    for pair in subject.neighbours():
        first, second = events[pair[0]], events[pair[1]]
        assert isinstance(first, HandlerStart)
        assert isinstance(second, HandlerStart)
        # Under order by partition, a message of a parking lot may rightly run out of turn.
        is_free = subject.order == "key" or not parked & {(e.partition, e.offset) for e in (first, second)}
        if first.offset < second.offset and is_free:
            rising.append(pair)
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
    acknowledged = subject.acknowledged() - subject.parked() - subject.skipped()
    if subject.has_reset():
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
    named = subject.parked() | subject.skipped()
    candidates = sorted((p, o) for p, o in subject.acknowledged() - named if o >= floor.get(p, 0))
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
    return _start_again(subject, lambda commit, offset: offset < commit.offset)


def start_again_what_was_claimed(subject: Subject) -> list[Event] | None:
    return _start_again(subject, lambda commit, offset: offset in commit.finished)


def start_again_what_came_out_of_the_lot(subject: Subject) -> list[Event] | None:
    return _start_again(subject, lambda commit, offset: (commit.partition, offset) in commit.unparked)


def _start_again(subject: Subject, is_done: Callable[[Committed, int], bool]) -> list[Event] | None:
    parked = subject.parked()
    places: list[tuple[int, Committed, HandlerStart]] = []
    for index, event in subject.commits():
        for _, start in subject.starts():
            place = (start.partition, start.offset)
            if place[0] == event.partition and is_done(event, start.offset):
                places += [(index, event, start)] if place not in parked or place in event.unparked else []
    if not places:
        return None
    index, commit, start = subject.dice.choice(places)
    lease = ("s", "g", commit.partition)
    again: list[Event] = [
        LeaseEnded(*lease, commit.owner, commit.epoch, "expired"),
        LeaseGranted(*lease, "late", 1000),
        msgspec.structs.replace(start, consumer="late", epoch=1000, attempt=None),
    ]
    return [*subject.events[: index + 1], *again]


def claim_what_is_not_finished(subject: Subject) -> list[Event] | None:
    if subject.has_reset():
        return None
    candidates = subject.acknowledged() - subject.parked() - subject.skipped()
    places = [
        (index, commit, offset)
        for index, commit in subject.commits()
        for partition, offset in sorted(candidates - subject.finished_before(index))
        if partition == commit.partition
    ]
    if not places:
        return None
    index, commit, offset = subject.dice.choice(places)
    return subject.with_changed(index, finished=(*commit.finished, offset))


def forget_to_park(subject: Subject) -> list[Event] | None:
    candidates = subject.acknowledged() - subject.skipped()
    places = [
        (index, commit, place)
        for index, commit in subject.commits()
        for place in commit.parked
        if place[1] < commit.offset or place[1] in commit.finished
        if place in candidates - subject.finished_before(index)
    ]
    if subject.has_reset() or not places:
        return None
    index, commit, place = subject.dice.choice(places)
    return subject.with_changed(index, parked=tuple(one for one in commit.parked if one != place))


def take_out_of_the_lot_early(subject: Subject) -> list[Event] | None:
    lot: dict[tuple[int, int], None] = {}
    places: list[tuple[int, Committed, tuple[int, int]]] = []
    for index, commit in subject.commits():
        lot.update(dict.fromkeys(commit.parked))
        gone = subject.finished_before(index) | subject.skipped()
        places += [(index, commit, place) for place in lot if place not in gone and place[0] == commit.partition]
    if subject.has_reset() or not places:
        return None
    index, commit, place = subject.dice.choice(places)
    return subject.with_changed(index, unparked=(*commit.unparked, place))


def overtake_the_lot(subject: Subject) -> list[Event] | None:
    places: list[tuple[int, HandlerStart]] = []
    for index, commit in subject.commits():
        gone = subject.finished_before(index) | subject.skipped()
        for partition, parked in commit.parked:
            keys = {s.key for _, s in subject.starts() if (s.partition, s.offset) == (partition, parked)}
            for _, start in subject.starts():
                if start.partition == partition and start.offset > parked and start.key in keys:
                    run = msgspec.structs.replace(start, consumer=commit.owner, epoch=commit.epoch, attempt=None)
                    places += [(index, run)] if (partition, parked) not in gone else []
    if subject.has_reset() or not places:
        return None
    index, run = subject.dice.choice(places)
    return [*subject.events[: index + 1], run, *subject.events[index + 1 :]]


def forget_a_skip(subject: Subject) -> list[Event] | None:
    finished = subject.finished_before(len(subject.events))
    acknowledged = subject.acknowledged()
    places = [
        index
        for index, event in enumerate(subject.events)
        if isinstance(event, KeySkipped) and (event.partition, event.offset) in acknowledged - finished
    ]
    if subject.has_reset():
        return None
    index = _choose(subject, places)
    return None if index is None else subject.without(index)


def forget_the_attempts(subject: Subject) -> list[Event] | None:
    tried: set[tuple[int, int]] = set()
    keys: dict[tuple[int, int], bytes | None] = {}
    places: list[int] = []
    for index, event in enumerate(subject.events):
        if isinstance(event, HandlerStart):
            place = (event.partition, event.offset)
            places += [index] if place in tried else []
            tried.add(place)
            keys[place] = event.key
        elif isinstance(event, KeyResumed):
            tried -= {place for place in tried if (place[0], keys[place]) == (event.partition, event.key)}
        elif isinstance(event, OffsetsReset):
            tried = set()
    index_ = _choose(subject, places)
    return None if index_ is None else subject.with_changed(index_, attempt=0)


def keep_the_attempt_after_a_failure(subject: Subject) -> list[Event] | None:
    places: list[tuple[int, HandlerStart]] = []
    for one, other in subject.neighbours():
        first, second, end = subject.events[one], subject.events[other], subject.end_of(one)
        result = None if end is None else subject.events[end]
        assert isinstance(first, HandlerStart)
        assert isinstance(second, HandlerStart)
        if first.offset == second.offset and isinstance(result, HandlerEnd) and result.result == "failed":
            between = subject.events[one:other]
            places += [] if any(isinstance(event, KeyResumed) for event in between) else [(other, first)]
    if not places:
        return None
    index, first = subject.dice.choice(places)
    return subject.with_changed(index, attempt=first.attempt)


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
    (start_again_below_a_commit, ViolationKind.REPEATED),
    (start_again_what_was_claimed, ViolationKind.REPEATED),
    (start_again_what_came_out_of_the_lot, ViolationKind.REPEATED),
    (claim_what_is_not_finished, ViolationKind.PREMATURE_COMMIT),
    (forget_to_park, ViolationKind.PREMATURE_COMMIT),
    (take_out_of_the_lot_early, ViolationKind.PREMATURE_COMMIT),
    (overtake_the_lot, ViolationKind.SKIPPED),
    (forget_a_skip, ViolationKind.PREMATURE_COMMIT),
    (forget_the_attempts, ViolationKind.ATTEMPT_LOST),
    (keep_the_attempt_after_a_failure, ViolationKind.ATTEMPT_LOST),
]


@pytest.mark.parametrize("order", ["partition", "key"])
@pytest.mark.parametrize(("mutate", "kind"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_every_mutation_of_a_legal_history_is_caught(mutate: Mutation, kind: ViolationKind, order: Order) -> None:
    applied = 0
    for seed in range(1000):
        subject = Subject(World(seed, order).live(), order, random.Random(seed))
        spoilt = mutate(subject)
        if spoilt is not None:
            applied += 1
            verdict = check(spoilt, order=order)
            assert kind in verdict.kinds(), f"seed {seed}: {verdict}"
            if applied == 30:
                return
    pytest.fail(f"only {applied} histories could be spoilt so")
