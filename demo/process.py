"""The child processes of the demo: the server, and the consumers of the third and the last act.

python -m demo.process server FOLDER LEASE_S
python -m demo.process consumer NAME FILE HANDLING_S HEARTBEAT_S
python -m demo.process online NAME TRACES HEARTBEAT_S

A consumer reads the address of the server from stdin. A child ends when its stdin is closed: the parent has closed the
pipe, or is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from demo.orders import (
    INCIDENT_GROUP,
    INCIDENT_SUBJECT,
    ONLINE_CONCURRENCY,
    SERVED_CONCURRENCY,
    SERVED_GROUP,
    SUBJECT,
    notify,
)
from inturn.client import Connection, connect
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context, Hook
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings
from inturn.testing.history import HandlerEnd, HandlerResult, HandlerStart

GRACE_S = 5.0
# A handler that failed or raised is called again in place; a slow success is a success.
_RECORDED_AS = {ResultKind.SUCCESS: "success", ResultKind.TIMEOUT: "success", ResultKind.FAILED: "failed"}


def recorded_as(kind: ResultKind) -> HandlerResult:
    """The order checker's word for the result of a handler."""
    return cast(HandlerResult, _RECORDED_AS.get(kind, "exception"))


class HandlerRecord(msgspec.Struct, frozen=True):
    """A start or an end of a handler, on the monotonic clock that all processes of a machine share."""

    at_ns: int
    event: HandlerStart | HandlerEnd


class HandlerRecords(Hook):
    """Writes the start of every handler before the handler runs, and its end afterwards.

    A record is one line and one write: kill -9 leaves whole lines only.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def before(self, messages: Sequence[Message], context: Context) -> None:
        for one in messages:
            self._write(HandlerStart(*_where(one, context), one.message_id, context.attempt))

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        for one in messages:
            self._write(HandlerEnd(*_where(one, context), one.message_id, recorded_as(kind)))

    def _write(self, event: HandlerStart | HandlerEnd) -> None:
        os.write(self._file, msgspec.json.encode(HandlerRecord(time.monotonic_ns(), event)) + b"\n")


def _where(message: Message, context: Context) -> tuple[str, str, int, int, bytes | None, str, int]:
    place = (context.subject, context.group, context.partition, message.offset, message.key)
    return (*place, context.consumer, context.epoch)


def serve(folder: str, lease_s: str) -> None:
    """`inturn serve`, until the parent closes the pipe."""
    from inturn.cli.main import app

    _end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    app(["serve", folder, "--port", "0", "--lease-s", lease_s, "--grace-s", "1", "--json"])


def consume(name: str, path: str, handling_s: str, heartbeat_s: str) -> None:
    """A consumer of the third act. Records its handlers in the file."""
    work_s = float(handling_s)

    def handle(message: Message, context: Context) -> None:
        time.sleep(work_s)

    settings = ConsumerSettings(concurrency=SERVED_CONCURRENCY, commit_interval_s=0.05, heartbeat_s=float(heartbeat_s))
    hooks = [HandlerRecords(path)]
    _consume(
        lambda connection: connection.consumer(
            SUBJECT, SERVED_GROUP, handle, order="key", settings=settings, hooks=hooks, name=name
        )
    )


def consume_online(name: str, traces: str, heartbeat_s: str) -> None:
    """An online consumer of the last act. Records a trace."""
    settings = ConsumerSettings(
        concurrency=ONLINE_CONCURRENCY, commit_interval_s=0.1, heartbeat_s=float(heartbeat_s), trace=traces
    )
    _consume(
        lambda connection: connection.consumer(
            INCIDENT_SUBJECT, INCIDENT_GROUP, notify, order="key", settings=settings, name=name
        )
    )


def _consume(opened: Callable[[Connection], Consumer]) -> None:
    address = sys.stdin.buffer.readline().decode().strip()
    if not address:
        return  # the server has not started
    is_over = threading.Event()
    _end_with_parent(is_over.set)
    with connect(address, wait_s=GRACE_S) as connection, opened(connection):
        is_over.wait()
        # If the server is gone, no broker takes the leases back: do not wait for it.
        timer = threading.Timer(GRACE_S, os._exit, [1])
        timer.daemon = True
        timer.start()


def _end_with_parent(end: Callable[[], None]) -> None:
    """Call `end` when the parent closes the pipe, or is gone."""

    def wait() -> None:
        sys.stdin.buffer.read()
        end()

    threading.Thread(target=wait, name="inturn-parent", daemon=True).start()


CHILDREN: dict[str, Callable[..., None]] = {"server": serve, "consumer": consume, "online": consume_online}

if __name__ == "__main__":
    CHILDREN[sys.argv[1]](*sys.argv[2:])
