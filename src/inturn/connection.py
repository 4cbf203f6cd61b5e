"""The connection: a folder opened like a database, and everything one can do with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime
from types import FrameType, TracebackType
from typing import Self, TypeVar

from inturn.consumer.consumer import Consumer, ConsumerStatistics, check_handler
from inturn.consumer.hook import Hook
from inturn.consumer.worker import Handler
from inturn.folder import Folder
from inturn.log.embedded import EmbeddedEngine
from inturn.model.clock import Clock, SystemClock
from inturn.model.commands import (
    Command,
    CreateSubject,
    DescribeGroup,
    DescribeSubject,
    Done,
    FindSubject,
    GroupDescription,
    GroupList,
    GroupName,
    ListGroups,
    ListSubjects,
    Node,
    ResetGroup,
    SubjectDescription,
    SubjectList,
)
from inturn.model.errors import Closed, InturnError, InvalidInput
from inturn.model.logs import get_logger
from inturn.model.names import check_name
from inturn.model.observer import Observer
from inturn.model.position import Position, parse_position, position_text
from inturn.model.request import ask
from inturn.model.settings import (
    ConsumerSettings,
    Flush,
    LeaseSettings,
    Limits,
    LogSettings,
    Order,
    ProducerSettings,
    Routing,
    Strategy,
    checked,
    one_of,
)
from inturn.model.subject import Subject
from inturn.node import InProcessNode
from inturn.producer.producer import Producer
from inturn.reader import Reader
from inturn.state.database import Database
from inturn.timer_thread import TimerThread

_log = get_logger("inturn.connection")
_Wanted = TypeVar("_Wanted")
_HandlerT = TypeVar("_HandlerT", bound=Handler)
RETENTION_CHECK_S = 60.0


class Connection:
    """What `inturn.connect` returns. Safe to use from several threads; close it, or use it in a `with` block."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        log: LogSettings | None = None,
        lease: LeaseSettings | None = None,
        clock: Clock | None = None,
        observer: Observer | None = None,
        create: bool = True,
    ) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._lease = checked(lease, LeaseSettings, "lease") or LeaseSettings()
        log = checked(log, LogSettings, "log") or LogSettings()
        with contextlib.ExitStack() as undo:
            self._folder = Folder(path, create=create)
            undo.callback(self._folder.close)
            self._database = Database.open(self._folder.database_path)
            undo.callback(self._database.close)
            self._timer_thread = TimerThread(self._clock)
            undo.callback(self._timer_thread.close)
            timers = self._timer_thread.timers
            self._engine = EmbeddedEngine(self._folder.log_path, log, timers, clock=self._clock)
            undo.callback(self._engine.close)
            self._node = InProcessNode(self._database, self._engine, self._clock, timers, self._lease, observer)
            undo.pop_all()
        self._lock = threading.Lock()
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._handlers: list[Callable[[], Consumer]] = []
        self._stop_asked = threading.Event()
        self._is_signalled = False
        self._is_closed = False
        _opened.add(self)
        if log.retention_s is not None or log.retention_bytes is not None:
            self._apply_retention()

    @property
    def path(self) -> str:
        return str(self._folder.path)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def node(self) -> Node:
        """Where commands go; see `inturn.model.commands`."""
        return self._node

    # Subjects

    def create_subject(
        self,
        name: str,
        partitions: int = 4,
        *,
        routing: Routing | str = Routing.SLOTS,
        strategy: Strategy | str = Strategy.STRICT,
        limits: Limits | None = None,
    ) -> Subject:
        """Create a subject; the same again is no error, other settings are (AlreadyExists)."""
        check_name("subject", name)
        return self._ask(
            CreateSubject(
                name,
                partitions,
                one_of(Routing, "routing", routing),
                one_of(Strategy, "strategy", strategy),
                limits if limits is not None else Limits(),
            ),
            Subject,
        )

    def subject(self, name: str) -> Subject:
        """The subject, with its route and limits. NotFound if there is none."""
        return self._ask(FindSubject(name), Subject)

    def subjects(self) -> list[Subject]:
        return list(self._ask(ListSubjects(), SubjectList).subjects)

    def describe_subject(self, name: str) -> SubjectDescription:
        """Offsets, size and state of each partition."""
        return self._ask(DescribeSubject(name), SubjectDescription)

    # Producing and reading

    def producer(self, name: str | None = None, settings: ProducerSettings | None = None) -> Producer:
        """A producer. With a name it is the only one of that name: it fences the one before."""
        self._check_open()
        producer = Producer(self._node, self._clock, settings, name=name)
        with self._lock:
            self._producers = [one for one in self._producers if not one.is_closed] + [producer]
        return producer

    def reader(self, subject: str, start: str | int | datetime | Position = "first") -> Reader:
        """Read without a group."""
        self._check_open()
        return Reader(self._node, subject, start)

    # Consuming

    def consumer(
        self,
        subject: str,
        group: str,
        handler: Handler,
        *,
        order: Order | str = Order.PARTITION,
        start: str | int | datetime | Position = "first",
        settings: ConsumerSettings | None = None,
        hooks: Sequence[Hook] = (),
        name: str | None = None,
    ) -> Consumer:
        """A member of the group, not started yet: use it in a `with` block, or call `start` and `stop`.

        `start` says where a group that is new begins; one that exists goes on where it was.
        """
        self._check_open()
        self.subject(subject)
        consumer = Consumer(
            self._node,
            self._clock,
            subject,
            group,
            handler,
            order=order,
            start=start,
            settings=settings,
            lease=self._lease,
            hooks=hooks,
            name=name,
        )
        with self._lock:
            self._consumers = [one for one in self._consumers if not one.is_over] + [consumer]
        return consumer

    def handler(
        self,
        subject: str,
        group: str,
        *,
        order: Order | str = Order.PARTITION,
        start: str | int | datetime | Position = "first",
        settings: ConsumerSettings | None = None,
        hooks: Sequence[Hook] = (),
    ) -> Callable[[_HandlerT], _HandlerT]:
        """Decorate a function `(message, context)` to be run by `run`."""

        check_name("subject", subject, reserved=True)
        check_name("group", group)
        one_of(Order, "order", order)
        checked(settings, ConsumerSettings, "settings")

        def register(function: _HandlerT) -> _HandlerT:
            check_handler(function)
            self._handlers.append(
                lambda: self.consumer(
                    subject, group, function, order=order, start=start, settings=settings, hooks=hooks
                )
            )
            return function

        return register

    def run(self, timeout_s: float | None = None) -> None:
        """Run all handlers until SIGINT, SIGTERM, `shutdown`, an error, or so many seconds. Stops gracefully."""
        if not self._handlers:
            raise InvalidInput("run() has nothing to run; register a function with @connection.handler(...) first")
        consumers = [make() for make in self._handlers]
        restore = self._listen_to_signals()
        try:
            for consumer in consumers:
                consumer.start()
            self._wait(consumers, timeout_s)
        finally:
            restore()
            for consumer in consumers:
                consumer.stop()
            self._stop_asked.clear()
            self._is_signalled = False
        for consumer in consumers:
            if consumer.error is not None:
                raise consumer.error

    def shutdown(self) -> None:
        """Make `run` return, from another thread or from a handler."""
        self._stop_asked.set()

    def _wait(self, consumers: Sequence[Consumer], timeout_s: float | None) -> None:
        until_s = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while (
            not self._is_signalled
            and not self._stop_asked.is_set()
            and all(consumer.error is None for consumer in consumers)
        ):
            left_s = 0.2 if until_s is None else min(0.2, until_s - self._clock.monotonic())
            if left_s <= 0:
                return
            self._stop_asked.wait(left_s)

    def _listen_to_signals(self) -> Callable[[], None]:
        """Only the main thread may; returns what puts the former handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def stop(number: int, frame: FrameType | None) -> None:
            # No event: its lock may be held by the very thread that the signal interrupts.
            self._is_signalled = True

        former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in former.items():
                signal.signal(number, handler)

        return restore

    def statistics(self) -> list[ConsumerStatistics]:
        """Of every consumer of this connection that runs, those of `run` among them."""
        with self._lock:
            consumers = [consumer for consumer in self._consumers if consumer.is_running]
        return [consumer.statistics() for consumer in consumers]

    # Groups

    def groups(self) -> list[GroupName]:
        return list(self._ask(ListGroups(), GroupList).groups)

    def describe_group(self, subject: str, group: str) -> GroupDescription:
        """Members, and per partition: committed offset, lag, owner and epoch of the lease."""
        return self._ask(DescribeGroup(subject, group), GroupDescription)

    def reset_group(self, subject: str, group: str, position: str | int | datetime | Position) -> None:
        """Move the group to a position in all partitions. GroupConflict while one of its consumers runs."""
        self._ask(ResetGroup(subject, group, position_text(parse_position(position))), Done)

    # Closing

    def close(self) -> None:
        """Stop the consumers, flush the producers, sync the logs, give the folder free."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.ExitStack() as closing:  # backwards, and each of them whatever another one raises
            for close in (self._folder.close, self._database.close, self._timer_thread.close, self._node.close):
                closing.callback(close)
            for producer in self._producers:
                closing.callback(producer.close, timeout_s=30.0)
            for consumer in self._consumers:
                closing.callback(consumer.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, command: Command, wanted: type[_Wanted]) -> _Wanted:
        self._check_open()
        return ask(self._node, command, wanted)

    def _forget_in_child(self) -> None:
        """In a forked child: the folder, its logs and its threads are the parent's. Whatever is used says Closed."""
        self._is_closed = True
        self._node.disown()
        for producer in self._producers:
            producer.disown()
        for consumer in self._consumers:
            consumer.disown()
        self._folder.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("connection")

    def _apply_retention(self) -> None:
        try:
            self._engine.apply_retention()
        except OSError as error:
            _log.warning("retention.failed", folder=self.path, error=str(error))
        self._timer_thread.timers.at(self._clock.monotonic() + RETENTION_CHECK_S, self._apply_retention)


_opened: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    for connection in list(_opened):
        if not connection.is_closed:
            connection._forget_in_child()


def _at_exit() -> None:
    """A program that ends without closing does not lose what it sent."""
    for connection in list(_opened):
        try:
            connection.close()
        except InturnError as error:
            _log.error("connection.close_failed", folder=connection.path, error=str(error))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


def connect(
    path: str | os.PathLike[str],
    *,
    flush: Flush | str | None = None,
    log: LogSettings | None = None,
    lease: LeaseSettings | None = None,
    observer: Observer | None = None,
) -> Connection:
    """Open a folder, or make it. No server is needed; one process has it open at a time. A forked child must not use
    the connection of its parent: there everything raises Closed.

    `flush` is short for `log=LogSettings(flush=...)`: "always" (default), "interval" or "os".
    """
    if flush is not None:
        if log is not None:
            raise InvalidInput("connect(): give flush= or log=, not both")
        log = LogSettings(flush=one_of(Flush, "flush", flush))
    return Connection(path, log=log, lease=lease, observer=observer)
