"""S1: filters that are pushed down to the source."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from inturn import slot_of
from inturn.model.routing import Partition, Route, SlotSet, even_ranges
from inturn.model.settings import Routing, Strategy
from inturn.model.subject import Subject
from inturn.spark.source.filters import OFFSET_END, RowFilter, push_down

ALL = RowFilter()


def subject_with(count: int = 4, version: int = 1, **settings: object) -> Subject:
    route = Route("s", version, tuple(Partition("g", str(one)) for one in range(count)), even_ranges(count))
    return Subject("s", route, **settings)  # type: ignore[arg-type]


def wanted_by(*filters: Filter) -> RowFilter:
    wanted, rest = push_down(ALL, filters, "s")
    assert rest == []
    return wanted


def test_offsets_are_bounds() -> None:
    wanted = wanted_by(GreaterThanOrEqual(("offset",), 5), LessThan(("offset",), 9))
    assert (wanted.first, wanted.until) == (5, 9)
    wanted = wanted_by(GreaterThan(("offset",), 5), LessThanOrEqual(("offset",), 9), GreaterThan(("offset",), 2))
    assert (wanted.first, wanted.until) == (6, 10)
    wanted = wanted_by(EqualTo(("offset",), 7))
    assert (wanted.first, wanted.until) == (7, 8)


def test_partitions_and_slots_are_sets() -> None:
    assert wanted_by(EqualTo(("partition",), 2)).partitions == frozenset({2})
    assert wanted_by(In(("partition",), (1, 2)), In(("partition",), (2, 3))).partitions == frozenset({2})
    assert wanted_by(In(("slot",), (5, 900, 2000))).slots == SlotSet.of([5, 900])
    assert wanted_by(EqualTo(("slot",), 2000)).is_nothing


def test_keys_lead_to_their_slots_and_stay_exact() -> None:
    wanted = wanted_by(In(("key",), (b"a", b"b", None)))
    assert wanted.keys == frozenset({b"a", b"b"})
    assert set(wanted.slots) == {slot_of(b"a"), slot_of(b"b")}
    assert wanted_by(EqualTo(("key",), b"a"), EqualTo(("key",), b"b")).is_nothing
    assert wanted_by(EqualTo(("key",), b"a"), EqualTo(("slot",), slot_of(b"a") ^ 1)).is_nothing


def test_a_key_that_is_named_is_not_null() -> None:
    assert wanted_by(IsNotNull(("key",)), EqualTo(("key",), b"a")).keys == frozenset({b"a"})


def test_the_subject_is_known() -> None:
    assert not wanted_by(EqualTo(("subject",), "s")).is_nothing
    assert wanted_by(EqualTo(("subject",), "other")).is_nothing


@pytest.mark.parametrize(
    "one",
    [
        IsNotNull(("key",)),
        IsNull(("key",)),
        EqualNullSafe(("key",), None),
        Not(EqualTo(("partition",), 1)),
        In(("offset",), (1, 2)),
        EqualTo(("key",), "text"),
        EqualTo(("slot",), 1.5),
        EqualTo(("properties", "a"), "b"),
        GreaterThan(("slot",), 5),
        StringStartsWith(("subject",), "s"),
        EqualTo(("body",), b"x"),
    ],
)
def test_what_cannot_be_done_completely_stays_sparks_work(one: Filter) -> None:
    wanted, rest = push_down(ALL, [one, EqualTo(("partition",), 1)], "s")
    assert len(rest) == 1
    assert rest[0] is one
    assert wanted == RowFilter(partitions=frozenset({1}))


def test_a_key_is_looked_for_in_its_partition_alone() -> None:
    wanted = wanted_by(EqualTo(("key",), b"a"))
    assert wanted.partitions_of(subject_with(4)) == [slot_of(b"a") * 4 // 1024]
    assert wanted_by(EqualTo(("key",), b"a"), EqualTo(("partition",), 9)).partitions_of(subject_with(4)) == []
    assert ALL.partitions_of(subject_with(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "subject",
    [
        subject_with(4, routing=Routing.SELECTOR),
        subject_with(4, strategy=Strategy.BEST_EFFORT),
    ],
)
def test_a_key_may_be_anywhere_where_the_route_does_not_say(subject: Subject) -> None:
    assert wanted_by(EqualTo(("key",), b"a")).partitions_of(subject) == [0, 1, 2, 3]


def test_nothing_is_nowhere() -> None:
    assert wanted_by(EqualTo(("subject",), "other")).partitions_of(subject_with()) == []
    assert wanted_by(GreaterThan(("offset",), OFFSET_END)).partitions_of(subject_with()) == []


def test_a_key_is_where_it_was_and_where_it_is() -> None:
    """After growth, older messages of a key stay in the partition that had the key's slot at that time."""
    before = subject_with(2)
    after = replace(before, route=before.route.grown(4, {0: 10, 1: 10}))
    moved = next(key for key in (b"%d" % number for number in range(1000)) if after.route.by_slot[slot_of(key)] == 3)
    wanted, _ = push_down(RowFilter(), [EqualTo(("key",), moved)], "s")
    assert wanted.partitions_of(before) == [1]
    assert wanted.partitions_of(after) == [1, 3]
