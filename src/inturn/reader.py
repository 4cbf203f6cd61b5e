"""Reading without a group: no lease, no commit, nothing remembered."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from inturn.model.batch import decode, is_intact
from inturn.model.commands import FindSubject, Node, Offsets, Pulled, Read, ResolvePosition
from inturn.model.errors import InvalidInput, LogDamaged, NotFound
from inturn.model.message import Message, Origin
from inturn.model.position import Position, parse_position, position_text
from inturn.model.request import ask
from inturn.model.settings import MIB
from inturn.model.subject import Subject

READ_BYTES = 1 * MIB


class Reader:
    """Iterates over what is stored, partition by partition in turns; each partition in its order.

    Ends at the end of the log; `read` waits for more, and goes on where it was.
    """

    def __init__(self, node: Node, subject: str, start: str | int | datetime | Position = "first") -> None:
        self._node = node
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
            if not found:
                return

    def read(self, partition: int, wait_s: float = 0.0) -> list[Message]:
        """What comes next in a partition, waiting for it so long; empty if there is nothing."""
        if not isinstance(partition, int) or not 0 <= partition < len(self.offsets):
            last = len(self.offsets) - 1
            raise NotFound("partition", f"{self.subject.name}/{partition}", f"the subject has partitions 0 to {last}")
        offset = self.offsets[partition]
        answer = ask(self._node, Read(self.subject.name, partition, offset, READ_BYTES, wait_s), Pulled)
        origin = Origin(self.subject.name, partition)
        messages: list[Message] = []
        for batch in answer.batches:
            if not is_intact(batch):
                if messages:
                    break
                raise LogDamaged(f"{origin.subject}/{partition}", batch.header.base_offset, "a checksum does not fit")
            try:
                decoded = decode(batch, origin)
            except InvalidInput as error:
                if messages:
                    break
                raise LogDamaged(f"{origin.subject}/{partition}", batch.header.base_offset, str(error)) from error
            messages += [message for message in decoded if message.offset >= offset]
            self.offsets[partition] = batch.header.next_offset
        if not answer.batches:
            self.offsets[partition] = answer.next_offset
        return messages
