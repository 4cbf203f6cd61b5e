"""The data source with a handler: its tasks handle messages where they read them, and its rows are their outcomes.

A query holds the leases of its group while it plans and runs. In a stream that is done by the process that plans, as
long as the query lives: it is a member of the group as any consumer is. A batch query has no process that lives so
long: it takes the group over, plans, and leaves the leases to its tasks, which keep them by their claims; they end with
their life after the last of them. The group's state says what is to be done, whatever Spark's checkpoint says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import BooleanType, DoubleType, IntegerType, LongType, StringType, StructField, StructType

from inturn.model.commands import GroupDescription
from inturn.model.errors import InturnError, NotFound
from inturn.spark.arrivals import Arrivals
from inturn.spark.connections import connected, disconnect
from inturn.spark.execution import TaskOutcome, TaskPlan, run_task
from inturn.spark.handler import load_handler
from inturn.spark.holding import Holding
from inturn.spark.offsets import ByPartition, extents_of, kept_within, offsets_json, resolve
from inturn.spark.options import HandlerOptions, ReadOptions
from inturn.spark.rounds import Work, done

IDLE_WAIT_S = 1.0
TAKE_OVER_S = 120.0

OUTCOMES = StructType(
    [
        StructField("round", LongType(), nullable=False),
        StructField("task", IntegerType(), nullable=False),
        StructField("host", StringType(), nullable=False),
        StructField("partitions", StringType(), nullable=False),
        StructField("handled", LongType(), nullable=False),
        StructField("failed", LongType(), nullable=False),
        StructField("waiting", LongType(), nullable=False),
        StructField("missing", LongType(), nullable=False),
        StructField("seconds", DoubleType(), nullable=False),
        StructField("is_through", BooleanType(), nullable=False),
        StructField("error", StringType(), nullable=True),
    ]
)


class SlicePartition(InputPartition):
    def __init__(self, plan: TaskPlan) -> None:
        super().__init__(plan.index)
        self.plan = plan


class TaskFailed(InturnError):
    """A task could not work at all. What was committed is kept."""

    def __init__(self, plan: TaskPlan, outcome: TaskOutcome) -> None:
        self.subject, self.group, self.why = plan.subject, plan.group, outcome.error
        super().__init__(
            f"task {outcome.task} of {plan.subject!r} for group {plan.group!r} on {outcome.host}: {outcome.error}"
        )


class _Ordered:
    """What both readers are made of. Pickled: options only."""

    def __init__(self, options: ReadOptions) -> None:
        assert options.handler is not None
        assert options.group is not None
        self._options = options
        self._handler: HandlerOptions = options.handler
        self._group: str = options.group

    def _work(self) -> Work:
        options, handler = self._options, self._handler
        load_handler(handler.name)  # before anything is taken from anybody
        connection = connected(options.target, "the driver")
        subject = connection.subject(options.subject)
        return Work(options.target, subject, self._group, handler.order, handler.consumer, handler.round_s)

    def _hold(self, *, takes_over: bool) -> Holding:
        holding = Holding(
            connected(self._options.target, "the driver"),
            self._options.subject,
            self._group,
            load_handler(self._handler.name),
            order=self._handler.order,
            settings=self._handler.consumer,
            start=self._handler.start,
            takes_over=takes_over,
        )
        holding.start()
        return holding

    def _described(self) -> GroupDescription:
        return connected(self._options.target, "the driver").describe_group(self._options.subject, self._group)

    def _task_count(self) -> int:
        """As many as were asked for, or as this machine has cores: how many there are elsewhere is not told here."""
        return self._options.min_partitions or os.cpu_count() or 1

    def _partitions(self, plans: Sequence[TaskPlan]) -> list[SlicePartition]:
        return [SlicePartition(plan) for plan in plans]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        if not isinstance(partition, SlicePartition):  # Spark's own, in place of an empty plan
            return
        plan = partition.plan
        outcome = run_task(plan, self._handler.name)
        if outcome.error_kind:
            raise TaskFailed(plan, outcome)
        row = {
            "round": outcome.round,
            "task": outcome.task,
            "host": outcome.host,
            "partitions": ",".join(str(one.partition) for one in plan.slices),
            "handled": outcome.handled,
            "failed": outcome.failed,
            "waiting": outcome.waiting,
            "missing": outcome.missing,
            "seconds": outcome.seconds,
            "is_through": outcome.is_through,
            "error": outcome.error or None,
        }
        yield pa.RecordBatch.from_pylist([row], schema=to_arrow_schema(OUTCOMES, timezone="UTC"))


class OrderedBatchReader(_Ordered, DataSourceReader):
    """Everything from where the group stands up to `endingOffsets`, once."""

    def partitions(self) -> Sequence[SlicePartition]:
        options = self._options
        work = self._work()
        node = connected(options.target, "the driver").node
        extents = extents_of(node, options.subject)
        ends = resolve(node, options.subject, extents, options.ending_option, options.ending, options.group)
        ends = kept_within(options.subject, extents, ends, options.fail_on_data_loss)
        holding = self._hold(takes_over=True)
        try:
            epochs = holding.wait_for(set(range(work.subject.partition_count)), TAKE_OVER_S)
            waiting = work.waiting(self._described(), ends)
            plans = work.plans(waiting, holding.owner, epochs, self._task_count(), 1)
        except BaseException:
            holding.stop()
            raise
        if plans:
            holding.abandon()
        else:
            holding.stop()
        return self._partitions(plans)


class OrderedStreamReader(_Ordered, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A micro-batch is a round over the partitions that are held when it is planned. Its offsets count rounds."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._holding: Holding | None = None
        self._arrivals: Arrivals | None = None
        self._target: ByPartition | None = None
        self._limit: int | None = options.max_messages_per_trigger
        self._done_before = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_holding": None, "_arrivals": None}

    def initialOffset(self) -> dict[str, int]:
        return {"round": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._limit is None else ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:
        extents = extents_of(connected(self._options.target, "the driver").node, self._options.subject)
        self._target = {partition: extent.end for partition, extent in extents.items()}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """One round more, if there is something to do. If there is not, this waits for it for a moment."""
        work = self._work()
        holding = self._held(work)
        self._limit = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        described = self._described()
        if not self._to_do(work, described, holding) and self._target is None:
            self._wait(described)
            described = self._described()
        count = done(described)
        is_idle = count == self._done_before  # all that is left waits behind keys that do not go on
        self._done_before = count
        if not self._to_do(work, described, holding) or (is_idle and self._target is not None):
            if self._target is not None:
                self._hand_back()  # that was the last call, and `stop` may not come
            return start
        if is_idle:
            time.sleep(IDLE_WAIT_S)
        return {"round": start["round"] + 1}

    def _held(self, work: Work) -> Holding:
        if self._holding is None:
            self._holding = self._hold(takes_over=self._handler.takes_over)
            count = work.subject.partition_count if self._handler.takes_over else 1
            self._holding.wait_at_start(is_bounded=self._target is not None, count=count)
        return self._holding

    def _to_do(self, work: Work, described: GroupDescription, holding: Holding) -> bool:
        epochs = holding.epochs()
        return any(one.partition in epochs for one in work.waiting(described, self._target))

    def _wait(self, described: GroupDescription) -> None:
        if self._arrivals is None:
            self._arrivals = Arrivals(connected(self._options.target, "the driver").node, self._options.subject)
        self._arrivals.wait({one.partition: one.end_offset for one in described.partitions}, IDLE_WAIT_S)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        try:
            extents = extents_of(connected(self._options.target, "the driver").node, self._options.subject)
        except (InturnError, NotFound):
            return None
        return offsets_json(self._options.subject, {index: extent.end for index, extent in extents.items()})

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[SlicePartition]:
        """What waits now, not what waited when the round was first planned: the group's state is the checkpoint."""
        work = self._work()
        holding = self._held(work)
        waiting = work.waiting(self._described(), self._target, self._limit)
        tasks = self._task_count()
        return self._partitions(work.plans(waiting, holding.owner, holding.epochs(), tasks, end["round"]))

    def commit(self, end: dict[str, int]) -> None:
        pass  # the tasks have

    def _hand_back(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.stop()

    def stop(self) -> None:
        self._arrivals = None
        self._hand_back()
        disconnect(self._options.target)
