"""send: the cost of a producer per message.

Pipelined: `producer.send` of 100 bytes with a key, every handle kept, until all are acknowledged; beside the figure the
same with handles dropped at once. Synchronous: `send_sync` with flush "always"; beside the figure a bare write and
fdatasync of as many bytes. In turns, in one process.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.report import BenchReport, BenchRow, Beside, median, percentile
from inturn.client import Connection, connect
from inturn.model.batch import HEADER_BYTES
from inturn.model.settings import Flush
from inturn.producer.send_batch import SendHandle

BODY = b"x" * 100
KEYS = [f"order-{number}" for number in range(1000)]
AIM_PER_S = 200_000
AIM_SYNC = 2.0


def run(quick: bool) -> BenchReport:
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder:
        rows = [
            _pipelined(Path(folder), Flush.ALWAYS, 20_000 if quick else 300_000, 2 if quick else 5),
            _pipelined(Path(folder), Flush.OS, 20_000 if quick else 300_000, 2 if quick else 5),
            _synchronous(Path(folder), 200 if quick else 3000),
        ]
    first = rows[0]
    return BenchReport("send", first.figure, first.unit, first.beside, first.ratio, rows)


def _pipelined(folder: Path, flush: Flush, count: int, rounds: int) -> BenchRow:
    kept, thrown = [], []
    with connect(folder / f"pipelined-{flush}", flush=flush) as mq:
        mq.create_subject("bench", partitions=4)
        for _ in range(rounds):
            kept.append(count / _send(mq, count, keeps=True))
            thrown.append(count / _send(mq, count, keeps=False))
    figure = median(kept)
    beside = [Beside("the same without keeping the handles", median(thrown))]
    aim = f"≥ {AIM_PER_S} messages/s"
    return BenchRow(
        f"pipelined, flush {flush.value}", figure, "messages/s", beside, figure / beside[0].figure, aim,
        figure >= AIM_PER_S,
    )  # fmt: skip


def _send(mq: Connection, count: int, *, keeps: bool) -> float:
    handles: list[SendHandle] = []
    keys, key_count = KEYS, len(KEYS)
    with mq.producer() as producer:
        send, keep = producer.send, handles.append
        began = time.perf_counter()
        if keeps:
            for number in range(count):
                keep(send("bench", BODY, key=keys[number % key_count]))
        else:
            for number in range(count):
                send("bench", BODY, key=keys[number % key_count])
        producer.flush()
        took = time.perf_counter() - began
    assert all(handle.result(0).offset >= 0 for handle in handles)
    return took


def _synchronous(folder: Path, count: int) -> BenchRow:
    ours_ms: list[float] = []
    bare_ms: list[float] = []
    data = bytes(HEADER_BYTES + len(BODY) + 30)
    file = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT)
    with connect(folder / "synchronous") as mq, mq.producer() as producer:
        mq.create_subject("bench", partitions=1)
        producer.send_sync("bench", BODY, key="warm")
        for _ in range(count):
            began = time.perf_counter()
            producer.send_sync("bench", BODY, key="order-42")
            between = time.perf_counter()
            os.write(file, data)
            os.fdatasync(file)
            bare_ms.append((time.perf_counter() - between) * 1000)
            ours_ms.append((between - began) * 1000)
    os.close(file)
    figure, bare = percentile(ours_ms, 0.5), percentile(bare_ms, 0.5)
    more = {"p99_ms": percentile(ours_ms, 0.99), "bare_p99_ms": percentile(bare_ms, 0.99)}
    beside = [Beside("one bare write + fdatasync, p50", bare)]
    ratio = figure / bare
    return BenchRow(
        "synchronous p50, flush always", figure, "ms", beside, ratio, f"≤ {AIM_SYNC:g} ×", ratio <= AIM_SYNC, more
    )
