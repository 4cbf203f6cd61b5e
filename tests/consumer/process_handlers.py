"""Handlers that worker processes import. The handlers write notes to the file in INTURN_TEST_NOTES."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from inturn import Context, Message, suspend
from inturn.model.time import SystemClock

NOTES = "INTURN_TEST_NOTES"
WAIT_S = 60.0
LINE_BYTES = 512  # of every line: no line crosses a page border, where a kill could cut the line


def note(event: str, message: Message, context: Context) -> None:
    """Write a line at once or not at all. The lines of several processes are in the order of the events."""
    line = {
        "event": event,
        "at_s": SystemClock.monotonic(),
        "pid": os.getpid(),
        "subject": context.subject,
        "group": context.group,
        "partition": message.partition,
        "offset": message.offset,
        "key": None if message.key is None else message.key.decode(),
        "consumer": context.consumer,
        "epoch": context.epoch,
        "attempt": context.attempt,
        "is_direct": context.is_direct,
    }
    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    text = json.dumps(line).encode()
    assert len(text) < LINE_BYTES
    os.write(file, text.ljust(LINE_BYTES - 1) + b"\n")
    os.close(file)


def noted(message: Message, context: Context) -> None:
    note("start", message, context)
    note("end", message, context)


def slow(message: Message, context: Context) -> None:
    """Slow enough that a worker takes a single message at a time."""
    note("start", message, context)
    time.sleep(0.004)
    note("end", message, context)


def told(message: Message, context: Context) -> object:
    """Do what the body says, at the first attempt."""
    note("start", message, context)
    if context.attempt == 1:
        match message.body:
            case b"raise":
                raise ValueError("no such account")
            case b"suspend":
                return suspend(0.01)
            case b"nonsense":
                return object()
            case b"exit":
                os._exit(3)
    note("end", message, context)
    return None


def always_dies(message: Message, context: Context) -> None:
    note("start", message, context)
    if message.body == b"exit":
        os._exit(3)


def waits(message: Message, context: Context) -> None:
    """If the body is `wait`, wait for the file with the name of the notes and `.go`."""
    note("start", message, context)
    gate = Path(os.environ[NOTES] + ".go")
    until_s = time.monotonic() + WAIT_S
    while message.body == b"wait" and not gate.exists() and time.monotonic() < until_s:
        time.sleep(0.005)
    note("end", message, context)


def acknowledges(messages: list[Message], context: Context) -> None:
    for message in messages:
        note("start", message, context)
        note("end", message, context)
    context.ack()


async def never(message: Message, context: Context) -> None:
    pass


class Handler:
    def method(self, message: Message, context: Context) -> None:
        pass

    def __call__(self, message: Message, context: Context) -> None:
        pass
