"""One connection per process, target and credentials, whoever asks for it: a Spark worker runs many tasks in its
life.

One task: its slices read and handled where it runs, through the same lanes as in any consumer.

Nothing of a message leaves the task. It claims its slices, commits what is finished as it goes, and gives them back;
so what the driver and Spark get is a summary, and a task that is run again finds done what was done.

Tasks on Spark: one job, one task for each plan, and their outcomes back.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import structlog
from structlog.typing import EventDict, WrappedLogger

from inturn.client import Connection
from inturn.consumer.claimant import ClaimedPart, ClaimingNode
from inturn.consumer.consumer import Consumer
from inturn.consumer.flow_limits import STUCK_SHARE
from inturn.consumer.outcome import text_of
from inturn.consumer.scope import Scope
from inturn.model.errors import ConnectionLost, InturnError, LogDamaged
from inturn.model.settings import SPAN_MAX, ConsumerSettings, FlowControl, Order
from inturn.model.time import SystemClock
from inturn.security.credentials import NONE, Credentials
from inturn.server.folder import socket_path
from inturn.spark.ordered.plan import Slice
from inturn.spark.shipping import HandlerName, load_handler
from inturn.transport.address import Address, is_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECT_WAIT_S = 5.0  # for a server that is just being started again
_connections: dict[str, dict[Credentials, Connection]] = {}


def connected(target: str, who: str, credentials: Credentials = NONE) -> Connection:
    """To a server or to a folder that is there. `who` is named if it cannot be reached: "the driver", "a task".

    After a fork the parent's connections are closed ones here, so a child opens its own.
    """
    there = _connections.setdefault(target, {})
    known = there.get(credentials)
    if known is not None and not known.is_closed:
        return known
    try:
        made = _served(target) or Connection(
            target, create=False, wait_s=CONNECT_WAIT_S, credentials=credentials if is_address(target) else NONE
        )
    except ConnectionLost as error:
        raise unreachable(error, who) from error
    there[credentials] = made
    return made


def _served(target: str) -> Connection | None:
    """To whoever has the folder open, as a client only: Spark's workers live on for a while after their last task, and
    must not be the ones who open the folder anew when its owner closes it. None if nobody has it open."""
    if is_address(target):
        return None
    try:
        return Connection(str(Address(path=socket_path(target))))
    except ConnectionLost:
        return None


def unreachable(error: ConnectionLost, who: str) -> ConnectionLost:
    """The same, told from where it was tried and what may be in the way."""
    host = socket.gethostname()
    hint = (
        f"{error.why}; {who} on host {host!r} tried. Check that this host resolves and reaches the address (there "
        f"'localhost' and 127.0.0.1 are {host!r} itself), and that no firewall is between"
        if is_address(error.address)
        else f"{error.why}; {who} on host {host!r} tried"
    )
    return ConnectionLost(error.address, hint)


def disconnect(target: str) -> None:
    for known in _connections.pop(target, {}).values():
        known.close()


ROUND_S = 30.0
PATIENCE_S = 2.0
TASK_SETTINGS = ConsumerSettings(concurrency=64)  # unless others are given


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What a task has to know. `epochs` are those of the leases that `owner` holds, by partition."""

    target: str
    subject: str
    group: str
    owner: str
    epochs: dict[int, int]
    slices: tuple[Slice, ...]
    order: Order = Order.KEY
    settings: ConsumerSettings = TASK_SETTINGS
    round: int = 0
    index: int = 0
    round_s: float = ROUND_S
    patience_s: float = PATIENCE_S
    credentials: Credentials = NONE


class LimitReached(msgspec.Struct, frozen=True):
    """A partition was not read any further: so much of it waits behind this message, or was done beyond it."""

    partition: int
    limit: str  # of FlowControl: "span" or "buffered_bytes"
    size: int  # offsets, or bytes
    offset: int
    key: str | None


class TaskOutcome(msgspec.Struct, frozen=True):
    """What became of a task. `waiting` were begun and not finished: behind a message that fails, is blocked, or took
    longer than the round. Neither through, nor held up, nor at a limit: the round was over, or the lease was wanted
    back or lost."""

    round: int
    task: int
    host: str
    pid: int
    handled: int = 0
    failed: int = 0
    waiting: int = 0
    missing: int = 0  # offsets that were gone from the log
    missing_in: dict[int, int] = {}  # the same by partition: all that work on one tell of the same
    seconds: float = 0.0
    is_through: bool = False
    is_held_up: bool = False  # all that is left waits behind keys that do not go on, or cannot be read
    limits: tuple[LimitReached, ...] = ()  # the same, but there is more, which was not read for their sake
    damage: tuple[str, ...] = ()  # what is wrong with logs that cannot be read
    error: str = ""
    error_kind: str = ""  # the name of its class
    is_final: bool = False  # the same would happen again


def run_task(plan: TaskPlan, handler: HandlerName) -> TaskOutcome:
    """Work on the slices until they are done, or `round_s` is over, or what is left waits for longer than `patience_s`.

    Whatever is wrong is told in the outcome: an exception would reach the driver as a page of Java.
    """
    outcome = TaskOutcome(plan.round, plan.index, socket.gethostname(), os.getpid())
    began_s = time.monotonic()
    try:
        outcome = _run(plan, handler, outcome)
    except InturnError as error:
        kind, is_final = type(error).__name__, not error.retriable
        outcome = msgspec.structs.replace(outcome, error=str(error), error_kind=kind, is_final=is_final)
    except Exception as error:
        outcome = msgspec.structs.replace(outcome, error=text_of(error), error_kind=type(error).__name__)
    return msgspec.structs.replace(outcome, seconds=time.monotonic() - began_s)


def _run(plan: TaskPlan, handler: HandlerName, outcome: TaskOutcome) -> TaskOutcome:
    function = load_handler(handler)
    connection = connected(plan.target, "a task", plan.credentials)
    subject = connection.subject(plan.subject)
    parts = {one.partition: ClaimedPart(plan.owner, plan.epochs[one.partition], one.slots) for one in plan.slices}
    settings = _roomy(plan.settings)
    consumer = Consumer(
        ClaimingNode(connection.node, subject, parts),
        SystemClock(),
        plan.subject,
        plan.group,
        function,
        order=plan.order,
        settings=settings,
        lease=connection.node.lease,
        name=f"{plan.owner}-r{plan.round}-t{plan.index}",
        duty=Scope(until={one.partition: one.until for one in plan.slices}),
    )
    consumer.start()
    try:
        is_through = consumer.wait_until_through(plan.patience_s, plan.round_s)
        is_held_up = not is_through and consumer.is_held_up
        # Where all of a partition is one lane, what was not read has to wait behind the same message.
        limits = _limits(consumer, settings.flow) if is_held_up and plan.order is not Order.PARTITION else ()
        held = consumer.leases()
        statistics = consumer.statistics()
    finally:
        consumer.stop(timeout_s=None)  # a handler that hangs keeps its claim, so that nobody overtakes it
    if consumer.error is not None:
        raise consumer.error
    after = consumer.statistics()
    return msgspec.structs.replace(
        outcome,
        handled=after.ok_count,
        failed=after.failed_count,
        waiting=consumer.left_count,
        missing=statistics.missing,
        missing_in={index: one.missing for index, one in held.items() if one.missing},
        is_through=is_through and len(held) == len(parts),
        is_held_up=is_held_up and not limits,
        limits=limits,
        damage=tuple(str(one.error) for one in held.values() if isinstance(one.error, LogDamaged)),
        error="; ".join(statistics.errors),
    )


def _roomy(settings: ConsumerSettings) -> ConsumerSettings:
    """A consumer has time: it waits for a key for as long as it takes. A task is there to get all the others done, so
    it goes on as far as can be committed, unless another span was asked for."""
    if settings.flow.span != FlowControl().span:
        return settings
    return replace(settings, flow=replace(settings.flow, span=SPAN_MAX))


def _limits(consumer: Consumer, flow: FlowControl) -> tuple[LimitReached, ...]:
    sizes = {"span": flow.span, "buffered_bytes": STUCK_SHARE * flow.buffered_bytes}
    return tuple(
        LimitReached(one.partition, one.limit, sizes[one.limit], one.offset, one.key)
        for one in consumer.statistics().blocking
    )


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
