"""A run that records its work for the trace. The scheduler chooses the kind of run, so the loop of `Run` has no trace
code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from inturn.consumer.outcome import Outcome
from inturn.consumer.run import NOTHING, Run
from inturn.consumer.trace import Notes
from inturn.model.message import Message

if TYPE_CHECKING:
    from inturn.consumer.lane import Lane
    from inturn.consumer.partition_state import PartitionState


class TracingRun(Run):
    """`calls` is the loop of `Run.calls`, step by step, with the notes of the trace between the steps."""

    __slots__ = ("_monotonic", "notes")

    def __init__(self, notes: Notes, lanes: deque[Lane], now_s: float, until_s: float, budget: int) -> None:
        super().__init__(lanes, now_s, until_s, budget)
        self.notes = notes
        self._monotonic: Callable[[], float] | None = None

    def calls(self, monotonic: Callable[[], float], count: int = 1) -> Iterator[list[Message]]:
        todo, over, left, slow_s, notes = self.todo, self.over, self._left, self.slow_s, self.notes
        self._monotonic = monotonic
        now_s = asked_at_s = self.asked_at_s = notes.start_s = monotonic()
        current: PartitionState | None = None
        done = 0
        try:
            while True:
                try:
                    lane = self.lane = todo.popleft()
                except IndexError:
                    return
                state, messages, inbox = lane.state, lane.messages, lane.inbox
                if current is not state:
                    current = self._state = state
                    lease, progress = state.lease, state.progress
                    self.context = state.context()
                    notes.part(state)
                notes.first = lane.at
                while True:
                    at = lane.at
                    if at == len(messages) or lane.parks:
                        break
                    if now_s >= lease.deadline_s:
                        break
                    if (left <= 0 or now_s >= self.until_s) and left < self._left:
                        return
                    given = [messages[at]] if count == 1 else messages[at : at + count]
                    if progress.attempts:
                        given = self._of_one_attempt(given, state)
                        if not given:
                            break
                        notes.attempt(lane, len(given), self.context.attempt)
                    elif self.context.attempt > 1:
                        self.context.attempt = 1
                    self.given = given
                    taken = len(given)
                    lane.at = at + taken
                    if lane.is_spread:  # checked after `at` was moved: see `Dispatcher.spread`
                        lane.at = at
                        self.given = NOTHING
                        break
                    left -= taken
                    asked_at_s = self.asked_at_s = now_s
                    yield given
                    # The clock is read before any other thread can see that the message is finished, so that events
                    # that follow from the end have a later time in the trace.
                    now_s = monotonic()
                    if now_s - asked_at_s > slow_s:
                        self.slow_count += 1
                    if self.given is given:
                        if now_s > notes.due_s:
                            notes.mark(lane, now_s)
                        inbox += given
                        self.given = NOTHING
                        done += taken
                    elif self.lane is None:  # the call failed
                        break
                if self.lane is not None:
                    if lane.at == notes.first + 1:
                        notes.handled.append(messages[notes.first])
                    else:
                        notes.leave(lane)
                    self.lane = None
                    over.append(lane)
        finally:
            self._end(left, done)

    def settle(self, outcome: Outcome) -> bool:
        if self.lane is not None and self._monotonic is not None:
            self.notes.settled(self.lane, len(self.given), outcome, self._monotonic())
        return super().settle(outcome)

    def _leave(self) -> None:
        if self.lane is not None:
            self.notes.leave(self.lane)
        super()._leave()
