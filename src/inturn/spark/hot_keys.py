"""Which keys most of a backlog belongs to, from samples of what comes next."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from inturn.connection import Connection
from inturn.model.batch import decode, is_intact
from inturn.model.commands import Pulled, Read
from inturn.model.errors import InturnError, InvalidInput
from inturn.model.message import Origin
from inturn.model.request import ask
from inturn.model.settings import KIB
from inturn.model.subject import Subject

SAMPLE_S = 1.0
SAMPLE_BYTES = 64 * KIB
SHOWN = 5


@dataclass(frozen=True, slots=True)
class HotKey:
    key: str
    share: float  # of the sampled messages


class HotKeys:
    """Reads a little at where the group is, a partition at a time, and counts."""

    def __init__(self, connection: Connection, subject: Subject) -> None:
        self._connection = connection
        self._subject = subject
        self._counts: Counter[bytes] = Counter()
        self._sampled = 0
        self._next = 0
        self._at_s = float("-inf")

    def sample(self, places: Mapping[int, int]) -> None:
        """One partition, if it is time; its offsets by partition are where to look."""
        now_s = time.monotonic()
        if now_s - self._at_s < SAMPLE_S or not places:
            return
        self._at_s = now_s
        partition = sorted(places)[self._next % len(places)]
        self._next += 1
        self.read(partition, places[partition], SAMPLE_BYTES)

    def read(self, partition: int, offset: int, max_bytes: int) -> int:
        """Count what is stored from there on; how many messages that were."""
        try:
            command = Read(self._subject.name, partition, offset, max_bytes)
            pulled = ask(self._connection.node, command, Pulled)
        except InturnError:
            return 0  # it is only a look
        count = 0
        for batch in pulled.batches:
            with contextlib.suppress(InvalidInput):  # whoever handles them will tell
                messages = decode(batch, Origin(self._subject.name, partition)) if is_intact(batch) else []
                self._counts.update([one.key for one in messages if one.key is not None])
                count += len(messages)
        self._sampled += count
        return count

    def top(self) -> tuple[HotKey, ...]:
        return tuple(
            HotKey(key.decode(errors="backslashreplace"), count / self._sampled)
            for key, count in self._counts.most_common(SHOWN)
            if count > 1
        )
