"""Parking lots: the messages of keys that are set aside."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command


class Lot(msgspec.Struct, frozen=True, gc=False):
    """A key whose messages are parked."""

    key: bytes
    state: str  # one of LotState


class ParkedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message in the parking lot of its key, with all there is of it: the log may forget it meanwhile."""

    partition: int
    offset: int
    content: bytes  # an Outgoing, as msgpack
    position: int = 0  # counts up in the lot; given by the node


class LotChange(msgspec.Struct, frozen=True, gc=False):
    """What becomes of the parking lot of one key."""

    key: bytes
    state: str  # one of LotState, from now on
    reason: str = ""
    added: tuple[ParkedMessage, ...] = ()  # to its end; one that is there already stays where it is
    removed: tuple[tuple[int, int], ...] = ()  # handled or skipped: (partition, offset)


class ReadLot(Command, frozen=True, gc=False):
    """Read the parking lot of a key, under the lease of the partition, behind a position."""

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    key: bytes
    after: int
    max_bytes: int


class LotContent(msgspec.Struct, frozen=True, gc=False):
    messages: tuple[ParkedMessage, ...]
    is_end: bool  # nothing is behind the last of them
