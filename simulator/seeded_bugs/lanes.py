"""Bugs of the consumer's lanes: turns and attempts."""

from __future__ import annotations

from collections.abc import Sequence

from inturn.consumer.core import ConsumerCore
from inturn.consumer.dispatcher import Dispatcher
from inturn.consumer.lane import Lane
from inturn.consumer.outcome import Outcome
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.scheduler import Scheduler
from inturn.model.errors import InturnError, StaleEpoch
from inturn.model.message import Message
from inturn.model.settings import OnExhausted
from inturn.protocol.commands import Command, Done, Granted, Move
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_instead_of, _add_edit = BUGS.instead_of, BUGS.add_edit

# Lanes

_answered = ConsumerCore.answered
_exhausted = Dispatcher._exhausted
_granted = PartitionState.granted
_take_back = Scheduler.take_back

_add_edit(
    "lane_is_ready_while_it_runs",
    "A lane with new messages is given to a worker, though a different worker runs the lane.",
    Dispatcher,
    "offer",
    "if lane.run is None and not lane.waits:",
    "if not lane.waits:",
)
_add_edit(
    "suspended_lane_goes_on_with_the_next_pull",
    "A lane that waits for a retry is ready at once when new messages come.",
    Dispatcher,
    "offer",
    "if lane.run is None and not lane.waits:",
    "if lane.run is None:",
)


@_instead_of(Scheduler, "take_back")
def begun_lane_is_taken_back(self: Scheduler, now_s: float) -> list[Lane]:
    """A slow run even loses the lane that is running."""
    lanes = _take_back(self, now_s)
    for run in self.runs:
        if run.lane is not None and now_s >= run.until_s:
            run.lane.run = None
            lanes.append(run.lane)
    return lanes


# Attempts


@_instead_of(PartitionState, "granted")
def attempts_are_not_handed_over(self: PartitionState, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder knows that a message failed, but not the number of attempts."""
    _granted(self, answer, deadline_s, now_s)
    self.progress.attempts = dict.fromkeys(self.progress.attempts, 1)


@_instead_of(PartitionState, "granted")
def blocked_message_is_tried_by_the_next_holder(
    self: PartitionState, answer: Granted, deadline_s: float, now_s: float
) -> None:
    """The next holder does not know that the attempts at a message are used up, and tries again."""
    _granted(self, answer, deadline_s, now_s)
    self.progress.exhausted = set()


_add_edit(
    "repeat_does_not_wait_for_the_commit",
    "A message is retried before its failure is stored.",
    Dispatcher,
    "_failed",
    "progress.waits.append(self._wait(lane, now_s + wait_s))",
    "(one := self._wait(lane, now_s + wait_s), heapq.heappush(self._suspended, (one.until_s, one.number, one)))",
)


@_instead_of(Dispatcher, "_exhausted")
def dead_letter_is_not_waited_for(
    self: Dispatcher,
    lane: Lane,
    outcome: Outcome,
    failed: Sequence[Message],
    repeated: Sequence[Message],
    now_s: float,
) -> None:
    """A message that is given up counts as finished before the dead letter is stored."""
    _exhausted(self, lane, outcome, failed, repeated, now_s)
    if self._settings.on_exhausted is OnExhausted.DEAD_LETTER and lane.lot is None:
        lane.state.progress.tracker.add([message.offset for message in failed])


@_instead_of(ConsumerCore, "answered")
def failed_move_counts_as_done(self: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
    """A message that is given up counts as finished though the dead letter could not be stored."""
    if isinstance(command, Move) and isinstance(answer, InturnError) and not isinstance(answer, StaleEpoch):
        answer = Done()
    _answered(self, command, answer, now_s)
