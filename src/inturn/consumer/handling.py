"""From pulled messages to lanes, and from the end of a handler to what happens next. No I/O.

What stands still stands still alone: a message that fails suspends its lane, one that is moved holds its lane until it
is safe, a parked key leaves the partition altogether. Everything else goes on.

Longer than a usual file: all that can become of a message is decided here, so that nobody has to look elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from inturn.consumer.lane import STRAIGHT, Lane, LaneKey
from inturn.consumer.outcome import Next, Outcome, text_of
from inturn.consumer.parking import ParkingLot, parked, unparked
from inturn.consumer.partition_lease import NEVER, Stage
from inturn.consumer.partition_progress import CommitInFlight, LaneMove, LaneWait
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.consumer.scheduler import OVERDUE_S, Scheduler
from inturn.model.message import Message, tag_filter
from inturn.model.offsets import mark_of
from inturn.model.settings import SPAN_MAX, ConsumerSettings, KeyAction, Keyless, LotState, OnExhausted, Order
from inturn.model.subject import dead_letter_subject, retry_subject
from inturn.protocol.commands import Failure, KeyRequest, LotContent

QUICK_BUFFERED_COUNT = 4096
LONG_S = 1.0  # a handler that runs for longer is not waited for when it is counted what waits
STUCK_SHARE = 4  # of `buffered_bytes`: what waits behind messages that fail or hang counts up to this only
ERROR_LENGTH_MAX = 500


class Handling:
    def __init__(self, group: str, origin: str, order: Order, settings: ConsumerSettings) -> None:
        """`origin` is the subject that messages first came from, also for a consumer of its retry subject."""
        self.scheduler = Scheduler()
        self.keyless = Keyless.INDEPENDENT
        self.is_urgent = False  # something came up that commands are to be sent for
        self.acted: Callable[[PartitionState, KeyRequest], None] | None = (
            None  # told of requests that count from now on
        )
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
        """Put messages into their lanes; those of parked keys behind what is parked."""
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
                self._add_to_lot(state, lot, some)
                continue
            if lane is None:
                lane = lanes[key] = Lane(state, key, [], inbox)
            lane.messages += some
            if lane.run is None and not lane.waits:
                self._go_on(lane)

    def _may_be_straight(self, state: PartitionState) -> bool:
        """Nothing is to be gained from lanes by key, and nothing is the matter with any of them."""
        if not (self.scheduler.is_tiny and self._is_straight_possible):
            return False
        progress = state.progress
        return not (progress.parking_lots or progress.attempts or progress.key_requests or state.buffer.is_delayed)

    def spread(self, lane: Lane) -> None:
        """Put what is left of a straight lane into the lanes of its keys.

        If it runs, its worker is told to begin nothing more. There is no lock: the last message that it had taken by
        then it may begin, or give back. What is left of that key waits until the run is over.
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
        """A run is done with a straight lane: the lane that goes on in its place, with what became of its last one."""
        state, failed = lane.state, lane.failed
        if lane.is_spread:
            goes_on = lane.then
            if goes_on is not None:
                goes_on.run = None
                goes_on.messages[:0] = lane.messages[lane.at : lane.spread_at]  # it was taken, and not begun
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
            size = self._settings.batch  # what the handler takes at once is one lane: nothing else waits for it
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
        run = self.scheduler.take(now_s)
        if run is not None:
            run.slow_s = self._settings.handler_timeout_s
        return run

    def finish(self, run: Run, now_s: float) -> None:
        self._settle(self.scheduler.end(run, now_s), now_s)

    def look_around(self, now_s: float) -> None:
        """Lanes that a run is done with, or a slow one has not begun, go on without it; so do those that waited."""
        self._spread_overdue(now_s)
        self._settle(self.scheduler.take_back(now_s), now_s)
        self._wake(now_s)

    def next_due_s(self) -> float:
        suspended_until_s = self._suspended[0][0] if self._suspended else float("inf")
        return min(suspended_until_s, self.scheduler.next_overdue_s(), self._next_spread_s())

    def drop(self, state: PartitionState, stage: Stage) -> None:
        """Start nothing of this partition any more; what waits is left to its next holder."""
        state.lease.give_up(stage)
        for lane in state.buffer.lanes.values():
            lane.waits = 0
            self.scheduler.unready(lane)
            self.scheduler.withdraw(lane)
            self.collect_lot(lane)
        state.forget_lanes()
        state.buffer.delayed.clear()
        if stage is Stage.LOST:
            state.progress.forget_moves()

    def _settle(self, lanes: Iterable[Lane], now_s: float) -> None:
        """These lanes are in no run any more."""
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
                if lanes_by_key.get(lane.key) is lane:  # the usual case, and there may be as many as messages
                    del lanes_by_key[lane.key]
                continue
            if lane.lot is not None:
                self.collect_lot(lane)
            outcome = lane.outcome
            if outcome is not None:
                failed, lane.outcome, lane.failed = lane.failed, None, ()
                self._failed(lane, outcome, failed, now_s)
            else:
                self._go_on(lane)
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
                or bool(progress.parking_lots and self.lot_to_read(state))
                or (state.buffer.is_paused and self._may_resume(state))
            )

    def _may_resume(self, state: PartitionState) -> bool:
        """Enough has become free to pull again. Of the span only what the last commit said is known, which will do."""
        flow, buffer = self._settings.flow, state.buffer
        return (
            2 * buffer.waiting_count < self.buffered_count
            and 2 * buffer.waiting_bytes < flow.buffered_bytes
            and buffer.pull_offset - state.progress.tracker.known_low < flow.span
        )

    def _go_on(self, lane: Lane) -> None:
        """Nothing of this lane runs, and nothing holds it back: ready, or gone."""
        state = lane.state
        if state.lease.stage is not Stage.ACTIVE:
            return
        lane.waits = 0
        if lane.parks:
            self._park(lane, lane.parks)
            return
        if lane.lot is not None and lane.lot.is_read and not lane.lot.rows:
            self._free(lane, lane.lot)
        if lane.at < len(lane.messages):
            lane.forget_handled()
            exhausted = state.progress.exhausted
            if exhausted and state.mark(lane.messages[0]) in exhausted:
                self._wait(lane)
            else:
                self.scheduler.ready(lane)
        elif not lane.kept and lane.lot is None:
            if state.buffer.lanes.get(lane.key) is lane:
                del state.buffer.lanes[lane.key]
        else:
            lane.forget_handled()

    def _wake(self, now_s: float) -> None:
        while self._suspended and self._suspended[0][0] <= now_s:
            _, _, wait = heapq.heappop(self._suspended)
            if not wait.is_over:
                self._go_on(wait.lane)

    def _wait(self, lane: Lane, until_s: float = NEVER) -> LaneWait:
        lane.waits = next(self._numbers)
        return LaneWait(lane, lane.waits, until_s)

    # Failures

    def _failed(self, lane: Lane, outcome: Outcome, failed: Sequence[Message], now_s: float) -> None:
        state, progress, settings = lane.state, lane.state.progress, self._settings
        repeated = failed
        if outcome.next is Next.ROLLBACK:
            repeated = [*lane.kept, *failed]
            lane.kept = ()
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
        # Nothing waits behind it: best effort, or a message on its own. And what has no key cannot be parked by it.
        is_alone = outcome.next is Next.MOVE or state.buffer.is_delayed or isinstance(lane.key, int)
        if is_alone or (on_exhausted is OnExhausted.PARK and not isinstance(lane.key, bytes)):
            on_exhausted = OnExhausted.DEAD_LETTER
        if on_exhausted is OnExhausted.DEAD_LETTER:
            lane.put_back(repeated[: len(repeated) - len(failed)])  # a rollback repeats what was before it
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
            self._park(lane, f"failed {state.progress.attempts[state.mark(failed[0])]} times")

    def _record(self, lane: Lane, failed: Sequence[Message], outcome: Outcome, *, is_exhausted: bool = False) -> None:
        """The attempt is to be stored before the next one."""
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
                self._go_on(wait.lane)

    def moved(self, state: PartitionState) -> None:
        """What was on its way to another subject is safe there."""
        for move in state.progress.end_moves():
            lane = move.wait.lane
            if move.lot is not None:
                self._finish_of_lot(state, move.lot, move.messages)
            elif lane.kept:
                lane.kept = [*lane.kept, *move.messages]  # manual: done with the next commit, like those before
            else:
                state.finish(move.messages)
            if not move.wait.is_over:
                self._go_on(lane)

    # Parking

    def _park(self, lane: Lane, reason: str) -> None:
        """All of the lane goes to the lot of its key, and the lane is gone."""
        state, key = lane.state, lane.key
        assert isinstance(key, bytes)
        messages = [*lane.kept, *lane.messages[lane.at :]]
        rows = lane.lot.rows if lane.lot is not None else set()
        lot = state.progress.parking_lots.setdefault(key, ParkingLot(key, LotState.PARKED))
        lot.state = LotState.PARKED
        lot.begin_again()
        state.progress.changes.of_lot(key, LotState.PARKED, reason)
        self._add_to_lot(state, lot, [one for one in messages if (one.partition, one.offset) not in rows])
        lane.waits = 0
        self.scheduler.unready(lane)
        state.buffer.lanes.pop(key, None)

    def _add_to_lot(self, state: PartitionState, lot: ParkingLot, messages: list[Message]) -> None:
        if messages:
            added = [parked(message) for message in messages]
            state.progress.changes.of_lot(lot.key, lot.state).added += added
            if lot.since_read is not None:
                lot.since_read += added
            state.pass_by(messages)

    def collect_lot(self, lane: Lane) -> None:
        """Take over what workers have noted of messages that came from a lot."""
        lot, state = lane.lot, lane.state
        if lot is None:
            return
        count = len(lane.inbox)
        messages = lane.inbox[:count]
        del lane.inbox[:count]
        self._finish_of_lot(state, lot, messages)

    def _finish_of_lot(self, state: PartitionState, lot: ParkingLot, messages: Iterable[Message]) -> None:
        for message in messages:
            place = message.partition, message.offset
            if place in lot.rows:
                lot.rows.discard(place)
                state.progress.changes.of_lot(lot.key, lot.state).removed.append(place)
                state.progress.settle(state.mark(message))
            else:
                state.finish([message])

    def _free(self, lane: Lane, lot: ParkingLot) -> None:
        """The lot is empty: with the commit that says so, the key is an ordinary one again."""
        state = lane.state
        state.progress.changes.of_lot(lot.key, LotState.FREE)
        del state.progress.parking_lots[lot.key]
        lane.lot, lane.inbox = None, state.buffer.inbox

    def lot_to_read(self, state: PartitionState) -> ParkingLot | None:
        """A lot that is being resumed and has nothing to run at hand."""
        for lot in state.progress.parking_lots.values():
            if lot.state is LotState.RESUMING and not lot.is_read and not (lot.lane and lot.lane.waiting):
                return lot
        return None

    def lot_read(self, state: PartitionState, lot: ParkingLot, content: LotContent) -> None:
        """Some of the lot was read, in its order; at its end, what came to its tail meanwhile is part of it, too."""
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
            wants = self._tags.wants  # which may be others than when it was parked
            self._finish_of_lot(state, lot, [one for one in messages if not wants(one.tags)])
            messages = [one for one in messages if wants(one.tags)]
        lane.messages += messages
        if lane.run is None and not lane.waits:
            self._go_on(lane)

    def _count_anew(self, state: PartitionState, key: bytes) -> None:
        """Somebody resumed the key: its attempts count from the beginning."""
        progress = state.progress
        attempts = progress.attempts
        for failure in [one for one in progress.failures.values() if one.key == key and attempts.get(one.offset)]:
            attempts[failure.offset] = 0
            progress.exhausted.discard(failure.offset)
            progress.record(msgspec.structs.replace(failure, attempts=0, is_exhausted=False))

    # What people ask for

    def act_on_requests(self, state: PartitionState) -> None:
        """Those of one key in the order they were asked."""
        if STRAIGHT in state.buffer.lanes:
            self.spread(state.buffer.lanes[STRAIGHT])
        waiting: list[KeyRequest] = []
        for request in state.progress.key_requests:
            if any(one.key == request.key for one in waiting) or not self.act(state, request):
                waiting.append(request)
            else:
                state.progress.changes.requests.append(request.id)
                if self.acted is not None:
                    self.acted(state, request)
        state.progress.key_requests = waiting

    def act(self, state: PartitionState, request: KeyRequest) -> bool:
        """Do what was asked for; False if it has to wait for a handler that runs."""
        lot = state.progress.parking_lots.get(request.key)
        lane = self._lane_of(state, request.key)
        if lane is not None and lane.run is not None and self.scheduler.withdraw(lane):
            self._go_on(lane)
        match request.kind:
            case KeyAction.PARK:
                return self._act_park(state, lot, lane, request)
            case KeyAction.RESUME:
                return self._act_resume(state, lot, lane, request.key)
            case KeyAction.SKIP:
                return self._act_skip(state, lot, lane, request)
        return True  # from a newer version: nothing we could do

    def _lane_of(self, state: PartitionState, key: bytes) -> Lane | None:
        if self.order is not Order.PARTITION:
            return state.buffer.lanes.get(key)
        lane = state.buffer.lanes.get(None)
        return lane if lane is not None and lane.waiting and lane.messages[lane.at].key == key else None

    def _act_park(self, state: PartitionState, lot: ParkingLot | None, lane: Lane | None, request: KeyRequest) -> bool:
        if self.order is not Order.KEY or (lot is not None and lot.state is LotState.PARKED):
            return True
        if lane is None:
            lot = state.progress.parking_lots.setdefault(request.key, ParkingLot(request.key, LotState.PARKED))
            lot.state = LotState.PARKED
            lot.begin_again()
            state.progress.changes.of_lot(request.key, LotState.PARKED, request.why)
            return True
        lane.parks = request.why or "asked for"
        if lane.run is not None or self._is_moving(state, lane):
            return False
        self._park(lane, lane.parks)
        return True

    def _is_moving(self, state: PartitionState, lane: Lane) -> bool:
        progress = state.progress
        return any(move.wait.lane is lane for move in (*progress.moves, *progress.moves_in_flight))

    def _act_resume(self, state: PartitionState, lot: ParkingLot | None, lane: Lane | None, key: bytes) -> bool:
        is_blocked = (
            lane is not None and lane.waiting and state.mark(lane.messages[lane.at]) in state.progress.exhausted
        )
        self._count_anew(state, key)
        if lot is not None and lot.state is LotState.PARKED:
            lot.state = LotState.RESUMING
            state.progress.changes.of_lot(key, LotState.RESUMING)
        if lane is not None and is_blocked and lane.run is None and not self._is_moving(state, lane):
            self._go_on(lane)
        return True

    def _act_skip(self, state: PartitionState, lot: ParkingLot | None, lane: Lane | None, request: KeyRequest) -> bool:
        offset, origin = request.offset, state.index if request.origin is None else request.origin
        if offset is None:
            return True
        if lane is not None and lane.run is not None:
            return False
        if lot is not None and lot.since_read is not None:
            return False  # what is being read may be the message
        message = lane.messages[lane.at] if lane is not None and lane.waiting else None
        if lane is not None and message is not None and (message.partition, message.offset) == (origin, offset):
            if self._is_moving(state, lane):
                return False
            self._drop_head(lane, message)
        elif origin != state.index or offset in state.progress.tracker:  # over; or parked, if there is a lot
            if lot is not None:
                state.progress.changes.of_lot(lot.key, lot.state).removed.append((origin, offset))
            state.progress.settle(mark_of(origin, offset, state.index))
        elif offset >= state.buffer.pull_offset:
            state.progress.tracker.add([offset])  # it will not be offered when it is pulled
            state.progress.settle(offset)
        else:
            return False  # something is before it, which it failed with
        return True

    def _drop_head(self, lane: Lane, message: Message) -> None:
        lane.at += 1
        self.scheduler.unready(lane)
        if lane.lot is not None:
            lane.inbox.append(message)
            self.collect_lot(lane)
        else:
            lane.state.finish([message])
        self._go_on(lane)

    # Views

    @property
    def buffered_count(self) -> int:
        """Quick handlers gain nothing from a long buffer, and lose: it does not fit into the processor's cache."""
        count = self._settings.flow.buffered_count
        return min(count, QUICK_BUFFERED_COUNT) if self.scheduler.is_tiny else count

    def held_back(self, state: PartitionState, now_s: float) -> tuple[int, int]:
        """How many messages, and bytes, are behind one that fails or does not come to an end: they must not keep others
        from being pulled."""
        count = size_bytes = 0
        for lane in state.buffer.lanes.values():
            run = lane.run
            # A run that is at no lane has given several to a process; of those, only one that hangs is left by then.
            is_at_it = run is not None and (lane.runs_now or run.lane is None)
            if lane.waits or (run is not None and is_at_it and now_s - run.asked_at_s > LONG_S):
                count += lane.waiting
                size_bytes += sum([len(message.body) for message in lane.messages[lane.at :]])
        return count, size_bytes

    def is_span_full(self, state: PartitionState) -> bool:
        buffer, tracker = state.buffer, state.progress.tracker
        span, pulled = self._settings.flow.span, buffer.pull_offset - tracker.known_low
        if pulled < span:
            return False
        # What tags leave out counts only where it would be too much to commit.
        return state.span >= span or (bool(buffer.filtered_out) and buffer.pull_offset - tracker.low >= SPAN_MAX)

    def limit_of(self, state: PartitionState) -> str | None:
        """Which limit keeps a partition from being pulled, if one key, or a few, have used it up."""
        if self.is_span_full(state):
            return "span"
        is_full = state.buffer.waiting_bytes >= STUCK_SHARE * self._settings.flow.buffered_bytes
        return "buffered_bytes" if is_full else None

    def name_blocking(self, state: PartitionState) -> None:
        """Who looks at the keys of the group is to find the one that all wait for, also if it has not failed."""
        head = self.blocking(state)
        progress = state.progress
        if head is not None and head.offset not in progress.failures and not progress.attempts.get(head.offset):
            progress.attempts.setdefault(head.offset, 0)
            error = "not over yet, and its partition waits for it"
            lane = state.buffer.lanes.get(head.key)
            progress.record(Failure(head.offset, head.key, 0, error, 0 if lane is None else lane.waiting))

    def blocking(self, state: PartitionState) -> Message | None:
        """What keeps the partition from going on: the lowest message that is not finished, or the first of the lane
        that most wait in."""
        if state.buffer.limit == "buffered_bytes":
            lanes = (lane for lane in state.buffer.lanes.values() if lane.lot is None)
            longest = max(lanes, key=lambda lane: lane.waiting, default=None)
            if longest is not None and longest.head is not None:
                return longest.head
        progress = state.progress
        moving = [message for move in (*progress.moves, *progress.moves_in_flight) for message in move.messages]
        lanes = (lane for lane in state.buffer.lanes.values() if lane.lot is None)
        heads = [head for lane in lanes if (head := lane.head) is not None]
        unfinished = [one for one in (*moving, *heads) if one.offset not in progress.tracker]
        return min(unfinished, key=lambda one: one.offset, default=None)


def back_off_s(settings: ConsumerSettings, attempts: int) -> float:
    """Twice as long after every failure."""
    return min(settings.backoff_max_s, settings.backoff_min_s * 2.0 ** min(attempts - 1, 30))
