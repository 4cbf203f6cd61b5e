"""Idle consumers: `python -m benchmarks.idle_child ADDRESS COUNT SUBJECT …`.

Every consumer has a connection; the subjects are used in turns. The child prints "ready", and starts the consumers. The
answer to "held" is the number of held leases, to "time" the processor time of this process in seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack

from benchmarks.child import answer_lines, end_with_stdin, say
from inturn.client import connect
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings

STACK_BYTES = 256 * 1024  # per thread
GROUP = "idle"


def _ignore(message: Message, context: Context) -> None:
    """Never called: no message is sent."""


def main(address: str, count: str, *subjects: str) -> None:
    end_with_stdin()
    threading.stack_size(STACK_BYTES)
    with ExitStack() as stack:
        consumers: list[Consumer] = []
        # Starting takes longer than an answer may.
        starting = threading.Thread(target=_start, args=(address, int(count), subjects, consumers, stack))
        starting.start()
        say("ready")

        def answer(words: list[str]) -> str:
            if words == ["held"]:
                return str(sum(len(one.leases()) for one in list(consumers)))
            return str(time.process_time())

        answer_lines(answer)
        starting.join()
        _stop(consumers)


def _start(address: str, count: int, subjects: tuple[str, ...], consumers: list[Consumer], stack: ExitStack) -> None:
    settings = ConsumerSettings(concurrency=1)
    for number in range(count):
        mq = connect(address, wait_s=30.0)
        stack.callback(mq.close)
        consumer = mq.consumer(subjects[number % len(subjects)], GROUP, _ignore, settings=settings)
        consumer.start()
        consumers.append(consumer)


def _stop(consumers: list[Consumer]) -> None:
    """Stop all at once: in sequence, every consumer would hand its lease over to the remaining consumers."""
    threads = [threading.Thread(target=one.stop) for one in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
