"""The members of groups: living members, and the assignment among the living members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from inturn.meta.assignment import assign
from inturn.model.errors import GroupConflict
from inturn.model.message import EVERYTHING, tags_text
from inturn.model.settings import AssignmentStrategy, LeaseSettings, Order, one_of
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.protocol.commands import Assignment, Heartbeat, KeyRequest, MemberDescription, Trial
from inturn.store.groups import GroupRecord, Members

# The partitions of a group by the holder of the live leases.
Holders: TypeAlias = Callable[[GroupRecord], Mapping[str, tuple[int, ...]]]


@dataclass(slots=True)
class _Member:
    deadline_s: float
    since_ms: int | None = None  # None: holds a lease from before a restart, without a heartbeat since
    takes_over: bool = False


@dataclass(slots=True)
class _Roster:
    """The living members of a group. `generation` rises with every change of the assignment, and with any other news
    for the members."""

    group: GroupRecord
    order: str
    strategy: AssignmentStrategy
    members: dict[str, _Member] = field(default_factory=dict)
    assignment: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # The assignment without a takeover: after a takeover, members get the same partitions back.
    shares: dict[str, tuple[int, ...]] = field(default_factory=dict)
    generation: int = 0
    tags: str = ""

    @property
    def heard(self) -> list[str]:
        return sorted(name for name, member in self.members.items() if member.since_ms is not None)

    @property
    def taker(self) -> str | None:
        return next((name for name, member in self.members.items() if member.takes_over), None)

    def reassign(self, partition_count: int) -> bool:
        """True if the assignment changed."""
        before = self.assignment
        if not self.group.is_exclusive:  # each member has all partitions
            self.assignment = self.shares = {name: tuple(range(partition_count)) for name in self.members}
            self.generation += self.assignment != before
            return self.assignment != before
        ordinary = [name for name, member in self.members.items() if not member.takes_over]
        self.shares = assign(self.strategy, ordinary, partition_count, self.shares)
        taker = self.taker
        self.assignment = self.shares if taker is None else {taker: tuple(range(partition_count))}
        self.generation += self.assignment != before
        return self.assignment != before


class Membership:
    """A member is alive until the member leaves, or is silent for a lease's life. Deadlines are in memory; the database
    is written when a member joins or leaves.

    After a restart, the holder of a live lease counts as a member for a lease's life: members whose heartbeats arrive
    first are not assigned partitions that other members still hold.
    """

    def __init__(
        self,
        members: Members,
        clock: Clock,
        settings: LeaseSettings,
        holders: Holders = lambda group: {},
        orders: Mapping[int, Order] | None = None,
    ) -> None:
        """`orders`: the orders that operators have set, by group id."""
        self._members = members
        self._orders = dict(orders or {})
        self._clock = clock
        self._life_s = settings.life_s
        self._holders = holders
        self._awaited_until_s = clock.monotonic() + settings.life_s
        self._rosters: dict[int, _Roster] = {}

    def heartbeat(self, group: GroupRecord, subject: Subject, command: Heartbeat) -> bool:
        """Keep the member alive. True for a new member."""
        strategy, tags = one_of(AssignmentStrategy, "assignment", command.assignment), tags_text(command.tags)
        roster = self._rosters.get(group.id)
        if roster is None:
            roster = self._rosters[group.id] = self._new_roster(group, command.order, strategy)
        if not roster.heard:
            roster.order, roster.strategy, roster.tags = command.order, strategy, tags
        if command.order != self._orders.get(group.id):  # a member may always ask for the set order
            _check_same(group, "order", roster.order, command.order)
        _check_same(group, "assignment", roster.strategy.value, strategy.value)
        _check_same(group, "tags", roster.tags or EVERYTHING, tags or EVERYTHING)
        if command.takes_over and not group.is_exclusive:
            raise GroupConflict(group.name, f"it is a {group.mode.value} group: there are no partitions to take over")
        taker = roster.taker
        if command.takes_over and taker not in (None, command.member):
            raise GroupConflict(
                group.name, f"{taker} has taken it over already; wait until it hands back, or stop it (one at a time)"
            )
        now_s = self._clock.monotonic()
        member = roster.members.setdefault(command.member, _Member(now_s))
        member.takes_over = command.takes_over
        member.deadline_s = now_s + self._life_s
        if member.since_ms is not None:
            return False
        member.since_ms = self._clock.time_ms()
        self._members.set_online(group.id, command.member, True, member.since_ms)
        roster.reassign(subject.partition_count)
        return True

    def _new_roster(self, group: GroupRecord, order: str, strategy: AssignmentStrategy) -> _Roster:
        holders = self._holders(group)
        roster = _Roster(group, order, strategy, assignment=dict(holders), shares=dict(holders))
        if self._clock.monotonic() < self._awaited_until_s:
            roster.members = {name: _Member(self._awaited_until_s) for name in holders}
        return roster

    def answer(
        self,
        group: GroupRecord,
        subject: Subject,
        member: str,
        requests: tuple[KeyRequest, ...] = (),
        trials: tuple[Trial, ...] = (),
    ) -> Assignment:
        roster = self._rosters[group.id]
        partitions = roster.assignment.get(member, ())
        order, strategy = self._orders.get(group.id, roster.order), roster.strategy.value
        return Assignment(roster.generation, partitions, subject, self._life_s, requests, order, strategy, trials)

    def announce(self, group: GroupRecord) -> None:
        """There are news for all members. The assignment does not change."""
        roster = self._rosters.get(group.id)
        if roster is not None:
            roster.generation += 1

    def reassign(self, group: GroupRecord, subject: Subject) -> bool:
        """Compute the assignment again for the present subject. True if the assignment changed."""
        roster = self._rosters.get(group.id)
        return roster is not None and roster.reassign(subject.partition_count)

    def order(self, group: GroupRecord) -> str | None:
        """The order of the group: set by an operator, or that of the members; None without both."""
        roster = self._rosters.get(group.id)
        asked = None if roster is None or not roster.heard else roster.order
        return self._orders.get(group.id, asked)

    def decided_order(self, group: GroupRecord) -> Order | None:
        """The order set by an operator; None: the members decide."""
        return self._orders.get(group.id)

    def decide_order(self, group: GroupRecord, order: Order | None) -> None:
        """Set the order, and notify all members. None: the members decide."""
        if order is None:
            self._orders.pop(group.id, None)
        else:
            self._orders[group.id] = order
        self.announce(group)

    def strategy(self, group: GroupRecord) -> AssignmentStrategy | None:
        """The assignment strategy; None without members."""
        roster = self._rosters.get(group.id)
        return None if roster is None or not roster.heard else roster.strategy

    def tags(self, group: GroupRecord) -> str | None:
        """The tag expression of the members; None without members."""
        roster = self._rosters.get(group.id)
        return None if roster is None or not roster.heard else roster.tags

    def taken_over_by(self, group: GroupRecord) -> str | None:
        """The member that has taken over all partitions; None without a takeover."""
        roster = self._rosters.get(group.id)
        return None if roster is None else roster.taker

    def generation(self, group: GroupRecord) -> int:
        roster = self._rosters.get(group.id)
        return 0 if roster is None else roster.generation

    def hasten(self, group: GroupRecord, name: str, within_s: float) -> None:
        """The member may be gone: end the member unless a heartbeat arrives within this time."""
        roster = self._rosters.get(group.id)
        member = None if roster is None else roster.members.get(name)
        if member is not None:
            member.deadline_s = min(member.deadline_s, self._clock.monotonic() + within_s)

    def leave(self, group: GroupRecord, subject: Subject, member: str) -> bool:
        roster = self._rosters.get(group.id)
        gone = None if roster is None else roster.members.pop(member, None)
        if roster is None or gone is None:
            return False
        if gone.since_ms is not None:
            self._members.set_online(group.id, member, False, self._clock.time_ms())
        roster.reassign(subject.partition_count)
        return True

    def silent(self, now_s: float) -> list[tuple[GroupRecord, str]]:
        """Members that have been silent for too long. The caller calls `leave` for all."""
        return [
            (roster.group, name)
            for roster in self._rosters.values()
            for name, member in roster.members.items()
            if member.deadline_s <= now_s
        ]

    def next_deadline_s(self) -> float | None:
        """When the next member will have been silent for too long; None without members."""
        deadlines_s = (member.deadline_s for roster in self._rosters.values() for member in roster.members.values())
        return min(deadlines_s, default=None)

    def groups(self) -> list[GroupRecord]:
        """The groups with members."""
        return [roster.group for roster in self._rosters.values() if roster.members]

    def members(self, group: GroupRecord) -> tuple[str, ...]:
        roster = self._rosters.get(group.id)
        return () if roster is None else tuple(roster.heard)

    def is_member(self, group: GroupRecord, name: str) -> bool:
        """Whether the member has sent a heartbeat, and is alive."""
        roster = self._rosters.get(group.id)
        member = None if roster is None else roster.members.get(name)
        return member is not None and member.since_ms is not None

    def counts(self) -> dict[int, int]:
        """The number of members with heartbeats, by group id."""
        return {group_id: len(roster.heard) for group_id, roster in self._rosters.items()}

    def describe(self, group: GroupRecord) -> tuple[MemberDescription, ...]:
        """The members with assigned and held partitions, by name."""
        roster = self._rosters.get(group.id)
        if roster is None:
            return ()
        holders = self._holders(group)
        return tuple(
            MemberDescription(
                name, roster.members[name].since_ms or 0, roster.assignment.get(name, ()), holders.get(name, ())
            )
            for name in roster.heard
        )


def _check_same(group: GroupRecord, what: str, used: str, asked: str) -> None:
    if used != asked:
        raise GroupConflict(
            group.name, f"its members use {what}={used!r}, this one asks for {asked!r}; use the same for all"
        )
