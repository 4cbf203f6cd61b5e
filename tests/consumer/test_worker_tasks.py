"""Workers in an event loop of the caller: the fate of workers and running messages when the loop ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings, Order, Strategy
from inturn.model.time import SystemClock
from tests.consumer.test_worker_threads import LocalNode

END_S = 30.0


def consumer_in(node: LocalNode, handler: Any, **settings: Any) -> Consumer:
    chosen = ConsumerSettings(commit_interval_s=0.02, suspend_s=0.01, **settings)
    loop = asyncio.get_running_loop()
    return Consumer(node, SystemClock(), "orders", "billing", handler, order=Order.KEY, settings=chosen, loop=loop)


async def cancel_everybody() -> set[asyncio.Task[Any]]:
    """Cancel all tasks, as `asyncio.run` does at the end. Return the tasks that do not end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return (await asyncio.wait(others, timeout=END_S))[1]


async def wait_a_minute(message: Message, context: Context) -> None:
    await asyncio.sleep(60)


async def turn_it_into_another(message: Message, context: Context) -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise ValueError("something else") from None


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("handler", [wait_a_minute, turn_it_into_another])
def test_handlers_that_are_cancelled_have_not_handled_their_message_and_hold_nothing(
    handler: Callable[[Message, Context], Coroutine[Any, Any, None]], strategy: Strategy
) -> None:
    node = LocalNode()
    node.store([b"quick", b"a", b"b", b"a"])
    handled: list[int] = []

    async def main() -> None:
        running: set[int] = set()
        are_running = asyncio.Event()

        async def handle(message: Message, context: Context) -> None:
            if message.key == b"quick":
                handled.append(message.offset)
                return
            running.add(message.offset)
            if len(running) == 2:
                are_running.set()
            await handler(message, context)

        consumer = consumer_in(node, handle, concurrency=4, strategy=strategy)
        consumer._make_retries = None  # the node knows no retry subject
        consumer.start()
        await asyncio.wait_for(are_running.wait(), END_S)
        assert running == {1, 2}
        assert await cancel_everybody() == set()
        assert await asyncio.to_thread(consumer.stop, END_S), "a run that nobody finished would be waited for"

    asyncio.run(main())
    assert handled == [0]
    assert node.committed() == 1


def test_a_handler_that_hides_its_cancellation_does_not_keep_its_loop_from_ending() -> None:
    node = LocalNode()
    node.store([b"a", b"a", b"b"])
    tidied_up: list[int] = []

    async def main() -> None:
        is_running = asyncio.Event()

        async def handle(message: Message, context: Context) -> None:
            is_running.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)
                tidied_up.append(message.offset)

        consumer = consumer_in(node, handle, concurrency=1)
        consumer.start()
        await asyncio.wait_for(is_running.wait(), END_S)
        assert await cancel_everybody() == set()
        assert await asyncio.to_thread(consumer.stop, END_S)

    asyncio.run(main())
    assert tidied_up == [0], "it was cancelled once only, and nothing was begun after it"


def test_workers_that_wait_for_work_leave_when_they_are_cancelled() -> None:
    async def main() -> None:
        node = LocalNode()
        node.store([b"a"])
        is_handled = asyncio.Event()

        async def handle(message: Message, context: Context) -> None:
            is_handled.set()

        consumer = consumer_in(node, handle, concurrency=8)
        consumer.start()
        await asyncio.wait_for(is_handled.wait(), END_S)
        await asyncio.sleep(0.05)
        assert await cancel_everybody() == set()
        assert await asyncio.to_thread(consumer.stop, END_S)
        assert node.committed() == 1

    asyncio.run(main())


@pytest.mark.parametrize("cancels", [True, False])
def test_a_handler_that_cancels_itself_or_says_so_only_fails(cancels: bool) -> None:
    async def main() -> None:
        node = LocalNode()
        node.store([b"a", b"b", b"a"])
        handled: list[int] = []
        all_handled = asyncio.Event()

        async def handle(message: Message, context: Context) -> None:
            if context.attempt == 1 and message.offset < 2:
                task = asyncio.current_task()
                assert task is not None
                if cancels:
                    task.cancel()
                    await asyncio.sleep(0)
                raise asyncio.CancelledError
            handled.append(message.offset)
            if len(handled) == 3:
                all_handled.set()

        consumer = consumer_in(node, handle, concurrency=1)
        consumer.start()
        await asyncio.wait_for(all_handled.wait(), END_S)  # the only worker is still alive, or was replaced
        assert [offset for offset in handled if offset != 1] == [0, 2]
        assert await asyncio.to_thread(consumer.stop, END_S)

    asyncio.run(main())


def test_a_consumer_whose_loop_is_stopped_can_be_stopped_too() -> None:
    node = LocalNode()
    node.store([b"a"])
    is_handled = threading.Event()

    async def handle(message: Message, context: Context) -> None:
        is_handled.set()

    async def begin() -> Consumer:
        consumer = consumer_in(node, handle)
        consumer.start()
        await asyncio.to_thread(is_handled.wait, END_S)
        await asyncio.sleep(0.05)
        return consumer

    with asyncio.Runner() as runner:
        consumer = runner.run(begin())
        assert consumer.stop(END_S), "in the thread of the loop, where no handler runs any more"
    assert node.committed() == 1
