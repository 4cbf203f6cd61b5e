"""One round of ordered work: from the group's state and the held leases to task plans, the Spark job that runs the
plans, and from task outcomes to the result of the round."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from inturn.model.settings import SPAN_MAX, ConsumerSettings, LotState, Order
from inturn.model.subject import Subject
from inturn.protocol.commands import GroupDescription, KeyDescription
from inturn.security.credentials import NONE, Credentials
from inturn.spark.ordered.plan import PartitionBacklog, plan
from inturn.spark.ordered.task import (
    PATIENCE_S,
    ROUND_S,
    TASK_SETTINGS,
    LimitReached,
    TaskOutcome,
    TaskPlan,
    log_plainly,
    run_task,
)
from inturn.spark.shipping import HandlerName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


KeyRequests = frozenset[tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class RoundWork:
    """The settings that all rounds of a drain, query or stream share."""

    target: str
    subject: Subject
    group: str
    order: Order = Order.KEY
    consumer: ConsumerSettings = TASK_SETTINGS
    round_s: float = ROUND_S
    patience_s: float = PATIENCE_S
    credentials: Credentials = NONE

    def backlogs(
        self,
        described: GroupDescription,
        ends: Mapping[int, int] | None = None,
        limit: int | None = None,
        keys: Iterable[KeyDescription] = (),
    ) -> list[PartitionBacklog]:
        """The unfinished messages of every partition below `ends` (default: below the end of the log), about `limit`
        messages in total. A partition with an open key request, or with a parking lot that is being resumed, is
        included even without messages."""
        requested = {one.partition for one in keys if _has_request(one)}
        found = []
        for one in described.partitions:
            end = one.end_offset if ends is None else ends.get(one.partition, 0)
            # The finished offsets of all slices are committed as one set, with the span limit of one consumer.
            until = min(max(end, one.committed), one.committed + SPAN_MAX)
            if one.committed < until or one.partition in requested:
                # Offsets above the end may be finished, too: by consumers that read further.
                count = max(1, until - one.committed - one.finished_count)
                found.append(PartitionBacklog(one.partition, count, until, until < end))
        total = sum(one.count for one in found)
        if limit is None or total <= limit:
            return found
        # Above the limit every partition is shortened at its end, in proportion to its backlog.
        cuts = [one.count - max(1, one.count * limit // total) for one in found]
        return [
            PartitionBacklog(one.partition, one.count - cut, one.until - cut, one.is_cut or cut > 0)
            for one, cut in zip(found, cuts, strict=True)
        ]

    def plans(
        self, backlogs: list[PartitionBacklog], owner: str, epochs: Mapping[int, int], task_count: int, number: int
    ) -> list[TaskPlan]:
        """One plan for each task of round `number`. Only partitions in `epochs` (held leases) are planned."""
        held = [one for one in backlogs if one.partition in epochs]
        return [
            TaskPlan(
                target=self.target,
                subject=self.subject.name,
                group=self.group,
                owner=owner,
                epochs={one.partition: epochs[one.partition] for one in slices},
                slices=slices,
                order=self.order,
                settings=self.consumer,
                round=number,
                index=index,
                round_s=self.round_s,
                patience_s=self.patience_s,
                credentials=self.credentials,
            )
            for index, slices in enumerate(plan(self.subject, self.order, held, task_count))
        ]


def key_requests(keys: Iterable[KeyDescription]) -> KeyRequests:
    """The open work of key requests, for comparison between rounds. The value changes when a task has done some of the
    work. The value stays the same when a message of a parking lot fails again."""
    return frozenset(
        (one.partition, one.key, one.state, one.offset, one.waiting, tuple(request.id for request in one.requests))
        for one in keys
        if _has_request(one)
    )


def _has_request(key: KeyDescription) -> bool:
    return bool(key.requests) or key.state == LotState.RESUMING


def finished_total(described: GroupDescription) -> int:
    """The number of finished messages of all partitions."""
    return sum(one.committed + one.finished_count for one in described.partitions)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """`error`: why the round failed, or None. `is_held_up`: all remaining messages wait behind keys that make no
    progress, or were not read because of such a key, or cannot be read."""

    error: str | None
    is_held_up: bool
    limits: tuple[LimitReached, ...] = ()
    damage: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[TaskOutcome]) -> RoundResult:
        # A damaged log stays damaged. Any other reason why a task is not through may be over in the next round.
        damage = dict.fromkeys(text for one in outcomes for text in one.damage)
        errors = [one.error for one in outcomes if one.error_kind or (one.error and not (one.is_through or one.damage))]
        is_held_up = all(one.is_through or one.is_held_up or one.limits for one in outcomes)
        limits = sorted({one for outcome in outcomes for one in outcome.limits}, key=lambda one: one.partition)
        return cls(errors[0] if errors else None, is_held_up, tuple(limits), tuple(damage))


def missing_count(outcomes: Sequence[TaskOutcome]) -> int:
    """The number of missing offsets. All tasks of a partition report the same gaps, so a gap counts once."""
    found: dict[int, int] = {}
    for outcome in outcomes:
        for partition, count in outcome.missing_in.items():
            found[partition] = max(found.get(partition, 0), count)
    return sum(found.values())


def span_limits(backlogs: Sequence[PartitionBacklog], keys: Sequence[KeyDescription]) -> tuple[LimitReached, ...]:
    """After a round without progress: the partitions with more messages than a round takes, with the key that keeps
    the next round from starting at a later offset."""
    found = []
    for one in backlogs:
        stuck = [key for key in keys if key.partition == one.partition and key.offset is not None]
        first = min(stuck, key=lambda key: key.offset or 0, default=None)
        if one.is_cut and first is not None:
            key = None if first.key is None else first.key.decode(errors="backslashreplace")
            found.append(LimitReached(one.partition, "span", SPAN_MAX, first.offset or 0, key))
    return tuple(found)


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
