"""The keyword options of a consumer, shared by `Consumer`, `Connection.consumer` and the decorators."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict

from inturn.consumer.context import Hook
from inturn.consumer.scope import Scope
from inturn.model.offsets import Position
from inturn.model.settings import ConsumerSettings, GroupMode, LeaseSettings, Order


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
