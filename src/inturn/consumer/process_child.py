"""The worker process: receives messages, calls the handler, reports the result of the calls.

The process ends with its consumer, if need be in the middle of a handler: the next holder would run the same key. The
process ignores Ctrl-C: the consumer lets handlers finish first.
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

from inturn.consumer.outcome import TRACEBACK_LINES_MAX, is_printable
from inturn.consumer.process_frames import (
    BEGUN,
    DONE,
    TOLD,
    GivenLane,
    Over,
    Ready,
    Told,
    WorkFrame,
    decode_work,
    encode,
)
from inturn.consumer.worker import Handler
from inturn.model.result import Result, Suspend
from inturn.model.time import SystemClock

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
