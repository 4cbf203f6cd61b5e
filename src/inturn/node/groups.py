"""Groups: made when the first member comes, described, reset, and told which order to keep."""

from __future__ import annotations

from inturn.broker.broker import Broker
from inturn.meta.membership import Membership
from inturn.model.clock import Clock
from inturn.model.commands import (
    Answer,
    DescribeGroup,
    Done,
    GroupDescription,
    GroupList,
    GroupName,
    Heartbeat,
    KeyList,
    ListGroups,
    ResetGroup,
    SetOrder,
)
from inturn.model.errors import GroupConflict
from inturn.model.names import check_name
from inturn.model.position import parse_position
from inturn.model.settings import GroupMode, LotState, Order, one_of
from inturn.model.subject import Subject
from inturn.node.answering import AnswerTable, Try
from inturn.node.known import Known, check_mode
from inturn.node.waking import Waking
from inturn.state.groups import GroupRecord, Groups


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
