"""The Spark job of one round: one task for each plan, run in a thread of the driver."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from inturn.spark.ordered.task import TaskOutcome, TaskPlan, log_plainly, run_task
from inturn.spark.shipping import HandlerName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OUTCOMES = "outcome binary"
_decoder = msgspec.msgpack.Decoder(TaskOutcome)


def run_job(spark: SparkSession, plans: Sequence[TaskPlan], handler: HandlerName) -> list[TaskOutcome]:
    """Run all plans, as many at the same time as Spark has cores. Blocks until all tasks have ended. Raises Spark's
    exception if a task was lost."""
    by_id = dict(enumerate(plans))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        log_plainly()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                outcome = msgspec.msgpack.encode(run_task(by_id[number], handler))
                yield pa.RecordBatch.from_arrays([pa.array([outcome], pa.binary())], ["outcome"])

    # A range has exactly one row for each of its partitions. So each plan is one task, and no row is shuffled.
    rows = spark.range(0, len(plans), 1, len(plans)).mapInArrow(run, _OUTCOMES).collect()
    return sorted((_decoder.decode(bytes(row[0])) for row in rows), key=lambda one: one.task)


class SparkJob(threading.Thread):
    """A Spark job in a thread, so that the drain can report progress and cancel the job. Read `outcomes` and `error`
    after the thread has ended."""

    def __init__(self, spark: SparkSession, plans: list[TaskPlan], handler: HandlerName, description: str) -> None:
        super().__init__(name="inturn-spark-job", daemon=True)
        self._spark = spark
        self._plans = plans
        self._handler = handler
        self._description = description
        self._group_name = f"inturn-{uuid.uuid4().hex}"
        self._is_cancelled = False
        self.outcomes: list[TaskOutcome] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            # With interruptOnCancel=False Spark asks a task to end and kills the task's process after a delay. An
            # interrupt of the Java thread would leave the Python process running.
            self._spark.sparkContext.setJobGroup(self._group_name, self._description, interruptOnCancel=False)
            self.outcomes = run_job(self._spark, self._plans, self._handler)
        except BaseException as error:
            self.error = error

    def cancel(self) -> None:
        """Cancel the job once; further calls have no effect."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._spark.sparkContext.cancelJobGroup(self._group_name)


def is_spark_alive(spark: SparkSession) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False


def summary_line(error: BaseException) -> str:
    """The most useful line of an error text: the first line of Spark's text, the last line of a Python traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]
