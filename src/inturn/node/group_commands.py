"""Groups: made when the first member comes, described, reset, and told which order to keep.

Heartbeats: members are heard, and hear what they have to do.

Members that go: they say so, their stream is lost, or they are silent for too long.
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType

import msgspec

from inturn.broker.broker import Broker
from inturn.broker.keys import Keys
from inturn.meta.membership import Membership
from inturn.model.errors import GroupConflict, LeaseHeld
from inturn.model.offsets import parse_position
from inturn.model.settings import GroupMode, LotState, Order, one_of
from inturn.model.subject import Subject, check_name
from inturn.model.time import Clock, Timer, Timers
from inturn.node.acceptance import AnswerTable, Intake, Try, may_wait
from inturn.node.catalog import Known, check_mode
from inturn.node.key_commands import Trials
from inturn.node.long_polls import LongPolls, Waking
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Claim,
    Command,
    DescribeGroup,
    Done,
    Fetch,
    GroupDescription,
    GroupList,
    GroupName,
    Heartbeat,
    KeyList,
    Leave,
    ListGroups,
    Pull,
    ResetGroup,
    SetOrder,
)
from inturn.store.groups import GroupRecord, Groups


class GroupCommands:
    def __init__(
        self, known: Known, rows: Groups, broker: Broker, membership: Membership, wake: Waking, clock: Clock
    ) -> None:
        self._known = known
        self._rows = rows
        self._broker = broker
        self._membership = membership
        self._wake = wake
        self._clock = clock

    @property
    def answers(self) -> AnswerTable:
        return {
            ListGroups: lambda _, __: GroupList(tuple(GroupName(*name) for name in sorted(self._known.groups))),
            DescribeGroup: self._describe,
            ResetGroup: self._reset,
            SetOrder: self._set_order,
        }

    def joined(self, subject: Subject, command: Heartbeat) -> GroupRecord:
        """The group of this heartbeat, which is new if nobody has joined it before. GroupConflict for another mode."""
        known = self._known.groups.get((subject.name, command.group))
        mode = one_of(GroupMode, "mode", command.mode)
        if known is not None:
            check_mode(known, mode)
            return known
        check_name("group", command.group)
        return self.make(subject, command.group, command.start, mode)

    def make(self, subject: Subject, name: str, start: str, mode: GroupMode) -> GroupRecord:
        starts = self._broker.resolve(subject, parse_position(start))
        group_id = self._rows.create(subject.name, name, start, starts, self._clock.time_ms(), mode)
        group = GroupRecord(subject.name, name, group_id, start, mode)
        self._known.groups[subject.name, name] = group
        return group

    def _describe(self, command: DescribeGroup, _: Try) -> Answer:
        subject = self._known.subject(command.subject)
        group = self._known.group(command.subject, command.group)
        # What a broadcast group has done is known to its members only.
        is_known = group.mode is not GroupMode.BROADCAST
        partitions = self._broker.group_partitions(subject, group) if is_known else ()
        return GroupDescription(
            subject.name,
            group.name,
            self._membership.members(group),
            partitions,
            self._membership.describe(group),
            self._membership.order(group),
            self._membership.strategy(group),
            self._broker.group_claims(subject, group),
            self._membership.taken_over_by(group),
            group.mode.value,
            self._membership.decided_order(group),
            self._membership.tags(group),
        )

    def _reset(self, command: ResetGroup, _: Try) -> Answer:
        subject = self._known.subject(command.subject)
        position = parse_position(command.position)
        group = self._known.group(command.subject, command.group)
        self.check_reset(group)
        taken_back = self._broker.reset(subject, group, position)
        if taken_back:
            self._wake.announce(group)
            self._wake.requests(command.subject, command.group, taken_back)
        return Done()

    def check_reset(self, group: GroupRecord) -> None:
        """GroupConflict for a group that cannot be reset, or not while it has members. Leases are the broker's."""
        if group.mode is GroupMode.BROADCAST:
            raise GroupConflict(
                group.name, "its members keep their own offsets; stop one, remove its offset file, and start it anew"
            )
        members = self._membership.members(group)
        if members and not group.is_exclusive:
            raise GroupConflict(group.name, f"{members[0]} consumes it; stop the group's consumers before a reset")

    def _set_order(self, command: SetOrder, _: Try) -> Answer:
        group = self._known.group(command.subject, command.group)
        order = one_of(Order, "order", command.order) if command.order else None
        if group.mode is GroupMode.SHARED:
            raise GroupConflict(group.name, "it is a shared group, which keeps no order; use another group for that")
        check_parked(group, order, self._broker.keys.list_keys(group))
        self._rows.set_order(group.id, order)
        self._membership.decide_order(group, order)
        self._wake.members(group)
        return Done()


def check_parked(group: GroupRecord, order: Order | None, found: KeyList) -> None:
    """GroupConflict if keys are parked, of which that order knows nothing."""
    parked = [one for one in found.keys if one.state in (LotState.PARKED, LotState.RESUMING)]
    if parked and order not in (None, Order.KEY):
        raise GroupConflict(
            group.name,
            f"{len(parked)} of its keys are parked, which order={order!r} knows nothing of; resume them first: "
            "`inturn key list`",
        )


class HeartbeatCommands:
    """`watch` is called after every one: there may be somebody new to be watched."""

    def __init__(
        self,
        known: Known,
        groups: GroupCommands,
        membership: Membership,
        keys: Keys,
        trials: Trials,
        wake: Waking,
        intake: Intake,
        watch: Callable[[], None],
    ) -> None:
        self._known = known
        self._groups = groups
        self._membership = membership
        self._keys = keys
        self._trials = trials
        self._wake = wake
        self._intake = intake
        self._watch = watch

    @property
    def answers(self) -> AnswerTable:
        return {Heartbeat: self._heartbeat}

    def _heartbeat(self, command: Heartbeat, attempt: Try) -> Answer | None:
        subject = self._known.subject(command.subject)
        group = self._groups.joined(subject, command)
        came = attempt is Try.FIRST and self._membership.heartbeat(group, subject, command)
        self._watch()
        if came:
            self._wake.members(group)
        is_news = came or self._membership.generation(group) != command.generation
        if not is_news and may_wait(command.wait_s, attempt):
            return None
        trials = self._trials.waiting(group, command.member)
        answer = self._membership.answer(group, subject, command.member, self._keys.waiting(group), trials)
        return msgspec.structs.replace(answer, partitions=()) if self._intake.is_stopping else answer


_OF_MEMBER = Acquire | Claim | Pull | Heartbeat | Fetch
COME_BACK_S = 1.0  # a member whose stream was lost has so long to be heard again before others are asked


class LeavingCommands:
    """It keeps the watch, too. Call it under the node's lock."""

    def __init__(
        self,
        known: Known,
        membership: Membership,
        broker: Broker,
        held: LongPolls,
        wake: Waking,
        intake: Intake,
        clock: Clock,
        timers: Timers,
    ) -> None:
        self._known = known
        self._membership = membership
        self._broker = broker
        self._held = held
        self._wake = wake
        self._intake = intake
        self._clock = clock
        self._timers = timers
        self._watch_timer: Timer | None = None
        self._spoke_through: dict[Leave, object] = {}  # the stream that a member in another process was last heard on

    @property
    def answers(self) -> AnswerTable:
        return {Leave: self.leave}

    def leave(self, command: Leave, _: Try = Try.FIRST) -> Answer:
        group = self._known.group(command.subject, command.group)
        if self._membership.leave(group, self._known.subject(command.subject), command.member):
            self._wake.members(group)
            self._wake.trials(group)
        self._forget(command, _OF_MEMBER)
        for partition in self._broker.sharing.leave(group, command.member):
            self._wake.log(command.subject, partition)
        claims = self._broker.claims
        released = claims.release_all(group, command.member)
        released += self._broker.leases.release_all(
            group, command.member, lambda key: bool(claims.live(key)) or claims.may_be_forgotten(key)
        )
        for partition in released:
            self._wake.lease(command.subject, command.group, partition)
        return Done()

    def _forget(self, leave: Leave, kinds: type[Command] | UnionType) -> None:
        """Nothing of these kinds is held back any more for a member that left; it is answered with LeaseHeld."""
        self._spoke_through.pop(leave, None)
        self._broker.leases.remote.discard(leave.member)

        def left(command: Command) -> LeaseHeld:
            return LeaseHeld(leave.group, str(getattr(command, "partition", "")), "nobody: the member left")

        self._held.dismiss(lambda command: isinstance(command, kinds) and _is_of(command, leave), left)

    # Streams

    def note_stream(self, command: Heartbeat, session: object) -> None:
        """Through which stream a member speaks; nothing of one that was refused."""
        group = self._known.groups.get((command.subject, command.group))
        if group is not None and self._membership.is_member(group, command.member):
            self._spoke_through[Leave(command.subject, command.group, command.member)] = session

    def hung_up(self, session: object) -> None:
        """The members of a lost stream keep their leases for as long as these live, but are counted out unless they
        are heard again soon."""
        for one in [member for member, through in self._spoke_through.items() if through is session]:
            del self._spoke_through[one]
            group = self._known.groups.get((one.subject, one.group))
            if group is not None:
                self._membership.hasten(group, one.member, COME_BACK_S)
        self._end_watch()
        self.watch()

    # The watch

    def watch(self) -> None:
        """Look at all groups every third of a lease's life, and at the moment when somebody is silent for too long."""
        if self._watch_timer is None:
            deadline_s = self._membership.next_deadline_s()
            if deadline_s is not None:
                at_s = min(deadline_s, self._clock.monotonic() + self._broker.leases.life_s / 3)
                self._watch_timer = self._timers.at(at_s, self._look_at_members)

    def _end_watch(self) -> None:
        if self._watch_timer is not None:
            self._watch_timer.cancel()
            self._watch_timer = None

    def _look_at_members(self) -> None:
        with self._held.lock:
            self._end_watch()  # it may be a newer one than the one that called this
            if self._intake.is_closed:
                return
            for group, member in self._membership.silent(self._clock.monotonic()):
                self._membership.leave(group, self._known.subject(group.subject), member)
                # If it lives on, it asks again. If not, nothing is to be granted to it.
                self._forget(Leave(group.subject, group.name, member), Acquire)
                self._broker.sharing.forget_member(group, member)
                self._wake.members(group)
                self._wake.trials(group)
            for group in self._membership.groups():
                if self._membership.reassign(group, self._known.subject(group.subject)):
                    self._wake.members(group)
            self.watch()


def _is_of(command: Command, leave: Leave) -> bool:
    """Whether the command came from the member that leaves."""
    if not isinstance(command, _OF_MEMBER):
        return False
    return (command.subject, command.group, command.member) == (leave.subject, leave.group, leave.member)
