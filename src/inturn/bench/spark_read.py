"""spark-read: all columns of a subject, read by the data source `inturn` from a server process on this machine into
the sink `noop`, on a local master with two cores; beside it the same rows into the same sink, from Parquet files that
Spark wrote of them. In turns; messages of 100 bytes that are all different."""

from __future__ import annotations

import os
import tempfile
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from inturn.bench.report import BenchReport, Beside, Row, median
from inturn.bench.served_child import served
from inturn.connection import connect
from inturn.model.batch import encode
from inturn.model.commands import Append, Appended, Node
from inturn.model.message import Outgoing
from inturn.model.request import ask
from inturn.model.slot import slot_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SUBJECT = "bench"
PARTITIONS = 4
KEYS = 10_000
BATCH = 5_000
BODY_BYTES = 100
AIM = 0.2


def run(quick: bool) -> BenchReport:
    count, rounds = (200_000, 2) if quick else (10_000_000, 3)
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, served(Path(folder) / "data") as server:
        address = server.hear()
        _fill(address, count)
        ours, parquet = _measure(address, Path(folder) / "parquet", rounds)
    figure, bound = count / median(ours), count / median(parquet)
    beside = [Beside("the same rows from Parquet", bound)]
    ratio = figure / bound
    row = Row(
        f"{count:,} × {BODY_BYTES} B, all columns, {PARTITIONS} partitions, local[2] → noop",
        figure,
        "messages/s",
        beside,
        ratio,
        f"ratio ≥ {AIM}",
        ratio >= AIM,
    )
    return BenchReport("spark-read", figure, "messages/s", beside, ratio, [row])


def _fill(address: str, count: int) -> None:
    """Each batch in the partition of its keys, as a producer would store them, but large ones at once."""
    with connect(address) as mq:
        by_slot = mq.create_subject(SUBJECT, PARTITIONS).route.by_slot
        keys: list[list[tuple[bytes, int]]] = [[] for _ in range(PARTITIONS)]
        for number in range(KEYS):
            key = b"order-%d" % number
            keys[by_slot[slot_of(key)]].append((key, slot_of(key)))
        for first in range(0, count, BATCH):
            partition = first // BATCH % PARTITIONS
            _append(mq.node, partition, keys[partition], first, min(BATCH, count - first))


def _append(node: Node, partition: int, keys: list[tuple[bytes, int]], first: int, count: int) -> None:
    bodies = os.urandom(count * BODY_BYTES)
    now_ms = time.time_ns() // 1_000_000
    chosen = [keys[(first + number) % len(keys)] for number in range(count)]
    messages = [
        Outgoing(bodies[number * BODY_BYTES : (number + 1) * BODY_BYTES], key, now_ms)
        for number, (key, _) in enumerate(chosen)
    ]
    ask(node, Append(SUBJECT, partition, encode(messages, array("H", [slot for _, slot in chosen]))), Appended)


def _measure(address: str, parquet: Path, rounds: int) -> tuple[list[float], list[float]]:
    from inturn.spark import session

    spark = session("inturn-bench", "local[2]")
    try:
        rows = spark.read.format("inturn").option("server", address).option("subject", SUBJECT).load()
        rows.write.parquet(str(parquet))  # which is also what warms Spark and its workers up
        files = spark.read.parquet(str(parquet))
        ours, theirs = [], []
        _drop_s(files)
        for _ in range(rounds):
            theirs.append(_drop_s(files))
            ours.append(_drop_s(rows))
        return ours, theirs
    finally:
        spark.stop()


def _drop_s(frame: DataFrame) -> float:
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began
