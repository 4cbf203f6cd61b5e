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
from inturn.consumer.parking import HeldLot, parked, unparked
from inturn.consumer.partition_state import NEVER, HeldPartition, Moving, SentNews, Stage, Waiting
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
        self.acted: Callable[[HeldPartition, KeyRequest], None] | None = None  # told of requests that count from now on
        self.order = order
        self._settings = settings
        self._tags = tag_filter(settings.tags or "")
        self._retry_subject = retry_subject(group, origin)
        self._dead_letter_subject = dead_letter_subject(group, origin)
        self._suspended: list[tuple[float, int, Waiting]] = []  # a heap by time
        self._numbers = itertools.count(1)
        self._spread_looked_s = float("-inf")
        # Processes take lanes, not messages.
        is_possible = order is not Order.PARTITION and settings.workers != "processes"
        self._is_straight_possible = is_possible and settings.ack == "auto" and settings.batch == 1

    # Messages come

    def offer(self, held: HeldPartition, messages: list[Message]) -> None:
        """Put messages into their lanes; those of parked keys behind what is parked."""
        if not messages:
            return
        lanes, ready = held.lanes, self.scheduler.ready
        straight = lanes.get(STRAIGHT)
        if straight is None and not lanes and self._may_be_straight(held):
            straight = lanes[STRAIGHT] = Lane(held, STRAIGHT, [], held.inbox)
        if straight is not None:
            straight.messages += messages
            if straight.run is None:
                ready(straight)
            return
        is_plain = not held.lots and not held.exhausted
        for key, some in self._by_lane(messages).items():
            lane = lanes.get(key)
            if lane is None and is_plain:
                lane = lanes[key] = Lane(held, key, some, held.inbox)
                ready(lane)
                continue
            lot = held.lots.get(key) if isinstance(key, bytes) else None
            if lot is not None and lot.takes_to_tail:
                self._add_to_lot(held, lot, some)
                continue
            if lane is None:
                lane = lanes[key] = Lane(held, key, [], held.inbox)
            lane.messages += some
            if lane.run is None and not lane.waits:
                self._go_on(lane)

    def _may_be_straight(self, held: HeldPartition) -> bool:
        """Nothing is to be gained from lanes by key, and nothing is the matter with any of them."""
        return (
            self.scheduler.is_tiny
            and self._is_straight_possible
            and not (held.lots or held.attempts or held.requests or held.is_delayed)
        )

    def spread(self, lane: Lane) -> None:
        """Put what is left of a straight lane into the lanes of its keys.

        If it runs, its worker is told to begin nothing more. There is no lock: the last message that it had taken by
        then it may begin, or give back. What is left of that key waits until the run is over.
        """
        held = lane.held
        lane.is_spread = True
        at = lane.spread_at = lane.at
        is_active = held.stage is Stage.ACTIVE
        rest = self._by_lane(lane.messages[at:]) if is_active else {}
        if held.lanes.get(STRAIGHT) is lane:
            del held.lanes[STRAIGHT]
        self.scheduler.unready(lane)
        if lane.run is not None and at:
            key = self._lane_key(lane.messages[at - 1])
            lane.then = Lane(held, key, rest.pop(key, []), held.inbox, run=lane.run)
            if is_active:
                held.lanes[key] = lane.then
        for key, some in rest.items():
            held.lanes[key] = Lane(held, key, some, held.inbox)
            self.scheduler.ready(held.lanes[key])

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
        held, failed = lane.held, lane.failed
        if lane.is_spread:
            goes_on = lane.then
            if goes_on is not None:
                goes_on.run = None
                goes_on.messages[:0] = lane.messages[lane.at : lane.spread_at]  # it was taken, and not begun
        elif failed or not self._may_be_straight(held):
            self.spread(lane)
            goes_on = None
        else:
            return lane
        if failed:
            goes_on = held.lanes.get(key := self._lane_key(failed[0]))
            if goes_on is None:
                goes_on = lane.then or Lane(held, key, [], held.inbox)
                if held.stage is Stage.ACTIVE:
                    held.lanes[key] = goes_on
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

    def drop(self, held: HeldPartition, stage: Stage) -> None:
        """Start nothing of this partition any more; what waits is left to its next holder."""
        held.stage = stage
        held.deadline_s = float("-inf")
        held.retry_at_s = float("-inf")
        for lane in held.lanes.values():
            lane.waits = 0
            self.scheduler.unready(lane)
            self.scheduler.withdraw(lane)
            self.collect_lot(lane)
        held.forget_lanes()
        held.delayed.clear()
        if stage is Stage.LOST:
            held.moving.clear()
            held.moving_now, held.moving_batch = [], None

    def _settle(self, lanes: Iterable[Lane], now_s: float) -> None:
        """These lanes are in no run any more."""
        before: HeldPartition | None = None
        for lane in lanes:
            held = lane.held
            if held is not before:
                self._look_at(before)
                held.collect()
                before = held
                if held.stage is Stage.ACTIVE and now_s >= held.deadline_s:
                    self.drop(held, Stage.LOST if now_s >= held.lease_ends_s else Stage.DRAINING)
            if held.stage is Stage.LOST:
                self._part(lane)
                continue
            if lane.is_straight:
                lane = self._after_straight(lane)
                if lane.is_spread:
                    continue
            if lane.at == len(lane.messages) and held.stage is Stage.ACTIVE and lane.is_plain:
                if held.lanes.get(lane.key) is lane:  # the usual case, and there may be as many as messages
                    del held.lanes[lane.key]
                continue
            if lane.lot is not None:
                self.collect_lot(lane)
            outcome = lane.outcome
            if outcome is not None:
                failed, lane.outcome, lane.failed = lane.failed, None, ()
                self._failed(lane, outcome, failed, now_s)
            else:
                self._go_on(lane)
            if held.stage is not Stage.ACTIVE and not lane.waits:
                self._part(lane)
        self._look_at(before)

    def _part(self, lane: Lane) -> None:
        if lane.lot is not None:
            lane.lot.forget_lane()

    def _look_at(self, held: HeldPartition | None) -> None:
        if held is None or self.is_urgent:
            return
        if held.stage is not Stage.ACTIVE:
            self.is_urgent = not held.active
        else:
            has_news = held.moving or held.news or held.requests or (held.lots and self.lot_to_read(held))
            self.is_urgent = bool(has_news) or (held.is_paused and self._may_resume(held))

    def _may_resume(self, held: HeldPartition) -> bool:
        """Enough has become free to pull again. Of the span only what the last commit said is known, which will do."""
        flow = self._settings.flow
        return (
            2 * held.waiting_count < self.buffered_count
            and 2 * held.waiting_bytes < flow.buffered_bytes
            and held.pull_offset - held.tracker.known_low < flow.span
        )

    def _go_on(self, lane: Lane) -> None:
        """Nothing of this lane runs, and nothing holds it back: ready, or gone."""
        held = lane.held
        if held.stage is not Stage.ACTIVE:
            return
        lane.waits = 0
        if lane.parks:
            self._park(lane, lane.parks)
            return
        if lane.lot is not None and lane.lot.is_read and not lane.lot.rows:
            self._free(lane, lane.lot)
        if lane.at < len(lane.messages):
            lane.forget_handled()
            if held.exhausted and held.mark(lane.messages[0]) in held.exhausted:
                self._wait(lane)
            else:
                self.scheduler.ready(lane)
        elif not lane.kept and lane.lot is None:
            if held.lanes.get(lane.key) is lane:
                del held.lanes[lane.key]
        else:
            lane.forget_handled()

    def _wake(self, now_s: float) -> None:
        while self._suspended and self._suspended[0][0] <= now_s:
            _, _, waiting = heapq.heappop(self._suspended)
            if not waiting.is_over:
                self._go_on(waiting.lane)

    def _wait(self, lane: Lane, until_s: float = NEVER) -> Waiting:
        lane.waits = next(self._numbers)
        return Waiting(lane, lane.waits, until_s)

    # Failures

    def _failed(self, lane: Lane, outcome: Outcome, failed: Sequence[Message], now_s: float) -> None:
        held, settings = lane.held, self._settings
        repeated = failed
        if outcome.next is Next.ROLLBACK:
            repeated = [*lane.kept, *failed]
            lane.kept = ()
        for message in repeated:
            mark = held.mark(message)
            held.attempts[mark] = held.attempts.get(mark, 0) + 1
        attempts = held.attempts[held.mark(failed[0])]
        if settings.max_attempts is not None and attempts >= settings.max_attempts:
            self._exhausted(lane, outcome, failed, repeated, now_s)
        elif outcome.next is Next.MOVE:
            level = settings.retry.level(attempts)
            held.moving.append(Moving(self._wait(lane), failed, self._retry_subject, level, lane.lot))
        else:
            lane.put_back(repeated)
            wait_s = outcome.wait_s or back_off_s(settings, attempts)
            self._record(lane, repeated, outcome)
            held.unsure.append(self._wait(lane, now_s + wait_s))

    def _exhausted(
        self, lane: Lane, outcome: Outcome, failed: Sequence[Message], repeated: Sequence[Message], now_s: float
    ) -> None:
        held, on_exhausted = lane.held, self._settings.on_exhausted
        # Nothing waits behind it: best effort, or a message on its own. And what has no key cannot be parked by it.
        is_alone = outcome.next is Next.MOVE or held.is_delayed or isinstance(lane.key, int)
        if is_alone or (on_exhausted is OnExhausted.PARK and not isinstance(lane.key, bytes)):
            on_exhausted = OnExhausted.DEAD_LETTER
        if on_exhausted is OnExhausted.DEAD_LETTER:
            lane.put_back(repeated[: len(repeated) - len(failed)])  # a rollback repeats what was before it
            held.moving.append(Moving(self._wait(lane), failed, self._dead_letter_subject, 0, lane.lot))
            return
        lane.put_back(repeated)
        is_blocked = on_exhausted is OnExhausted.BLOCK
        self._record(lane, repeated, outcome)
        if is_blocked:
            held.exhausted.add(held.mark(failed[0]))
            self._record(lane, failed[:1], outcome, is_exhausted=True)
            held.unsure.append(self._wait(lane))
        else:
            self._park(lane, f"failed {held.attempts[held.mark(failed[0])]} times")

    def _record(self, lane: Lane, failed: Sequence[Message], outcome: Outcome, *, is_exhausted: bool = False) -> None:
        """The attempt is to be stored before the next one."""
        held = lane.held
        error = outcome.kind.value if outcome.error is None else text_of(outcome.error)
        for message in failed:
            mark, waiting = held.mark(message), max(0, lane.waiting - 1)
            text = error[:ERROR_LENGTH_MAX]
            held.record(Failure(mark, message.key, held.attempts[mark], text, waiting, is_exhausted))

    def stored(self, held: HeldPartition, sent: SentNews, now_s: float) -> None:
        """The attempts that this commit told of are durable."""
        for waiting in sent.unsure:
            if waiting.until_s > now_s:
                heapq.heappush(self._suspended, (waiting.until_s, waiting.number, waiting))
            elif not waiting.is_over:
                self._go_on(waiting.lane)

    def moved(self, held: HeldPartition) -> None:
        """What was on its way to another subject is safe there."""
        done, held.moving_now, held.moving_batch = held.moving_now, [], None
        for moving in done:
            lane = moving.waiting.lane
            if moving.lot is not None:
                self._finish_of_lot(held, moving.lot, moving.messages)
            elif lane.kept:
                lane.kept = [*lane.kept, *moving.messages]  # manual: done with the next commit, like those before
            else:
                held.finish(moving.messages)
            if not moving.waiting.is_over:
                self._go_on(lane)

    # Parking

    def _park(self, lane: Lane, reason: str) -> None:
        """All of the lane goes to the lot of its key, and the lane is gone."""
        held, key = lane.held, lane.key
        assert isinstance(key, bytes)
        messages = [*lane.kept, *lane.messages[lane.at :]]
        rows = lane.lot.rows if lane.lot is not None else set()
        lot = held.lots.setdefault(key, HeldLot(key, LotState.PARKED))
        lot.state = LotState.PARKED
        lot.begin_again()
        held.news.lot(key, LotState.PARKED, reason)
        self._add_to_lot(held, lot, [one for one in messages if (one.partition, one.offset) not in rows])
        lane.waits = 0
        self.scheduler.unready(lane)
        held.lanes.pop(key, None)

    def _add_to_lot(self, held: HeldPartition, lot: HeldLot, messages: list[Message]) -> None:
        if messages:
            added = [parked(message) for message in messages]
            held.news.lot(lot.key, lot.state).added += added
            if lot.since_read is not None:
                lot.since_read += added
            held.pass_by(messages)

    def collect_lot(self, lane: Lane) -> None:
        """Take over what workers have noted of messages that came from a lot."""
        lot, held = lane.lot, lane.held
        if lot is None:
            return
        count = len(lane.inbox)
        messages = lane.inbox[:count]
        del lane.inbox[:count]
        self._finish_of_lot(held, lot, messages)

    def _finish_of_lot(self, held: HeldPartition, lot: HeldLot, messages: Iterable[Message]) -> None:
        for message in messages:
            place = message.partition, message.offset
            if place in lot.rows:
                lot.rows.discard(place)
                held.news.lot(lot.key, lot.state).removed.append(place)
                held.settle(held.mark(message))
            else:
                held.finish([message])

    def _free(self, lane: Lane, lot: HeldLot) -> None:
        """The lot is empty: with the commit that says so, the key is an ordinary one again."""
        held = lane.held
        held.news.lot(lot.key, LotState.FREE)
        del held.lots[lot.key]
        lane.lot, lane.inbox = None, held.inbox

    def lot_to_read(self, held: HeldPartition) -> HeldLot | None:
        """A lot that is being resumed and has nothing to run at hand."""
        for lot in held.lots.values():
            if lot.state is LotState.RESUMING and not lot.is_read and not (lot.lane and lot.lane.waiting):
                return lot
        return None

    def lot_read(self, held: HeldPartition, lot: HeldLot, content: LotContent) -> None:
        """Some of the lot was read, in its order; at its end, what came to its tail meanwhile is part of it, too."""
        since, lot.since_read = lot.since_read or [], None
        if lot.state is not LotState.RESUMING:
            return
        read = [one for one in content.messages if (one.partition, one.offset) not in lot.not_again]
        places = {(one.partition, one.offset) for one in read}
        if content.is_end:
            known = places | lot.read_early | lot.not_again
            read += [one for one in since if (one.partition, one.offset) not in known]
        lot.read_early = (lot.read_early | places) & {(one.partition, one.offset) for one in held.unstored(lot.key)}
        if content.messages:
            lot.after = content.messages[-1].position
        lot.is_read = content.is_end
        lot.rows.update((one.partition, one.offset) for one in read)
        lane = lot.lane
        if lane is None:
            lane = lot.lane = held.lanes[lot.key] = Lane(held, lot.key, [], [], lot=lot)
        messages = [unparked(one, held.subject) for one in read]
        if self._tags is not None:
            wants = self._tags.wants  # which may be others than when it was parked
            self._finish_of_lot(held, lot, [one for one in messages if not wants(one.tags)])
            messages = [one for one in messages if wants(one.tags)]
        lane.messages += messages
        if lane.run is None and not lane.waits:
            self._go_on(lane)

    def _count_anew(self, held: HeldPartition, key: bytes) -> None:
        """Somebody resumed the key: its attempts count from the beginning."""
        for failure in [one for one in held.recorded.values() if one.key == key and held.attempts.get(one.offset)]:
            held.attempts[failure.offset] = 0
            held.exhausted.discard(failure.offset)
            held.record(msgspec.structs.replace(failure, attempts=0, is_exhausted=False))

    # What people ask for

    def act_on_requests(self, held: HeldPartition) -> None:
        """Those of one key in the order they were asked."""
        if STRAIGHT in held.lanes:
            self.spread(held.lanes[STRAIGHT])
        waiting: list[KeyRequest] = []
        for request in held.requests:
            if any(one.key == request.key for one in waiting) or not self.act(held, request):
                waiting.append(request)
            else:
                held.news.requests.append(request.id)
                if self.acted is not None:
                    self.acted(held, request)
        held.requests = waiting

    def act(self, held: HeldPartition, request: KeyRequest) -> bool:
        """Do what was asked for; False if it has to wait for a handler that runs."""
        lot = held.lots.get(request.key)
        lane = self._lane_of(held, request.key)
        if lane is not None and lane.run is not None and self.scheduler.withdraw(lane):
            self._go_on(lane)
        match request.kind:
            case KeyAction.PARK:
                return self._act_park(held, lot, lane, request)
            case KeyAction.RESUME:
                return self._act_resume(held, lot, lane, request.key)
            case KeyAction.SKIP:
                return self._act_skip(held, lot, lane, request)
        return True  # from a newer version: nothing we could do

    def _lane_of(self, held: HeldPartition, key: bytes) -> Lane | None:
        if self.order is not Order.PARTITION:
            return held.lanes.get(key)
        lane = held.lanes.get(None)
        return lane if lane is not None and lane.waiting and lane.messages[lane.at].key == key else None

    def _act_park(self, held: HeldPartition, lot: HeldLot | None, lane: Lane | None, request: KeyRequest) -> bool:
        if self.order is not Order.KEY or (lot is not None and lot.state is LotState.PARKED):
            return True
        if lane is None:
            lot = held.lots.setdefault(request.key, HeldLot(request.key, LotState.PARKED))
            lot.state = LotState.PARKED
            lot.begin_again()
            held.news.lot(request.key, LotState.PARKED, request.why)
            return True
        lane.parks = request.why or "asked for"
        if lane.run is not None or self._is_moving(held, lane):
            return False
        self._park(lane, lane.parks)
        return True

    def _is_moving(self, held: HeldPartition, lane: Lane) -> bool:
        return any(one.waiting.lane is lane for one in (*held.moving, *held.moving_now))

    def _act_resume(self, held: HeldPartition, lot: HeldLot | None, lane: Lane | None, key: bytes) -> bool:
        is_blocked = lane is not None and lane.waiting and held.mark(lane.messages[lane.at]) in held.exhausted
        self._count_anew(held, key)
        if lot is not None and lot.state is LotState.PARKED:
            lot.state = LotState.RESUMING
            held.news.lot(key, LotState.RESUMING)
        if lane is not None and is_blocked and lane.run is None and not self._is_moving(held, lane):
            self._go_on(lane)
        return True

    def _act_skip(self, held: HeldPartition, lot: HeldLot | None, lane: Lane | None, request: KeyRequest) -> bool:
        offset, origin = request.offset, held.index if request.origin is None else request.origin
        if offset is None:
            return True
        if lane is not None and lane.run is not None:
            return False
        if lot is not None and lot.since_read is not None:
            return False  # what is being read may be the message
        message = lane.messages[lane.at] if lane is not None and lane.waiting else None
        if lane is not None and message is not None and (message.partition, message.offset) == (origin, offset):
            if self._is_moving(held, lane):
                return False
            self._drop_head(lane, message)
        elif origin != held.index or offset in held.tracker:  # over; or parked, if there is a lot
            if lot is not None:
                held.news.lot(lot.key, lot.state).removed.append((origin, offset))
            held.settle(mark_of(origin, offset, held.index))
        elif offset >= held.pull_offset:
            held.tracker.add([offset])  # it will not be offered when it is pulled
            held.settle(offset)
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
            lane.held.finish([message])
        self._go_on(lane)

    # Views

    @property
    def buffered_count(self) -> int:
        """Quick handlers gain nothing from a long buffer, and lose: it does not fit into the processor's cache."""
        count = self._settings.flow.buffered_count
        return min(count, QUICK_BUFFERED_COUNT) if self.scheduler.is_tiny else count

    def held_back(self, held: HeldPartition, now_s: float) -> tuple[int, int]:
        """How many messages, and bytes, are behind one that fails or does not come to an end: they must not keep others
        from being pulled."""
        count = size_bytes = 0
        for lane in held.lanes.values():
            run = lane.run
            # A run that is at no lane has given several to a process; of those, only one that hangs is left by then.
            is_at_it = run is not None and (lane.runs_now or run.lane is None)
            if lane.waits or (run is not None and is_at_it and now_s - run.asked_at_s > LONG_S):
                count += lane.waiting
                size_bytes += sum([len(message.body) for message in lane.messages[lane.at :]])
        return count, size_bytes

    def is_span_full(self, held: HeldPartition) -> bool:
        span, pulled = self._settings.flow.span, held.pull_offset - held.tracker.known_low
        if pulled < span:
            return False
        # What tags leave out counts only where it would be too much to commit.
        return held.span >= span or (bool(held.unwanted) and held.pull_offset - held.tracker.low >= SPAN_MAX)

    def limit_of(self, held: HeldPartition) -> str | None:
        """Which limit keeps a partition from being pulled, if one key, or a few, have used it up."""
        if self.is_span_full(held):
            return "span"
        is_full = held.waiting_bytes >= STUCK_SHARE * self._settings.flow.buffered_bytes
        return "buffered_bytes" if is_full else None

    def name_blocking(self, held: HeldPartition) -> None:
        """Who looks at the keys of the group is to find the one that all wait for, also if it has not failed."""
        head = self.blocking(held)
        if head is not None and head.offset not in held.recorded and not held.attempts.get(head.offset):
            held.attempts.setdefault(head.offset, 0)
            error = "not over yet, and its partition waits for it"
            lane = held.lanes.get(head.key)
            held.record(Failure(head.offset, head.key, 0, error, 0 if lane is None else lane.waiting))

    def blocking(self, held: HeldPartition) -> Message | None:
        """What keeps the partition from going on: the lowest message that is not finished, or the first of the lane
        that most wait in."""
        if held.limit == "buffered_bytes":
            lanes = (lane for lane in held.lanes.values() if lane.lot is None)
            longest = max(lanes, key=lambda lane: lane.waiting, default=None)
            if longest is not None and longest.head is not None:
                return longest.head
        moving = [message for one in (*held.moving, *held.moving_now) for message in one.messages]
        lanes = (lane for lane in held.lanes.values() if lane.lot is None)
        heads = [head for lane in lanes if (head := lane.head) is not None]
        unfinished = [one for one in (*moving, *heads) if one.offset not in held.tracker]
        return min(unfinished, key=lambda one: one.offset, default=None)


def back_off_s(settings: ConsumerSettings, attempts: int) -> float:
    """Twice as long after every failure."""
    return min(settings.backoff_max_s, settings.backoff_min_s * 2.0 ** min(attempts - 1, 30))
