"""Messages of a shared group that this consumer was given, and what it has to say of them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inturn.consumer.held import NEVER, HeldPartition
from inturn.model.commands import Acknowledge, PartitionReceipts, Receipt, Returned
from inturn.model.message import Message


@dataclass(slots=True, eq=False)
class Delivered(HeldPartition):
    """What came with one Fetch: as far as lanes and runs know, a partition that is held until `deadline_s`."""

    receipts: dict[int, int] = field(default_factory=dict)  # numbers, by offset

    def receipt(self, message: Message) -> Receipt:
        return Receipt(message.offset, self.receipts[message.offset])


class Receipts:
    """Gathers what is done and what is to be given out again, and says it until that is answered."""

    def __init__(self, subject: str, group: str, member: str) -> None:
        self._subject = subject
        self._group = group
        self._member = member
        self._done: dict[tuple[int, int], list[Receipt]] = {}  # by partition and epoch
        self._returned: dict[tuple[int, int], list[Returned]] = {}
        self._number = 0
        self._said: Acknowledge | None = None  # and not answered yet
        self._end_s = NEVER  # when the last receipt is over

    @property
    def has_news(self) -> bool:
        return bool(self._done or self._returned)

    @property
    def is_urgent(self) -> bool:
        """Somebody may be waiting for it."""
        return bool(self._returned)

    @property
    def is_unanswered(self) -> bool:
        return self._said is not None

    def done(self, delivered: Delivered, messages: Sequence[Message]) -> None:
        receipts = self._done.setdefault((delivered.index, delivered.epoch), [])
        receipts += [delivered.receipt(message) for message in messages]
        self._end_s = max(self._end_s, delivered.lease_ends_s)

    def give_back(
        self,
        delivered: Delivered,
        offset: int,
        delay_s: float = 0.0,
        error: str | None = None,
        key: bytes | None = None,
    ) -> None:
        """It is to be given out again, after this time. Without an error that is no failure."""
        returned = Returned(offset, delivered.receipts[offset], delay_s, error, key)
        self._returned.setdefault((delivered.index, delivered.epoch), []).append(returned)
        self._end_s = max(self._end_s, delivered.lease_ends_s)

    def say(self) -> Acknowledge:
        """What was said and not answered, word for word; or else all there is."""
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
        """It could not be said. When all receipts are over there is no use in it any more: the messages come again."""
        if now_s > self._end_s:
            self._said = None
