"""A subject and what was decided when it was created."""

from __future__ import annotations

from dataclasses import dataclass

from inturn.model.route import Route
from inturn.model.settings import Keyless, Limits, Routing, Strategy


@dataclass(frozen=True, slots=True)
class Subject:
    """A stream of messages and its route: which partition each slot belongs to."""

    name: str
    route: Route
    routing: Routing = Routing.SLOTS
    strategy: Strategy = Strategy.STRICT
    limits: Limits = Limits()
    keyless: Keyless = Keyless.INDEPENDENT

    @property
    def partition_count(self) -> int:
        return len(self.route.partitions)
