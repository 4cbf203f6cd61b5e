"""A producer with a fixed rate: `python -m benchmarks.pacing_child ADDRESS SUBJECT`. Prints "ready".

The answer to "start RATE" (messages per second) comes at once; to "stop" after all acknowledgements, with the number of
messages and the seconds; to "time" with the processor time of this process so far. A body begins with
`time.monotonic_ns` of its `send`; the messages go to the partitions in turns, with a key per partition.
"""

from __future__ import annotations

import sys
import threading
import time

from benchmarks.child import answer_lines, end_with_stdin, say
from inturn.client import Connection, connect
from inturn.producer.producer import Producer

PADDING = b"x" * 92  # 100 bytes with the time
STAMP_BYTES = 8


class Pace(threading.Thread):
    """Sends due messages, and sleeps until the next is due."""

    def __init__(self, producer: Producer, subject: str, keys: list[bytes], rate: int) -> None:
        super().__init__(name="pace", daemon=True)
        self.is_stopped = False
        self.sent = 0
        self.took_s = 0.0
        self._send = producer.send
        self._subject = subject
        self._keys = keys
        self._every_ns = 1_000_000_000 // rate

    def run(self) -> None:
        keys, count = self._keys, len(self._keys)
        began_ns = due_ns = time.monotonic_ns()
        while not self.is_stopped:
            while (now_ns := time.monotonic_ns()) >= due_ns:
                body = now_ns.to_bytes(STAMP_BYTES, "little") + PADDING
                self._send(self._subject, body, key=keys[self.sent % count])
                self.sent += 1
                due_ns += self._every_ns
            time.sleep((due_ns - now_ns) / 1e9)
        self.took_s = (time.monotonic_ns() - began_ns) / 1e9


def main(address: str, subject: str) -> None:
    end_with_stdin()
    with connect(address, wait_s=10.0) as mq, mq.producer() as producer:
        keys = _key_for_each_partition(mq, producer, subject)
        say("ready")
        pace = Pace(producer, subject, keys, 1)

        def answer(words: list[str]) -> str:
            nonlocal pace
            if words[0] == "time":
                return str(time.process_time())
            if words[0] == "start":
                pace = Pace(producer, subject, keys, int(words[1]))
                pace.start()
                return "started"
            pace.is_stopped = True
            pace.join()
            producer.flush()
            return f"{pace.sent} {pace.took_s}"

        answer_lines(answer)
        pace.is_stopped = True


def _key_for_each_partition(mq: Connection, producer: Producer, subject: str) -> list[bytes]:
    wanted = len(mq.describe_subject(subject).partitions)
    keys: dict[int, bytes] = {}
    number = 0
    while len(keys) < wanted:
        key = b"order-%d" % number
        keys.setdefault(producer.send_sync(subject, bytes(STAMP_BYTES), key=key).partition, key)
        number += 1
    return [key for _, key in sorted(keys.items())]


if __name__ == "__main__":
    main(*sys.argv[1:])
