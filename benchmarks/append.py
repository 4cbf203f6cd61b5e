"""append: the log layer alone. Batches of 1 000 messages of 100 bytes, encoded before, flush "os"; beside the figure
the same bytes written to a plain file. In turns, on a disk without other writes; the figures are medians of the
rounds."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from array import array
from pathlib import Path

from benchmarks.report import BenchReport, BenchRow, Beside, median
from inturn.log.embedded import EmbeddedEngine
from inturn.model.batch import HEADER_BYTES, Batch, encode
from inturn.model.message import Outgoing
from inturn.model.routing import Partition
from inturn.model.settings import Flush, LogSettings
from inturn.model.time import Timers

MESSAGES = 1000
BODY_BYTES = 100
AIM = 0.5


def run(quick: bool) -> BenchReport:
    count, rounds = (200, 3) if quick else (2000, 7)
    batches = _batches(count)
    ours: list[float] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder:
        for number in range(rounds):
            # The page cache of a measurement must not slow the next measurement down.
            for measure, times in ((_plain, plain), (_append, ours))[:: 1 if number % 2 else -1]:
                path = Path(folder) / "measured"
                os.sync()
                times.append(measure(path, batches))
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    figure, bound = count * MESSAGES / median(ours), count * MESSAGES / median(plain)
    beside = [Beside("the same bytes written to a file", bound)]
    ratio = figure / bound
    row = BenchRow("1 000 × 100 B, flush os", figure, "messages/s", beside, ratio, f"ratio ≥ {AIM}", ratio >= AIM)
    return BenchReport("append", figure, "messages/s", beside, ratio, [row])


def _batches(count: int) -> list[Batch]:
    slots = array("H", range(MESSAGES))
    messages = [Outgoing(os.urandom(BODY_BYTES), b"order-%d" % number, 1) for number in range(MESSAGES)]
    first = encode(messages, slots)
    return [Batch(first.count, 1, 0, number * MESSAGES, 1, 0, first.checksum, first.payload) for number in range(count)]


def _append(folder: Path, batches: list[Batch]) -> float:
    engine = EmbeddedEngine(folder, LogSettings(flush=Flush.OS), Timers())
    log = engine.open(Partition("local", "p1"))
    stored = threading.Semaphore(0)
    began = time.perf_counter()
    for batch in batches:
        log.append(batch, lambda answer: stored.release())
    for _ in batches:
        stored.acquire()
    took = time.perf_counter() - began
    assert log.end_offset == len(batches) * MESSAGES
    engine.close()
    return took


def _plain(path: Path, batches: list[Batch]) -> float:
    data = bytes(HEADER_BYTES) + batches[0].payload
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    began = time.perf_counter()
    for _ in batches:
        os.write(file, data)
    took = time.perf_counter() - began
    os.close(file)
    return took
