"""A flight: messages of one partition that are sent and acknowledged together, and the handles on them."""

from __future__ import annotations

import copy
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from inturn.model.batch import Batch
from inturn.model.errors import InturnError, SendTimeout
from inturn.model.message import Outgoing


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a message was stored."""

    subject: str
    partition: int
    offset: int


_making_event = threading.Lock()  # one for all: it is held for an instant, and rarely


class Flight:
    """Filled by `add` until it is encoded; then it never changes, however often it is sent."""

    __slots__ = (
        "_callbacks",
        "_event",
        "base_offset",
        "batch",
        "done",
        "error",
        "gap",
        "is_awaited",
        "is_seen",
        "last_error",
        "messages",
        "moves",
        "partition",
        "sent_at_s",
        "size_bytes",
        "slots",
        "subject",
        "tries",
    )

    def __init__(self, subject: str, partition: int) -> None:
        self.subject = subject
        self.partition = partition
        self.messages: list[Outgoing] = []
        self.slots: array[int] = array("H")
        self.size_bytes = 0
        self.batch: Batch | None = None
        self.gap = False  # the numbers before it were given up
        self.tries = 0
        self.moves = 0
        self.is_awaited = False  # sent, and neither answered nor given up waiting for
        self.sent_at_s = 0.0
        self.base_offset = -1
        self.last_error: InturnError | None = None
        self.error: InturnError | None = None
        self.done = False
        self.is_seen = False  # somebody was told that it failed
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
        """An event is made only if somebody waits: most flights are never waited for."""
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

    _flight: Flight
    _index: int

    @property
    def done(self) -> bool:
        """Acknowledged or failed."""
        return self._flight.done

    @property
    def error(self) -> InturnError | None:
        """What made it fail; None while it is on its way, and if it is stored."""
        return self._flight.error

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call this once it is acknowledged or has failed, in whatever thread that is noticed; at once if it is."""
        self._flight.when_done(callback)

    def result(self, timeout_s: float | None = None) -> Stored:
        """Where it was stored. Raises what made it fail, or SendTimeout if it is still on its way."""
        flight = self._flight
        if not flight.wait(timeout_s):
            last = None if flight.last_error is None else str(flight.last_error)
            raise SendTimeout(flight.subject, timeout_s or 0.0, last)
        if flight.error is not None:
            flight.is_seen = True
            # A copy: the traceback of one that is kept would keep this frame, and so the handle, for ever.
            raise copy.copy(flight.error)
        return Stored(flight.subject, flight.partition, flight.base_offset + self._index)
