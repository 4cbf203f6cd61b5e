"""A consumer process of the demo's third act; it writes down when each handler started and ended.

python -m demo.consumer NAME FILE HANDLING_S HEARTBEAT_S, and the address of the server on stdin.

Each record is one line and one write, so kill -9 leaves whole lines only. The start is noted before the handler runs,
the end after it, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from demo.board import recorded_as
from demo.children import GRACE_S, end_with_parent
from demo.orders import SERVED_CONCURRENCY, SERVED_GROUP, SUBJECT
from inturn.client import connect
from inturn.consumer.context import Context, Hook
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings
from inturn.testing.history import HandlerEnd, HandlerResult, HandlerStart


class Record(msgspec.Struct, frozen=True):
    at_ns: int
    event: HandlerStart | HandlerEnd


class _Recording(Hook):
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def before(self, messages: Sequence[Message], context: Context) -> None:
        for one in messages:
            self._write(
                HandlerStart(*_where(one, context), context.consumer, context.epoch, one.message_id, context.attempt)
            )

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        result = cast(HandlerResult, recorded_as(kind))
        for one in messages:
            self._write(HandlerEnd(*_where(one, context), context.consumer, context.epoch, one.message_id, result))

    def _write(self, event: HandlerStart | HandlerEnd) -> None:
        os.write(self._file, msgspec.json.encode(Record(time.monotonic_ns(), event)) + b"\n")


def _where(message: Message, context: Context) -> tuple[str, str, int, int, bytes | None]:
    return context.subject, context.group, context.partition, message.offset, message.key


def main(name: str, path: str, handling_s: str, heartbeat_s: str) -> None:
    address = sys.stdin.buffer.readline().decode().strip()
    if not address:
        return  # there will be no server
    is_over = threading.Event()
    end_with_parent(is_over.set)
    work_s = float(handling_s)

    def handle(message: Message, context: Context) -> None:
        time.sleep(work_s)

    with connect(address, wait_s=GRACE_S) as connection:
        settings = ConsumerSettings(
            concurrency=SERVED_CONCURRENCY, commit_interval_s=0.05, heartbeat_s=float(heartbeat_s)
        )
        consumer = connection.consumer(
            SUBJECT, SERVED_GROUP, handle, order="key", settings=settings, hooks=[_Recording(path)], name=name
        )
        with consumer:
            is_over.wait()
            # If the server is gone, too, there is nobody to give anything back to.
            timer = threading.Timer(GRACE_S, os._exit, [1])
            timer.daemon = True
            timer.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
