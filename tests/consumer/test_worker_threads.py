"""The consumer with threads and an event loop, against a node in this process: code without locks."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import pytest

from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.model.message import Message, Outgoing
from inturn.model.result import Suspend, suspend
from inturn.model.settings import ConsumerSettings, FlowControl, Order
from inturn.model.time import SystemClock
from inturn.protocol.commands import Command, Reply
from tests.consumer.fake_node import Bench, stored_batch

END_S = 60.0  # for a busy machine; one or two seconds are usual


class LocalNode:
    """Answers at once, in the caller's thread."""

    def __init__(self) -> None:
        self._bench = Bench(order=Order.KEY)
        self._lock = threading.Lock()

    def store(self, keys: list[bytes], batch: int = 500) -> None:
        for start in range(0, len(keys), batch):
            messages = [Outgoing(b"x", key) for key in keys[start : start + batch]]
            self._bench.logs[0].append(stored_batch(self._bench.end(), messages))

    def submit(self, command: Command, reply: Reply) -> None:
        with self._lock:
            answer = self._bench.good_answer(command)
        if answer is not None:
            reply(answer)  # type: ignore[arg-type]

    def committed(self) -> int:
        with self._lock:
            return self._bench.committed()


class Witness:
    """Checks every call: a single call per key at a time, in order, and every message once unless the call failed."""

    def __init__(self, count: int, fail_share: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._left = count
        self._fail_share = fail_share
        self._running: set[bytes | None] = set()
        self._failed: set[int] = set()
        self._handled: defaultdict[bytes | None, list[int]] = defaultdict(list)
        self.running_max = 0
        self.problems: list[str] = []
        self.is_over = threading.Event()

    def begins(self, message: Message) -> None:
        with self._lock:
            if message.key in self._running:
                self.problems.append(f"two of {message.key!r} at once: {message.offset}")
            self._running.add(message.key)
            self.running_max = max(self.running_max, len(self._running))
            handled = self._handled[message.key]
            if handled and message.offset <= handled[-1]:
                self.problems.append(f"{message.offset} of {message.key!r} after {handled[-1]}")

    def ends(self, message: Message, numbers: random.Random) -> Suspend | None:
        """The result of the handler: sometimes a suspend, at most once per message."""
        with self._lock:
            self._running.discard(message.key)
            if message.offset not in self._failed and numbers.random() < self._fail_share:
                self._failed.add(message.offset)
                return suspend(0.01)
            self._handled[message.key].append(message.offset)
            self._left -= 1
            if not self._left:
                self.is_over.set()
            return None

    def check(self, keys: list[bytes]) -> None:
        assert self.problems == []
        expected: defaultdict[bytes | None, list[int]] = defaultdict(list)
        for offset, key in enumerate(keys):
            expected[key].append(offset)
        assert self._handled == expected


@pytest.fixture
def restless() -> Iterator[None]:
    """Switch threads as often as possible."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def keys_at_random(count: int, keys: int, seed: int = 5) -> list[bytes]:
    numbers = random.Random(seed)
    return [b"%d" % int(keys * numbers.random() ** 2) for _ in range(count)]


def consumer_of(node: LocalNode, handler: object, concurrency: int = 8, **settings: object) -> Consumer:
    chosen = ConsumerSettings(concurrency=concurrency, commit_interval_s=0.02, **settings)  # type: ignore[arg-type]
    return Consumer(node, SystemClock(), "orders", "billing", handler, order=Order.KEY, settings=chosen)  # type: ignore[arg-type]


def handler_of(witness: Witness, sleeps_s: tuple[float, ...]) -> object:
    local = threading.local()

    def handle(message: Message, context: Context) -> object:
        if not hasattr(local, "numbers"):
            local.numbers = random.Random(threading.get_ident())
        witness.begins(message)
        sleep_s = local.numbers.choice(sleeps_s)
        if sleep_s:
            time.sleep(sleep_s)
        return witness.ends(message, local.numbers)

    return handle


QUICK = (0.0,) * 200 + (0.005,)
MIXED = (0.0, 0.0, 0.0001, 0.0005)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize(("sleeps_s", "fail_share"), [(QUICK, 0.0), (MIXED, 0.0), (QUICK, 0.01), (MIXED, 0.01)])
def test_messages_of_one_key_never_overlap_and_keep_their_order_in_threads(
    sleeps_s: tuple[float, ...], fail_share: float
) -> None:
    """Chunks are large and small, and some runs are slow, so lanes are taken back while workers continue."""
    keys = keys_at_random(4000, 200)
    node = LocalNode()
    node.store(keys)
    witness = Witness(len(keys), fail_share)
    with consumer_of(node, handler_of(witness, sleeps_s), flow=FlowControl(buffered_count=1000)) as consumer:
        assert witness.is_over.wait(END_S), consumer.statistics()
    witness.check(keys)
    assert node.committed() == len(keys)
    assert witness.running_max > 1


@pytest.mark.parametrize("fail_share", [0.0, 0.01])
def test_messages_of_one_key_never_overlap_and_keep_their_order_in_an_event_loop(fail_share: float) -> None:
    keys = keys_at_random(4000, 200)
    node = LocalNode()
    node.store(keys)
    witness = Witness(len(keys), fail_share)
    numbers = random.Random(1)

    async def handle(message: Message, context: Context) -> object:
        witness.begins(message)
        await asyncio.sleep(numbers.choice((0.0, 0.0, 0.001)))
        return witness.ends(message, numbers)

    with consumer_of(node, handle, 50) as consumer:
        assert witness.is_over.wait(END_S), consumer.statistics()
    witness.check(keys)
    assert node.committed() == len(keys)
    assert witness.running_max > 8


@pytest.mark.usefixtures("restless")
def test_concurrency_may_change_and_others_may_look_while_everything_runs() -> None:
    keys = keys_at_random(3000, 100)
    node = LocalNode()
    node.store(keys)
    witness = Witness(len(keys))
    with consumer_of(node, handler_of(witness, MIXED), 1, flow=FlowControl(buffered_count=500, span=600)) as consumer:
        numbers = random.Random(2)
        for _ in range(10_000):
            if witness.is_over.wait(0.002):
                break
            consumer.concurrency = numbers.choice([1, 2, 8, 16])
            consumer.statistics()
    witness.check(keys)
    assert consumer.error is None


def test_quick_keys_do_not_wait_for_a_slow_one_that_the_same_worker_took() -> None:
    """Other workers take back the messages that a slow run has not started, even when all were idle."""
    node = LocalNode()
    warm_up = [b"%d" % number for number in range(3000)]
    node.store([*warm_up, b"slow", *(b"%d" % number for number in range(100))])
    release, slow_runs = threading.Event(), threading.Event()
    left = threading.Semaphore(0)

    def handle(message: Message, context: Context) -> None:
        if message.key == b"slow":
            slow_runs.set()
            release.wait(END_S)
        else:
            left.release()

    with consumer_of(node, handle, 2):
        try:
            assert slow_runs.wait(END_S)
            began_s = time.monotonic()
            for _ in range(len(warm_up) + 100):
                assert left.acquire(timeout=END_S)
            took_s = time.monotonic() - began_s
        finally:
            release.set()
    assert took_s < END_S / 2
    assert node.committed() == len(warm_up) + 101


def test_a_worker_survives_an_error_that_cannot_be_printed() -> None:
    """Otherwise the thread would die while holding the lock, or the work would be lost."""
    node = LocalNode()
    node.store([b"a", b"b", b"a", b"b"])
    handled: list[int] = []
    is_over = threading.Event()

    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

        __repr__ = __str__

    def handle(message: Message, context: Context) -> None:
        if message.offset == 0 and context.attempt == 1:
            raise UnprintableError
        handled.append(message.offset)
        if len(handled) == 4:
            is_over.set()

    consumer = consumer_of(node, handle, 1)
    consumer.start()
    try:
        assert is_over.wait(END_S), f"only {handled} were handled"
    finally:
        consumer.stop(END_S)
    assert [offset for offset in handled if offset in (0, 2)] == [0, 2]


def test_the_head_of_a_lane_may_be_asked_for_while_its_worker_goes_on() -> None:
    """`blocking` runs in the thread that talks to the node: no lock stops the worker meanwhile."""
    bench = Bench(order=Order.KEY)
    problems: list[BaseException] = []
    is_over = threading.Event()

    def look(bench: Bench) -> None:
        while not is_over.is_set():
            try:
                for lane in list(bench.state.buffer.lanes.values()):
                    _ = lane.head
            except BaseException as error:
                problems.append(error)
                return

    bench.store_keys("a" * 20_000)
    bench.settle()
    looking = threading.Thread(target=partial(look, bench))
    looking.start()
    try:
        assert len(bench.handle_all()) == 20_000
    finally:
        is_over.set()
        looking.join()
    assert problems == []
