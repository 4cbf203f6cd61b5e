"""Commands of producers: open a producer, append batches; and reads without a lease or commits."""

from __future__ import annotations

import msgspec

from inturn.model.batch import Batch
from inturn.protocol.command import Command


class OpenProducer(Command, frozen=True, gc=False):
    """Ask for a producer id. A name keeps its id, and gets a higher epoch: the former producer of the name is fenced.

    With the nonce of the last OpenProducer of the name, the answer is repeated: a repeated or late copy fences no
    producer.
    """

    name: str | None = None
    nonce: str | None = None


class ProducerOpened(msgspec.Struct, frozen=True, gc=False):
    producer_id: int
    epoch: int


class Append(Command, frozen=True, gc=False, array_like=True):
    """Store a batch. Answered when the batch is durable according to the log's flush setting.

    A batch with a stored sequence is answered with the stored offset again. A sequence after a gap is refused,
    unless `gap` is set: the producer has given up the missing messages.
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
    slots: bytes = b""  # a SlotSet: messages of other slots are filtered out (see `inturn.model.batch.chosen`)
    tags: str = ""  # an expression: messages with other tags are filtered out
    group: str = ""  # of a reading member: its permission to consume is checked


class ResolvePosition(Command, frozen=True, gc=False):
    """Resolve a start position to an offset in every partition of the subject."""

    subject: str
    position: str
    group: str = ""  # as in Read


class Offsets(msgspec.Struct, frozen=True, gc=False):
    offsets: tuple[int, ...]
