"""Membership: who is in a group, and who should consume what."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command
from inturn.model.commands.keys import KeyRequest
from inturn.model.commands.trials import Trial
from inturn.model.subject import Subject


class Heartbeat(Command, frozen=True, gc=False):
    """A member is alive. Answered at once if the assignment is newer than `generation`, else after `wait_s`.

    The first heartbeat joins the group and creates it if needed, starting at `start`.
    """

    subject: str
    group: str
    member: str
    order: str
    start: str
    generation: int = 0
    wait_s: float = 0.0
    assignment: str = "sticky"  # one of AssignmentStrategy; as with `order`, the members of a group agree
    takes_over: bool = False  # all partitions are its own as long as it is there; one member at most (GroupConflict)
    mode: str = "exclusive"  # one of GroupMode; the group has that of its first member for good (else GroupConflict)
    tags: str = ""  # an expression, see `inturn.model.tags`; as with `order`, the members of a group agree


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """Who should consume what. Advice: only a lease gives the right to."""

    generation: int
    partitions: tuple[int, ...]
    subject: Subject
    authorised_s: float  # counted from before the heartbeat was sent; then the member stops by itself
    requests: tuple[KeyRequest, ...] = ()  # all that wait in the group; whoever holds the partition acts on them
    order: str = ""  # what all members of the group keep to: what they asked for, unless somebody has set another
    assignment: str = ""  # the assignment strategy of the group
    trials: tuple[Trial, ...] = ()  # for this member only: each until it is reported, or given up


class Leave(Command, frozen=True, gc=False):
    """The member goes. Send it after the last lease was released."""

    subject: str
    group: str
    member: str
