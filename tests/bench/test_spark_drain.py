"""`inturn bench spark-drain` and `spark-skew`: the shape of what they say. Each in a process, with its own session."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from inturn.bench import spark_drain
from inturn.cli.bench import BENCHES

COMMAND = "from inturn.cli.main import app; app()"


def quick(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", COMMAND, "bench", *arguments, "--quick", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    assert report["unit"] == "messages/s"
    assert report["figure"] > 0
    assert report["ratio"] == pytest.approx(report["figure"] / report["beside"][0]["figure"])
    assert report["machine"]["cpus"] > 0
    return report


def test_spark_drain_is_measured_beside_a_shuffle_and_an_online_consumer() -> None:
    report = quick("spark-drain")
    assert report["bench"] == "spark-drain"
    shuffled, online = report["beside"]
    assert shuffled["what"] == "Parquet → repartition(key) → sort → mapInArrow"
    assert online["what"] == "one online consumer"
    aims = [spark_drain.AIM_SHUFFLED, spark_drain.AIM_ONLINE]
    for row, beside, aim in zip(report["rows"], report["beside"], aims, strict=True):
        assert row["ratio"] == pytest.approx(report["figure"] / beside["figure"])
        assert row["is_met"] == (row["ratio"] >= aim)


def test_spark_drain_with_slow_handlers_is_measured_beside_its_bound() -> None:
    report = quick("spark-drain", "--handler-ms", "5")
    assert report["bench"] == "spark-drain --handler-ms 5"
    (bound,) = report["beside"]
    assert bound["what"] == "the bound: 2 × 64 handlers at once"
    # 128 handlers of 5 ms at once, unless one key's messages take longer one after the other
    assert bound["figure"] <= 128 / 0.005
    assert report["figure"] <= bound["figure"]
    (row,) = report["rows"]
    assert row["is_met"] == (row["ratio"] >= spark_drain.AIM_BOUND)


def test_spark_skew_is_measured_beside_two_even_partitions() -> None:
    report = quick("spark-skew")
    assert report["bench"] == "spark-skew"
    assert [one["what"] for one in report["beside"]] == ["two even partitions"]
    (row,) = report["rows"]
    assert row["is_met"] == (row["ratio"] >= spark_drain.AIM_SKEW)


def test_all_runs_them() -> None:
    assert BENCHES["spark-drain"] == ("spark_drain", "run")
    assert BENCHES["spark-drain --handler-ms 5"] == ("spark_drain", "run_slow")
    assert BENCHES["spark-skew"] == ("spark_drain", "run_skew")
