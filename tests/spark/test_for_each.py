"""S2: `for_each`: the handled messages, the end offsets, and refused input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from inturn import ConsumerSettings
from inturn.model.errors import InvalidInput
from inturn.spark import for_each
from inturn.spark.ordered.drain import DrainSettings
from inturn.spark.ordered.drain_report import DrainProgress, DrainReport
from inturn.spark.ordered.task import disconnect
from tests.spark.judged import GROUP, SUBJECT, Judged, judging
from tests.spark.noting import Noting


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    with judging(tmp_path) as opened:
        yield opened
        disconnect(opened.address)


def handled(spark: SparkSession, judged: Judged, handler: Noting | None = None, **options: Any) -> DrainReport:
    consumer = ConsumerSettings(concurrency=8, commit_interval_s=0.05, backoff_max_s=0.05)
    chosen: dict[str, Any] = {"consumer": consumer, "settings": DrainSettings(patience_s=1.0), **options}
    return for_each(spark, judged.address, SUBJECT, GROUP, handler or Noting(judged.folder), **chosen)


def ends(judged: Judged) -> dict[int, int]:
    return {one.index: one.end_offset for one in judged.mq.describe_subject(SUBJECT).partitions}


def test_every_message_of_a_new_group_is_handled_in_order(spark: SparkSession, judged: Judged) -> None:
    judged.send(200)
    report = handled(spark, judged)
    assert (report.ended, report.done, report.lag, report.order) == ("end", 200, 0, "key")
    assert judged.judge().duplicates == 0
    judged.send(20, first=200)
    assert handled(spark, judged).done == 20  # continues at the committed offsets
    assert set(judged.noted.handled().values()) == {1}


def test_a_new_group_may_begin_at_what_comes_next(spark: SparkSession, judged: Judged) -> None:
    judged.send(50)
    assert handled(spark, judged, start="last").done == 0
    judged.send(10, first=50)
    assert handled(spark, judged, start="first").done == 10  # the group exists already


def test_nothing_at_or_above_until_is_handled(spark: SparkSession, judged: Judged) -> None:
    judged.send(200)
    looks: list[DrainProgress] = []
    report = handled(spark, judged, until={0: 30}, watch=looks.append)
    assert (report.ended, report.done) == ("end", 30)
    assert sorted(judged.noted.handled()) == [(0, offset) for offset in range(30)]
    assert {look.total for look in looks} == {30}
    rest = handled(spark, judged, until=ends(judged))
    assert (rest.ended, rest.done, rest.lag) == ("end", 170, 0)
    assert judged.judge().duplicates == 0


def test_until_nothing_is_nothing(spark: SparkSession, judged: Judged) -> None:
    judged.send(20)
    for until in ({}, {0: 0}):
        report = handled(spark, judged, until=until)
        assert (report.ended, report.done, report.rounds) == ("end", 0, 0)


@pytest.mark.parametrize(
    ("until", "text"),
    [
        ({0: 1000}, r"until\[0\] is 1000; partition 0 of subject 'orders' ends at offset \d+: give 0 to \d+"),
        ({1: -1}, r"until\[1\] is -1"),
        ({0: "9"}, r"until\[0\] is '9'"),
        ({2: 5}, r"until names partition 2; subject 'orders' has partitions 0 to 1"),
    ],
)
def test_ends_that_are_not_there_are_refused(
    spark: SparkSession, judged: Judged, until: dict[int, Any], text: str
) -> None:
    judged.send(20)
    with pytest.raises(InvalidInput, match=text):
        handled(spark, judged, until=until)
    assert not judged.has_group(), "before anything is made or taken"


def test_a_failing_key_is_told_as_in_a_drain(spark: SparkSession, judged: Judged) -> None:
    judged.send(50)
    report = handled(spark, judged, Noting(judged.folder, failures={b"k3": -1}))
    assert (report.ended, report.done, [one.key for one in report.held_keys]) == ("held keys", 45, [b"k3"])
