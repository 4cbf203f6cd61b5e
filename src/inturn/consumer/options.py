"""The keyword options of a consumer, shared by `Consumer`, `Connection.consumer` and the decorators."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypedDict

from inturn.consumer.context import Hook
from inturn.model.offsets import Position
from inturn.model.settings import ConsumerSettings, GroupMode, LeaseSettings, Order


@dataclass(frozen=True, slots=True)
class Scope:
    """`until`: by partition, no message at or above this offset is handled. `keeps_only`: the consumer holds leases for
    other workers, and pulls nothing. `takes_over`: the consumer gets all partitions of the group."""

    until: Mapping[int, int] = field(default_factory=dict)
    keeps_only: bool = False
    takes_over: bool = False


EVERYTHING = Scope()


class ConsumerOptions(TypedDict, total=False):
    """Every option may be left out. `Consumer` documents the defaults."""

    order: Order | str | None
    mode: GroupMode | str
    offsets: str | os.PathLike[str] | None  # broadcast groups: the folder of the offsets
    start: str | int | datetime | Position
    settings: ConsumerSettings | None
    lease: LeaseSettings | None
    hooks: Sequence[Hook]
    name: str | None
    loop: asyncio.AbstractEventLoop | None
    retries_of: str | None  # the subject is the retry subject of this subject
    duty: Scope
