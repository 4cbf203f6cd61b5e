"""Subjects: making them, growing them, looking at them.

Groups: looking at them, and steering them as a whole.

How a node is.

Broker groups: looking at them, and taking them out of use.
"""

from __future__ import annotations

import msgspec

from inturn.model.routing import Partition
from inturn.model.settings import Limits
from inturn.model.subject import Subject
from inturn.protocol.command import Command
from inturn.protocol.keys import KeyDescription


class CreateSubject(Command, frozen=True, gc=False):
    """Answered with the Subject. The same again is no error; other settings are (AlreadyExists)."""

    name: str
    partitions: int
    routing: str
    strategy: str
    limits: Limits
    keyless: str = "independent"
    # Of the partitions, in turns; none given: over two that are available, or one if there is one.
    broker_groups: tuple[str, ...] = ()


class GrowSubject(Command, frozen=True, gc=False):
    """Give a subject that routes by slots more partitions. Answered with the Subject; the same again is no error."""

    name: str
    partitions: int


class FindSubject(Command, frozen=True, gc=False):
    name: str


class ListSubjects(Command, frozen=True, gc=False):
    pass


class SubjectList(msgspec.Struct, frozen=True, gc=False):
    subjects: tuple[Subject, ...]


class DescribeSubject(Command, frozen=True, gc=False):
    name: str


class PartitionDescription(msgspec.Struct, frozen=True, gc=False):
    index: int
    partition: Partition
    start_offset: int
    end_offset: int
    size_bytes: int
    state: str  # "ok", "stopped", "damaged"
    appended_per_s: float = 0.0  # messages, over the last ten seconds


class SubjectDescription(msgspec.Struct, frozen=True, gc=False):
    subject: Subject
    partitions: tuple[PartitionDescription, ...]


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


class DescribeNode(Command, frozen=True, gc=False):
    """How the node itself is: whether it is ready, its clock, its disk, and leases that do not come to rest."""


class ReadyPart(msgspec.Struct, frozen=True, gc=False):
    """One part of a node: "work" (it takes new work), "logs", "state" (the database), of meta "brokers". `why` says
    what is the matter, also where that does not keep the part from being ready."""

    name: str
    is_ready: bool
    why: str = ""


class DiskRoom(msgspec.Struct, frozen=True, gc=False):
    """Below the reserve, appends are refused."""

    free_bytes: int
    reserve_bytes: int


class RestlessLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that was granted again and again in the last ten minutes."""

    subject: str
    group: str
    partition: int
    grant_count: int


class NodeDescription(msgspec.Struct, frozen=True, gc=False):
    software: str
    now_ms: int  # on the node's clock
    up_s: float
    parts: tuple[ReadyPart, ...]
    disk: DiskRoom | None = None  # None: there is none to speak of, or it cannot be asked
    restless: tuple[RestlessLease, ...] = ()

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self.parts)


class BrokerGroupDescription(msgspec.Struct, frozen=True, gc=False):
    """`state` is what an operator has set; whether its broker is heard is another thing."""

    name: str
    state: str  # one of BrokerGroupState
    address: str = ""  # where clients reach its broker; empty: it is this node
    is_heard: bool = True
    partition_count: int = 0
    silent_s: float = 0.0  # since its broker was last heard

    @property
    def condition(self) -> str:
        """In one word: the state, or "dead" if its broker is not heard."""
        return self.state if self.is_heard else "dead"


class ListBrokerGroups(Command, frozen=True, gc=False):
    pass


class BrokerGroupList(msgspec.Struct, frozen=True, gc=False):
    groups: tuple[BrokerGroupDescription, ...]


class SetBrokerGroup(Command, frozen=True, gc=False):
    """Make a broker group read-only, unavailable, or available again. Answered with its description, once durable."""

    name: str
    state: str  # one of BrokerGroupState
