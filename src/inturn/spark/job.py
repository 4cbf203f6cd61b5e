"""Tasks on Spark: one job, one task for each plan, and their outcomes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import structlog
from structlog.typing import EventDict, WrappedLogger

from inturn.spark.execution import TaskOutcome, TaskPlan, run_task
from inturn.spark.handler import HandlerName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OUTCOMES = "outcome binary"
_decoder = msgspec.msgpack.Decoder(TaskOutcome)


def run_job(spark: SparkSession, plans: Sequence[TaskPlan], handler: HandlerName) -> list[TaskOutcome]:
    """Run all of them, as many at once as Spark has room for. Raises what Spark raises if a task was lost."""
    by_id = dict(enumerate(plans))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        log_plainly()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                outcome = msgspec.msgpack.encode(run_task(by_id[number], handler))
                yield pa.RecordBatch.from_arrays([pa.array([outcome], pa.binary())], ["outcome"])

    # A range has exactly one row for each of its partitions, so each plan is one task; nothing is shuffled.
    rows = spark.range(0, len(plans), 1, len(plans)).mapInArrow(run, _OUTCOMES).collect()
    return sorted((_decoder.decode(bytes(row[0])) for row in rows), key=lambda one: one.task)


def log_plainly() -> None:
    """In a task, unless a handler's module has configured it: what Spark collects of it are lines of text."""
    if not structlog.is_configured():
        level, failures = structlog.processors.add_log_level, structlog.processors.format_exc_info
        structlog.configure(processors=[level, failures, _as_line])


def _as_line(_: WrappedLogger, __: str, event: EventDict) -> str:
    level, name, traceback = event.pop("level", "warning"), event.pop("event"), event.pop("exception", None)
    fields = " ".join(f"{key}={value}" for key, value in event.items() if value is not None)
    return f"{level}: {name} {fields}".rstrip() + (f"\n{traceback}" if traceback else "")
