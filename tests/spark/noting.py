"""Handlers for drains that record start and end of every call, with one file per process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.testing.history import HandlerEnd, HandlerStart, History
from simulator.processes.history import FileRecorder, merge

EVENTS = ".events"
_recorders: dict[tuple[str, int], FileRecorder] = {}


class FailedOnPurpose(Exception):
    pass


@dataclass(frozen=True)
class Noting:
    """A handler that is pickled to the tasks. `failures`: key → number of failures of every message (-1: always).
    `handling_s`: duration of a call. With `waits`, calls block until `open` is called."""

    folder: Path
    handling_s: float = 0.0
    failures: Mapping[bytes, int] = field(default_factory=dict)
    waits: bool = False

    def __call__(self, message: Message, context: Context) -> None:
        with self._noted([message], context):
            time.sleep(self.handling_s)
            while self.waits and not (self.folder / "gate").exists():
                time.sleep(0.01)
            self._fail_maybe(message, context)

    def open(self) -> None:
        (self.folder / "gate").touch()

    def _fail_maybe(self, message: Message, context: Context) -> None:
        times = self.failures.get(message.key or b"", 0)
        if times < 0 or context.attempt <= times:
            raise FailedOnPurpose(f"attempt {context.attempt}")

    @contextlib.contextmanager
    def _noted(self, messages: Sequence[Message], context: Context) -> Iterator[None]:
        recorder = _recorder(self.folder)
        for message in messages:
            recorder.started(*_what(message, context), attempt=context.attempt)
        result = "exception"
        try:
            yield
            result = "success"
        finally:
            for message in messages:
                recorder.ended(*_what(message, context), result=result)


class AsyncNoting(Noting):
    async def __call__(self, message: Message, context: Context) -> None:  # type: ignore[override]
        with self._noted([message], context):
            await asyncio.sleep(self.handling_s)
            self._fail_maybe(message, context)


class BatchNoting(Noting):
    """A batch handler. Notes of a batch have no order that the order checker accepts: use them for counting only."""

    def __call__(self, messages: list[Message], context: Context) -> None:  # type: ignore[override]
        with self._noted(messages, context):
            time.sleep(self.handling_s)


def ignore(message: Message, context: Context) -> None:
    pass


def note(message: Message, context: Context) -> None:
    """A handler for the command line, found by name; an environment variable names the folder."""
    Noting(Path(os.environ["NOTED"]), float(os.environ.get("NOTED_S", "0")))(message, context)


def _what(message: Message, context: Context) -> tuple[str, str, int, int, bytes | None, str, int, str | None]:
    place = (message.subject, context.group, message.partition, message.offset, message.key)
    return (*place, context.consumer, context.epoch, message.message_id)


def _recorder(folder: Path) -> FileRecorder:
    """The recorder of this process; a forked child creates a new recorder."""
    known = _recorders.get((str(folder), os.getpid()))
    if known is None:
        known = FileRecorder(folder / f"{os.getpid()}{EVENTS}")
        _recorders[str(folder), os.getpid()] = known
    return known


@dataclass(frozen=True)
class Noted:
    """The notes of all handlers of a folder so far."""

    folder: Path

    def files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{EVENTS}"))

    def history(self) -> History:
        return merge(self.files(), []).history

    @property
    def starts(self) -> list[HandlerStart]:
        return [one for one in self.history() if isinstance(one, HandlerStart)]

    @property
    def ends(self) -> list[HandlerEnd]:
        return [one for one in self.history() if isinstance(one, HandlerEnd)]

    def handled(self) -> Counter[tuple[int, int]]:
        """The number of successful calls, by partition and offset."""
        return Counter((one.partition, one.offset) for one in self.ends if one.result == "success")

    def tasks_by_key(self) -> dict[bytes | None, set[str]]:
        found: dict[bytes | None, set[str]] = {}
        for one in self.starts:
            found.setdefault(one.key, set()).add(one.consumer)
        return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")
