"""The consumer of a shared group without I/O: which commands to send, and what the answers change.

    Fetch ──► handled ──► done ──────────────────────────► Acknowledge
                 │                                            ▲
                 ├─ failed: again after a while, to anybody ──┤ (returned)
                 └─ failed: Move to the retry or dead-letter subject, then done

Every message is on its own: a lane has one, or as many as the handler takes at once. There is no lease and no offset:
the receipt of a message is all that counts, and it is valid for `visibility_s`. Nothing is started after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from inturn.consumer.decoder import Opened, OpenedFetch
from inturn.consumer.handling import ERROR_LENGTH_MAX, back_off_s
from inturn.consumer.lane import Lane
from inturn.consumer.outcome import Next, Outcome, text_of
from inturn.consumer.partition_lease import NEVER, Pending, Stage
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.receipts import DeliveredBatch, ReceiptMoves, Receipts
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
    ReceiptExpired,
    VersionMismatch,
)
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings, GroupMode, LeaseSettings, Order, Strategy
from inturn.model.subject import dead_letter_subject, retry_subject
from inturn.protocol.commands import (
    Acknowledge,
    Acknowledged,
    Assignment,
    Command,
    Done,
    Fetch,
    Heartbeat,
    Leave,
    Move,
    Read,
    ReportTrial,
)

RETRY_S = 0.2  # after an error that says nothing about when to try again
DAMAGE_RETRY_S = 5.0
BACKLOG_S = 0.5  # what is fetched should last so long: others may want the rest
BACKLOG_COUNT_MAX = 4096
_MEMBERSHIP = Heartbeat | Leave


class SharedCore:
    """Called by one thread at a time, but for the runs it gives out. Time comes in as `now_s` (monotonic)."""

    def __init__(
        self, subject: str, group: str, member: str, start: str, settings: ConsumerSettings, lease: LeaseSettings
    ) -> None:
        self.subject = subject
        self.group = group
        self.member = member
        self.concurrency = settings.concurrency
        self.statistics = Statistics()
        self.scheduler = Scheduler()
        self.error: InturnError | None = None  # set: it cannot go on, and why
        self.is_stopped = False
        self.partitions: dict[int, PartitionState] = {}  # what is known of each partition
        self.left: dict[int, int] = {}
        self.damage: list[LogDamaged] = []  # found in what was fetched; for the log
        self.refused: list[tuple[int, int]] = []  # partition and offset of what was acknowledged too late; for the log
        self.wants_poll = False
        self.assigned: frozenset[int] = frozenset()
        self._start = start
        self._settings = settings
        self._margin_s = min(lease.margin_s, settings.visibility_s / 5)
        self._beat_wait_s = min(settings.heartbeat_s, lease.life_s / 3)
        self._retry_subject = retry_subject(group, subject)
        self._dead_letter_subject = dead_letter_subject(group, subject)
        self._generation = 0
        self._is_stopping = False
        self._lanes: dict[Lane, None] = {}  # a message may be in two: it came again before the first one was over
        self._wanted = settings.concurrency  # how many messages to have at hand
        self._fetch_numbers: dict[int, int] = {}  # of the last Fetch that was sent, by partition
        self._answered: dict[int, int] = {}  # the last ask that was answered, by partition
        self._each_s: float | None = None  # how long a message takes, smoothed
        self._moves = ReceiptMoves(subject, group, member)
        self._receipts = Receipts(subject, group, member)
        self.trials = MemberTrials(subject, group, member)
        self._acknowledged_at_s = NEVER
        self._pending: dict[type[Command], Pending] = {}  # commands that are not about one partition
        self._retry_at_s: dict[type[Command], float] = {}

    # What to send

    def poll(self, now_s: float) -> list[Command]:
        """The commands to send now. Give every answer to `answered`."""
        self.wants_poll = False
        if self.is_stopped:
            return []
        for pending in (self._pending, *(state.lease.pending for state in self.partitions.values())):
            for kind in [kind for kind, one in pending.items() if now_s >= one.until_s]:
                del pending[kind]
        self._settle(self.scheduler.take_back(now_s), now_s)
        commands: list[Command] = []
        self._poll_fetch(commands, now_s)
        self._poll_move(commands, now_s)
        self._poll_acknowledge(commands, now_s)
        self._poll_membership(commands, now_s)
        self._poll_trial(commands, now_s)
        return commands

    def _poll_trial(self, commands: list[Command], now_s: float) -> None:
        command = self.trials.next_command()
        if command is not None and self._may_send(type(command), now_s):
            self._send(commands, command, now_s)

    def _poll_membership(self, commands: list[Command], now_s: float) -> None:
        if not self._is_stopping:
            if self._may_send(Heartbeat, now_s):
                beat = Heartbeat(
                    self.subject,
                    self.group,
                    self.member,
                    Order.NONE.value,
                    self._start,
                    self._generation,
                    self._beat_wait_s if self._generation else 0.0,
                    str(self._settings.assignment),
                    mode=GroupMode.SHARED.value,
                )
                self._send(commands, beat, now_s)
        elif self._is_drained and self._may_send(Leave, now_s):
            self._pending.pop(Heartbeat, None)
            self._send(commands, Leave(self.subject, self.group, self.member), now_s)

    @property
    def _is_drained(self) -> bool:
        has_news = self._receipts.has_news or self._receipts.is_unanswered
        return not (self._lanes or self._moves or has_news or self.trials.is_busy)

    def _poll_fetch(self, commands: list[Command], now_s: float) -> None:
        for index in self.assigned - self.partitions.keys():
            self.partitions[index] = PartitionState(index, self.subject, self.group, self.member, stage=Stage.ACTIVE)
        free = self._room()
        idle = [
            state
            for state in self.partitions.values()
            if state.index in self.assigned and self._may_fetch(state, now_s)
        ]
        if free <= 0 or self._is_stopping:
            return
        for place, state in enumerate(idle):
            count = max(1, free // (len(idle) - place))
            free -= count
            number = self._fetch_numbers[state.index] = self._fetch_numbers.get(state.index, 0) + 1
            fetch = Fetch(
                self.subject,
                self.group,
                state.index,
                self.member,
                number,
                self._answered.get(state.index, 0),
                count,
                self._settings.pull_bytes,
                self._settings.visibility_s,
                self._settings.pull_wait_s,
            )
            self._send(commands, fetch, now_s, state)

    def _may_fetch(self, state: PartitionState, now_s: float) -> bool:
        return state.lease.may_send(Fetch, now_s)

    def _room(self) -> int:
        """How many more to ask for: about as many as are handled in BACKLOG_S, one for each worker at least."""
        wanted = self.concurrency
        if self._each_s is not None:
            backlog_s = min(BACKLOG_S, self._settings.visibility_s / 8)
            wanted = max(wanted, int(self.concurrency * backlog_s / max(self._each_s, 1e-7)))
        wanted = min(wanted, max(BACKLOG_COUNT_MAX, self.concurrency), self._settings.flow.buffered_count)
        self._wanted = wanted
        if sum(state.buffer.waiting_bytes for state in self.partitions.values()) >= self._settings.flow.buffered_bytes:
            return 0
        asked = 0
        for state in self.partitions.values():
            pending = state.lease.pending.get(Fetch)
            if pending is not None and isinstance(pending.command, Fetch):
                asked += pending.command.max_count
        have = self.waiting_count
        return max(wanted - have - asked, 1 if have < wanted else 0)

    @property
    def waiting_count(self) -> int:
        """Fetched, and not over."""
        return sum(state.buffer.waiting_count for state in self.partitions.values())

    def _poll_move(self, commands: list[Command], now_s: float) -> None:
        if self._moves and self._may_send(Move, now_s):
            self._send(commands, self._moves.move(), now_s)

    def _poll_acknowledge(self, commands: list[Command], now_s: float) -> None:
        is_due = self._receipts.has_news and now_s >= self._acknowledge_due_s()
        if (is_due or self._receipts.is_unanswered) and self._may_send(Acknowledge, now_s):
            self._acknowledged_at_s = now_s
            self._send(commands, self._receipts.say(), now_s)

    def _acknowledge_due_s(self) -> float:
        """At once where something waits for it."""
        if self._receipts.is_urgent or self._is_stopping:
            return NEVER
        return self._acknowledged_at_s + self._settings.commit_interval_s

    def _may_send(self, kind: type[Command], now_s: float) -> bool:
        return kind not in self._pending and now_s >= self._retry_at_s.get(kind, NEVER)

    def _send(
        self, commands: list[Command], command: Command, now_s: float, state: PartitionState | None = None
    ) -> None:
        pending = self._pending if state is None else state.lease.pending
        until_s = now_s + getattr(command, "wait_s", 0.0) + self._settings.answer_timeout_s
        pending[type(command)] = Pending(command, now_s, until_s)
        commands.append(command)

    def next_due_s(self, now_s: float) -> float:
        """When `poll` has something to do at the latest, if nothing else happens before."""
        due = [now_s + self._settings.heartbeat_s, self.scheduler.next_overdue_s()]
        due += [pending.until_s for pending in self._pending.values()]
        due += [at_s for at_s in self._retry_at_s.values() if at_s > now_s]
        for state in self.partitions.values():
            due += [pending.until_s for pending in state.lease.pending.values()]
            due += [state.lease.retry_at_s] if state.lease.retry_at_s > now_s else []
        if self._receipts.has_news and Acknowledge not in self._pending:
            due.append(max(self._acknowledge_due_s(), self._retry_at_s.get(Acknowledge, NEVER)))
        elif self._lanes and Acknowledge not in self._pending:
            due.append(now_s + self._settings.commit_interval_s)  # something may be done by then
        return max(min(due), now_s)

    def stop(self, now_s: float) -> None:
        """Start nothing new; when the running handlers are over: acknowledge, give the rest back, leave."""
        self._is_stopping = True
        self.assigned = frozenset()
        self.trials.forget_waiting()
        self._give_back_unbegun()

    def _give_back_unbegun(self) -> None:
        for lane in list(self._lanes):
            if lane.run is None or self.scheduler.withdraw(lane):
                self.scheduler.unready(lane)
                self._give_back(lane)

    def kill(self) -> None:
        """No handler is started any more; nothing is acknowledged."""
        for lane in self._lanes:
            lane.state.lease.forbid_starts()

    # What came back

    def awaits(self, command: Command) -> bool:
        """Whether an answer to this would change anything."""
        return self._waited(command) is not None

    def _waited(self, command: Command) -> Pending | None:
        state = self.partitions.get(command.partition) if isinstance(command, Fetch) else None
        waited = (self._pending if state is None else state.lease.pending).get(type(command))
        return waited if waited is not None and waited.command is command else None

    def answered(self, command: Command, answer: object, now_s: float) -> None:
        """Answers to commands that are no longer waited for change nothing. Give a Fetched as OpenedFetch."""
        waited = self._waited(command)
        if waited is None:
            return
        state = self.partitions.get(command.partition) if isinstance(command, Fetch) else None
        del (self._pending if state is None else state.lease.pending)[type(command)]
        if isinstance(answer, InturnError):
            self._failed_command(command, state, answer, now_s)
            return
        match answer:
            case Assignment():
                self._assigned_to(answer)
            case Opened() if isinstance(command, Read):
                self.trials.read(answer)
            case Done() if isinstance(command, ReportTrial):
                self.trials.reported()
            case OpenedFetch() if state is not None and isinstance(command, Fetch):
                self._fetched(state, command, answer, waited.sent_at_s)
            case Acknowledged():
                self._receipts.answered()
                self.refused += answer.refused
            case Done() if isinstance(command, Move):
                for one in self._moves.moved():
                    self._finish(one.delivered, one.messages)
            case Done() if isinstance(command, Leave):
                self.is_stopped = True

    def _assigned_to(self, answer: Assignment) -> None:
        self._generation = answer.generation
        if not self._is_stopping:
            self.trials.heard(answer.trials)
            self.assigned = frozenset(answer.partitions)
            if not self.assigned:  # the server is about to stop
                self._give_back_unbegun()

    def _failed_command(self, command: Command, state: PartitionState | None, error: InturnError, now_s: float) -> None:
        if state is not None and not isinstance(error, AccessDenied):
            state.lease.failed(error, now_s + (RETRY_S if error.retriable else DAMAGE_RETRY_S))
        elif isinstance(command, Read | ReportTrial):
            if error.retriable:
                self._retry_at_s[type(command)] = now_s + RETRY_S
            else:
                self.trials.failed(command, error)
        elif isinstance(command, Leave) and isinstance(error, NotFound | AccessDenied | Closed | ConnectionLost):
            self.is_stopped = True  # whoever cannot hear it will count us out for our silence
        elif isinstance(command, Move) and isinstance(error, ReceiptExpired):
            for one in self._moves.drop(error.offsets):
                self.refused += [(one.delivered.index, message.offset) for message in one.messages]
                self._count_off(one.delivered, one.messages)
        elif isinstance(error, AccessDenied) or (
            isinstance(command, _MEMBERSHIP)
            and isinstance(error, NotFound | GroupConflict | InvalidInput | VersionMismatch | Closed)
        ):
            self.error = error
        else:
            self._retry_at_s[type(command)] = now_s + RETRY_S
            if isinstance(command, Acknowledge):
                self._receipts.failed(now_s)

    def _fetched(self, state: PartitionState, command: Fetch, answer: OpenedFetch, sent_at_s: float) -> None:
        fetched = answer.fetched
        self._answered[state.index] = command.ask
        state.lease.error = next(iter(answer.damage), None)
        state.buffer.pull_offset, state.buffer.end_offset = fetched.pulled.next_offset, fetched.pulled.end_offset
        if not fetched.deliveries:
            return
        deliveries = {one.offset: one for one in fetched.deliveries}
        # Both counted from before: when the ask was sent, and how long the node had it.
        ends_s = sent_at_s + fetched.waited_s + self._settings.visibility_s - self._margin_s
        receipts = {one.offset: one.number for one in fetched.deliveries}
        who = self.subject, self.group, self.member
        delivered = DeliveredBatch(state.index, *who, fetched.epoch, ends_s, receipts)
        delivered.progress.attempts = {
            one.offset: one.deliveries - 1 for one in fetched.deliveries if one.deliveries > 1
        }
        messages = [one for one in answer.messages if deliveries.pop(one.offset, None) is not None]
        self.damage += answer.damage
        for offset in deliveries:  # damaged, or not to be decoded here: it may be read elsewhere, or later
            self._receipts.give_back(delivered, offset, DAMAGE_RETRY_S)
        state.buffer.add(messages)
        self._offer(delivered, messages)

    def _offer(self, delivered: DeliveredBatch, messages: list[Message]) -> None:
        limit = self._settings.max_attempts
        if limit is not None and delivered.progress.attempts:
            # Given out so often and never acknowledged: whoever had them did not come to an end with them.
            attempts = delivered.progress.attempts
            over = [one for one in messages if attempts.get(one.offset, 0) >= limit]
            for one in over:
                self._moves.add(delivered, [one], self._dead_letter_subject, 0)
            messages = [one for one in messages if attempts.get(one.offset, 0) < limit]
        size = self._settings.batch
        for first in range(0, len(messages), size):
            some = messages[first : first + size]
            lane = Lane(delivered, some[0].offset, some, delivered.buffer.inbox)
            self._lanes[lane] = None
            if self._is_stopping or not self.assigned:
                self._give_back(lane)
            else:
                self.scheduler.ready(lane)

    # Handling

    def take(self, now_s: float) -> Run | None:
        """Work for one worker. Whoever takes it calls `finish` at the end, in any case."""
        self._settle(self.scheduler.take_back(now_s), now_s)
        run = self.scheduler.take(now_s)
        if run is not None:
            run.slow_s = self._settings.handler_timeout_s
        self._look_for_urgent()
        return run

    def finish(self, run: Run, now_s: float) -> None:
        """The run is over: note what is done, and what failed."""
        if run.handled:
            each_s = (now_s - run.started_at_s) / run.handled
            self._each_s = each_s if self._each_s is None else 0.8 * self._each_s + 0.2 * each_s
        self._settle(self.scheduler.end(run, now_s), now_s)
        self.statistics.add(run, now_s)
        self._look_for_urgent()

    def _look_for_urgent(self) -> None:
        is_hungry = 2 * self.scheduler.ready_count <= self._wanted and not self._is_stopping and self._may_be_fed()
        self.wants_poll = (
            self.wants_poll or bool(self._moves or self._receipts.is_urgent or self._is_stopping) or is_hungry
        )

    def _may_be_fed(self) -> bool:
        return any(Fetch not in state.lease.pending for state in self.partitions.values())

    def _settle(self, lanes: Iterable[Lane], now_s: float) -> None:
        """These lanes are in no run any more."""
        for lane in lanes:
            delivered = lane.state
            assert isinstance(delivered, DeliveredBatch)
            if delivered.buffer.inbox:
                self._finish(delivered, delivered.buffer.take_inbox())
            outcome = lane.outcome
            if outcome is not None:
                failed, lane.outcome, lane.failed = lane.failed, None, ()
                if outcome.next is Next.ROLLBACK:
                    failed, lane.kept = [*lane.kept, *failed], ()
                self._failed(delivered, failed, outcome)
            if lane.waiting and not self._is_stopping and self.assigned and now_s < delivered.lease.deadline_s:
                self.scheduler.ready(lane)
            elif lane.waiting and now_s < delivered.lease.deadline_s:
                self._give_back(lane)
            else:
                self._forget(lane)

    def _finish(self, delivered: DeliveredBatch, messages: Sequence[Message]) -> None:
        self._receipts.done(delivered, messages)
        self._count_off(delivered, messages)

    def _failed(self, delivered: DeliveredBatch, failed: Sequence[Message], outcome: Outcome) -> None:
        settings = self._settings
        if isinstance(outcome.error, asyncio.CancelledError):  # the loop ends: no fault of the message
            for message in failed:
                self._receipts.give_back(delivered, message.offset)
            self._count_off(delivered, failed)
            return
        failed_counts = delivered.progress.attempts
        for message in failed:
            attempts = failed_counts[message.offset] = failed_counts.get(message.offset, 0) + 1
        is_fault = outcome.kind in (ResultKind.EXCEPTION, ResultKind.INVALID)
        if settings.max_attempts is not None and attempts >= settings.max_attempts:
            self._moves.add(delivered, failed, self._dead_letter_subject, 0)
        elif is_fault and settings.strategy is Strategy.BEST_EFFORT:
            self._moves.add(delivered, failed, self._retry_subject, settings.retry.level(attempts))
        else:
            delay_s = outcome.wait_s or back_off_s(settings, attempts)
            error = outcome.kind.value if outcome.error is None else text_of(outcome.error)
            for message in failed:
                self._receipts.give_back(delivered, message.offset, delay_s, error[:ERROR_LENGTH_MAX], message.key)
            self._count_off(delivered, failed)

    def _give_back(self, lane: Lane) -> None:
        """What was not begun is somebody else's at once."""
        delivered = lane.state
        assert isinstance(delivered, DeliveredBatch)
        for message in lane.messages[lane.at :]:
            self._receipts.give_back(delivered, message.offset)
        self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        """Whatever of it is not over yet comes again when its receipt is over: begun too late, or not acknowledged."""
        self._lanes.pop(lane, None)
        self._count_off(lane.state, [*lane.kept, *lane.messages[lane.at :]])

    def _count_off(self, delivered: PartitionState, messages: Sequence[Message]) -> None:
        self.partitions[delivered.index].buffer.remove(messages)

    # Views

    @property
    def wanted_workers(self) -> int:
        return self.scheduler.wanted_workers

    def lags(self) -> dict[int, int]:
        """How many messages of each partition wait, here or at the node, as far as known, and not with others."""
        return {state.index: state.buffer.lag for state in self.partitions.values()}

    def blocking(self) -> dict[int, Message]:
        """Nothing holds a partition of a shared group up."""
        return {}

    def is_through(self) -> bool:
        """It has no end."""
        return False

    @property
    def is_held_up(self) -> bool:
        return False
