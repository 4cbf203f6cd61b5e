"""Waiting until something new is stored in any partition of a subject."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from inturn.model.commands import Answer, Node, Pulled, Read
from inturn.model.errors import InturnError


class Arrivals:
    """Long polls, one per partition; what is still held back at the node is not asked for again."""

    def __init__(self, node: Node, subject: str) -> None:
        self._node = node
        self._subject = subject
        self._news = threading.Condition()
        self._asked: dict[int, int] = {}  # partition → offset, of the polls that are not answered
        self._ends: dict[int, int] = {}

    def wait(self, offsets: Mapping[int, int], wait_s: float) -> bool:
        """Whether something is stored at or behind one of the offsets; so long at the most."""
        for partition, offset in offsets.items():
            self._poll(partition, offset, wait_s)
        until_s = time.monotonic() + wait_s
        with self._news:
            while not any(self._ends.get(partition, 0) > offset for partition, offset in offsets.items()):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._news.wait(left_s)
        return True

    def _poll(self, partition: int, offset: int, wait_s: float) -> None:
        with self._news:
            if partition in self._asked:
                return
            self._asked[partition] = offset
        # The smallest size there is: the answer has one batch in it all the same.
        self._node.submit(Read(self._subject, partition, offset, 1, wait_s), self._reply_for(partition))

    def _reply_for(self, partition: int) -> Callable[[Answer | InturnError], None]:
        def reply(answer: Answer | InturnError) -> None:
            with self._news:
                del self._asked[partition]
                if isinstance(answer, Pulled):  # errors are met again, and raised, by whoever reads
                    self._ends[partition] = answer.end_offset
                    self._news.notify_all()

        return reply
