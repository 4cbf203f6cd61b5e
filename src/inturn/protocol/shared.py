"""Commands of shared groups: deliveries and receipts; and moves of failed messages to derived subjects."""

from __future__ import annotations

import msgspec

from inturn.model.batch import Batch
from inturn.protocol.command import Command
from inturn.protocol.consuming import Pulled


class Receipt(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A delivery of a message: valid in the epoch until the message is acknowledged or returned, or time is over."""

    offset: int
    number: int  # rises within an epoch


class Delivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A delivered message; `deliveries` counts all deliveries of the message, this delivery included."""

    offset: int
    number: int  # of the receipt
    deliveries: int = 1


class Fetch(Command, frozen=True, gc=False, array_like=True):
    """Fetch at most `max_count` messages of a partition of a shared group. Held back until a message is available.

    The messages belong to the member for `visibility_s` from their delivery on. `ask` rises per member and partition;
    `answered` is the highest `ask` whose answer arrived: messages delivered for a higher `ask` are free again.
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
    """`pulled` holds the messages of `deliveries`, and may hold further messages, which are not to be handled."""

    epoch: int  # of the receipts; rises when the node has lost its record of deliveries
    deliveries: tuple[Delivery, ...]
    pulled: Pulled
    waited_s: float = 0.0  # from the arrival of the Fetch until the delivery


class Returned(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message for redelivery after `delay_s`. With an error, the message has failed, and the failure is counted."""

    offset: int
    number: int  # of the receipt
    delay_s: float = 0.0
    error: str | None = None
    key: bytes | None = None


class PartitionReceipts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The results of delivered messages of a partition."""

    partition: int
    epoch: int
    done: tuple[Receipt, ...] = ()
    returned: tuple[Returned, ...] = ()


class Acknowledge(Command, frozen=True, gc=False):
    """Messages of a shared group are finished, or return for redelivery. Stored as a whole, or not at all.

    `number` rises per member: a repeat is answered as before; a lower number has no effect, since the member has
    stopped waiting for the answer. Expired receipts are refused one by one.
    """

    subject: str
    group: str
    member: str
    number: int
    receipts: tuple[PartitionReceipts, ...]


class Acknowledged(msgspec.Struct, frozen=True, gc=False):
    """All receipts were accepted but `refused`, as (partition, offset): those receipts are over."""

    refused: tuple[tuple[int, int], ...] = ()


class OpenRetry(Command, frozen=True, gc=False):
    """Create the group's retry subject, with a partition per delay, unless present. Answered with the Subject."""

    subject: str
    group: str
    levels: int


class OpenDeadLetters(Command, frozen=True, gc=False):
    """Create the group's dead-letter subject, with one partition, unless present. Answered with the Subject."""

    subject: str
    group: str


class Move(Command, frozen=True, gc=False):
    """Store failed messages in the group's retry or dead-letter subject, under the lease of the partition.

    Answered when the messages are durable: only then are the messages finished in the partition. A repeated Move stores
    the messages again. In a shared group, the receipts of all messages have to be valid (otherwise ReceiptExpired names
    the expired receipts); the member acknowledges the messages afterwards.
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
