"""Shared groups: messages are given out one by one, against receipts.

Moving messages that failed to the group's retry or dead-letter subject.
"""

from __future__ import annotations

import msgspec

from inturn.model.batch import Batch
from inturn.protocol.command import Command
from inturn.protocol.consuming import Pulled


class Receipt(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One message, given out once: valid in the epoch it came with, until it is acknowledged, returned or over."""

    offset: int
    number: int  # counts up within an epoch


class Delivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message that was given out; `deliveries` counts how often, this one included."""

    offset: int
    number: int  # of the receipt
    deliveries: int = 1


class Fetch(Command, frozen=True, gc=False, array_like=True):
    """Be given messages of a partition of a shared group, `max_count` at the most; held back until there are any.

    They are this member's for `visibility_s`, counted from when they are given out. `ask` counts up per member and
    partition; `answered` is the highest whose answer arrived: what was given out for later ones did not, and is free.
    """

    subject: str
    group: str
    partition: int
    member: str
    ask: int
    answered: int
    max_count: int
    max_bytes: int
    visibility_s: float
    wait_s: float = 0.0


class Fetched(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`pulled` holds the messages of `deliveries`, and maybe others beside them, which are not to be handled."""

    epoch: int  # of their receipts; rises whenever the node has forgotten what it gave out
    deliveries: tuple[Delivery, ...]
    pulled: Pulled
    waited_s: float = 0.0  # between when the ask was heard and when they were given out


class Returned(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message that is to be given out again, after a while; with an error it has failed, and that is counted."""

    offset: int
    number: int  # of the receipt
    delay_s: float = 0.0
    error: str | None = None
    key: bytes | None = None


class PartitionReceipts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What became of messages that were given out."""

    partition: int
    epoch: int
    done: tuple[Receipt, ...] = ()
    returned: tuple[Returned, ...] = ()


class Acknowledge(Command, frozen=True, gc=False):
    """Messages of a shared group are done, or are to be given out again. Stored together, or nothing.

    `number` counts up per member: the same again is answered as it was; older ones, to whose answers nobody listens any
    more, change nothing. Receipts that are over are refused, each alone.
    """

    subject: str
    group: str
    member: str
    number: int
    receipts: tuple[PartitionReceipts, ...]


class Acknowledged(msgspec.Struct, frozen=True, gc=False):
    """All was taken but these, (partition, offset), whose receipts are over."""

    refused: tuple[tuple[int, int], ...] = ()


class OpenRetry(Command, frozen=True, gc=False):
    """Make the group's retry subject, with one partition per delay, if it is not there. Answered with the Subject."""

    subject: str
    group: str
    levels: int


class OpenDeadLetters(Command, frozen=True, gc=False):
    """Make the group's dead-letter subject, with one partition, if it is not there. Answered with the Subject."""

    subject: str
    group: str


class Move(Command, frozen=True, gc=False):
    """Store messages that failed in the group's retry or dead-letter subject, under the lease of their partition.

    Answered when they are durable: only then are they done where they came from. A repeated Move stores them again.
    In a shared group it is done under the receipts of the messages, all of them or none (ReceiptExpired names those
    that are over); they are to be acknowledged afterwards.
    """

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    to_subject: str
    to_partition: int
    batch: Batch
    receipts: tuple[Receipt, ...] = ()  # shared groups
