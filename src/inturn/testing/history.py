"""Histories: the events that the order checker checks, in order.

The order of the list is the order in time; `at_s` is for people to read. So the recording code must append an end
before the next start that the end allows, and a grant before its answer (`Recorder` does both, under a lock).

A history can be saved as JSON lines, an event per line, and be checked again later.
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
    """A producer received the acknowledgement that its message is stored at this place."""

    subject: str
    partition: int
    offset: int
    key: bytes | None = None
    message_id: str | None = None
    tags: tuple[str, ...] = ()


class HandlerStart(_Event, frozen=True, gc=False):
    """A handler starts a message. A handler of batches is recorded as a run per message, one after the other.

    `attempt` is the attempt number passed to the handler; None: not checked. `under` is the partition of the lease that
    the handler runs under, and of `epoch`; None: the message's own partition.
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
    """A handler has ended with a message.

    "success" and "moved" finish the message; "moved" is a named weakening: the message moved to a retry or dead-letter
    subject. "failed" and "exception": the message will be repeated in place. "rollback": all messages since the last
    commit will be repeated.
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
    """An accepted commit: messages below `offset` and in `finished` are finished, except parked messages.

    The commit put the messages `parked` into the parking lot, and removed the messages `unparked` as finished or
    skipped. Both are (partition, offset) pairs, because a parking lot moves with its key to a different partition.
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
    """The claimant may work on these slots of the partition, under the lease of this epoch of a different member.

    An earlier claim to any of these slots has expired and is lost.
    """

    subject: str
    group: str
    partition: int
    claimant: str
    epoch: int
    slots: bytes = b""  # a SlotSet


class ClaimEnded(_Event, frozen=True, gc=False):
    """The claimant has released its claim."""

    subject: str
    group: str
    partition: int
    claimant: str
    epoch: int


class Grown(_Event, frozen=True, gc=False):
    """The subject has more partitions. A descent is child, parent, moved slots (a SlotSet) and barrier."""

    subject: str
    descents: tuple[tuple[int, int, bytes, int], ...]  # all descents, those of earlier growths first


class OffsetsReset(_Event, frozen=True, gc=False):
    """The group continues at these offsets, by partition. Lower offsets are given up, higher offsets are due again.

    Also used for a group that did not start at the first message, and for messages that retention deleted.
    """

    subject: str
    group: str
    offsets: dict[int, int]


class GroupFiltered(_Event, frozen=True, gc=False):
    """For the whole history, the group wants only messages that match this tag expression.

    Other messages are filtered out: they are finished when a commit passes their offset, and must not be handled. The
    checker takes tags from SendAcknowledged; `unwanted` has further offsets that are filtered out, by partition.
    """

    subject: str
    group: str
    tags: str  # as `ConsumerSettings.tags`
    unwanted: dict[int, tuple[int, ...]] = {}


class KeySkipped(_Event, frozen=True, gc=False):
    """An operator has skipped this message for the group: a named weakening. From now on the message counts as
    finished."""

    subject: str
    group: str
    partition: int
    offset: int
    key: bytes | None


class KeyResumed(_Event, frozen=True, gc=False):
    """Attempts of this key's messages are counted from 0 again. Record this event before the first start that it
    allows."""

    subject: str
    group: str
    partition: int
    key: bytes | None


class ConsumerCrashed(_Event, frozen=True, gc=False):
    """The running handlers of this consumer ended without success. Later ends of these handlers do not count."""

    consumer: str


class ProcessRestarted(_Event, frozen=True, gc=False):
    """A node was restarted. For human readers only: the rules of the checker hold across restarts."""


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
    """A list of events. Not thread-safe: use `Recorder` with threads."""

    __slots__ = ("events",)

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def record(self, event: Event) -> None:
        self.events.append(event)

    def save(self, path: str | Path) -> None:
        """Write a JSON object per line. Replaces the file."""
        with Path(path).open("wb") as file:
            for event in self.events:
                file.write(_encoder.encode(event))
                file.write(b"\n")

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a saved history. Raises `msgspec.DecodeError` for a line that is no event."""
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
