"""The process that `stuck-key` kills: consumes in order of keys and notes every begin and end in a file.

`python -m benchmarks.stuck_key_child FOLDER NOTES STUCK`: the message at offset STUCK never ends (-1: all do).
A note is a single write to a file opened for appending, and survives kill -9. Ends when stdin is closed.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from inturn.client import connect
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, Flush, Order

SUBJECT, GROUP = "bench", "stuck"
THREADS = 16


def consume(folder: Path, notes: Path, stuck: int) -> None:
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    never = threading.Event()

    def handler(message: Message, context: Context) -> None:
        os.write(file, b"begin %d\n" % message.offset)
        if message.offset == stuck:
            never.wait()
        os.write(file, b"end %d\n" % message.offset)

    settings = ConsumerSettings(concurrency=THREADS)
    with (
        connect(folder, flush=Flush.OS) as mq,
        mq.consumer(SUBJECT, GROUP, handler, order=Order.KEY, settings=settings),
    ):
        sys.stdin.read()
        if stuck >= 0:
            os._exit(0)  # the parent is gone; a stop would wait for the handler


if __name__ == "__main__":
    consume(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
