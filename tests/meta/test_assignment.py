"""Sticky assignment (M8): complete, even, and nothing moves without need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inturn.meta.assignment import assign_sticky

names = st.sets(st.sampled_from([f"m{number}" for number in range(12)]), min_size=1, max_size=12)
counts = st.integers(1, 40)


def owners(assignment: dict[str, tuple[int, ...]]) -> dict[int, str]:
    return {partition: name for name, partitions in assignment.items() for partition in partitions}


def moved(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> int:
    was = owners(before)
    return sum(1 for partition, name in owners(after).items() if was.get(partition) not in (None, name))


@given(names=names, count=counts)
def test_every_partition_has_one_member_and_shares_differ_by_one_at_most(names: set[str], count: int) -> None:
    assignment = assign_sticky(names, count, {})
    assert sorted(partition for partitions in assignment.values() for partition in partitions) == list(range(count))
    assert set(assignment) == names
    sizes = [len(partitions) for partitions in assignment.values()]
    assert max(sizes) - min(sizes) <= 1


@given(history=st.lists(names, min_size=1, max_size=6), count=counts)
def test_whoever_comes_and_goes_it_stays_complete_and_even(history: list[set[str]], count: int) -> None:
    assignment: dict[str, tuple[int, ...]] = {}
    for members in history:
        assignment = assign_sticky(members, count, assignment)
        assert sorted(owners(assignment)) == list(range(count))
        sizes = [len(partitions) for partitions in assignment.values()]
        assert sum(sizes) == count
        assert max(sizes) - min(sizes) <= 1


@given(names=names, count=counts)
def test_nothing_moves_when_nobody_came_or_went(names: set[str], count: int) -> None:
    first = assign_sticky(names, count, {})
    assert assign_sticky(names, count, first) == first


@given(names=names, count=counts)
def test_a_newcomer_gets_its_share_and_nothing_else_moves(names: set[str], count: int) -> None:
    before = assign_sticky(names, count, {})
    after = assign_sticky(names | {"new"}, count, before)
    assert moved(before, after) == len(after["new"]) == count // (len(names) + 1)


@given(names=names, count=counts, data=st.data())
def test_when_one_goes_only_its_partitions_move(names: set[str], count: int, data: st.DataObject) -> None:
    before = assign_sticky(names, count, {})
    gone = data.draw(st.sampled_from(sorted(names)))
    after = assign_sticky(names - {gone}, count, before)
    if len(names) == 1:
        assert after == {}
        return
    assert moved(before, after) == len(before[gone])


@given(before=st.lists(names, min_size=1, max_size=4), members=names, count=counts)
def test_as_much_stays_as_can_stay(before: list[set[str]], members: set[str], count: int) -> None:
    """The most that can stay: each keeps up to its share, the larger shares with those who have most."""
    assignment: dict[str, tuple[int, ...]] = {}
    for some in before:
        assignment = assign_sticky(some, count, assignment)
    after = assign_sticky(members, count, assignment)
    share, larger = divmod(count, len(members))
    sizes = sorted((len(assignment.get(name, ())) for name in members), reverse=True)
    possible = sum(min(size, share + (rank < larger)) for rank, size in enumerate(sizes))
    stayed = sum(len(set(assignment.get(name, ())) & set(after[name])) for name in members)
    assert stayed == possible


def test_more_members_than_partitions_leave_some_idle() -> None:
    assignment = assign_sticky(["a", "b", "c"], 2, {})
    assert sorted(len(partitions) for partitions in assignment.values()) == [0, 1, 1]


def test_nobody_gets_nothing() -> None:
    assert assign_sticky([], 4, {"a": (0, 1, 2, 3)}) == {}


def test_the_order_in_which_members_are_named_does_not_matter() -> None:
    assert assign_sticky(["b", "a"], 5, {}) == assign_sticky(["a", "b"], 5, {})
