"""The readers of a query with a handler: tasks handle the messages, and the rows are task outcomes.

A query holds leases of its group while planning and running. In a stream the planning process is a member of the group,
as any consumer, for the life of the query. A batch query has no process with such a life: the planning process takes
the group over, plans, and leaves the leases to the tasks. Claims of the tasks keep the leases valid; the leases expire
one lease life after the last claim. After planning, another member may take over, and waits for the leases. The group's
state in the broker determines the work; Spark's checkpoint does not.

`StreamMember` is the shared part of all stream readers, with and without a handler. `ArrivalPolls` waits for new
messages in any partition of a subject.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import BooleanType, DoubleType, IntegerType, LongType, StringType, StructField, StructType

from inturn.client import Connection
from inturn.model.errors import InturnError
from inturn.model.logs import get_logger
from inturn.protocol.commands import Answer, GroupDescription, KeyDescription, Node, Pulled, Read
from inturn.spark.ordered.lease_holder import LeaseHolder
from inturn.spark.ordered.rounds import KeyRequests, RoundWork, finished_total, key_requests
from inturn.spark.ordered.task import TaskOutcome, TaskPlan, connected, disconnect, run_task
from inturn.spark.shipping import load_handler
from inturn.spark.source.offsets import ByPartition, extents_of, offsets_json, resolve, within_extents
from inturn.spark.source.options import HandlerOptions, ReadOptions


class ArrivalPolls:
    """Long polls, at most one open poll per partition."""

    def __init__(self, node: Node, subject: str) -> None:
        self._node = node
        self._subject = subject
        self._news = threading.Condition()
        self._asked: dict[int, int] = {}  # open polls: partition → offset
        self._ends: dict[int, int] = {}

    def wait(self, offsets: Mapping[int, int], wait_s: float) -> bool:
        """Wait up to `wait_s` until a message is stored at or after one of the offsets. False after `wait_s`."""
        for partition, offset in offsets.items():
            self._poll(partition, offset, wait_s)
        until_s = time.monotonic() + wait_s
        with self._news:
            while not any(self._ends.get(partition, 0) > offset for partition, offset in offsets.items()):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._news.wait(left_s)
        return True

    def _poll(self, partition: int, offset: int, wait_s: float) -> None:
        with self._news:
            if partition in self._asked:
                return
            self._asked[partition] = offset
        # The smallest size: the answer contains one batch nevertheless.
        self._node.submit(Read(self._subject, partition, offset, 1, wait_s), self._reply_for(partition))

    def _reply_for(self, partition: int) -> Callable[[Answer | InturnError], None]:
        def reply(answer: Answer | InturnError) -> None:
            with self._news:
                del self._asked[partition]
                if isinstance(answer, Pulled):  # the next read of the partition raises the error again
                    self._ends[partition] = answer.end_offset
                    self._news.notify_all()

        return reply


IDLE_WAIT_S = 1.0  # without a wait Spark asks again at once, 65 times a second
_log = get_logger("inturn.spark")


class StreamMember(SupportsTriggerAvailableNow):
    """The group membership of a stream. Lives in the planning process for the life of the query. Pickled copies in
    tasks have no leases and no polls."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._target: ByPartition | None = None  # AvailableNow: read up to these offsets
        self._latest: ByPartition | None = None  # end offsets of the latest check
        self._arrivals: ArrivalPolls | None = None
        self._holder: LeaseHolder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrivals": None, "_holder": None}

    def _connection(self) -> Connection:
        return connected(self._options.target, "the driver", self._options.credentials)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        extents = extents_of(self._connection().node, self._options.subject)
        self._target = {partition: extent.end for partition, extent in extents.items()}

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """For the progress of the query: the end offsets that `latestOffset` saw last, without the limit per
        trigger."""
        return None if self._latest is None else offsets_json(self._options.subject, self._latest)

    def _wait(self, offsets: ByPartition) -> None:
        """Wait until a message is stored at or after one of the offsets, at most `IDLE_WAIT_S`."""
        if self._arrivals is None:
            self._arrivals = ArrivalPolls(self._connection().node, self._options.subject)
        self._arrivals.wait(offsets, IDLE_WAIT_S)

    def _end_with(self, left: Iterable[int]) -> None:
        """End AvailableNow: hand back now, because Spark may not call `stop`. Log the partitions with messages left,
        which other members hold."""
        partitions = sorted(left)
        group = self._options.group
        if partitions and group is not None:
            described = self._connection().group(self._options.subject, group).describe()
            owners = {one.partition: one.owner or "nobody" for one in described.partitions}
            _log.warning(
                "spark.left_to_others",
                subject=self._options.subject,
                group=group,
                owners={index: owners.get(index, "nobody") for index in partitions},
            )
        self._hand_back()

    def _hand_back(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.stop()

    def stop(self) -> None:
        self._arrivals = None
        self._hand_back()
        disconnect(self._options.target)


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
    """A task failed, or ended before its slices were finished. Committed messages stay finished."""

    def __init__(self, plan: TaskPlan, outcome: TaskOutcome, why: str) -> None:
        self.subject, self.group, self.why = plan.subject, plan.group, why
        super().__init__(f"task {outcome.task} of {plan.subject!r} for group {plan.group!r} on {outcome.host}: {why}")


class _OrderedReader:
    """The shared part of both readers with a handler. Pickled with options only."""

    def __init__(self, options: ReadOptions) -> None:
        assert options.handler is not None
        assert options.group is not None
        self._options = options
        self._handler: HandlerOptions = options.handler
        self._group: str = options.group

    def _connection(self) -> Connection:
        return connected(self._options.target, "the driver", self._options.credentials)

    def _work(self) -> RoundWork:
        options, handler = self._options, self._handler
        load_handler(handler.name)  # before a partition is taken from a consumer
        subject = self._connection().subject(options.subject)
        return RoundWork(
            options.target,
            subject,
            self._group,
            handler.order,
            handler.consumer,
            handler.round_s,
            credentials=options.credentials,
        )

    def _hold(self, *, takes_over: bool) -> LeaseHolder:
        holder = LeaseHolder(
            self._connection(),
            self._options.subject,
            self._group,
            load_handler(self._handler.name),
            order=self._handler.order,
            settings=self._handler.consumer,
            start=self._handler.start,
            takes_over=takes_over,
        )
        holder.start()
        return holder

    def _described(self) -> GroupDescription:
        return self._connection().group(self._options.subject, self._group).describe()

    def _keys(self) -> list[KeyDescription]:
        return self._connection().group(self._options.subject, self._group).keys()

    def _task_count(self) -> int:
        """The option minPartitions, or the number of cores of this machine; Spark does not report the cores of
        executors here."""
        return self._options.min_partitions or os.cpu_count() or 1

    def _partitions(self, plans: Sequence[TaskPlan]) -> list[SlicePartition]:
        return [SlicePartition(plan) for plan in plans]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Handle the messages of one plan; runs in a task."""
        if not isinstance(partition, SlicePartition):  # Spark passes a partition of its own for an empty plan
            return
        plan = partition.plan
        outcome = run_task(plan, self._handler.name)
        self._check(plan, outcome)
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

    def _check(self, plan: TaskPlan, outcome: TaskOutcome) -> None:
        """Raises TaskFailed if the task failed."""
        if outcome.error_kind:
            raise TaskFailed(plan, outcome, outcome.error)


class OrderedBatchReader(_OrderedReader, DataSourceReader):
    """Handles all messages from the group's committed offsets up to `endingOffsets`, once. A task ends when its slices
    are finished, or when all remaining messages wait behind held keys. If a task ends earlier, the query fails."""

    def _check(self, plan: TaskPlan, outcome: TaskOutcome) -> None:
        super()._check(plan, outcome)
        if outcome.damage:
            raise TaskFailed(plan, outcome, "; ".join(outcome.damage))
        for one in outcome.limits:
            key = "a message without a key" if one.key is None else f"key {one.key!r}"
            why = (
                f"FlowControl.{one.limit} ({one.size}) is reached in partition {one.partition} behind offset "
                f"{one.offset}, {key}; mend, park or skip it (`inturn key list`), then run the query again"
            )
            raise TaskFailed(plan, outcome, why)
        if not outcome.is_through and (outcome.error or not outcome.is_held_up):
            why = outcome.error or (
                f"it has handled {outcome.handled} messages, but not all of its slices: the leases were lost to a "
                "different member, or wanted back; run the query again to continue at the committed offsets"
            )
            raise TaskFailed(plan, outcome, why)

    def partitions(self) -> Sequence[SlicePartition]:
        options = self._options
        work = replace(self._work(), round_s=math.inf)  # a batch has one round
        node = self._connection().node
        extents = extents_of(node, options.subject)
        ends = resolve(node, options.subject, extents, options.ending_option, options.ending, options.group)
        ends = within_extents(options.subject, extents, ends, options.fail_on_data_loss)
        holder = self._hold(takes_over=True)
        try:
            epochs = holder.wait_for_open(TAKE_OVER_S)
            backlogs = work.backlogs(self._described(), ends, keys=self._keys())
            self._warn_cut({one.partition: one.until for one in backlogs if one.until < ends[one.partition]})
            plans = work.plans(backlogs, holder.owner, epochs, self._task_count(), 1)
        except BaseException:
            holder.stop()
            raise
        if plans:
            holder.leave_to_tasks()
        else:
            holder.stop()
        return self._partitions(plans)

    def _warn_cut(self, until: dict[int, int]) -> None:
        if until:
            why = "a batch takes a limited span of a partition; run the query again, or use for_each"
            _log.warning("spark.batch_cut", subject=self._options.subject, group=self._group, until=until, why=why)


class OrderedStreamReader(_OrderedReader, StreamMember, DataSourceStreamReader):
    """A micro-batch is a round over the partitions that are held at planning time. Stream offsets count rounds."""

    def __init__(self, options: ReadOptions) -> None:
        _OrderedReader.__init__(self, options)
        StreamMember.__init__(self, options)
        self._limit: int | None = options.max_messages_per_trigger
        self._state_before: tuple[int, KeyRequests] | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"round": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """The next round number if there is work. Without work, wait for a message up to `IDLE_WAIT_S`."""
        work = self._work()
        holder = self._held(work)
        self._limit = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        described = self._look()
        if not self._to_do(work, described, holder) and self._target is None:
            self._wait({one.partition: one.end_offset for one in described.partitions})
            described = self._look()
        count = finished_total(described)
        state = count, key_requests(self._keys())
        is_idle = state == self._state_before  # all remaining messages wait behind keys that make no progress
        self._state_before = state
        if not self._to_do(work, described, holder) or (is_idle and self._target is not None):
            if self._target is not None:
                left = {one.partition for one in work.backlogs(described, self._target)}
                self._end_with(left - holder.epochs().keys())
            return start
        if is_idle:
            time.sleep(IDLE_WAIT_S)
        return {"round": start["round"] + 1}

    def _held(self, work: RoundWork) -> LeaseHolder:
        if self._holder is None:
            self._holder = self._hold(takes_over=self._handler.takes_over)
            count = len(self._holder.open_partitions(TAKE_OVER_S)) if self._handler.takes_over else 1
            self._holder.wait_at_start(is_bounded=self._target is not None, count=count)
        return self._holder

    def _look(self) -> GroupDescription:
        described = self._described()
        self._latest = {one.partition: one.end_offset for one in described.partitions}
        return described

    def _to_do(self, work: RoundWork, described: GroupDescription, holder: LeaseHolder) -> bool:
        epochs = holder.epochs()
        return any(one.partition in epochs for one in work.backlogs(described, self._target, keys=self._keys()))

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[SlicePartition]:
        """Plan the current backlog, also if Spark repeats a round: the group's state in the broker is the
        checkpoint."""
        work = self._work()
        holder = self._held(work)
        backlogs = work.backlogs(self._described(), self._target, self._limit, self._keys())
        tasks = self._task_count()
        return self._partitions(work.plans(backlogs, holder.owner, holder.epochs(), tasks, end["round"]))

    def commit(self, end: dict[str, int]) -> None:
        pass  # the tasks have committed
