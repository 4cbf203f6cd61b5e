"""The consumer of an exclusive or broadcast group without I/O: which commands to send, and what the answers change.
`Dispatcher` decides what runs.

    assigned ─ Acquire ─► ASKING ─ granted ─► ACTIVE ─ revoked ─► DRAINING ─ no handler runs ─► RELEASING ─► gone
                                                │
                                                └─ lease over, or StaleEpoch ─► LOST ─ no handler runs ─► gone

An assignment counts until the authorisation of its heartbeat ends. Without a newer authorisation by then, the core
revokes all partitions: the node has given this member up, and other members wait for the partitions, even if the leases
could still be renewed.

A partition is pulled only in ACTIVE. The buffer is dropped with the lease: the next holder, even if the holder is this
consumer again, starts from the committed offset with a higher epoch. A partition in which a handler still runs is never
acquired again.

The file is longer than usual because the steps of the state machine are read together.
"""

from __future__ import annotations

from collections.abc import Iterable

from inturn.consumer.decoder import DecodedPull
from inturn.consumer.dispatcher import Dispatcher
from inturn.consumer.key_requests import KeyRequests
from inturn.consumer.member_core import DAMAGE_RETRY_S, RETRY_S, MemberCore
from inturn.consumer.options import EVERYTHING, Scope
from inturn.consumer.outcome import past_attempts
from inturn.consumer.partition_lease import HOLDING, NEVER, Stage
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.model.errors import (
    GroupConflict,
    InturnError,
    LeaseHeld,
    StaleEpoch,
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
    LotContent,
    Move,
    Pull,
    Pulled,
    ReadLot,
    Release,
    Renew,
    Renewed,
)

CLAIM_RENEW_S = 1.0
MANY = 32
PAUSED_RETRY_S = 1.0  # the longest time between two checks of a paused partition


class ConsumerCore(MemberCore):
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
        scope: Scope = EVERYTHING,
    ) -> None:
        """`retries_of`: `subject` is the retry subject of this subject, and messages wait before a handler runs."""
        origin = subject if retries_of is None else retries_of
        self.dispatcher = Dispatcher(group, origin, order, settings)
        super().__init__(subject, group, member, start, settings, self.dispatcher.scheduler)
        self.key_requests = KeyRequests(self.dispatcher)
        self._limits = self.dispatcher.limits
        self._delays_s = () if retries_of is None else settings.retry.levels_s
        self._order = order
        self._asked_order = order
        self._next_order: Order | None = None  # set by an operator; followed once no partition is held
        self._lease = lease
        self._scope = scope
        self._authorised_until_s = NEVER  # then the node gives the member up, unless a newer heartbeat was answered
        self._requests: tuple[KeyRequest, ...] = ()
        self._asks = 0
        self._renewed_at_s = float("-inf")
        self._committed_at_s = float("-inf")
        # Most of many partitions only wait for the answer to a pull. `_awake` holds the partitions that are not idle;
        # idle partitions need no poll before `_rest_until_s`, unless an answer comes.
        self._awake: dict[int, PartitionState] = {}
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
        self._forget_overdue(self._awake.values(), now_s)
        self.dispatcher.look_around(now_s)
        if self._next_order is not None and not self.partitions:
            self._order = self.dispatcher.order = self._next_order
            self._next_order = None
        commands: list[Command] = []
        for state in self._in_order():
            self._poll_partition(state, commands, now_s)
        for index in self._wanted(now_s) - self.partitions.keys():
            delay_s = self._delays_s[index] if self._delays_s else 0.0
            until = self._scope.until.get(index)
            state = PartitionState(index, self.subject, self.group, self.member, delay_s=delay_s, until=until)
            self.partitions[index] = self._awake[index] = state
            self._poll_partition(state, commands, now_s)
        self._poll_membership(commands, now_s)
        self._poll_renew(commands, now_s)
        self._poll_commit(commands, now_s)
        self._poll_trial(commands, now_s)
        self._let_rest(now_s)
        return commands

    def _in_order(self) -> list[PartitionState]:
        """The partitions to poll, in the order of `partitions`, so that the commands do not depend on the order of
        answers."""
        if len(self.partitions) > MANY:  # finding the order would cost as much as polling all partitions
            return list(self._awake.values())
        return [state for index, state in self.partitions.items() if index in self._awake]

    def _wake_all(self) -> None:
        self._awake = dict(self.partitions)
        self._rest_until_s = float("inf")
        self._renew_s = self._renew_every_s()

    def _let_rest(self, now_s: float) -> None:
        """Idle partitions are not polled until the next answer, or until a time of the partition is reached."""
        idle = [state for state in self._awake.values() if state.is_idle and now_s >= state.lease.retry_at_s]
        for state in idle:
            del self._awake[state.index]
            idle_at_s = state.buffer.pulled_at_s + self._settings.idle_s_max
            until_s = min(state.lease.pending[Pull].until_s, state.lease.ends_s, idle_at_s)
            if until_s < self._rest_until_s:
                self._rest_until_s = until_s
        if now_s < self._authorised_until_s < self._rest_until_s:
            self._rest_until_s = self._authorised_until_s

    def stop(self, now_s: float) -> None:
        super().stop(now_s)
        self._rest_until_s = NEVER

    def kill(self) -> None:
        for state in self.partitions.values():
            state.lease.forbid_starts()
            state.forget_lanes()
            state.forget_parking_lots()

    def next_due_s(self, now_s: float) -> float:
        due = self._due_times(self._awake.values(), now_s)
        due += [self.dispatcher.next_due_s(), self._rest_until_s]
        if Renew not in self._pending and any(state.lease.is_holding for state in self.partitions.values()):
            due.append(self._renewed_at_s + self._renew_s)
        if self._authorised_until_s > now_s:
            due.append(self._authorised_until_s)
        for state in self._awake.values():
            lease, buffer = state.lease, state.buffer
            if lease.ends_s > now_s:
                due.append(lease.ends_s)
            if buffer.delayed:
                due.append(buffer.delayed[0][0])
            if buffer.is_paused:
                due.append(now_s + PAUSED_RETRY_S)
            if lease.stage in HOLDING and Commit not in self._pending:
                if state.progress.has_changes:
                    due.append(self._commit_due_s(state))
                elif buffer.waiting_count:
                    due.append(now_s + self._settings.commit_interval_s)  # messages may be finished by then
        return max(min(due), now_s)

    def _wanted(self, now_s: float) -> frozenset[int]:
        """The assigned partitions while the assignment is authorised; none while the consumer changes its order."""
        is_ready = now_s < self._authorised_until_s and self._next_order is None
        return self.assigned if is_ready else frozenset()

    @property
    def _is_drained(self) -> bool:
        return not self.partitions and not self.trials.is_busy

    def _beat(self, commands: list[Command], now_s: float) -> None:
        # A third of the time for the node to hold the heartbeat back, a third for the answer: so a heartbeat that is
        # lost is repeated in time.
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
            self._scope.takes_over,
            tags=self._settings.tags or "",
        )
        self._send(commands, beat, now_s, timeout_s=max(third_s, RETRY_S) if third_s else None)

    def _poll_partition(self, state: PartitionState, commands: list[Command], now_s: float) -> None:
        is_wanted = state.index in self._wanted(now_s)
        lease = state.lease
        if lease.stage in (Stage.ACTIVE, Stage.RELEASING, Stage.DRAINING) and now_s >= lease.ends_s:
            self.dispatcher.drop(state, Stage.LOST)
        if lease.stage is Stage.ACTIVE and not (is_wanted and self._is_pulled_enough(state, now_s)):
            self.dispatcher.drop(state, Stage.DRAINING)
        match lease.stage:
            case Stage.ASKING if is_wanted:
                self._ask(state, commands, now_s)
            case Stage.ASKING if self._is_stopping or Acquire not in lease.pending:
                self._forget(state)  # if the node grants the lease later, Leave releases it
            case Stage.ACTIVE:
                self._poll_active(state, commands, now_s)
            case Stage.DRAINING if state.progress.has_moves:
                self._move(state, commands, now_s)
            case Stage.DRAINING | Stage.RELEASING if not state.buffer.lanes_in_runs:
                self._release(state, commands, now_s)
            case Stage.LOST if not state.buffer.lanes_in_runs:
                self._forget(state)

    def _poll_active(self, state: PartitionState, commands: list[Command], now_s: float) -> None:
        if self._scope.keeps_only:
            state.buffer.pulled_at_s = now_s
            return
        state.collect()
        for lot in state.progress.parking_lots.values():
            if lot.lane is not None:
                state.collect_parked(lot.lane)
        delayed = state.buffer.delayed
        while delayed and delayed[0][0] <= now_s:
            self.dispatcher.offer(state, delayed.popleft()[1])
        if state.progress.key_requests:
            self.key_requests.act_on_all(state)
        self._move(state, commands, now_s)
        self._read_lot(state, commands, now_s)
        self._pull(state, commands, now_s)

    def _release(self, state: PartitionState, commands: list[Command], now_s: float) -> None:
        if not self._may_send(Release, now_s, state):
            return
        if state.lease.stage is Stage.DRAINING:
            state.collect()
            state.lease.stage = Stage.RELEASING
        progress = state.granted_progress() if self._scope.keeps_only else state.begin_commit()
        self._send(commands, Release(self.subject, self.group, self.member, progress), now_s, state)

    def _ask(self, state: PartitionState, commands: list[Command], now_s: float) -> None:
        if not self._may_send(Acquire, now_s, state):
            return
        self._asks += 1
        state.lease.acquire_number = self._asks
        wait_s = self._settings.pull_wait_s
        keeps, outlives = self._scope.keeps_only, self._settings.workers == "processes"
        ask = Acquire(self.subject, self.group, state.index, self.member, self._asks, wait_s, keeps, outlives)
        self._send(commands, ask, now_s, state)

    def _is_pulled_enough(self, state: PartitionState, now_s: float) -> bool:
        return now_s - state.buffer.pulled_at_s < self._settings.idle_s_max

    def _pull(self, state: PartitionState, commands: list[Command], now_s: float) -> None:
        buffer = state.buffer
        buffer.is_paused = self._limits.pauses(state, now_s)
        if buffer.is_paused:
            buffer.pulled_at_s = now_s  # a withheld pull counts as a pull
            if buffer.limit is not None:
                self._limits.name_blocking(state)
            return
        if not self._may_send(Pull, now_s, state):
            return
        pull = Pull(
            self.subject,
            self.group,
            state.index,
            self.member,
            state.lease.epoch,
            buffer.pull_offset,
            self._settings.pull_bytes,
            self._settings.pull_wait_s,
            self._settings.tags or "",
        )
        self._send(commands, pull, now_s, state)

    def _move(self, state: PartitionState, commands: list[Command], now_s: float) -> None:
        if not state.progress.has_moves or not self._may_send(Move, now_s, state):
            return
        batch = state.begin_move()
        to_subject, to_partition = state.progress.moves_in_flight[0].place
        move = Move(
            self.subject,
            self.group,
            state.index,
            self.member,
            state.lease.epoch,
            to_subject,
            to_partition,
            batch,
        )
        self._send(commands, move, now_s, state)

    def _read_lot(self, state: PartitionState, commands: list[Command], now_s: float) -> None:
        if not state.progress.parking_lots or not self._may_send(ReadLot, now_s, state):
            return
        lot = state.progress.lot_to_read()
        if lot is not None:
            lot.since_read = state.progress.additions_to_store(lot.key)
            lot.not_again = state.progress.removals_to_store(lot.key)
            max_bytes = self._settings.pull_bytes
            epoch = state.lease.epoch
            read = ReadLot(self.subject, self.group, state.index, self.member, epoch, lot.key, lot.after, max_bytes)
            self._send(commands, read, now_s, state)

    def _poll_renew(self, commands: list[Command], now_s: float) -> None:
        if now_s < self._renewed_at_s + self._renew_s or not self._may_send(Renew, now_s):
            return
        leases = tuple((one.index, one.lease.epoch) for one in self.partitions.values() if one.lease.stage in HOLDING)
        if leases:
            self._renewed_at_s = now_s
            self._send(commands, Renew(self.subject, self.group, self.member, leases), now_s)

    def _poll_commit(self, commands: list[Command], now_s: float) -> None:
        if not self._may_send(Commit, now_s):
            return
        holding = _holding(self._in_order())
        if not any(state.progress.has_changes and now_s >= self._commit_due_s(state) for state in holding):
            return
        progress = tuple(state.begin_commit() for state in holding if state.progress.has_changes)
        self._committed_at_s = now_s
        self._send(commands, Commit(self.subject, self.group, self.member, progress), now_s)

    def _commit_due_s(self, state: PartitionState) -> float:
        """At once if the next attempt at a message or an operator's request waits for the commit."""
        due_s = NEVER if state.progress.is_urgent else self._committed_at_s + self._settings.commit_interval_s
        return max(due_s, self._retry_at_s.get(Commit, NEVER))

    # Answers

    def _state_of(self, command: Command) -> PartitionState | None:
        return self.partitions.get(command.partition) if isinstance(command, _PARTITION_COMMANDS) else None

    def answered(self, command: Command, answer: object, now_s: float) -> None:
        state = self._state_of(command)
        if state is not None:
            self._awake[state.index] = state
            if isinstance(command, Move) and isinstance(answer, Done):
                self._moved(state, command)  # however late the answer comes: the messages are stored
                return
        super().answered(command, answer, now_s)

    def _accept(
        self, command: Command, state: PartitionState | None, answer: object, sent_at_s: float, now_s: float
    ) -> None:
        match answer:
            case Assignment():
                self._assigned_to(answer, sent_at_s, now_s)
            case Granted() if state is not None:
                self._granted(state, answer, sent_at_s, now_s)
            case DecodedPull() if state is not None and isinstance(command, Pull):
                self._pulled(state, command, answer, sent_at_s, now_s)
            case Pulled():
                raise TypeError("decode a Pulled first: inturn.consumer.decoder")
            case Renewed() if isinstance(command, Renew):
                self._renewed(command, answer, sent_at_s)
                if answer.wanted_back:
                    self.assigned -= set(answer.wanted_back)
                    self._rest_until_s = NEVER
            case Committed() if isinstance(command, Commit):
                self._committed(command, answer, now_s)
            case LotContent() if state is not None and isinstance(command, ReadLot):
                self._lot_read(state, command, answer)
            case Done() if isinstance(command, Release) and state is not None:
                self._forget(state)

    def _assigned_to(self, answer: Assignment, sent_at_s: float, now_s: float) -> None:
        self._rest_until_s = NEVER
        self._authorised_until_s = sent_at_s + answer.authorised_s - self._margin_s(answer.authorised_s)
        if self._authorised_until_s <= now_s:
            self._retry_at_s[Heartbeat] = now_s + RETRY_S  # too late; the next heartbeat is answered at once
        self._generation = answer.generation
        self._requests = answer.requests
        if not self._is_stopping:
            self.trials.heard(answer.trials)
        self.dispatcher.keyless = answer.subject.keyless
        if not self._is_stopping:
            self.assigned = frozenset(answer.partitions)
            self._follow(answer.order, now_s)
        for state in self.partitions.values():
            if state.lease.stage is Stage.ACTIVE:
                state.lease.authorised(self._authorised_until_s)
                self._note_requests(state)

    def _follow(self, order: str, now_s: float) -> None:
        """An operator may set another order for the group: a stricter order is followed, a weaker order is refused."""
        if order not in _STRICTNESS or order == (self._next_order or self._order):
            return
        decided = Order(order)
        parks = self._settings.on_exhausted is OnExhausted.PARK and decided is not Order.KEY
        if _STRICTNESS[decided] < _STRICTNESS[self._asked_order] or self._scope is not EVERYTHING or parks:
            why = "its settings park keys" if parks else f"this consumer was made for order={self._asked_order.value!r}"
            self._refusal = GroupConflict(
                self.group,
                f"order={decided.value!r} was set for the group, and {why}; consume with that order, or undo the "
                "setting: `inturn group set --order asked`",
            )
            self.stop(now_s)
        else:
            self._next_order = decided if decided is not self._order else None

    def _note_requests(self, state: PartitionState) -> None:
        progress = state.progress
        for request in self._requests:
            if request.partition == state.index and request.id > progress.last_request_id:
                progress.key_requests.append(request)
                progress.last_request_id = request.id

    def _granted(self, state: PartitionState, answer: Granted, sent_at_s: float, now_s: float) -> None:
        lease = state.lease
        lease.life_s = answer.life_s
        lease.authorised_until_s = self._authorised_until_s
        state.granted(answer, self._deadline_s(state, sent_at_s), now_s)
        renew_s = lease.life_s / 4
        self._renew_s = min(self._renew_s, renew_s, CLAIM_RENEW_S if lease.is_claim else renew_s)
        self._note_requests(state)
        lots = state.progress.parking_lots
        if lots and self._order is not Order.KEY:
            self._refusal = GroupConflict(
                self.group,
                f"{len(lots)} keys are parked in partition {state.index}, but order={self._order.value!r} has no "
                "parking; consume with order='key', or resume the keys first: `inturn key list`",
            )
            self.stop(now_s)

    def _pulled(
        self, state: PartitionState, command: Pull, answer: DecodedPull, sent_at_s: float, now_s: float
    ) -> None:
        lease, buffer = state.lease, state.buffer
        if lease.stage is not Stage.ACTIVE or lease.epoch != command.epoch or buffer.pull_offset != command.offset:
            return
        lease.pull_answered()
        pulled = answer.pulled
        buffer.pulled_at_s, buffer.end_offset = now_s, pulled.end_offset
        lease.renewed(self._deadline_s(state, sent_at_s))
        if answer.filtered_out:
            damage = None if answer.damage is None else answer.damage.offset
            state.leave_out(answer.filtered_out, pulled.next_offset if damage is None else damage)
        for batch, messages in zip(pulled.batches, answer.messages, strict=False):
            header = batch.header
            state.skip_to(buffer.bounded(header.base_offset))
            if state.is_through:
                break
            messages = state.begin(state.wanted(header, messages))
            buffer.pull_offset = buffer.bounded(max(buffer.pull_offset, header.next_offset))
            lease.batch_decoded()
            if buffer.is_delayed:
                # Both times come from the node: no clocks are compared.
                age_s = (pulled.now_ms - header.stored_at_ms) / 1000
                for message in messages:
                    state.progress.attempts.setdefault(message.offset, past_attempts(message))
                buffer.delayed.append((now_s + buffer.delay_s - age_s, messages))
            else:
                self.dispatcher.offer(state, messages)
        if answer.damage is not None:
            # Pull again: the batch may have been damaged only on the way.
            lease.damaged(answer.damage, now_s + DAMAGE_RETRY_S)
            self.damage.append(answer.damage)
            return
        state.skip_to(buffer.bounded(pulled.next_offset))

    def _renew_every_s(self) -> float:
        """A restarted server may grant shorter leases than before."""
        holding = _holding(self.partitions.values())
        is_claim = any(state.lease.is_claim for state in holding)  # a claim may be revoked
        return min([CLAIM_RENEW_S if is_claim else self._lease.renew_s, *(state.lease.life_s / 3 for state in holding)])

    def _deadline_s(self, state: PartitionState, asked_at_s: float) -> float:
        """The time until which handlers may be started, counted from before the Acquire or the Renew was sent."""
        return asked_at_s + state.lease.life_s - self._margin_s(state.lease.life_s)

    def _margin_s(self, life_s: float) -> float:
        return min(self._lease.margin_s, life_s / 5)

    def _moved(self, state: PartitionState, command: Move) -> None:
        progress = state.progress
        if state.lease.is_holding and progress.moves_in_flight and progress.move_batch is command.batch:
            state.lease.pending.pop(Move, None)
            self.dispatcher.moved(state)

    def _lot_read(self, state: PartitionState, command: ReadLot, answer: LotContent) -> None:
        lot = state.progress.parking_lots.get(command.key)
        if state.lease.stage is not Stage.ACTIVE or state.lease.epoch != command.epoch or lot is None:
            return
        if lot.after == command.after and lot.since_read is not None:
            self.dispatcher.lot_read(state, lot, answer)

    def _renewed(self, command: Renew, answer: Renewed, sent_at_s: float) -> None:
        alive = set(answer.partitions)
        for index, epoch in command.held:
            state = self.partitions.get(index)
            if state is None or state.lease.epoch != epoch or not state.lease.is_holding:
                continue
            if index in alive:
                state.lease.renewed(self._deadline_s(state, sent_at_s))
            elif index not in answer.unreached:
                self._awake[index] = state
                self.dispatcher.drop(state, Stage.LOST)

    def _committed(self, command: Commit, answer: Committed, now_s: float) -> None:
        taken = set(answer.partitions)
        for progress in command.progress:
            state = self.partitions.get(progress.partition)
            if state is None or state.lease.epoch != progress.epoch or not state.lease.is_holding:
                continue
            if progress.partition in taken:
                commit = state.progress.commit_stored(progress.number)
                if commit is not None:
                    self.dispatcher.stored(commit, now_s)
            elif progress.partition not in answer.unreached:
                self.dispatcher.drop(state, Stage.LOST)

    def _partition_failed(self, command: Command, state: PartitionState, error: InturnError, now_s: float) -> None:
        lease = state.lease
        if isinstance(error, LeaseHeld):
            if not isinstance(command, Acquire):  # the node held the Acquire back already: repeat it at once
                lease.retry_at_s = now_s + RETRY_S
                if lease.stage is Stage.RELEASING:
                    lease.stage = Stage.DRAINING  # other members work under the lease: renew it until they are done
        elif isinstance(error, StaleEpoch):
            if lease.stage is Stage.RELEASING:
                self._forget(state)
            elif lease.is_holding:
                self.dispatcher.drop(state, Stage.LOST)
            else:
                lease.failed(error, now_s + RETRY_S)
        else:
            super()._partition_failed(command, state, error, now_s)

    # Workers

    def _next_run(self, now_s: float) -> Run | None:
        return self.dispatcher.take(now_s)

    def _end_run(self, run: Run, now_s: float) -> None:
        self.dispatcher.finish(run, now_s)

    def _look_for_urgent(self) -> None:
        self.wants_poll = self.wants_poll or self.dispatcher.is_urgent
        self.dispatcher.is_urgent = False

    @property
    def is_quiet(self) -> bool:
        """No handler runs, and no lane is ready."""
        return not self.scheduler.ready_count and not self.scheduler.runs

    @property
    def is_held_up(self) -> bool:
        """Only messages that failed before run or are ready, and no partition is still to be acquired or pulled."""
        busy = self.scheduler.ready_count + sum(state.buffer.lanes_in_runs for state in self.partitions.values())
        if busy > sum(_failing_count(state) for state in self.partitions.values()):
            return False
        for index in self._scope.until:
            state = self.partitions.get(index)
            if state is None and (index in self.assigned or not self._generation):
                return False
            if state is not None and not self._is_stuck(state):
                return False
        return True

    def _is_stuck(self, state: PartitionState) -> bool:
        error = state.lease.error
        return (error is not None and not error.retriable) or self._is_exhausted(state)

    def _is_exhausted(self, state: PartitionState) -> bool:
        """The lease is held, all pulls and reads of parking lots are done, and no answer is pending."""
        has_asked = state.progress.has_moves or ReadLot in state.lease.pending or state.progress.lot_to_read()
        return state.lease.stage is Stage.ACTIVE and state.buffer.is_paused and not has_asked

    def is_through(self) -> bool:
        """All messages within the scope are over, and so are resumed parking lots and key requests."""
        if not self.is_quiet:
            return False
        for index in self._scope.until:
            state = self.partitions.get(index)
            if state is None and index not in self.assigned and self._generation:
                continue  # revoked
            if state is None or not state.is_through:
                return False
            state.collect()
            progress = state.progress
            is_resuming = any(lot.state is LotState.RESUMING for lot in progress.parking_lots.values())
            if state.buffer.waiting_count or progress.moves_in_flight or progress.key_requests or is_resuming:
                return False
        return True

    def blocking(self) -> dict[int, Message]:
        full = [state for state in _holding(self._in_order()) if state.buffer.limit is not None]
        found = {state.index: self._limits.blocking(state) for state in full}
        return {index: head for index, head in found.items() if head is not None}

    def _forget(self, state: PartitionState) -> None:
        self.left[state.index] = state.buffer.waiting_count
        state.forget_lanes()
        state.forget_parking_lots()
        del self.partitions[state.index]
        self._awake.pop(state.index, None)


def _failing_count(state: PartitionState) -> int:
    """The number of lanes that run or are ready with a first message that failed before."""
    found = 0
    for offset, failure in state.progress.failures.items():
        lanes = (state.buffer.lanes.get(key) for key in (failure.key, offset, None))
        lane = next((lane for lane in lanes if lane is not None), None)
        if lane is not None and (lane.run is not None or lane.bucket >= 0):
            head = lane.head
            found += head is not None and state.mark(head) == offset
    return found


_PARTITION_COMMANDS = Acquire | Pull | Move | ReadLot | Release
_STRICTNESS: dict[str, int] = {Order.NONE: 0, Order.KEY: 1, Order.PARTITION: 2}


def _holding(states: Iterable[PartitionState]) -> list[PartitionState]:
    return [state for state in states if state.lease.stage in HOLDING]
