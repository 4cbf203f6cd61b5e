"""What a node has to know of the others in its cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inturn.meta.membership import Holders
from inturn.model.subject import Subject
from inturn.node.derived_subjects import Forward


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
