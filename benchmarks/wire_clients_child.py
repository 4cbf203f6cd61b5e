"""Blocking clients, a thread and a connection per client: `python -m benchmarks.wire_clients_child KIND TARGET
COUNT`.

KIND `inturn`: TARGET is an address, and a round trip is a Ping through `ask`. KIND `bare`: a port of an echo server,
and as many bytes. Prints "ready"; the answer to "SECONDS" is the number of round trips per second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.bare_client import FRAME, dial, round_trip
from benchmarks.child import answer_lines, end_with_stdin, say
from inturn.client import connect
from inturn.protocol.commands import Done, Ping
from inturn.protocol.request import ask


def main(kind: str, target: str, count: str) -> None:
    end_with_stdin()
    works = [_client(kind, target) for _ in range(int(count))]
    for work in works:
        work()
    say("ready")
    with ThreadPoolExecutor(len(works)) as threads:

        def answer(words: list[str]) -> str:
            seconds = float(words[0])
            return str(sum(threads.map(lambda work: _per_s(work, seconds), works)))

        answer_lines(answer)


def _client(kind: str, target: str) -> Callable[[], object]:
    if kind == "bare":
        return partial(round_trip, dial(int(target)), FRAME)
    return partial(ask, connect(target, wait_s=10.0).node, Ping(), Done)


def _per_s(work: Callable[[], object], seconds: float) -> float:
    began = now = time.perf_counter()
    count = 0
    while now - began < seconds:
        work()
        count += 1
        now = time.perf_counter()
    return count / (now - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
