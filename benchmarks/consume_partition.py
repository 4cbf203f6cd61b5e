"""consume-partition: a call of an empty handler per message, through leases, pulls, the run and the
commits; beside the figure a bare loop that decodes the same batches from memory. In turns."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from benchmarks.batches import decode_s, read_batches
from benchmarks.report import BenchReport, BenchRow, Beside, median
from inturn.client import Connection, connect
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, Flush

AIM = 0.3
BODY = b"x" * 100


def run(quick: bool) -> BenchReport:
    count, rounds = (50_000, 3) if quick else (1_000_000, 5)
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        mq.create_subject("bench", partitions=1)
        with mq.producer() as producer:
            for number in range(count):
                producer.send("bench", BODY, key=f"order-{number % 1000}")
        batches = read_batches(mq, "bench")
        ours, bare = [], []
        for number in range(rounds):
            bare.append(count / decode_s(batches, count))
            ours.append(count / _consume(mq, f"group-{number}", count))
    figure, bound = median(ours), median(bare)
    beside = [Beside("decoding the same batches in a bare loop", bound)]
    ratio = figure / bound
    row = BenchRow("1 partition, no-op handler", figure, "messages/s", beside, ratio, f"ratio ≥ {AIM}", ratio >= AIM)
    return BenchReport("consume-partition", figure, "messages/s", beside, ratio, [row])


def _consume(mq: Connection, group: str, count: int) -> float:
    done = threading.Event()
    last = count - 1

    def handler(message: Message, context: Context) -> None:
        if message.offset == last:
            done.set()

    began = time.perf_counter()
    with mq.consumer("bench", group, handler, settings=ConsumerSettings(concurrency=1)):
        done.wait()
        took = time.perf_counter() - began
    return took
