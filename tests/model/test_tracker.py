"""C7: CommitTracker against a plain set."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap64

from inturn.model.offsets import ClaimTracker, CommitTracker

SPAN = 100_000  # FlowControl.span
# Far from 0, and at borders of 2**16 and 2**32, where a roaring bitmap starts the next container.
BASES = (0, 1, 2**16 - 5, 2**32 - 5, 2**40 - 5, 2**40, 2**53)


class Trackers(RuleBasedStateMachine):
    """Offsets finish in any order, some repeatedly. Now and then the next member takes over."""

    @initialize(base=st.sampled_from(BASES))
    def begin(self, base: int) -> None:
        self.base = base
        self.tracker = CommitTracker(base)
        self.finished: set[int] = set()  # from `base` on

    @rule(places=st.lists(st.integers(0, 40), max_size=12))
    def add(self, places: list[int]) -> None:
        offsets = [self.base + place for place in places]
        self.finished.update(offsets)
        self.tracker.add(offsets)

    @rule(start=st.integers(0, 300), count=st.integers(0, 200_000))
    def skip(self, start: int, count: int) -> None:
        self.finished.update(range(self.base + start, self.base + start + count))
        self.tracker.skip(self.base + start, self.base + start + count)

    @rule(places=st.lists(st.integers(0, 40), min_size=1, max_size=5))
    def tell_what_is_known(self, places: list[int]) -> None:
        low = self.low
        known = [self.base + place for place in places if self.base + place < low]
        self.tracker.add(known)

    @rule()
    def hand_over(self) -> None:
        low, finished = self.tracker.snapshot()
        assert low == self.low
        assert bool(finished) == bool(self.above)
        self.tracker = CommitTracker(low, finished)

    @rule(behind=st.integers(0, 50))
    def load_what_was_stored_with_a_lower_offset(self, behind: int) -> None:
        """An operator may have moved the offset: finished offsets below the new offset do not count."""
        low, finished = self.tracker.snapshot()
        later = low + behind
        self.finished |= set(range(self.base, later))
        self.tracker = CommitTracker(later, finished)

    @rule()
    def every_change_is_a_new_version(self) -> None:
        version = self.tracker.version
        self.tracker.add([self.low])
        self.finished.add(self.low)
        assert self.tracker.version > version

    @property
    def low(self) -> int:
        low = self.base
        while low in self.finished:
            low += 1
        return low

    @property
    def above(self) -> set[int]:
        low = self.low
        return {offset for offset in self.finished if offset > low}

    @invariant()
    def answers_are_those_of_the_set(self) -> None:
        if not hasattr(self, "tracker"):
            return
        low = self.low
        assert self.tracker.known_low <= low
        for place in (*range(-2, 42), 300, 200_299, 200_300):
            offset = self.base + place
            if offset >= 0:
                assert (offset in self.tracker) == (offset < self.base or offset in self.finished)
        assert self.tracker.low == low
        assert self.tracker.known_low == low
        assert self.tracker.count_above == len(self.above)
        assert self.tracker.last == max(self.above, default=low - 1)


TestTrackers = Trackers.TestCase
TestTrackers.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_the_highest_finished_one_is_known_although_an_old_one_was_told_again() -> None:
    """`last` decides whether pulled offsets are looked up at all, so `last` must never be too low."""
    tracker = CommitTracker(0)
    tracker.add(range(10))
    assert tracker.low == 10
    tracker.add([3])
    assert tracker.last == 9


def test_low_passes_a_long_stretch_at_once() -> None:
    tracker = CommitTracker(2**40)
    tracker.add(range(2**40 + 1, 2**40 + 10 * SPAN))
    assert tracker.low == 2**40
    assert tracker.count_above == 10 * SPAN - 1
    tracker.add([2**40])
    assert tracker.low == 2**40 + 10 * SPAN
    assert tracker.snapshot() == (2**40 + 10 * SPAN, b"")


@pytest.mark.parametrize("base", [0, 2**16 - 7, 2**40 - 50_000])
@pytest.mark.parametrize("share", [0.001, 0.03, 0.5, 0.97, 0.999])
def test_a_full_span_takes_a_few_pages_however_it_is_finished(base: int, share: float) -> None:
    """The bound is 25 KiB per commit.

    A roaring container of 2**16 offsets takes 8 KiB at most, and a span of 100 000 touches up to three containers. That
    is the worst case, with offsets finished at random. A share of 0.1 % takes 0.3 KiB.
    """
    numbers = random.Random(1)
    tracker = CommitTracker(base)
    finished = [base + place for place in range(1, SPAN) if numbers.random() < share]
    numbers.shuffle(finished)
    tracker.add(finished)
    low, stored = tracker.snapshot()
    assert low == base
    assert len(stored) < 25 * 1024
    if share in (0.001, 0.999):
        assert len(stored) < 1024
    successor = CommitTracker(low, stored)
    assert successor.count_above == len(finished)
    assert all(offset in successor for offset in finished)
    assert successor.snapshot() == (low, stored)


def test_a_stuck_message_with_everything_after_it_finished_takes_bytes_only() -> None:
    """The usual case: runs are stored as runs."""
    tracker = CommitTracker(2**40)
    tracker.add(range(2**40 + 1, 2**40 + SPAN))
    assert len(tracker.snapshot()[1]) < 100


# A slice of the messages, while other claimants finish the rest


def told(tracker: ClaimTracker) -> list[int]:
    _, finished = tracker.snapshot()
    return list(BitMap64.deserialize(finished)) if finished else []


def test_a_claimant_tells_what_was_finished_here_and_nothing_else() -> None:
    tracker = ClaimTracker(10, BitMap64([14]).serialize())
    tracker.leave_to_others(10, 20, [11, 13, 14, 19])
    tracker.add([13])
    assert told(tracker) == [13]
    assert tracker.snapshot()[0] == 10
    assert tracker.low == 11
    tracker.add([11, 19])
    assert told(tracker) == [11, 13, 19]
    assert tracker.low == 20


def test_what_others_do_counts_as_finished_and_is_nothing_new() -> None:
    tracker = ClaimTracker(0)
    version = tracker.version
    tracker.leave_to_others(0, 5, [])
    assert tracker.version == version
    assert told(tracker) == []
    assert tracker.low == 5
    assert 3 in tracker


def test_what_is_stored_is_not_told_again_and_what_is_not_is() -> None:
    tracker = ClaimTracker(0)
    tracker.add([0, 2])
    assert told(tracker) == [0, 2]
    tracker.add([5])
    assert told(tracker) == [0, 2, 5]  # the commit before was not answered
    tracker.stored()
    assert told(tracker) == []
    tracker.add([7])
    assert told(tracker) == [7]


def test_what_is_finished_while_a_commit_is_on_its_way_is_told_next() -> None:
    tracker = ClaimTracker(0)
    tracker.add([1])
    told(tracker)
    tracker.add([2])
    tracker.stored()
    assert told(tracker) == [2]


def test_a_gap_is_told() -> None:
    tracker = ClaimTracker(0)
    tracker.skip(3, 6)
    tracker.skip(6, 6)
    assert told(tracker) == [3, 4, 5]


def test_an_empty_stretch_is_left_to_nobody() -> None:
    tracker = ClaimTracker(4)
    tracker.leave_to_others(4, 4, [])
    assert tracker.low == 4


@given(
    count=st.integers(1, 40),
    claimants=st.integers(1, 4),
    chance=st.randoms(use_true_random=False),
)
def test_what_all_claimants_tell_is_what_all_finished(count: int, claimants: int, chance: random.Random) -> None:
    """The node joins the commits of all claimants in any order. Some commits are not answered."""
    trackers = [ClaimTracker(0) for _ in range(claimants)]
    of = [chance.randrange(claimants) for _ in range(count)]
    for index, tracker in enumerate(trackers):
        tracker.leave_to_others(0, count, [offset for offset in range(count) if of[offset] == index])
    together = CommitTracker(0)
    finished: set[int] = set()
    for offset in chance.sample(range(count), count):
        trackers[of[offset]].add([offset])
        finished.add(offset)
        tracker = chance.choice(trackers)
        if chance.random() < 0.6:
            together.add(told(tracker))
            if chance.random() < 0.7:
                tracker.stored()
        assert set(BitMap64.deserialize(together.snapshot()[1]) if together.snapshot()[1] else ()) <= finished
        assert all(offset in finished for offset in range(together.low))
    for tracker in trackers:
        together.add(told(tracker))
        assert tracker.low == count
    assert together.low == count
