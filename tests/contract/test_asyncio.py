"""The asyncio client: the same promises, awaited."""

from __future__ import annotations

import asyncio
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import inturn
from inturn import Context, Message, aio
from inturn.model.errors import Closed, ConnectionLost, InturnError, InvalidInput, NotFound
from inturn.model.time import SystemClock
from inturn.protocol.commands import Command, Done, Node, Ping, Reply
from inturn.server.server import Server
from inturn.transport.address import Address
from inturn.transport.async_client import AsyncRemoteNode
from inturn.transport.client_stream import StreamSettings
from tests.contract.bed import WAIT_S, eventually, quick


@pytest.fixture(params=["folder", "server"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        yield str(tmp_path / "data")
        return
    service = Server(tmp_path / "data", address=Address("127.0.0.1"))
    yield str(service.address)
    service.close(grace_s=0.0)


@pytest.fixture
def service(tmp_path: Path) -> Any:
    made = Server(tmp_path / "data", address=Address("127.0.0.1"))
    yield made
    made.close(grace_s=0.0)


async def bodies_of(mq: aio.AsyncConnection, subject: str = "orders") -> list[bytes]:
    async with mq.reader(subject) as reader:
        return [message.body async for message in reader]


def returns_soon(main: Callable[[], Coroutine[Any, Any, object]]) -> bool:
    """Whether `asyncio.run` returns soon."""
    running = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    running.start()
    running.join(WAIT_S)
    return not running.is_alive()


async def test_produce_read_and_look(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 2)
        async with mq.producer() as producer:
            first = await producer.send("orders", b"0", key="a")
            sent = [await producer.send_soon("orders", b"%d" % number, key="a") for number in range(1, 100)]
            places = [first, *[await one for one in sent]]
        assert [place.offset for place in places] == list(range(100))
        async with mq.reader("orders") as reader:
            assert [int(message.body) async for message in reader] == list(range(100))
        assert [subject.name for subject in await mq.subjects()] == ["orders"]
        with pytest.raises(NotFound):
            await mq.subject("others")
        with pytest.raises(InvalidInput):
            await mq.create_subject("new", 0)


async def test_async_handlers_run_in_the_loop_of_the_caller_and_keep_the_order_of_a_key(target: str) -> None:
    """C5, C18."""
    mine = threading.get_ident()
    seen: dict[bytes | None, list[int]] = {}
    threads = set()
    done = asyncio.Event()

    async def handle(message: Message, context: Context) -> None:
        threads.add(threading.get_ident())
        await asyncio.sleep(0.0005)
        seen.setdefault(message.key, []).append(int(message.body))
        if sum(map(len, seen.values())) == 200:
            done.set()

    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 2)
        async with mq.producer() as producer:
            for number in range(200):
                await producer.send_soon("orders", b"%d" % number, key=b"k%d" % (number % 10))
        settings = quick(concurrency=32)
        async with mq.consumer("orders", "g", handle, order="key", settings=settings) as consumer:
            await asyncio.wait_for(done.wait(), WAIT_S)
            assert consumer.statistics().concurrency == 32
        group = await mq.group("orders", "g").describe()
        assert sum(one.lag for one in group.partitions) == 0
    assert threads == {mine}
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert len(seen) == 10


async def test_plain_handlers_run_in_threads(target: str) -> None:
    threads = set()
    done = threading.Event()

    def handle(message: Message, context: Context) -> None:
        threads.add(threading.get_ident())
        done.set()

    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.producer() as producer:
            await producer.send("orders", b"x", key="a")
        async with mq.consumer("orders", "g", handle, settings=quick()):
            assert await asyncio.to_thread(done.wait, WAIT_S)
    assert threading.get_ident() not in threads


class Slow:
    """A node that gets no command before `at_s`."""

    def __init__(self, node: Node, at_s: float) -> None:
        self._node = node
        self._at_s = at_s
        self._line = ThreadPoolExecutor(1)

    def submit(self, command: Command, reply: Reply) -> None:
        self._line.submit(self._submit, command, reply)

    def _submit(self, command: Command, reply: Reply) -> None:
        time.sleep(max(0.0, self._at_s - time.monotonic()))
        self._node.submit(command, reply)


async def longest_gap_s(mq: aio.AsyncConnection) -> float:
    """The longest pause of the loop while sends waited for half a second."""
    gaps_s: list[float] = []

    async def tick() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.001)
            gaps_s.append(time.monotonic() - began_s)

    async with mq.producer(settings=inturn.ProducerSettings(buffer_bytes=10_000)) as producer:
        await producer.send("orders", b"the route is known from now on", key="a")
        began_s = time.monotonic()
        producer.blocking._node = Slow(mq.blocking.node, began_s + 0.5)
        ticking = asyncio.create_task(tick())
        for _ in range(100):
            await producer.send_soon("orders", bytes(1000), key="a")
        took_s = time.monotonic() - began_s
        ticking.cancel()
        await producer.flush(WAIT_S)
    assert took_s > 0.45, "there was room for all of them"
    return max(gaps_s)


async def test_the_loop_is_not_held_up_by_sends_that_wait(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        found_s = [await longest_gap_s(mq)]
        while min(found_s) >= 0.3 and len(found_s) < 6:  # the machine may have stood still
            found_s.append(await longest_gap_s(mq))
    assert min(found_s) < 0.3


async def test_sends_that_begin_at_once_are_stored_in_the_order_in_which_they_began(target: str) -> None:
    """The first sends wait for the route. Later sends must not overtake."""
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        for _ in range(6):
            async with mq.producer() as producer:
                await asyncio.gather(*(producer.send("orders", b"%d" % number, key="a") for number in range(50)))
        assert await bodies_of(mq) == [b"%d" % number for number in range(50)] * 6


async def test_sends_are_stored_in_order_while_there_is_no_room_for_them(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.producer(settings=inturn.ProducerSettings(buffer_bytes=1000)) as producer:
            await asyncio.gather(*(producer.send("orders", b"%0200d" % number, key="a") for number in range(200)))
        assert [int(body) for body in await bodies_of(mq)] == list(range(200))


async def test_an_awaited_send_can_be_cancelled_and_is_stored_all_the_same(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.producer() as producer:
            await producer.send("orders", b"w", key="a")
            queued = await producer.send_soon("orders", b"x", key="a")
            awaiting = asyncio.ensure_future(queued)
            awaiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await awaiting
            assert (await producer.send("orders", b"y", key="a")).offset == 2
        assert await bodies_of(mq) == [b"w", b"x", b"y"]


async def test_a_send_that_is_cancelled_in_its_thread_is_not_overtaken(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.producer() as producer:
            send, is_sending, may_go_on = producer.blocking.send, threading.Event(), threading.Event()

            def slow_send(subject: str, body: bytes, **options: Any) -> Any:
                if body == b"x":
                    is_sending.set()
                    may_go_on.wait(WAIT_S)
                return send(subject, body, **options)

            monkeypatch.setattr(producer.blocking, "send", slow_send)
            first = asyncio.create_task(producer.send("orders", b"x", key="a"))
            assert await asyncio.to_thread(is_sending.wait, WAIT_S)
            first.cancel()
            never = asyncio.create_task(producer.send("orders", b"never", key="a"))
            last = asyncio.create_task(producer.send("orders", b"y", key="a"))
            await asyncio.sleep(0.05)
            never.cancel()  # the message was not queued yet
            assert first.cancelled()
            may_go_on.set()
            await asyncio.wait_for(last, WAIT_S)
        assert never.cancelled()
        assert await bodies_of(mq) == [b"x", b"y"]


async def test_a_send_that_ends_when_its_loop_is_closed_raises_nothing_in_the_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Handle:
        done = False

        def when_done(self, callback: Callable[[], None]) -> None:
            self.callback = callback

    def closed(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    handle: Any = Handle()
    awaiting = asyncio.ensure_future(aio.AsyncSend(handle))
    await asyncio.sleep(0)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", closed)
        handle.callback()
    awaiting.cancel()


async def test_a_read_that_is_cancelled_skips_nothing(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.producer() as producer, mq.reader("orders") as reader:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(0, 2.0), 0.1)
            await producer.send("orders", b"first", key="a")
            await asyncio.sleep(0.2)  # the thread of the cancelled read most likely gets the message
            await producer.send("orders", b"second", key="a")
            read = await reader.read(0, WAIT_S)
            if len(read) < 2:
                read += await reader.read(0, WAIT_S)
            assert [message.body for message in read] == [b"first", b"second"]
            assert await reader.read(0) == []


async def test_a_read_waits_as_long_as_it_is_told(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.producer() as producer, mq.reader("orders") as reader:
            began_s = time.monotonic()
            assert await reader.read(0, 1.3) == []
            assert 1.2 < time.monotonic() - began_s < WAIT_S
            reading = asyncio.create_task(reader.read(0, 60.0))
            await asyncio.sleep(1.2)
            await producer.send("orders", b"x", key="a")
            assert [message.body for message in await asyncio.wait_for(reading, WAIT_S)] == [b"x"]


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_consumer_whose_start_was_cancelled_does_not_stay(
    target: str, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code stops the consumer when an `async with` block could not be entered."""
    made: list[inturn.Consumer] = []
    is_making, may_go_on = threading.Event(), threading.Event()
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        make = mq.blocking.consumer

        def slow_make(*args: Any, **options: Any) -> inturn.Consumer:
            is_making.set()
            may_go_on.wait(WAIT_S)
            made.append(make(*args, **options))
            return made[0]

        monkeypatch.setattr(mq.blocking, "consumer", slow_make)
        consumer = mq.consumer("orders", "g", lambda message, context: None, settings=quick())
        starting = asyncio.create_task(consumer.start())
        assert await asyncio.to_thread(is_making.wait, WAIT_S)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        may_go_on.set()
        if is_stopped:
            assert await consumer.stop()
        else:
            await asyncio.to_thread(eventually, lambda: made and made[0].is_over, "it is stopped")
        assert made[0].is_over
        with pytest.raises(Closed):
            await consumer.start()


async def test_a_folder_whose_opening_was_cancelled_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[inturn.Connection] = []
    is_opening, may_go_on = threading.Event(), threading.Event()

    def slow_connect(*args: Any, **options: Any) -> inturn.Connection:
        is_opening.set()
        may_go_on.wait(WAIT_S)
        opened.append(inturn.connect(*args, **options))
        return opened[0]

    monkeypatch.setattr(aio, "connect_blocking", slow_connect)

    async def connect() -> None:
        await aio.connect(tmp_path / "data")

    connecting = asyncio.create_task(connect())
    assert await asyncio.to_thread(is_opening.wait, WAIT_S)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    may_go_on.set()
    await asyncio.to_thread(eventually, lambda: opened and opened[0].is_closed, "it is closed")


async def test_however_many_wait_for_a_consumer_it_can_be_stopped(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        consumer = mq.consumer("orders", "g", lambda message, context: None, settings=quick())
        await consumer.start()
        assert not await consumer.wait(0.1)
        waiting = [asyncio.create_task(consumer.wait()) for _ in range(100)]
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(consumer.stop(), WAIT_S)
        assert await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S) == [True] * 100


async def test_waiting_for_a_consumer_raises_what_it_died_of(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.consumer("orders", "g", lambda message, context: None, order="key", settings=quick()) as first:
            await asyncio.to_thread(eventually, lambda: first.statistics().partitions, "it has joined")
            other = mq.consumer("orders", "g", lambda message, context: None, order="partition", settings=quick())
            await other.start()
            with pytest.raises(inturn.errors.GroupConflict):
                await other.wait(WAIT_S)


@pytest.mark.usefixtures("quiet")
def test_a_loop_may_end_while_handlers_of_a_consumer_run(target: str) -> None:
    """The running messages are not finished: the next lease holder handles these messages again."""
    opened: list[aio.AsyncConnection] = []

    async def main() -> None:
        mq = await aio.connect(target)
        opened.append(mq)
        await mq.create_subject("orders", 1)
        async with mq.producer() as producer:
            await producer.send("orders", b"x", key="a")
        is_handling = asyncio.Event()

        async def handle(message: Message, context: Context) -> None:
            is_handling.set()
            await asyncio.sleep(60)

        await mq.consumer("orders", "g", handle, settings=quick()).start()
        await asyncio.wait_for(is_handling.wait(), WAIT_S)

    assert returns_soon(main)
    opened[0].blocking.close()
    if "://" in target:
        return  # there the lease stays for a while
    handled = threading.Event()
    with (
        inturn.connect(target) as mq,
        mq.consumer("orders", "g", lambda message, context: handled.set(), settings=quick()),
    ):
        assert handled.wait(WAIT_S)


STOPPED = """
import asyncio, sys
from inturn import aio

async def open():
    mq = await aio.connect(sys.argv[1])
    producer = await mq.producer()
    await mq.create_subject("orders", 1)
    await producer.send("orders", b"x", key="a")
    return mq

loop = asyncio.new_event_loop()
mq = loop.run_until_complete(open())
"""
FORKED = """
import asyncio, os, sys
from inturn import aio

async def main():
    mq = await aio.connect(sys.argv[1])
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    await mq.close()

asyncio.run(main())
print("closed", flush=True)
os.read(0, 1)
"""


def test_a_program_whose_loop_was_stopped_and_not_closed_ends(target: str) -> None:
    ran = subprocess.run([sys.executable, "-c", STOPPED, target], capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr


def test_a_node_whose_loop_does_not_run_hangs_up_at_once(service: Server) -> None:
    async def reach() -> AsyncRemoteNode:
        node = AsyncRemoteNode(service.address, "test", SystemClock())
        await node.wait_until_up(WAIT_S)
        return node

    with asyncio.Runner() as runner:
        node = runner.run(reach())
        assert service.connection_count == 1
        closing = threading.Thread(target=node.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        eventually(lambda: service.connection_count == 0, "the server sees it")


def test_a_forked_child_does_not_keep_the_stream_of_its_parent(service: Server) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(service.address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "closed\n"
        eventually(lambda: service.connection_count == 0, "the server sees that it is closed; the child lives")


async def test_what_would_wait_for_its_own_loop_is_refused(service: Server) -> None:
    async with aio.connect(str(service.address)) as mq:
        with pytest.raises(InturnError, match="await"):
            mq.blocking.subjects()
        assert await mq.subjects() == []
        mq.blocking.close()  # the loop closes the connection later


class FreezingSelector(selectors.DefaultSelector):
    """As if the process were stopped while waiting: timers run before the arrived bytes are read."""

    freeze_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.freeze_s:
            return super().select(timeout)
        time.sleep(self.freeze_s)
        self.freeze_s = 0.0
        return []


def test_an_answer_that_came_while_the_process_was_frozen_counts(service: Server) -> None:
    selector = FreezingSelector()

    async def main() -> None:
        selector.freeze_s = 0.0
        node = AsyncRemoteNode(service.address, "test", SystemClock(), StreamSettings(ping_s=0.1, silence_s=0.3))
        await node.wait_until_up(WAIT_S)
        asked = node.ask(Ping())
        selector.freeze_s = 0.6
        assert isinstance(await asked, Done)
        assert isinstance(await node.ask(Ping()), Done), "the stream was not given up"
        await node.aclose()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        try:
            runner.run(main())
        except ConnectionLost:  # the server may have stood still as long
            runner.run(main())


async def test_a_server_that_is_silent_is_given_up() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1")
    address = Address(*silent.sockets[0].getsockname())
    node = AsyncRemoteNode(address, "test", SystemClock(), StreamSettings(ping_s=0.1, silence_s=0.2))
    with pytest.raises(ConnectionLost, match=r"no answer for 0\.2 s"):
        await asyncio.wait_for(node.wait_until_up(0.0), WAIT_S)
    await node.aclose()
    silent.close()


async def test_awaited_without_a_block(target: str) -> None:
    mq = await aio.connect(target)
    await mq.create_subject("orders", 1)
    await mq.close()
    with pytest.raises(Closed):
        await mq.subjects()


async def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        await aio.connect("inturn://127.0.0.1:1")


async def test_a_host_that_cannot_be_one_is_told_at_once() -> None:
    with pytest.raises(ConnectionLost, match="label"):
        await asyncio.wait_for(_connect("inturn://" + "a" * 70 + ":1"), WAIT_S)


@pytest.mark.usefixtures("quiet")
async def test_whatever_a_connection_dies_of_is_told(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(self: AsyncRemoteNode) -> str:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(AsyncRemoteNode, "_connect_and_talk", die)
    with pytest.raises(ConnectionLost, match="a fault of ours"):
        await asyncio.wait_for(_connect(str(service.address)), WAIT_S)


async def _connect(target: str) -> aio.AsyncConnection:
    return await aio.connect(target)
