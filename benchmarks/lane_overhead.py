"""lane-overhead: the cost of order by key per message: an empty handler, 1 M messages of 100 bytes, one partition,
concurrency 16, over the number of keys; threads and async.

The whole consumer takes part: log, pull, decode, scheduler, handler, commit tracker, commits. The measured time is from
the first call of the handler to the last. The handler counts its calls to find the last call: about 50 ns. Beside the
figure a bare loop that decodes the same batches from memory. In turns; the figures are medians of the rounds.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.batches import decode_s, read_batches
from benchmarks.report import BenchReport, BenchRow, Beside, median
from inturn.client import Connection, connect
from inturn.consumer.context import Context
from inturn.consumer.worker import Handler
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, Flush, Order

COUNT, QUICK_COUNT = 1_000_000, 20_000
KEY_COUNTS = (10, 100, 1000, 10_000, 100_000, 1_000_000)
QUICK_KEY_COUNTS = (100, 20_000)
CONCURRENCY = 16
AIM_PER_S = 250_000
AIM_SHARE, SHARE_OF = 0.3, 100  # with the most keys, of the figure with so many
BODY = b"x" * 100
STALL_S = 120.0


def run(quick: bool) -> BenchReport:
    count, key_counts, rounds = (QUICK_COUNT, QUICK_KEY_COUNTS, 1) if quick else (COUNT, KEY_COUNTS, 3)
    measured = {keys: _measure(count, keys, rounds) for keys in key_counts}
    rows: list[BenchRow] = []
    for number, kind in enumerate(("threads", "async")):
        reference = measured[SHARE_OF][number]
        for keys, figures in measured.items():
            figure, bound = figures[number], figures[2]
            share = figure / reference
            is_met, aim = figure >= AIM_PER_S, f"≥ {AIM_PER_S} messages/s"
            if keys == key_counts[-1]:
                is_met, aim = is_met and share >= AIM_SHARE, f"{aim}, ≥ {AIM_SHARE} of {SHARE_OF} keys"
            beside = [Beside("decoding the same batches in a bare loop", bound)]
            more = {"keys": keys, f"share_of_{SHARE_OF}_keys": share}
            rows.append(
                BenchRow(f"{kind}, {keys} keys", figure, "messages/s", beside, figure / bound, aim, is_met, more)
            )
    worst = min(rows, key=lambda row: row.ratio)
    return BenchReport("lane-overhead", worst.figure, worst.unit, worst.beside, worst.ratio, rows)


def _measure(count: int, keys: int, rounds: int) -> tuple[float, float, float]:
    """Messages/s by threads, by tasks, and by the bare loop."""
    threads, tasks, bare = [], [], []
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        mq.create_subject("bench", partitions=1)
        with mq.producer() as producer:
            for number in range(count):
                producer.send("bench", BODY, key=b"order-%d" % (number % keys))
        batches = read_batches(mq, "bench")
        for number in range(rounds):
            bare.append(count / decode_s(batches, count))
            threads.append(count / consume(mq, f"threads-{number}", Counter(count)))
            tasks.append(count / consume(mq, f"tasks-{number}", Counter(count), is_async=True))
    return median(threads), median(tasks), median(bare)


class Counter:
    """Notes the first call and the last. Counting is atomic."""

    def __init__(self, count: int) -> None:
        self.last = count - 1
        self.numbers = itertools.count()
        self.first_at_s = self.last_at_s = 0.0
        self.is_over = threading.Event()

    def note(self, number: int) -> None:
        if number == 0:
            self.first_at_s = time.perf_counter()
        else:
            self.last_at_s = time.perf_counter()
            self.is_over.set()


def consume(
    mq: Connection, group: str, counter: Counter, *, is_async: bool = False, settings: ConsumerSettings | None = None
) -> float:
    """The seconds from the first call to the last."""
    numbers, edges, note = counter.numbers, (0, counter.last), counter.note

    def handler(message: Message, context: Context) -> None:
        if (number := next(numbers)) in edges:
            note(number)

    async def async_handler(message: Message, context: Context) -> None:
        if (number := next(numbers)) in edges:
            note(number)

    chosen: Handler = async_handler if is_async else handler
    settings = settings or ConsumerSettings(concurrency=CONCURRENCY)
    with mq.consumer("bench", group, chosen, order=Order.KEY, settings=settings):
        if not counter.is_over.wait(STALL_S):
            raise InturnError(f"{next(numbers)} of {counter.last + 1} calls after {STALL_S:.0f} s: no progress")
    assert next(numbers) == counter.last + 1, "a message ran twice"
    return counter.last_at_s - counter.first_at_s
