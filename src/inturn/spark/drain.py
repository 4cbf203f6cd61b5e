"""Drain: a backlog is taken over from the consumers of a group, worked off on Spark, and handed back.

The driver joins the group and asks for all of it. Online consumers give their partitions up as in any hand-over: their
handlers end, they commit, they release. Then rounds: what waits is planned into tasks, Spark runs them, they commit as
they go. In the end the driver leaves, and the online consumers have what they had. The group's state is the only
record: whatever dies in between, what was committed is done, and the rest is still there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inturn.connection import Connection
from inturn.model.commands import ClaimDescription, GroupDescription, KeyDescription
from inturn.model.errors import InturnError, InvalidInput, NotFound
from inturn.model.logs import get_logger
from inturn.model.settings import AssignmentStrategy, ConsumerSettings, Order, one_of
from inturn.spark.connections import connected
from inturn.spark.execution import PATIENCE_S, ROUND_S, TaskOutcome, TaskPlan
from inturn.spark.handler import HandlerName, load_handler, module_of
from inturn.spark.holding import Holding
from inturn.spark.hot_keys import HotKey, HotKeys
from inturn.spark.job import run_job
from inturn.spark.shipping import is_local, ship
from inturn.spark.slices import Waiting, plan
from inturn.wire.address import is_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S = 0.25
RATE_S = 10.0  # rates are over the last so many seconds
SLICED_MESSAGES_MAX = 4_000_000  # per partition and round: finished sets of slices have to stay small
FAILED_ROUNDS_MAX = 3

_log = get_logger("inturn.spark")


class DrainFailed(InturnError):
    """The drain could not go on. What was committed is kept, and the group was handed back."""

    def __init__(self, subject: str, group: str, why: str) -> None:
        self.subject, self.group, self.why = subject, group, why
        super().__init__(
            f"drain of {subject!r} for group {group!r}: {why}; what was committed is kept, and the rest is still "
            "there: run it again, or let the consumers go on"
        )


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """`max_lag`: end when so few are left, whatever has come meanwhile; None: end at what was there at the start."""

    tasks: int | None = None  # at once; None: as many as Spark has cores
    round_s: float = ROUND_S
    patience_s: float = PATIENCE_S  # how long a task waits for messages that failed to be tried again
    max_lag: int | None = None
    take_over_s: float = 120.0  # how long online consumers have to hand over

    def __post_init__(self) -> None:
        for name in ("round_s", "patience_s", "take_over_s"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"DrainSettings.{name} is {getattr(self, name)!r}; it must be above 0")
        for name, least in (("tasks", 1), ("max_lag", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"DrainSettings.{name} is {value!r}; it must be {least} or more")


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """A look at a drain."""

    phase: str  # "taking over", "working", "handing back", "over"
    seconds: float
    round: int = 0
    done: int = 0  # messages, by anybody, since the drain began
    total: int = 0  # that it is to do, as far as known
    lag: int = 0  # of the group
    per_s: float = 0.0
    held: int = 0  # partitions
    partitions: int = 0
    tasks: tuple[ClaimDescription, ...] = ()
    hot_keys: tuple[HotKey, ...] = ()
    committed: tuple[int, ...] = ()

    @property
    def remaining(self) -> int:
        return max(0, self.total - self.done)

    @property
    def eta_s(self) -> float | None:
        return self.remaining / self.per_s if self.per_s > 0 else None


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a drain did. `ended` is "end", "lag", "held keys" (all that is left waits behind keys that fail, are blocked
    or parked) or "interrupted"."""

    subject: str
    group: str
    order: str
    ended: str
    done: int
    rounds: int
    failed_rounds: int
    failures: int  # handler calls that failed
    lag: int
    take_over_s: float
    work_s: float
    hand_back_s: float
    held_keys: tuple[KeyDescription, ...] = ()
    hot_keys: tuple[HotKey, ...] = ()
    timeline: tuple[DrainProgress, ...] = ()
    outcomes: tuple[TaskOutcome, ...] = ()

    @property
    def per_s(self) -> float:
        return self.done / self.work_s if self.work_s > 0 else 0.0


Watch = Callable[[DrainProgress], None]


def drain(
    spark: SparkSession,
    target: str,
    subject: str,
    group: str,
    handler: HandlerName,
    *,
    order: Order | str | None = None,
    consumer: ConsumerSettings | None = None,
    settings: DrainSettings | None = None,
    watch: Watch | None = None,
) -> DrainReport:
    """Take the backlog of a group over, handle it on Spark with this handler, and hand the group back.

    `target` is a server's address, or with a local master a folder. `handler` is a function, or its name as
    "module:function"; `consumer` are the settings of the group's consumers; their `concurrency` is that of each task.
    `order` is what the group's members use; it has to be given only if there are none. Ctrl-C hands back as well.
    """
    return Drain(spark, target, subject, group, handler, order=order, consumer=consumer, settings=settings).run(watch)


class Drain:
    """One drain, for those who want to stop it from elsewhere: `interrupt`."""

    def __init__(
        self,
        spark: SparkSession,
        target: str,
        subject: str,
        group: str,
        handler: HandlerName,
        *,
        order: Order | str | None = None,
        consumer: ConsumerSettings | None = None,
        settings: DrainSettings | None = None,
        until: dict[int, int] | None = None,
    ) -> None:
        check_target(spark, target)
        self._spark = spark
        self._target = target
        self._subject_name = subject
        self._group = group
        self._handler = handler
        self._function = load_handler(handler)
        self._order = None if order is None else one_of(Order, "order", order)
        self._consumer = consumer if consumer is not None else ConsumerSettings(concurrency=64)
        self._settings = settings if settings is not None else DrainSettings()
        self._until = until
        self._interrupted = threading.Event()
        self._timeline: list[DrainProgress] = []
        self._recent: deque[tuple[float, int]] = deque()
        self._outcomes: list[TaskOutcome] = []
        self._held_count = 0
        self._round = 0
        self._base = 0
        self._began_s = 0.0

    def interrupt(self) -> None:
        """End as soon as the handlers that run are over; from any thread."""
        self._interrupted.set()

    def run(self, watch: Watch | None = None) -> DrainReport:
        self._watch = watch
        self._began_s = time.monotonic()
        self._connection: Connection = connected(self._target, "the driver")
        self._subject = self._connection.subject(self._subject_name)
        described = self._describe_existing()
        self._order = self._order_of(described)
        strategy = described.assignment or str(self._consumer.assignment)
        self._consumer = replace(self._consumer, assignment=one_of(AssignmentStrategy, "assignment", strategy))
        self._base = _done(described)
        self._ends = self._until or {one.partition: one.end_offset for one in described.partitions}
        self._hot = HotKeys(self._connection, self._subject)
        module = module_of(self._handler)
        ship(self._spark, [] if module is None else [module])
        holding = Holding(
            self._connection,
            self._subject_name,
            self._group,
            self._function,
            order=self._order,
            settings=self._consumer,
            takes_over=True,
            name=f"drain-{self._subject_name}"[:40],
        )
        ended, failed_rounds = "interrupted", 0
        worked_s = self._began_s
        holding.start()
        try:
            partitions = set(range(self._subject.partition_count))
            holding.wait_for(partitions, self._settings.take_over_s, lambda epochs: self._taking_over(len(epochs)))
            self._held_count = len(partitions)
            worked_s = time.monotonic()
            ended, failed_rounds = self._work(holding)
        except KeyboardInterrupt:
            self._interrupted.set()
        finally:
            left_s = time.monotonic()
            self._hand_back(holding)
        over_s = time.monotonic()
        after = self._look("over")
        held = self._connection.keys(self._subject_name, self._group)
        return DrainReport(
            self._subject_name,
            self._group,
            self._order.value,
            ended,
            after.done,
            self._round,
            failed_rounds,
            sum(one.failed for one in self._outcomes),
            after.lag,
            worked_s - self._began_s,
            left_s - worked_s,
            over_s - left_s,
            tuple(held),
            self._hot.top(),
            tuple(self._timeline),
            tuple(self._outcomes),
        )

    # Before

    def _describe_existing(self) -> GroupDescription:
        try:
            return self._connection.describe_group(self._subject_name, self._group)
        except NotFound:
            known = sorted(one.group for one in self._connection.groups() if one.subject == self._subject_name)
            there = f"it has {', '.join(known)}" if known else "it has none: nobody has consumed it yet"
            raise NotFound("group", self._group, f"on subject {self._subject_name!r}; {there}") from None

    def _order_of(self, described: GroupDescription) -> Order:
        """The group's own. One that has no members tells nothing; it is asked for, since tasks and consumers that keep
        to different orders would overtake each other."""
        if described.order is None:
            return self._order if self._order is not None else Order.KEY
        if self._order is not None and self._order.value != described.order:
            raise InvalidInput(
                f"order={self._order.value!r}: the members of group {self._group!r} use {described.order!r}; "
                "leave it out, or use the same"
            )
        return one_of(Order, "order", described.order)

    def _taking_over(self, held: int) -> None:
        self._held_count = held
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        self._look("taking over")
        time.sleep(LOOK_S)

    # Rounds

    def _work(self, holding: Holding) -> tuple[str, int]:
        failed = failed_in_a_row = 0
        while True:
            described = self._connection.describe_group(self._subject_name, self._group)
            if self._interrupted.is_set():
                return "interrupted", failed
            if self._settings.max_lag is not None and described.lag <= self._settings.max_lag:
                return "lag", failed
            waiting = self._waiting(described)
            if not waiting:
                return "end", failed
            before = _done(described)
            error = self._run_round(holding, waiting)
            after = _done(self._connection.describe_group(self._subject_name, self._group))
            if error is not None:
                failed, failed_in_a_row = failed + 1, failed_in_a_row + 1
                _log.warning("drain.round_failed", group=self._group, round=self._round, error=error)
                if failed_in_a_row >= FAILED_ROUNDS_MAX and not self._interrupted.is_set():
                    raise DrainFailed(self._subject_name, self._group, f"{failed_in_a_row} rounds failed: {error}")
                continue
            failed_in_a_row = 0
            if after == before and not self._interrupted.is_set():
                return "held keys", failed

    def _waiting(self, described: GroupDescription) -> list[Waiting]:
        found = []
        for one in described.partitions:
            until = one.end_offset if self._settings.max_lag is not None else self._ends.get(one.partition, 0)
            until = min(until, one.committed + SLICED_MESSAGES_MAX)
            count = max(0, until - one.committed - one.finished_count)
            if count:
                found.append(Waiting(one.partition, count, until))
        return found

    def _run_round(self, holding: Holding, waiting: Sequence[Waiting]) -> str | None:
        """Why it failed, if it did; raises if it would fail again."""
        self._round += 1
        assert self._order is not None
        epochs = holding.epochs()
        waiting = [one for one in waiting if one.partition in epochs]
        task_count = self._settings.tasks or max(1, self._spark.sparkContext.defaultParallelism)
        plans = [
            TaskPlan(
                self._target,
                self._subject_name,
                self._group,
                holding.owner,
                {one.partition: epochs[one.partition] for one in slices},
                slices,
                self._order,
                self._consumer,
                self._round,
                index,
                self._settings.round_s,
                self._settings.patience_s,
            )
            for index, slices in enumerate(plan(self._subject, self._order, waiting, task_count))
        ]
        if not plans:
            time.sleep(LOOK_S)
            return None
        job = _Job(self._spark, plans, self._handler, f"drain {self._subject_name} for {self._group}")
        job.start()
        self._attend(job, holding)
        if job.error is not None:
            if not _is_alive(self._spark):
                raise DrainFailed(self._subject_name, self._group, "Spark is gone: its Java process has ended")
            return _first_line(job.error)
        self._outcomes += job.outcomes
        for outcome in job.outcomes:
            if outcome.error and outcome.is_final:
                raise DrainFailed(
                    self._subject_name, self._group, f"task {outcome.task} on {outcome.host}: {outcome.error}"
                )
        errors = [one.error for one in job.outcomes if one.error_kind]
        return errors[0] if errors else None

    def _attend(self, job: _Job, holding: Holding) -> None:
        """Look on until the job is over. An interruption calls its tasks back, a second one cancels it."""
        handing_back: threading.Thread | None = None
        while job.is_alive():
            try:
                job.join(LOOK_S)
                self._look("working" if handing_back is None else "handing back")
            except KeyboardInterrupt:
                if self._interrupted.is_set():
                    job.cancel()
                self._interrupted.set()
            if self._interrupted.is_set() and handing_back is None:
                # Its release is refused as long as tasks work under the lease; they are told, and come to an end.
                handing_back = threading.Thread(target=holding.stop, args=(None,), daemon=True)
                handing_back.start()

    # After

    def _hand_back(self, holding: Holding) -> None:
        self._held_count = 0
        stopping = threading.Thread(target=holding.stop, args=(None,), daemon=True)
        stopping.start()
        while stopping.is_alive():
            stopping.join(LOOK_S)
            self._look("handing back")

    # Looking

    def _look(self, phase: str) -> DrainProgress:
        now_s = time.monotonic()
        try:
            described = self._connection.describe_group(self._subject_name, self._group)
        except InturnError:
            if not self._timeline:
                raise
            return self._timeline[-1]  # the server is away for a moment; whoever has to know hears it elsewhere
        done = _done(described) - self._base
        self._recent.append((now_s, done))
        while len(self._recent) > 2 and now_s - self._recent[0][0] > RATE_S:
            self._recent.popleft()
        first_s, first_done = self._recent[0]
        per_s = (done - first_done) / (now_s - first_s) if now_s > first_s else 0.0
        if self._settings.max_lag is not None:
            total = done + max(0, described.lag - self._settings.max_lag)
        else:
            total = sum(self._ends.values()) - self._base
        self._hot.sample({one.partition: one.committed for one in described.partitions})
        look = DrainProgress(
            phase,
            now_s - self._began_s,
            self._round,
            done,
            max(total, 0),
            described.lag,
            max(0.0, per_s),
            self._held_count,
            self._subject.partition_count,
            described.claims,
            self._hot.top(),
            tuple(one.committed + one.finished_count for one in described.partitions),
        )
        self._timeline.append(look)
        if self._watch is not None:
            self._watch(look)
        return look


class _Job(threading.Thread):
    """A Spark job in a thread, so that somebody can look on, and cancel it."""

    def __init__(self, spark: SparkSession, plans: list[TaskPlan], handler: HandlerName, what: str) -> None:
        super().__init__(name="inturn-spark-job", daemon=True)
        self._spark = spark
        self._plans = plans
        self._handler = handler
        self._what = what
        self._tag = f"inturn-{id(self)}"
        self.outcomes: list[TaskOutcome] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._spark.addTag(self._tag)
            self.outcomes = run_job(self._spark, self._plans, self._handler)
        except BaseException as error:
            self.error = error

    def cancel(self) -> None:
        self._spark.interruptTag(self._tag)


def check_target(spark: SparkSession, target: str) -> None:
    """A folder is there for the tasks only if they run on this machine."""
    if not is_address(target) and not is_local(spark.sparkContext.master):
        raise InvalidInput(
            f"{target!r} is a folder of this machine, which executors of {spark.sparkContext.master} do not see; "
            "serve it (`inturn serve`), and give the server's address"
        )


def _done(described: GroupDescription) -> int:
    return sum(one.committed + one.finished_count for one in described.partitions)


def _is_alive(spark: SparkSession) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
