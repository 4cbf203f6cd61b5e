"""Reading without a group: no lease, no commit, no stored position."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

from inturn.model.batch import decode, is_intact
from inturn.model.errors import InvalidInput, LogDamaged, NotFound
from inturn.model.message import Message, Origin, tag_filter, tags_text
from inturn.model.offsets import Position, parse_position, position_text
from inturn.model.settings import MIB
from inturn.model.subject import Subject
from inturn.protocol.commands import FindSubject, Node, Offsets, Pulled, Read, ResolvePosition
from inturn.protocol.request import ask

READ_BYTES = 1 * MIB


class Reader:
    """Iterates over stored messages, partition by partition in turns; every partition in order.

    Ends at the end of the log; `read` waits for more messages, and continues at the last position. If the subject grows
    meanwhile, the new partitions come after the end of the other partitions. With `tags`, an expression such as "paid
    || shipped", the node leaves out messages that have none of the tags.
    """

    def __init__(
        self, node: Node, subject: str, start: str | int | datetime | Position = "first", tags: str | None = None
    ) -> None:
        self._node = node
        self._tags = tags_text(tags)
        self._filter = tag_filter(self._tags)
        self.subject = ask(node, FindSubject(subject), Subject)
        text = position_text(parse_position(start))
        self.offsets = list(ask(node, ResolvePosition(subject, text), Offsets).offsets)

    def __iter__(self) -> Iterator[Message]:
        while True:
            found = False
            for index in range(len(self.offsets)):
                for message in self.read(index):
                    found = True
                    yield message
            if not found and not self.refresh():
                return

    def refresh(self) -> bool:
        """Check whether the subject has grown: new partitions are read from the first message on."""
        self.subject = ask(self._node, FindSubject(self.subject.name), Subject)
        more = self.subject.partition_count - len(self.offsets)
        self.offsets += [0] * more
        return more > 0

    def read(self, partition: int, wait_s: float = 0.0) -> list[Message]:
        """The next messages of a partition, waiting up to `wait_s`; empty if there are none."""
        if not isinstance(partition, int) or not 0 <= partition < len(self.offsets):
            last = len(self.offsets) - 1
            raise NotFound("partition", f"{self.subject.name}/{partition}", f"the subject has partitions 0 to {last}")
        until_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            messages, is_end = self._read(partition, left_s)
            # If tags filtered out all messages, more messages may follow.
            if messages or (is_end and (self._filter is None or time.monotonic() >= until_s)):
                return messages

    def _read(self, partition: int, wait_s: float) -> tuple[list[Message], bool]:
        """The next messages, and whether the end of the log is reached."""
        offset = self.offsets[partition]
        read = Read(self.subject.name, partition, offset, READ_BYTES, wait_s, tags=self._tags)
        answer = ask(self._node, read, Pulled)
        origin = Origin(self.subject.name, partition)
        messages: list[Message] = []
        for batch in answer.batches:
            if not is_intact(batch):
                if messages:
                    return messages, False
                raise LogDamaged(f"{origin.subject}/{partition}", batch.header.base_offset, "a checksum does not match")
            try:
                decoded = decode(batch, origin)
            except InvalidInput as error:
                if messages:
                    break
                raise LogDamaged(f"{origin.subject}/{partition}", batch.header.base_offset, str(error)) from error
            messages += [message for message in decoded if self._is_wanted(message, offset)]
            self.offsets[partition] = batch.header.next_offset
        if not answer.batches or self._filter is not None:
            self.offsets[partition] = answer.next_offset
        return messages, self.offsets[partition] >= answer.end_offset or self._filter is None

    def _is_wanted(self, message: Message, offset: int) -> bool:
        return message.offset >= offset and (self._filter is None or self._filter.wants(message.tags))
