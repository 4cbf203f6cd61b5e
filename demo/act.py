"""Base classes of the acts: `Act` plays, `Board` holds the state for the view, `ActResult` is the verdict.

An act runs in a separate thread. Handlers, hooks and the observer of the node write to the board from any thread;
the view reads copies of the board (`look`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from demo.orders import Ledger, OrderStep
from demo.process import recorded_as
from inturn.client import Connection
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context, Hook
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.subject import Subject
from inturn.model.time import SystemClock
from inturn.producer.send_batch import SendHandle, Stored
from inturn.protocol.commands import Progress
from inturn.testing.checker import Verdict, ViolationKind
from inturn.testing.recorder import Recorder

LIMIT_S = 120.0  # an act that takes longer has failed
POLL_S = 0.02


def short_name(member: str) -> str:
    """The name given to a consumer when it was opened; the name of its membership is longer and never used twice."""
    return member.partition("-")[0]


# State


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float  # since the demo began
    text: str
    details: tuple[str, ...] = ()  # lines below the text, printed where no live picture shows them


class Events:
    """The events of an act. Any thread may call."""

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._events: list[Event] = []

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._started_at_s

    def say(self, text: str, details: Sequence[str] = ()) -> None:
        self._events.append(Event(self.now_s, text, tuple(details)))

    def so_far(self) -> tuple[Event, ...]:
        return tuple(self._events)


@dataclass(frozen=True, slots=True)
class ActLook:
    """A copy of a board at one moment."""

    at_s: float
    events: tuple[Event, ...]


class Board(ABC):
    """The state of an act, written by the act and read by the view. Any thread may call."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self._lock = threading.Lock()

    @abstractmethod
    def look(self) -> ActLook: ...


class HandlerBoard(Board, Hook):
    """The board of an act that runs in one process: observer of the connection and hook of all consumers.

    Records every event of the group for the order checker, in the order of the calls. Never calls the node.
    """

    def __init__(self, events: Events, subject: str, group: str) -> None:
        super().__init__(events)
        self.recorder = Recorder(SystemClock())
        self.ledger = Ledger()
        self._subject, self._group = subject, group

    # Calls of the node. Retry and dead-letter subjects of the group are left out: they stay empty here.

    def lease_granted(self, subject: str, group: str, partition: int, owner: str, epoch: int) -> None:
        if (subject, group) == (self._subject, self._group):
            with self._lock:
                self.recorder.lease_granted(subject, group, partition, owner, epoch)
                self._owner_changed(partition, owner, epoch)

    def lease_ended(self, subject: str, group: str, partition: int, owner: str, epoch: int, why: str) -> None:
        if (subject, group) == (self._subject, self._group):
            with self._lock:
                self.recorder.lease_ended(subject, group, partition, owner, epoch, why)
                self._owner_changed(partition, None, epoch)

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        if (subject, group) == (self._subject, self._group):
            self.recorder.committed(subject, group, owner, progress)
            self._commit_seen(progress)

    def claim_granted(self, subject: str, group: str, partition: int, claimant: str, epoch: int, slots: bytes) -> None:
        """No consumer of the demo claims slots."""

    def claim_ended(self, subject: str, group: str, partition: int, claimant: str, epoch: int) -> None:
        """No consumer of the demo claims slots."""

    def grown(self, subject: Subject) -> None:
        """No subject of the demo grows."""

    # Calls of the consumers

    def before(self, messages: Sequence[Message], context: Context) -> None:
        with self._lock:
            if self._is_ignored(context):
                return
            self._starting(messages, context)
            for message in messages:
                self._record(self.recorder.started, message, context, attempt=context.attempt)

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        with self._lock:
            if self._is_ignored(context):
                return
            self._ending()
            result = recorded_as(kind)
            for message in messages:
                self._record(self.recorder.ended, message, context, result=result)
                body = msgspec.json.decode(message.body, type=OrderStep)
                if result == "success":
                    self._handled(message, body, context)
                else:
                    self._failed(body, context, error)

    def _record(self, record: Callable[..., None], message: Message, context: Context, **more: object) -> None:
        where = (self._subject, context.group, context.partition, message.offset, message.key)
        record(*where, context.consumer, context.epoch, message.message_id, **more)

    # For the board of an act to override; the lock is held, except in `_commit_seen`

    def _owner_changed(self, partition: int, owner: str | None, epoch: int) -> None:
        """The lease was granted, or (owner None) has ended."""

    def _commit_seen(self, progress: Progress) -> None:
        """The group has committed this progress."""

    def _is_ignored(self, context: Context) -> bool:
        """Whether calls of this consumer no longer count."""
        return False

    def _starting(self, messages: Sequence[Message], context: Context) -> None:
        """A handler is about to start."""

    def _ending(self) -> None:
        """A handler has ended."""

    @abstractmethod
    def _handled(self, message: Message, body: OrderStep, context: Context) -> None: ...

    @abstractmethod
    def _failed(self, body: OrderStep, context: Context, error: BaseException | None) -> None: ...


# Story


class Interrupted(Exception):
    """The act was stopped, or took too long."""


class SendWindow:
    """Messages of a producer that are not acknowledged yet. `settled` is called with every acknowledgement."""

    def __init__(self, settled: Callable[[Stored, str, str], None]) -> None:
        self._settled = settled
        self._pending: deque[tuple[SendHandle, str, str]] = deque()

    def add(self, handle: SendHandle, key: str, message_id: str) -> None:
        self._pending.append((handle, key, message_id))

    def settle(self, limit: int | None = None) -> None:
        """Settle all acknowledged messages; wait while more than `limit` are pending."""
        while self._pending and (self._pending[0][0].done or (limit is not None and len(self._pending) > limit)):
            handle, key, message_id = self._pending.popleft()
            self._settled(handle.result(timeout_s=LIMIT_S), key, message_id)


class Act(ABC):
    """The story of an act. `error` is set when the act has ended early."""

    def __init__(self, folder: Path) -> None:
        self.error: Exception | None = None
        self._folder = folder
        self._watched: list[Consumer] = []  # a consumer that stops by itself ends the act
        self._stop = threading.Event()
        self.on_quiet: Callable[[], None] = lambda: None  # called once at a moment with little work
        self._until_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="inturn-demo", daemon=True)

    @abstractmethod
    def play(self) -> None:
        """The whole story. Runs in the thread of the act."""

    def start(self) -> None:
        self._until_s = min(self._until_s, time.monotonic() + LIMIT_S)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        return self.is_over and self.error is None

    def stop(self) -> None:
        """Interrupt the act and wait for its end. Raises the error of the act, except `Interrupted`."""
        self._stop.set()
        self._thread.join()
        if self.error is not None and not isinstance(self.error, Interrupted):
            raise self.error

    def _run(self) -> None:
        try:
            self.play()
        except Exception as error:
            self.error = self.error or error

    def _wait(self, condition: Callable[[], bool], poll_s: float = POLL_S) -> None:
        while not condition():
            self._pause(poll_s)
            for consumer in self._watched:
                if consumer.error is not None:
                    raise consumer.error
            if time.monotonic() > self._until_s:
                raise Interrupted

    def _pause(self, for_s: float) -> None:
        if self._stop.wait(for_s):
            raise Interrupted

    def _start_till(self, name: str, send: Callable[[], None]) -> threading.Thread:
        """A thread that sends messages. An error in the thread ends the act."""

        def run() -> None:
            try:
                send()
            except Exception as error:
                self.error = error
                self._stop.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


def stored_ids(connection: Connection, subject: str) -> dict[tuple[str, int, int], str | None]:
    """The message ids in the log of the subject, by subject, partition and offset."""
    return {(subject, one.partition, one.offset): one.message_id for one in connection.reader(subject)}


# Result


class ActResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on an act: fields of every act in the output of `inturn demo --json`."""

    ok: bool
    is_complete: bool  # False: the act ended before everything was handled
    elapsed_s: float
    messages_sent: int
    messages_handled: int
    handler_calls: int
    duplicates: int  # messages that were handled again after a crash
    out_of_order: int  # violations, as `overlapping`, `skipped` and `other_violations`
    overlapping: int
    lost: int  # messages
    skipped: int
    other_violations: int
    violations: list[str]
    events: list[str]


def checked_fields(act: Act, board: Board, verdict: Verdict, *, ok: bool, elapsed_s: float) -> dict[str, Any]:
    """The fields of `ActResult`. The act is good only if complete, the order checker agrees, and `ok`."""
    kinds = Counter(violation.kind for violation in verdict.violations)
    named = (ViolationKind.OUT_OF_ORDER, ViolationKind.OVERLAP, ViolationKind.LOST, ViolationKind.SKIPPED)
    return {
        "ok": verdict.ok and act.is_complete and ok,
        "is_complete": act.is_complete,
        "elapsed_s": round(elapsed_s, 2),
        "messages_sent": verdict.sent,
        "messages_handled": verdict.finished - verdict.duplicates,
        "handler_calls": verdict.started,
        "duplicates": verdict.duplicates,
        "out_of_order": kinds[ViolationKind.OUT_OF_ORDER],
        "overlapping": kinds[ViolationKind.OVERLAP],
        "lost": sum(len(one.offsets) for one in verdict.violations if one.kind is ViolationKind.LOST),
        "skipped": kinds[ViolationKind.SKIPPED],
        "other_violations": sum(count for kind, count in kinds.items() if kind not in named),
        "violations": [str(violation) for violation in verdict.violations],
        "events": event_lines(board.events.so_far()),
    }


def event_lines(events: Iterable[Event]) -> list[str]:
    return [f"{one.at_s:.1f} s: {one.text}" for one in events]
