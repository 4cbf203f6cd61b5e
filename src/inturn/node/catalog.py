"""The subjects and groups that a node knows, by their names.

What a node has to know of the others in its cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from inturn.meta.membership import Holders
from inturn.model.errors import GroupConflict, NotFound
from inturn.model.settings import GroupMode
from inturn.model.subject import Subject, check_name
from inturn.protocol.commands import Append, Reply
from inturn.store.groups import GroupRecord


class Known:
    """Changed under the node's lock. Nothing goes away again, so a single look needs no lock."""

    def __init__(self) -> None:
        self.subjects: dict[str, Subject] = {}
        self.groups: dict[tuple[str, str], GroupRecord] = {}  # by subject and name

    def subject(self, name: str) -> Subject:
        subject = self.subjects.get(check_name("subject", name, reserved=True))
        if subject is None:
            raise NotFound("subject", name, "create it first: create_subject(), or `inturn subject create`")
        return subject

    def group(self, subject: str, name: str) -> GroupRecord:
        group = self.groups.get((check_name("subject", subject, reserved=True), check_name("group", name)))
        if group is None:
            raise NotFound("group", name, f"no consumer has joined it on subject {subject!r} yet")
        return group


def check_mode(group: GroupRecord, mode: GroupMode) -> None:
    """GroupConflict if the group was made with another mode."""
    if group.mode is not mode:
        raise GroupConflict(
            group.name,
            f"it was made with mode={group.mode.value!r}, this asks for {mode.value!r}; use the same, or another group",
        )


# Stores a batch at the broker of another broker group.
Forward: TypeAlias = Callable[[str, Append, Reply], None]


def by_route(subject: Subject) -> int:
    return subject.route.version


@dataclass(frozen=True, slots=True)
class Neighbours:
    """`holders` tells meta who holds leases at the brokers. `forward` has a batch stored by another broker.
    `sealed_for` tells the route version before which logs of a subject take no appends: meta may be about to grow it.
    Without a cluster there are no others."""

    holders: Holders | None = None
    forward: Forward | None = None
    sealed_for: Callable[[Subject], int] = by_route


NOBODY_ELSE = Neighbours()
