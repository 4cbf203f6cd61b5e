"""The consumer without I/O: which commands to send, and what the answers change. What runs is up to `Handling`.

    assigned ─ Acquire ─► ASKING ─ granted ─► ACTIVE ─ taken away ─► DRAINING ─ nothing runs ─► RELEASING ─► gone
                                                │
                                                └─ lease over, or StaleEpoch ─► LOST ─ nothing runs ─► gone

An assignment counts until the authorisation that came with it is over. Without a newer one by then everything is taken
away: the node has given this member up, and others wait for what it holds, though its leases may be renewed still.

A partition is pulled only in ACTIVE. Everything pulled is thrown away with the lease: the next holder, even if it
is this consumer again, starts from the committed offset with a higher epoch. A partition in which a handler still
runs is never asked for again.

Longer than a usual file: it is one state machine, and each step is read together with the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from inturn.consumer.decoder import Opened
from inturn.consumer.handling import Handling
from inturn.consumer.outcome import moved_batch, past_attempts
from inturn.consumer.partition_state import NEVER, HeldPartition, Moving, Pending, Stage
from inturn.consumer.run import Run
from inturn.consumer.scheduler import Scheduler
from inturn.consumer.scope import EVERYTHING, Duty
from inturn.consumer.statistics import Statistics
from inturn.consumer.trial import MemberTrials
from inturn.model.errors import (
    AccessDenied,
    Closed,
    ConnectionLost,
    GroupConflict,
    InturnError,
    InvalidInput,
    LeaseHeld,
    LogDamaged,
    NotFound,
    StaleEpoch,
    VersionMismatch,
)
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, LeaseSettings, LotState, OnExhausted, Order
from inturn.protocol.commands import (
    Acquire,
    Assignment,
    Command,
    Commit,
    Committed,
    Done,
    Granted,
    Heartbeat,
    KeyRequest,
    Leave,
    LotContent,
    Move,
    Pull,
    Pulled,
    Read,
    ReadLot,
    Release,
    Renew,
    Renewed,
    ReportTrial,
)

RETRY_S = 0.2  # after an error that says nothing about when to try again
DAMAGE_RETRY_S = 5.0
MOVED_AT_ONCE = 1000
CLAIM_RENEW_S = 1.0
MANY = 32
PAUSED_RETRY_S = 1.0  # how often it is looked at whether a paused partition may be pulled again, at the least


class ConsumerCore:
    """Called by one thread at a time, but for the runs it gives out. Time comes in as `now_s` (monotonic)."""

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
        duty: Duty = EVERYTHING,
    ) -> None:
        """`retries_of`: the subject is the retry subject of that one, and its messages wait before they are handled."""
        self.subject = subject
        self.group = group
        self.member = member
        self.statistics = Statistics()
        self.error: InturnError | None = None  # set: it cannot go on, and why
        self.is_stopped = False
        self.held: dict[int, HeldPartition] = {}
        self.left: dict[int, int] = {}  # by partition that was given back: how many were pulled and not finished
        self.handling = Handling(group, subject if retries_of is None else retries_of, order, settings)
        self.trials = MemberTrials(subject, group, member)
        self.damage: list[LogDamaged] = []  # found in what was pulled; for the log
        # Something happened that `poll` should not learn of only when it is due.
        self.wants_poll = False
        self._delays_s = () if retries_of is None else settings.retry.levels_s
        self._order = order
        self._asked_order = order
        self._next_order: Order | None = None  # decided by somebody; kept to once nothing is held any more
        self._start = start
        self._settings = settings
        self._lease = lease
        self._duty = duty
        self.assigned: frozenset[int] = frozenset()
        self._authorised_until_s = NEVER  # then the node has given it up, unless a newer heartbeat was answered
        self._generation = 0
        self._requests: tuple[KeyRequest, ...] = ()
        self._asks = 0
        self._is_stopping = False
        self._refusal: InturnError | None = None  # why it stops by itself, when it has left
        self._pending: dict[type[Command], Pending] = {}  # commands that are not about one partition
        self._retry_at_s: dict[type[Command], float] = {}
        self._renewed_at_s = float("-inf")
        self._committed_at_s = float("-inf")
        # Most of many partitions have nothing to do but to wait for their pull. Those that have, in the order of
        # `held`; and until when the others may be left alone, if nothing is answered.
        self._awake: dict[int, HeldPartition] = {}
        self._rest_until_s = NEVER
        self._renew_s = lease.renew_s

    # What to send

    def poll(self, now_s: float) -> list[Command]:
        """The commands to send now. Give every answer to `answered`."""
        self.wants_poll = False
        if self.is_stopped:
            return []
        if now_s >= self._rest_until_s:
            self._wake_all()
        self._forget_overdue(now_s)
        self.handling.look_around(now_s)
        if self._next_order is not None and not self.held:
            self._order = self.handling.order = self._next_order
            self._next_order = None
        commands: list[Command] = []
        for held in self._in_order():
            self._poll_partition(held, commands, now_s)
        for index in self._wanted(now_s) - self.held.keys():
            delay_s = self._delays_s[index] if self._delays_s else 0.0
            until = self._duty.until.get(index)
            held = HeldPartition(index, self.subject, self.group, self.member, delay_s, until)
            self.held[index] = self._awake[index] = held
            self._poll_partition(held, commands, now_s)
        self._poll_membership(commands, now_s)
        self._poll_renew(commands, now_s)
        self._poll_commit(commands, now_s)
        self._poll_trial(commands, now_s)
        self._let_rest(now_s)
        return commands

    def _in_order(self) -> list[HeldPartition]:
        """Those to be looked at. What is sent does not depend on what happened to be answered first."""
        if len(self.held) > MANY:  # to look for the order would cost as much as to look at all
            return list(self._awake.values())
        return [held for index, held in self.held.items() if index in self._awake]

    def _wake_all(self) -> None:
        self._awake = dict(self.held)
        self._rest_until_s = float("inf")
        self._renew_s = self._renew_every_s()

    def _let_rest(self, now_s: float) -> None:
        """Until the next answer, or until time has an effect on one of them."""
        resting = [held for held in self._awake.values() if held.is_resting and now_s >= held.retry_at_s]
        for held in resting:
            del self._awake[held.index]
            idle_at_s = held.pulled_at_s + self._settings.idle_s_max
            until_s = min(held.pending[Pull].until_s, held.lease_ends_s, idle_at_s)
            if until_s < self._rest_until_s:
                self._rest_until_s = until_s
        if now_s < self._authorised_until_s < self._rest_until_s:
            self._rest_until_s = self._authorised_until_s

    def stop(self, now_s: float) -> None:
        """Start nothing new; when the running handlers are over: commit, release, leave."""
        self._is_stopping = True
        self.assigned = frozenset()
        self._rest_until_s = NEVER
        self.trials.forget_waiting()

    def kill(self) -> None:
        """No handler is started any more; nothing is committed or released."""
        for held in self.held.values():
            held.deadline_s = NEVER
            held.forget_lanes()
            held.part_lots()

    def next_due_s(self, now_s: float) -> float:
        """When `poll` has something to do at the latest, if nothing else happens before."""
        due = [now_s + self._settings.heartbeat_s, self.handling.next_due_s(), self._rest_until_s]
        if Renew not in self._pending and any(held.stage in _HOLDING for held in self.held.values()):
            due.append(self._renewed_at_s + self._renew_s)
        due += [pending.until_s for pending in self._pending.values()]
        due += [at_s for at_s in (*self._retry_at_s.values(), self._authorised_until_s) if at_s > now_s]
        for held in self._awake.values():
            due += [pending.until_s for pending in held.pending.values()]
            due += [at_s for at_s in (held.retry_at_s, held.lease_ends_s) if at_s > now_s]
            if held.delayed:
                due.append(held.delayed[0][0])
            if held.is_paused:
                due.append(now_s + PAUSED_RETRY_S)
            if held.stage in _HOLDING and Commit not in self._pending:
                if held.has_progress:
                    due.append(self._commit_due_s(held))
                elif held.waiting_count:
                    due.append(now_s + self._settings.commit_interval_s)  # it may have done something by then
        return max(min(due), now_s)

    def _wanted(self, now_s: float) -> frozenset[int]:
        """What is assigned, as long as that can be relied upon, and nothing while it changes to another order."""
        is_ready = now_s < self._authorised_until_s and self._next_order is None
        return self.assigned if is_ready else frozenset()

    def _poll_membership(self, commands: list[Command], now_s: float) -> None:
        if not self._is_stopping and self._may_send(Heartbeat, now_s):
            # A third of the time to be held back, a third for the answer: so one that is lost is repeated in time.
            third_s = max(0.0, self._authorised_until_s - now_s) / 3
            beat = Heartbeat(
                self.subject,
                self.group,
                self.member,
                self._asked_order.value,
                self._start,
                self._generation,
                min(self._settings.heartbeat_s, third_s),
                str(self._settings.assignment),
                self._duty.takes_over,
                tags=self._settings.tags or "",
            )
            self._send(commands, beat, now_s, timeout_s=max(third_s, RETRY_S) if third_s else None)
        elif self._is_stopping and not self.held and not self.trials.is_busy and self._may_send(Leave, now_s):
            self._pending.pop(Heartbeat, None)
            self._send(commands, Leave(self.subject, self.group, self.member), now_s)

    def _poll_partition(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        is_wanted = held.index in self._wanted(now_s)
        if held.stage in (Stage.ACTIVE, Stage.RELEASING, Stage.DRAINING) and now_s >= held.lease_ends_s:
            self.handling.drop(held, Stage.LOST)
        if held.stage is Stage.ACTIVE and not (is_wanted and self._is_pulled_enough(held, now_s)):
            self.handling.drop(held, Stage.DRAINING)
        match held.stage:
            case Stage.ASKING if is_wanted:
                self._ask(held, commands, now_s)
            case Stage.ASKING if self._is_stopping or Acquire not in held.pending:
                self._forget(held)  # if it is granted all the same, Leave gives it back
            case Stage.ACTIVE:
                self._poll_active(held, commands, now_s)
            case Stage.DRAINING if held.moving or held.moving_now:
                self._move(held, commands, now_s)
            case Stage.DRAINING | Stage.RELEASING if not held.active:
                self._release(held, commands, now_s)
            case Stage.LOST if not held.active:
                self._forget(held)

    def _poll_active(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if self._duty.keeps_only:
            held.pulled_at_s = now_s
            return
        held.collect()
        for lot in held.lots.values():
            if lot.lane is not None:
                self.handling.collect_lot(lot.lane)
        while held.delayed and held.delayed[0][0] <= now_s:
            self.handling.offer(held, held.delayed.popleft()[1])
        if held.requests:
            self.handling.act_on_requests(held)
        self._move(held, commands, now_s)
        self._read_lot(held, commands, now_s)
        self._pull(held, commands, now_s)

    def _release(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if not self._may_send(Release, now_s, held):
            return
        if held.stage is Stage.DRAINING:
            held.collect()
            held.stage = Stage.RELEASING
        progress = held.nothing_new() if self._duty.keeps_only else held.progress()
        self._send(commands, Release(self.subject, self.group, self.member, progress), now_s, held)

    def _ask(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if not self._may_send(Acquire, now_s, held):
            return
        self._asks += 1
        held.ask = self._asks
        wait_s = self._settings.pull_wait_s
        keeps, outlives = self._duty.keeps_only, self._settings.workers == "processes"
        ask = Acquire(self.subject, self.group, held.index, self.member, self._asks, wait_s, keeps, outlives)
        self._send(commands, ask, now_s, held)

    def _is_pulled_enough(self, held: HeldPartition, now_s: float) -> bool:
        return now_s - held.pulled_at_s < self._settings.idle_s_max

    def _pull(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        held.is_paused = self._pauses(held, now_s)
        if held.is_paused:
            held.pulled_at_s = now_s  # a withheld pull counts as a pull
            if held.limit is not None:
                self.handling.name_blocking(held)
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
            self._settings.tags or "",
        )
        self._send(commands, pull, now_s, held)

    def _pauses(self, held: HeldPartition, now_s: float) -> bool:
        """Whether flow control holds back the pulling of this partition. Its lease is renewed all the same."""
        held.limit = None if held.is_through else self.handling.limit_of(held)
        if held.is_through or held.limit is not None:
            return True
        flow = self._settings.flow
        count_max = self.handling.buffered_count
        if held.waiting_count < count_max and held.waiting_bytes < flow.buffered_bytes:
            return False
        count, size_bytes = self.handling.held_back(held, now_s)
        return held.waiting_count - count >= count_max or held.waiting_bytes - size_bytes >= flow.buffered_bytes

    def _move(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if not (held.moving or held.moving_now) or not self._may_send(Move, now_s, held):
            return
        if held.moving_batch is None:
            place = held.moving[0].place
            rest = deque[Moving]()
            for one in held.moving:
                is_next = one.place == place and len(held.moving_now) < MOVED_AT_ONCE
                (held.moving_now if is_next else rest).append(one)
            held.moving = rest
            messages = [message for one in held.moving_now for message in one.messages]
            held.moving_batch = moved_batch(messages, [held.attempts.get(held.mark(one), 1) for one in messages])
        to = held.moving_now[0]
        move = Move(
            self.subject,
            self.group,
            held.index,
            self.member,
            held.epoch,
            to.to_subject,
            to.to_partition,
            held.moving_batch,
        )
        self._send(commands, move, now_s, held)

    def _read_lot(self, held: HeldPartition, commands: list[Command], now_s: float) -> None:
        if not held.lots or not self._may_send(ReadLot, now_s, held):
            return
        lot = self.handling.lot_to_read(held)
        if lot is not None:
            lot.since_read = held.unstored(lot.key)
            lot.not_again = held.unstored_removals(lot.key)
            max_bytes = self._settings.pull_bytes
            read = ReadLot(self.subject, self.group, held.index, self.member, held.epoch, lot.key, lot.after, max_bytes)
            self._send(commands, read, now_s, held)

    def _poll_renew(self, commands: list[Command], now_s: float) -> None:
        if now_s < self._renewed_at_s + self._renew_s or not self._may_send(Renew, now_s):
            return
        held = tuple((one.index, one.epoch) for one in self.held.values() if one.stage in _HOLDING)
        if held:
            self._renewed_at_s = now_s
            self._send(commands, Renew(self.subject, self.group, self.member, held), now_s)

    def _poll_trial(self, commands: list[Command], now_s: float) -> None:
        command = self.trials.next_command()
        if command is not None and self._may_send(type(command), now_s):
            self._send(commands, command, now_s)

    def _poll_commit(self, commands: list[Command], now_s: float) -> None:
        if not self._may_send(Commit, now_s):
            return
        holding = _holding(self._in_order())
        if not any(held.has_progress and now_s >= self._commit_due_s(held) for held in holding):
            return
        progress = tuple(held.progress() for held in holding if held.has_progress)
        self._committed_at_s = now_s
        self._send(commands, Commit(self.subject, self.group, self.member, progress), now_s)

    def _commit_due_s(self, held: HeldPartition) -> float:
        """At once where something waits for the answer: a next attempt, or somebody who asked for something."""
        due_s = NEVER if held.is_urgent else self._committed_at_s + self._settings.commit_interval_s
        return max(due_s, self._retry_at_s.get(Commit, NEVER))

    def _may_send(self, kind: type[Command], now_s: float, held: HeldPartition | None = None) -> bool:
        """One command of a kind is on its way at once, per partition; after an error it has to wait."""
        if held is None:
            return kind not in self._pending and now_s >= self._retry_at_s.get(kind, 0.0)
        return kind not in held.pending and now_s >= held.retry_at_s

    def _send(
        self,
        commands: list[Command],
        command: Command,
        now_s: float,
        held: HeldPartition | None = None,
        timeout_s: float | None = None,
    ) -> None:
        pending = self._pending if held is None else held.pending
        longest_s = self._settings.answer_timeout_s
        timeout_s = longest_s if timeout_s is None else min(timeout_s, longest_s)
        until_s = now_s + getattr(command, "wait_s", 0.0) + timeout_s
        pending[type(command)] = Pending(command, now_s, until_s)
        commands.append(command)

    def _forget_overdue(self, now_s: float) -> None:
        for pending in (self._pending, *(held.pending for held in self._awake.values())):
            for kind in [kind for kind, one in pending.items() if now_s >= one.until_s]:
                del pending[kind]

    # What came back

    def awaits(self, command: Command) -> bool:
        """Whether an answer to this would change anything."""
        held = self.held.get(command.partition) if isinstance(command, _OF_PARTITION) else None
        waited = (self._pending if held is None else held.pending).get(type(command))
        is_active = held is None or held.stage in (Stage.ASKING, Stage.ACTIVE)
        return waited is not None and waited.command is command and is_active

    def asked_at_s(self, command: Command) -> float | None:
        """When this was sent; None if its answer is not waited for."""
        held = self.held.get(command.partition) if isinstance(command, _OF_PARTITION) else None
        waited = (self._pending if held is None else held.pending).get(type(command))
        return waited.sent_at_s if waited is not None and waited.command is command else None

    def answered(self, command: Command, answer: object, now_s: float) -> None:
        """Answers to commands that are no longer waited for change nothing. Give a Pulled as `opened`."""
        held = self.held.get(command.partition) if isinstance(command, _OF_PARTITION) else None
        if held is not None:
            self._awake[held.index] = held
        pending = self._pending if held is None else held.pending
        waited = pending.get(type(command))
        if isinstance(command, Move) and isinstance(answer, Done) and held is not None:
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
                self._assigned_to(answer, waited.sent_at_s, now_s)
            case Granted() if held is not None:
                self._granted(held, answer, waited.sent_at_s, now_s)
            case Opened() if isinstance(command, Read):
                self.trials.read(answer)
            case Done() if isinstance(command, ReportTrial):
                self.trials.reported()
            case Opened() if held is not None and isinstance(command, Pull):
                self._pulled(held, command, answer, waited.sent_at_s, now_s)
            case Pulled():
                raise TypeError("what was pulled is to be opened first")
            case Renewed() if isinstance(command, Renew):
                self._renewed(command, answer, waited.sent_at_s)
                if answer.wanted_back:
                    self.assigned -= set(answer.wanted_back)
                    self._rest_until_s = NEVER
            case Committed() if isinstance(command, Commit):
                self._committed(command, answer, now_s)
            case LotContent() if held is not None and isinstance(command, ReadLot):
                self._lot_read(held, command, answer)
            case Done() if isinstance(command, Release) and held is not None:
                self._forget(held)
            case Done() if isinstance(command, Leave):
                self.is_stopped, self.error = True, self._refusal

    def _assigned_to(self, answer: Assignment, sent_at_s: float, now_s: float) -> None:
        self._rest_until_s = NEVER
        self._authorised_until_s = sent_at_s + answer.authorised_s - self._margin_s(answer.authorised_s)
        if self._authorised_until_s <= now_s:
            self._retry_at_s[Heartbeat] = now_s + RETRY_S  # it came too late; the next one is answered at once
        self._generation = answer.generation
        self._requests = answer.requests
        if not self._is_stopping:
            self.trials.heard(answer.trials)
        self.handling.keyless = answer.subject.keyless
        if not self._is_stopping:
            self.assigned = frozenset(answer.partitions)
            self._follow(answer.order, now_s)
        for held in self.held.values():
            if held.stage is Stage.ACTIVE:
                held.authorised(self._authorised_until_s)
                self._note_requests(held)

    def _follow(self, order: str, now_s: float) -> None:
        """Somebody may have decided otherwise than was asked for: a stricter order is kept, a weaker one is refused."""
        if order not in _STRICTNESS or order == (self._next_order or self._order):
            return
        decided = Order(order)
        parks = self._settings.on_exhausted is OnExhausted.PARK and decided is not Order.KEY
        if _STRICTNESS[decided] < _STRICTNESS[self._asked_order] or self._duty is not EVERYTHING or parks:
            why = "its settings park keys" if parks else f"this consumer was made for order={self._asked_order.value!r}"
            self._refusal = GroupConflict(
                self.group,
                f"order={decided.value!r} was set for it, and {why}; consume it with the order that was set, or undo "
                "that: `inturn group set --order asked`",
            )
            self.stop(now_s)
        else:
            self._next_order = decided if decided is not self._order else None

    def _note_requests(self, held: HeldPartition) -> None:
        for request in self._requests:
            if request.partition == held.index and request.id > held.request_mark:
                held.requests.append(request)
                held.request_mark = request.id

    def _granted(self, held: HeldPartition, answer: Granted, sent_at_s: float, now_s: float) -> None:
        held.life_s = answer.life_s
        held.authorised_until_s = self._authorised_until_s
        held.granted(answer, self._deadline_s(held, sent_at_s), now_s)
        self._renew_s = min(self._renew_s, CLAIM_RENEW_S if held.is_claim else held.life_s / 4, held.life_s / 4)
        self._note_requests(held)
        if held.lots and self._order is not Order.KEY:
            self._refusal = GroupConflict(
                self.group,
                f"{len(held.lots)} of its keys are parked in partition {held.index}, which order={self._order.value!r} "
                "knows nothing of; consume with order='key', or resume them first: `inturn key list`",
            )
            self.stop(now_s)

    def _pulled(self, held: HeldPartition, command: Pull, answer: Opened, sent_at_s: float, now_s: float) -> None:
        if held.stage is not Stage.ACTIVE or held.epoch != command.epoch or held.pull_offset != command.offset:
            return
        held.pulled_at_s = now_s
        if not held.is_damaged:
            held.error = None
        pulled = answer.pulled
        held.end_offset = pulled.end_offset
        held.renewed(self._deadline_s(held, sent_at_s))
        if answer.unwanted:
            damage = None if answer.damage is None else answer.damage.offset
            held.leave_out(answer.unwanted, pulled.next_offset if damage is None else damage)
        for batch, messages in zip(pulled.batches, answer.messages, strict=False):
            header = batch.header
            held.skip_to(held.bounded(header.base_offset))
            if held.is_through:
                break
            messages = held.begin(held.wanted(header, messages))
            held.pull_offset = held.bounded(max(held.pull_offset, header.next_offset))
            held.error, held.is_damaged = None, False
            if held.is_delayed:
                # Both times are the node's: no clocks are compared.
                age_s = (pulled.now_ms - header.stored_at_ms) / 1000
                for message in messages:
                    held.attempts.setdefault(message.offset, past_attempts(message))
                held.delayed.append((now_s + held.delay_s - age_s, messages))
            else:
                self.handling.offer(held, messages)
        if answer.damage is not None:
            # It is pulled again, in case it was only damaged on its way.
            held.error, held.is_damaged = answer.damage, True
            held.retry_at_s = now_s + DAMAGE_RETRY_S
            self.damage.append(answer.damage)
            return
        held.skip_to(held.bounded(pulled.next_offset))

    def _renew_every_s(self) -> float:
        """A server that was started again may grant shorter leases than it said when we came."""
        holding = _holding(self.held.values())
        is_claim = any(held.is_claim for held in holding)  # which may be called back
        return min([CLAIM_RENEW_S if is_claim else self._lease.renew_s, *(held.life_s / 3 for held in holding)])

    def _deadline_s(self, held: HeldPartition, asked_at_s: float) -> float:
        """Until when handlers may be started: counted from before the lease was asked for, or its renewal."""
        return asked_at_s + held.life_s - self._margin_s(held.life_s)

    def _margin_s(self, life_s: float) -> float:
        return min(self._lease.margin_s, life_s / 5)

    def _moved(self, held: HeldPartition, command: Move) -> None:
        if held.stage in _HOLDING and held.moving_now and held.moving_batch is command.batch:
            held.pending.pop(Move, None)
            self.handling.moved(held)

    def _lot_read(self, held: HeldPartition, command: ReadLot, answer: LotContent) -> None:
        lot = held.lots.get(command.key)
        if held.stage is not Stage.ACTIVE or held.epoch != command.epoch or lot is None:
            return
        if lot.after == command.after and lot.since_read is not None:
            self.handling.lot_read(held, lot, answer)

    def _renewed(self, command: Renew, answer: Renewed, sent_at_s: float) -> None:
        alive = set(answer.partitions)
        for index, epoch in command.held:
            held = self.held.get(index)
            if held is None or held.epoch != epoch or held.stage not in _HOLDING:
                continue
            if index in alive:
                held.renewed(self._deadline_s(held, sent_at_s))
            elif index not in answer.unreached:
                self._awake[index] = held
                self.handling.drop(held, Stage.LOST)

    def _committed(self, command: Commit, answer: Committed, now_s: float) -> None:
        taken = set(answer.partitions)
        for progress in command.progress:
            held = self.held.get(progress.partition)
            if held is None or held.epoch != progress.epoch or held.stage not in _HOLDING:
                continue
            if progress.partition in taken:
                sent = held.stored(progress.number)
                if sent is not None:
                    self.handling.stored(held, sent, now_s)
            elif progress.partition not in answer.unreached:
                self.handling.drop(held, Stage.LOST)

    def _failed(self, command: Command, held: HeldPartition | None, error: InturnError, now_s: float) -> None:
        if isinstance(command, Read | ReportTrial):
            if error.retriable:
                self._retry_at_s[type(command)] = now_s + RETRY_S
            else:
                self.trials.failed(command, error)
        elif held is None:
            if isinstance(command, Leave) and isinstance(error, NotFound | AccessDenied | Closed | ConnectionLost):
                # Nothing is held any more: whoever cannot hear it will count us out for our silence.
                self.is_stopped, self.error = True, self._refusal
            elif isinstance(error, NotFound | GroupConflict | InvalidInput | VersionMismatch | AccessDenied | Closed):
                self.error = error
            else:
                self._retry_at_s[type(command)] = now_s + RETRY_S
        elif isinstance(error, AccessDenied):
            self.error = error
        elif isinstance(error, LeaseHeld):
            if not isinstance(command, Acquire):  # which waited already, and is asked again at once
                held.retry_at_s = now_s + RETRY_S
                if held.stage is Stage.RELEASING:
                    held.stage = Stage.DRAINING  # others work under the lease: it is renewed until they are done
        elif isinstance(error, StaleEpoch):
            if held.stage is Stage.RELEASING:
                self._forget(held)
            elif held.stage in _HOLDING:
                self.handling.drop(held, Stage.LOST)
            else:
                held.error, held.retry_at_s = error, now_s + RETRY_S
        else:
            held.error = error
            held.retry_at_s = now_s + (RETRY_S if error.retriable else DAMAGE_RETRY_S)

    # Handling

    def take(self, now_s: float) -> Run | None:
        """Work for one worker. Whoever takes it calls `finish` at the end, in any case."""
        run = self.handling.take(now_s)
        self._look_for_urgent()
        return run

    def finish(self, run: Run, now_s: float) -> None:
        """The run is over: note what is done, and what becomes of its lanes."""
        self.handling.finish(run, now_s)
        self.statistics.add(run, now_s)
        self._look_for_urgent()

    def _look_for_urgent(self) -> None:
        self.wants_poll = self.wants_poll or self.handling.is_urgent
        self.handling.is_urgent = False

    @property
    def scheduler(self) -> Scheduler:
        return self.handling.scheduler

    @property
    def wanted_workers(self) -> int:
        return self.handling.scheduler.wanted_workers

    @property
    def is_quiet(self) -> bool:
        """Nothing runs, and nothing could without waiting for something."""
        return not self.handling.scheduler.ready_count and not self.handling.scheduler.runs

    @property
    def is_held_up(self) -> bool:
        """Nothing runs or could but what has failed before, and nothing is still to be asked for or to be pulled."""
        busy = self.handling.scheduler.ready_count + sum(held.active for held in self.held.values())
        if busy > sum(_failing_count(held) for held in self.held.values()):
            return False
        for index in self._duty.until:
            held = self.held.get(index)
            if held is None and (index in self.assigned or not self._generation):
                return False
            if held is not None and (held.error is None or held.error.retriable) and not self._is_idle(held):
                return False
        return True

    def _is_idle(self, held: HeldPartition) -> bool:
        """It is held, there is nothing to pull or to read of a lot, and no answer is waited for."""
        has_asked = bool(held.moving or held.moving_now) or ReadLot in held.pending or self.handling.lot_to_read(held)
        return held.stage is Stage.ACTIVE and held.is_paused and not has_asked

    def is_through(self) -> bool:
        """All that it was to handle is over, and so are lots that are being resumed, and requests."""
        if not self.is_quiet:
            return False
        for index in self._duty.until:
            held = self.held.get(index)
            if held is None and index not in self.assigned and self._generation:
                continue  # called back
            if held is None or not held.is_through:
                return False
            held.collect()
            is_resuming = any(lot.state is LotState.RESUMING for lot in held.lots.values())
            if held.waiting_count or held.moving_now or held.requests or is_resuming:
                return False
        return True

    def lags(self) -> dict[int, int]:
        """How many messages of each held partition are not done yet, as far as known."""
        return {
            held.index: max(0, held.end_offset - held.pull_offset) + held.waiting_count
            for held in _holding(self.held.values())
        }

    def blocking(self) -> dict[int, Message]:
        """By partition that cannot be pulled because of one key: the message that it waits for."""
        full = [held for held in _holding(self._in_order()) if held.limit is not None]
        found = {held.index: self.handling.blocking(held) for held in full}
        return {index: head for index, head in found.items() if head is not None}

    def _forget(self, held: HeldPartition) -> None:
        self.left[held.index] = held.waiting_count
        held.forget_lanes()
        held.part_lots()
        del self.held[held.index]
        self._awake.pop(held.index, None)


def _failing_count(held: HeldPartition) -> int:
    """How many lanes run, or could, whose first message has failed before."""
    found = 0
    for offset, failure in held.recorded.items():
        lanes = (held.lanes.get(key) for key in (failure.key, offset, None))
        lane = next((lane for lane in lanes if lane is not None), None)
        if lane is not None and (lane.run is not None or lane.bucket >= 0):
            head = lane.head
            found += head is not None and held.mark(head) == offset
    return found


_OF_PARTITION = Acquire | Pull | Move | ReadLot | Release
_STRICTNESS: dict[str, int] = {Order.NONE: 0, Order.KEY: 1, Order.PARTITION: 2}
_HOLDING = frozenset((Stage.ACTIVE, Stage.DRAINING))


def _holding(held: Iterable[HeldPartition]) -> list[HeldPartition]:
    return [one for one in held if one.stage in _HOLDING]
