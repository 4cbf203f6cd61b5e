"""The members of groups: who is alive, and the assignment that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from inturn.meta.assignment import assign_sticky
from inturn.model.clock import Clock
from inturn.model.commands import Assignment, Heartbeat, KeyRequest
from inturn.model.errors import GroupConflict
from inturn.model.settings import LeaseSettings
from inturn.model.subject import Subject
from inturn.state.groups import GroupRecord
from inturn.state.members import Members


@dataclass(slots=True)
class _Roster:
    """The living members of one group. `generation` rises with every change of the assignment, and with whatever
    else its members are to hear of at once."""

    group: GroupRecord
    order: str
    deadline_s: dict[str, float] = field(default_factory=dict)
    assignment: dict[str, tuple[int, ...]] = field(default_factory=dict)
    generation: int = 0


class Membership:
    """A member is alive until it leaves or is silent for a full lease. Deadlines live here, the database is
    written when somebody comes or goes."""

    def __init__(self, members: Members, clock: Clock, settings: LeaseSettings) -> None:
        self._members = members
        self._clock = clock
        self._life_s = settings.life_s
        self._rosters: dict[int, _Roster] = {}

    def heartbeat(self, group: GroupRecord, subject: Subject, command: Heartbeat) -> bool:
        """Keep the member alive; True if it came just now and the assignment changed."""
        roster = self._rosters.setdefault(group.id, _Roster(group, command.order))
        if not roster.deadline_s:
            roster.order = command.order
        elif roster.order != command.order:
            raise GroupConflict(
                group.name,
                f"its members use order={roster.order!r}, this one asks for {command.order!r}; use the same for all",
            )
        is_new = command.member not in roster.deadline_s
        roster.deadline_s[command.member] = self._clock.monotonic() + self._life_s
        if is_new:
            self._members.set_online(group.id, command.member, True, self._clock.time_ms())
            self._reassign(roster, subject.partition_count)
        return is_new

    def answer(
        self, group: GroupRecord, subject: Subject, member: str, requests: tuple[KeyRequest, ...] = ()
    ) -> Assignment:
        roster = self._rosters[group.id]
        return Assignment(roster.generation, roster.assignment.get(member, ()), subject, self._life_s, requests)

    def announce(self, group: GroupRecord) -> None:
        """There is something for all members to hear. The assignment stays as it is."""
        roster = self._rosters.get(group.id)
        if roster is not None:
            roster.generation += 1

    def order(self, group: GroupRecord) -> str | None:
        """What its members keep to; None if there are none."""
        roster = self._rosters.get(group.id)
        return None if roster is None or not roster.deadline_s else roster.order

    def generation(self, group: GroupRecord) -> int:
        roster = self._rosters.get(group.id)
        return 0 if roster is None else roster.generation

    def leave(self, group: GroupRecord, subject: Subject, member: str) -> bool:
        roster = self._rosters.get(group.id)
        if roster is None or roster.deadline_s.pop(member, None) is None:
            return False
        self._members.set_online(group.id, member, False, self._clock.time_ms())
        self._reassign(roster, subject.partition_count)
        return True

    def silent(self, now_s: float) -> list[tuple[GroupRecord, str]]:
        """The members whose time is over; `leave` is to be called for each."""
        return [
            (roster.group, member)
            for roster in self._rosters.values()
            for member, deadline_s in roster.deadline_s.items()
            if deadline_s <= now_s
        ]

    def next_deadline_s(self) -> float | None:
        return min((d for roster in self._rosters.values() for d in roster.deadline_s.values()), default=None)

    def members(self, group: GroupRecord) -> tuple[str, ...]:
        roster = self._rosters.get(group.id)
        return () if roster is None else tuple(sorted(roster.deadline_s))

    def _reassign(self, roster: _Roster, partition_count: int) -> None:
        roster.assignment = assign_sticky(roster.deadline_s, partition_count, roster.assignment)
        roster.generation += 1
