"""Messages of a shared group on their way to its retry or dead-letter subject, under their receipts. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inturn.consumer.moving import moved_batch
from inturn.consumer.receipts import Delivered
from inturn.model.commands import Move
from inturn.model.message import Message

MOVED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class ReceiptMove:
    """Messages that failed in one call, and where they go."""

    delivered: Delivered
    messages: Sequence[Message]
    to_subject: str
    to_partition: int

    @property
    def place(self) -> tuple[int, int, str, int]:
        """One Move takes what has all of this in common."""
        return self.delivered.index, self.delivered.epoch, self.to_subject, self.to_partition


class ReceiptMoves:
    """One Move at a time is under way, of as many messages as go from one place to another."""

    def __init__(self, subject: str, group: str, member: str) -> None:
        self._subject = subject
        self._group = group
        self._member = member
        self._waiting: deque[ReceiptMove] = deque()
        self._moving: list[ReceiptMove] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self._moving)

    def add(self, delivered: Delivered, messages: Sequence[Message], to_subject: str, to_partition: int) -> None:
        self._waiting.append(ReceiptMove(delivered, messages, to_subject, to_partition))

    def move(self) -> Move:
        """The one that is under way, or else the next. There must be one."""
        if not self._moving:
            place = self._waiting[0].place
            rest: deque[ReceiptMove] = deque()
            for one in self._waiting:
                is_next = one.place == place and len(self._moving) < MOVED_AT_ONCE
                (self._moving if is_next else rest).append(one)
            self._waiting = rest
        each = [(one.delivered, message) for one in self._moving for message in one.messages]
        attempts = {message.offset: delivered.attempts.get(message.offset, 1) for delivered, message in each}
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
        """They are stored where they go."""
        moved, self._moving = self._moving, []
        return moved

    def drop(self, offsets: Sequence[int]) -> list[ReceiptMove]:
        """The receipts of these are over; none given: of all. Returns what is not moved therefore."""
        over, moving, self._moving = set(offsets), self._moving, []
        dropped = []
        for one in moving:
            gone = [message for message in one.messages if not over or message.offset in over]
            kept = [message for message in one.messages if over and message.offset not in over]
            dropped += [replace(one, messages=gone)] if gone else []
            self._moving += [replace(one, messages=kept)] if kept else []
        return dropped
