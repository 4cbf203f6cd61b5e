"""Commands about keys: parking lots, key requests, and trials of single messages for diagnosis."""

from __future__ import annotations

import msgspec

from inturn.protocol.command import Command


class Lot(msgspec.Struct, frozen=True, gc=False):
    """A key whose messages are parked."""

    key: bytes
    state: str  # one of LotState


class ParkedMessage(msgspec.Struct, frozen=True, gc=False):
    """A whole message in the parking lot of its key: retention may remove the message from the log."""

    partition: int
    offset: int
    content: bytes  # an Outgoing, as msgpack
    position: int = 0  # rises in the parking lot; set by the node


class LotChange(msgspec.Struct, frozen=True, gc=False):
    """A change of the parking lot of one key."""

    key: bytes
    state: str  # one of LotState, from now on
    reason: str = ""
    added: tuple[ParkedMessage, ...] = ()  # appended; a message that is parked already stays in place
    removed: tuple[tuple[int, int], ...] = ()  # handled or skipped: (partition, offset)


class ReadLot(Command, frozen=True, gc=False):
    """Read the parking lot of a key after a position, under the lease of the partition."""

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
    is_end: bool  # the last message of the parking lot is included


class KeyRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of an operator to the holder of a partition: park, resume or skip a key."""

    id: int  # rises within the node
    partition: int
    key: bytes
    kind: str  # one of KeyAction
    offset: int | None = None  # skip: the message; only if still the first of its key
    by: str = ""
    why: str = ""
    origin: int | None = None  # skip: the partition that stores the message, if another


class SteerKey(Command, frozen=True, gc=False):
    """Ask the holder of a key's partition to park, resume or skip the key. Answered with the KeyRequest, once durable.

    `partition` is needed only for a subject that is routed by a selector. NotFound without a message to resume or to
    skip. `offset` makes a skip safe to repeat: a skip is refused unless the first message of the key has this offset.
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
    """Answered with the RequestState. Held back until the request is executed, or `wait_s` is over."""

    subject: str
    group: str
    id: int
    wait_s: float = 0.0


class RequestState(msgspec.Struct, frozen=True, gc=False):
    """The state of a key request. `done_at_ms` is None until the request is executed."""

    request: KeyRequest
    asked_at_ms: int
    done_at_ms: int | None


class ListKeys(Command, frozen=True, gc=False):
    """List the failing, blocked and parked keys of a group, and keys with waiting requests."""

    subject: str
    group: str


class KeyDescription(msgspec.Struct, frozen=True, gc=False):
    """`offset` is the key's first unfinished message; `waiting` counts the messages behind it."""

    key: bytes | None
    partition: int
    # "failing" (is retried), "blocked" (attempts used up), one of LotState, or "requested" (only a request waits)
    state: str
    offset: int | None
    attempts: int
    error: str
    since_ms: int
    waiting: int
    reason: str = ""
    requests: tuple[KeyRequest, ...] = ()  # not executed yet


class KeyList(msgspec.Struct, frozen=True, gc=False):
    keys: tuple[KeyDescription, ...]


class DescribeKey(Command, frozen=True, gc=False):
    """Describe a key of a group, with parked messages after position `after`. NotFound for a key without trouble."""

    subject: str
    group: str
    key: bytes
    after: int = 0
    max_bytes: int = 1 << 20


class KeyDetails(msgspec.Struct, frozen=True, gc=False):
    """A key with its parked messages and the history of requests."""

    description: KeyDescription
    parked: tuple[ParkedMessage, ...]
    parked_is_end: bool
    history: tuple[RequestState, ...]  # newest first


class Trial(msgspec.Struct, frozen=True, gc=False):
    """A stored message that a member handles out of turn, for diagnosis."""

    id: str  # set by the operator's client
    partition: int
    offset: int


class TryMessage(Command, frozen=True, gc=False):
    """Have a member handle a stored message now, out of turn. Answered with the Trial; a repeat of the id is the
    same trial. NotFound for an unknown member or message.

    `member` is a name, or the unique beginning of a name (up to a `-`).
    """

    subject: str
    group: str
    member: str
    partition: int
    offset: int
    id: str


class FindTrial(Command, frozen=True, gc=False):
    """Answered with the TrialState. Held back until the trial has a result, or `wait_s` is over. NotFound if the member
    left before.

    `gives_up`: the operator waits no longer. A member that has not begun by then does not begin.
    """

    subject: str
    group: str
    id: str
    wait_s: float = 0.0
    gives_up: bool = False


class TrialState(msgspec.Struct, frozen=True, gc=False):
    """The state of a trial. `result` is None until the member reports."""

    trial: Trial
    member: str
    result: str | None = None  # one of ResultKind
    error: str = ""  # the exception of the handler, or why its return value is wrong
    duration_s: float = 0.0
    traceback: str = ""  # of the handler's exception


class ReportTrial(Command, frozen=True, gc=False):
    """A member reports the result of a trial. Answered with Done, also if the operator has given up."""

    subject: str
    group: str
    member: str
    id: str
    result: str  # one of ResultKind
    error: str = ""
    duration_s: float = 0.0
    traceback: str = ""
