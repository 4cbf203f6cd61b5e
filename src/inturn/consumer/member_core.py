"""The member of a group without I/O: heartbeats, commands in flight, trials, stop. The base of the consumer cores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from inturn.consumer.decoder import DecodedPull
from inturn.consumer.partition_lease import NEVER, Pending, Stage
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.consumer.scheduler import Scheduler
from inturn.consumer.statistics import Statistics
from inturn.consumer.trial import MemberTrials
from inturn.model.errors import (
    AccessDenied,
    Closed,
    ConnectionLost,
    GroupConflict,
    InturnError,
    InvalidInput,
    LogDamaged,
    NotFound,
    VersionMismatch,
)
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings
from inturn.protocol.commands import Command, Done, Heartbeat, Leave, Read, ReportTrial

RETRY_S = 0.2  # after an error that does not state when to retry
DAMAGE_RETRY_S = 5.0
FATAL_ERRORS = NotFound | GroupConflict | InvalidInput | VersionMismatch | AccessDenied | Closed
_LEFT_ERRORS = NotFound | AccessDenied | Closed | ConnectionLost


class MemberCore(ABC):
    """Called by one thread at a time, except for the runs that `take` returns. Times (`now_s`) are monotonic.

    `poll` returns the commands to send; pass the answers to `answered`. A worker gets a run from `take` and passes the
    run to `finish`.
    """

    def __init__(
        self, subject: str, group: str, member: str, start: str, settings: ConsumerSettings, scheduler: Scheduler
    ) -> None:
        self.subject = subject
        self.group = group
        self.member = member
        self.scheduler = scheduler
        self.statistics = Statistics()
        self.trials = MemberTrials(subject, group, member)
        self.error: InturnError | None = None  # set: the member cannot go on, and why
        self.is_stopped = False
        self.partitions: dict[int, PartitionState] = {}
        self.left: dict[int, int] = {}  # by released partition: messages that were pulled and not finished
        self.damage: list[LogDamaged] = []  # found in pulled messages; for the log
        self.wants_poll = False  # an event that `poll` should act on at once, not only when due
        self.assigned: frozenset[int] = frozenset()
        self._start = start
        self._settings = settings
        self._generation = 0
        self._is_stopping = False
        self._refusal: InturnError | None = None  # why the member stops by itself; the error once it has left
        self._pending: dict[type[Command], Pending] = {}  # commands that are not about one partition
        self._retry_at_s: dict[type[Command], float] = {}

    # Commands to send

    @abstractmethod
    def poll(self, now_s: float) -> list[Command]:
        """The commands to send now. Pass every answer to `answered`."""

    @abstractmethod
    def next_due_s(self, now_s: float) -> float:
        """The latest time at which `poll` has work to do, if no other event comes first."""

    def stop(self, now_s: float) -> None:
        """Start no handler any more. When the running handlers are over: commit, release, leave."""
        self._is_stopping = True
        self.assigned = frozenset()
        self.trials.forget_waiting()

    @abstractmethod
    def kill(self) -> None:
        """Start no handler any more; commit and release nothing."""

    @property
    @abstractmethod
    def _is_drained(self) -> bool:
        """A stopping member may leave."""

    @abstractmethod
    def _beat(self, commands: list[Command], now_s: float) -> None:
        """Send a heartbeat."""

    def _poll_membership(self, commands: list[Command], now_s: float) -> None:
        if not self._is_stopping:
            if self._may_send(Heartbeat, now_s):
                self._beat(commands, now_s)
        elif self._is_drained and self._may_send(Leave, now_s):
            self._pending.pop(Heartbeat, None)
            self._send(commands, Leave(self.subject, self.group, self.member), now_s)

    def _poll_trial(self, commands: list[Command], now_s: float) -> None:
        command = self.trials.next_command()
        if command is not None and self._may_send(type(command), now_s):
            self._send(commands, command, now_s)

    def _may_send(self, kind: type[Command], now_s: float, state: PartitionState | None = None) -> bool:
        """At most a single command of a kind is in flight, per partition; after an error, commands wait."""
        if state is None:
            return kind not in self._pending and now_s >= self._retry_at_s.get(kind, NEVER)
        return state.lease.may_send(kind, now_s)

    def _send(
        self,
        commands: list[Command],
        command: Command,
        now_s: float,
        state: PartitionState | None = None,
        timeout_s: float | None = None,
    ) -> None:
        longest_s = self._settings.answer_timeout_s
        timeout_s = longest_s if timeout_s is None else min(timeout_s, longest_s)
        until_s = now_s + getattr(command, "wait_s", 0.0) + timeout_s
        self._pending_of(state)[type(command)] = Pending(command, now_s, until_s)
        commands.append(command)

    def _forget_overdue(self, states: Iterable[PartitionState], now_s: float) -> None:
        """Stop waiting for answers that take too long: the commands may be sent again."""
        for pending in (self._pending, *(state.lease.pending for state in states)):
            for kind in [kind for kind, one in pending.items() if now_s >= one.until_s]:
                del pending[kind]

    def _due_times(self, states: Iterable[PartitionState], now_s: float) -> list[float]:
        due = [now_s + self._settings.heartbeat_s]
        due += [pending.until_s for pending in self._pending.values()]
        due += [at_s for at_s in self._retry_at_s.values() if at_s > now_s]
        for state in states:
            lease = state.lease
            due += [pending.until_s for pending in lease.pending.values()]
            if lease.retry_at_s > now_s:
                due.append(lease.retry_at_s)
        return due

    # Answers

    @abstractmethod
    def _state_of(self, command: Command) -> PartitionState | None:
        """The partition that the command is about, if commands of this kind are pending per partition."""

    def _pending_of(self, state: PartitionState | None) -> dict[type[Command], Pending]:
        return self._pending if state is None else state.lease.pending

    def _waited(self, command: Command) -> Pending | None:
        waited = self._pending_of(self._state_of(command)).get(type(command))
        return waited if waited is not None and waited.command is command else None

    def awaits(self, command: Command) -> bool:
        """Whether an answer to this command would still have an effect."""
        state = self._state_of(command)
        is_active = state is None or state.lease.stage in (Stage.ASKING, Stage.ACTIVE)
        return is_active and self._waited(command) is not None

    def sent_at_s(self, command: Command) -> float | None:
        """The time when the command was sent; None if the member does not wait for the answer."""
        waited = self._waited(command)
        return None if waited is None else waited.sent_at_s

    def answered(self, command: Command, answer: object, now_s: float) -> None:
        """Take an answer. Pass a Pulled or Fetched decoded. An answer that comes too late has no effect."""
        waited = self._waited(command)
        if waited is None:
            return
        state = self._state_of(command)
        del self._pending_of(state)[type(command)]
        if isinstance(answer, InturnError):
            self._failed(command, state, answer, now_s)
        elif isinstance(command, Read) and isinstance(answer, DecodedPull):
            self.trials.read(answer)
        elif isinstance(command, ReportTrial) and isinstance(answer, Done):
            self.trials.reported()
        elif isinstance(command, Leave) and isinstance(answer, Done):
            self._has_left()
        else:
            self._accept(command, state, answer, waited.sent_at_s, now_s)

    @abstractmethod
    def _accept(
        self, command: Command, state: PartitionState | None, answer: object, sent_at_s: float, now_s: float
    ) -> None:
        """Act on an answer that is no error."""

    def _has_left(self) -> None:
        self.is_stopped, self.error = True, self._refusal

    def _failed(self, command: Command, state: PartitionState | None, error: InturnError, now_s: float) -> None:
        if isinstance(command, Read | ReportTrial):
            if error.retriable:
                self._retry_at_s[type(command)] = now_s + RETRY_S
            else:
                self.trials.failed(command, error)
        elif isinstance(command, Leave) and isinstance(error, _LEFT_ERRORS):
            self._has_left()  # the member holds nothing; a node that cannot be reached counts it out for its silence
        elif state is not None:
            self._partition_failed(command, state, error, now_s)
        elif self._is_fatal(command, error):
            self.error = error
        else:
            self._retry_at_s[type(command)] = now_s + RETRY_S

    def _is_fatal(self, command: Command, error: InturnError) -> bool:
        return isinstance(error, FATAL_ERRORS)

    def _partition_failed(self, command: Command, state: PartitionState, error: InturnError, now_s: float) -> None:
        if isinstance(error, AccessDenied):
            self.error = error
        else:
            state.lease.failed(error, now_s + (RETRY_S if error.retriable else DAMAGE_RETRY_S))

    # Workers

    def take(self, now_s: float) -> Run | None:
        """A run for a worker. The worker calls `finish` at the end in any case."""
        run = self._next_run(now_s)
        if run is not None:
            run.slow_s = self._settings.handler_timeout_s
        self._look_for_urgent()
        return run

    def finish(self, run: Run, now_s: float) -> None:
        """The run is over: note the finished messages, and decide how the lanes go on."""
        self._end_run(run, now_s)
        self.statistics.add(run, now_s)
        self._look_for_urgent()

    @abstractmethod
    def _next_run(self, now_s: float) -> Run | None: ...

    @abstractmethod
    def _end_run(self, run: Run, now_s: float) -> None: ...

    @abstractmethod
    def _look_for_urgent(self) -> None:
        """Set `wants_poll` if commands are to be sent at once."""

    @property
    def wanted_workers(self) -> int:
        return self.scheduler.wanted_workers

    # Views

    def lags(self) -> dict[int, int]:
        """How many messages of each partition are not finished, as far as known."""
        return {state.index: state.buffer.lag for state in self.partitions.values() if state.lease.is_holding}

    def blocking(self) -> dict[int, Message]:
        """By partition that cannot be pulled because of a key: the message that the partition waits for."""
        return {}

    def is_through(self) -> bool:
        """All messages within the scope are over. A member without bounds is never through."""
        return False

    @property
    def is_held_up(self) -> bool:
        return False
