"""An online consumer process: reads a group, handles all messages, and prints the time."""

from __future__ import annotations

import sys
import time

from benchmarks.child import answer_lines, end_with_stdin, say
from inturn.client import connect
from inturn.consumer.options import Scope
from inturn.model.errors import InturnError
from inturn.model.settings import ConsumerSettings, Order
from inturn.spark.shipping import load_handler

STALL_S = 60.0


def main(address: str, subject: str, handler: str, concurrency: str) -> None:
    end_with_stdin()
    with connect(address) as mq:
        function = load_handler(handler)
        settings = ConsumerSettings(concurrency=int(concurrency))
        ends = {one.index: one.end_offset for one in mq.describe_subject(subject).partitions}

        def consume(words: list[str]) -> str:
            consumer = mq.consumer(
                subject, words[0], function, order=Order.KEY, settings=settings, duty=Scope(until=ends)
            )
            began = time.perf_counter()
            consumer.start()
            if not consumer.wait_until_through(STALL_S, 3600.0):
                raise InturnError(f"the consumer stands still: {consumer.statistics()}")
            consumer.stop()
            return f"{time.perf_counter() - began:.6f}"

        say("ready")
        answer_lines(consume)


if __name__ == "__main__":
    main(*sys.argv[1:])
