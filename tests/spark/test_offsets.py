"""S1: the offsets of a streaming query."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inturn
from inturn import Connection, Context, Message
from inturn.errors import InvalidInput, NotFound
from inturn.spark.source.offsets import (
    Bound,
    Extent,
    batch_end,
    extents_of,
    offsets_json,
    parse_bound,
    parse_offsets,
    parse_time,
    resolve,
    within_extents,
)

EXTENTS = {0: Extent(3, 10), 1: Extent(0, 5)}


@pytest.fixture
def mq(tmp_path: Path) -> Iterator[Connection]:
    with inturn.connect(tmp_path / "data", flush="os") as connection:
        connection.create_subject("s", 2, routing="selector")
        with connection.producer() as producer:
            for number in range(10):
                producer.send("s", b"%d" % number, selector=lambda *_, index=number % 2: index)
        yield connection


def resolved(mq: Connection, bound: Bound, group: str | None = None) -> dict[int, int]:
    return resolve(mq.node, "s", extents_of(mq.node, "s"), "startingOffsets", bound, group)


def test_bounds_are_understood() -> None:
    assert parse_bound("x", " earliest ", "s") == Bound("earliest")
    explicit = Bound("offsets", offsets=((0, 12), (1, -2)))
    assert parse_bound("x", '{"s": {"1": -2, "0": 12}}', "s") == explicit
    assert parse_bound("x", '{"0": 12, "1": -2}', "s") == explicit
    at_ms = 1_767_225_600_000
    assert parse_bound("x", "2026-01-01T00:00:00+00:00", "s") == Bound("timestamp", at_ms)
    assert parse_bound("x", str(at_ms), "s") == Bound("timestamp", at_ms)
    local = round(datetime(2026, 1, 1, 12).timestamp() * 1000)
    assert parse_time("x", "2026-01-01 12:00") == local


def test_a_bound_has_an_offset_in_each_partition(mq: Connection) -> None:
    assert resolved(mq, Bound("earliest")) == {0: 0, 1: 0}
    assert resolved(mq, Bound("latest")) == {0: 5, 1: 5}
    assert resolved(mq, Bound("offsets", offsets=((0, 3), (1, -1)))) == {0: 3, 1: 5}
    assert resolved(mq, Bound("offsets", offsets=((0, -2), (1, 99)))) == {0: 0, 1: 99}
    past_ms = round(datetime(2020, 1, 1, tzinfo=UTC).timestamp() * 1000)
    assert resolved(mq, Bound("timestamp", past_ms)) == {0: 0, 1: 0}
    assert resolved(mq, Bound("timestamp", past_ms + 1_000_000_000_000)) == {0: 5, 1: 5}


def test_offsets_are_given_for_all_partitions(mq: Connection) -> None:
    with pytest.raises(InvalidInput, match=r"startingOffsets.*partitions 0, 1.*given for 0;"):
        resolved(mq, Bound("offsets", offsets=((0, 3),)))


def test_committed_is_where_the_group_stands(mq: Connection) -> None:
    assert resolved(mq, Bound("committed"), "new") == {0: 0, 1: 0}

    def handler(message: Message, context: Context) -> None:
        seen.append(message.offset)

    seen: list[int] = []
    with mq.consumer("s", "billing", handler):
        while len(seen) < 10:
            time.sleep(0.01)
    assert resolved(mq, Bound("committed"), "billing") == {0: 5, 1: 5}


def test_a_group_of_no_subject_is_not_found(mq: Connection) -> None:
    with pytest.raises(NotFound, match="subject"):
        resolve(mq.node, "other", {}, "startingOffsets", Bound("committed"), "billing")


def test_what_is_inside_stays() -> None:
    assert within_extents("s", EXTENTS, {0: 3, 1: 5}, True) == {0: 3, 1: 5}


def test_what_retention_has_removed_is_told_with_the_first_that_is_there() -> None:
    with pytest.raises(NotFound, match=r"'s/0@2'; the first stored offset is 3, .*failOnDataLoss"):
        within_extents("s", EXTENTS, {0: 2, 1: 0}, True)


def test_what_is_behind_the_end_is_told_with_the_end() -> None:
    with pytest.raises(NotFound, match=r"'s/1@6'; the partition ends at 5.*failOnDataLoss"):
        within_extents("s", EXTENTS, {0: 3, 1: 6}, True)


def test_a_partition_that_is_gone_is_told_even_if_data_may_be_lost() -> None:
    with pytest.raises(NotFound, match="s/7"):
        within_extents("s", EXTENTS, {7: 0}, False)


def test_losses_that_are_allowed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert within_extents("s", EXTENTS, {0: 2, 1: 6}, False) == {0: 3, 1: 5}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "spark.data_lost" in caplog.text
    assert "start_offset" in caplog.text


def test_offsets_in_a_checkpoint_are_always_the_same_text() -> None:
    told = offsets_json("s", {10: 1, 2: 5})
    assert list(told["s"]) == ["2", "10"]
    assert parse_offsets("s", told) == {2: 5, 10: 1}


def test_a_checkpoint_of_another_subject_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'s'.*'other'.*checkpointLocation"):
        parse_offsets("other", {"s": {"0": 1}})


def test_a_micro_batch_takes_of_each_partition_its_share() -> None:
    assert batch_end({0: 0, 1: 10}, {0: 30, 1: 70}, 9) == {0: 3, 1: 16}
    assert batch_end({0: 0}, {0: 5, 1: 5}, 100) == {0: 5, 1: 5}
    assert batch_end({}, {0: 5, 1: 5}, 1) == {0: 1, 1: 0}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 3000))
def test_a_micro_batch_is_as_large_as_it_may_be(waiting: list[int], limit: int) -> None:
    start = {partition: 7 * partition for partition in range(len(waiting))}
    end = {partition: start[partition] + count for partition, count in enumerate(waiting)}
    taken = batch_end(start, end, limit)
    assert all(start[partition] <= taken[partition] <= end[partition] for partition in end)
    assert sum(taken[partition] - start[partition] for partition in end) == min(limit, sum(waiting))
