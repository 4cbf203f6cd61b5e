"""What a consumer is there for, if it is not to handle all that comes for as long as it lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scope:
    """`until` bounds what is handled, by partition: nothing at or above that offset. `keeps_only`: it holds leases for
    others to work under, and pulls nothing. `takes_over`: all partitions of the group are for it."""

    until: Mapping[int, int] = field(default_factory=dict)
    keeps_only: bool = False
    takes_over: bool = False


EVERYTHING = Scope()
