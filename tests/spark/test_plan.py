"""S2, S3: plans: every slot of every partition is in one task, and tasks have about the same size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inturn.model.routing import ALL_SLOTS, SLOT_COUNT, Partition, Route, even_ranges
from inturn.model.settings import SPAN_MAX, Keyless, Order, Routing
from inturn.model.subject import Subject
from inturn.protocol.commands import GroupDescription, GroupPartition, KeyDescription, KeyRequest
from inturn.spark.ordered.plan import PartitionBacklog, is_divisible, plan
from inturn.spark.ordered.rounds import RoundWork, key_requests


def subject(partitions: int, keyless: Keyless = Keyless.INDEPENDENT, routing: Routing = Routing.SLOTS) -> Subject:
    logs = tuple(Partition("local", str(index)) for index in range(partitions))
    return Subject("orders", Route("orders", 1, logs, even_ranges(partitions)), routing, keyless=keyless)


def home_slots(one: Subject, partition: int) -> set[int]:
    return {slot for slot, home in enumerate(one.route.by_slot) if home == partition}


@given(
    counts=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    task_count=st.integers(1, 24),
    order=st.sampled_from(Order),
    keyless=st.sampled_from(Keyless),
    routing=st.sampled_from(Routing),
)
def test_every_slot_of_what_waits_is_in_exactly_one_task(
    counts: list[int], task_count: int, order: Order, keyless: Keyless, routing: Routing
) -> None:
    one = subject(len(counts), keyless, routing)
    backlogs = [PartitionBacklog(index, count, 10 * count) for index, count in enumerate(counts)]
    tasks = plan(one, order, backlogs, task_count)
    assert len(tasks) <= task_count
    assert all(tasks)
    taken: dict[int, Counter[int]] = {}
    for task in tasks:
        assert len({part.partition for part in task}) == len(task)  # a claim of a consumer is one per partition
        for part in task:
            assert part.until == 10 * counts[part.partition]
            taken.setdefault(part.partition, Counter()).update(set(part.slots))
    assert taken.keys() == {index for index, count in enumerate(counts) if count}
    # Slots of other partitions, too: messages of such slots may be older than the growth of the subject.
    assert all(found == Counter(range(SLOT_COUNT)) for found in taken.values())


@given(
    counts=st.lists(st.integers(200, 5000), min_size=1, max_size=6),
    task_count=st.integers(1, 12),
)
@settings(max_examples=30)  # an example takes a third of a second
def test_tasks_are_of_about_the_same_size(counts: list[int], task_count: int) -> None:
    one = subject(len(counts))
    tasks = plan(
        one, Order.KEY, [PartitionBacklog(index, count, count) for index, count in enumerate(counts)], task_count
    )
    share = sum(counts) / task_count
    for task in tasks:
        size = 0.0
        for part in task:
            home = home_slots(one, part.partition)
            size += counts[part.partition] * len(set(part.slots) & home) / len(home)
        assert size <= 4 / 3 * share + max(counts) / 100, "largest first comes that near to the best there is"


def test_one_partition_is_cut_for_as_many_tasks_as_there_are() -> None:
    tasks = plan(subject(1), Order.KEY, [PartitionBacklog(0, 1000, 1000)], 4)
    assert [len(part.slots) for (part,) in tasks] == [256] * 4


def test_partitions_are_not_cut_where_that_is_not_needed() -> None:
    tasks = plan(subject(4), Order.KEY, [PartitionBacklog(index, 100, 100) for index in range(4)], 4)
    assert [[part.slots for part in task] for task in tasks] == [[ALL_SLOTS]] * 4


def test_where_all_is_one_lane_a_partition_stays_whole() -> None:
    backlogs = [
        PartitionBacklog(0, 10, 10),
        PartitionBacklog(1, 1000, 1000),
        PartitionBacklog(2, 500, 500),
        PartitionBacklog(3, 400, 400),
    ]
    for one, order in ((subject(4), Order.PARTITION), (subject(4, Keyless.ONE_LANE), Order.KEY)):
        tasks = plan(one, order, backlogs, 2)
        assert all(part.slots == ALL_SLOTS for task in tasks for part in task)
        assert [[part.partition for part in task] for task in tasks] == [[1], [2, 3, 0]]


@pytest.mark.parametrize(
    ("keyless", "order", "is_cut"),
    [
        (Keyless.INDEPENDENT, Order.KEY, True),
        (Keyless.ONE_LANE, Order.KEY, False),
        (Keyless.INDEPENDENT, Order.PARTITION, False),
        (Keyless.ONE_LANE, Order.NONE, True),
    ],
)
def test_what_may_be_cut(keyless: Keyless, order: Order, is_cut: bool) -> None:
    assert is_divisible(subject(1, keyless), order) is is_cut


def test_nothing_to_do_is_no_task() -> None:
    assert plan(subject(2), Order.KEY, [], 4) == []
    assert plan(subject(2), Order.KEY, [PartitionBacklog(0, 0, 5)], 4) == []


def test_the_last_slice_of_a_partition_has_what_belongs_elsewhere_today() -> None:
    one = subject(2)
    first, second = plan(one, Order.KEY, [PartitionBacklog(0, 1000, 1000)], 2)
    elsewhere = home_slots(one, 1)
    assert not set(first[0].slots) & elsewhere
    assert elsewhere <= set(second[0].slots)


# From the group's state


def work() -> RoundWork:
    return RoundWork("./data", subject(3), "billing")


def standing(*places: tuple[int, int]) -> GroupDescription:
    """A group with these (committed, end) offsets by partition."""
    parts = [GroupPartition(index, *place, None, 1, None) for index, place in enumerate(places)]
    return GroupDescription("orders", "billing", (), tuple(parts))


def key(partition: int, state: str, *requests: KeyRequest, attempts: int = 0) -> KeyDescription:
    return KeyDescription(b"a", partition, state, 3, attempts, "", 0, 7, "", requests)


def test_what_waits_is_what_is_below_the_ends() -> None:
    assert work().backlogs(standing((0, 10), (5, 5), (2, 9))) == [
        PartitionBacklog(0, 10, 10),
        PartitionBacklog(2, 7, 9),
    ]
    assert work().backlogs(standing((0, 10), (5, 5), (2, 9)), {0: 4, 2: 1}) == [PartitionBacklog(0, 4, 4)]


def test_more_than_can_be_committed_is_left_for_a_later_round() -> None:
    (one, *_) = work().backlogs(standing((7, SPAN_MAX + 8), (0, 0), (0, 0)))
    assert one == PartitionBacklog(0, SPAN_MAX, SPAN_MAX + 7, is_cut=True)


def test_requests_and_lots_that_are_resumed_wait_without_any_message() -> None:
    described = standing((0, 10), (5, 5), (5, 9))
    request = KeyRequest(4, 1, b"a", "park")
    for found in (key(1, "requested", request), key(1, "parked", request), key(1, "resuming")):
        assert work().backlogs(described, {0: 0, 2: 3}, keys=[found]) == [PartitionBacklog(1, 1, 5)]
    for found in (key(1, "parked"), key(1, "failing"), key(1, "blocked")):
        assert work().backlogs(described, {0: 0, 2: 3}, keys=[found]) == []


def test_a_lot_that_fails_again_has_not_changed() -> None:
    assert key_requests([key(1, "resuming")]) == key_requests([key(1, "resuming", attempts=3), key(0, "failing")])
    assert key_requests([key(1, "resuming")]) != key_requests([key(1, "parked")])
