"""The worker process: receives messages, calls the handler, reports the result of the calls.

The process ends with its consumer, if need be in the middle of a handler: the next holder would run the same key. The
process ignores Ctrl-C: the consumer lets handlers finish first. The frames between a consumer and a worker process are
structs as msgpack. No pickle.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, MutableSequence
from multiprocessing.connection import Connection

import msgspec

from inturn.consumer.context import Context
from inturn.consumer.outcome import TRACEBACK_LINES_MAX, is_printable
from inturn.consumer.worker import Handler
from inturn.model.message import Message
from inturn.model.result import Result, Suspend
from inturn.model.time import SystemClock


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


TEXT_LENGTH_MAX = 2_000


def main(module: str, name: str, pipe: Connection, tokens: Connection, states: MutableSequence[int]) -> None:
    """`tokens` are the numbers of lanes that may be begun, by the process or thread that reads the number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent started the process with SIGINT blocked
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        handler = load(module, name)
    except BaseException as error:
        pipe.send_bytes(encode(Ready(_text_of(error))))
        return
    pipe.send_bytes(encode(Ready()))
    with contextlib.suppress(EOFError, OSError):
        while True:
            work = decode_work(pipe.recv_bytes())
            calls = _Calls(handler, work, states, lambda over: pipe.send_bytes(encode(over)))
            pipe.send_bytes(encode(calls.run(tokens.fileno())))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def load(module: str, name: str) -> Handler:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    return found


class _Calls:
    """The calls of a work frame."""

    def __init__(
        self, handler: Handler, work: WorkFrame, states: MutableSequence[int], tell: Callable[[Over], None]
    ) -> None:
        self._handler = handler
        self._work = work
        self._states = states
        self._tell = tell
        self._monotonic: Callable[[], float] = SystemClock.monotonic
        self._over = Over([])
        self._first: list[int] = []  # the number of the first call, by lane
        number = 0
        for lane in work.lanes:
            self._first.append(number)
            number += 1 if lane.is_batch else len(lane.messages)

    def run(self, tokens: int) -> Over:
        indexes = _taken(tokens) if self._work.has_tokens else iter(range(len(self._work.lanes)))
        for index in indexes:
            self._run_lane(self._work.lanes[index], self._first[index])
        return self._over

    def _run_lane(self, lane: GivenLane, number: int) -> None:
        context = lane.context()
        calls = [lane.messages] if lane.is_batch else lane.messages
        for call, attempt in zip(calls, lane.attempts, strict=False):
            began_s = self._monotonic()
            if began_s >= lane.deadline_s:
                return
            context.attempt, context.is_acknowledged = attempt, False
            self._states[number] = BEGUN
            try:
                told = _told(number, self._handler(call, context))
            except BaseException as error:
                told = _raised(number, error)
            self._over.slow_count += self._monotonic() - began_s > self._work.slow_s
            if told is None and context.is_acknowledged:
                told = Told(number, "none")
            if told is None:
                self._states[number] = DONE
            else:
                told.is_acknowledged = context.is_acknowledged
                # Report at once, since the next call may take long; and first, so that a kill in between loses nothing.
                self._tell(Over([told], is_last=False))
                self._states[number] = TOLD
                if told.returned not in (Result.SUCCESS.value, "none"):
                    return  # the messages behind wait
            number += 1


def _taken(tokens: int) -> Iterator[int]:
    """Lanes in order, until no token is left; the reader of a token owns the lane."""
    while True:
        try:
            token = os.read(tokens, 1)
        except BlockingIOError:
            return
        if not token:
            return
        yield token[0]


def _told(number: int, returned: object) -> Told | None:
    if returned is None:
        return None
    if isinstance(returned, Suspend):
        return Told(number, "suspend", returned.for_s)
    if isinstance(returned, Result):
        return Told(number, returned.value)
    try:
        text = repr(returned)
    except Exception:
        text = f"a {type(returned).__name__}"
    return Told(number, "invalid", text=_clean(text[:TEXT_LENGTH_MAX]))


def _raised(number: int, error: BaseException) -> Told:
    is_fine = is_printable(error)
    text = str(error)[:TEXT_LENGTH_MAX] if is_fine else ""
    lines = traceback.format_exception(error, limit=-TRACEBACK_LINES_MAX) if is_fine else []
    return Told(number, "raised", kind=type(error).__name__, text=_clean(text), traceback=_clean("".join(lines)))


def _text_of(error: BaseException) -> str:
    return _clean(f"{type(error).__name__}: {error}") if is_printable(error) else type(error).__name__


def _clean(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
