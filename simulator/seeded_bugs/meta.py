"""Bugs of meta: the assignment of partitions."""

from __future__ import annotations

from typing import Any

import inturn.meta.membership
from inturn.meta.assignment import assign
from inturn.meta.membership import Membership
from inturn.model.settings import AssignmentStrategy
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_instead_of = BUGS.instead_of


@_instead_of(Membership, "next_deadline_s")
def silent_member_keeps_its_share(self: Membership) -> float | None:
    """Vanished members are not noticed, and their partitions wait."""
    return None


@_instead_of(inturn.meta.membership, "assign")
def last_partition_belongs_to_nobody(
    strategy: AssignmentStrategy, members: Any, partition_count: int, previous: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """An uneven assignment leaves a partition out."""
    names = list(members)
    left_out = bool(names) and partition_count % len(names) != 0
    return assign(strategy, names, partition_count - left_out, previous)
