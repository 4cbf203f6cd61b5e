"""The data source with a handler: its tasks handle messages where they read them, and its rows are their outcomes.

A query holds the leases of its group while it plans and runs. In a stream that is done by the process that plans, as
long as the query lives: it is a member of the group as any consumer is. A batch query has no process that lives so
long: it takes the group over, plans, and leaves the leases to its tasks, which keep them by their claims; they end with
their life after the last of them. From the plan on others may take over, and wait for the leases. The group's state
says what is to be done, whatever Spark's checkpoint says.

Waiting until something new is stored in any partition of a subject.

What the readers of streams have in common: leases that are held while the query lives, an end, and waiting.
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
from inturn.spark.ordered.lease_holder import Holding
from inturn.spark.ordered.rounds import Steered, Work, done, steered
from inturn.spark.ordered.task import TaskOutcome, TaskPlan, connected, disconnect, run_task
from inturn.spark.shipping import load_handler
from inturn.spark.source.offsets import ByPartition, extents_of, kept_within, offsets_json, resolve
from inturn.spark.source.options import HandlerOptions, ReadOptions


class Arrivals:
    """Long polls, one per partition; what is still held back at the node is not asked for again."""

    def __init__(self, node: Node, subject: str) -> None:
        self._node = node
        self._subject = subject
        self._news = threading.Condition()
        self._asked: dict[int, int] = {}  # partition → offset, of the polls that are not answered
        self._ends: dict[int, int] = {}

    def wait(self, offsets: Mapping[int, int], wait_s: float) -> bool:
        """Whether something is stored at or behind one of the offsets; so long at the most."""
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
        # The smallest size there is: the answer has one batch in it all the same.
        self._node.submit(Read(self._subject, partition, offset, 1, wait_s), self._reply_for(partition))

    def _reply_for(self, partition: int) -> Callable[[Answer | InturnError], None]:
        def reply(answer: Answer | InturnError) -> None:
            with self._news:
                del self._asked[partition]
                if isinstance(answer, Pulled):  # errors are met again, and raised, by whoever reads
                    self._ends[partition] = answer.end_offset
                    self._news.notify_all()

        return reply


IDLE_WAIT_S = 1.0  # Spark asks again at once, 65 times a second, when there was nothing
_log = get_logger("inturn.spark")


class StreamMember(SupportsTriggerAvailableNow):
    """Lives in the process that plans, for as long as the query does. Copies of it, in tasks, hold nothing."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._target: ByPartition | None = None  # AvailableNow: nothing behind it
        self._latest: ByPartition | None = None  # the ends as they were seen last
        self._arrivals: Arrivals | None = None
        self._holding: Holding | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrivals": None, "_holding": None}

    def _connection(self) -> Connection:
        return connected(self._options.target, "the driver", self._options.credentials)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        extents = extents_of(self._connection().node, self._options.subject)
        self._target = {partition: extent.end for partition, extent in extents.items()}

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """For the progress of the query: as `latestOffset` saw it last, whatever was admitted."""
        return None if self._latest is None else offsets_json(self._options.subject, self._latest)

    def _wait(self, offsets: ByPartition) -> None:
        """Until something is stored at or behind one of the offsets, or a moment is over."""
        if self._arrivals is None:
            self._arrivals = Arrivals(self._connection().node, self._options.subject)
        self._arrivals.wait(offsets, IDLE_WAIT_S)

    def _end_with(self, left: Iterable[int]) -> None:
        """AvailableNow has nothing more to do here, and `stop` may not come: hand back. What is left in partitions that
        others hold is theirs, and told."""
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
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.stop()

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
    """A task could not work, or not to its end. What was committed is kept."""

    def __init__(self, plan: TaskPlan, outcome: TaskOutcome, why: str) -> None:
        self.subject, self.group, self.why = plan.subject, plan.group, why
        super().__init__(f"task {outcome.task} of {plan.subject!r} for group {plan.group!r} on {outcome.host}: {why}")


class _Ordered:
    """What both readers are made of. Pickled: options only."""

    def __init__(self, options: ReadOptions) -> None:
        assert options.handler is not None
        assert options.group is not None
        self._options = options
        self._handler: HandlerOptions = options.handler
        self._group: str = options.group

    def _connection(self) -> Connection:
        return connected(self._options.target, "the driver", self._options.credentials)

    def _work(self) -> Work:
        options, handler = self._options, self._handler
        load_handler(handler.name)  # before anything is taken from anybody
        subject = self._connection().subject(options.subject)
        return Work(
            options.target,
            subject,
            self._group,
            handler.order,
            handler.consumer,
            handler.round_s,
            credentials=options.credentials,
        )

    def _hold(self, *, takes_over: bool) -> Holding:
        holding = Holding(
            self._connection(),
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
        return self._connection().group(self._options.subject, self._group).describe()

    def _keys(self) -> list[KeyDescription]:
        return self._connection().group(self._options.subject, self._group).keys()

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
        """Raises TaskFailed for what is no outcome."""
        if outcome.error_kind:
            raise TaskFailed(plan, outcome, outcome.error)


class OrderedBatchReader(_Ordered, DataSourceReader):
    """Everything from where the group stands up to `endingOffsets`, once: a task ends when its part is done, or when
    all that is left of it waits behind held keys. If it ends before, the query fails."""

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
                f"it has handled {outcome.handled} messages, not all of its part: the leases were lost to another "
                "member, or wanted back; run the query again, it goes on where the group stands"
            )
            raise TaskFailed(plan, outcome, why)

    def partitions(self) -> Sequence[SlicePartition]:
        options = self._options
        work = replace(self._work(), round_s=math.inf)  # there is no other round
        node = self._connection().node
        extents = extents_of(node, options.subject)
        ends = resolve(node, options.subject, extents, options.ending_option, options.ending, options.group)
        ends = kept_within(options.subject, extents, ends, options.fail_on_data_loss)
        holding = self._hold(takes_over=True)
        try:
            epochs = holding.wait_for_open(TAKE_OVER_S)
            waiting = work.waiting(self._described(), ends, keys=self._keys())
            self._tell_cut({one.partition: one.until for one in waiting if one.until < ends[one.partition]})
            plans = work.plans(waiting, holding.owner, epochs, self._task_count(), 1)
        except BaseException:
            holding.stop()
            raise
        if plans:
            holding.stand_back()
        else:
            holding.stop()
        return self._partitions(plans)

    def _tell_cut(self, until: dict[int, int]) -> None:
        if until:
            why = "a batch takes so much of a partition at once; run the query again, or use for_each"
            _log.warning("spark.batch_cut", subject=self._options.subject, group=self._group, until=until, why=why)


class OrderedStreamReader(_Ordered, StreamMember, DataSourceStreamReader):
    """A micro-batch is a round over the partitions that are held when it is planned. Its offsets count rounds."""

    def __init__(self, options: ReadOptions) -> None:
        _Ordered.__init__(self, options)
        StreamMember.__init__(self, options)
        self._limit: int | None = options.max_messages_per_trigger
        self._state_before: tuple[int, Steered] | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"round": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """One round more, if there is something to do. If there is not, this waits for it for a moment."""
        work = self._work()
        holding = self._held(work)
        self._limit = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        described = self._look()
        if not self._to_do(work, described, holding) and self._target is None:
            self._wait({one.partition: one.end_offset for one in described.partitions})
            described = self._look()
        count = done(described)
        state = count, steered(self._keys())
        is_idle = state == self._state_before  # all that is left waits behind keys that do not go on
        self._state_before = state
        if not self._to_do(work, described, holding) or (is_idle and self._target is not None):
            if self._target is not None:
                left = {one.partition for one in work.waiting(described, self._target)}
                self._end_with(left - holding.epochs().keys())
            return start
        if is_idle:
            time.sleep(IDLE_WAIT_S)
        return {"round": start["round"] + 1}

    def _held(self, work: Work) -> Holding:
        if self._holding is None:
            self._holding = self._hold(takes_over=self._handler.takes_over)
            count = len(self._holding.open_partitions(TAKE_OVER_S)) if self._handler.takes_over else 1
            self._holding.wait_at_start(is_bounded=self._target is not None, count=count)
        return self._holding

    def _look(self) -> GroupDescription:
        described = self._described()
        self._latest = {one.partition: one.end_offset for one in described.partitions}
        return described

    def _to_do(self, work: Work, described: GroupDescription, holding: Holding) -> bool:
        epochs = holding.epochs()
        return any(one.partition in epochs for one in work.waiting(described, self._target, keys=self._keys()))

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[SlicePartition]:
        """What waits now, not what waited when the round was first planned: the group's state is the checkpoint."""
        work = self._work()
        holding = self._held(work)
        waiting = work.waiting(self._described(), self._target, self._limit, self._keys())
        tasks = self._task_count()
        return self._partitions(work.plans(waiting, holding.owner, holding.epochs(), tasks, end["round"]))

    def commit(self, end: dict[str, int]) -> None:
        pass  # the tasks have
