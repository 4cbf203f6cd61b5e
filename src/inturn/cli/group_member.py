"""Consuming as a member of a group whose handler prints. What was printed is committed, nothing else."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from inturn.cli import logs
from inturn.cli.message_line import MessagePrinter
from inturn.cli.screen import Screen, counted, plain
from inturn.model.errors import InturnError, NotFound
from inturn.model.result import SUSPEND_MAX_S, Suspend, suspend
from inturn.model.settings import ConsumerSettings

if TYPE_CHECKING:
    from inturn.connection import Connection
    from inturn.consumer.consumer import Consumer
    from inturn.consumer.context import Context
    from inturn.model.message import Message
    from inturn.model.position import Position

LOOK_S = 0.05  # between two looks at the lag
STALL_S = 2.0  # without progress, when a partition reports an error


class _PrintingHandler:
    """Called in one thread of the consumer. Flushes each line before it counts as done."""

    def __init__(self, printer: MessagePrinter) -> None:
        self._printer = printer
        self.is_enough = threading.Event()
        self.failure: OSError | None = None

    def __call__(self, message: Message, context: Context) -> Suspend | None:
        if self.is_enough.is_set():
            return suspend(SUSPEND_MAX_S)  # not ours any more: it stays for the next one
        try:
            self._printer.print(message, group=context.group, epoch=context.epoch)
            self._printer.flush()
        except OSError as error:
            self.failure = error
            self._end()
            return suspend(SUSPEND_MAX_S)
        if self._printer.is_full:
            self._end()
        return None

    def _end(self) -> None:
        logs.mute("consumer.handler_failed")
        self.is_enough.set()


def handle(
    connection: Connection,
    screen: Screen,
    printer: MessagePrinter,
    subject: str,
    group: str,
    start: Position,
    follow: bool,
) -> None:
    """Until everything is handled (unless `follow`), the limit is reached, or Ctrl-C; always stops gracefully."""
    handler = _PrintingHandler(printer)
    consumer = connection.consumer(subject, group, handler, start=start, settings=ConsumerSettings(concurrency=1))
    stalled: InturnError | None = None
    with contextlib.suppress(KeyboardInterrupt), _terminated_like_interrupted():
        consumer.start()
        stalled = _wait(connection, consumer, handler, follow)
    logs.mute("consumer.refused", command="Pull")  # one that waits when its lease is released
    consumer.stop()
    if handler.failure is not None:
        raise handler.failure
    if consumer.error is not None:
        raise consumer.error
    lag = sum(one.lag for one in connection.describe_group(subject, group).partitions)
    screen.note(
        f"[dim]{counted(printer.count, 'message')}; lag of group {plain(group)} on {plain(subject)}: {lag:,}[/dim]"
    )
    if stalled is not None:
        raise stalled


def _wait(connection: Connection, consumer: Consumer, handler: _PrintingHandler, follow: bool) -> InturnError | None:
    """Why some messages cannot be had, if that is so."""
    lag_before: int | None = None
    moved_at_s = time.monotonic()
    while not handler.is_enough.wait(LOOK_S) and consumer.error is None:
        if follow:
            continue
        lag = _lag(connection, consumer)
        if lag == 0:
            return None
        if lag != lag_before:
            lag_before, moved_at_s = lag, time.monotonic()
        elif time.monotonic() - moved_at_s > STALL_S:
            errors = consumer.statistics().errors
            if errors:
                return InturnError("; ".join(errors))
    return None


def _lag(connection: Connection, consumer: Consumer) -> int | None:
    """None while the group is not made yet."""
    try:
        partitions = connection.describe_group(consumer.subject, consumer.group).partitions
    except NotFound:
        return None
    return sum(one.lag for one in partitions)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends it as gracefully as Ctrl-C does."""
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
