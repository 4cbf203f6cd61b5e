"""Producing: opening a producer, and storing batches.

Reading without a lease or a commit.
"""

from __future__ import annotations

import msgspec

from inturn.model.batch import Batch
from inturn.protocol.command import Command


class OpenProducer(Command, frozen=True, gc=False):
    """Ask for a producer id. A name gets its id back with a higher epoch, which fences whoever had it before.

    With the nonce of whoever opened it last, it is answered as it was then: a repeated or late copy fences nobody.
    """

    name: str | None = None
    nonce: str | None = None


class ProducerOpened(msgspec.Struct, frozen=True, gc=False):
    producer_id: int
    epoch: int


class Append(Command, frozen=True, gc=False, array_like=True):
    """Store a batch. Answered when it is durable as the log's flush setting says.

    A batch whose sequence was stored already is answered with its first offset again. A sequence that leaves
    one out is refused, unless `gap` says that the producer gave up what is missing.
    """

    subject: str
    partition: int
    batch: Batch
    gap: bool = False


class Appended(msgspec.Struct, frozen=True, gc=False, array_like=True):
    base_offset: int


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
