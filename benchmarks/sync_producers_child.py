"""Synchronous producers: `python -m benchmarks.sync_producers_child ADDRESS COUNT`.

A connection, and a thread per producer. Prints "ready"; the answer to "SUBJECT SECONDS" is messages per second.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.child import answer_lines, end_with_stdin, say
from inturn.client import connect
from inturn.producer.producer import Producer

BODY = b"x" * 100


def main(address: str, count: str) -> None:
    end_with_stdin()
    with connect(address, wait_s=10.0) as mq, ThreadPoolExecutor(int(count)) as threads:
        producers = [mq.producer() for _ in range(int(count))]
        say("ready")

        def answer(words: list[str]) -> str:
            subject, seconds = words[0], float(words[1])
            return str(sum(threads.map(lambda producer: _per_s(producer, subject, seconds), producers)))

        answer_lines(answer)


def _per_s(producer: Producer, subject: str, seconds: float) -> float:
    name = f"{os.getpid()}-{id(producer)}"
    began = now = time.perf_counter()
    count = 0
    while now - began < seconds:
        producer.send_sync(subject, BODY, key=f"{name}-{count % 100}")
        count += 1
        now = time.perf_counter()
    return count / (now - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
