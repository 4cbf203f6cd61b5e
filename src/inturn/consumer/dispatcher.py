"""Puts pulled messages into lanes, and decides how a lane goes on after a call of the handler. No I/O.

Only the affected lane stops: a failed message suspends its lane, a moved message blocks its lane until the message is
stored, a parked key leaves the partition. All other lanes go on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from inturn.consumer.flow_limits import FlowLimits
from inturn.consumer.lane import STRAIGHT, Lane, LaneKey
from inturn.consumer.outcome import Next, Outcome, text_of
from inturn.consumer.parking import ParkingLot, unparked
from inturn.consumer.partition_lease import NEVER, Stage
from inturn.consumer.partition_progress import CommitInFlight, LaneMove, LaneWait
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.consumer.scheduler import OVERDUE_S, Scheduler
from inturn.model.message import Message, tag_filter
from inturn.model.settings import ConsumerSettings, Keyless, LotState, OnExhausted, Order
from inturn.model.subject import dead_letter_subject, retry_subject
from inturn.protocol.commands import Failure, LotContent

ERROR_LENGTH_MAX = 500


class Dispatcher:
    def __init__(self, group: str, origin: str, order: Order, settings: ConsumerSettings) -> None:
        """`origin` is the subject that messages first came from, also for a consumer of the retry subject."""
        self.scheduler = Scheduler()
        self.limits = FlowLimits(settings, self.scheduler)
        self.keyless = Keyless.INDEPENDENT
        self.is_urgent = False  # commands are to be sent at once
        self.order = order
        self._settings = settings
        self._tags = tag_filter(settings.tags or "")
        self._retry_subject = retry_subject(group, origin)
        self._dead_letter_subject = dead_letter_subject(group, origin)
        self._suspended: list[tuple[float, int, LaneWait]] = []  # a heap by time
        self._numbers = itertools.count(1)
        self._spread_looked_s = float("-inf")
        # Processes take lanes, not messages.
        is_possible = order is not Order.PARTITION and settings.workers != "processes"
        self._is_straight_possible = is_possible and settings.ack == "auto" and settings.batch == 1

    # Messages come

    def offer(self, state: PartitionState, messages: list[Message]) -> None:
        """Put messages into lanes; messages of parked keys go to the tail of the parking lot."""
        if not messages:
            return
        buffer, progress, ready = state.buffer, state.progress, self.scheduler.ready
        lanes, inbox, lots = buffer.lanes, buffer.inbox, progress.parking_lots
        straight = lanes.get(STRAIGHT)
        if straight is None and not lanes and self._may_be_straight(state):
            straight = lanes[STRAIGHT] = Lane(state, STRAIGHT, [], inbox)
        if straight is not None:
            straight.messages += messages
            if straight.run is None:
                ready(straight)
            return
        is_plain = not lots and not progress.exhausted
        for key, some in self._by_lane(messages).items():
            lane = lanes.get(key)
            if lane is None and is_plain:
                lane = lanes[key] = Lane(state, key, some, inbox)
                ready(lane)
                continue
            lot = lots.get(key) if isinstance(key, bytes) else None
            if lot is not None and lot.takes_to_tail:
                state.park(lot, some)
                continue
            if lane is None:
                lane = lanes[key] = Lane(state, key, [], inbox)
            lane.messages += some
            if lane.run is None and not lane.waits:
                self.go_on(lane)

    def _may_be_straight(self, state: PartitionState) -> bool:
        """Lanes by key would bring no gain, and no key is parked, failing, delayed or requested."""
        if not (self.scheduler.is_tiny and self._is_straight_possible):
            return False
        progress = state.progress
        return not (progress.parking_lots or progress.attempts or progress.key_requests or state.buffer.is_delayed)

    def spread(self, lane: Lane) -> None:
        """Put the rest of a straight lane into the lanes of the keys.

        If the lane runs, the worker begins no further message. There is no lock: the worker may begin or return the
        last message that it had taken by then. The rest of that key waits until the run is over.
        """
        state = lane.state
        lane.is_spread = True
        at = lane.spread_at = lane.at
        is_active = state.lease.stage is Stage.ACTIVE
        rest = self._by_lane(lane.messages[at:]) if is_active else {}
        lanes, inbox = state.buffer.lanes, state.buffer.inbox
        if lanes.get(STRAIGHT) is lane:
            del lanes[STRAIGHT]
        self.scheduler.unready(lane)
        if lane.run is not None and at:
            key = self._lane_key(lane.messages[at - 1])
            lane.then = Lane(state, key, rest.pop(key, []), inbox, run=lane.run)
            if is_active:
                lanes[key] = lane.then
        for key, some in rest.items():
            lanes[key] = Lane(state, key, some, inbox)
            self.scheduler.ready(lanes[key])

    def _spread_overdue(self, now_s: float) -> None:
        """A handler that takes long must not keep other keys waiting."""
        if now_s < self._spread_looked_s + OVERDUE_S / 4:
            return
        self._spread_looked_s = now_s
        for run in self.scheduler.runs:
            lane = run.lane
            if lane is not None and lane.is_straight and not lane.is_spread and now_s >= run.asked_at_s + OVERDUE_S:
                self.spread(lane)

    def _next_spread_s(self) -> float:
        running = ((run, run.lane) for run in self.scheduler.runs)
        asked_at_s = (run.asked_at_s for run, lane in running if lane and lane.is_straight and not lane.is_spread)
        return min(asked_at_s, default=float("inf")) + OVERDUE_S

    def _after_straight(self, lane: Lane) -> Lane:
        """A run has left a straight lane: returns the lane that goes on in its place, with the outcome of the last
        message."""
        state, failed = lane.state, lane.failed
        if lane.is_spread:
            goes_on = lane.then
            if goes_on is not None:
                goes_on.run = None
                goes_on.messages[:0] = lane.messages[lane.at : lane.spread_at]  # taken, and not begun
        elif failed or not self._may_be_straight(state):
            self.spread(lane)
            goes_on = None
        else:
            return lane
        if failed:
            goes_on = state.buffer.lanes.get(key := self._lane_key(failed[0]))
            if goes_on is None:
                goes_on = lane.then or Lane(state, key, [], state.buffer.inbox)
                if state.lease.stage is Stage.ACTIVE:
                    state.buffer.lanes[key] = goes_on
            self.scheduler.unready(goes_on)
            goes_on.failed, goes_on.outcome = failed, lane.outcome
        lane.then, lane.failed, lane.outcome = None, (), None
        return lane if goes_on is None else goes_on

    def _lane_key(self, message: Message) -> LaneKey:
        key: LaneKey = message.key
        is_alone = self.order is Order.NONE or (key is None and self.keyless is Keyless.INDEPENDENT)
        return message.offset if is_alone else key

    def _by_lane(self, messages: list[Message]) -> dict[LaneKey, list[Message]]:
        lanes: dict[LaneKey, list[Message]] = {}
        if self.order is Order.PARTITION:
            lanes[None] = messages
        elif self.order is Order.NONE:
            size = self._settings.batch  # messages of one call are one lane: no other message waits for them
            for first in range(0, len(messages), size):
                lanes[messages[first].offset] = messages[first : first + size]
        else:
            is_alone = self.keyless is Keyless.INDEPENDENT
            get = lanes.get
            for message in messages:
                key: LaneKey = message.key
                if key is None and is_alone:
                    key = message.offset
                some = get(key)
                if some is None:
                    lanes[key] = [message]
                else:
                    some.append(message)
        return lanes

    # Workers come and go

    def take(self, now_s: float) -> Run | None:
        self._spread_overdue(now_s)
        self._settle(self.scheduler.take_back(now_s), now_s)
        self._wake(now_s)
        return self.scheduler.take(now_s)

    def finish(self, run: Run, now_s: float) -> None:
        self._settle(self.scheduler.end(run, now_s), now_s)

    def look_around(self, now_s: float) -> None:
        """Settle lanes that runs have left or that a slow run has not begun, and wake lanes whose wait is over."""
        self._spread_overdue(now_s)
        self._settle(self.scheduler.take_back(now_s), now_s)
        self._wake(now_s)

    def next_due_s(self) -> float:
        suspended_until_s = self._suspended[0][0] if self._suspended else float("inf")
        return min(suspended_until_s, self.scheduler.next_overdue_s(), self._next_spread_s())

    def drop(self, state: PartitionState, stage: Stage) -> None:
        """Start no handler of this partition any more; waiting messages are left to the next holder."""
        state.lease.give_up(stage)
        for lane in state.buffer.lanes.values():
            lane.waits = 0
            self.scheduler.unready(lane)
            self.scheduler.withdraw(lane)
            state.collect_parked(lane)
        state.forget_lanes()
        state.buffer.delayed.clear()
        if stage is Stage.LOST:
            state.progress.forget_moves()

    def _settle(self, lanes: Iterable[Lane], now_s: float) -> None:
        """Decide how lanes go on that are in no run any more."""
        before: PartitionState | None = None
        for lane in lanes:
            state = lane.state
            if state is not before:
                self._look_at(before)
                state.collect()
                before, lease, lanes_by_key = state, state.lease, state.buffer.lanes
                if lease.stage is Stage.ACTIVE and now_s >= lease.deadline_s:
                    self.drop(state, Stage.LOST if now_s >= lease.ends_s else Stage.DRAINING)
                    lanes_by_key = state.buffer.lanes
            if lease.stage is Stage.LOST:
                self._part(lane)
                continue
            if lane.is_straight:
                lane = self._after_straight(lane)
                if lane.is_spread:
                    continue
            if lane.at == len(lane.messages) and lease.stage is Stage.ACTIVE and lane.is_plain:
                if lanes_by_key.get(lane.key) is lane:  # the usual case: there may be as many lanes as messages
                    del lanes_by_key[lane.key]
                continue
            if lane.lot is not None:
                state.collect_parked(lane)
            outcome = lane.outcome
            if outcome is not None:
                failed, lane.outcome, lane.failed = lane.failed, None, ()
                self._failed(lane, outcome, failed, now_s)
            else:
                self.go_on(lane)
            if lease.stage is not Stage.ACTIVE and not lane.waits:
                self._part(lane)
        self._look_at(before)

    def _part(self, lane: Lane) -> None:
        if lane.lot is not None:
            lane.lot.forget_lane()

    def _look_at(self, state: PartitionState | None) -> None:
        if state is None or self.is_urgent:
            return
        if state.lease.stage is not Stage.ACTIVE:
            self.is_urgent = not state.buffer.lanes_in_runs
        else:
            progress = state.progress
            self.is_urgent = (
                bool(progress.moves or progress.changes or progress.key_requests)
                or bool(progress.parking_lots and progress.lot_to_read())
                or (state.buffer.is_paused and self.limits.may_resume(state))
            )

    def go_on(self, lane: Lane) -> None:
        """The lane neither runs nor waits: make the lane ready, park it, or forget it."""
        state = lane.state
        if state.lease.stage is not Stage.ACTIVE:
            return
        lane.waits = 0
        if lane.parks:
            self.park(lane, lane.parks)
            return
        if lane.lot is not None and lane.lot.is_read and not lane.lot.rows:
            state.free(lane, lane.lot)
        if lane.at < len(lane.messages):
            lane.forget_handled()
            exhausted = state.progress.exhausted
            if exhausted and state.mark(lane.messages[0]) in exhausted:
                self._wait(lane)
            else:
                self.scheduler.ready(lane)
        elif not lane.uncommitted and lane.lot is None:
            if state.buffer.lanes.get(lane.key) is lane:
                del state.buffer.lanes[lane.key]
        else:
            lane.forget_handled()

    def _wake(self, now_s: float) -> None:
        while self._suspended and self._suspended[0][0] <= now_s:
            _, _, wait = heapq.heappop(self._suspended)
            if not wait.is_over:
                self.go_on(wait.lane)

    def _wait(self, lane: Lane, until_s: float = NEVER) -> LaneWait:
        lane.waits = next(self._numbers)
        return LaneWait(lane, lane.waits, until_s)

    # Failures

    def _failed(self, lane: Lane, outcome: Outcome, failed: Sequence[Message], now_s: float) -> None:
        state, progress, settings = lane.state, lane.state.progress, self._settings
        repeated = failed
        if outcome.next is Next.ROLLBACK:
            repeated = [*lane.uncommitted, *failed]
            lane.uncommitted = ()
        for message in repeated:
            mark = state.mark(message)
            progress.attempts[mark] = progress.attempts.get(mark, 0) + 1
        attempts = progress.attempts[state.mark(failed[0])]
        if settings.max_attempts is not None and attempts >= settings.max_attempts:
            self._exhausted(lane, outcome, failed, repeated, now_s)
        elif outcome.next is Next.MOVE:
            level = settings.retry.level(attempts)
            progress.moves.append(LaneMove(self._wait(lane), failed, self._retry_subject, level, lane.lot))
        else:
            lane.put_back(repeated)
            wait_s = outcome.wait_s or back_off_s(settings, attempts)
            self._record(lane, repeated, outcome)
            progress.waits.append(self._wait(lane, now_s + wait_s))

    def _exhausted(
        self, lane: Lane, outcome: Outcome, failed: Sequence[Message], repeated: Sequence[Message], now_s: float
    ) -> None:
        state, on_exhausted = lane.state, self._settings.on_exhausted
        # No message waits behind this message: best effort, a retry, or a single message. No key, no parking.
        is_alone = outcome.next is Next.MOVE or state.buffer.is_delayed or isinstance(lane.key, int)
        if is_alone or (on_exhausted is OnExhausted.PARK and not isinstance(lane.key, bytes)):
            on_exhausted = OnExhausted.DEAD_LETTER
        if on_exhausted is OnExhausted.DEAD_LETTER:
            before = repeated[
                : len(repeated) - len(failed)
            ]  # a rollback repeats the messages before the failed message
            lane.put_back(before)
            state.progress.moves.append(LaneMove(self._wait(lane), failed, self._dead_letter_subject, 0, lane.lot))
            return
        lane.put_back(repeated)
        is_blocked = on_exhausted is OnExhausted.BLOCK
        self._record(lane, repeated, outcome)
        if is_blocked:
            state.progress.exhausted.add(state.mark(failed[0]))
            self._record(lane, failed[:1], outcome, is_exhausted=True)
            state.progress.waits.append(self._wait(lane))
        else:
            self.park(lane, f"failed {state.progress.attempts[state.mark(failed[0])]} times")

    def _record(self, lane: Lane, failed: Sequence[Message], outcome: Outcome, *, is_exhausted: bool = False) -> None:
        """Record the failure, to be stored before the next attempt."""
        state, progress = lane.state, lane.state.progress
        error = outcome.kind.value if outcome.error is None else text_of(outcome.error)
        for message in failed:
            mark, waiting = state.mark(message), max(0, lane.waiting - 1)
            text = error[:ERROR_LENGTH_MAX]
            progress.record(Failure(mark, message.key, progress.attempts[mark], text, waiting, is_exhausted))

    def stored(self, commit: CommitInFlight, now_s: float) -> None:
        """The attempts that this commit reported are durable."""
        for wait in commit.waits:
            if wait.until_s > now_s:
                heapq.heappush(self._suspended, (wait.until_s, wait.number, wait))
            elif not wait.is_over:
                self.go_on(wait.lane)

    def moved(self, state: PartitionState) -> None:
        """The messages in flight are stored in the retry or dead-letter subject."""
        for move in state.progress.end_moves():
            lane = move.wait.lane
            if move.lot is not None:
                state.finish_parked(move.lot, move.messages)
            elif lane.uncommitted:
                # Manual acknowledgement: finished with the next commit, like the messages before
                lane.uncommitted = [*lane.uncommitted, *move.messages]
            else:
                state.finish(move.messages)
            if not move.wait.is_over:
                self.go_on(lane)

    # Parking

    def park(self, lane: Lane, reason: str) -> None:
        """Move all messages of the lane to the parking lot of the key, and forget the lane."""
        state, key = lane.state, lane.key
        assert isinstance(key, bytes)
        messages = [*lane.uncommitted, *lane.messages[lane.at :]]
        rows = lane.lot.rows if lane.lot is not None else set()
        lot = state.progress.parking_lots.setdefault(key, ParkingLot(key, LotState.PARKED))
        lot.state = LotState.PARKED
        lot.begin_again()
        state.progress.changes.of_lot(key, LotState.PARKED, reason)
        state.park(lot, [one for one in messages if (one.partition, one.offset) not in rows])
        lane.waits = 0
        self.scheduler.unready(lane)
        state.buffer.lanes.pop(key, None)

    def lot_read(self, state: PartitionState, lot: ParkingLot, content: LotContent) -> None:
        """Rows of the parking lot were read, in order. At the end of the lot, messages that were added to the tail
        meanwhile follow."""
        since, lot.since_read = lot.since_read or [], None
        if lot.state is not LotState.RESUMING:
            return
        read = [one for one in content.messages if (one.partition, one.offset) not in lot.not_again]
        places = {(one.partition, one.offset) for one in read}
        if content.is_end:
            known = places | lot.read_early | lot.not_again
            read += [one for one in since if (one.partition, one.offset) not in known]
        to_store = {(one.partition, one.offset) for one in state.progress.additions_to_store(lot.key)}
        lot.read_early = (lot.read_early | places) & to_store
        if content.messages:
            lot.after = content.messages[-1].position
        lot.is_read = content.is_end
        lot.rows.update((one.partition, one.offset) for one in read)
        lane = lot.lane
        if lane is None:
            lane = lot.lane = state.buffer.lanes[lot.key] = Lane(state, lot.key, [], [], lot=lot)
        messages = [unparked(one, state.subject) for one in read]
        if self._tags is not None:
            wants = self._tags.wants  # the tags may have changed since the message was parked
            state.finish_parked(lot, [one for one in messages if not wants(one.tags)])
            messages = [one for one in messages if wants(one.tags)]
        lane.messages += messages
        if lane.run is None and not lane.waits:
            self.go_on(lane)


def back_off_s(settings: ConsumerSettings, attempts: int) -> float:
    """The wait doubles with every failure."""
    return min(settings.backoff_max_s, settings.backoff_min_s * 2.0 ** min(attempts - 1, 30))
