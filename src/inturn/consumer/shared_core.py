"""The consumer of a shared group without I/O: which commands to send, and what the answers change.

    Fetch ──► handled ──► finished ──────────────────────► Acknowledge
                 │                                            ▲
                 ├─ failed: again later, to any member ───────┤ (returned)
                 └─ failed: Move to the retry or dead-letter subject, then finished

Messages are independent: a lane has one message, or as many as the handler takes in one call. There is no lease and no
offset, only the receipt of a message, valid for `visibility_s`. No handler is started after that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from inturn.consumer.decoder import DecodedFetch
from inturn.consumer.dispatcher import ERROR_LENGTH_MAX, back_off_s
from inturn.consumer.lane import Lane
from inturn.consumer.member_core import DAMAGE_RETRY_S, MemberCore
from inturn.consumer.outcome import Next, Outcome, text_of
from inturn.consumer.partition_lease import NEVER, Stage
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.receipts import DeliveredBatch, ReceiptMoves, Receipts
from inturn.consumer.run import Run
from inturn.consumer.scheduler import Scheduler
from inturn.model.errors import (
    AccessDenied,
    InturnError,
    ReceiptExpired,
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
)

BACKLOG_S = 0.5  # how long fetched messages should last: other members may want the rest
BACKLOG_COUNT_MAX = 4096


class SharedCore(MemberCore):
    def __init__(
        self, subject: str, group: str, member: str, start: str, settings: ConsumerSettings, lease: LeaseSettings
    ) -> None:
        super().__init__(subject, group, member, start, settings, Scheduler())
        self.concurrency = settings.concurrency
        self.refused: list[tuple[int, int]] = []  # partition and offset of messages acknowledged too late; for the log
        self._margin_s = min(lease.margin_s, settings.visibility_s / 5)
        self._beat_wait_s = min(settings.heartbeat_s, lease.life_s / 3)
        self._retry_subject = retry_subject(group, subject)
        self._dead_letter_subject = dead_letter_subject(group, subject)
        self._lanes: dict[Lane, None] = {}  # a message may be in two lanes, if delivered again too early
        self._wanted = settings.concurrency  # how many messages to buffer
        self._fetch_numbers: dict[int, int] = {}  # of the last Fetch that was sent, by partition
        self._answered: dict[int, int] = {}  # of the last Fetch that was answered, by partition
        self._each_s: float | None = None  # how long a message takes, smoothed
        self._moves = ReceiptMoves(subject, group, member)
        self._receipts = Receipts(subject, group, member)
        self._acknowledged_at_s = NEVER

    # What to send

    def poll(self, now_s: float) -> list[Command]:
        """The commands to send now. Give every answer to `answered`."""
        self.wants_poll = False
        if self.is_stopped:
            return []
        self._forget_overdue(self.partitions.values(), now_s)
        self._settle(self.scheduler.take_back(now_s), now_s)
        commands: list[Command] = []
        self._poll_fetch(commands, now_s)
        self._poll_move(commands, now_s)
        self._poll_acknowledge(commands, now_s)
        self._poll_membership(commands, now_s)
        self._poll_trial(commands, now_s)
        return commands

    def _beat(self, commands: list[Command], now_s: float) -> None:
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
        """How many more messages to fetch: about as many as are handled in BACKLOG_S, at least one per worker."""
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
        """At once if returned messages wait for the command, or the member stops."""
        if self._receipts.is_urgent or self._is_stopping:
            return NEVER
        return self._acknowledged_at_s + self._settings.commit_interval_s

    def next_due_s(self, now_s: float) -> float:
        due = self._due_times(self.partitions.values(), now_s)
        due.append(self.scheduler.next_overdue_s())
        if self._receipts.has_news and Acknowledge not in self._pending:
            due.append(max(self._acknowledge_due_s(), self._retry_at_s.get(Acknowledge, NEVER)))
        elif self._lanes and Acknowledge not in self._pending:
            due.append(now_s + self._settings.commit_interval_s)  # messages may be finished by then
        return max(min(due), now_s)

    def stop(self, now_s: float) -> None:
        """Return messages that no handler has begun; when the running handlers are over: acknowledge, leave."""
        super().stop(now_s)
        self._give_back_unbegun()

    def _give_back_unbegun(self) -> None:
        for lane in list(self._lanes):
            if lane.run is None or self.scheduler.withdraw(lane):
                self.scheduler.unready(lane)
                self._give_back(lane)

    def kill(self) -> None:
        for lane in self._lanes:
            lane.state.lease.forbid_starts()

    # Answers

    def _state_of(self, command: Command) -> PartitionState | None:
        return self.partitions.get(command.partition) if isinstance(command, Fetch) else None

    def _accept(
        self, command: Command, state: PartitionState | None, answer: object, sent_at_s: float, now_s: float
    ) -> None:
        match answer:
            case Assignment():
                self._assigned_to(answer)
            case DecodedFetch() if state is not None and isinstance(command, Fetch):
                self._fetched(state, command, answer, sent_at_s)
            case Acknowledged():
                self._receipts.answered()
                self.refused += answer.refused
            case Done() if isinstance(command, Move):
                for one in self._moves.moved():
                    self._finish(one.delivered, one.messages)

    def _assigned_to(self, answer: Assignment) -> None:
        self._generation = answer.generation
        if not self._is_stopping:
            self.trials.heard(answer.trials)
            self.assigned = frozenset(answer.partitions)
            if not self.assigned:  # the server is about to stop
                self._give_back_unbegun()

    def _failed(self, command: Command, state: PartitionState | None, error: InturnError, now_s: float) -> None:
        if isinstance(command, Move) and isinstance(error, ReceiptExpired):
            for one in self._moves.drop(error.offsets):
                self.refused += [(one.delivered.index, message.offset) for message in one.messages]
                self._count_off(one.delivered, one.messages)
            return
        super()._failed(command, state, error, now_s)
        if isinstance(command, Acknowledge) and self.error is None:
            self._receipts.failed(now_s)

    def _is_fatal(self, command: Command, error: InturnError) -> bool:
        is_membership = isinstance(command, Heartbeat | Leave)
        return isinstance(error, AccessDenied) or (is_membership and super()._is_fatal(command, error))

    def _fetched(self, state: PartitionState, command: Fetch, answer: DecodedFetch, sent_at_s: float) -> None:
        fetched = answer.fetched
        self._answered[state.index] = command.ask
        state.lease.error = next(iter(answer.damage), None)
        state.buffer.pull_offset, state.buffer.end_offset = fetched.pulled.next_offset, fetched.pulled.end_offset
        if not fetched.deliveries:
            return
        deliveries = {one.offset: one for one in fetched.deliveries}
        # Counted from the time the Fetch was sent, plus the time the node held the Fetch back.
        ends_s = sent_at_s + fetched.waited_s + self._settings.visibility_s - self._margin_s
        receipts = {one.offset: one.number for one in fetched.deliveries}
        who = self.subject, self.group, self.member
        delivered = DeliveredBatch(state.index, *who, fetched.epoch, ends_s, receipts)
        delivered.progress.attempts = {
            one.offset: one.deliveries - 1 for one in fetched.deliveries if one.deliveries > 1
        }
        messages = [one for one in answer.messages if deliveries.pop(one.offset, None) is not None]
        self.damage += answer.damage
        for offset in deliveries:  # not decodable here: another member may decode the message, or this member later
            self._receipts.give_back(delivered, offset, DAMAGE_RETRY_S)
        state.buffer.add(messages)
        self._offer(delivered, messages)

    def _offer(self, delivered: DeliveredBatch, messages: list[Message]) -> None:
        limit = self._settings.max_attempts
        if limit is not None and delivered.progress.attempts:
            # Delivered that often and never acknowledged: no member came to an end with these messages.
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

    # Workers

    def _next_run(self, now_s: float) -> Run | None:
        self._settle(self.scheduler.take_back(now_s), now_s)
        return self.scheduler.take(now_s)

    def _end_run(self, run: Run, now_s: float) -> None:
        if run.handled:
            each_s = (now_s - run.started_at_s) / run.handled
            self._each_s = each_s if self._each_s is None else 0.8 * self._each_s + 0.2 * each_s
        self._settle(self.scheduler.end(run, now_s), now_s)

    def _look_for_urgent(self) -> None:
        is_hungry = 2 * self.scheduler.ready_count <= self._wanted and not self._is_stopping and self._may_be_fed()
        self.wants_poll = (
            self.wants_poll or bool(self._moves or self._receipts.is_urgent or self._is_stopping) or is_hungry
        )

    def _may_be_fed(self) -> bool:
        return any(Fetch not in state.lease.pending for state in self.partitions.values())

    def _settle(self, lanes: Iterable[Lane], now_s: float) -> None:
        """Decide how lanes go on that are in no run any more."""
        for lane in lanes:
            delivered = lane.state
            assert isinstance(delivered, DeliveredBatch)
            if delivered.buffer.inbox:
                self._finish(delivered, delivered.buffer.take_inbox())
            outcome = lane.outcome
            if outcome is not None:
                failed, lane.outcome, lane.failed = lane.failed, None, ()
                if outcome.next is Next.ROLLBACK:
                    failed, lane.uncommitted = [*lane.uncommitted, *failed], ()
                self._handler_failed(delivered, failed, outcome)
            if lane.waiting and not self._is_stopping and self.assigned and now_s < delivered.lease.deadline_s:
                self.scheduler.ready(lane)
            elif lane.waiting and now_s < delivered.lease.deadline_s:
                self._give_back(lane)
            else:
                self._forget(lane)

    def _finish(self, delivered: DeliveredBatch, messages: Sequence[Message]) -> None:
        self._receipts.done(delivered, messages)
        self._count_off(delivered, messages)

    def _handler_failed(self, delivered: DeliveredBatch, failed: Sequence[Message], outcome: Outcome) -> None:
        settings = self._settings
        if isinstance(outcome.error, asyncio.CancelledError):  # the event loop ends: no fault of the message
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
        """Return messages that no handler has begun: other members may get them at once."""
        delivered = lane.state
        assert isinstance(delivered, DeliveredBatch)
        for message in lane.messages[lane.at :]:
            self._receipts.give_back(delivered, message.offset)
        self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        """Messages of the lane that are not over (begun too late, or not acknowledged) are delivered again when their
        receipts expire."""
        self._lanes.pop(lane, None)
        self._count_off(lane.state, [*lane.uncommitted, *lane.messages[lane.at :]])

    def _count_off(self, delivered: PartitionState, messages: Sequence[Message]) -> None:
        self.partitions[delivered.index].buffer.remove(messages)
