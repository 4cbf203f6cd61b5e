"""A batch: messages of one partition that are sent and acknowledged together, and the handles on them."""

from __future__ import annotations

import copy
import itertools
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from inturn.model.batch import Batch
from inturn.model.errors import InturnError, SendTimeout
from inturn.model.message import Outgoing


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a message was stored. `home` is the partition that it belongs to if it is in another one: best effort went
    round that, and the order of its key does not hold there."""

    subject: str
    partition: int
    offset: int
    home: int | None = None


@dataclass(frozen=True, slots=True)
class Kept(Stored):
    """Not stored yet, but safe: the message is a row of the producer's outbox, which sends it later. Partition and
    offset are -1."""

    row_id: int = -1


_numbers = itertools.count()
_NONE: frozenset[str] = frozenset()
_making_event = threading.Lock()  # one for all: it is held for an instant, and rarely


class SendBatch:
    """Filled by `add` until it is encoded; then it never changes, however often it is sent."""

    __slots__ = (
        "_callbacks",
        "_event",
        "base_offset",
        "closed_groups",
        "done",
        "encoded",
        "error",
        "gap",
        "home",
        "is_awaited",
        "is_diverted",
        "is_refused",
        "is_seen",
        "last_error",
        "messages",
        "moves",
        "number",
        "partition",
        "parts",
        "parts_left",
        "row_ids",
        "sent_at_s",
        "size_bytes",
        "slots",
        "subject",
        "tries",
    )

    def __init__(self, subject: str, partition: int) -> None:
        self.subject = subject
        self.partition = partition
        self.home = partition  # where its messages belong, wherever it is sent to instead
        self.number = next(_numbers)  # of two of one partition, the higher one has the later messages
        self.messages: list[Outgoing] = []
        self.slots: array[int] = array("H")
        self.size_bytes = 0
        self.encoded: Batch | None = None
        self.gap = False  # the numbers before it were given up
        self.tries = 0
        self.moves = 0
        self.closed_groups: frozenset[str] | set[str] = _NONE  # broker groups that did not take it
        self.is_awaited = False  # sent, and neither answered nor given up waiting for
        self.is_refused = False  # sent last by a route that is over: it is not stored, and will not be
        self.sent_at_s = 0.0
        self.base_offset = -1
        self.row_ids: Sequence[int] | None = None  # of its messages in the outbox, if they went there
        self.last_error: InturnError | None = None
        self.error: InturnError | None = None
        self.done = False
        self.is_diverted = False  # its keys are in the outbox: it goes there instead of being sent
        self.is_seen = False  # somebody was told that it failed
        self.parts: list[tuple[SendBatch, int]] | None = None  # by message: where it went when the subject grew
        self.parts_left = 0
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    def finish(self, base_offset: int, error: InturnError | None = None) -> None:
        self.base_offset = base_offset
        self.error = error
        self.done = True  # before the event is looked at: see `wait`
        if self._event is not None:
            self._event.set()
        if self._callbacks is not None:
            with _making_event:
                callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks or ():
                callback()

    def divide(self, places: Sequence[int]) -> dict[int, SendBatch]:
        """Its messages belong to different partitions by now, one place for each: a batch for each partition, by it.

        It was never stored. It is over when all of them are; a handle on it finds the one that its message went to.
        """
        made: dict[int, SendBatch] = {}
        self.parts = []
        for message, slot, partition in zip(self.messages, self.slots, places, strict=True):
            part = made.get(partition)
            if part is None:
                part = made[partition] = SendBatch(self.subject, partition)
                part.number = self.number
            self.parts.append((part, len(part.messages)))
            part.messages.append(message)
            part.slots.append(slot)
        left_bytes, each_bytes = self.size_bytes, self.size_bytes // len(self.messages)
        for part in made.values():
            part.size_bytes = each_bytes * len(part.messages)
            left_bytes -= part.size_bytes
        next(iter(made.values())).size_bytes += left_bytes
        self.parts_left = len(made)
        for part in made.values():
            part.when_done(self._part_over)
        return made

    def _part_over(self) -> None:
        self.parts_left -= 1
        if not self.parts_left:
            self.finish(-1)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call this when it is over, in the thread that notices; at once if it is."""
        with _making_event:
            if not self.done:
                self._callbacks = [*(self._callbacks or ()), callback]
                # `finish` may have looked for callbacks just before this one was there.
                if not self.done:
                    return
                self._callbacks = [one for one in self._callbacks if one is not callback]
        callback()

    def wait(self, timeout_s: float | None) -> bool:
        """An event is made only if somebody waits: most batches are never waited for."""
        if self.done:
            return True
        with _making_event:
            event = self._event
            if event is None:
                event = self._event = threading.Event()
        # `finish` may have looked for the event just before it was there.
        return self.done or event.wait(timeout_s) or self.done


# A struct outside the garbage collector's sight: people keep millions of handles, and it would walk them all again
# and again (measured: 250 000 against 430 000 sends a second). Nothing that it leads to leads back to it.
class SendHandle(msgspec.Struct, frozen=True, eq=False, gc=False, repr_omit_defaults=True):
    """One message on its way. `result` waits for its acknowledgement."""

    _batch: SendBatch
    _index: int

    @property
    def done(self) -> bool:
        """Acknowledged or failed."""
        return self._batch.done

    @property
    def error(self) -> InturnError | None:
        """What made it fail; None while it is on its way, and if it is stored."""
        return self._batch.error

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call this once it is acknowledged or has failed, in whatever thread that is noticed; at once if it is."""
        self._batch.when_done(callback)

    def result(self, timeout_s: float | None = None) -> Stored:
        """Where it was stored. Raises what made it fail, or SendTimeout if it is still on its way.

        Where the producer has an outbox, this may be a `Kept`: the message is in the outbox, and sent later.
        """
        batch, index = self._batch, self._index
        if not batch.wait(timeout_s):
            last = None if batch.last_error is None else str(batch.last_error)
            raise SendTimeout(batch.subject, timeout_s or 0.0, last)
        batch.is_seen = batch.is_seen or batch.error is not None
        while batch.parts is not None:
            batch, index = batch.parts[index]
        if batch.error is not None:
            batch.is_seen = True
            # A copy: the traceback of one that is kept would keep this frame, and so the handle, for ever.
            raise copy.copy(batch.error)
        if batch.row_ids is not None:
            return Kept(batch.subject, -1, -1, row_id=batch.row_ids[index])
        home = None if batch.home == batch.partition else batch.home
        return Stored(batch.subject, batch.partition, batch.base_offset + index, home)
