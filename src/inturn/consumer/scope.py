"""The scope of a consumer: the part of a group's work that the consumer does, if not all of it for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scope:
    """`until`: by partition, no message at or above this offset is handled. `keeps_only`: the consumer holds leases for
    other workers, and pulls nothing. `takes_over`: the consumer gets all partitions of the group."""

    until: Mapping[int, int] = field(default_factory=dict)
    keeps_only: bool = False
    takes_over: bool = False


EVERYTHING = Scope()
