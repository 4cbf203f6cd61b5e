"""process-workers: a handler that computes, in as many processes as cores; a partition, order by key, 100 keys.

Beside the figure the same work in a bare `multiprocessing.Pool` of as many processes, without order, leases or commits;
and the same consumer with threads that share the interpreter. Processes are started before the measured time, from the
first message to the last finished message. In turns; the figures are medians of the rounds.

With handlers of about 2 ms a message is a round trip; messages of about 50 µs are delivered in chunks, and the pool has
chunks of the same size.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.handlers import LONG_ROUNDS, SHORT_ROUNDS, compute, computes_long, computes_shortly
from benchmarks.report import BenchReport, BenchRow, Beside, median
from inturn.client import Connection, connect
from inturn.consumer.worker import Handler
from inturn.model.errors import InturnError
from inturn.model.settings import ConsumerSettings, Flush, Order

COUNT, QUICK_COUNT = 4_000, 100
SHORT_SHARE = 20  # number of short messages per long message
ROUNDS = 3
KEYS = 100
POOL_CHUNK = 40  # of short messages: about 2 ms, as in a consumer
LOOK_S = 0.002
STALL_S = 120.0
AIMS = {"2 ms": 0.85, "50 µs": 0.5}


def run(quick: bool) -> BenchReport:
    count, rounds = (QUICK_COUNT, 1) if quick else (COUNT, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        mq.create_subject("bench", partitions=1)
        with mq.producer() as producer:
            for number in range(count * SHORT_SHARE):
                producer.send("bench", b"x", key=b"order-%d" % (number % KEYS))
        long = _row(mq, "2 ms", computes_long, LONG_ROUNDS, count, 1, rounds)
        short = _row(mq, "50 µs", computes_shortly, SHORT_ROUNDS, count * SHORT_SHARE, POOL_CHUNK, rounds)
    return BenchReport("process-workers", long.figure, long.unit, long.beside, long.ratio, [long, short])


def _row(
    mq: Connection, name: str, handler: Handler, work_rounds: int, count: int, pool_chunk: int, rounds: int
) -> BenchRow:
    cores = os.cpu_count() or 1
    by_pool: list[float] = []
    by_workers: dict[str, list[float]] = {"processes": [], "threads": []}
    for number in range(rounds):
        by_pool.append(_pool_per_s(cores, work_rounds, count, pool_chunk))
        for workers, figures in by_workers.items():
            settings = ConsumerSettings(concurrency=cores, workers=workers)
            figures.append(_consume_per_s(mq, f"{name.split()[0]}-{workers}-{number}", handler, settings, count))
    figure, pool, threads = median(by_workers["processes"]), median(by_pool), median(by_workers["threads"])
    beside = [Beside(f"a bare pool of {cores} processes", pool), Beside("the same consumer with threads", threads)]
    aim = AIMS[name]
    more = {"cores": cores, "times_threads": figure / threads}
    return BenchRow(
        f"{cores} processes, {name} each",
        figure,
        "messages/s",
        beside,
        figure / pool,
        f"≥ {aim} of the pool",
        figure >= aim * pool,
        more,
    )


def _consume_per_s(mq: Connection, group: str, handler: Handler, settings: ConsumerSettings, count: int) -> float:
    with mq.consumer("bench", group, handler, order=Order.KEY, settings=settings) as consumer:
        return _per_s(lambda: consumer.statistics().ok_count, count)


def _pool_per_s(cores: int, work_rounds: int, count: int, chunk: int) -> float:
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(compute, [1] * cores * 4, 1)  # all processes are there
        began_s = time.perf_counter()
        for _ in pool.imap_unordered(compute, [work_rounds] * count, chunk):
            pass
        return count / (time.perf_counter() - began_s)


def _per_s(done: Callable[[], int], count: int) -> float:
    """Measured from the first finished message on: after the consumer has joined and has the lease."""
    until_s = time.perf_counter() + STALL_S
    first = began_s = 0.0
    while (now := done()) < count:
        if now and not began_s:
            first, began_s = now, time.perf_counter()
        if time.perf_counter() > until_s:
            raise InturnError(f"{now} of {count} messages after {STALL_S:.0f} s: no progress")
        time.sleep(LOOK_S)
    if not began_s:
        return count / LOOK_S  # finished before the first check
    return (count - first) / (time.perf_counter() - began_s)
