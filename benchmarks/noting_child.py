"""A consumer that notes its calls: `python -m benchmarks.noting_child ADDRESS SUBJECT GROUP NAME`.

Prints "ready". Answers: to "count" the number of calls for messages of `pacing_child`; to "calls NS" the calls that
started since NS, see `Call`; to "stop" when the consumer is stopped; to "forget" after the notes are deleted; to "time"
the processor time of this process so far, in seconds.
"""

from __future__ import annotations

import sys
import time

import msgspec

from benchmarks.child import Child, answer_lines, end_with_stdin, say
from benchmarks.pacing_child import STAMP_BYTES
from inturn.client import connect
from inturn.consumer.context import Context
from inturn.model.message import Message


class Call(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Times of `time.monotonic_ns`, the same clock for all processes of a machine."""

    partition: int
    sent_ns: int
    began_ns: int
    ended_ns: int


def calls_since(child: Child, since_ns: int) -> list[Call]:
    return msgspec.json.decode(child.ask("calls", since_ns), type=list[Call])


def main(address: str, subject: str, group: str, name: str) -> None:
    end_with_stdin()
    calls: list[Call] = []

    def handler(message: Message, context: Context) -> None:
        began_ns = time.monotonic_ns()
        if sent_ns := int.from_bytes(message.body[:STAMP_BYTES], "little"):  # 0: a trial of a key
            calls.append(Call(message.partition, sent_ns, began_ns, time.monotonic_ns()))

    with connect(address, wait_s=10.0) as mq:
        consumer = mq.consumer(subject, group, handler, name=name)
        with consumer:
            say("ready")

            def answer(words: list[str]) -> str:
                match words:
                    case ["count"]:
                        return str(len(calls))
                    case ["calls", since_ns]:
                        return msgspec.json.encode([one for one in calls if one.began_ns >= int(since_ns)]).decode()
                    case ["time"]:
                        return str(time.process_time())
                    case ["forget"]:
                        calls.clear()
                        return "forgotten"
                    case _:
                        return str(consumer.stop())

            answer_lines(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
