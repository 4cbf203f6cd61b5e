"""The members of groups: who is alive, and the assignment that follows from it."""

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

# The partitions of a group by the member that holds their live leases.
Holders: TypeAlias = Callable[[GroupRecord], Mapping[str, tuple[int, ...]]]


@dataclass(slots=True)
class _Member:
    deadline_s: float
    since_ms: int | None = None  # None: it holds a lease from before a restart, and was not heard since
    takes_over: bool = False


@dataclass(slots=True)
class _Roster:
    """The living members of one group. `generation` rises with every change of the assignment, and with whatever
    else its members are to hear of at once."""

    group: GroupRecord
    order: str
    strategy: AssignmentStrategy
    members: dict[str, _Member] = field(default_factory=dict)
    assignment: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # What the others have when nobody takes over; so they get back what they had.
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
        """True if that changed anything."""
        before = self.assignment
        if not self.group.is_exclusive:  # nothing is divided
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
    """A member is alive until it leaves or is silent for a full lease. Deadlines live here, the database is
    written when somebody comes or goes.

    After a restart, whoever holds a live lease counts as a member for a lease's life: those that are heard first are
    not given what the others still have.
    """

    def __init__(
        self,
        members: Members,
        clock: Clock,
        settings: LeaseSettings,
        holders: Holders = lambda group: {},
        orders: Mapping[int, Order] | None = None,
    ) -> None:
        """`orders`: what was decided about the order of groups, by their ids."""
        self._members = members
        self._orders = dict(orders or {})
        self._clock = clock
        self._life_s = settings.life_s
        self._holders = holders
        self._awaited_until_s = clock.monotonic() + settings.life_s
        self._rosters: dict[int, _Roster] = {}

    def heartbeat(self, group: GroupRecord, subject: Subject, command: Heartbeat) -> bool:
        """Keep the member alive; True if it came just now."""
        strategy, tags = one_of(AssignmentStrategy, "assignment", command.assignment), tags_text(command.tags)
        roster = self._rosters.get(group.id)
        if roster is None:
            roster = self._rosters[group.id] = self._new_roster(group, command.order, strategy)
        if not roster.heard:
            roster.order, roster.strategy, roster.tags = command.order, strategy, tags
        if command.order != self._orders.get(group.id):  # whoever asks for what was decided is right in any case
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
        """There is something for all members to hear. The assignment stays as it is."""
        roster = self._rosters.get(group.id)
        if roster is not None:
            roster.generation += 1

    def reassign(self, group: GroupRecord, subject: Subject) -> bool:
        """Make the assignment anew, for the subject as it is now; True if that changed anything."""
        roster = self._rosters.get(group.id)
        return roster is not None and roster.reassign(subject.partition_count)

    def order(self, group: GroupRecord) -> str | None:
        """What its members keep to; None if there are none, and nobody has decided."""
        roster = self._rosters.get(group.id)
        asked = None if roster is None or not roster.heard else roster.order
        return self._orders.get(group.id, asked)

    def decided_order(self, group: GroupRecord) -> Order | None:
        """What its members have to keep to, whatever they ask for."""
        return self._orders.get(group.id)

    def decide_order(self, group: GroupRecord, order: Order | None) -> None:
        """All members are told; None leaves it to them."""
        if order is None:
            self._orders.pop(group.id, None)
        else:
            self._orders[group.id] = order
        self.announce(group)

    def strategy(self, group: GroupRecord) -> AssignmentStrategy | None:
        """How its partitions are divided; None if there are no members."""
        roster = self._rosters.get(group.id)
        return None if roster is None or not roster.heard else roster.strategy

    def tags(self, group: GroupRecord) -> str | None:
        """The expression that its members agree on; None if there are none."""
        roster = self._rosters.get(group.id)
        return None if roster is None or not roster.heard else roster.tags

    def taken_over_by(self, group: GroupRecord) -> str | None:
        """The member that all partitions are for, if there is one."""
        roster = self._rosters.get(group.id)
        return None if roster is None else roster.taker

    def generation(self, group: GroupRecord) -> int:
        roster = self._rosters.get(group.id)
        return 0 if roster is None else roster.generation

    def hasten(self, group: GroupRecord, name: str, within_s: float) -> None:
        """The member may be gone: it has this long to be heard again, not longer."""
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
        """The members whose time is over; `leave` is to be called for each."""
        return [
            (roster.group, name)
            for roster in self._rosters.values()
            for name, member in roster.members.items()
            if member.deadline_s <= now_s
        ]

    def next_deadline_s(self) -> float | None:
        """When the next member would be silent for too long; None if there are no members."""
        deadlines_s = (member.deadline_s for roster in self._rosters.values() for member in roster.members.values())
        return min(deadlines_s, default=None)

    def groups(self) -> list[GroupRecord]:
        """Those that have members."""
        return [roster.group for roster in self._rosters.values() if roster.members]

    def members(self, group: GroupRecord) -> tuple[str, ...]:
        roster = self._rosters.get(group.id)
        return () if roster is None else tuple(roster.heard)

    def is_member(self, group: GroupRecord, name: str) -> bool:
        """Whether it was heard, and is there still."""
        roster = self._rosters.get(group.id)
        member = None if roster is None else roster.members.get(name)
        return member is not None and member.since_ms is not None

    def counts(self) -> dict[int, int]:
        """How many members are heard, by the id of their group."""
        return {group_id: len(roster.heard) for group_id, roster in self._rosters.items()}

    def describe(self, group: GroupRecord) -> tuple[MemberDescription, ...]:
        """The members with what is assigned to them, and what they hold, by name."""
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
