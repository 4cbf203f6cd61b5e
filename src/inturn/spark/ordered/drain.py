"""Drain: take the backlog of a group over from its consumers, handle it on Spark, and hand the group back.

The driver joins the group with a lease holder and requests all partitions. Online consumers hand their partitions over
as in any rebalance: running handlers end, the consumer commits, the consumer releases. Then the drain works in rounds:
plan the backlog into tasks, run the tasks as a Spark job; tasks commit while they work. At the end the driver leaves,
and the online consumers get their partitions back. The group's state in the broker is the only record: after a crash of
any process, committed messages stay finished and all other messages are still there.

Related modules: `plan` (slices), `rounds` (plans and results of a round), `job` (the Spark job), `task` (work in an
executor), `drain_report` (progress and report).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, TypedDict, Unpack

from inturn.client import Connection
from inturn.model.errors import ConnectionLost, InturnError, InvalidInput, NotFound
from inturn.model.logs import get_logger
from inturn.model.settings import AssignmentStrategy, ConsumerSettings, Order, one_of
from inturn.model.subject import retry_subject
from inturn.protocol.commands import GroupDescription
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings
from inturn.spark.ordered.admission import check_target, describe_existing, order_of, tags_of
from inturn.spark.ordered.drain_report import DrainMonitor, DrainReport, DrainTally, Watch
from inturn.spark.ordered.lease_holder import LeaseHolder, make_group
from inturn.spark.ordered.plan import PartitionBacklog
from inturn.spark.ordered.rounds import (
    RoundResult,
    RoundWork,
    SparkJob,
    finished_total,
    is_spark_alive,
    key_requests,
    span_limits,
    summary_line,
)
from inturn.spark.ordered.task import PATIENCE_S, ROUND_S, TASK_SETTINGS, connected
from inturn.spark.shipping import HandlerName, check_executors, load_handler, module_of, ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 0.25
FAILED_ROUNDS_MAX = 3  # consecutive failed rounds without a finished message

_log = get_logger("inturn.spark")


class DrainFailed(InturnError):
    """The drain could not continue. Committed messages stay finished, and the group was handed back."""

    def __init__(self, subject: str, group: str, why: str) -> None:
        self.subject, self.group, self.why = subject, group, why
        super().__init__(
            f"drain of {subject!r} for group {group!r}: {why}; committed messages stay finished, all others are still "
            "stored: run the drain again, or let the consumers continue"
        )


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """`max_lag`: end when at most so many messages are left, including messages that arrived during the drain. None:
    end at the offsets that were stored at the start."""

    tasks: int | None = None  # tasks at the same time; None: as many as Spark has cores
    round_s: float = ROUND_S
    patience_s: float = PATIENCE_S  # how long a task waits for the retry of failed messages
    max_lag: int | None = None
    take_over_s: float = 120.0  # limit for consumers to hand over, and for the claims of dead tasks to expire

    def __post_init__(self) -> None:
        for name in ("round_s", "patience_s", "take_over_s"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"DrainSettings.{name} is {getattr(self, name)!r}; it must be above 0")
        for name, least in (("tasks", 1), ("max_lag", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"DrainSettings.{name} is {value!r}; it must be {least} or more")


class DrainOptions(TypedDict, total=False):
    """Options of `drain` and `for_each`.

    `order`: the order of the group's members; required only if the group has no members. `consumer`: the settings of
    the group's consumers; `concurrency` applies to every task. `token` and `tls`: as for `connect`. Tasks use `token`
    and `tls`, too, so the TLS files have to exist on the executors."""

    order: Order | str | None
    consumer: ConsumerSettings | None
    settings: DrainSettings | None
    token: str | None
    tls: TlsSettings | None


def drain(
    spark: SparkSession,
    target: str,
    subject: str,
    group: str,
    handler: HandlerName,
    *,
    watch: Watch | None = None,
    **options: Unpack[DrainOptions],
) -> DrainReport:
    """Take over the backlog of a group, handle the messages on Spark with this handler, and hand the group back.

    `target` is a server's address, or with a local master a folder. `handler` is a function, or the name of a function
    as "module:function". Options are `order`, `consumer`, `settings`, `token` and `tls`: see `DrainOptions`. Blocks
    until the group is handed back. Ctrl-C ends the drain early and hands back, too.
    """
    return Drain(spark, target, subject, group, handler, **options).run(watch)


class Drain:
    """A drain that can be stopped from another thread: see `interrupt`. `until`: drain only up to these offsets, by
    partition. `start`: create the group at this position if there is no such group."""

    def __init__(
        self,
        spark: SparkSession,
        target: str,
        subject: str,
        group: str,
        handler: HandlerName,
        *,
        until: Mapping[int, int] | None = None,
        start: str | None = None,
        **options: Unpack[DrainOptions],
    ) -> None:
        order, consumer, settings = options.get("order"), options.get("consumer"), options.get("settings")
        check_target(spark, target)
        self._spark = spark
        self._target = target
        self._credentials = Credentials(options.get("token"), options.get("tls"))
        self._subject_name = subject
        self._group = group
        self._handler = handler
        self._function = load_handler(handler)
        self._order = None if order is None else one_of(Order, "order", order)
        self._consumer = consumer if consumer is not None else TASK_SETTINGS
        self._settings = settings if settings is not None else DrainSettings()
        self._until = until
        self._start = start
        self._interruptions = 0
        self._is_cancelled = False  # an interruption has cancelled a Spark job
        self._is_abandoned = False
        self._tally = DrainTally()

    def interrupt(self) -> None:
        """End the drain when the running handlers have returned; any thread may call this.

        The second call cancels the Spark job: the tasks are killed, and their claims have to expire. The third call
        ends the wait for the claims."""
        self._interruptions += 1

    def run(self, watch: Watch | None = None) -> DrainReport:
        """Run the drain; call once. Blocks until the group is handed back. In the main thread SIGINT and SIGTERM
        interrupt the drain."""
        began_s = time.monotonic()
        self._connection: Connection = connected(self._target, "the driver", self._credentials)
        subject = self._connection.subject(self._subject_name)
        if self._until is not None:
            self._check_until(self._until)  # before the group is created
        if self._start is not None:
            order = self._order if self._order is not None else Order.KEY
            make_group(self._connection, self._subject_name, self._group, order, self._start)
        described = describe_existing(self._connection, self._subject_name, self._group)
        order = order_of(described, self._order)
        strategy = described.assignment or str(self._consumer.assignment)
        tags = tags_of(described, self._consumer.tags)
        consumer = replace(self._consumer, assignment=one_of(AssignmentStrategy, "assignment", strategy), tags=tags)
        self._work = RoundWork(
            target=self._target,
            subject=subject,
            group=self._group,
            order=order,
            consumer=consumer,
            round_s=self._settings.round_s,
            patience_s=self._settings.patience_s,
            credentials=self._credentials,
        )
        ends = {one.partition: one.end_offset for one in described.partitions}
        self._ends = ends if self._until is None else dict(self._until)
        self._monitor = DrainMonitor(self._connection, subject, self._group, self._settings.max_lag, watch)
        self._monitor.begin(began_s, described, self._ends)
        module = module_of(self._handler)
        modules = [] if module is None else [module]
        if ship(self._spark, modules):
            check_executors(self._spark, modules)  # before a partition is taken from a consumer
        holder = LeaseHolder(
            self._connection,
            self._subject_name,
            self._group,
            self._function,
            order=order,
            settings=consumer,
            takes_over=True,
            name=f"drain-{self._subject_name}"[:40],
        )
        with self._signal_handlers():
            return self._run(holder)

    def _check_until(self, until: Mapping[int, int]) -> None:
        subject = self._subject_name
        ends = {one.index: one.end_offset for one in self._connection.describe_subject(subject).partitions}
        for partition, offset in until.items():
            if partition not in ends:
                raise InvalidInput(
                    f"until names partition {partition!r}; subject {subject!r} has partitions 0 to {len(ends) - 1}"
                )
            if not isinstance(offset, int) or not 0 <= offset <= ends[partition]:
                raise InvalidInput(
                    f"until[{partition}] is {offset!r}; partition {partition} of subject {subject!r} ends at offset "
                    f"{ends[partition]}: give 0 to {ends[partition]}, or leave `until` out for all stored messages"
                )

    def _run(self, holder: LeaseHolder) -> DrainReport:
        ended = "interrupted"
        worked_s: float | None = None
        holder.start()
        try:
            if self._take_over(holder):
                worked_s = time.monotonic()
                ended = self._run_rounds(holder)
        except ConnectionLost as error:
            raise self._failed(f"the server is unreachable: {error}") from error
        finally:
            left_s = time.monotonic()
            self._hand_back(holder)
        over_s = time.monotonic()
        after = self._monitor.snapshot("over")
        held_keys = self._connection.group(self._subject_name, self._group).keys()
        tally = self._tally
        return DrainReport(
            subject=self._subject_name,
            group=self._group,
            order=self._work.order.value,
            ended=ended,
            done=after.done,
            rounds=tally.rounds,
            failed_rounds=tally.failed_rounds,
            failures=tally.failures,
            lag=after.lag,
            take_over_s=(left_s if worked_s is None else worked_s) - self._monitor.began_s,
            work_s=0.0 if worked_s is None else left_s - worked_s,
            hand_back_s=over_s - left_s,
            held_keys=tuple(held_keys),
            hot_keys=self._monitor.hot_keys,
            timeline=self._monitor.timeline,
            outcomes=tuple(tally.outcomes),
            missing=tally.missing,
            retrying=self._retrying(),
            limits=tally.limits,
            damage=tally.damage,
            is_handed_back=not self._is_abandoned,
        )

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Let signals interrupt the drain. Spark's own handler of SIGINT cancels all jobs and kills running
        handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            self.interrupt()

        former = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _take_over(self, holder: LeaseHolder) -> bool:
        """Wait until the holder has all open partitions. False if the wait was interrupted."""

        def watch(epochs: dict[int, int]) -> None:
            self._monitor.held_count = len(epochs)
            if self._interruptions:
                raise _Interrupted
            self._monitor.snapshot("taking over")
            time.sleep(POLL_S)

        try:
            epochs = holder.wait_for_open(self._settings.take_over_s, watch)
        except _Interrupted:
            return False
        self._monitor.held_count = len(epochs)
        return True

    # Rounds

    def _run_rounds(self, holder: LeaseHolder) -> str:
        """Run rounds until the drain ends; returns `DrainReport.ended`."""
        tally = self._tally
        failed_in_a_row = 0
        described = self._describe()
        advanced_s = time.monotonic()
        while True:
            if self._interruptions:
                return "interrupted"
            if self._settings.max_lag is not None and described.lag <= self._settings.max_lag:
                return "lag"
            keys = self._connection.group(self._subject_name, self._group).keys()
            ends = None if self._settings.max_lag is not None else self._ends
            backlogs = self._work.backlogs(described, ends, keys=keys)
            if not backlogs:
                return "end"
            before = finished_total(described)
            result = self._run_round(holder, backlogs)
            described = self._describe()
            after = self._connection.group(self._subject_name, self._group).keys()
            has_advanced = finished_total(described) > before or key_requests(after) != key_requests(keys)
            if has_advanced:
                advanced_s = time.monotonic()
            if result.error is not None:
                tally.failed_rounds += 1
                failed_in_a_row = 1 if has_advanced else failed_in_a_row + 1
                _log.warning("drain.round_failed", group=self._group, round=tally.rounds, error=result.error)
                if failed_in_a_row >= FAILED_ROUNDS_MAX and not self._interruptions:
                    raise self._failed(f"{failed_in_a_row} rounds failed: {result.error}")
                continue
            failed_in_a_row = 0
            if has_advanced or self._interruptions:
                continue
            if result.is_held_up:
                tally.damage = result.damage
                tally.limits = result.limits or span_limits(backlogs, after)
                return "damaged" if tally.damage else "limit" if tally.limits else "held keys"
            if time.monotonic() - advanced_s > self._settings.take_over_s:
                raise self._failed(
                    f"no message was finished for {self._settings.take_over_s:g} s{_claimed_by(described)}"
                )

    def _run_round(self, holder: LeaseHolder, backlogs: Sequence[PartitionBacklog]) -> RoundResult:
        """Run one Spark job. Raises DrainFailed if a repetition would fail in the same way."""
        self._tally.rounds += 1
        self._monitor.round = self._tally.rounds
        if not self._take_over(holder):  # leases may have been lost, for example while the server was away
            return RoundResult(None, is_held_up=False)
        task_count = self._settings.tasks or max(1, self._spark.sparkContext.defaultParallelism)
        self._work = replace(self._work, subject=self._connection.subject(self._subject_name))  # it may have grown
        plans = self._work.plans(list(backlogs), holder.owner, holder.epochs(), task_count, self._tally.rounds)
        if not plans:
            # The remaining partitions wait behind growth gates, for keys that are held up in their parent partitions.
            partitions = {one.partition for one in backlogs}
            return RoundResult(None, is_held_up=not holder.open_partitions(0.0) & partitions)
        job = SparkJob(self._spark, plans, self._handler, f"drain {self._subject_name} for {self._group}")
        job.start()
        self._attend(job, holder)
        error, outcomes = job.error, job.outcomes
        if error is not None:
            if not is_spark_alive(self._spark):
                raise self._failed("Spark has ended: its Java process is gone, or its session was stopped") from error
            return RoundResult(summary_line(error), is_held_up=False)
        self._tally.add(outcomes)
        for outcome in outcomes:
            if outcome.error and outcome.is_final and not self._interruptions:
                raise self._failed(f"task {outcome.task} on {outcome.host}: {outcome.error}")
        return RoundResult.of(outcomes)

    def _attend(self, job: SparkJob, holder: LeaseHolder) -> None:
        """Take snapshots until the job is over. The first interruption notifies the tasks to end, the second
        cancels the job."""
        handing_back: threading.Thread | None = None
        while job.is_alive():
            job.join(POLL_S)
            if self._interruptions and handing_back is None:
                # The broker refuses the release while tasks work under the lease, and notifies the tasks to end.
                handing_back = threading.Thread(target=holder.stop, args=(None,), daemon=True)
                handing_back.start()
            if self._interruptions > 1:
                self._is_cancelled = True
                job.cancel()
            self._monitor.snapshot("working" if handing_back is None else "handing back")

    def _failed(self, why: str) -> DrainFailed:
        return DrainFailed(self._subject_name, self._group, why)

    # End

    def _hand_back(self, holder: LeaseHolder) -> None:
        """Release the leases; wait until the claims of dead tasks have expired. The second interruption ends the wait,
        or the third if the second has cancelled a job."""
        self._monitor.held_count = 0
        enough = 3 if self._is_cancelled else 2
        stopping = threading.Thread(target=holder.stop, args=(None,), daemon=True)
        stopping.start()
        while stopping.is_alive():
            if self._interruptions >= enough:
                _log.warning("drain.not_handed_back", subject=self._subject_name, group=self._group)
                self._is_abandoned = True
                holder.abandon()
                return
            stopping.join(POLL_S)
            with contextlib.suppress(InturnError):  # the error that ended the drain is the one to report
                self._monitor.snapshot("handing back")

    def _retrying(self) -> int:
        with contextlib.suppress(NotFound):  # no message needed a retry subject
            return self._connection.group(retry_subject(self._group, self._subject_name), self._group).describe().lag
        return 0

    def _describe(self) -> GroupDescription:
        return self._connection.group(self._subject_name, self._group).describe()


class _Interrupted(Exception):
    pass


def _claimed_by(described: GroupDescription) -> str:
    claimants = sorted({one.claimant for one in described.claims})
    return f"; {', '.join(claimants)} still has claims: is a handler hanging there?" if claimants else ""
