"""Keys: looking at those that do not go on by themselves, and steering them."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command
from inturn.model.commands.parking import ParkedMessage


class KeyRequest(msgspec.Struct, frozen=True, gc=False):
    """Somebody asks the holder of a partition to park, resume or skip a key."""

    id: int  # counts up within the node
    partition: int
    key: bytes
    kind: str  # one of KeyAction
    offset: int | None = None  # skip: which message; only if it is still the first of its key
    by: str = ""
    why: str = ""
    origin: int | None = None  # skip: the partition that the message was read from, if it is another one


class SteerKey(Command, frozen=True, gc=False):
    """Ask the holder of a key's partition to park, resume or skip it. Answered with the KeyRequest, once it is durable.

    `partition` is needed only where the route does not tell it. Refused with NotFound if there is nothing to resume
    or to skip. `offset` makes a skip safe to repeat: it is refused unless that is the first message of the key.
    """

    subject: str
    group: str
    key: bytes
    action: str  # one of KeyAction
    by: str
    why: str
    partition: int | None = None
    offset: int | None = None  # skip only


class FindRequest(Command, frozen=True, gc=False):
    """Whether a request was acted upon; held back until then, or until `wait_s` is over."""

    subject: str
    group: str
    id: int
    wait_s: float = 0.0


class RequestState(msgspec.Struct, frozen=True, gc=False):
    """What became of a request: `done_at_ms` is None while nobody has acted upon it."""

    request: KeyRequest
    asked_at_ms: int
    done_at_ms: int | None


class ListKeys(Command, frozen=True, gc=False):
    """The keys of a group that do not go on by themselves, or that somebody asked something of."""

    subject: str
    group: str


class KeyDescription(msgspec.Struct, frozen=True, gc=False):
    """`offset` is that of its first message that is not over, `waiting` counts those behind it."""

    key: bytes | None
    partition: int
    # "failing" (repeated by itself), "blocked" (attempts used up), one of LotState, or "requested" (nothing else yet)
    state: str
    offset: int | None
    attempts: int
    error: str
    since_ms: int
    waiting: int
    reason: str = ""
    requests: tuple[KeyRequest, ...] = ()  # not acted upon yet


class KeyList(msgspec.Struct, frozen=True, gc=False):
    keys: tuple[KeyDescription, ...]


class DescribeKey(Command, frozen=True, gc=False):
    """One key of a group, with what is parked of it, from `after` on. NotFound if nothing is the matter with it."""

    subject: str
    group: str
    key: bytes
    after: int = 0
    max_bytes: int = 1 << 20


class KeyDetails(msgspec.Struct, frozen=True, gc=False):
    """A key with what is parked of it, and what was asked of it."""

    description: KeyDescription
    parked: tuple[ParkedMessage, ...]
    parked_is_end: bool
    history: tuple[RequestState, ...]  # who asked what, newest first
