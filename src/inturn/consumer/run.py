"""A run: the lanes that a worker has taken, and the loop over the messages, in order.

The worker iterates over `calls`, where the lease is checked before every message. There is no lock: meanwhile the
scheduler takes lanes from the end of `todo`, and takes the lanes in `over`. Both are deques with atomic steps.

`TracingRun` records its work for the trace. The scheduler chooses the kind of run, so the loop of `Run` has no trace
code. Change both loops together.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from inturn.consumer.context import Context
from inturn.consumer.outcome import Next, Outcome
from inturn.consumer.trace import Notes
from inturn.model.message import Message
from inturn.model.result import ResultKind

if TYPE_CHECKING:
    from inturn.consumer.lane import Lane
    from inturn.consumer.partition_state import PartitionState


BROKEN = Outcome(Next.REPEAT, ResultKind.EXCEPTION)
NOTHING: list[Message] = []
_NO_CONTEXT = Context("", "", -1, "", 0)


class Run:
    __slots__ = (
        "_left",
        "_state",
        "asked_at_s",
        "context",
        "done",
        "failures",
        "given",
        "handled",
        "lane",
        "over",
        "slow_count",
        "slow_s",
        "started_at_s",
        "todo",
        "until_s",
    )

    def __init__(self, lanes: deque[Lane], now_s: float, until_s: float, budget: int) -> None:
        """The run lasts until `until_s` or for `budget` messages; at least one message."""
        self.todo = lanes
        self.over: deque[Lane] = deque()  # lanes that the worker has left
        self.lane: Lane | None = None
        self._state: PartitionState | None = None
        self.context = _NO_CONTEXT
        self.given = NOTHING  # messages passed to the handler and not settled yet
        self.started_at_s = self.asked_at_s = now_s
        self.until_s = until_s
        self._left = budget
        self.handled = 0  # messages, whatever the outcome
        self.done = 0
        self.failures = 0
        self.slow_s = float("inf")
        self.slow_count = 0

    @property
    def budget(self) -> int:
        """How many messages the run may take."""
        return self._left

    @property
    def deadline_s(self) -> float:
        """No message of the current lane may be begun from this time on."""
        return float("-inf") if self._state is None else self._state.lease.deadline_s

    def calls(self, monotonic: Callable[[], float], count: int = 1) -> Iterator[list[Message]]:
        """The calls of the handler, in order: a message, or up to `count` messages of one lane.

        Continuing the iteration reports success of the last call, unless `settle` was called.
        """
        todo, over, left, slow_s = self.todo, self.over, self._left, self.slow_s
        now_s = asked_at_s = self.asked_at_s = monotonic()
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
                    # This time is the end of the call and the start of the next call.
                    now_s = monotonic()
                    if now_s - asked_at_s > slow_s:
                        self.slow_count += 1
                    if self.given is given:
                        inbox += given
                        self.given = NOTHING
                        done += taken
                    elif self.lane is None:  # the call failed
                        break
                if self.lane is not None:
                    self.lane = None
                    over.append(lane)
        finally:
            self._end(left, done)

    def _of_one_attempt(self, given: list[Message], state: PartitionState) -> list[Message]:
        """The messages from the first on that failed as often as the first, up to an exhausted message. Sets the
        attempt of the context."""
        attempts, exhausted, mark = state.progress.attempts, state.progress.exhausted, state.mark
        count = attempts.get(mark(given[0]), 0)
        marked = ((message, mark(message)) for message in given)
        alike = itertools.takewhile(lambda one: attempts.get(one[1], 0) == count and one[1] not in exhausted, marked)
        given = [message for message, _ in alike]
        if given:
            self.context.attempt = count + 1
        return given

    def _end(self, left: int, done: int) -> None:
        if self.given:
            self.settle(BROKEN)  # the worker broke, and nobody knows how far the handler came
        self.handled = self._left - left
        self.done += done
        self._leave()

    def begin(self, lane: Lane, message: Message, attempt: int) -> None:
        """A process handled this message; `settle` follows."""
        self.lane, self.given, self.context = lane, [message], lane.state.context()
        self.context.attempt = attempt

    def not_begun(self) -> None:
        """The handler did not begin the last messages after all: the lane leaves the run as it was before."""
        lane, given = self.lane, self.given
        assert lane is not None
        lane.at -= len(given)
        self._leave()

    def settle(self, outcome: Outcome) -> bool:
        """Set the outcome of the last messages. Returns False if the call failed: the lane leaves the run."""
        lane, given = self.lane, self.given
        assert lane is not None
        self.given = NOTHING
        self.context.is_acknowledged = False
        match outcome.next:
            case Next.DONE:
                lane.inbox += [*lane.uncommitted, *given]
                lane.uncommitted = ()
            case Next.PASS if not lane.uncommitted:
                lane.inbox += given
            case Next.PASS | Next.KEEP:
                lane.uncommitted = [*lane.uncommitted, *given]
            case _:
                self.failures += 1
                lane.failed = given
                lane.outcome = outcome
                self._leave()
                return False
        self.done += len(given)
        return True

    def _leave(self) -> None:
        lane, self.lane, self.given = self.lane, None, NOTHING
        if lane is not None:
            self.over.append(lane)


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
