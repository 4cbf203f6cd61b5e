"""Commands of operators: create, grow and describe subjects; describe, reset and order groups; describe the node; list
broker groups and set the state of a broker group."""

from __future__ import annotations

import msgspec

from inturn.model.routing import Partition
from inturn.model.settings import Limits
from inturn.model.subject import Subject
from inturn.protocol.command import Command
from inturn.protocol.keys import KeyDescription


class CreateSubject(Command, frozen=True, gc=False):
    """Answered with the Subject. A repeat with equal settings is no error; with other settings AlreadyExists."""

    name: str
    partitions: int
    routing: str
    strategy: str
    limits: Limits
    keyless: str = "independent"
    # The partitions take them in turn. Empty: two available broker groups, or the only one.
    broker_groups: tuple[str, ...] = ()


class GrowSubject(Command, frozen=True, gc=False):
    """Give a subject that routes by slots more partitions. Answered with the Subject; a repeat is no error."""

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
    """The growth gate of a partition is closed for a group: this parent has older unfinished messages."""

    parent: int
    offset: int | None = None  # of the first such message, if known


class GroupPartition(msgspec.Struct, frozen=True, gc=False):
    partition: int
    committed: int
    end_offset: int
    owner: str | None
    epoch: int
    remaining_s: float | None  # until the lease expires
    finished_count: int = 0  # finished messages above `committed`
    done_per_s: float = 0.0  # over the last ten seconds
    blocking: KeyDescription | None = None  # the failing, blocked or parked key with the most waiting messages
    gate: ShutGate | None = None
    outstanding: int = 0  # shared groups: delivered and not acknowledged
    waiting: int = 0  # shared groups: returned, and waiting for redelivery
    redeliveries: int = 0  # shared groups: since the node was started

    @property
    def lag(self) -> int:
        return max(0, self.end_offset - self.committed - self.finished_count)


class MemberDescription(msgspec.Struct, frozen=True, gc=False):
    """The name contains the host and the process of the member."""

    name: str
    since_ms: int  # when the member joined
    assigned: tuple[int, ...]
    held: tuple[int, ...]  # partitions whose leases the member holds


class ClaimDescription(msgspec.Struct, frozen=True, gc=False):
    """A claim: a member works on some slots of a partition under the lease of the owner."""

    partition: int
    claimant: str
    slot_count: int
    done: int  # messages, as far as committed


class GroupDescription(msgspec.Struct, frozen=True, gc=False):
    """`order` and `assignment` come from the members; None without members. A broadcast group has no partitions here:
    its progress is with the members."""

    subject: str
    group: str
    members: tuple[str, ...]
    partitions: tuple[GroupPartition, ...]
    member_details: tuple[MemberDescription, ...] = ()  # of the same members, by name
    order: str | None = None
    assignment: str | None = None  # one of AssignmentStrategy
    claims: tuple[ClaimDescription, ...] = ()
    taken_over_by: str | None = None  # the member that has taken over all partitions
    mode: str = "exclusive"  # one of GroupMode
    set_order: str | None = None  # set by an operator; overrides the order of the members
    tags: str | None = None  # the tag expression of the members, empty for all tags; None without members

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.partitions)


class SetOrder(Command, frozen=True, gc=False):
    """Set the order of a group; overrides the order that the members ask for. "": the members decide again.

    A member follows a stricter order than asked for, and stops at a weaker order. Answered with Done, once durable.
    """

    subject: str
    group: str
    order: str  # one of Order, or empty


class ResetGroup(Command, frozen=True, gc=False):
    """Move the group to a position in all partitions. Refused with GroupConflict while a lease is live."""

    subject: str
    group: str
    position: str


class DescribeNode(Command, frozen=True, gc=False):
    """Readiness, clock, disk and unstable leases of the node."""


class ReadyPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a node: "work" (accepts new work), "logs", "state" (the database), at meta also "brokers". `why` states
    the trouble, also for a part that is ready."""

    name: str
    is_ready: bool
    why: str = ""


class DiskRoom(msgspec.Struct, frozen=True, gc=False):
    """Below the reserve, appends are refused."""

    free_bytes: int
    reserve_bytes: int


class RestlessLease(msgspec.Struct, frozen=True, gc=False):
    """An unstable lease: granted five times or more in the last ten minutes."""

    subject: str
    group: str
    partition: int
    grant_count: int


class NodeDescription(msgspec.Struct, frozen=True, gc=False):
    software: str
    now_ms: int  # on the node's clock
    up_s: float
    parts: tuple[ReadyPart, ...]
    disk: DiskRoom | None = None  # None: no disk, or no answer
    restless: tuple[RestlessLease, ...] = ()

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self.parts)


class BrokerGroupDescription(msgspec.Struct, frozen=True, gc=False):
    """`state` is set by operators, and independent of whether the broker is heard."""

    name: str
    state: str  # one of BrokerGroupState
    address: str = ""  # of the broker, for clients; empty: this node
    is_heard: bool = True
    partition_count: int = 0
    silent_s: float = 0.0  # since the last report of the broker

    @property
    def condition(self) -> str:
        """The state, or "dead" if the broker is not heard."""
        return self.state if self.is_heard else "dead"


class ListBrokerGroups(Command, frozen=True, gc=False):
    pass


class BrokerGroupList(msgspec.Struct, frozen=True, gc=False):
    groups: tuple[BrokerGroupDescription, ...]


class SetBrokerGroup(Command, frozen=True, gc=False):
    """Make a broker group read-only, unavailable, or available again. Answered with the description, once durable."""

    name: str
    state: str  # one of BrokerGroupState
