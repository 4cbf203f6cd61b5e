"""The real consumer core under simulation: handlers are spans of virtual time."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import msgspec
from pyroaring import BitMap64

from inturn.consumer import outcome as outcomes
from inturn.consumer.context import Context
from inturn.consumer.core import ConsumerCore
from inturn.consumer.decoder import DecodedPull, decode_pull
from inturn.consumer.lane import STRAIGHT, Lane
from inturn.consumer.options import EVERYTHING, Scope
from inturn.consumer.outcome import DONE, Next, Outcome
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.model.errors import InturnError
from inturn.model.message import Message, tag_filter
from inturn.model.result import Result, suspend
from inturn.model.settings import ConsumerSettings, KeyAction, LeaseSettings, LotState, OnExhausted, Order
from inturn.model.time import Clock
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Command,
    Commit,
    Granted,
    KeyRequest,
    LotContent,
    Progress,
    Pull,
    Pulled,
)
from inturn.testing.recorder import Recorder
from simulator.network import SimNetwork
from simulator.world import SimClient, World

# A `poll` may pass several stages: by the first and the last stage, the stages between.
_BETWEEN: dict[tuple[str, str], tuple[str, ...]] = {
    ("active", "releasing"): ("draining",),
    **{(first, "none"): ("lost",) for first in ("active", "draining", "releasing")},
    **{(first, "asking"): ("lost", "none") for first in ("active", "draining", "releasing")},
    ("lost", "asking"): ("none",),
}

QUICK_S = 1e-6
_Place: TypeAlias = tuple[int, int, bytes | None]  # partition, epoch, key


class SimRecorder(Recorder):
    """Keeps of the finished offsets in commits only offsets of messages.

    After a power loss a log continues a million offsets further. The product stores the gap as one entry; the checker
    would need more time for a million offsets in every commit than for the rest of the history.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._known: dict[int, BitMap64] = defaultdict(BitMap64)  # by partition: acknowledged, or pulled by a consumer

    def sent(
        self,
        subject: str,
        partition: int,
        offset: int,
        key: bytes | None = None,
        message_id: str | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        self._known[partition].add(offset)
        super().sent(subject, partition, offset, key, message_id, tags)

    def pulled(self, partition: int, what: DecodedPull) -> None:
        self._known[partition].update(message.offset for messages in what.messages for message in messages)

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        if progress.finished:
            finished = BitMap64.deserialize(progress.finished) & self._known[progress.partition]
            progress = msgspec.structs.replace(progress, finished=finished.serialize() if finished else b"")
        super().committed(subject, group, owner, progress)


class SimConsumer(SimClient):
    def __init__(
        self,
        world: World,
        network: SimNetwork,
        recorder: SimRecorder,
        coverage: Counter[str],
        subject: str,
        group: str,
        name: str,
        settings: ConsumerSettings,
        lease: LeaseSettings,
        handler_s_max: float,
        order: Order = Order.PARTITION,
        scope: Scope = EVERYTHING,
    ) -> None:
        super().__init__(world, name)
        self._network = network
        self._recorder = recorder
        self._coverage = coverage
        self._settings = settings
        self._handler_s_max = handler_s_max
        self._running = 0
        self._stages: dict[int, str] = {}
        self._kept: dict[_Place, int] = {}  # the first since the last commit
        self._rolled_back: dict[_Place, int] = {}  # where to go on
        self._order = order
        self._tags = tag_filter(settings.tags or "")
        self.concurrency = settings.concurrency
        self.problems: list[str] = []
        self._next_tick_s = float("inf")
        self.slow_next = False  # the next handler outlives a lease
        self.is_sluggish = False  # handlers are slow: there is always a backlog
        self.is_calm = False  # handlers succeed from now on
        self.core = ConsumerCore(subject, group, name, order, "first", settings, lease, scope=scope)
        self.quick: random.Random | None = None  # the chance that handlers count as quick
        self._act = self.core.key_requests.act
        self._spread = self.core.dispatcher.spread
        self.core.key_requests.act = self._watch_act  # type: ignore[method-assign]
        self.core.dispatcher.spread = self._watch_spread  # type: ignore[method-assign]
        self.later(0.0, self._tick)

    @property
    def is_over(self) -> bool:
        return self.is_dead or self.core.is_stopped

    def die(self) -> None:
        if not self.is_over:
            self.is_dead = True
            self._recorder.crashed(self.name)

    def thaw(self) -> None:
        """Threads continue in any order: often workers before the thread that would notice the passed time."""
        if self.world.happens(0.5):
            self._missed.sort(key=lambda action: getattr(action, "func", None) != self._end)
        super().thaw()

    def stop(self) -> None:
        self.do(self._stop)

    def resize(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.do(self._tick)

    def _stop(self) -> None:
        self.core.stop(self.world.now_s)
        self._tick()

    def _tick(self) -> None:
        core, now_s = self.core, self.world.now_s
        self._note_stages()
        for command in core.poll(now_s):
            if isinstance(command, Commit):
                self._note_commit(command)
            self._send(command)
        self._note_stages(in_poll=True)
        self._work()
        if core.is_stopped:
            self.hang_up()
        else:
            due_s = core.next_due_s(now_s)
            if not now_s < self._next_tick_s <= due_s:
                self._next_tick_s = due_s if due_s > now_s else now_s + 0.01
                self.later(self._next_tick_s - now_s, self._tick)

    def _send(self, command: Command) -> None:
        self._network.send(self, command, partial(self._answered, command))

    def _work(self) -> None:
        """Workers take the next messages. Like real workers, without a poll first: the start of a handler checks for
        changes."""
        while self._running < self.concurrency and (run := self.core.take(self.world.now_s)) is not None:
            self._running += 1
            self._coverage["run.of several lanes"] += len(run.todo) > 1
            self._next(run, run.calls(self.world.monotonic))
            if run not in self.core.scheduler.runs and not run.handled:
                return  # the lease is over; the next poll will notice

    def _answered(self, command: Command, answer: Answer | InturnError) -> None:
        if isinstance(answer, Granted):
            self._note_hand_over(answer)
            if answer.is_claim and isinstance(command, Acquire) and self.core.awaits(command):
                self._begin_anew(command.partition)
        elif isinstance(answer, LotContent):
            self._coverage["lot.read in several pieces"] += not answer.is_end
        if isinstance(answer, Pulled) and isinstance(command, Pull):
            what = decode_pull(answer, command.subject, command.partition, self._tags)
            self._recorder.pulled(command.partition, what)
            if self.quick is not None and self.quick.random() < 0.5:
                self.core.scheduler.expect(QUICK_S)
            self.core.answered(command, what, self.world.now_s)
            self._coverage["lane.straight"] += any(
                STRAIGHT in state.buffer.lanes for state in self.core.partitions.values()
            )
        else:
            self.core.answered(command, answer, self.world.now_s)
        if self.core.error is not None:
            self._fail(self.core.error)
        else:
            self._tick()

    def _fail(self, error: InturnError) -> None:
        raise error

    def _begin_anew(self, partition: int) -> None:
        """A claim may be granted again with the same epoch; rollbacks under the former claim are over."""
        for places in (self._kept, self._rolled_back):
            for place in [place for place in places if place[0] == partition]:
                del places[place]

    def _next(self, run: Run, calls: Iterator[list[Message]]) -> None:
        given = next(calls, None)
        if given is None:
            self._finish(run)
            return
        (message,) = given
        context = run.context
        self._check_rollback(self._place_of(context, message), message.offset)
        self._check_attempt(context, message)
        self._check_bound(run, message)
        under = None if message.partition == context.partition else context.partition
        self._recorder.started(*self._event_of(context, message), attempt=context.attempt, under=under)
        self._coverage["handler.repeated"] += context.attempt > 1
        self._coverage["handler.of a parked message"] += run.lane is not None and run.lane.lot is not None
        self.later(self._duration_s(), partial(self._end, run, calls, message))

    def _end(self, run: Run, calls: Iterator[list[Message]], message: Message) -> None:
        outcome, result = self._handled(run, message)
        context = run.context
        self._coverage[f"handler.{outcome.kind.value}"] += 1
        if outcome.next is Next.REPEAT and context.attempt == self._settings.max_attempts:
            self._coverage[f"exhausted.{self._settings.on_exhausted.value}"] += 1
            if self._settings.on_exhausted is OnExhausted.DEAD_LETTER:
                result = "moved"
        self._recorder.ended(*self._event_of(context, message), result=result)
        if outcome is not DONE or self._settings.ack == "manual":
            run.settle(outcome)
        self._next(run, calls)

    def _event_of(
        self, context: Context, message: Message
    ) -> tuple[str, str, int, int, bytes | None, str, int, str | None]:
        """The fields of a call for the recorder."""
        where = context.subject, context.group, message.partition, message.offset, message.key
        return *where, self.name, context.epoch, message.message_id

    def _place_of(self, context: Context, message: Message) -> _Place:
        """The messages that are rolled back together: of a key, or of a partition."""
        return context.partition, context.epoch, message.key if self._order is Order.KEY else None

    def _watch_act(self, state: PartitionState, request: KeyRequest) -> bool:
        """Record the effect of a key request: before a handler runs because of the request."""
        where = self.core.subject, self.core.group, state.index
        lot = state.progress.parking_lots.get(request.key)
        is_resuming = lot is not None and lot.state is LotState.RESUMING
        done = self._act(state, request)
        if done:
            self._coverage[f"request.{request.kind}"] += 1
            self._coverage["request.park while resuming"] += is_resuming and request.kind == KeyAction.PARK
            if request.kind == KeyAction.RESUME:
                self._recorder.key_resumed(*where, request.key)
            elif request.kind == KeyAction.SKIP and request.offset is not None:
                origin = state.index if request.origin is None else request.origin
                self._recorder.key_skipped(*where[:2], origin, request.offset, request.key)
                for place in [place for place, due in self._rolled_back.items() if due == request.offset]:
                    if place[0] == state.index:
                        del self._rolled_back[place]
        return done

    def _watch_spread(self, lane: Lane) -> None:
        how = "after a failure" if lane.failed else "while it runs" if lane.run is not None else "before it runs on"
        self._coverage[f"lane.straight, spread {how}"] += 1
        self._spread(lane)

    @property
    def waiting_count(self) -> int:
        """The number of messages that the consumer holds and has not finished."""
        return sum(state.buffer.waiting_count for state in self.core.partitions.values())

    def _finish(self, run: Run) -> None:
        self._running -= 1
        self.core.finish(run, self.world.now_s)
        if run.handled:
            self._work()
        if self.core.wants_poll or not run.handled:
            self.later(0.0, self._tick)

    def _duration_s(self) -> float:
        if self.slow_next:
            self.slow_next = False
            return self.world.spread(2.2, 5.0)
        if self.is_sluggish:
            return self.world.spread(0.05, 0.6)
        return self.world.spread(0.001, 0.3 if self.world.happens(0.02) else self._handler_s_max)

    def _handled(self, run: Run, message: Message) -> tuple[Outcome, str]:
        """The outcome in the product, and the true result of the handler."""
        settings, chance = self._settings, self.world.rng.random()
        place = self._place_of(run.context, message)
        returned: object
        if self.is_calm or chance < 0.9:
            last = self.is_calm or chance < 0.6
            returned = None if settings.ack == "auto" else Result.COMMIT if last else Result.SUCCESS
            if returned is Result.SUCCESS:
                self._kept.setdefault(place, message.offset)
            else:
                self._kept.pop(place, None)
            return outcomes.of_return(returned, run.context, settings, "simulated"), "success"
        if chance < 0.94:
            return outcomes.of_exception(RuntimeError("simulated"), settings), "exception"
        if chance < 0.96:
            return outcomes.of_return(suspend(0.05), run.context, settings, "simulated"), "failed"
        if settings.ack == "manual" and chance < 0.98:
            self._rolled_back[place] = self._kept.pop(place, message.offset)
            return outcomes.of_return(Result.ROLLBACK, run.context, settings, "simulated"), "rollback"
        return outcomes.of_return("nonsense", run.context, settings, "simulated"), "exception"

    def _check_rollback(self, place: _Place, offset: int) -> None:
        due = self._rolled_back.pop(place, offset)
        if offset != due:
            partition, epoch, _ = place
            self.problems.append(
                f"not rolled back: {self.name}, partition {partition}, epoch {epoch} "
                f"goes on at {offset} instead of {due}"
            )

    def _check_attempt(self, context: Context, message: Message) -> None:
        """A rollback repeats what succeeded, so with manual acknowledgement more attempts are right."""
        attempts_max = self._settings.max_attempts
        if attempts_max is not None and context.attempt > attempts_max and self._settings.ack == "auto":
            self.problems.append(
                f"tried too often: {self.name}, partition {context.partition}, epoch {context.epoch} "
                f"starts offset {message.offset} as attempt {context.attempt} of {attempts_max}"
            )

    def _check_bound(self, run: Run, message: Message) -> None:
        """There is none."""

    def _note_commit(self, commit: Commit) -> None:
        for progress in commit.progress:
            self._coverage["commit.with a finished set"] += bool(progress.finished)
            for lot in progress.lots:
                if lot.added and lot.state == LotState.RESUMING:
                    self._coverage["lot.tail added while resuming"] += 1

    def _note_hand_over(self, answer: Granted) -> None:
        self._coverage["hand-over.finished set"] += bool(answer.finished)
        for failure in answer.failures:
            self._coverage[f"hand-over.{'blocked' if failure.is_exhausted else 'failed'} message"] += 1
        for lot in answer.lots:
            self._coverage[f"hand-over.{lot.state} key"] += 1

    def _note_stages(self, in_poll: bool = False) -> None:
        """Count the changes of stage of partitions, from outside of the product."""
        stages = {index: state.lease.stage.value for index, state in self.core.partitions.items()}
        if in_poll:
            self._note_pauses()
        if stages == self._stages:
            return
        for index in stages.keys() | self._stages.keys():
            before, after = self._stages.get(index, "none"), stages.get(index, "none")
            if before == after:
                continue
            between = _BETWEEN.get((before, after), ()) if in_poll else ()
            for one, following in itertools.pairwise((before, *between, after)):
                self._coverage[f"stage.{one} → {following}"] += 1
        self._stages = stages

    def _note_pauses(self) -> None:
        for state in self.core.partitions.values():
            if state.buffer.is_paused:
                by_span = state.buffer.pull_offset - state.progress.tracker.known_low >= self._settings.flow.span
                self._coverage[f"flow.paused by {'span' if by_span else 'count'}"] += 1
