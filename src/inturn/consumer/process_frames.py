"""What goes between a consumer and its worker processes: msgpack of these structs, nothing pickled."""

from __future__ import annotations

import msgspec

from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.result import Result, Suspend


class GivenLane(msgspec.Struct, array_like=True, gc=False):
    """Messages of one lane, to be handled one after the other, each as its own call or all in one (`is_batch`).

    Nothing of it is begun at or after `deadline_s`, on a clock that is the same in all processes of a machine.
    """

    subject: str
    group: str
    partition: int
    consumer: str
    epoch: int
    deadline_s: float
    messages: list[Message]
    attempts: list[int]
    is_batch: bool = False
    is_direct: bool = False

    def context(self) -> Context:
        return Context(self.subject, self.group, self.partition, self.consumer, self.epoch, is_direct=self.is_direct)


class WorkFrame(msgspec.Struct, array_like=True, gc=False):
    """`has_tokens`: each lane is to be taken out of the pipe of tokens first; what is not there others have taken."""

    lanes: list[GivenLane]
    slow_s: float
    has_tokens: bool = False


class Told(msgspec.Struct, array_like=True, gc=False):
    """What a call returned, if that was not None, or raised. `number` counts the calls of the work."""

    number: int
    returned: str = ""  # a Result, "suspend", "none", "invalid" or "raised"
    suspend_s: float = 0.0
    kind: str = ""  # the name of the exception's class
    text: str = ""  # what it says, or the repr of what was returned
    traceback: str = ""
    is_acknowledged: bool = False


class Over(msgspec.Struct, array_like=True, gc=False):
    """What there is to tell, at once, and in the end that the work is over. What is not told of returned None; how far
    each call came is in the shared states."""

    told: list[Told]
    slow_count: int = 0
    is_last: bool = True


class Ready(msgspec.Struct, array_like=True, gc=False):
    """The process has loaded its handler, or says why it cannot."""

    error: str = ""


# The states of calls, one byte each, in memory that both have: they are known whatever becomes of the process.
UNTOUCHED, BEGUN, DONE, TOLD = 0, 1, 2, 3
CALLS_MAX = 4096
LANES_MAX = 250  # a token is one byte

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_work = msgspec.msgpack.Decoder(WorkFrame).decode
decode_over = msgspec.msgpack.Decoder(Over).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode


class _Unreadable:
    """Stands for what a handler returned in its process, and is no result."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def returned_of(told: Told) -> object:
    """What the handler returned, for whoever has to make a result of it."""
    match told.returned:
        case "suspend":
            return Suspend(told.suspend_s)
        case "none":
            return None
        case "invalid":
            return _Unreadable(told.text)
        case name:
            return Result(name)
