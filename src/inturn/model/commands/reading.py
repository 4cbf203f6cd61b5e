"""Reading without a lease or a commit."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command


class Read(Command, frozen=True, gc=False):
    """Read without a lease or a commit."""

    subject: str
    partition: int
    offset: int
    max_bytes: int
    wait_s: float = 0.0
    slots: bytes = b""  # a SlotSet: messages of other slots are left out (see `inturn.model.batch.chosen`)
    tags: str = ""  # an expression: messages with other tags are left out
    group: str = ""  # that of the member that reads, if one does: then its right to consume counts


class ResolvePosition(Command, frozen=True, gc=False):
    """The offset of a start position in every partition of the subject."""

    subject: str
    position: str
    group: str = ""  # as in Read


class Offsets(msgspec.Struct, frozen=True, gc=False):
    offsets: tuple[int, ...]
