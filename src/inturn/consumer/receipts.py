"""Receipts of a shared group: the delivered messages, the acknowledgements to send, and the moves to the retry or
dead-letter subject. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inturn.consumer.outcome import moved_batch
from inturn.consumer.partition_lease import NEVER, Stage
from inturn.consumer.partition_state import PartitionState
from inturn.model.message import Message
from inturn.protocol.commands import Acknowledge, Move, PartitionReceipts, Receipt, Returned


class DeliveredBatch(PartitionState):
    """The messages of one Fetch. Lanes and runs see a partition whose lease ends when the receipts expire."""

    __slots__ = ("receipts",)

    def __init__(
        self, index: int, subject: str, group: str, member: str, epoch: int, ends_s: float, receipts: dict[int, int]
    ) -> None:
        """`receipts`: numbers, by offset."""
        super().__init__(index, subject, group, member, stage=Stage.ACTIVE)
        self.lease.epoch = epoch
        self.lease.deadline_s = self.lease.ends_s = ends_s
        self.receipts = receipts

    def receipt(self, message: Message) -> Receipt:
        return Receipt(message.offset, self.receipts[message.offset])


class Receipts:
    """Collects finished and returned messages, and repeats the command until the node answers."""

    def __init__(self, subject: str, group: str, member: str) -> None:
        self._subject = subject
        self._group = group
        self._member = member
        self._done: dict[tuple[int, int], list[Receipt]] = {}  # by partition and epoch
        self._returned: dict[tuple[int, int], list[Returned]] = {}
        self._number = 0
        self._said: Acknowledge | None = None  # sent and not answered yet
        self._end_s = NEVER  # when the last receipt expires

    @property
    def has_news(self) -> bool:
        return bool(self._done or self._returned)

    @property
    def is_urgent(self) -> bool:
        """Other members may wait for the returned messages."""
        return bool(self._returned)

    @property
    def is_unanswered(self) -> bool:
        return self._said is not None

    def done(self, delivered: DeliveredBatch, messages: Sequence[Message]) -> None:
        receipts = self._done.setdefault((delivered.index, delivered.lease.epoch), [])
        receipts += [delivered.receipt(message) for message in messages]
        self._end_s = max(self._end_s, delivered.lease.ends_s)

    def give_back(
        self,
        delivered: DeliveredBatch,
        offset: int,
        delay_s: float = 0.0,
        error: str | None = None,
        key: bytes | None = None,
    ) -> None:
        """Return a message, to be delivered again after `delay_s`. A return without an error is no failure."""
        returned = Returned(offset, delivered.receipts[offset], delay_s, error, key)
        self._returned.setdefault((delivered.index, delivered.lease.epoch), []).append(returned)
        self._end_s = max(self._end_s, delivered.lease.ends_s)

    def say(self) -> Acknowledge:
        """The command that is not answered yet, unchanged; or else a command with everything collected."""
        if self._said is None:
            receipts = tuple(
                PartitionReceipts(*place, tuple(self._done.get(place, ())), tuple(self._returned.get(place, ())))
                for place in sorted(self._done.keys() | self._returned.keys())
            )
            self._done, self._returned = {}, {}
            self._number += 1
            self._said = Acknowledge(self._subject, self._group, self._member, self._number, receipts)
        return self._said

    def answered(self) -> None:
        self._said = None

    def failed(self, now_s: float) -> None:
        """The command failed. Once all receipts have expired, the command is dropped: messages are delivered again."""
        if now_s > self._end_s:
            self._said = None


MOVED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class ReceiptMove:
    """Messages that failed in one call, and their destination."""

    delivered: DeliveredBatch
    messages: Sequence[Message]
    to_subject: str
    to_partition: int

    @property
    def place(self) -> tuple[int, int, str, int]:
        """Messages with the same place fit into one Move."""
        return self.delivered.index, self.delivered.lease.epoch, self.to_subject, self.to_partition


class ReceiptMoves:
    """At most one Move is in flight, with as many messages of the same place as fit."""

    def __init__(self, subject: str, group: str, member: str) -> None:
        self._subject = subject
        self._group = group
        self._member = member
        self._waiting: deque[ReceiptMove] = deque()
        self._moving: list[ReceiptMove] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self._moving)

    def add(self, delivered: DeliveredBatch, messages: Sequence[Message], to_subject: str, to_partition: int) -> None:
        self._waiting.append(ReceiptMove(delivered, messages, to_subject, to_partition))

    def move(self) -> Move:
        """The Move in flight, or else the next Move. There must be messages to move."""
        if not self._moving:
            place = self._waiting[0].place
            rest: deque[ReceiptMove] = deque()
            for one in self._waiting:
                is_next = one.place == place and len(self._moving) < MOVED_AT_ONCE
                (self._moving if is_next else rest).append(one)
            self._waiting = rest
        each = [(one.delivered, message) for one in self._moving for message in one.messages]
        attempts = {message.offset: delivered.progress.attempts.get(message.offset, 1) for delivered, message in each}
        index, epoch, to_subject, to_partition = self._moving[0].place
        return Move(
            self._subject,
            self._group,
            index,
            self._member,
            epoch,
            to_subject,
            to_partition,
            moved_batch([message for _, message in each], [attempts.get(message.offset, 1) for _, message in each]),
            tuple(delivered.receipt(message) for delivered, message in each),
        )

    def moved(self) -> list[ReceiptMove]:
        """The messages in flight are stored at the destination."""
        moved, self._moving = self._moving, []
        return moved

    def drop(self, offsets: Sequence[int]) -> list[ReceiptMove]:
        """The receipts of these offsets have expired; no offsets: all receipts. Returns the messages that are not
        moved."""
        over, moving, self._moving = set(offsets), self._moving, []
        dropped = []
        for one in moving:
            gone = [message for message in one.messages if not over or message.offset in over]
            kept = [message for message in one.messages if over and message.offset not in over]
            dropped += [replace(one, messages=gone)] if gone else []
            self._moving += [replace(one, messages=kept)] if kept else []
        return dropped
