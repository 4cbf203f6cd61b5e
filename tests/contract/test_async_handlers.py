"""C18: `async def` handlers: the same promises as for plain handlers, as tasks of an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from inturn import Connection, Context, Hook, Message, Result, ResultKind, RetryDelays, suspend
from tests.contract.bed import WAIT_S, Bed, Witness, committed, eventually, quick, send

pytestmark = pytest.mark.usefixtures("quiet")


def test_more_handlers_wait_at_once_than_anybody_has_threads(line: Connection) -> None:
    send(line, "line", *(f"k{number}:x" for number in range(300)))
    running = most = 0

    async def handle(message: Message, context: Context) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        until_s = time.monotonic() + WAIT_S
        while most < 300 and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        running -= 1

    before = threading.active_count()
    with line.consumer("line", "g", handle, order="key", settings=quick(concurrency=300)):
        eventually(lambda: committed(line) == 300, "all of them")
        assert threading.active_count() - before < 10
    assert most == 300


def test_concurrency_is_a_limit(line: Connection) -> None:
    send(line, "line", *(f"k{number}:x" for number in range(60)))
    running = most = 0

    async def handle(message: Message, context: Context) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        until_s = time.monotonic() + WAIT_S / 2
        while most < 5 and time.monotonic() < until_s:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.003)
        running -= 1

    with line.consumer("line", "g", handle, order="key", settings=quick(concurrency=5)):
        eventually(lambda: committed(line) == 60, "all of them")
    assert most == 5


@pytest.mark.parametrize("order", ["key", "partition"])
def test_the_order_is_kept(bed: Bed, order: str) -> None:
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("orders", 4)
    send(mq, "orders", *(f"k{number % 40}:{number}" for number in range(1000)), witness=witness)

    async def handle(message: Message, context: Context) -> object:
        if int(message.body) % 3 == 0:
            await asyncio.sleep(0.001)
        if int(message.body) % 50 == 7 and context.attempt == 1:
            raise RuntimeError("not now")
        return suspend(0.01) if int(message.body) % 70 == 9 and context.attempt == 1 else None

    with mq.consumer("orders", "g", witness.watch_async(handle), order=order, settings=quick(concurrency=50)):
        eventually(lambda: committed(mq, subject="orders") == 1000, "all of them")
    verdict = witness.judge(order="key" if order == "key" else "partition")
    assert verdict.duplicates == 0


def test_an_exception_repeats_the_message_and_a_suspend_waits(line: Connection) -> None:
    at_s: list[float] = []
    attempts: list[int] = []

    async def handle(message: Message, context: Context) -> object:
        at_s.append(time.monotonic())
        attempts.append(context.attempt)
        await asyncio.sleep(0)
        if context.attempt == 1:
            raise RuntimeError("not now")
        return suspend(0.2) if context.attempt == 2 else None

    send(line, "line", "k:0")
    with line.consumer("line", "g", handle, order="key", settings=quick()):
        eventually(lambda: committed(line) == 1, "it is done")
    assert attempts == [1, 2, 3]
    assert at_s[2] - at_s[1] >= 0.2


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_whatever_a_handler_raises_ends_no_worker(line: Connection, error: type[BaseException]) -> None:
    async def handle(message: Message, context: Context) -> None:
        await asyncio.sleep(0)
        if context.attempt == 1:
            raise error

    send(line, "line", "a:0", "b:1", "a:2")
    with line.consumer("line", "g", handle, order="key", settings=quick(concurrency=1)):
        eventually(lambda: committed(line) == 3, "all of them")


def test_batches_and_manual_acknowledgement(line: Connection) -> None:
    calls: list[list[Message]] = []

    async def handle(messages: list[Message], context: Context) -> Result | None:
        await asyncio.sleep(0.001)
        calls.append(messages)
        if len(calls) == 1:
            return Result.ROLLBACK
        context.ack()
        return None

    send(line, "line", *(f"k{number % 4}:{number}" for number in range(80)))
    with line.consumer("line", "g", handle, order="key", settings=quick(batch=6, ack="manual")):
        eventually(lambda: committed(line) == 80, "all of them")
    assert all(len({message.key for message in messages}) == 1 for messages in calls)
    assert sum(len(messages) for messages in calls) == 80 + len(calls[0])


def test_hooks_see_every_attempt(line: Connection) -> None:
    noted: list[tuple[str, bytes]] = []

    class Note(Hook):
        def before(self, messages: Sequence[Message], context: Context) -> None:
            noted.append(("before", messages[0].body))

        def after(
            self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
        ) -> None:
            noted.append((kind.value, messages[0].body))

    async def handle(message: Message, context: Context) -> None:
        await asyncio.sleep(0.001)
        if message.body == b"1" and context.attempt == 1:
            raise RuntimeError("not now")

    send(line, "line", "a:0", "b:1")
    with line.consumer("line", "g", handle, order="key", settings=quick(), hooks=[Note()]):
        eventually(lambda: committed(line) == 2, "both")
    assert Counter(noted) == {
        ("before", b"0"): 1, ("success", b"0"): 1, ("before", b"1"): 2, ("exception", b"1"): 1, ("success", b"1"): 1,
    }  # fmt: skip


def test_a_handler_that_never_awaits_does_not_starve_the_others(line: Connection) -> None:
    """A key has thousands of messages whose handler never awaits. The handler of a second key awaits in between."""
    done: list[float] = []
    hot = 0

    async def handle(message: Message, context: Context) -> None:
        nonlocal hot
        if message.key == b"calm":
            await asyncio.sleep(0.001)
            done.append(hot)
        else:
            hot += 1
            time.sleep(0.0005)

    send(line, "line", *("hot:x" for _ in range(2000)), *("calm:x" for _ in range(10)))
    with line.consumer("line", "g", handle, order="key", settings=quick(concurrency=2)):
        eventually(lambda: committed(line) == 2010, "all of them")
    assert done[-1] < 1500, "the calm key was done long before the hot one"


def test_handlers_share_one_loop_and_may_use_its_locks(line: Connection) -> None:
    lock: asyncio.Lock | None = None
    loops: set[int] = set()
    threads: set[int] = set()

    async def handle(message: Message, context: Context) -> None:
        nonlocal lock
        lock = lock or asyncio.Lock()
        loops.add(id(asyncio.get_running_loop()))
        threads.add(threading.get_ident())
        async with lock:
            await asyncio.sleep(0.0005)

    send(line, "line", *(f"k{number % 20}:{number}" for number in range(100)))
    with line.consumer("line", "g", handle, order="key", settings=quick(concurrency=20)):
        eventually(lambda: committed(line) == 100, "all of them")
    assert len(loops) == len(threads) == 1


def test_a_callable_object_may_be_async(line: Connection) -> None:
    class Handler:
        def __init__(self) -> None:
            self.count = 0

        async def __call__(self, message: Message, context: Context) -> None:
            await asyncio.sleep(0)
            self.count += 1

    handler = Handler()
    send(line, "line", "a:0", "b:1")
    with line.consumer("line", "g", handler, settings=quick()):
        eventually(lambda: committed(line) == 2, "both")
    assert handler.count == 2


def test_a_stop_lets_what_waits_end_and_repeats_nothing(line: Connection) -> None:
    done: list[bytes] = []

    async def handle(message: Message, context: Context) -> None:
        await asyncio.sleep(0.05)
        done.append(message.body)

    send(line, "line", *(f"k{number}:{number}" for number in range(40)))
    consumer = line.consumer("line", "g", handle, order="key", settings=quick(concurrency=10))
    consumer.start()
    eventually(lambda: done, "the first are done")
    assert consumer.stop(WAIT_S)
    with line.consumer("line", "g", handle, order="key", settings=quick(concurrency=40)):
        eventually(lambda: committed(line) == 40, "the rest")
    assert sorted(done) == sorted(b"%d" % number for number in range(40))


def test_best_effort_and_no_order(line: Connection) -> None:
    async def handle(message: Message, context: Context) -> None:
        await asyncio.sleep(0.001)
        if context.attempt == 1 and message.body == b"3":
            raise RuntimeError("not now")

    send(line, "line", *(f"same:{number}" for number in range(20)))
    settings = quick(concurrency=10, retry=RetryDelays((0.02,), 0))
    with line.consumer("line", "g", handle, order="none", settings=settings):
        eventually(lambda: committed(line) == 20, "all of them")
        eventually(lambda: committed(line, subject="%retry%g%line") == 1, "the retry")


def test_run_and_the_decorator_take_async_handlers(line: Connection) -> None:
    done: list[bytes] = []

    @line.handler("line", "g", order="key", settings=quick())
    async def handle(message: Message, context: Context) -> None:
        await asyncio.sleep(0.001)
        done.append(message.body)
        if len(done) == 10:
            line.shutdown()

    send(line, "line", *(f"k{number % 3}:{number}" for number in range(10)))
    line.run(WAIT_S)
    assert len(done) == 10
    assert committed(line) == 10
