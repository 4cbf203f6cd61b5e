"""Drain: a backlog is taken over from the consumers of a group, worked off on Spark, and handed back.

The driver joins the group and asks for all of it. Online consumers give their partitions up as in any hand-over: their
handlers end, they commit, they release. Then rounds: what waits is planned into tasks, Spark runs them, they commit as
they go. In the end the driver leaves, and the online consumers have what they had. The group's state is the only
record: whatever dies in between, what was committed is done, and the rest is still there.

Longer than a usual file: taking over, rounds and handing back share what the driver holds. Plans are made in `slices`,
`rounds` says what waits, tasks are in `execution`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, TypedDict, Unpack

from inturn.client import Connection
from inturn.model.errors import ConnectionLost, InturnError, InvalidInput, NotFound
from inturn.model.logs import get_logger
from inturn.model.settings import SPAN_MAX, AssignmentStrategy, ConsumerSettings, Order, one_of
from inturn.model.subject import retry_subject
from inturn.protocol.commands import ClaimDescription, DescribeGroup, GroupDescription, KeyDescription
from inturn.protocol.request import ask
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings
from inturn.spark.ordered.admission import check_target as check_target
from inturn.spark.ordered.admission import describe_existing, order_of, tags_of
from inturn.spark.ordered.lease_holder import Holding, make_group
from inturn.spark.ordered.plan import HotKey, HotKeys, Waiting
from inturn.spark.ordered.rounds import Work, steered
from inturn.spark.ordered.rounds import done as count_done
from inturn.spark.ordered.task import (
    PATIENCE_S,
    ROUND_S,
    TASK_SETTINGS,
    LimitReached,
    TaskOutcome,
    TaskPlan,
    connected,
    run_job,
)
from inturn.spark.shipping import HandlerName, check_executors, load_handler, module_of, ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S = 0.25
LOOK_PATIENCE_S = 1.0  # a look is not worth waiting for a server that is away
RATE_S = 10.0  # rates are over the last so many seconds
FAILED_ROUNDS_MAX = 3  # in a row, without anything done
TIMELINE_MAX = 2000  # looks that are kept; of more, every other one goes

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
    take_over_s: float = 120.0  # how long online consumers have to hand over, and tasks that are gone to lose claims

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
    held_keys: tuple[KeyDescription, ...] = ()  # of each partition, the one that most waits behind

    @property
    def remaining(self) -> int:
        return max(0, self.total - self.done)

    @property
    def eta_s(self) -> float | None:
        return self.remaining / self.per_s if self.per_s > 0 else None


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a drain did. `ended` is "end", "lag", "held keys" (all that is left waits behind keys that fail, are blocked
    or parked), "limit" (there is more, but too far beyond such a key: `limits`), "damaged" (some of what is left cannot
    be read: `damage`) or "interrupted"."""

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
    timeline: tuple[DrainProgress, ...] = field(default=(), repr=False)
    outcomes: tuple[TaskOutcome, ...] = field(default=(), repr=False)
    missing: int = 0  # offsets that were gone from the log before anybody could handle them
    retrying: int = 0  # messages that failed and are to be tried again by the group's consumers, when it is time
    limits: tuple[LimitReached, ...] = ()
    damage: tuple[str, ...] = ()
    is_handed_back: bool = True  # False: that was interrupted, and partitions are free when their leases have ended

    @property
    def per_s(self) -> float:
        return self.done / self.work_s if self.work_s > 0 else 0.0


Watch = Callable[[DrainProgress], None]


class DrainOptions(TypedDict, total=False):
    """How something is drained. `order` is what the group's members use; it has to be given only if there are none.
    `consumer` are the settings of the group's consumers; their `concurrency` is that of each task. `token` and `tls`
    are what `connect` takes; tasks use them, too, so the files have to be where they run."""

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
    """Take the backlog of a group over, handle it on Spark with this handler, and hand the group back.

    `target` is a server's address, or with a local master a folder. `handler` is a function, or its name as
    "module:function". Options are `order`, `consumer`, `settings`, `token` and `tls`: `DrainOptions`. Ctrl-C hands back
    as well.
    """
    return Drain(spark, target, subject, group, handler, **options).run(watch)


class Drain:
    """One drain, for those who want to stop it from elsewhere: `interrupt`. `until`: up to these offsets only, by
    partition. `start`: where a group begins that is not there yet."""

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
        self._is_cancelled = False  # a job, by an interruption
        self._is_abandoned = False
        self._limits: tuple[LimitReached, ...] = ()
        self._damage: tuple[str, ...] = ()
        self._missing = 0
        self._timeline: list[DrainProgress] = []
        self._recent: deque[tuple[float, int]] = deque()
        self._outcomes: list[TaskOutcome] = []
        self._held_count = 0
        self._round = 0
        self._base = 0
        self._began_s = 0.0

    def interrupt(self) -> None:
        """End as soon as the handlers that run are over; from any thread. The second time the Spark job is cancelled:
        its tasks are killed, and their claims have to end by themselves. Once more, and that is not waited for."""
        self._interruptions += 1

    def run(self, watch: Watch | None = None) -> DrainReport:
        """Called once. In the main thread SIGINT and SIGTERM interrupt it."""
        self._watch = watch
        self._began_s = time.monotonic()
        self._connection: Connection = connected(self._target, "the driver", self._credentials)
        self._subject = self._connection.subject(self._subject_name)
        if self._until is not None:
            self._check_until(self._until)  # before a group is made
        if self._start is not None:
            order = self._order if self._order is not None else Order.KEY
            make_group(self._connection, self._subject_name, self._group, order, self._start)
        described = describe_existing(self._connection, self._subject_name, self._group)
        order = order_of(described, self._order)
        strategy = described.assignment or str(self._consumer.assignment)
        tags = tags_of(described, self._consumer.tags)
        consumer = replace(self._consumer, assignment=one_of(AssignmentStrategy, "assignment", strategy), tags=tags)
        settings = self._settings
        self._plan = Work(
            self._target,
            self._subject,
            self._group,
            order,
            consumer,
            settings.round_s,
            settings.patience_s,
            self._credentials,
        )
        self._base = count_done(described)
        ends = {one.partition: one.end_offset for one in described.partitions}
        self._ends = ends if self._until is None else dict(self._until)
        places = {one.partition: one.committed + one.finished_count for one in described.partitions}
        self._total = sum(max(0, end - places[partition]) for partition, end in self._ends.items())
        self._hot = HotKeys(self._connection, self._subject)
        module = module_of(self._handler)
        modules = [] if module is None else [module]
        if ship(self._spark, modules):
            check_executors(self._spark, modules)  # before anything is taken from anybody
        holding = Holding(
            self._connection,
            self._subject_name,
            self._group,
            self._function,
            order=order,
            settings=consumer,
            takes_over=True,
            name=f"drain-{self._subject_name}"[:40],
        )
        with self._signalled():
            return self._run(holding, order)

    def _check_until(self, until: Mapping[int, int]) -> None:
        subject = self._subject_name
        ends = {one.index: one.end_offset for one in self._connection.describe_subject(subject).partitions}
        for partition, asked in until.items():
            if partition not in ends:
                raise InvalidInput(
                    f"until names partition {partition!r}; subject {subject!r} has partitions 0 to {len(ends) - 1}"
                )
            if not isinstance(asked, int) or not 0 <= asked <= ends[partition]:
                raise InvalidInput(
                    f"until[{partition}] is {asked!r}; partition {partition} of subject {subject!r} ends at offset "
                    f"{ends[partition]}: give 0 to {ends[partition]}, or leave `until` out for all that is stored"
                )

    def _run(self, holding: Holding, order: Order) -> DrainReport:
        ended, failed_rounds = "interrupted", 0
        worked_s: float | None = None
        holding.start()
        try:
            if self._take_over(holding):
                worked_s = time.monotonic()
                ended, failed_rounds = self._work(holding)
        except ConnectionLost as error:
            raise DrainFailed(self._subject_name, self._group, f"the server is gone: {error}") from error
        finally:
            left_s = time.monotonic()
            self._hand_back(holding)
        over_s = time.monotonic()
        after = self._look("over")
        held = self._connection.group(self._subject_name, self._group).keys()
        return DrainReport(
            self._subject_name,
            self._group,
            order.value,
            ended,
            after.done,
            self._round,
            failed_rounds,
            sum(one.failed for one in self._outcomes),
            after.lag,
            (left_s if worked_s is None else worked_s) - self._began_s,
            0.0 if worked_s is None else left_s - worked_s,
            over_s - left_s,
            tuple(held),
            self._hot.top(),
            tuple(self._timeline),
            tuple(self._outcomes),
            self._missing,
            self._retrying(),
            self._limits,
            self._damage,
            not self._is_abandoned,
        )

    @contextlib.contextmanager
    def _signalled(self) -> Iterator[None]:
        """Signals interrupt. Spark's own way with SIGINT is to cancel all jobs, which kills handlers half-way."""
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

    def _take_over(self, holding: Holding) -> bool:
        """False if that was interrupted."""

        def watch(epochs: dict[int, int]) -> None:
            self._held_count = len(epochs)
            if self._interruptions:
                raise _Interrupted
            self._look("taking over")
            time.sleep(LOOK_S)

        try:
            epochs = holding.wait_for_open(self._settings.take_over_s, watch)
        except _Interrupted:
            return False
        self._held_count = len(epochs)
        return True

    # Rounds

    def _work(self, holding: Holding) -> tuple[str, int]:
        failed = failed_in_a_row = 0
        described = self._describe()
        advanced_s = time.monotonic()
        while True:
            if self._interruptions:
                return "interrupted", failed
            if self._settings.max_lag is not None and described.lag <= self._settings.max_lag:
                return "lag", failed
            keys = self._connection.group(self._subject_name, self._group).keys()
            ends = None if self._settings.max_lag is not None else self._ends
            waiting = self._plan.waiting(described, ends, keys=keys)
            if not waiting:
                return "end", failed
            before = count_done(described)
            result = self._run_round(holding, waiting)
            described = self._describe()
            after = self._connection.group(self._subject_name, self._group).keys()
            has_advanced = count_done(described) > before or steered(after) != steered(keys)
            if has_advanced:
                advanced_s = time.monotonic()
            if result.error is not None:
                failed, failed_in_a_row = failed + 1, 1 if has_advanced else failed_in_a_row + 1
                _log.warning("drain.round_failed", group=self._group, round=self._round, error=result.error)
                if failed_in_a_row >= FAILED_ROUNDS_MAX and not self._interruptions:
                    raise self._failed(f"{failed_in_a_row} rounds failed: {result.error}")
                continue
            failed_in_a_row = 0
            if has_advanced or self._interruptions:
                continue
            if result.is_held_up:
                self._damage = result.damage
                self._limits = result.limits or _cut_short(waiting, after)
                ended = "damaged" if self._damage else "limit" if self._limits else "held keys"
                return ended, failed
            if time.monotonic() - advanced_s > self._settings.take_over_s:
                raise self._failed(f"nothing was done for {self._settings.take_over_s:g} s{_claimed_by(described)}")

    def _run_round(self, holding: Holding, waiting: Sequence[Waiting]) -> _Result:
        """Raises if it would be the same again."""
        self._round += 1
        if not self._take_over(holding):  # what was lost since, for example while the server was away
            return _Result(None, is_held_up=False)
        task_count = self._settings.tasks or max(1, self._spark.sparkContext.defaultParallelism)
        self._plan = replace(self._plan, subject=self._connection.subject(self._subject_name))  # it may have grown
        epochs = holding.epochs()
        plans = self._plan.plans(list(waiting), holding.owner, epochs, task_count, self._round)
        if not plans:
            # What is left waits for keys that are held up elsewhere, in the partitions that it came from.
            return _Result(None, is_held_up=not holding.open_partitions(0.0) & {one.partition for one in waiting})
        job = _Job(self._spark, plans, self._handler, f"drain {self._subject_name} for {self._group}")
        job.start()
        self._attend(job, holding)
        error, outcomes = job.error, job.outcomes
        if error is not None:
            if not _is_alive(self._spark):
                raise self._failed("Spark is gone: its Java process has ended, or its session was stopped") from error
            return _Result(_in_a_line(error), is_held_up=False)
        self._outcomes += outcomes
        self._missing += _missing(outcomes)
        for outcome in outcomes:
            if outcome.error and outcome.is_final and not self._interruptions:
                raise self._failed(f"task {outcome.task} on {outcome.host}: {outcome.error}")
        # A log that is damaged stays so; whatever else keeps a task from being through may be over next time.
        damage = dict.fromkeys(text for one in outcomes for text in one.damage)
        errors = [one.error for one in outcomes if one.error_kind or (one.error and not (one.is_through or one.damage))]
        is_held_up = all(one.is_through or one.is_held_up or one.limits for one in outcomes)
        return _Result(errors[0] if errors else None, is_held_up, _at_limits(outcomes), tuple(damage))

    def _attend(self, job: _Job, holding: Holding) -> None:
        """Look on until the job is over. An interruption calls its tasks back, a second one cancels it."""
        handing_back: threading.Thread | None = None
        while job.is_alive():
            job.join(LOOK_S)
            if self._interruptions and handing_back is None:
                # Its release is refused as long as tasks work under the lease; they are told, and come to an end.
                handing_back = threading.Thread(target=holding.stop, args=(None,), daemon=True)
                handing_back.start()
            if self._interruptions > 1:
                self._is_cancelled = True
                job.cancel()
            self._look("working" if handing_back is None else "handing back")

    def _failed(self, why: str) -> DrainFailed:
        return DrainFailed(self._subject_name, self._group, why)

    # After

    def _hand_back(self, holding: Holding) -> None:
        """Wait until tasks that are gone have lost their claims. The second interruption ends that, or the third where
        the second has cancelled a job."""
        self._held_count = 0
        enough = 3 if self._is_cancelled else 2
        stopping = threading.Thread(target=holding.stop, args=(None,), daemon=True)
        stopping.start()
        while stopping.is_alive():
            if self._interruptions >= enough:
                _log.warning("drain.not_handed_back", subject=self._subject_name, group=self._group)
                self._is_abandoned = True
                holding.abandon()
                return
            stopping.join(LOOK_S)
            with contextlib.suppress(InturnError):  # whatever made it end is what is to be told
                self._look("handing back")

    def _retrying(self) -> int:
        with contextlib.suppress(NotFound):  # it never needed one
            return self._connection.group(retry_subject(self._group, self._subject_name), self._group).describe().lag
        return 0

    # Looking

    def _describe(self) -> GroupDescription:
        return self._connection.group(self._subject_name, self._group).describe()

    def _look(self, phase: str) -> DrainProgress:
        now_s = time.monotonic()
        try:
            command = DescribeGroup(self._subject_name, self._group)
            described = ask(self._connection.node, command, GroupDescription, LOOK_PATIENCE_S)
        except InturnError:
            if not self._timeline:
                raise
            return self._timeline[-1]  # the server is away for a moment; whoever has to know hears it elsewhere
        done = count_done(described) - self._base
        self._recent.append((now_s, done))
        while len(self._recent) > 2 and now_s - self._recent[0][0] > RATE_S:
            self._recent.popleft()
        first_s, first_done = self._recent[0]
        per_s = (done - first_done) / (now_s - first_s) if now_s > first_s else 0.0
        if self._settings.max_lag is not None:
            total = done + max(0, described.lag - self._settings.max_lag)
        else:
            total = self._total
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
            tuple(one.blocking for one in described.partitions if one.blocking is not None),
        )
        if len(self._timeline) >= TIMELINE_MAX:
            del self._timeline[1::2]
        self._timeline.append(look)
        if self._watch is not None:
            self._watch(look)
        return look


class _Interrupted(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Result:
    """Of a round: why it failed, if it did. `is_held_up`: all that is left waits behind keys that do not go on, or was
    not read for their sake, or cannot be read."""

    error: str | None
    is_held_up: bool
    limits: tuple[LimitReached, ...] = ()
    damage: tuple[str, ...] = ()


class _Job(threading.Thread):
    """A Spark job in a thread, so that somebody can look on, and cancel it."""

    def __init__(self, spark: SparkSession, plans: list[TaskPlan], handler: HandlerName, what: str) -> None:
        super().__init__(name="inturn-spark-job", daemon=True)
        self._spark = spark
        self._plans = plans
        self._handler = handler
        self._what = what
        self._group_name = f"inturn-{uuid.uuid4().hex}"
        self._is_cancelled = False
        self.outcomes: list[TaskOutcome] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            # Spark waits for a task to notice, and kills its process if it does not. Interrupting its Java thread would
            # leave the process alone, and at work.
            self._spark.sparkContext.setJobGroup(self._group_name, self._what, interruptOnCancel=False)
            self.outcomes = run_job(self._spark, self._plans, self._handler)
        except BaseException as error:
            self.error = error

    def cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._spark.sparkContext.cancelJobGroup(self._group_name)


def _missing(outcomes: Sequence[TaskOutcome]) -> int:
    """Every task that works on a partition reads past the same gaps."""
    found: dict[int, int] = {}
    for outcome in outcomes:
        for partition, count in outcome.missing_in.items():
            found[partition] = max(found.get(partition, 0), count)
    return sum(found.values())


def _at_limits(outcomes: Sequence[TaskOutcome]) -> tuple[LimitReached, ...]:
    return tuple(sorted({one for outcome in outcomes for one in outcome.limits}, key=lambda one: one.partition))


def _cut_short(waiting: Sequence[Waiting], keys: Sequence[KeyDescription]) -> tuple[LimitReached, ...]:
    """After a round in which nothing was done: the partitions of which more waits than a round takes, and the key that
    keeps the next round from beginning any later."""
    found = []
    for one in waiting:
        stuck = [key for key in keys if key.partition == one.partition and key.offset is not None]
        first = min(stuck, key=lambda key: key.offset or 0, default=None)
        if one.is_cut and first is not None:
            key = None if first.key is None else first.key.decode(errors="backslashreplace")
            found.append(LimitReached(one.partition, "span", SPAN_MAX, first.offset or 0, key))
    return tuple(found)


def _claimed_by(described: GroupDescription) -> str:
    claimants = sorted({one.claimant for one in described.claims})
    return f"; {', '.join(claimants)} still has claims: is a handler hanging there?" if claimants else ""


def _is_alive(spark: SparkSession) -> bool:
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False


def _in_a_line(error: BaseException) -> str:
    """Spark puts what it says first, Python what it raised last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]
