"""trace-overhead: the cost of recording a trace: the work of lane-overhead, with and without a trace.

The figure is the share of the trace in the processor time per message, of all threads, until the consumer has stopped.
In turns, in one process, on the same machine; the share of a round compares neighbouring runs, and the figure is the
median of the rounds. Every consumer is a new group and starts at the first message.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.lane_overhead import BODY, CONCURRENCY, Counter, consume
from benchmarks.report import BenchReport, BenchRow, Beside, median
from inturn.client import Connection, connect
from inturn.model.settings import ConsumerSettings, Flush

COUNT, QUICK_COUNT = 300_000, 10_000
ROUNDS, QUICK_ROUNDS = 9, 1
KEYS = 100  # and a value per message
AIM_SHARE = 0.05


def run(quick: bool) -> BenchReport:
    count, rounds = (QUICK_COUNT, QUICK_ROUNDS) if quick else (COUNT, ROUNDS)
    rows = [row for keys in (KEYS, count) for row in _measure(count, keys, rounds)]
    worst = max(rows, key=lambda row: row.ratio)
    return BenchReport("trace-overhead", worst.figure, worst.unit, worst.beside, worst.ratio, rows)


def _measure(count: int, keys: int, rounds: int) -> list[BenchRow]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        mq.create_subject("bench", partitions=1)
        with mq.producer() as producer:
            for number in range(count):
                producer.send("bench", BODY, key=b"order-%d" % (number % keys))
        for is_async in (False, True):
            kind = "async" if is_async else "threads"
            without_ns: list[float] = []
            with_ns: list[float] = []
            for number in range(rounds + 1):
                trace = str(Path(folder, "trace", f"{kind}-{number}"))
                turns = [(None, without_ns), (trace, with_ns)]
                for setting, found in turns if number % 2 else reversed(turns):
                    name = f"{kind}-{number}-{'plain' if setting is None else 'traced'}"
                    found.append(_processor_ns(mq, name, count, setting, is_async=is_async))
            del without_ns[0], with_ns[0]  # the first round warms up
            rows.append(_row(f"{kind}, {keys} keys", keys, without_ns, with_ns))
    return rows


def _processor_ns(mq: Connection, group: str, count: int, trace: str | None, *, is_async: bool) -> float:
    """Per message."""
    settings = ConsumerSettings(concurrency=CONCURRENCY, trace=trace)
    began_s = time.process_time()
    consume(mq, group, Counter(count), is_async=is_async, settings=settings)
    return (time.process_time() - began_s) / count * 1e9


def _row(what: str, keys: int, without_ns: list[float], with_ns: list[float]) -> BenchRow:
    shares = [traced / plain - 1 for plain, traced in zip(without_ns, with_ns, strict=True)]
    share, plain = median(shares), median(without_ns)
    figure = plain * (1 + share)
    more = {"keys": keys, "share": share, "share_least": min(shares), "share_most": max(shares)}
    beside = [Beside("the same without a trace", plain)]
    is_met = share < AIM_SHARE
    return BenchRow(
        what, figure, "ns of processor time per message", beside, 1 + share, f"< {AIM_SHARE:.0%} more", is_met, more
    )
