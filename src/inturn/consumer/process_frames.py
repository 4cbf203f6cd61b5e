"""The frames between a consumer and its worker processes: these structs as msgpack. No pickle."""

from __future__ import annotations

import msgspec

from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.result import Result, Suspend


class GivenLane(msgspec.Struct, array_like=True, gc=False):
    """Messages of a lane, to be handled in order, in a call per message or all in one call (`is_batch`).

    No message is begun at or after `deadline_s`, on a clock that is the same in all processes of a machine.
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
    """`has_tokens`: the process must read the token of a lane from the pipe before it begins the lane; a missing token
    means that a thread of the consumer has taken the lane back."""

    lanes: list[GivenLane]
    slow_s: float
    has_tokens: bool = False


class Told(msgspec.Struct, array_like=True, gc=False):
    """The result of a call that returned a value or raised. `number` counts the calls of the work frame."""

    number: int
    returned: str = ""  # a Result, "suspend", "none", "invalid" or "raised"
    suspend_s: float = 0.0
    kind: str = ""  # the name of the exception's class
    text: str = ""  # the text of the exception, or the repr of the returned value
    traceback: str = ""
    is_acknowledged: bool = False


class Over(msgspec.Struct, array_like=True, gc=False):
    """Results of calls, and in the last frame the end of the work. Calls without a result returned None; the shared
    states tell how far the calls came."""

    told: list[Told]
    slow_count: int = 0
    is_last: bool = True


class Ready(msgspec.Struct, array_like=True, gc=False):
    """The process has loaded the handler, or `error` states why not."""

    error: str = ""


# The states of calls, a byte per call, in shared memory: they survive the death of the process.
UNTOUCHED, BEGUN, DONE, TOLD = 0, 1, 2, 3
CALLS_MAX = 4096
LANES_MAX = 250  # a token is one byte

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_work = msgspec.msgpack.Decoder(WorkFrame).decode
decode_over = msgspec.msgpack.Decoder(Over).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode


class _Unreadable:
    """Stands for a returned value that is no result, and stayed in the process."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def returned_of(told: Told) -> object:
    """The returned value of the handler, as `of_return` expects it."""
    match told.returned:
        case "suspend":
            return Suspend(told.suspend_s)
        case "none":
            return None
        case "invalid":
            return _Unreadable(told.text)
        case name:
            return Result(name)
