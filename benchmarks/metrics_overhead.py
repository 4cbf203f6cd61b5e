"""metrics-overhead: the cost of metrics for a server: `inturn serve --http`.

Two server processes, flush "always", with and without metrics. To both in turns: a producer, pipelined, 100 bytes with
a key into 4 partitions, until all are acknowledged; and a producer that waits for every acknowledgement. The figure is
the processor time of the server per message, beside the time of the server without metrics; with messages per second.
The share of a round compares neighbouring runs, and the figure is the median of the rounds. Then the cost of a request
for the metrics, with 200 groups of 4 partitions; beside the cost one percent of a core, with a request every 15
seconds.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.child import Child
from benchmarks.report import BenchReport, BenchRow, Beside, median
from inturn.client import Connection, connect
from inturn.protocol.commands import Assignment, Heartbeat
from inturn.protocol.request import ask

BODY = b"x" * 100
KEYS = [f"order-{number}" for number in range(1000)]
KEPT_S = 1.1  # asked again sooner, the same text is given
INTERVAL_S = 15.0
GROUP_COUNT, QUICK_GROUP_COUNT = 200, 10
AIM_SHARE = 0.05


def run(quick: bool) -> BenchReport:
    rounds, pipelined, synchronous = (1, 10_000, 50) if quick else (11, 200_000, 3000)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-bench-")))
        servers = [stack.enter_context(_Server(folder / word, word)) for word in ("no", "yes")]
        rows = [
            _measure("pipelined", servers, _send, pipelined, rounds),
            _measure("synchronous", servers, _send_sync, synchronous, rounds),
            _scrape(servers[1], *((1, QUICK_GROUP_COUNT) if quick else (10, GROUP_COUNT))),
        ]
    worst = max(rows[:2], key=lambda row: row.ratio)
    return BenchReport("metrics-overhead", worst.figure, worst.unit, worst.beside, worst.ratio, rows)


class _Server:
    """A child, and a connection to the child."""

    def __init__(self, folder: Path, is_measured: str) -> None:
        self._stack = ExitStack()
        self._child = self._stack.enter_context(Child("measured_child", folder, is_measured))
        address, _, self.url = self._child.hear().partition(" ")
        self.mq = self._stack.enter_context(connect(address, wait_s=10.0))
        self.mq.create_subject("bench", partitions=4)

    def processor_s(self) -> float:
        return float(self._child.ask("time"))

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _measure(
    what: str, servers: list[_Server], send: Callable[[Connection, int], None], count: int, rounds: int
) -> BenchRow:
    taken_ns: list[list[float]] = [[], []]
    per_s: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for place in (0, 1) if number % 2 else (1, 0):
            before_s, began_s = servers[place].processor_s(), time.perf_counter()
            send(servers[place].mq, count)
            per_s[place].append(count / (time.perf_counter() - began_s))
            taken_ns[place].append((servers[place].processor_s() - before_s) / count * 1e9)
    for one in (*taken_ns, *per_s):
        del one[0]  # the first round warms up
    shares = [measured / plain for plain, measured in zip(*taken_ns, strict=True)]
    share, plain = median(shares), median(taken_ns[0])
    more = {
        "per_s": median(per_s[1]),
        "per_s_not_measured": median(per_s[0]),
        "share_least": min(shares),
        "share_most": max(shares),
    }
    beside = [Beside("the same, not measured", plain)]
    aim = f"< {AIM_SHARE:.0%} more"
    unit = "ns of the server's processor time per message"
    return BenchRow(what, plain * share, unit, beside, share, aim, share < 1 + AIM_SHARE, more)


def _send(mq: Connection, count: int) -> None:
    with mq.producer() as producer:
        for number in range(count):
            producer.send("bench", BODY, key=KEYS[number % 1000])


def _send_sync(mq: Connection, count: int) -> None:
    with mq.producer() as producer:
        for number in range(count):
            producer.send_sync("bench", BODY, key=KEYS[number % 1000])


def _scrape(server: _Server, rounds: int, group_count: int) -> BenchRow:
    for number in range(group_count):
        ask(server.mq.node, Heartbeat("bench", f"group-{number}", "nobody", "key", "first"), Assignment)
    taken_ms, size_bytes = [], 0
    for _ in range(rounds):
        time.sleep(KEPT_S)
        before_s = server.processor_s()
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            size_bytes = len(answer.read())
        taken_ms.append((server.processor_s() - before_s) * 1000)
    figure, bound_ms = median(taken_ms), INTERVAL_S * 1000 / 100
    beside = [Beside("one percent of a core, asked every 15 s", bound_ms)]
    ratio = figure / bound_ms
    more: dict[str, float] = {"groups": group_count, "size_bytes": size_bytes}
    return BenchRow("a scrape", figure, "ms of processor time", beside, ratio, "≤ 1 ×", ratio <= 1, more)
