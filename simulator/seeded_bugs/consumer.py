"""Bugs of the consumer: the lease, and finished messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

import inturn.consumer.outcome
from inturn.consumer.core import ConsumerCore
from inturn.consumer.dispatcher import Dispatcher
from inturn.consumer.lane import Lane
from inturn.consumer.outcome import DONE, Next, Outcome
from inturn.consumer.partition_lease import Stage
from inturn.consumer.partition_progress import PartitionProgress
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.model.message import Message
from inturn.model.offsets import CommitTracker
from inturn.model.settings import ConsumerSettings
from inturn.protocol.commands import Command, Granted, Progress
from simulator.seeded_bugs.bug import Bugs, Patch

BUGS = Bugs()
_instead_of, _add, _add_edit = BUGS.instead_of, BUGS.add, BUGS.add_edit

# The lease

_answered = ConsumerCore.answered
_core_granted = ConsumerCore._granted
_poll_partition = ConsumerCore._poll_partition
_drop = Dispatcher.drop
_failed_lane = Dispatcher._failed
_state_granted = PartitionState.granted
_begin_commit = PartitionState.begin_commit
_run_settle = Run.settle


@_instead_of(ConsumerCore, "answered")
def deadline_counts_from_the_answer(self: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
    """The life of the lease counts from the answer, not from before the request, and the authorisation, with its
    earlier end, is not checked."""
    for pending in (self._pending, *(state.lease.pending for state in self.partitions.values())):
        waited = pending.get(type(command))
        if waited is not None and waited.command is command:
            waited.sent_at_s = now_s
    _answered(self, command, answer, now_s)
    self._authorised_until_s = float("inf")
    for state in self.partitions.values():
        state.lease.authorised(float("inf"))


_add_edit(
    "deadline_is_not_checked_before_a_start",
    "A worker starts a taken message, though the lease is over or given up.",
    Run,
    "calls",
    "now_s >= lease.deadline_s",
    "False",
)


@_instead_of(ConsumerCore, "_poll_partition")
def released_while_a_handler_runs(
    self: ConsumerCore, state: PartitionState, commands: list[Command], now_s: float
) -> None:
    """A revoked partition is released at once, though handlers still run."""
    if state.lease.stage in (Stage.DRAINING, Stage.RELEASING):
        active, state.buffer.lanes_in_runs = state.buffer.lanes_in_runs, 0
        _poll_partition(self, state, commands, now_s)
        state.buffer.lanes_in_runs = active
    else:
        _poll_partition(self, state, commands, now_s)


_Buffer: TypeAlias = tuple[dict[Any, Lane], CommitTracker, int]


def _drop_but_keep(self: Dispatcher, state: PartitionState, stage: Stage) -> None:
    lanes = state.buffer.lanes
    _drop(self, state, stage)
    if stage is Stage.LOST:
        state.buffer.lanes = lanes


def _forget_but_keep(self: ConsumerCore, state: PartitionState, commands: list[Command], now_s: float) -> None:
    _poll_partition(self, state, commands, now_s)
    if state.lease.stage is Stage.LOST and state.index not in self.partitions:
        buffers: dict[int, _Buffer] = self.__dict__.setdefault("buffers", {})
        buffers[state.index] = state.buffer.lanes, state.progress.tracker, state.buffer.pull_offset


def _go_on_where_it_was(
    self: ConsumerCore, state: PartitionState, answer: Granted, sent_at_s: float, now_s: float
) -> None:
    _core_granted(self, state, answer, sent_at_s, now_s)
    buffers: dict[int, _Buffer] = self.__dict__.setdefault("buffers", {})
    if state.index in buffers:
        state.buffer.lanes, state.progress.tracker, state.buffer.pull_offset = buffers.pop(state.index)
        for lane in list(state.buffer.lanes.values()):
            lane.state, lane.inbox = state, state.buffer.inbox
            self.dispatcher.go_on(lane)


_add(
    "buffer_survives_the_lease",
    "consumer",
    "A consumer that gets a lost lease back continues with messages of the earlier lease.",
    Patch(ConsumerCore, "_poll_partition", _forget_but_keep),
    Patch(Dispatcher, "drop", _drop_but_keep),
    Patch(ConsumerCore, "_granted", _go_on_where_it_was),
)


@_instead_of(Dispatcher, "drop")
def dropped_partition_goes_on(self: Dispatcher, state: PartitionState, stage: Stage) -> None:
    """Waiting lanes stay with the workers when their partition is given up."""
    lanes, state.buffer.lanes = state.buffer.lanes, {}
    deadline_s = state.lease.deadline_s
    _drop(self, state, stage)
    state.buffer.lanes, state.lease.deadline_s = lanes, deadline_s


# Finished messages


@_instead_of(PartitionState, "begin_commit")
def commits_what_was_pulled(self: PartitionState) -> Progress:
    """The pulled offset is committed instead of the handled offset."""
    tracker = self.progress.tracker
    tracker.skip(tracker.low, self.buffer.pull_offset)
    return _begin_commit(self)


@_instead_of(PartitionState, "begin_commit")
def highest_finished_is_committed(self: PartitionState) -> Progress:
    """All messages below the highest finished message are committed, though earlier messages run or wait."""
    tracker = self.progress.tracker
    tracker.skip(tracker.low, tracker.last + 1)
    return _begin_commit(self)


@_instead_of(PartitionState, "begin_commit")
def finished_set_is_not_committed(self: PartitionState) -> Progress:
    """Only the lowest unfinished offset is committed."""
    return msgspec.structs.replace(_begin_commit(self), finished=b"")


@_instead_of(PartitionState, "granted")
def finished_set_is_ignored(self: PartitionState, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder continues at the lowest unfinished offset, and repeats finished messages above."""
    _state_granted(self, msgspec.structs.replace(answer, finished=b""), deadline_s, now_s)


def _forget_the_commit(self: PartitionProgress) -> None:
    if self.commit_in_flight is not None:
        self.waits = self.commit_in_flight.waits + self.waits
        self.commit_in_flight = None


_add(
    "lost_commit_is_not_told_again",
    "consumer",
    "The progress in an unanswered commit is forgotten, except the offset.",
    Patch(PartitionProgress, "commit_lost", _forget_the_commit),
)


@_instead_of(Run, "settle")
def kept_messages_count_as_done(self: Run, outcome: Outcome) -> bool:
    """With manual acknowledgement, uncommitted messages are committed all the same."""
    lane, given = self.lane, self.given
    if outcome.next is Next.KEEP and lane is not None:
        lane.state.progress.tracker.add([message.offset for message in given])
    return _run_settle(self, outcome)


@_instead_of(Run, "settle")
def failed_message_counts_as_done(self: Run, outcome: Outcome) -> bool:
    """A message whose handler failed is not repeated."""
    return _run_settle(self, DONE if outcome.next is Next.REPEAT else outcome)


@_instead_of(inturn.consumer.outcome, "of_exception")
def exception_is_a_success(error: BaseException, settings: ConsumerSettings) -> Outcome:
    """An exception of the handler is logged and forgotten."""
    return DONE


@_instead_of(Dispatcher, "_failed")
def rollback_forgets_what_was_kept(
    self: Dispatcher, lane: Lane, outcome: Outcome, failed: Sequence[Message], now_s: float
) -> None:
    """A rollback repeats only the message that requested the rollback."""
    if outcome.next is Next.ROLLBACK:
        lane.uncommitted = ()
    _failed_lane(self, lane, outcome, failed, now_s)


@_instead_of(Lane, "put_back")
def suspended_message_is_overtaken(self: Lane, messages: Sequence[Message]) -> None:
    """A message to repeat goes behind the waiting messages of its lane."""
    self.forget_handled()
    self.messages += messages


@_instead_of(Lane, "put_back")
def rest_of_a_lane_is_dropped(self: Lane, messages: Sequence[Message]) -> None:
    """When a message fails, the waiting messages of its lane are forgotten."""
    self.messages[:] = messages
    self.at = 0
