"""The asyncio client: the same promises, awaited. C18."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import inturn
from inturn import Context, Message, aio
from inturn.model.errors import Closed, ConnectionLost, InvalidInput, NotFound
from inturn.service import Service
from inturn.wire.address import Address
from tests.contract.bed import WAIT_S, quick


@pytest.fixture(params=["folder", "server"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        yield str(tmp_path / "data")
        return
    service = Service(tmp_path / "data", address=Address("127.0.0.1"))
    yield str(service.address)
    service.close(grace_s=0.0)


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
        group = await mq.describe_group("orders", "g")
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


async def test_the_loop_is_not_held_up_by_sends_that_wait(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        settings = inturn.ProducerSettings(buffer_bytes=10_000)
        async with mq.producer(settings=settings) as producer:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0.001)

            ticking = asyncio.create_task(tick())
            for _ in range(300):
                await producer.send_soon("orders", bytes(1000), key="a")
            await producer.flush(WAIT_S)
            ticking.cancel()
        assert ticks > 1


async def test_an_awaited_send_can_be_cancelled_and_is_stored_all_the_same(target: str) -> None:
    async with aio.connect(target) as mq:
        await mq.create_subject("orders", 1)
        async with mq.producer() as producer:
            sending = asyncio.create_task(producer.send("orders", b"x", key="a"))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert (await producer.send("orders", b"y", key="a")).offset in (0, 1)


async def test_awaited_without_a_block(target: str) -> None:
    mq = await aio.connect(target)
    await mq.create_subject("orders", 1)
    await mq.close()
    with pytest.raises(Closed):
        await mq.subjects()


async def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        await aio.connect("inturn://127.0.0.1:1")
