"""`inturn bench spark-read`: the shape of what it says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from inturn.bench import spark_read
from inturn.cli.bench import BENCHES

COMMAND = "from inturn.cli.main import app; app()"


def test_spark_read_measures_the_source_beside_parquet() -> None:
    arguments = ["bench", "spark-read", "--quick", "--json"]
    ran = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["bench"], report["unit"]) == ("spark-read", "messages/s")
    assert [one["what"] for one in report["beside"]] == ["the same rows from Parquet"]
    assert report["figure"] > 0
    assert report["ratio"] == pytest.approx(report["figure"] / report["beside"][0]["figure"])
    (row,) = report["rows"]
    assert (row["figure"], row["ratio"]) == (report["figure"], report["ratio"])
    assert row["is_met"] == (row["ratio"] >= spark_read.AIM)
    assert report["machine"]["cpus"] > 0


def test_all_runs_it() -> None:
    assert BENCHES["spark-read"] == ("spark_read", "run")
