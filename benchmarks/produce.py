"""produce: a producer through a server process over TCP; flush "always".

Pipelined: a producer, 100 bytes with a key, 4 partitions, every handle kept, until all are acknowledged; beside the
figure the same in process. Synchronous: `send_sync` by 16 producers, 2 processes × 8 threads with a connection per
process, all into one partition, or into 4; beside the figure a single producer, and a sequence of bare writes and
fdatasyncs of as many bytes on the same disk. In turns; the figures are medians of the rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.child import Child
from benchmarks.report import BenchReport, BenchRow, Beside, median
from benchmarks.served_child import served
from inturn.client import Connection, connect
from inturn.model.batch import HEADER_BYTES
from inturn.producer.send_batch import SendHandle

BODY = b"x" * 100
KEYS = [f"order-{number}" for number in range(1000)]
PROCESSES, PRODUCERS_EACH = 2, 8
PARTITION_COUNTS = (1, 4)
AIM_SHARE, AIM_PER_S = 0.6, 150_000
AIM_TIMES = 5.0


def run(quick: bool) -> BenchReport:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-bench-")))
        server = stack.enter_context(served(folder / "served"))
        address = server.hear()
        rows = [
            _pipelined(address, folder / "local", *((2, 20_000) if quick else (5, 200_000))),
            *_synchronous(address, folder / "bare", *((2, 0.4) if quick else (5, 1.0))),
        ]
    first = rows[0]
    return BenchReport("produce", first.figure, first.unit, first.beside, first.ratio, rows)


def _pipelined(address: str, folder: Path, rounds: int, count: int) -> BenchRow:
    remote: list[float] = []
    local: list[float] = []
    with connect(address, wait_s=10.0) as there, connect(folder) as here:
        for mq in (there, here):
            mq.create_subject("pipelined", partitions=4)
            _send_s(mq, count // 10)  # the first messages create files and load lazy imports
        for _ in range(rounds):
            remote.append(count / _send_s(there, count))
            local.append(count / _send_s(here, count))
    figure, bound = median(remote), median(local)
    ratio = figure / bound
    aim = f"≥ {AIM_SHARE:g} ×, ≥ {AIM_PER_S} messages/s"
    is_met = ratio >= AIM_SHARE and figure >= AIM_PER_S
    beside = [Beside("the same in process", bound)]
    return BenchRow("pipelined, 1 producer", figure, "messages/s", beside, ratio, aim, is_met)


def _send_s(mq: Connection, count: int) -> float:
    handles: list[SendHandle] = []
    with mq.producer() as producer:
        producer.send_sync("pipelined", BODY, key="warm")
        began = time.perf_counter()
        for number in range(count):
            handles.append(producer.send("pipelined", BODY, key=KEYS[number % 1000]))  # noqa: PERF401
        producer.flush()
        took = time.perf_counter() - began
    assert all(handle.result(0).offset >= 0 for handle in handles)
    return took


def _synchronous(address: str, bare_file: Path, rounds: int, seconds: float) -> list[BenchRow]:
    with connect(address, wait_s=10.0) as mq:
        for partitions in PARTITION_COUNTS:
            mq.create_subject(_subject(partitions), partitions=partitions)
    with ExitStack() as stack:
        one = [stack.enter_context(Child("sync_producers_child", address, 1))]
        many = [stack.enter_context(Child("sync_producers_child", address, PRODUCERS_EACH)) for _ in range(PROCESSES)]
        for child in (*one, *many):
            child.hear()
        return [_many_beside_one(one, many, partitions, bare_file, rounds, seconds) for partitions in PARTITION_COUNTS]


def _many_beside_one(
    one: list[Child], many: list[Child], partitions: int, bare_file: Path, rounds: int, seconds: float
) -> BenchRow:
    ours: list[float] = []
    alone: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        alone.append(_per_s(one, _subject(partitions), seconds))
        ours.append(_per_s(many, _subject(partitions), seconds))
        bare.append(_bare_per_s(bare_file, seconds / 3))
    figure, single = median(ours), median(alone)
    beside = [Beside("one producer", single), Beside("one bare write + fdatasync after the other", median(bare))]
    ratio = figure / single
    what = f"synchronous, {PROCESSES * PRODUCERS_EACH} producers, {partitions} partition{'s' * (partitions > 1)}"
    more: dict[str, float] = {"partitions": partitions}
    return BenchRow(what, figure, "messages/s", beside, ratio, f"≥ {AIM_TIMES:g} × one", ratio >= AIM_TIMES, more)


def _subject(partitions: int) -> str:
    return f"synchronous-{partitions}"


def _per_s(children: list[Child], subject: str, seconds: float) -> float:
    for child in children:
        child.tell(subject, seconds)
    return sum(float(child.hear()) for child in children)


def _bare_per_s(path: Path, seconds: float) -> float:
    data = bytes(HEADER_BYTES + len(BODY) + 30)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    began = now = time.perf_counter()
    count = 0
    while now - began < seconds:
        os.write(file, data)
        os.fdatasync(file)
        count += 1
        now = time.perf_counter()
    os.close(file)
    return count / (now - began)
