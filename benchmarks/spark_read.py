"""spark-read: all columns of a subject, read by the data source `inturn` from a server process on this machine into the
sink `noop`, on a local master with two cores; beside the figure the same rows into the same sink, from Parquet files
that Spark wrote. In turns; messages of 100 bytes, all different."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.filling import BODY_BYTES, fill
from benchmarks.report import BenchReport, BenchRow, Beside, median
from benchmarks.served_child import served
from benchmarks.spark_session import spark_session
from inturn.client import connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SUBJECT = "bench"
PARTITIONS = 4
KEYS = 10_000
AIM = 0.2


def run(quick: bool) -> BenchReport:
    count, rounds = (200_000, 2) if quick else (10_000_000, 3)
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, served(Path(folder) / "data") as server:
        address = server.hear()
        with connect(address) as mq:
            fill(mq, SUBJECT, count, PARTITIONS, KEYS)
        ours, parquet = _measure(address, Path(folder) / "parquet", rounds)
    figure, bound = count / median(ours), count / median(parquet)
    beside = [Beside("the same rows from Parquet", bound)]
    ratio = figure / bound
    row = BenchRow(
        f"{count:,} × {BODY_BYTES} B, all columns, {PARTITIONS} partitions, local[2] → noop",
        figure,
        "messages/s",
        beside,
        ratio,
        f"ratio ≥ {AIM}",
        ratio >= AIM,
    )
    return BenchReport("spark-read", figure, "messages/s", beside, ratio, [row])


def _measure(address: str, parquet: Path, rounds: int) -> tuple[list[float], list[float]]:
    with spark_session() as spark:
        rows = spark.read.format("inturn").option("server", address).option("subject", SUBJECT).load()
        rows.write.parquet(str(parquet))  # also warms up Spark and its workers
        files = spark.read.parquet(str(parquet))
        ours, theirs = [], []
        _drop_s(files)
        for _ in range(rounds):
            theirs.append(_drop_s(files))
            ours.append(_drop_s(rows))
        return ours, theirs


def _drop_s(frame: DataFrame) -> float:
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began
