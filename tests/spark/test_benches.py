"""The output format of `inturn bench spark-read`, `spark-drain` and `spark-skew`, in one session."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from benchmarks import spark_drain, spark_read
from benchmarks.catalog import BENCHES
from benchmarks.report import BenchReport

pytestmark = pytest.mark.usefixtures("spark")


def checked(report: BenchReport) -> BenchReport:
    assert report.unit == "messages/s"
    assert report.figure > 0
    assert report.ratio == pytest.approx(report.figure / report.beside[0].figure)
    for row in report.rows:
        assert row.ratio == pytest.approx(report.figure / row.beside[0].figure)
    return report


def test_spark_read_is_measured_beside_parquet(spark: SparkSession) -> None:
    report = checked(spark_read.run(True))
    assert [one.what for one in report.beside] == ["the same rows from Parquet"]
    (row,) = report.rows
    assert row.is_met == (row.ratio >= spark_read.AIM)
    assert spark.range(3).count() == 3, "the session goes on"


def test_spark_drain_is_measured_beside_a_shuffle_and_an_online_consumer() -> None:
    report = checked(spark_drain.run(True))
    assert [one.what for one in report.beside] == [
        "Parquet → repartition(key) → sort → mapInArrow",
        "one online consumer",
    ]
    for row, aim in zip(report.rows, [spark_drain.AIM_SHUFFLED, spark_drain.AIM_ONLINE], strict=True):
        assert row.is_met == (row.ratio >= aim)


def test_spark_drain_with_slow_handlers_is_measured_beside_its_bound() -> None:
    report = checked(spark_drain.run_slow(True))
    (bound,) = report.beside
    assert bound.what == "the bound: 2 × 64 handlers at once"
    # Bound: 128 concurrent handlers of 5 ms, or the sequential time of the hottest key.
    assert bound.figure <= 128 / 0.005
    assert report.figure <= bound.figure


def test_spark_skew_is_measured_beside_two_even_partitions() -> None:
    report = checked(spark_drain.run_skew(True))
    assert [one.what for one in report.beside] == ["two even partitions"]
    assert report.rows[0].is_met == (report.ratio >= spark_drain.AIM_SKEW)


def test_all_of_them_are_known_by_name() -> None:
    assert BENCHES["spark-read"] == ("spark_read", "run")
    assert BENCHES["spark-drain"] == ("spark_drain", "run")
    assert BENCHES["spark-drain --handler-ms 5"] == ("spark_drain", "run_slow")
    assert BENCHES["spark-skew"] == ("spark_drain", "run_skew")
