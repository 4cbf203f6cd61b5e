"""Groups: looking at them, and steering them as a whole."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command
from inturn.model.commands.keys import KeyDescription


class ListGroups(Command, frozen=True, gc=False):
    pass


class GroupName(msgspec.Struct, frozen=True, gc=False):
    subject: str
    group: str


class GroupList(msgspec.Struct, frozen=True, gc=False):
    groups: tuple[GroupName, ...]


class DescribeGroup(Command, frozen=True, gc=False):
    subject: str
    group: str


class ShutGate(msgspec.Struct, frozen=True, gc=False):
    """A partition is not open to a group yet: older messages of its keys are unfinished in this parent."""

    parent: int
    offset: int | None = None  # of the first of them, if known


class GroupPartition(msgspec.Struct, frozen=True, gc=False):
    partition: int
    committed: int
    end_offset: int
    owner: str | None
    epoch: int
    remaining_s: float | None  # until the lease ends unless it is renewed
    finished_count: int = 0  # above `committed`, done all the same
    done_per_s: float = 0.0  # over the last ten seconds
    blocking: KeyDescription | None = None  # of the keys that fail, are blocked or parked: most waits behind it
    gate: ShutGate | None = None
    outstanding: int = 0  # shared groups: given out and not acknowledged
    waiting: int = 0  # shared groups: came back, and wait to be given out again
    redeliveries: int = 0  # shared groups: messages given out again since the node was started

    @property
    def lag(self) -> int:
        return max(0, self.end_offset - self.committed - self.finished_count)


class MemberDescription(msgspec.Struct, frozen=True, gc=False):
    """Its name says on which host and in which process it is."""

    name: str
    since_ms: int  # when it came
    assigned: tuple[int, ...]
    held: tuple[int, ...]  # partitions whose leases it has


class ClaimDescription(msgspec.Struct, frozen=True, gc=False):
    """Who works on some slots of a partition under the lease of its owner."""

    partition: int
    claimant: str
    slot_count: int
    done: int  # messages, as far as committed


class GroupDescription(msgspec.Struct, frozen=True, gc=False):
    """`order` and `assignment` are what its members agree on; None if there are none. What a broadcast group has done
    is known to its members only: it has no partitions here."""

    subject: str
    group: str
    members: tuple[str, ...]
    partitions: tuple[GroupPartition, ...]
    member_details: tuple[MemberDescription, ...] = ()  # of the same members, by name
    order: str | None = None
    assignment: str | None = None  # one of AssignmentStrategy
    claims: tuple[ClaimDescription, ...] = ()
    taken_over_by: str | None = None  # the member that all partitions are for
    mode: str = "exclusive"  # one of GroupMode
    set_order: str | None = None  # what somebody decided, whatever the members ask for
    tags: str | None = None  # the expression that its members agree on, empty for all; None if there are none

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.partitions)


class SetOrder(Command, frozen=True, gc=False):
    """Decide which order the members of a group keep to, whatever they ask for; "" leaves it to them again.

    They follow a stricter one than they asked for, and stop at a weaker one. Answered with Done, once it is durable.
    """

    subject: str
    group: str
    order: str  # one of Order, or nothing


class ResetGroup(Command, frozen=True, gc=False):
    """Move the group to a position in all partitions. Refused with GroupConflict while a lease is live."""

    subject: str
    group: str
    position: str
