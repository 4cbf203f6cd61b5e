"""One task of ordered work: claim slices, read and handle their messages in the executor, commit, and release.

A task handles messages through the same lanes as any consumer. No message content leaves the task: the driver and Spark
get a `TaskOutcome`. A task that is run again skips the messages that the first run committed.

`connected` shares one connection per process, target and credentials, because a Spark worker runs many tasks."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace

import msgspec
import structlog
from structlog.typing import EventDict, WrappedLogger

from inturn.client import Connection
from inturn.consumer.claimant import ClaimedPart, ClaimingNode
from inturn.consumer.consumer import Consumer
from inturn.consumer.flow_limits import STUCK_SHARE
from inturn.consumer.options import Scope
from inturn.consumer.outcome import text_of
from inturn.model.errors import ConnectionLost, InturnError, LogDamaged
from inturn.model.settings import SPAN_MAX, ConsumerSettings, FlowControl, Order
from inturn.model.time import SystemClock
from inturn.security.credentials import NONE, Credentials
from inturn.server.folder import socket_path
from inturn.spark.ordered.plan import Slice
from inturn.spark.shipping import HandlerName, load_handler
from inturn.transport.address import Address, is_address

CONNECT_WAIT_S = 5.0  # a server may be restarting
_connections: dict[str, dict[Credentials, Connection]] = {}


def connected(target: str, who: str, credentials: Credentials = NONE) -> Connection:
    """The connection of this process to a server, or to an existing folder. `who` ("the driver", "a task") is part of
    the error text if the target is unreachable.

    After a fork the parent's connections are closed in the child, so the child opens new connections.
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
    """A client connection to the process that has the folder open. None if the folder is not open.

    Spark's workers outlive their last task. A worker with a client connection cannot become the owner of the folder
    when the current owner closes it."""
    if is_address(target):
        return None
    try:
        return Connection(str(Address(path=socket_path(target))))
    except ConnectionLost:
        return None


def unreachable(error: ConnectionLost, who: str) -> ConnectionLost:
    """The same error, with the host that tried to connect and with possible causes."""
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
TASK_SETTINGS = ConsumerSettings(concurrency=64)  # default


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """The input of a task. `epochs` are the epochs of the leases that `owner` holds, by partition."""

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
    """A task stopped reading a partition: too much waits behind this message, or was finished beyond this message."""

    partition: int
    limit: str  # of FlowControl: "span" or "buffered_bytes"
    size: int  # offsets, or bytes
    offset: int
    key: str | None


class TaskOutcome(msgspec.Struct, frozen=True):
    """The result of a task. `waiting` counts messages that were started but not finished: behind a message that fails,
    is blocked, or took longer than the round. A task that is not through, not held up and at no limit ended because the
    round was over, or because the lease was wanted back or lost."""

    round: int
    task: int
    host: str
    pid: int
    handled: int = 0
    failed: int = 0
    waiting: int = 0
    missing: int = 0  # offsets that were removed from the log
    missing_in: dict[int, int] = {}  # `missing` by partition; all tasks of a partition report the same offsets
    seconds: float = 0.0
    is_through: bool = False
    is_held_up: bool = False  # all remaining messages wait behind keys that make no progress, or cannot be read
    limits: tuple[LimitReached, ...] = ()  # held up, with more messages that were not read because of a limit
    damage: tuple[str, ...] = ()  # error texts of logs that cannot be read
    error: str = ""
    error_kind: str = ""  # class name of the error
    is_final: bool = False  # a repetition would fail in the same way


def run_task(plan: TaskPlan, handler: HandlerName) -> TaskOutcome:
    """Handle the slices until all messages are finished, or `round_s` is over, or the remaining messages have to wait
    longer than `patience_s`.

    Errors are reported in the outcome, never raised: an exception would reach the driver as a page of Java.
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
    settings = _with_full_span(plan.settings)
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
        # If a partition is one lane, unread messages have to wait behind the same message anyway.
        limits = _limits(consumer, settings.flow) if is_held_up and plan.order is not Order.PARTITION else ()
        held = consumer.leases()
        statistics = consumer.statistics()
    finally:
        consumer.stop(timeout_s=None)  # a hanging handler keeps its claim, so no message overtakes
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


def _with_full_span(settings: ConsumerSettings) -> ConsumerSettings:
    """A consumer can wait for a failing key without a limit. A task has to finish all other keys in one round, so a
    task reads as far as commits can reach (`SPAN_MAX`), unless the settings have a span of their own."""
    if settings.flow.span != FlowControl().span:
        return settings
    return replace(settings, flow=replace(settings.flow, span=SPAN_MAX))


def _limits(consumer: Consumer, flow: FlowControl) -> tuple[LimitReached, ...]:
    sizes = {"span": flow.span, "buffered_bytes": STUCK_SHARE * flow.buffered_bytes}
    return tuple(
        LimitReached(one.partition, one.limit, sizes[one.limit], one.offset, one.key)
        for one in consumer.statistics().blocking
    )


def log_plainly() -> None:
    """Configure structlog in a task to write plain lines, as Spark collects them, unless a handler's module has
    configured structlog."""
    if not structlog.is_configured():
        level, failures = structlog.processors.add_log_level, structlog.processors.format_exc_info
        structlog.configure(processors=[level, failures, _as_line])


def _as_line(_: WrappedLogger, __: str, event: EventDict) -> str:
    level, name, traceback = event.pop("level", "warning"), event.pop("event"), event.pop("exception", None)
    fields = " ".join(f"{key}={value}" for key, value in event.items() if value is not None)
    return f"{level}: {name} {fields}".rstrip() + (f"\n{traceback}" if traceback else "")
