"""inturn for asyncio: the same connection, with everything that waits to be awaited.

async with inturn.aio.connect("inturn://127.0.0.1:7420") as mq:
    async with mq.producer() as producer:
        stored = await producer.send("orders", b"paid", key="order-7")
    async with mq.consumer("orders", "billing", handle):  # `async def handle` runs in this very loop
        await asyncio.sleep(60)
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from inturn.connection import Connection, check_served
from inturn.connection import connect as connect_blocking
from inturn.consumer.consumer import Consumer, ConsumerStatistics
from inturn.consumer.hook import Hook
from inturn.consumer.worker import Handler
from inturn.model.clock import SystemClock
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.observer import Observer
from inturn.model.position import Position
from inturn.model.settings import ConsumerSettings, Flush, LeaseSettings, LogSettings, Order, ProducerSettings
from inturn.producer.core import Selector
from inturn.producer.flight import SendHandle, Stored
from inturn.producer.producer import Producer
from inturn.reader import Reader
from inturn.version import SOFTWARE
from inturn.wire.address import is_address, parse_address
from inturn.wire.async_client import AsyncRemoteNode

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Opened = TypeVar("_Opened", bound="_Closable")


def _in_thread(
    method: Callable[Concatenate[Connection, _Parameters], _Result],
) -> Callable[Concatenate[AsyncConnection, _Parameters], Coroutine[Any, Any, _Result]]:
    """The method of the connection, run where its waiting holds up nobody."""

    @functools.wraps(method)
    async def awaited(self: AsyncConnection, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return await asyncio.to_thread(method, self.blocking, *args, **kwargs)

    return awaited


class _Closable(Protocol):
    def close(self) -> Awaitable[None]: ...


class Opening(Generic[_Opened]):
    """To be awaited, or used in an `async with` block, which closes what it opened."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, _Opened]]) -> None:
        self._make = make
        self._made: _Opened | None = None

    def __await__(self) -> Generator[Any, None, _Opened]:
        return self._make().__await__()

    async def __aenter__(self) -> _Opened:
        self._made = await self._make()
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.close()


class AsyncConnection:
    """What `inturn.aio.connect` opens. `blocking` is the connection underneath."""

    def __init__(self, blocking: Connection) -> None:
        self.blocking = blocking

    create_subject = _in_thread(Connection.create_subject)
    subject = _in_thread(Connection.subject)
    subjects = _in_thread(Connection.subjects)
    describe_subject = _in_thread(Connection.describe_subject)
    groups = _in_thread(Connection.groups)
    describe_group = _in_thread(Connection.describe_group)
    reset_group = _in_thread(Connection.reset_group)
    keys = _in_thread(Connection.keys)
    describe_key = _in_thread(Connection.describe_key)
    key_head = _in_thread(Connection.key_head)
    park_key = _in_thread(Connection.park_key)
    resume_key = _in_thread(Connection.resume_key)
    skip_key = _in_thread(Connection.skip_key)
    close = _in_thread(Connection.close)

    def producer(self, name: str | None = None, settings: ProducerSettings | None = None) -> Opening[AsyncProducer]:
        """A producer. With a name it is the only one of that name: it fences the one before."""

        async def make() -> AsyncProducer:
            return AsyncProducer(await asyncio.to_thread(self.blocking.producer, name, settings))

        return Opening(make)

    def reader(self, subject: str, start: str | int | datetime | Position = "first") -> Opening[AsyncReader]:
        """Read without a group."""

        async def make() -> AsyncReader:
            return AsyncReader(await asyncio.to_thread(self.blocking.reader, subject, start))

        return Opening(make)

    def consumer(
        self,
        subject: str,
        group: str,
        handler: Handler,
        *,
        order: Order | str = Order.PARTITION,
        start: str | int | datetime | Position = "first",
        settings: ConsumerSettings | None = None,
        hooks: Sequence[Hook] = (),
        name: str | None = None,
    ) -> AsyncConsumer:
        """As `Connection.consumer`, to be used in an `async with` block. A handler that is `async def` runs in the loop
        that this is called in, a plain one in threads."""
        loop = asyncio.get_running_loop()

        def make() -> Consumer:
            return self.blocking.consumer(
                subject,
                group,
                handler,
                order=order,
                start=start,
                settings=settings,
                hooks=hooks,
                name=name,
                loop=loop,
            )

        return AsyncConsumer(make)


class AsyncProducer:
    """Sends messages; those of one key are stored in the order in which they were sent."""

    def __init__(self, blocking: Producer) -> None:
        self.blocking = blocking

    async def send(
        self,
        subject: str,
        body: bytes,
        *,
        key: str | bytes | None = None,
        tags: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        message_id: str | None = None,
        selector: Selector | None = None,
        arg: object = None,
    ) -> Stored:
        """Return when the message is stored."""
        sent = await self.send_soon(
            subject,
            body,
            key=key,
            tags=tags,
            properties=properties,
            message_id=message_id,
            selector=selector,
            arg=arg,
        )
        return await sent

    async def send_soon(
        self,
        subject: str,
        body: bytes,
        *,
        key: str | bytes | None = None,
        tags: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        message_id: str | None = None,
        selector: Selector | None = None,
        arg: object = None,
    ) -> AsyncSend:
        """Queue a message, waiting only for room in the buffer; what is returned can be awaited for its place."""
        send = functools.partial(
            self.blocking.send,
            subject,
            body,
            key=key,
            tags=tags,
            properties=properties,
            message_id=message_id,
            selector=selector,
            arg=arg,
        )
        waits = self.blocking.would_wait(subject)
        return AsyncSend(await asyncio.to_thread(send) if waits else send())

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is unacknowledged. Raises the first failure that nobody was told of yet."""
        await asyncio.to_thread(self.blocking.flush, timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """Flush, then stop."""
        await asyncio.to_thread(self.blocking.close, timeout_s)


class AsyncSend:
    """One message on its way: await it for the place where it was stored."""

    def __init__(self, handle: SendHandle) -> None:
        self.handle = handle

    def __await__(self) -> Generator[Any, None, Stored]:
        return self._stored().__await__()

    async def _stored(self) -> Stored:
        if not self.handle.done:
            loop = asyncio.get_running_loop()
            done = loop.create_future()

            def tell() -> None:
                if not done.done():  # it may have been cancelled
                    done.set_result(None)

            def wake() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(tell)

            self.handle.when_done(wake)
            await done
        return self.handle.result(0)


class AsyncReader:
    """Iterates over what is stored, partition by partition in turns; ends at the end of the log."""

    def __init__(self, blocking: Reader) -> None:
        self.blocking = blocking

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            found = False
            for index in range(len(self.blocking.offsets)):
                for message in await self.read(index):
                    found = True
                    yield message
            if not found:
                return

    async def read(self, partition: int, wait_s: float = 0.0) -> list[Message]:
        """What comes next in a partition, waiting for it so long; empty if there is nothing."""
        return await asyncio.to_thread(self.blocking.read, partition, wait_s)

    async def close(self) -> None:
        """There is nothing to close: it is there so that a reader can be used in an `async with` block."""


class AsyncConsumer:
    """A member of a group, from `start` (or `async with`) until `stop`."""

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self._made: Consumer | None = None

    @property
    def blocking(self) -> Consumer:
        if self._made is None:
            raise InturnError("the consumer was not started yet; use `async with`, or await start() first")
        return self._made

    async def start(self) -> None:
        """Join the group and begin."""

        def start() -> Consumer:
            made = self._make()
            made.start()
            return made

        if self._made is None:
            self._made = await asyncio.to_thread(start)

    async def stop(self, timeout_s: float | None = 30.0) -> bool:
        """Let running handlers end, commit, give the leases back, leave. Not to be awaited by a handler."""
        return self._made is None or await asyncio.to_thread(self._made.stop, timeout_s)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has stopped. Raises if it stopped because of an error."""
        return await asyncio.to_thread(self.blocking.wait, timeout_s)

    def statistics(self) -> ConsumerStatistics:
        return self.blocking.statistics()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


def connect(
    target: str | os.PathLike[str],
    *,
    flush: Flush | str | None = None,
    log: LogSettings | None = None,
    lease: LeaseSettings | None = None,
    observer: Observer | None = None,
    wait_s: float = 0.0,
) -> Opening[AsyncConnection]:
    """As `inturn.connect`; to be awaited, or used in an `async with` block."""

    async def make() -> AsyncConnection:
        if is_address(target):
            return await _reached(str(target), wait_s)
        opened = functools.partial(connect_blocking, target, flush=flush, log=log, lease=lease, observer=observer)
        return AsyncConnection(await asyncio.to_thread(opened))

    if is_address(target):
        check_served(str(target), log if flush is None else LogSettings(), lease, observer)
    return Opening(make)


async def _reached(target: str, wait_s: float) -> AsyncConnection:
    """The stream lives in this loop: no thread stands between it and what is awaited."""
    clock = SystemClock()
    node = AsyncRemoteNode(parse_address(target), SOFTWARE, clock)
    try:
        await node.wait_until_up(wait_s)
    except BaseException:
        await node.aclose()
        raise
    return AsyncConnection(Connection(target, clock=clock, node=node))
