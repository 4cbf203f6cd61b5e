"""How a node is."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command


class DescribeNode(Command, frozen=True, gc=False):
    """How the node itself is: whether it is ready, its clock, its disk, and leases that do not come to rest."""


class ReadyPart(msgspec.Struct, frozen=True, gc=False):
    """One part of a node: "work" (it takes new work), "logs", "state" (the database), of meta "brokers". `why` says
    what is the matter, also where that does not keep the part from being ready."""

    name: str
    is_ready: bool
    why: str = ""


class DiskRoom(msgspec.Struct, frozen=True, gc=False):
    """Below the reserve, appends are refused."""

    free_bytes: int
    reserve_bytes: int


class RestlessLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that was granted again and again in the last ten minutes."""

    subject: str
    group: str
    partition: int
    grant_count: int


class NodeDescription(msgspec.Struct, frozen=True, gc=False):
    software: str
    now_ms: int  # on the node's clock
    up_s: float
    parts: tuple[ReadyPart, ...]
    disk: DiskRoom | None = None  # None: there is none to speak of, or it cannot be asked
    restless: tuple[RestlessLease, ...] = ()

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self.parts)
