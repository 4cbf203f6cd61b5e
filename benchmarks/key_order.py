"""key-order: handlers that sleep for a random time between 0 and 5 ms (seeded, by offset), 1 partition, 16 threads.

The measured time is from the start of the first handler to the end of the last handler, with all work of a consumer in
between: pulling, scheduling, commits, renewals. The messages are stored before (flush "os", in process). Joining the
group and the first pull come before the first handler and are not measured. Beside the figure, in turns:

(a) the same sleeps in 16 bare threads, longest lane first: a lock and a heap, all lanes known beforehand; the ratio;
(b) the static model in bare threads: key `xxh64(key) % 16` chooses a queue of 16, with a thread per queue;
(c) the same consumer with order="partition": a single lane for all keys, measured once.

All variants sleep by `time.sleep`. A call oversleeps by about 0.1 ms in all variants alike: figures are above the sum
of the sleeps, and ratios are not affected. All variants note two times per call. Slow rows are measured once, the other
rows are medians of the rounds.

--zipf: the same with keys by Zipf(1.1) out of 1 000. --async: `await asyncio.sleep(0.005)`, 4 partitions, 100 keys,
concurrency 100; beside the figure bare tasks on the same kind of event loop, a task per key, with the same awaits.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import xxhash

from benchmarks.calls import Calls
from benchmarks.replay import Lanes, longest_lane_first, one_task_per_lane, static_hash
from benchmarks.report import BenchReport, BenchRow, Beside, median
from inturn.client import Connection, connect
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, Flush, Order

THREADS = 16
SLEEP_S_MAX = 0.005
KEY_COUNTS = (1, 2, 5, 10, 20, 100, 1000, 10_000)
QUICK_KEY_COUNTS = (1, 20, 200)
ZIPF_KEYS, ZIPF_EXPONENT = 1000, 1.1
ASYNC_KEYS, ASYNC_PARTITIONS, ASYNC_CONCURRENCY = 100, 4, 100
AIM = 1.05
AIM_ASYNC = 0.9
BODY = b"x" * 100
BARE, STATIC, PARTITION = "bare threads, longest lane first", "static hash, bare threads", "order by partition"
BARE_ASYNC = "bare tasks, one per key"
LONG_S = 4.0  # what takes longer is measured once


@dataclass(frozen=True, slots=True)
class Plan:
    """Message number i has key `keys[i]` and sleeps for `sleeps_s[i]`."""

    keys: list[int]
    sleeps_s: list[float]

    @property
    def lanes(self) -> Lanes:
        lanes: dict[int, list[float]] = {}
        for key, sleep_s in zip(self.keys, self.sleeps_s, strict=True):
            lanes.setdefault(key, []).append(sleep_s)
        return list(lanes.values())

    @property
    def hashed(self) -> Lanes:
        """The queues of the threads in the static model."""
        queues: list[list[float]] = [[] for _ in range(THREADS)]
        for key, sleep_s in zip(self.keys, self.sleeps_s, strict=True):
            queues[xxhash.xxh64_intdigest(_key(key)) % THREADS].append(sleep_s)
        return queues

    @property
    def bound_s(self) -> float:
        """No schedule is quicker, if sleeping was exact."""
        return max(sum(self.sleeps_s) / THREADS, max(sum(lane) for lane in self.lanes))


def run(quick: bool) -> BenchReport:
    count, key_counts = (200, QUICK_KEY_COUNTS) if quick else (10_000, KEY_COUNTS)
    sleeps_s = _sleeps_s(count)
    plans = {keys: Plan([number % keys for number in range(count)], sleeps_s) for keys in key_counts}
    partition_s = _partition_order_s(count)
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        rows = [
            _row(mq, f"{keys} key{'s' * (keys > 1)}", plan, partition_s, quick, {"keys": keys})
            for keys, plan in plans.items()
        ]
    return _report("key-order", rows)


def run_zipf(quick: bool) -> BenchReport:
    count, keys = (200, 20) if quick else (10_000, ZIPF_KEYS)
    weights = [1 / rank**ZIPF_EXPONENT for rank in range(1, keys + 1)]
    drawn = random.Random(1).choices(range(keys), weights, k=count)
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        plan = Plan(drawn, _sleeps_s(count))
        what = f"Zipf({ZIPF_EXPONENT}) over {keys} keys"
        row = _row(mq, what, plan, _partition_order_s(count), quick, {"keys": keys})
    return _report("key-order --zipf", [row])


def run_async(quick: bool) -> BenchReport:
    count, rounds = (1000, 1) if quick else (10_000, 5)
    lanes = [[SLEEP_S_MAX] * (count // ASYNC_KEYS)] * ASYNC_KEYS
    ours: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        mq.create_subject("async", partitions=ASYNC_PARTITIONS)
        _store(mq, "async", [number % ASYNC_KEYS for number in range(count)])
        _in_turns(
            rounds,
            (lambda number: _consume_async(mq, f"group-{number}", count), ours),
            (lambda number: one_task_per_lane(lanes), bare),
        )
    figure, bound = count / median(ours), count / median(bare)
    beside = [Beside(BARE_ASYNC, bound)]
    ratio = figure / bound
    what = f"{ASYNC_KEYS} keys, {ASYNC_PARTITIONS} partitions, concurrency {ASYNC_CONCURRENCY}, 5 ms await"
    more = {"took_s": median(ours), "bare_s": median(bare)}
    row = BenchRow(what, figure, "messages/s", beside, ratio, f"ratio ≥ {AIM_ASYNC}", ratio >= AIM_ASYNC, more)
    return BenchReport("key-order --async", figure, "messages/s", beside, ratio, [row])


def _report(name: str, rows: list[BenchRow]) -> BenchReport:
    worst = max(rows, key=lambda row: row.ratio)
    return BenchReport(name, worst.figure, worst.unit, worst.beside, worst.ratio, rows)


def _row(mq: Connection, what: str, plan: Plan, partition_s: float, quick: bool, more: dict[str, float]) -> BenchRow:
    subject = f"keys-{len(mq.subjects())}"
    mq.create_subject(subject, partitions=1)
    _store(mq, subject, plan.keys)
    lanes, queues = plan.lanes, plan.hashed
    ours: list[float] = []
    bare: list[float] = []
    static: list[float] = []
    _in_turns(
        1 if quick or plan.bound_s > LONG_S else 3,
        (lambda number: _consume(mq, subject, f"group-{number}", Order.KEY, plan.sleeps_s), ours),
        (lambda number: longest_lane_first(lanes, THREADS), bare),
        (lambda number: static_hash(queues), static),
    )
    figure = median(ours)
    beside = [Beside(BARE, median(bare)), Beside(STATIC, median(static)), Beside(PARTITION, partition_s)]
    ratio = figure / beside[0].figure
    return BenchRow(
        what, figure, "s", beside, ratio, f"≤ {AIM:g} × the first", ratio <= AIM, {**more, "bound_s": plan.bound_s}
    )


def _in_turns(rounds: int, *measures: tuple[Callable[[int], float], list[float]]) -> None:
    """Each once per round, every other round backwards."""
    for number in range(rounds):
        for measure, times_s in measures[:: -1 if number % 2 else 1]:
            times_s.append(measure(number))


@cache
def _partition_order_s(count: int) -> float:
    """The same for all keys, and slow: once per process."""
    sleeps_s = _sleeps_s(count)
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as folder, connect(Path(folder), flush=Flush.OS) as mq:
        mq.create_subject("partition", partitions=1)
        _store(mq, "partition", list(range(count)))
        return _consume(mq, "partition", "group", Order.PARTITION, sleeps_s)


def _sleeps_s(count: int) -> list[float]:
    drawn = random.Random(0)
    return [drawn.uniform(0, SLEEP_S_MAX) for _ in range(count)]


def _key(number: int) -> bytes:
    return b"order-%d" % number


def _store(mq: Connection, subject: str, keys: list[int]) -> None:
    with mq.producer() as producer:
        for key in keys:
            producer.send(subject, BODY, key=_key(key))


def _consume(mq: Connection, subject: str, group: str, order: Order, sleeps_s: list[float]) -> float:
    calls: Calls[Message] = Calls(len(sleeps_s))

    def handler(message: Message, context: Context) -> None:
        calls.begin(message)
        time.sleep(sleeps_s[message.offset])
        calls.end()

    with mq.consumer(subject, group, handler, order=order, settings=ConsumerSettings(concurrency=THREADS)):
        calls.wait(60 + 2 * sum(sleeps_s))
    return _checked(calls)


def _consume_async(mq: Connection, group: str, count: int) -> float:
    calls: Calls[Message] = Calls(count)

    async def handler(message: Message, context: Context) -> None:
        calls.begin(message)
        await asyncio.sleep(SLEEP_S_MAX)
        calls.end()

    settings = ConsumerSettings(concurrency=ASYNC_CONCURRENCY)
    with mq.consumer("async", group, handler, order=Order.KEY, settings=settings):
        calls.wait(60)
    return _checked(calls)


def _checked(calls: Calls[Message]) -> float:
    """Raises if the consumer broke the order or repeated a message: such a run has no figure."""
    last: dict[bytes | None, int] = {}
    for message in calls.began:
        assert message.offset > last.get(message.key, -1), f"{message.key_text}: {message.offset} came out of turn"
        last[message.key] = message.offset
    assert len(calls.began) == calls.count
    return calls.took_s
