"""Commands about groups and members: join, heartbeat, leave, describe, reset, set the order.

A group is made when its first member joins. A member ends when the member leaves, or sends no heartbeat for a lease's
life; a member whose stream is lost ends sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType

import msgspec

from inturn.broker.broker import Broker
from inturn.meta.membership import Membership
from inturn.model.errors import GroupConflict, LeaseHeld
from inturn.model.offsets import Position, parse_position
from inturn.model.settings import GroupMode, LotState, Order, one_of
from inturn.model.subject import Subject, check_name
from inturn.model.time import Clock, Timer, Timers
from inturn.node.acceptance import Admission, AnswerTable, CommandService, Try, may_wait
from inturn.node.catalog import Catalog, check_mode
from inturn.node.key_commands import Trials
from inturn.node.long_polls import LongPolls, WakeUps
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
    KeyRequest,
    Leave,
    ListGroups,
    Pull,
    ResetGroup,
    SetOrder,
)
from inturn.store.groups import GroupRecord, Groups


class GroupCommands(CommandService):
    """Lists and makes groups, and knows the parts of a group that need no logs: members and order.

    `resolve` returns the offset of a position in each partition of a subject; 0 for a partition of another broker.
    """

    def __init__(
        self,
        catalog: Catalog,
        rows: Groups,
        membership: Membership,
        wake: WakeUps,
        clock: Clock,
        resolve: Callable[[Subject, Position], tuple[int, ...]],
    ) -> None:
        self._catalog = catalog
        self._rows = rows
        self._membership = membership
        self._wake = wake
        self._clock = clock
        self._resolve = resolve

    @property
    def answers(self) -> AnswerTable:
        return {ListGroups: lambda _, __: GroupList(tuple(GroupName(*name) for name in sorted(self._catalog.groups)))}

    def joined(self, subject: Subject, command: Heartbeat) -> GroupRecord:
        """The group of a heartbeat, made now for its first member. Raise GroupConflict for another mode."""
        known = self._catalog.groups.get((subject.name, command.group))
        mode = one_of(GroupMode, "mode", command.mode)
        if known is not None:
            check_mode(known, mode)
            return known
        check_name("group", command.group)
        return self.make(subject, command.group, command.start, mode)

    def make(self, subject: Subject, name: str, start: str, mode: GroupMode) -> GroupRecord:
        starts = self._resolve(subject, parse_position(start))
        group_id = self._rows.create(subject.name, name, start, starts, self._clock.time_ms(), mode)
        group = GroupRecord(subject.name, name, group_id, start, mode)
        self._catalog.groups[subject.name, name] = group
        return group

    def description(self, group: GroupRecord) -> GroupDescription:
        """Without partitions and claims."""
        return GroupDescription(
            group.subject,
            group.name,
            self._membership.members(group),
            (),
            self._membership.describe(group),
            self._membership.order(group),
            self._membership.strategy(group),
            (),
            self._membership.taken_over_by(group),
            group.mode.value,
            self._membership.decided_order(group),
            self._membership.tags(group),
        )

    def check_reset(self, group: GroupRecord) -> None:
        """Raise GroupConflict for a group that cannot be reset, or not while the group has members. The broker checks
        the leases."""
        if group.mode is GroupMode.BROADCAST:
            raise GroupConflict(
                group.name, "its members keep their own offsets; stop one, remove its offset file, and start it again"
            )
        members = self._membership.members(group)
        if members and not group.is_exclusive:
            raise GroupConflict(group.name, f"{members[0]} consumes it; stop the group's consumers before a reset")

    def set_order(self, group: GroupRecord, order: Order | None) -> None:
        """Durably, and notify the members. None: no decision."""
        self._rows.set_order(group.id, order)
        self._membership.decide_order(group, order)
        self._wake.members(group)


def check_ordered(group: GroupRecord) -> None:
    """Raise GroupConflict for a group that keeps no order."""
    if group.mode is GroupMode.SHARED:
        raise GroupConflict(group.name, "it is a shared group, which keeps no order; use another group for that")


def check_parked(group: GroupRecord, order: Order | None, found: KeyList) -> None:
    """Raise GroupConflict if keys are parked and the order has no parked keys."""
    parked = [one for one in found.keys if one.state in (LotState.PARKED, LotState.RESUMING)]
    if parked and order not in (None, Order.KEY):
        raise GroupConflict(
            group.name,
            f"{len(parked)} of its keys are parked, which order={order!r} knows nothing of; resume them first: "
            "`inturn key list`",
        )


class OrderCommands(CommandService):
    """Sets the order of groups whose keys are all at this node."""

    def __init__(self, catalog: Catalog, groups: GroupCommands, broker: Broker) -> None:
        self._catalog = catalog
        self._groups = groups
        self._broker = broker

    @property
    def answers(self) -> AnswerTable:
        return {SetOrder: self._set_order}

    def _set_order(self, command: SetOrder, _: Try) -> Answer:
        group = self._catalog.group(command.subject, command.group)
        order = one_of(Order, "order", command.order) if command.order else None
        check_ordered(group)
        check_parked(group, order, self._broker.keys.list_keys(group))
        self._groups.set_order(group, order)
        return Done()


class GroupPartitionCommands(CommandService):
    """Describes and resets groups in the partitions of this node."""

    def __init__(self, catalog: Catalog, groups: GroupCommands, broker: Broker, wake: WakeUps) -> None:
        self._catalog = catalog
        self._groups = groups
        self._broker = broker
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {DescribeGroup: self._describe, ResetGroup: self._reset}

    def _describe(self, command: DescribeGroup, _: Try) -> Answer:
        subject = self._catalog.subject(command.subject)
        group = self._catalog.group(command.subject, command.group)
        # The offsets of a broadcast group are with its members.
        is_known = group.mode is not GroupMode.BROADCAST
        return msgspec.structs.replace(
            self._groups.description(group),
            partitions=self._broker.group_partitions(subject, group) if is_known else (),
            claims=self._broker.group_claims(subject, group),
        )

    def _reset(self, command: ResetGroup, _: Try) -> Answer:
        subject = self._catalog.subject(command.subject)
        position = parse_position(command.position)
        group = self._catalog.group(command.subject, command.group)
        self._groups.check_reset(group)
        withdrawn = self._broker.reset(subject, group, position)
        if withdrawn:
            self._wake.announce(group)
            self._wake.requests(command.subject, command.group, withdrawn)
        return Done()


class HeartbeatCommands(CommandService):
    """`requests` returns the key requests that wait for a group's members. `schedule_check` is called after each
    heartbeat: the member may be new."""

    def __init__(
        self,
        catalog: Catalog,
        groups: GroupCommands,
        membership: Membership,
        requests: Callable[[GroupRecord], tuple[KeyRequest, ...]],
        trials: Trials,
        wake: WakeUps,
        admission: Admission,
        schedule_check: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._groups = groups
        self._membership = membership
        self._requests = requests
        self._trials = trials
        self._wake = wake
        self._admission = admission
        self._schedule_check = schedule_check

    @property
    def answers(self) -> AnswerTable:
        return {Heartbeat: self._heartbeat}

    def _heartbeat(self, command: Heartbeat, attempt: Try) -> Answer | None:
        subject = self._catalog.subject(command.subject)
        group = self._groups.joined(subject, command)
        is_new = attempt is Try.FIRST and self._membership.heartbeat(group, subject, command)
        self._schedule_check()
        if is_new:
            self._wake.members(group)
        has_news = is_new or self._membership.generation(group) != command.generation
        if not has_news and may_wait(command.wait_s, attempt):
            return None
        trials = self._trials.waiting(group, command.member)
        answer = self._membership.answer(group, subject, command.member, self._requests(group), trials)
        return msgspec.structs.replace(answer, partitions=()) if self._admission.is_stopping else answer


_OF_MEMBER = Acquire | Claim | Pull | Heartbeat | Fetch
COME_BACK_S = 1.0  # a member whose stream is lost ends unless a heartbeat arrives within this time


class MemberLeases:
    """The leases, claims and deliveries of members at this node. Call under the node's lock."""

    def __init__(self, broker: Broker, held: LongPolls, wake: WakeUps) -> None:
        self._broker = broker
        self._held = held
        self._wake = wake

    def leave(self, group: GroupRecord, leave: Leave) -> None:
        """Answer the member's waiting commands with LeaseHeld, and release all leases, claims and deliveries."""
        dismiss_member(self._held, leave, _OF_MEMBER)
        self.release(group, leave)

    def release(self, group: GroupRecord, leave: Leave) -> None:
        self._broker.leases.remote.discard(leave.member)
        for partition in self._broker.sharing.leave(group, leave.member):
            self._wake.log(leave.subject, partition)
        claims = self._broker.claims
        released = claims.release_all(group, leave.member)
        released += self._broker.leases.release_all(
            group, leave.member, lambda key: bool(claims.live(key)) or claims.may_be_forgotten(key)
        )
        for partition in released:
            self._wake.lease(leave.subject, leave.group, partition)

    def forget(self, group: GroupRecord, member: str) -> None:
        """The member is silent. The leases live on until expiry."""
        self._broker.leases.remote.discard(member)
        self._broker.sharing.forget_member(group, member)


class MemberCommands(CommandService):
    """Members that leave, lose their streams, or are silent. Call under the node's lock.

    `leases` None: the leases are at other nodes.
    """

    def __init__(
        self,
        catalog: Catalog,
        membership: Membership,
        leases: MemberLeases | None,
        held: LongPolls,
        wake: WakeUps,
        admission: Admission,
        clock: Clock,
        timers: Timers,
        life_s: float,
    ) -> None:
        self._catalog = catalog
        self._membership = membership
        self._leases = leases
        self._held = held
        self._wake = wake
        self._admission = admission
        self._clock = clock
        self._timers = timers
        self._life_s = life_s
        self._check_timer: Timer | None = None
        self._sessions: dict[Leave, object] = {}  # of members in other processes: the session of the last heartbeat

    @property
    def answers(self) -> AnswerTable:
        return {Leave: self._leave}

    def _leave(self, command: Leave, _: Try) -> Answer:
        group = self._catalog.group(command.subject, command.group)
        if self._membership.leave(group, self._catalog.subject(command.subject), command.member):
            self._wake.members(group)
            self._wake.trials(group)
        self._sessions.pop(command, None)
        dismiss_member(self._held, command, _OF_MEMBER)
        if self._leases is not None:
            self._leases.release(group, command)
        return Done()

    # Streams

    def note_session(self, command: Heartbeat, session: object) -> None:
        """Note the session of a member's heartbeat, unless the heartbeat was refused."""
        group = self._catalog.groups.get((command.subject, command.group))
        if group is not None and self._membership.is_member(group, command.member):
            self._sessions[Leave(command.subject, command.group, command.member)] = session

    def hung_up(self, session: object) -> None:
        """The members of a lost stream keep their leases for the leases' life, but end as members after COME_BACK_S
        without a heartbeat."""
        for one in [member for member, through in self._sessions.items() if through is session]:
            del self._sessions[one]
            group = self._catalog.groups.get((one.subject, one.group))
            if group is not None:
                self._membership.hasten(group, one.member, COME_BACK_S)
        self._cancel_check()
        self.schedule_check()

    # Membership checks

    def schedule_check(self) -> None:
        """Check all groups every third of a lease's life, and when the next member has been silent for too long."""
        if self._check_timer is None:
            deadline_s = self._membership.next_deadline_s()
            if deadline_s is not None:
                at_s = min(deadline_s, self._clock.monotonic() + self._life_s / 3)
                self._check_timer = self._timers.at(at_s, self._check_members)

    def _cancel_check(self) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None

    def _check_members(self) -> None:
        with self._held.lock:
            self._cancel_check()  # the timer may be a newer one than the caller
            if self._admission.is_closed:
                return
            for group, member in self._membership.silent(self._clock.monotonic()):
                self._membership.leave(group, self._catalog.subject(group.subject), member)
                # A living member asks again. A dead member must not be granted a lease.
                leave = Leave(group.subject, group.name, member)
                self._sessions.pop(leave, None)
                dismiss_member(self._held, leave, Acquire)
                if self._leases is not None:
                    self._leases.forget(group, member)
                self._wake.members(group)
                self._wake.trials(group)
            for group in self._membership.groups():
                if self._membership.reassign(group, self._catalog.subject(group.subject)):
                    self._wake.members(group)
            self.schedule_check()


def dismiss_member(held: LongPolls, leave: Leave, kinds: type[Command] | UnionType) -> None:
    """Answer the waiting commands of these kinds of a member with LeaseHeld."""

    def left(command: Command) -> LeaseHeld:
        partition = str(command.partition) if isinstance(command, _OF_PARTITION) else ""
        return LeaseHeld(leave.group, partition, "nobody: the member left")

    held.dismiss(lambda command: isinstance(command, kinds) and _is_of(command, leave), left)


_OF_PARTITION = Acquire | Claim | Pull | Fetch


def _is_of(command: Command, leave: Leave) -> bool:
    """Whether the member that leaves sent the command."""
    if not isinstance(command, _OF_MEMBER):
        return False
    return (command.subject, command.group, command.member) == (leave.subject, leave.group, leave.member)
