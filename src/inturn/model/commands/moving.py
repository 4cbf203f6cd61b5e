"""Moving messages that failed to the group's retry or dead-letter subject."""

from __future__ import annotations

from inturn.model.batch import Batch
from inturn.model.commands.command import Command
from inturn.model.commands.sharing import Receipt


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
