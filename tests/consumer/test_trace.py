"""The trace of a consumer."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from xxhash import xxh64_intdigest

from inturn import ConsumerSettings, Context, Message, connect, suspend
from inturn.client import Connection
from inturn.consumer.trace import (
    EVENTS,
    EXCEPTION,
    FAILED,
    OF_KEY,
    OF_PARTITION,
    RUNS,
    SUCCESS,
    Trace,
    TraceChunk,
    TraceEvent,
    TraceRun,
    chunks,
    events_of,
    key_hash,
    runs_of,
)
from inturn.model.errors import InvalidInput
from inturn.model.settings import Order
from inturn.model.time import SystemClock

COUNT = 200


class Run:
    """A message of a trace, decoded without numpy, to check the columns independently."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    partition: int
    offset: int
    hashed: int
    lane_kind: int
    epoch: int
    start_s: float
    end_s: float
    attempt: int
    result: int


def _runs(chunk: TraceChunk) -> list[Run]:
    return [one for run in runs_of(chunk) for one in _messages(run, chunk.head.lone_kind)]


def _messages(run: TraceRun, lone_kind: int) -> list[Run]:
    stops = [*(first for _, _, first in run.parts[1:]), len(run.offsets)]
    parts = [part for part, stop in zip(run.parts, stops, strict=True) for _ in range(part[2], stop)]
    counts = run.counts or [1] * len(run.offsets)
    hashes = [one for one, count in zip(run.hashes or [None] * len(counts), counts, strict=True) for _ in range(count)]
    ends = run.ends
    odd = {at: (attempt, result) for at, attempt, result in run.odd}
    columns = zip(run.offsets, parts, hashes, [run.start_s, *ends[:-1]], ends, strict=True)
    return [
        Run(
            partition=part[0],
            epoch=part[1],
            offset=offset,
            hashed=0 if hashed is None else hashed - (1 << 64) * (hashed >> 63),
            lane_kind=lone_kind if hashed is None else OF_KEY,
            start_s=start_s,
            end_s=end_s,
            attempt=odd.get(number, (1, SUCCESS))[0],
            result=odd.get(number, (1, SUCCESS))[1],
        )
        for number, (offset, part, hashed, start_s, end_s) in enumerate(columns)
    ]


def _read(folder: Path) -> tuple[list[Run], list[TraceEvent]]:
    runs: list[Run] = []
    events: list[TraceEvent] = []
    for path in sorted(folder.glob("*.trace")):
        for chunk in chunks(path.read_bytes()):
            if chunk.kind == RUNS:
                runs += _runs(chunk)
            else:
                events += events_of(chunk)
    return runs, events


def _sent(mq: Connection, count: int = COUNT, keys: int = 7) -> None:
    mq.create_subject("orders", partitions=2)
    with mq.producer() as producer:
        for number in range(count):
            producer.send("orders", b"%d" % number, key=b"key-%d" % (number % keys))


class _Handled:
    """A handler that fails as the test says, and is finished after a success of every message."""

    def __init__(self, count: int = COUNT, failing: frozenset[bytes] = frozenset()) -> None:
        self.count = count
        self.failing = failing
        self.done: list[tuple[int, int, bytes | None]] = []
        self.tried: dict[bytes, int] = defaultdict(int)
        self.is_over = threading.Event()

    def __call__(self, message: Message, context: Context) -> object:
        self.tried[message.body] += 1
        if message.body in self.failing and self.tried[message.body] == 1:
            raise RuntimeError("the first try")
        if message.body in self.failing and self.tried[message.body] == 2:
            return suspend(0.01)
        self.done.append((message.partition, message.offset, message.key))
        if len(self.done) == self.count:
            self.is_over.set()
        return None


def _consume(
    mq: Connection, folder: Path, handler: _Handled, order: Order, *, is_async: bool = False, batch: int = 1
) -> None:
    async def task(message: Message, context: Context) -> object:
        return handler(message, context)

    def batched(messages: list[Message], context: Context) -> None:
        for message in messages:
            handler(message, context)

    settings = ConsumerSettings(trace=str(folder), commit_interval_s=0.02, batch=batch)
    chosen = batched if batch > 1 else task if is_async else handler
    with mq.consumer("orders", "billing", chosen, order=order, settings=settings):
        assert handler.is_over.wait(30)


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize("order", [Order.KEY, Order.PARTITION], ids=["by key", "by partition"])
def test_every_run_is_recorded_with_its_lane_and_its_times(tmp_path: Path, order: Order, is_async: bool) -> None:
    handler = _Handled()
    with connect(tmp_path / "data") as mq:
        _sent(mq)
        _consume(mq, tmp_path / "trace", handler, order, is_async=is_async)
    runs, _ = _read(tmp_path / "trace")
    assert sorted((run.partition, run.offset) for run in runs) == sorted(place[:2] for place in handler.done)
    hashes = {(partition, offset): key_hash(key) for partition, offset, key in handler.done if key is not None}
    lanes: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        assert run.start_s <= run.end_s
        assert run.lane_kind == (OF_KEY if order is Order.KEY else OF_PARTITION)
        if order is Order.KEY:
            assert run.hashed == hashes[run.partition, run.offset]
        lanes[run.partition, run.hashed].append(run)
    for lane in lanes.values():
        in_time = sorted(lane, key=lambda run: (run.start_s, run.end_s))
        assert [run.offset for run in in_time] == sorted(run.offset for run in lane)
        for one, other in itertools.pairwise(in_time):
            assert one.end_s <= other.start_s


def test_the_key_hash_is_the_one_of_spark() -> None:
    assert key_hash(b"key-1") % (1 << 64) == xxh64_intdigest(b"key-1", 42)
    assert {key_hash(b"key-%d" % number) < 0 for number in range(50)} == {True, False}


def test_attempts_and_results_are_recorded(tmp_path: Path) -> None:
    handler = _Handled(failing=frozenset({b"17", b"40"}))
    with connect(tmp_path / "data") as mq:
        _sent(mq)
        _consume(mq, tmp_path / "trace", handler, Order.KEY)
    runs, _ = _read(tmp_path / "trace")
    tries: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.start_s):
        tries[run.partition, run.offset].append((run.attempt, run.result))
    repeated = [some for some in tries.values() if len(some) > 1]
    assert repeated == [[(1, EXCEPTION), (2, FAILED), (3, SUCCESS)]] * 2
    assert len(tries) == COUNT


def test_a_batch_is_recorded_message_by_message(tmp_path: Path) -> None:
    handler = _Handled()
    with connect(tmp_path / "data") as mq:
        _sent(mq)
        _consume(mq, tmp_path / "trace", handler, Order.PARTITION, batch=10)
    runs, _ = _read(tmp_path / "trace")
    assert len(runs) == COUNT
    for partition in (0, 1):
        offsets = [run.offset for run in runs if run.partition == partition]
        assert offsets == sorted(offsets)


def test_commits_come_after_the_runs_they_tell_of(tmp_path: Path) -> None:
    handler = _Handled()
    with connect(tmp_path / "data") as mq:
        _sent(mq)
        _consume(mq, tmp_path / "trace", handler, Order.KEY)
    (path,) = (tmp_path / "trace").glob("*.trace")
    whole = list(chunks(path.read_bytes()))
    anchor_ns = whole[0].head.anchor_ns
    ended_ns = {
        (run.partition, run.offset): anchor_ns + round(run.end_s * 1e9)
        for chunk in whole
        if chunk.kind == RUNS
        for run in _runs(chunk)
    }
    _, events = _read(tmp_path / "trace")
    commits = [event for event in events if event.kind == "committed"]
    assert {(one.partition, one.offset) for one in commits} >= {(0, _end(handler, 0)), (1, _end(handler, 1))}
    for commit in commits:
        for (partition, offset), end_ns in ended_ns.items():
            if partition == commit.partition and offset < commit.offset:
                assert end_ns <= commit.at_ns <= commit.until_ns
    kinds = [event.kind for event in events]
    assert kinds[0] == "opened"
    assert kinds[-1] == "closed"
    assert kinds.count("granted") == 2
    assert [event.why for event in events if event.kind == "ended"] == ["released", "released"]


def _end(handler: _Handled, partition: int) -> int:
    return 1 + max(offset for index, offset, _ in handler.done if index == partition)


def test_a_killed_consumer_leaves_a_trace_without_an_end(tmp_path: Path) -> None:
    handler = _Handled()
    with connect(tmp_path / "data") as mq:
        _sent(mq)
        settings = ConsumerSettings(trace=str(tmp_path / "trace"))
        consumer = mq.consumer("orders", "billing", handler, order=Order.KEY, settings=settings)
        consumer.start()
        assert handler.is_over.wait(30)
        consumer.kill()
        consumer.wait(10)
    _, events = _read(tmp_path / "trace")
    kinds = [event.kind for event in events]
    assert "opened" in kinds
    assert "closed" not in kinds


def test_a_torn_tail_ends_the_trace_and_is_not_mistaken(tmp_path: Path) -> None:
    handler = _Handled()
    with connect(tmp_path / "data") as mq:
        _sent(mq)
        _consume(mq, tmp_path / "trace", handler, Order.KEY)
    (path,) = (tmp_path / "trace").glob("*.trace")
    content = path.read_bytes()
    whole = [(chunk.kind, bytes(chunk.body)) for chunk in chunks(content)]
    for length in {1, 30, len(content) // 2, len(content) - 1}:
        cut = [(chunk.kind, bytes(chunk.body)) for chunk in chunks(content[:length])]
        assert len(cut) < len(whole)
        assert cut == whole[: len(cut)]
    for at in range(100, len(content), 997):
        damaged = bytearray(content)
        damaged[at] ^= 0x40
        some = [(chunk.kind, bytes(chunk.body)) for chunk in chunks(bytes(damaged))]
        assert len(some) < len(whole)
        assert some == whole[: len(some)]


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not a trace of inturn"):
        list(chunks(b"x" * 100))


def test_files_are_rotated_by_size(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "orders", "billing", "me", Order.KEY, SystemClock(), file_bytes=300)
    for _ in range(10):
        trace._event("moved", 1.0, partition=1, offset=5)
        trace.flush()
    trace.end(is_clean=True)
    files = sorted(tmp_path.glob("*.trace"))
    assert len(files) > 2
    assert all(path.stat().st_size <= 300 for path in files)
    _, events = _read(tmp_path)
    assert [event.kind for event in events] == ["opened", *["moved"] * 10, "closed"]


def test_a_full_disk_ends_the_trace_and_not_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Trace, more_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    handler = _Handled(count=10)
    with connect(tmp_path / "data") as mq:
        _sent(mq, count=10)
        monkeypatch.setattr(Trace, "_rotate", full)
        _consume(mq, tmp_path / "trace", handler, Order.KEY)
    assert len(handler.done) == 10
    assert _read(tmp_path / "trace") == ([], [])


def test_events_are_read_without_the_runs(tmp_path: Path) -> None:
    handler = _Handled()
    with connect(tmp_path / "data") as mq:
        _sent(mq)
        _consume(mq, tmp_path / "trace", handler, Order.KEY)
    (path,) = (tmp_path / "trace").glob("*.trace")
    assert {chunk.kind for chunk in chunks(path.read_bytes(), (EVENTS,))} == {EVENTS}


@pytest.mark.parametrize("wrong", ["", 5])
def test_a_folder_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput, match=r"ConsumerSettings\.trace"):
        ConsumerSettings(trace=wrong)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with connect(tmp_path / "data") as mq:
        mq.create_subject("orders")
        with pytest.raises(InvalidInput, match="trace folder"):
            mq.consumer("orders", "billing", _Handled(), settings=ConsumerSettings(trace=str(tmp_path / "file" / "x")))
