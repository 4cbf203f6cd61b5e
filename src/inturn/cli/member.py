"""A member of a group whose handler prints messages. Only printed messages are committed."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from inturn.cli import logs
from inturn.cli.message_text import MessagePrinter
from inturn.cli.screen import Screen, counted, plain, printable
from inturn.model.errors import InturnError, NotFound
from inturn.model.result import Result
from inturn.model.settings import ConsumerSettings, GroupMode, OnExhausted, Order

if TYPE_CHECKING:
    from inturn.client import Connection
    from inturn.consumer.consumer import Consumer
    from inturn.consumer.context import Context
    from inturn.model.message import Message
    from inturn.model.offsets import Position

LOOK_S = 0.05  # interval between two checks of the lag
STALL_S = 2.0  # without progress, when a partition reports an error or a key is blocked


@dataclass(frozen=True, slots=True)
class MemberView:
    """The group, and the settings of the member."""

    group: str
    order: Order | None
    max_attempts: int | None
    on_exhausted: OnExhausted
    trace: str | None = None
    tags: str | None = None
    mode: GroupMode = GroupMode.EXCLUSIVE
    visibility_s: float | None = None
    offsets: str | None = None
    name: str | None = None

    @property
    def settings(self) -> ConsumerSettings:
        settings = ConsumerSettings(
            concurrency=1,
            ack="manual",
            max_attempts=self.max_attempts,
            on_exhausted=self.on_exhausted,
            trace=self.trace,
            tags=self.tags,
        )
        return settings if self.visibility_s is None else replace(settings, visibility_s=self.visibility_s)


class _PrintingHandler:
    """Called by one worker of the consumer and one worker of its retries at a time. Flushes every line.

    Acknowledgement is manual: a message that is not printed is not committed and has not failed.
    """

    def __init__(self, printer: MessagePrinter) -> None:
        self._printer = printer
        self._printing = threading.Lock()
        self.is_enough = threading.Event()
        self.failure: OSError | None = None

    @property
    def count(self) -> int:
        return self._printer.count

    def __call__(self, message: Message, context: Context) -> Result:
        with self._printing:
            if self.is_enough.is_set():
                return Result.SUCCESS  # without a commit: the next member gets the message
            try:
                self._printer.print(message, group=context.group, epoch=context.epoch)
                self._printer.flush()
            except OSError as error:
                self.failure = error
                self.is_enough.set()
                return Result.SUCCESS
            if self._printer.is_full:
                self.is_enough.set()
            return Result.COMMIT


def handle(
    connection: Connection,
    screen: Screen,
    printer: MessagePrinter,
    subject: str,
    how: MemberView,
    start: Position,
    follow: bool,
) -> None:
    """Handle messages until the lag is 0 (unless `follow`), the limit is reached, or Ctrl-C. Stops gracefully."""
    handler = _PrintingHandler(printer)
    group = how.group
    consumer = connection.consumer(
        subject,
        group,
        handler,
        order=how.order,
        mode=how.mode,
        offsets=how.offsets,
        start=start,
        settings=how.settings,
        name=how.name,
    )
    look = _own_lag if how.mode is GroupMode.BROADCAST else _lag
    stalled: InturnError | None = None
    logs.mute("consumer.stopped")  # the error is raised below
    logs.mute("consumer.refused", command="Heartbeat")  # the same
    with contextlib.suppress(KeyboardInterrupt), _terminated_like_interrupted():
        consumer.start()
        stalled = _wait(connection, consumer, handler, follow, look)
    logs.mute("consumer.refused", command="Pull")  # a pull that waits when the lease is released
    consumer.stop()
    if handler.failure is not None:
        raise handler.failure
    if consumer.error is not None:
        raise consumer.error
    said = f"{counted(printer.count, 'message')}"
    if how.mode is not GroupMode.BROADCAST:
        lag = sum(one.lag for one in connection.group(subject, group).describe().partitions)
        said += f"; lag of group {plain(group)} on {plain(subject)}: {lag:,}"
    screen.note(f"[dim]{said}[/dim]")
    if stalled is not None:
        raise stalled


def _wait(
    connection: Connection,
    consumer: Consumer,
    handler: _PrintingHandler,
    follow: bool,
    look: Callable[[Connection, Consumer], int | None],
) -> InturnError | None:
    """Wait for the end. Returns an error if messages cannot be delivered."""
    before: tuple[int | None, int] | None = None
    moved_at_s = time.monotonic()
    while not handler.is_enough.wait(LOOK_S) and consumer.error is None:
        if follow:
            continue
        lag = look(connection, consumer)
        if lag == 0:
            return None
        if (lag, handler.count) != before:
            before, moved_at_s = (lag, handler.count), time.monotonic()
        elif time.monotonic() - moved_at_s > STALL_S:
            reasons = [*consumer.statistics().errors, *_blocked(connection, consumer)]
            if reasons:
                return InturnError("; ".join(reasons))
    return None


def _blocked(connection: Connection, consumer: Consumer) -> list[str]:
    """Blocked keys: an operator must resume or skip them."""
    blocked = [one for one in connection.group(consumer.subject, consumer.group).keys() if one.state == "blocked"]
    if not blocked:
        return []
    key = blocked[0].key or b""
    shown = printable(key.decode(errors="backslashreplace"))
    return [
        f"{counted(len(blocked), 'key')} of group {consumer.group} on {consumer.subject} blocked, such as {shown!r}: "
        f"see `inturn key list {consumer.subject} --group {consumer.group}`, then resume or skip"
    ]


def _lag(connection: Connection, consumer: Consumer) -> int | None:
    """None until the group exists."""
    try:
        partitions = connection.group(consumer.subject, consumer.group).describe().partitions
    except NotFound:
        return None
    return sum(one.lag for one in partitions)


def _own_lag(connection: Connection, consumer: Consumer) -> int | None:
    """The lag of a broadcast consumer, from its own offsets; None until all partitions have begun."""
    partitions, own = connection.describe_subject(consumer.subject).partitions, consumer.leases()
    if len(own) < len(partitions):
        return None
    return sum(max(0, one.end_offset - own[one.index].committed) for one in partitions)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
