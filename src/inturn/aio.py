"""inturn for asyncio: the same connection, with waiting calls as coroutines.

async with inturn.aio.connect("inturn://127.0.0.1:7420") as mq:
    async with mq.producer() as producer:
        stored = await producer.send("orders", b"paid", key="order-7")
    async with mq.consumer("orders", "billing", handle):  # `async def handle` runs in the running loop
        await asyncio.sleep(60)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack

from inturn.client import Connection
from inturn.client import connect as connect_blocking
from inturn.client.dead_letters import DeadLetters
from inturn.client.deprecated import warn_deprecated
from inturn.client.group import Group
from inturn.client.open import check_settings
from inturn.client.options import HandlerOptions, check_handler_options
from inturn.client.reader import Reader
from inturn.consumer.consumer import Consumer
from inturn.consumer.statistics import ConsumerStatistics
from inturn.consumer.worker import Handler
from inturn.model.errors import Closed, InturnError
from inturn.model.message import Message
from inturn.model.offsets import Position
from inturn.model.settings import (
    Flush,
    LeaseSettings,
    LogSettings,
    ProducerSettings,
    Role,
)
from inturn.model.time import SystemClock
from inturn.outbox.outbox import Outbox
from inturn.producer.producer import Producer
from inturn.producer.send_batch import SendHandle, Stored
from inturn.producer.send_hook import SendHook
from inturn.producer.validation import SendOptions
from inturn.protocol.observer import Observer
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings
from inturn.transport.address import dialled, is_address
from inturn.transport.async_client import AsyncRemoteNode
from inturn.version import SOFTWARE

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Blocking = TypeVar("_Blocking")
_BlockingCo = TypeVar("_BlockingCo", covariant=True)
_Opened = TypeVar("_Opened", bound="_Closable")
THREADS_MAX = 64
LOOK_S = 0.05  # poll interval of `AsyncConsumer.wait`
READ_WAIT_S = 1.0  # longest wait of one command: a cancelled read keeps the thread so long


class _Threads:
    """The threads of one connection.

    The default pool of the loop has few threads for the whole program: waiting calls would block other calls there,
    possibly the very calls to wait for.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS_MAX, "inturn-aio")
        self._is_closed = False

    def submit(
        self, function: Callable[_Parameters, _Result], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> concurrent.futures.Future[_Result]:
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        if not self._is_closed:
            return self._pool.submit(call)
        with contextlib.closing(_Threads()) as late:  # most likely raises Closed
            return late.submit(call)

    async def run(
        self, function: Callable[_Parameters, _Result], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    async def make(self, make: Callable[[], _Result], undo: Callable[[_Result], object]) -> _Result:
        """As `run`. If the caller is cancelled, `undo` is called with the result of the thread."""
        made = self.submit(make)
        try:
            return await asyncio.wrap_future(made)
        except asyncio.CancelledError:
            if not made.cancel():
                self.submit(lambda: undo(made.result()))
            raise

    def close(self) -> None:
        """Calls submitted before still run."""
        self._is_closed = True
        self._pool.shutdown(wait=False)


class _Wrapper(Protocol[_BlockingCo]):
    """An asyncio class around a blocking object."""

    @property
    def blocking(self) -> _BlockingCo: ...

    @property
    def threads(self) -> _Threads: ...


def _in_thread(
    method: Callable[Concatenate[_Blocking, _Parameters], _Result],
) -> Callable[Concatenate[_Wrapper[_Blocking], _Parameters], Coroutine[Any, Any, _Result]]:
    """The blocking method, run in a thread of the connection."""

    @functools.wraps(method)
    async def awaited(self: _Wrapper[_Blocking], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return await self.threads.run(method, self.blocking, *args, **kwargs)

    return awaited


def _deprecated_in_thread(
    method: Callable[Concatenate[_Blocking, _Parameters], _Result],
) -> Callable[Concatenate[_Wrapper[_Blocking], _Parameters], Coroutine[Any, Any, _Result]]:
    """As `_in_thread`. The warning is emitted where the coroutine is awaited, not in the thread."""
    without_warning: Callable[Concatenate[_Blocking, _Parameters], _Result] = inspect.unwrap(method)

    @functools.wraps(method)
    async def awaited(self: _Wrapper[_Blocking], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        warn_deprecated(method, stacklevel=2)
        return await self.threads.run(without_warning, self.blocking, *args, **kwargs)

    return awaited


class _Closable(Protocol):
    def close(self) -> Awaitable[None]: ...


class Opening(Generic[_Opened]):
    """Await an Opening, or use an Opening in an `async with` block that closes the opened object."""

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
    """Opened by `inturn.aio.connect`. `blocking` is the underlying connection."""

    def __init__(self, blocking: Connection, threads: _Threads) -> None:
        self.blocking = blocking
        self.threads = threads

    create_subject = _in_thread(Connection.create_subject)
    grow_subject = _in_thread(Connection.grow_subject)
    subject = _in_thread(Connection.subject)
    subjects = _in_thread(Connection.subjects)
    describe_subject = _in_thread(Connection.describe_subject)
    broker_groups = _in_thread(Connection.broker_groups)
    set_broker_group = _in_thread(Connection.set_broker_group)
    describe_node = _in_thread(Connection.describe_node)
    groups = _in_thread(Connection.groups)
    # Deprecated: use `mq.group(subject, name)`.
    describe_group = _deprecated_in_thread(Connection.describe_group)
    consume_directly = _deprecated_in_thread(Connection.consume_directly)
    reset_group = _deprecated_in_thread(Connection.reset_group)
    set_order = _deprecated_in_thread(Connection.set_order)
    keys = _deprecated_in_thread(Connection.keys)
    describe_key = _deprecated_in_thread(Connection.describe_key)
    key_head = _deprecated_in_thread(Connection.key_head)
    park_key = _deprecated_in_thread(Connection.park_key)
    resume_key = _deprecated_in_thread(Connection.resume_key)
    skip_key = _deprecated_in_thread(Connection.skip_key)

    def group(self, subject: str, name: str) -> AsyncGroup:
        """The handle of one group on one subject, as `Connection.group`, with methods to be awaited."""
        return AsyncGroup(self.blocking.group(subject, name), self.threads)

    async def close(self) -> None:
        """Stop the consumers, flush the producers, sync the logs, release the folder."""
        try:
            await self.threads.run(self.blocking.close)
        finally:
            self.threads.close()

    def producer(
        self,
        name: str | None = None,
        settings: ProducerSettings | None = None,
        *,
        hooks: Sequence[SendHook] = (),
        outbox: Outbox | None = None,
    ) -> Opening[AsyncProducer]:
        """A producer. A name is exclusive: a new producer of the name fences the earlier producer.

        `outbox` as in `Connection.producer`.
        """

        async def make() -> AsyncProducer:
            made = functools.partial(self.blocking.producer, name, settings, hooks=hooks, outbox=outbox)
            return AsyncProducer(await self.threads.make(made, Producer.close), self.threads)

        return Opening(make)

    def reader(
        self, subject: str, start: str | int | datetime | Position = "first", *, tags: str | None = None
    ) -> Opening[AsyncReader]:
        """Read without a group; `tags` as in `Connection.reader`."""

        async def make() -> AsyncReader:
            return AsyncReader(await self.threads.run(self.blocking.reader, subject, start, tags=tags), self.threads)

        return Opening(make)

    def consumer(self, subject: str, group: str, handler: Handler, **options: Unpack[HandlerOptions]) -> AsyncConsumer:
        """As `Connection.consumer`, for an `async with` block. Needs a running event loop.

        An `async def` handler runs in the running loop, a plain function in threads. The options `order`, `mode`,
        `offsets`, `start`, `settings`, `tags`, `processes`, `hooks` and `name` are those of `Connection.consumer`.
        """
        check_handler_options("AsyncConnection.consumer", options)
        options["loop"] = asyncio.get_running_loop()
        make = functools.partial(self.blocking.consumer, subject, group, handler, **options)
        return AsyncConsumer(make, self.threads)


class AsyncGroup:
    """The handle of one group on one subject, as `inturn.Group`, with methods to be awaited.

    billing = mq.group("orders", "billing")
    print((await billing.describe()).lag)
    """

    def __init__(self, blocking: Group, threads: _Threads) -> None:
        self.blocking = blocking
        self.threads = threads

    describe = _in_thread(Group.describe)
    reset = _in_thread(Group.reset)
    set_order = _in_thread(Group.set_order)
    try_message = _in_thread(Group.try_message)
    keys = _in_thread(Group.keys)
    describe_key = _in_thread(Group.describe_key)
    key_head = _in_thread(Group.key_head)
    head_of = _in_thread(Group.head_of)
    park = _in_thread(Group.park)
    resume = _in_thread(Group.resume)
    skip = _in_thread(Group.skip)

    async def dead_letters(self) -> AsyncDeadLetters:
        """As `Group.dead_letters`, with methods to be awaited."""
        return AsyncDeadLetters(await self.threads.run(self.blocking.dead_letters), self.threads)


class AsyncDeadLetters:
    """The dead letters of one group on one subject, as `inturn.DeadLetters`, with methods to be awaited."""

    def __init__(self, blocking: DeadLetters, threads: _Threads) -> None:
        self.blocking = blocking
        self.threads = threads

    list = _in_thread(DeadLetters.list)
    get = _in_thread(DeadLetters.get)
    redrive = _in_thread(DeadLetters.redrive)


class AsyncProducer:
    """Sends messages; messages of one key are stored in the order in which the sends began."""

    def __init__(self, blocking: Producer, threads: _Threads) -> None:
        self.blocking = blocking
        self._threads = threads
        self._turn = asyncio.Lock()
        # Sends that wait for a turn, and the send that has the turn. The lock alone is not enough: the lock is free
        # between the end of a turn and the wake-up of the next send.
        self._waiting = 0

    async def send(self, subject: str, body: bytes, **options: Unpack[SendOptions]) -> Stored:
        """Return when the message is stored. A queued message is stored even if the caller is cancelled.

        Options, all by keyword, as in `Producer.send`: `key`, `tags`, `properties`, `message_id`, `selector`, `arg`.
        """
        return await (await self.send_soon(subject, body, **options))

    async def send_soon(self, subject: str, body: bytes, **options: Unpack[SendOptions]) -> AsyncSend:
        """Queue a message, and wait only for space in the buffer. Await the result for the place of the message.

        The options are those of `send`.
        """
        send = functools.partial(self.blocking.send, subject, body, **options)
        if not self._waiting and not self.blocking.would_wait(subject):
            return AsyncSend(send())
        self._waiting += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self._waiting -= 1
            raise
        if not self.blocking.would_wait(subject):
            try:
                return AsyncSend(send())
            finally:
                self._end_turn()
        sending = asyncio.wrap_future(self._threads.submit(send))
        # The turn lasts until the thread is done, even if the caller is cancelled: no other send may overtake.
        sending.add_done_callback(self._end_turn)
        return AsyncSend(await asyncio.shield(sending))

    def _end_turn(self, _: object = None) -> None:
        self._waiting -= 1
        self._turn.release()

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all messages are acknowledged. Raises the first failure that was not reported to a caller yet."""
        await self._threads.run(self.blocking.flush, timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """Flush, then stop."""
        await self._threads.run(self.blocking.close, timeout_s)


class AsyncSend:
    """One message on the way: await an AsyncSend for the place of the stored message."""

    def __init__(self, handle: SendHandle) -> None:
        self.handle = handle

    def __await__(self) -> Generator[Any, None, Stored]:
        return self._stored().__await__()

    async def _stored(self) -> Stored:
        if not self.handle.done:
            loop = asyncio.get_running_loop()
            done = loop.create_future()

            def tell() -> None:
                if not done.done():  # unless cancelled
                    done.set_result(None)

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
                    loop.call_soon_threadsafe(tell)

            self.handle.when_done(wake)
            await done
        return self.handle.result(0)


class AsyncReader:
    """Iterates over stored messages, partition by partition in turns; ends at the end of the log."""

    def __init__(self, blocking: Reader, threads: _Threads) -> None:
        self.blocking = blocking
        self._threads = threads

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            found = False
            for index in range(len(self.blocking.offsets)):
                for message in await self.read(index):
                    found = True
                    yield message
            if not found and not await self._threads.run(self.blocking.refresh):
                return

    async def read(self, partition: int, wait_s: float = 0.0) -> list[Message]:
        """The next messages of a partition, waiting up to `wait_s`; empty if there are none.

        A cancelled read does not move the position: the next read begins at the same offset.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            left_s = max(0.0, until_s - loop.time())
            # A copy of the reader: after a cancel the thread goes on, and must not move the shared position.
            reader = copy.copy(self.blocking)
            reader.offsets = list(self.blocking.offsets)
            messages = await self._threads.run(reader.read, partition, min(left_s, READ_WAIT_S))
            self.blocking.offsets[partition] = reader.offsets[partition]
            if messages or left_s <= READ_WAIT_S:
                return messages

    async def close(self) -> None:
        """Does nothing: allows a reader in an `async with` block."""


class AsyncConsumer:
    """A member of a group, from `start` (or `async with`) until `stop`."""

    def __init__(self, make: Callable[[], Consumer], threads: _Threads) -> None:
        self._make = make
        self._threads = threads
        self._started: concurrent.futures.Future[Consumer] | None = None
        self._is_stopped = False

    @property
    def blocking(self) -> Consumer:
        if self._started is None or not self._started.done():
            raise InturnError("the consumer was not started yet; use `async with`, or await start() first")
        return self._started.result()

    async def start(self) -> None:
        """Join the group and begin. If the caller is cancelled, the consumer is stopped right after the start."""
        if self._is_stopped:
            raise Closed("consumer")
        if self._started is None:
            self._started = self._threads.submit(self._start)
        try:
            await asyncio.shield(asyncio.wrap_future(self._started))
        except asyncio.CancelledError:
            self._is_stopped = True
            self._threads.submit(self._stop, 30.0)  # an `async with` block that was not entered calls no stop
            raise
        except BaseException:
            self._started = None
            raise

    async def stop(self, timeout_s: float | None = 30.0) -> bool:
        """Let running handlers finish, commit, release the leases, leave the group. Not for handlers to await."""
        if self._started is None:
            return True
        self._is_stopped = True
        return await self._threads.run(self._stop, timeout_s)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the consumer has stopped. Raises the error that stopped the consumer."""
        consumer, loop = self.blocking, asyncio.get_running_loop()
        until_s = float("inf") if timeout_s is None else loop.time() + timeout_s
        while not consumer.is_over and loop.time() < until_s:
            await asyncio.sleep(
                min(LOOK_S, until_s - loop.time())
            )  # no thread: any number of tasks may wait, for any time
        return consumer.wait(0)

    def _start(self) -> Consumer:
        made = self._make()
        made.start()
        return made

    def _stop(self, timeout_s: float | None) -> bool:
        """In a thread: waits for a start that was cancelled, since that start continues in its own thread."""
        started = self._started
        if started is None or started.exception() is not None:
            return True
        return started.result().stop(timeout_s)

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
    token: str | None = None,
    tls: TlsSettings | None = None,
) -> Opening[AsyncConnection]:
    """As `inturn.connect`; await the result, or use an `async with` block."""
    credentials = Credentials(token, tls)

    async def make() -> AsyncConnection:
        if is_address(target):
            return await _reached(str(target), wait_s, credentials)
        opened = functools.partial(connect_blocking, target, flush=flush, log=log, lease=lease, observer=observer)
        threads = _Threads()
        try:
            return AsyncConnection(await threads.make(opened, Connection.close), threads)
        except BaseException:
            threads.close()
            raise

    check_settings(target, log if flush is None else LogSettings(), lease, observer, credentials)
    return Opening(make)


async def _reached(target: str, wait_s: float, credentials: Credentials) -> AsyncConnection:
    """The stream lives in the running loop: no thread between the stream and awaited calls."""
    clock = SystemClock()
    address, tls = dialled(target, credentials)
    node = AsyncRemoteNode(address, SOFTWARE, clock, token=credentials.token or "", tls=tls)
    try:
        await node.wait_until_up(wait_s)
    except BaseException:
        await node.aclose()
        raise
    if node.role is not Role.NODE:  # a stream per broker, with a thread for every stream
        await node.aclose()
        threads = _Threads()
        opened = functools.partial(Connection, target, clock=clock, wait_s=wait_s, credentials=credentials)
        try:
            return AsyncConnection(await threads.make(opened, Connection.close), threads)
        except BaseException:
            threads.close()
            raise
    return AsyncConnection(Connection(target, clock=clock, node=node), _Threads())
