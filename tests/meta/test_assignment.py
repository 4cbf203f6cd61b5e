"""M8: assignment strategies. Every assignment is complete, and every strategy keeps the promise in the glossary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inturn.meta.assignment import assign
from inturn.model.settings import AssignmentStrategy

names = st.sets(st.sampled_from([f"m{number}" for number in range(12)]), min_size=1, max_size=12)
counts = st.integers(1, 40)
strategies = st.sampled_from(list(AssignmentStrategy))
evenly = st.sampled_from([one for one in AssignmentStrategy if one is not AssignmentStrategy.CONSISTENT_HASH])


def sticky(
    members: Iterable[str], count: int, previous: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, tuple[int, ...]]:
    return assign(AssignmentStrategy.STICKY, members, count, previous or {})


def hashed(members: Iterable[str], count: int) -> dict[str, tuple[int, ...]]:
    return assign(AssignmentStrategy.CONSISTENT_HASH, members, count, {})


def owners(assignment: dict[str, tuple[int, ...]]) -> dict[int, str]:
    return {partition: name for name, partitions in assignment.items() for partition in partitions}


def moved(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> int:
    was = owners(before)
    return sum(1 for partition, name in owners(after).items() if was.get(partition) not in (None, name))


# All


@given(strategy=strategies, history=st.lists(names, min_size=1, max_size=6), count=counts)
def test_whoever_comes_and_goes_every_partition_has_exactly_one_living_member(
    strategy: AssignmentStrategy, history: list[set[str]], count: int
) -> None:
    assignment: dict[str, tuple[int, ...]] = {}
    for members in history:
        assignment = assign(strategy, members, count, assignment)
        assert set(assignment) == members
        partitions = [partition for some in assignment.values() for partition in some]
        assert sorted(partitions) == list(range(count))


@given(strategy=evenly, history=st.lists(names, min_size=1, max_size=6), count=counts)
def test_shares_differ_by_one_at_most(strategy: AssignmentStrategy, history: list[set[str]], count: int) -> None:
    assignment: dict[str, tuple[int, ...]] = {}
    for members in history:
        assignment = assign(strategy, members, count, assignment)
        sizes = [len(partitions) for partitions in assignment.values()]
        assert max(sizes) - min(sizes) <= 1


@given(strategy=strategies, names=names, count=counts)
def test_nothing_moves_when_nobody_came_or_went(strategy: AssignmentStrategy, names: set[str], count: int) -> None:
    first = assign(strategy, names, count, {})
    assert assign(strategy, names, count, first) == first


@pytest.mark.parametrize("strategy", AssignmentStrategy)
def test_nobody_gets_nothing(strategy: AssignmentStrategy) -> None:
    assert assign(strategy, [], 4, {"a": (0, 1, 2, 3)}) == {}


@pytest.mark.parametrize("strategy", AssignmentStrategy)
def test_the_order_in_which_members_are_named_does_not_matter(strategy: AssignmentStrategy) -> None:
    assert assign(strategy, ["b", "a"], 5, {}) == assign(strategy, ["a", "b"], 5, {})


# Average and circle


def test_average_gives_neighbours() -> None:
    found = assign(AssignmentStrategy.AVERAGE, ["a", "b", "c"], 8, {})
    assert found == {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7)}


def test_circle_deals_them_out_one_by_one() -> None:
    found = assign(AssignmentStrategy.CIRCLE, ["a", "b", "c"], 8, {})
    assert found == {"a": (0, 3, 6), "b": (1, 4, 7), "c": (2, 5)}


# Consistent hash


@given(names=names, count=counts)
def test_on_the_ring_partitions_move_only_to_the_newcomer(names: set[str], count: int) -> None:
    before, after = owners(hashed(names, count)), owners(hashed(names | {"new"}, count))
    assert {after[partition] for partition in range(count) if before[partition] != after[partition]} <= {"new"}


@given(names=names.filter(lambda some: len(some) > 1), count=counts, data=st.data())
def test_on_the_ring_only_the_partitions_of_the_one_that_went_move(
    names: set[str], count: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(names)))
    before, after = owners(hashed(names, count)), owners(hashed(names - {gone}, count))
    assert {before[partition] for partition in range(count) if before[partition] != after[partition]} <= {gone}


def test_on_the_ring_shares_are_not_far_apart() -> None:
    sizes = [len(some) for some in hashed([f"worker-{n}" for n in range(4)], 1000).values()]
    assert min(sizes) > 150
    assert max(sizes) < 400


def test_the_ring_is_the_same_everywhere() -> None:
    """A different process or a later release must not move partitions."""
    assert hashed(["a", "b", "c"], 8) == {"a": (0, 1, 6), "b": (2, 3), "c": (4, 5, 7)}


# Sticky


@given(names=names, count=counts)
def test_a_newcomer_gets_its_share_and_nothing_else_moves(names: set[str], count: int) -> None:
    before = sticky(names, count)
    after = sticky(names | {"new"}, count, before)
    assert moved(before, after) == len(after["new"]) == count // (len(names) + 1)


@given(names=names, count=counts, data=st.data())
def test_when_one_goes_only_its_partitions_move(names: set[str], count: int, data: st.DataObject) -> None:
    before = sticky(names, count)
    gone = data.draw(st.sampled_from(sorted(names)))
    after = sticky(names - {gone}, count, before)
    if len(names) == 1:
        assert after == {}
        return
    assert moved(before, after) == len(before[gone])


@given(before=st.lists(names, min_size=1, max_size=4), members=names, count=counts)
def test_as_much_stays_as_can_stay(before: list[set[str]], members: set[str], count: int) -> None:
    """The possible maximum: a member keeps partitions up to the share; members with most partitions get the larger
    shares.
    """
    assignment: dict[str, tuple[int, ...]] = {}
    for some in before:
        assignment = sticky(some, count, assignment)
    after = sticky(members, count, assignment)
    share, larger = divmod(count, len(members))
    sizes = sorted((len(assignment.get(name, ())) for name in members), reverse=True)
    possible = sum(min(size, share + (rank < larger)) for rank, size in enumerate(sizes))
    stayed = sum(len(set(assignment.get(name, ())) & set(after[name])) for name in members)
    assert stayed == possible


def test_more_members_than_partitions_leave_some_idle() -> None:
    assert sorted(len(partitions) for partitions in sticky(["a", "b", "c"], 2).values()) == [0, 1, 1]
