"""What happened, in order: the events that the order checker judges.

An event's place in the list is its place in time; `at_s` is for people to read. Whoever records must therefore append
an end before the next start that it allows, and a grant before it is answered (`Recorder` does, under one lock).

A history can be kept as JSON lines, one event each, and be checked again later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

HandlerResult: TypeAlias = Literal["success", "failed", "rollback", "exception", "moved"]
LeaseEnd: TypeAlias = Literal["released", "expired", "gone"]
HANDLER_RESULTS: frozenset[str] = frozenset(get_args(HandlerResult))
LEASE_ENDS: frozenset[str] = frozenset(get_args(LeaseEnd))


class _Event(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag=True, tag_field="event"):
    at_s: float = 0.0


class SendAcknowledged(_Event, frozen=True, gc=False):
    """A producer was told that its message is stored here."""

    subject: str
    partition: int
    offset: int
    key: bytes | None = None
    message_id: str | None = None
    tags: tuple[str, ...] = ()


class HandlerStart(_Event, frozen=True, gc=False):
    """A handler begins with a message. A handler of batches is recorded as one run per message, one after the other.

    `attempt` is the number that the handler was told: None if that is not to be judged. `under` is the partition whose
    lease it runs under, and that `epoch` is of; None: its own.
    """

    subject: str
    group: str
    partition: int
    offset: int
    key: bytes | None
    consumer: str
    epoch: int
    message_id: str | None = None
    attempt: int | None = None
    under: int | None = None


class HandlerEnd(_Event, frozen=True, gc=False):
    """A handler is done with a message.

    "success" and "moved" finish it; "moved" is the named weakening: it went to a retry or dead-letter subject.
    "failed" and "exception": it will be repeated in place. "rollback": all since the last commit will be.
    """

    subject: str
    group: str
    partition: int
    offset: int
    key: bytes | None
    consumer: str
    epoch: int
    message_id: str | None
    result: HandlerResult


class Committed(_Event, frozen=True, gc=False):
    """A commit that was accepted: everything below `offset` is done, and `finished` above, but for parked messages.

    `parked` went into the parking lot with this commit, `unparked` came out of it, finished or skipped: each as
    (partition, offset), because a lot follows its key to another partition.
    """

    subject: str
    group: str
    partition: int
    owner: str
    epoch: int
    offset: int
    finished: tuple[int, ...] = ()  # offsets at or above `offset`
    parked: tuple[tuple[int, int], ...] = ()
    unparked: tuple[tuple[int, int], ...] = ()


class LeaseGranted(_Event, frozen=True, gc=False):
    subject: str
    group: str
    partition: int
    owner: str
    epoch: int


class LeaseEnded(_Event, frozen=True, gc=False):
    subject: str
    group: str
    partition: int
    owner: str
    epoch: int
    why: LeaseEnd


class ClaimGranted(_Event, frozen=True, gc=False):
    """The claimant may work on these slots of the partition, under the lease of this epoch that somebody else holds.
    Whoever had any of them has lost its claim by now, because it was silent for too long.
    """

    subject: str
    group: str
    partition: int
    claimant: str
    epoch: int
    slots: bytes = b""  # a SlotSet


class ClaimEnded(_Event, frozen=True, gc=False):
    """The claimant has given back what it had."""

    subject: str
    group: str
    partition: int
    claimant: str
    epoch: int


class Grown(_Event, frozen=True, gc=False):
    """The subject has more partitions. A descent: a child, a parent, the slots that moved (a SlotSet), the barrier."""

    subject: str
    descents: tuple[tuple[int, int, bytes, int], ...]  # all of them, those of former growths first


class OffsetsReset(_Event, frozen=True, gc=False):
    """The group goes on at these offsets, by partition; what is below is given up, what is not is due again.

    Also the way to say that a group did not start at the first message, or that retention removed some.
    """

    subject: str
    group: str
    offsets: dict[int, int]


class GroupFiltered(_Event, frozen=True, gc=False):
    """The group wants only messages whose tags match this expression, for the whole history: the others are finished
    when a commit passes them by, and must not be handled. Which others is known from how they were sent; `unwanted` has
    more of them, by partition."""

    subject: str
    group: str
    tags: str  # as `ConsumerSettings.tags`
    unwanted: dict[int, tuple[int, ...]] = {}


class KeySkipped(_Event, frozen=True, gc=False):
    """Somebody gave this message up for the group: a named weakening, from here on it counts as finished."""

    subject: str
    group: str
    partition: int
    offset: int
    key: bytes | None


class KeyResumed(_Event, frozen=True, gc=False):
    """The attempts of this key's messages are counted anew. To be recorded before the first start that it allows."""

    subject: str
    group: str
    partition: int
    key: bytes | None


class ConsumerCrashed(_Event, frozen=True, gc=False):
    """The handlers that this consumer was running ended here, without success. Later ends of theirs do not count."""

    consumer: str


class ProcessRestarted(_Event, frozen=True, gc=False):
    """A node came back. A mark for the reader: what a restart must not change is just what is checked."""


Event: TypeAlias = (
    SendAcknowledged
    | HandlerStart
    | HandlerEnd
    | Committed
    | LeaseGranted
    | LeaseEnded
    | ClaimGranted
    | ClaimEnded
    | Grown
    | OffsetsReset
    | GroupFiltered
    | KeySkipped
    | KeyResumed
    | ConsumerCrashed
    | ProcessRestarted
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class History:
    """A list of events. Not locked: `Recorder` is for threads."""

    __slots__ = ("events",)

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def record(self, event: Event) -> None:
        self.events.append(event)

    def save(self, path: str | Path) -> None:
        """Write one JSON object per line, replacing the file."""
        with Path(path).open("wb") as file:
            for event in self.events:
                file.write(_encoder.encode(event))
                file.write(b"\n")

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read what `save` wrote. Raises `msgspec.DecodeError` for a line that is no event."""
        with Path(path).open("rb") as file:
            return cls(_decoder.decode(line) for line in file if not line.isspace())

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __getitem__(self, index: int) -> Event:
        return self.events[index]

    def __eq__(self, other: object) -> bool:
        return self.events == other.events if isinstance(other, History) else NotImplemented

    def __repr__(self) -> str:
        return f"History({len(self.events)} events)"
