"""M3, M4: every slot belongs to a single partition in every route version, and moves only to new partitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inturn.model.offsets import FOREIGN_MIN, mark_of, place_of
from inturn.model.routing import SLOT_COUNT, Partition, Route, SlotSet, even_ranges, grown_slots, ranges_of


def route_of(count: int) -> Route:
    return Route("s", 1, tuple(Partition("local", f"p{index}") for index in range(count)), even_ranges(count))


def grown(route: Route, count: int) -> Route:
    return route.grown(count, dict.fromkeys(range(len(route.partitions)), 100 * route.version))


@given(st.integers(1, 40), st.integers(1, 60))
def test_slots_move_only_to_new_partitions_and_shares_are_even(before: int, more: int) -> None:
    route = route_of(before)
    by_slot = grown_slots(route.by_slot, before + more)
    assert all(new == old or new >= before for old, new in zip(route.by_slot, by_slot, strict=True))
    shares = [by_slot.count(partition) for partition in range(before + more)]
    assert max(shares) - min(shares) <= 1
    assert sum(stop.stop - stop.start for stop in ranges_of(by_slot)) == SLOT_COUNT


@given(st.integers(1, 8), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_every_slot_is_known_to_have_been_where_it_was(first: int, steps: list[int]) -> None:
    routes = [route_of(first)]
    for more in steps:
        routes.append(grown(routes[-1], len(routes[-1].partitions) + more))
    last = routes[-1]
    for slot in range(0, SLOT_COUNT, 37):
        been = [route.by_slot[slot] for route in routes]
        assert last.lineage(slot) == tuple(dict.fromkeys(been))
        assert all(slot in last.slots_in(partition) for partition in been)
    for descent in last.descents:
        assert descent.parent < descent.child
        assert all(last.lineage(slot).index(descent.parent) >= 0 for slot in SlotSet.from_bytes(descent.slots))


@given(
    st.lists(st.sampled_from(["east", "west", "north"]), min_size=1, max_size=6),
    st.lists(st.integers(1, 6), max_size=3),
)
def test_no_slot_leaves_its_broker_group(homes: list[str], steps: list[int]) -> None:
    """M5: the broker with the log of a parent has the logs of the children, too."""
    count = len(homes)
    partitions = tuple(Partition(home, f"p{index}") for index, home in enumerate(homes))
    first = route = Route("s", 1, partitions, even_ranges(count))
    for more in steps:
        route = grown(route, len(route.partitions) + more)
    for slot in range(SLOT_COUNT):
        before, after = first.partitions[first.by_slot[slot]], route.partitions[route.by_slot[slot]]
        assert before.broker_group == after.broker_group
    assert route.partitions[:count] == partitions
    slots = [route.by_slot.count(index) for index in range(len(route.partitions))]
    for home in set(homes):
        shares = [slots[index] for index, one in enumerate(route.partitions) if one.broker_group == home]
        assert len(shares) == homes.count(home) or max(shares) - min(shares) <= len(homes)


def test_new_partitions_go_to_the_broker_group_whose_partitions_have_most_slots() -> None:
    homes = ("east", "west", "west", "west")
    start = Route(
        "s",
        1,
        tuple(Partition(home, f"p{at}") for at, home in enumerate(homes)),
        ranges_of([0] * 512 + [1] * 171 + [2] * 171 + [3] * 170),
    )
    assert [one.broker_group for one in grown(start, 8).partitions[4:]] == ["east", "east", "east", "west"]


def test_two_partitions_become_four_and_then_eight() -> None:
    four = grown(route_of(2), 4)
    assert [(one.child, one.parent, one.barrier) for one in four.descents] == [(2, 0, 100), (3, 1, 100)]
    assert (four.version, four.lineage(300), four.lineage(0)) == (2, (0, 2), (0,))
    eight = grown(four, 8)
    assert eight.lineage(511) == (0, 2, 5)
    assert [one.parent for one in eight.descents_of(5)] == [2]
    assert [one.child for one in eight.descents_from(0)] == [2, 4]


@given(st.integers(0, 1023), st.integers(0, FOREIGN_MIN - 1), st.integers(0, 1023))
def test_a_mark_tells_where_a_message_came_from(partition: int, offset: int, held: int) -> None:
    mark = mark_of(partition, offset, held)
    assert place_of(mark, held) == (partition, offset)
    assert (mark == offset) is (partition == held)
    assert mark < 2**63
