"""The consumer without I/O: which commands to send, and which partition to handle next.

    assigned ─ Acquire ─► ASKING ─ granted ─► ACTIVE ─ taken away ─► DRAINING ─ nothing runs ─► RELEASING ─► gone
                                                │
                                                └─ deadline passed, or StaleEpoch ─► LOST ─ nothing runs ─► gone

A partition is pulled only in ACTIVE. Everything pulled is thrown away with the lease: the next holder, even if it
is this consumer again, starts from the committed offset with a higher epoch. A partition in which a handler still
runs is never asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable

from inturn.consumer.context import Context
from inturn.consumer.held import NEVER, Chunk, HeldPartition, Pending, Stage
from inturn.consumer.moving import moved_batch, past_attempts
from inturn.consumer.run import Run
from inturn.consumer.statistics import Statistics
from inturn.model.commands import (
    Acquire,
    Assignment,
    Command,
    Commit,
    Committed,
    Done,
    Granted,
    Heartbeat,
    Leave,
    Progress,
    Pull,
    Pulled,
    Release,
    Renew,
    Renewed,
    Retry,
)
from inturn.model.errors import (
    Closed,
    GroupConflict,
    InturnError,
    InvalidInput,
    LeaseHeld,
    NotFound,
    StaleEpoch,
)
from inturn.model.names import retry_subject
from inturn.model.settings import ConsumerSettings, LeaseSettings, Order

RETRY_S = 0.2  # after an error that says nothing about when to try again
DAMAGE_RETRY_S = 5.0
RUN_COUNT = 2000  # messages that a worker takes at once; the lock is paid once for them


class ConsumerCore:
    """Called by one thread at a time, but for the `Run`s it gives out. Time comes in as `now_s` (monotonic)."""

    def __init__(
        self,
        subject: str,
        group: str,
        member: str,
        order: Order,
        start: str,
        settings: ConsumerSettings,
        lease: LeaseSettings,
        *,
        retries_of: str | None = None,
    ) -> None:
        """`retries_of`: the subject is the retry subject of that one, and its messages wait before they are handled."""
        self.subject = subject
        self.group = group
        self.member = member
        self.statistics = Statistics()
        self.error: InturnError | None = None  # set: it cannot go on, and why
        self.is_stopped = False
        self.held: dict[int, HeldPartition] = {}
        self._delays_s = () if retries_of is None else settings.retry.levels_s
        self._retry_subject = retry_subject(group, subject if retries_of is None else retries_of)
        self._order = order
        self._start = start
        self._settings = settings
        self._lease = lease
        self._assigned: frozenset[int] = frozenset()
        self._generation = 0
        self._asks = 0
        self._is_stopping = False
        self._pending: dict[type[Command], Pending] = {}  # commands that are not about one partition
        self._retry_at_s: dict[type[Command], float] = {}
        self._renewed_at_s = float("-inf")
        self._committed_at_s = float("-inf")
        self._turn = 0

    # What to send

    def poll(self, now_s: float) -> list[Command]:
        """The commands to send now. Give every answer to `answered`."""
        if self.is_stopped:
            return []
        self._forget_overdue(now_s)
        commands: list[Command] = []
        for held in list(self.held.values()):
            self._poll_partition(held, commands, now_s)
        for index in self._assigned - self.held.keys():
            self.held[index] = HeldPartition(index, self._delays_s[index] if self._delays_s else 0.0)
            self._poll_partition(self.held[index], commands, now_s)
        self._poll_membership(commands, now_s)
        self._poll_renew(commands, now_s)
        self._poll_commit(commands, now_s)
        return commands

    def stop(self, now_s: float) -> None:
        """Start nothing new; when the running handlers are over: commit, release, leave."""
        self._is_stopping = True
        self._assigned = frozenset()

    def kill(self) -> None:
        """No handler is started any more; nothing is committed or released."""
        for held in self.held.values():
            held.deadline_s = NEVER

    def next_due_s(self, now_s: float) -> float:
        """When `poll` has something to do at the latest, if nothing else happens before."""
        due = [now_s + self._settings.heartbeat_s]
        if Renew not in self._pending and _holding(self.held.values()):
            due.append(self._renewed_at_s + self._lease.renew_s)
        due += [pending.until_s for pending in self._pending.values()]
        due += [at_s for at_s in self._retry_at_s.values() if at_s > now_s]
        for held in self.held.values():
            due += [pending.until_s for pending in held.pending.values()]
            due += [at_s for at_s in (held.retry_at_s, held.suspended_until_s, held.lease_ends_s) if at_s > now_s]
            if held.chunks and held.chunks[0].due_s > now_s:
                due.append(held.chunks[0].due_s)
            if held.stage in _HOLDING and Commit not in self._pending:
                if self._done_offset(held) > held.committed:
                    due.append(self._committed_at_s + self._settings.commit_interval_s)
                elif held.run is not None:
                    due.append(now_s + self._settings.commit_interval_s)  # it may have done something by then
        return max(min(due), now_s)

    def _poll_membership(self, commands: list[Command], now_s: float) -> None:
        if not self._is_stopping and self._may_send(Heartbeat, now_s):
            beat = Heartbeat(
                self.subject,
                self.group,
                self.member,
                self._order,
                self._start,
                self._generation,
                self._settings.heartbeat_s,
            )
            self._send(commands, beat, now_s)
        elif self._is_stopping and not self.held and self._may_send(Leave, now_s):
            self._pending.pop(Heartbeat, None)
            self._send(commands, Leave(self.subject, self.group, self.member), now_s)

    def _poll_partition(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        is_wanted = held.index in self._assigned
        if held.stage in (Stage.ACTIVE, Stage.RELEASING, Stage.DRAINING) and now_s >= held.lease_ends_s:
            held.give_up(Stage.LOST)
        if held.stage is Stage.ACTIVE and not (is_wanted and self._is_pulled_enough(held, now_s)):
            held.give_up(Stage.DRAINING)
        match held.stage:
            case Stage.ASKING if is_wanted:
                self._ask(held, commands, now_s)
            case Stage.ASKING if self._is_stopping or Acquire not in held.pending:
                del self.held[held.index]  # if it is granted all the same, Leave gives it back
            case Stage.ACTIVE:
                self._move(held, commands, now_s)
                self._pull(held, commands, now_s)
            case Stage.DRAINING if held.moving:
                self._move(held, commands, now_s)
            case Stage.DRAINING | Stage.RELEASING if held.run is None:
                self._release(held, commands, now_s)
            case Stage.LOST if held.run is None:
                del self.held[held.index]

    def _release(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        held.stage = Stage.RELEASING
        if self._may_send(Release, now_s, held):
            release = Release(self.subject, self.group, held.index, self.member, held.epoch, held.done_offset)
            self._send(commands, release, now_s, held)

    def _ask(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if not self._may_send(Acquire, now_s, held):
            return
        self._asks += 1
        wait_s = self._settings.pull_wait_s
        ask = Acquire(self.subject, self.group, held.index, self.member, self._asks, wait_s)
        self._send(commands, ask, now_s, held)

    def _is_pulled_enough(self, held: HeldPartition, now_s: float) -> bool:
        return now_s - held.pulled_at_s < self._settings.idle_s_max

    def _pull(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if self.is_paused(held):
            held.pulled_at_s = now_s  # a withheld pull counts as a pull
            return
        if not self._may_send(Pull, now_s, held):
            return
        pull = Pull(
            self.subject,
            self.group,
            held.index,
            self.member,
            held.epoch,
            held.pull_offset,
            self._settings.pull_bytes,
            self._settings.pull_wait_s,
        )
        self._send(commands, pull, now_s, held)

    def _move(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if not held.moving or not self._may_send(Retry, now_s, held):
            return
        if held.moving_batch is None:
            held.moving_batch = moved_batch(held.moving)
        level = self._settings.retry.level(past_attempts(held.moving[0]) + 1)
        retry = Retry(
            self.subject,
            self.group,
            held.index,
            self.member,
            held.epoch,
            self._retry_subject,
            level,
            held.moving_batch,
        )
        self._send(commands, retry, now_s, held)

    def is_paused(self, held: HeldPartition) -> bool:
        """Whether flow control holds back the pulling of this partition. Its lease is renewed all the same."""
        flow = self._settings.flow
        return (
            held.waiting_count + len(held.kept) >= flow.buffered_count
            or held.waiting_bytes >= flow.buffered_bytes
            or held.pull_offset - held.done_offset - held.gap_count >= flow.span
        )

    def _poll_renew(self, commands: list[Command], now_s: float) -> None:
        held = tuple((one.index, one.epoch) for one in self.held.values() if one.stage in _HOLDING)
        if held and now_s >= self._renewed_at_s + self._lease.renew_s and self._may_send(Renew, now_s):
            self._renewed_at_s = now_s
            self._send(commands, Renew(self.subject, self.group, self.member, held), now_s)

    def _poll_commit(self, commands: list[Command], now_s: float) -> None:
        if now_s < self._committed_at_s + self._settings.commit_interval_s or not self._may_send(Commit, now_s):
            return
        progress = [
            Progress(held.index, held.epoch, self._done_offset(held))
            for held in self.held.values()
            if held.stage in _HOLDING
        ]
        news = tuple(one for one in progress if one.offset > self.held[one.partition].committed)
        if news:
            self._committed_at_s = now_s
            self._send(commands, Commit(self.subject, self.group, self.member, news), now_s)

    def _done_offset(self, held: HeldPartition) -> int:
        """Counting what a run has done so far: a slow handler is not to hold back commits until it is over."""
        safe = 0 if held.run is None else held.run.safe_count(self._settings.ack)
        return held.done_offset if held.run is None or not safe else held.run.messages[safe - 1].offset + 1

    def _may_send(self, kind: type[Command], now_s: float, held: HeldPartition | None = None) -> bool:
        """One command of a kind is on its way at once, per partition; after an error it has to wait."""
        if held is None:
            return kind not in self._pending and now_s >= self._retry_at_s.get(kind, 0.0)
        return kind not in held.pending and now_s >= held.retry_at_s

    def _send(self, commands: list[Command], command: Command, now_s: float, held: HeldPartition | None = None) -> None:
        pending = self._pending if held is None else held.pending
        until_s = now_s + getattr(command, "wait_s", 0.0) + self._settings.answer_timeout_s
        pending[type(command)] = Pending(command, now_s, until_s)
        commands.append(command)

    def _forget_overdue(self, now_s: float) -> None:
        for pending in (self._pending, *(held.pending for held in self.held.values())):
            for kind in [kind for kind, one in pending.items() if now_s >= one.until_s]:
                del pending[kind]

    # What came back

    def awaits(self, command: Command) -> bool:
        """Whether an answer to this would change anything."""
        held = self.held.get(command.partition) if isinstance(command, _OF_PARTITION) else None
        waited = (self._pending if held is None else held.pending).get(type(command))
        is_active = held is None or held.stage in (Stage.ASKING, Stage.ACTIVE)
        return waited is not None and waited.command is command and is_active

    def answered(self, command: Command, answer: object, now_s: float) -> None:
        """Answers to commands that are no longer waited for change nothing."""
        held = self.held.get(command.partition) if isinstance(command, _OF_PARTITION) else None
        pending = self._pending if held is None else held.pending
        waited = pending.get(type(command))
        if isinstance(command, Retry) and isinstance(answer, Done) and held is not None:
            self._moved(held, command)  # however late: they are stored
            return
        if waited is None or waited.command is not command:
            return
        del pending[type(command)]
        if isinstance(answer, InturnError):
            self._failed(command, held, answer, now_s)
            return
        match answer:
            case Assignment():
                self._generation = answer.generation
                if not self._is_stopping:
                    self._assigned = frozenset(answer.partitions)
            case Granted() if held is not None:
                held.life_s = answer.life_s
                held.granted(answer.epoch, answer.offset, self._deadline_s(held, waited.sent_at_s), now_s)
            case Pulled() if held is not None and isinstance(command, Pull):
                self._pulled(held, command, answer, waited.sent_at_s, now_s)
            case Renewed() if isinstance(command, Renew):
                self._renewed(command, answer.partitions, waited.sent_at_s)
            case Committed() if isinstance(command, Commit):
                self._committed(command, answer.partitions)
            case Done() if isinstance(command, Release) and held is not None:
                del self.held[held.index]
            case Done() if isinstance(command, Leave):
                self.is_stopped = True

    def _pulled(self, held: HeldPartition, command: Pull, answer: Pulled, sent_at_s: float, now_s: float) -> None:
        if held.stage is not Stage.ACTIVE or held.epoch != command.epoch or held.pull_offset != command.offset:
            return
        held.pulled_at_s = now_s
        if not held.is_damaged:
            held.error = None
        held.end_offset = answer.end_offset
        held.renewed(self._deadline_s(held, sent_at_s))
        for batch in answer.batches:
            # Both times are the node's: no clocks are compared.
            age_s = (answer.now_ms - batch.header.stored_at_ms) / 1000
            held.add(batch, now_s + held.delay_s - age_s if held.is_delayed else NEVER)
        held.skip_to(answer.next_offset)
        held.skip_gap()

    def _deadline_s(self, held: HeldPartition, asked_at_s: float) -> float:
        """Until when handlers may be started: counted from before the lease was asked for, or its renewal."""
        return asked_at_s + held.life_s - self._lease.margin_s

    def _moved(self, held: HeldPartition, command: Retry) -> None:
        """They are safe in the retry subject: the partition goes on behind them."""
        if held.stage in _HOLDING and held.moving and held.moving_batch is command.batch:
            held.pending.pop(Retry, None)
            held.moving_batch = None
            held.run_offset = held.moving[-1].offset + 1
            if held.kept:
                held.kept += held.moving  # manual: done with the next commit, like those before
            else:
                held.done_offset = held.run_offset
            held.moving = []
            held.skip_gap()

    def _renewed(self, command: Renew, alive: tuple[int, ...], sent_at_s: float) -> None:
        for index, epoch in command.held:
            held = self.held.get(index)
            if held is None or held.epoch != epoch or held.stage not in _HOLDING:
                continue
            if index in alive:
                held.renewed(self._deadline_s(held, sent_at_s))
            else:
                held.give_up(Stage.LOST)

    def _committed(self, command: Commit, taken: tuple[int, ...]) -> None:
        for progress in command.progress:
            held = self.held.get(progress.partition)
            if held is None or held.epoch != progress.epoch or held.stage not in _HOLDING:
                continue
            if progress.partition in taken:
                held.committed = max(held.committed, progress.offset)
            else:
                held.give_up(Stage.LOST)

    def _failed(self, command: Command, held: HeldPartition | None, error: InturnError, now_s: float) -> None:
        if held is None:
            if isinstance(command, Leave) and isinstance(error, NotFound | Closed):
                self.is_stopped = True
            elif isinstance(error, NotFound | GroupConflict | InvalidInput | Closed):
                self.error = error
            else:
                self._retry_at_s[type(command)] = now_s + RETRY_S
        elif isinstance(error, LeaseHeld):
            return  # it waited already: ask again at once
        elif isinstance(error, StaleEpoch):
            if held.stage is Stage.RELEASING:
                del self.held[held.index]
            elif held.stage in _HOLDING:
                held.give_up(Stage.LOST)
        else:
            held.error = error
            held.retry_at_s = now_s + (RETRY_S if error.retriable else DAMAGE_RETRY_S)

    # Handling

    def take(self, now_s: float) -> Run | None:
        """A partition whose turn it is. Whoever takes it calls `finish` at the end, in any case."""
        ready = self._ready(now_s)
        if not ready:
            return None
        # Partitions take turns, counted from the one that ran last.
        held = min(ready, key=lambda one: (one.index <= self._turn, one.index))
        self._turn = held.index
        chunks: list[Chunk] = []
        count = 0
        while held.chunks and count < RUN_COUNT and held.chunks[0].due_s <= now_s:
            chunks.append(held.chunks.popleft())
            count += chunks[-1].count
        context = Context(self.subject, self.group, held.index, self.member, held.epoch)
        settings = self._settings
        held.run = Run(
            held, chunks, context, now_s, now_s + settings.run_s_max, settings.batch, settings.handler_timeout_s
        )
        return held.run

    def ready_count(self, now_s: float) -> int:
        return len(self._ready(now_s))

    def finish(self, run: Run, now_s: float) -> None:
        """The run is over: note what is done, put the rest back."""
        held = run.held
        held.run = None
        run.end(now_s)
        self.statistics.add(run, now_s)
        if held.stage is Stage.LOST:
            return
        self._settle(held, run)
        if run.error is not None or run.done:
            held.error, held.is_damaged = run.error, run.error is not None
        if run.is_move:
            held.moving = run.failed
        if held.stage is Stage.ACTIVE:
            self._put_back(held, run, now_s)
            held.skip_gap()

    def _ready(self, now_s: float) -> list[HeldPartition]:
        return [held for held in self.held.values() if held.is_ready(now_s)]

    def _settle(self, held: HeldPartition, run: Run) -> None:
        """Move the done offset; keep what was handled but not committed."""
        safe = run.safe_count(self._settings.ack)
        if safe:
            held.done_offset = run.messages[safe - 1].offset + 1
            held.kept.clear()
        held.kept += run.messages[safe : run.done]
        if run.done:
            held.run_offset = run.messages[run.done - 1].offset + 1

    def _put_back(self, held: HeldPartition, run: Run, now_s: float) -> None:
        rest = run.messages[run.done :]
        taken_count = sum(chunk.count for chunk in run.chunks)
        taken_bytes = sum(chunk.size_bytes for chunk in run.chunks)
        repeated = run.failed
        if run.is_move:
            repeated = []
            rest = rest[len(held.moving) :]
        if run.is_rollback:
            repeated = held.kept + repeated
            rest = held.kept + rest
            held.kept = []
        held.waiting_count += len(rest) - taken_count
        rest_bytes = taken_bytes * len(rest) // max(taken_count, 1)
        held.waiting_bytes += rest_bytes - taken_bytes
        if rest:
            held.chunks.appendleft(Chunk(rest, len(rest), rest_bytes))
            held.run_offset = rest[0].offset
        if run.error is not None:
            # What follows the damage is pulled again, in case it was only damaged on its way.
            held.chunks = type(held.chunks)([held.chunks[0]] if rest else [])
            held.waiting_count, held.waiting_bytes = len(rest), rest_bytes
            held.pull_offset = max(run.error.offset, held.run_offset)
            held.pending.pop(Pull, None)
            held.retry_at_s = now_s + DAMAGE_RETRY_S
        if run.suspend_s is not None:
            held.suspended_until_s = now_s + run.suspend_s
        held.attempts = {at: count for at, count in held.attempts.items() if at >= held.done_offset}
        for message in repeated:
            held.attempts[message.offset] = held.attempts.get(message.offset, 1) + 1

    def lags(self) -> dict[int, int]:
        """How many messages of each held partition are not done yet, as far as known."""
        return {held.index: max(0, held.end_offset - held.done_offset) for held in _holding(self.held.values())}


_OF_PARTITION = Acquire | Pull | Retry | Release
_HOLDING = frozenset((Stage.ACTIVE, Stage.DRAINING))


def _holding(held: Iterable[HeldPartition]) -> list[HeldPartition]:
    return [one for one in held if one.stage in _HOLDING]
