"""Bugs of the consumer: the lease, and finished messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

import inturn.consumer.outcome
from inturn.consumer.core import ConsumerCore
from inturn.consumer.handling import Handling
from inturn.consumer.lane import Lane
from inturn.consumer.outcome import DONE, Next, Outcome
from inturn.consumer.partition_state import HeldPartition, Stage
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
_drop = Handling.drop
_failed_lane = Handling._failed
_held_granted = HeldPartition.granted
_progress = HeldPartition.progress
_run_settle = Run.settle


@_instead_of(ConsumerCore, "answered")
def deadline_counts_from_the_answer(self: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
    """The life of the lease counts from the answer, not from before the request, and the authorisation, with its
    earlier end, is not checked."""
    for pending in (self._pending, *(held.pending for held in self.held.values())):
        waited = pending.get(type(command))
        if waited is not None and waited.command is command:
            waited.sent_at_s = now_s
    _answered(self, command, answer, now_s)
    self._authorised_until_s = float("inf")
    for held in self.held.values():
        held.authorised(float("inf"))


_add_edit(
    "deadline_is_not_checked_before_a_start",
    "A worker starts a taken message, though the lease is over or given up.",
    Run,
    "calls",
    "now_s >= held.deadline_s",
    "False",
)


@_instead_of(ConsumerCore, "_poll_partition")
def released_while_a_handler_runs(
    self: ConsumerCore, held: HeldPartition, commands: list[Command], now_s: float
) -> None:
    """A revoked partition is released at once, though handlers still run."""
    if held.stage in (Stage.DRAINING, Stage.RELEASING):
        active, held.active = held.active, 0
        _poll_partition(self, held, commands, now_s)
        held.active = active
    else:
        _poll_partition(self, held, commands, now_s)


_Buffer: TypeAlias = tuple[dict[Any, Lane], CommitTracker, int]


def _drop_but_keep(self: Handling, held: HeldPartition, stage: Stage) -> None:
    lanes = held.lanes
    _drop(self, held, stage)
    if stage is Stage.LOST:
        held.lanes = lanes


def _forget_but_keep(self: ConsumerCore, held: HeldPartition, commands: list[Command], now_s: float) -> None:
    _poll_partition(self, held, commands, now_s)
    if held.stage is Stage.LOST and held.index not in self.held:
        buffers: dict[int, _Buffer] = self.__dict__.setdefault("buffers", {})
        buffers[held.index] = held.lanes, held.tracker, held.pull_offset


def _go_on_where_it_was(
    self: ConsumerCore, held: HeldPartition, answer: Granted, sent_at_s: float, now_s: float
) -> None:
    _core_granted(self, held, answer, sent_at_s, now_s)
    buffers: dict[int, _Buffer] = self.__dict__.setdefault("buffers", {})
    if held.index in buffers:
        held.lanes, held.tracker, held.pull_offset = buffers.pop(held.index)
        for lane in list(held.lanes.values()):
            lane.held, lane.inbox = held, held.inbox
            self.handling._go_on(lane)


_add(
    "buffer_survives_the_lease",
    "consumer",
    "A consumer that gets a lost lease back continues with messages of the earlier lease.",
    Patch(ConsumerCore, "_poll_partition", _forget_but_keep),
    Patch(Handling, "drop", _drop_but_keep),
    Patch(ConsumerCore, "_granted", _go_on_where_it_was),
)


@_instead_of(Handling, "drop")
def dropped_partition_goes_on(self: Handling, held: HeldPartition, stage: Stage) -> None:
    """Waiting lanes stay with the workers when their partition is given up."""
    lanes, held.lanes = held.lanes, {}
    deadline_s = held.deadline_s
    _drop(self, held, stage)
    held.lanes, held.deadline_s = lanes, deadline_s


# Finished messages


@_instead_of(HeldPartition, "progress")
def commits_what_was_pulled(self: HeldPartition) -> Progress:
    """The pulled offset is committed instead of the handled offset."""
    self.tracker.skip(self.tracker.low, self.pull_offset)
    return _progress(self)


@_instead_of(HeldPartition, "progress")
def highest_finished_is_committed(self: HeldPartition) -> Progress:
    """All messages below the highest finished message are committed, though earlier messages run or wait."""
    self.tracker.skip(self.tracker.low, self.tracker.last + 1)
    return _progress(self)


@_instead_of(HeldPartition, "progress")
def finished_set_is_not_committed(self: HeldPartition) -> Progress:
    """Only the lowest unfinished offset is committed."""
    return msgspec.structs.replace(_progress(self), finished=b"")


@_instead_of(HeldPartition, "granted")
def finished_set_is_ignored(self: HeldPartition, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder continues at the lowest unfinished offset, and repeats finished messages above."""
    _held_granted(self, msgspec.structs.replace(answer, finished=b""), deadline_s, now_s)


def _forget_the_sent(self: HeldPartition) -> None:
    if self.sent is not None:
        self.unsure = self.sent.unsure + self.unsure
        self.sent = None


_add(
    "lost_commit_is_not_told_again",
    "consumer",
    "The progress in an unanswered commit is forgotten, except the offset.",
    Patch(HeldPartition, "not_stored", _forget_the_sent),
)


@_instead_of(Run, "settle")
def kept_messages_count_as_done(self: Run, outcome: Outcome) -> bool:
    """With manual acknowledgement, uncommitted messages are committed all the same."""
    lane, given = self.lane, self.given
    if outcome.next is Next.KEEP and lane is not None:
        lane.held.tracker.add([message.offset for message in given])
    return _run_settle(self, outcome)


@_instead_of(Run, "settle")
def failed_message_counts_as_done(self: Run, outcome: Outcome) -> bool:
    """A message whose handler failed is not repeated."""
    return _run_settle(self, DONE if outcome.next is Next.REPEAT else outcome)


@_instead_of(inturn.consumer.outcome, "of_exception")
def exception_is_a_success(error: BaseException, settings: ConsumerSettings) -> Outcome:
    """An exception of the handler is logged and forgotten."""
    return DONE


@_instead_of(Handling, "_failed")
def rollback_forgets_what_was_kept(
    self: Handling, lane: Lane, outcome: Outcome, failed: Sequence[Message], now_s: float
) -> None:
    """A rollback repeats only the message that requested the rollback."""
    if outcome.next is Next.ROLLBACK:
        lane.kept = ()
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
