"""Keys: looking at those that do not go on by themselves, and steering them.

Parking lots: the messages of keys that are set aside.

Trials: one message, handled out of turn for diagnosis.
"""

from __future__ import annotations

import msgspec

from inturn.protocol.command import Command


class Lot(msgspec.Struct, frozen=True, gc=False):
    """A key whose messages are parked."""

    key: bytes
    state: str  # one of LotState


class ParkedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message in the parking lot of its key, with all there is of it: the log may forget it meanwhile."""

    partition: int
    offset: int
    content: bytes  # an Outgoing, as msgpack
    position: int = 0  # counts up in the lot; given by the node


class LotChange(msgspec.Struct, frozen=True, gc=False):
    """What becomes of the parking lot of one key."""

    key: bytes
    state: str  # one of LotState, from now on
    reason: str = ""
    added: tuple[ParkedMessage, ...] = ()  # to its end; one that is there already stays where it is
    removed: tuple[tuple[int, int], ...] = ()  # handled or skipped: (partition, offset)


class ReadLot(Command, frozen=True, gc=False):
    """Read the parking lot of a key, under the lease of the partition, behind a position."""

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    key: bytes
    after: int
    max_bytes: int


class LotContent(msgspec.Struct, frozen=True, gc=False):
    messages: tuple[ParkedMessage, ...]
    is_end: bool  # nothing is behind the last of them


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


class Trial(msgspec.Struct, frozen=True, gc=False):
    """One stored message that one member is to handle out of turn, for diagnosis."""

    id: str  # given by whoever asks for it
    partition: int
    offset: int


class TryMessage(Command, frozen=True, gc=False):
    """Have one member handle one stored message now, out of turn. Answered with the Trial; the same id again is the
    same trial. NotFound if the member or the message is not there.

    `member` is a name, or the beginning of one (up to a `-`) that no other member has.
    """

    subject: str
    group: str
    member: str
    partition: int
    offset: int
    id: str


class FindTrial(Command, frozen=True, gc=False):
    """What became of a trial; held back until it is over, or until `wait_s` is. NotFound if its member left before.

    `gives_up`: whoever asked waits no longer. If its member has not begun when it hears of that, it never does.
    """

    subject: str
    group: str
    id: str
    wait_s: float = 0.0
    gives_up: bool = False


class TrialState(msgspec.Struct, frozen=True, gc=False):
    """What became of a trial. `result` is None while its member has not reported."""

    trial: Trial
    member: str
    result: str | None = None  # one of ResultKind
    error: str = ""  # what the handler raised, or what was wrong with what it returned
    duration_s: float = 0.0
    traceback: str = ""  # of what the handler raised


class ReportTrial(Command, frozen=True, gc=False):
    """A member tells what became of a trial. Answered with Done, also when nobody waits for it any more."""

    subject: str
    group: str
    member: str
    id: str
    result: str  # one of ResultKind
    error: str = ""
    duration_s: float = 0.0
    traceback: str = ""
