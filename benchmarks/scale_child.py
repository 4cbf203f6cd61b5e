"""A producer and a consumer, in turns: `python -m benchmarks.scale_child ADDRESS`. Prints "ready".

"produce SUBJECT COUNT" sends COUNT messages of 100 bytes, to the partitions in turns, with a key per partition.
"consume SUBJECT COUNT" joins the group "bench", handles the next COUNT messages, the same number per partition, and
leaves; with 0 the consumer acquires and releases the leases only. The answer to both is the seconds of processor time
of this process, and of the clock.
"""

from __future__ import annotations

import sys
import time

from benchmarks.child import answer_lines, end_with_stdin, say
from inturn.client import Connection, connect
from inturn.consumer.context import Context
from inturn.consumer.options import Scope
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.routing import slot_of
from inturn.model.settings import ConsumerSettings
from inturn.model.subject import Subject
from inturn.protocol.commands import FindSubject
from inturn.protocol.request import ask

BODY = b"x" * 100
GROUP = "bench"
STALL_S = 60.0


def main(address: str) -> None:
    end_with_stdin()
    with connect(address, wait_s=10.0) as mq:
        say("ready")

        def answer(words: list[str]) -> str:
            kind, subject, count = words
            began_s, taken_s = (_produce if kind == "produce" else _consume)(mq, subject, int(count))
            return f"{time.process_time() - taken_s} {time.perf_counter() - began_s}"

        answer_lines(answer)


def _produce(mq: Connection, subject: str, count: int) -> tuple[float, float]:
    keys = key_for_each_partition(ask(mq.node, FindSubject(subject), Subject))
    began_s, taken_s = time.perf_counter(), time.process_time()
    with mq.producer() as producer:
        send, turns = producer.send, len(keys)
        for number in range(count):
            send(subject, BODY, key=keys[number % turns])
    return began_s, taken_s


def _consume(mq: Connection, subject: str, count: int) -> tuple[float, float]:
    partitions = len(mq.describe_subject(subject).partitions)
    until = {index: offset + count // partitions for index, offset in _committed(mq, subject, partitions).items()}
    began_s, taken_s = time.perf_counter(), time.process_time()
    consumer = mq.consumer(subject, GROUP, _ignore, settings=ConsumerSettings(concurrency=1), duty=Scope(until=until))
    consumer.start()
    if not consumer.wait_until_through(STALL_S, STALL_S):
        raise InturnError(f"the consumer stands still: {consumer.statistics()}")
    consumer.stop()
    return began_s, taken_s


def _committed(mq: Connection, subject: str, partitions: int) -> dict[int, int]:
    if any(one.subject == subject for one in mq.groups()):
        return {one.partition: one.committed for one in mq.group(subject, GROUP).describe().partitions}
    return dict.fromkeys(range(partitions), 0)


def _ignore(message: Message, context: Context) -> None:
    """An empty handler: all other work is measured."""


def key_for_each_partition(subject: Subject) -> list[bytes]:
    """A key for every partition, by index."""
    keys: dict[int, bytes] = {}
    number = 0
    while len(keys) < subject.partition_count:
        key = b"order-%d" % number
        keys.setdefault(subject.route.by_slot[slot_of(key)], key)
        number += 1
    return [key for _, key in sorted(keys.items())]


if __name__ == "__main__":
    main(*sys.argv[1:])
