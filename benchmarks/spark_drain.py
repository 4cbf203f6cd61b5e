"""spark-drain: a backlog worked off on Spark, from the first plan to the last commit; real lanes, claims and commits,
two tasks on a local master, a server process on this machine. The start of the session is not included, and reported
separately.

Beside the figure, in turns: (a) the same messages from Parquet, repartitioned by key, sorted within partitions, handled
with the same handler by mapInArrow; (b) an online consumer process. With a handler of 5 ms: the bound, the larger of
the work divided by all handlers at once and the share of a single key. spark-skew: all messages in one partition,
beside two even partitions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.child import Child
from benchmarks.filling import fill
from benchmarks.report import BenchReport, BenchRow, Beside, median
from benchmarks.served_child import served
from benchmarks.spark_session import spark_session
from inturn.client import Connection, connect
from inturn.model.errors import InturnError
from inturn.model.settings import ConsumerSettings, Order

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

TASKS = 2
HANDLER_S = 0.005
AIM_SHUFFLED, AIM_ONLINE, AIM_BOUND, AIM_SKEW = 2.0, 1.3, 0.85, 0.8


@dataclass(frozen=True, slots=True)
class Bed:
    spark: SparkSession
    mq: Connection
    address: str
    folder: Path
    session_s: float


def run(quick: bool) -> BenchReport:
    count, keys, rounds = (100_000, 5_000, 1) if quick else (10_000_000, 100_000, 2)
    with _bed() as bed:
        fill(bed.mq, "backlog", count, 4, keys)
        _warm_up(bed)
        _to_parquet(bed, "backlog")
        drained, shuffled, online = [], [], []
        with Child("online_child", bed.address, "backlog", "benchmarks.handlers:trivial", 16) as child:
            child.hear()
            for number in range(rounds):
                online.append(float(child.ask(f"online-{number}")))
                drained.append(_drain_s(bed, "backlog", f"spark-{number}", "trivial", 16))
                shuffled.append(_shuffle_s(bed, count))
        figure = count / median(drained)
        beside = [
            Beside("Parquet → repartition(key) → sort → mapInArrow", count / median(shuffled)),
            Beside("one online consumer", count / median(online)),
        ]
        ratios = [figure / one.figure for one in beside]
        what = f"{count:,} messages, {keys:,} keys, 4 partitions, {TASKS} tasks"
        more = {"session_s": bed.session_s}
        aims = [AIM_SHUFFLED, AIM_ONLINE]
        rows = [
            BenchRow(f"{what}, beside {one.what}", figure, "messages/s", [one], ratio, f"≥ {aim}", ratio >= aim, more)
            for one, ratio, aim in zip(beside, ratios, aims, strict=True)
        ]
        return BenchReport("spark-drain", figure, "messages/s", beside, ratios[0], rows)


def run_slow(quick: bool) -> BenchReport:
    count, keys, concurrency, rounds = (4_000, 200, 64, 1) if quick else (100_000, 1_000, 64, 3)
    with _bed() as bed:
        fill(bed.mq, "backlog", count, 4, keys)
        _warm_up(bed)
        seconds = [_drain_s(bed, "backlog", f"spark-{number}", "five_ms", concurrency) for number in range(rounds)]
        bound = count / max(count * HANDLER_S / (TASKS * concurrency), count / keys * HANDLER_S)
        figure = count / median(seconds)
        beside = [Beside(f"the bound: {TASKS} × {concurrency} handlers at once", bound)]
        ratio = figure / bound
        what = f"{count:,} messages of 5 ms, {keys:,} keys, {TASKS} tasks × {concurrency}"
        more = {"session_s": bed.session_s}
        row = BenchRow(what, figure, "messages/s", beside, ratio, f"≥ {AIM_BOUND}", ratio >= AIM_BOUND, more)
        return BenchReport("spark-drain --handler-ms 5", figure, "messages/s", beside, ratio, [row])


def run_skew(quick: bool) -> BenchReport:
    count, keys, rounds = (100_000, 5_000, 1) if quick else (4_000_000, 100_000, 3)
    with _bed() as bed:
        fill(bed.mq, "one", count, 1, keys)
        fill(bed.mq, "two", count, 2, keys)
        _warm_up(bed)
        one, two = [], []
        for number in range(rounds):
            two.append(_drain_s(bed, "two", f"spark-{number}", "trivial", 16))
            one.append(_drain_s(bed, "one", f"spark-{number}", "trivial", 16))
        figure, even = count / median(one), count / median(two)
        beside, ratio = [Beside("two even partitions", even)], figure / even
        what = f"{count:,} messages, {keys:,} keys, all in one partition, {TASKS} tasks"
        more = {"session_s": bed.session_s}
        row = BenchRow(what, figure, "messages/s", beside, ratio, f"≥ {AIM_SKEW}", ratio >= AIM_SKEW, more)
        return BenchReport("spark-skew", figure, "messages/s", beside, ratio, [row])


@contextmanager
def _bed() -> Iterator[Bed]:
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, served(Path(folder) / "data") as server:
        address = server.hear()
        began = time.perf_counter()
        with spark_session(TASKS) as spark, connect(address) as mq:
            spark.range(TASKS).count()
            yield Bed(spark, mq, address, Path(folder), time.perf_counter() - began)


def _warm_up(bed: Bed) -> None:
    """Start the Python workers and their imports, as after the first round of every drain."""
    fill(bed.mq, "warm-up", 1_000, 2, 100)
    _drain_s(bed, "warm-up", "warm-up", "trivial", 16)


def _drain_s(bed: Bed, subject: str, group: str, handler: str, concurrency: int) -> float:
    from inturn.spark.ordered.drain import DrainSettings, drain
    from inturn.spark.ordered.lease_holder import make_group

    make_group(bed.mq, subject, group, Order.KEY, "first")
    report = drain(
        bed.spark,
        bed.address,
        subject,
        group,
        f"benchmarks.handlers:{handler}",
        order="key",
        consumer=ConsumerSettings(concurrency=concurrency),
        settings=DrainSettings(tasks=TASKS, round_s=600.0),
    )
    if report.lag or report.ended != "end":
        raise InturnError(f"the drain of {subject} ended with {report.ended!r} and {report.lag} left")
    return report.work_s


def _to_parquet(bed: Bed, subject: str) -> None:
    rows = bed.spark.read.format("inturn").option("server", bed.address).option("subject", subject).load()
    rows.select("partition", "offset", "key", "body").write.parquet(str(bed.folder / "parquet"))


def _shuffle_s(bed: Bed, count: int) -> float:
    """The usual code without claims: a shuffle moves every row to the task of its key."""
    began = time.perf_counter()
    rows = bed.spark.read.parquet(str(bed.folder / "parquet"))
    handled = (
        rows.repartition(TASKS, "key")
        .sortWithinPartitions("partition", "offset")
        .mapInArrow(_handling(), "handled long")
        .groupBy()
        .sum("handled")
        .collect()[0][0]
    )
    seconds = time.perf_counter() - began
    if handled != count:
        raise InturnError(f"{handled} of {count} rows were handled after the shuffle")
    return seconds


def _handling() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def handle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow

        from benchmarks.handlers import trivial
        from inturn.consumer.context import Context
        from inturn.model.message import Message, Origin

        context = Context("backlog", "group", 0, "task", 1)
        origin = Origin("backlog", 0)
        for batch in batches:
            columns = [batch.column(name).to_pylist() for name in ("key", "body", "offset")]
            for key, body, offset in zip(*columns, strict=True):
                trivial(Message(body, key, offset=offset, origin=origin), context)
            yield pyarrow.RecordBatch.from_pydict({"handled": [batch.num_rows]})

    return handle
