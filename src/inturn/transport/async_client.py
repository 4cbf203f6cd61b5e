"""A remote node on an event loop: a transport around `ClientStream`, without threads.

Commands may be submitted in any thread; replies are called in the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import socket
import ssl
import threading
from typing import cast

from inturn.model.errors import Closed, ConnectionLost, InturnError, ProtocolError
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings, Role
from inturn.model.time import Clock
from inturn.protocol.commands import Answer, Command, Reply
from inturn.transport.address import Address
from inturn.transport.client_stream import (
    ClientStream,
    NotLetIn,
    StreamSettings,
    StreamState,
    deliver,
    hung_up_text,
    tls_error_text,
)

_log = get_logger("inturn.wire")
_READ_S = 0.05  # time to read bytes that arrived while the process was frozen
_CHECK_S = 0.5  # between checks that the loop still runs


class AsyncRemoteNode:
    """Made and closed in its event loop, which must run while the node is used. `tls`: context and server name."""

    def __init__(
        self,
        address: Address,
        software: str,
        clock: Clock,
        settings: StreamSettings | None = None,
        token: str = "",
        tls: tuple[ssl.SSLContext, str] | None = None,
    ) -> None:
        self._address = address
        self._tls = None if tls is None else tls[0]
        self._server_name = None if tls is None else tls[1]
        self._clock = clock
        self._settings = settings if settings is not None else StreamSettings()
        self._stream = ClientStream(str(address), software, self._settings, random.Random(), self._send, token)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[str] | None = None  # why the present stream ended
        self._tried = asyncio.Event()
        self._is_closed = False
        self._task = self._loop.create_task(self._run())

    @property
    def lease(self) -> LeaseSettings | None:
        """The lease settings of the server; None before the first greeting."""
        return self._stream.lease

    @property
    def role(self) -> Role:
        """The role of the server."""
        return self._stream.role

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server has greeted. Otherwise raise the error after the first try, or after `timeout_s`."""
        until_s = self._clock.monotonic() + timeout_s
        while True:
            await self._tried.wait()
            self._tried.clear()
            if self._stream.state is StreamState.UP:
                return
            if self._stream.refusal is not None:
                raise self._stream.refusal
            if self._is_closed or self._clock.monotonic() >= until_s:
                raise ConnectionLost(str(self._address), self._stream.why)

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        if self._is_closed or threading.current_thread() is self._thread:
            self._submit(command, reply)
            return
        try:
            self._loop.call_soon_threadsafe(self._submit, command, reply)
        except RuntimeError:  # the loop is closed
            reply(Closed("connection"))

    def check_may_wait(self) -> None:
        """Called before a thread waits for an answer. Raise InturnError in the loop's thread."""
        if threading.current_thread() is self._thread and not self._is_closed:
            raise InturnError(
                f"this would wait for the event loop that it runs in, where the answers of {self._address} come; await "
                "the method of the same name, or call it in another thread"
            )

    def ask(self, command: Command) -> asyncio.Future[Answer]:
        """Submit a command in the loop. The future gets the answer or the error."""
        asked: asyncio.Future[Answer] = self._loop.create_future()

        def reply(answer: Answer | InturnError) -> None:
            if asked.done():  # the future was cancelled
                return
            if isinstance(answer, InturnError):
                asked.set_exception(answer)
            else:
                asked.set_result(answer)

        self._submit(command, reply)
        return asked

    def close(self) -> None:
        """Any thread may call, and waits for the end; a call in the loop's thread returns at once."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._loop.is_running():
            self._hang_up()
            self._drop("the connection is closed")
        elif threading.current_thread() is self._thread:
            self._task.cancel()
        else:
            self._close_from_outside()

    def _close_from_outside(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed just now, with the stream
            closing = asyncio.run_coroutine_threadsafe(self.aclose(), self._loop)
            while self._loop.is_running():  # a stopped loop never answers
                if concurrent.futures.wait([closing], _CHECK_S).done:
                    return

    async def aclose(self) -> None:
        """Call in the loop."""
        self._is_closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def disown(self) -> None:
        """In a forked child: the loop and the stream are the parent's."""
        self._is_closed = True
        if (number := self._file_number()) >= 0:
            # Not closed: the transport owns the number, and would close it again when another file has the number.
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), number, inheritable=False)

    def _file_number(self) -> int:
        """The file number of the stream; -1 without a stream."""
        if self._transport is None:
            return -1
        number: int = self._transport.get_extra_info("socket").fileno()
        return number

    def _hang_up(self) -> None:
        """Without the loop: a loop that does not run would close the stream only when it runs again."""
        if (number := self._file_number()) >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as stream:
                stream.shutdown(socket.SHUT_RDWR)

    async def _run(self) -> None:
        why = "the connection is closed"
        try:
            while self._stream.refusal is None and not self._is_closed:
                lost = await self._connect_and_talk()
                deliver(self._stream.lost(lost, self._clock.monotonic()))
                self._tried.set()
                _log.info("wire.lost", address=str(self._address), why=lost)
                await asyncio.sleep(max(0.0, self._stream.retry_at_s - self._clock.monotonic()))
        except Exception as error:  # callers would wait forever for a dead task
            if not self._is_closed:  # after a close, the loop never ran to its end
                _log.exception("wire.failed", address=str(self._address))
            why = f"the client failed: {error!r}"
        finally:
            if self._stream.refusal is None:  # a refusal is the better answer
                self._is_closed = True
            self._drop(why)
            self._tried.set()

    def _drop(self, why: str) -> None:
        """Hang up, and answer waiting commands with Closed. Call in the loop, or while the loop does not run."""
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._transport.abort()
        lost = self._stream.lost(why, self._clock.monotonic())
        deliver([(reply, Closed("connection")) for reply, _ in lost])

    async def _connect_and_talk(self) -> str:
        """Returns why the stream ended."""
        self._ended = self._loop.create_future()
        try:
            async with asyncio.timeout(self._settings.dial_timeout_s):
                if self._address.path is not None:
                    await self._loop.create_unix_connection(lambda: _Stream(self), self._address.path)
                else:
                    host, port = self._address.host, self._address.port
                    await self._loop.create_connection(
                        lambda: _Stream(self), host, port, ssl=self._tls, server_hostname=self._server_name
                    )
        except (OSError, ValueError) as error:  # ValueError: an invalid host name
            return tls_error_text(error) or "no answer"
        watching = self._loop.create_task(self._watch())
        try:
            return await self._ended
        finally:
            watching.cancel()
            if self._transport is not None:
                self._transport.abort()
                self._transport = None

    async def _watch(self) -> None:
        was_silent = False
        while True:
            now_s = self._clock.monotonic()
            is_silent = self._stream.is_silent(now_s)
            if is_silent and was_silent:
                break
            # Once is not enough: after a freeze of this process, timers run before received bytes are read.
            was_silent = is_silent
            await asyncio.sleep(_READ_S if is_silent else max(0.001, self._stream.next_due_s() - now_s))
        self.end(f"no answer for {self._settings.silence_s:g} s")

    def opened(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._stream.opened(self._clock.monotonic())

    def received(self, data: bytes) -> None:
        was_up = self._stream.state is StreamState.UP
        try:
            deliveries = self._stream.received(data, self._clock.monotonic())
        except ProtocolError as error:
            _log.warning("wire.protocol_error", address=str(self._address), error=str(error))
            self.end(error.why)
            return
        except NotLetIn as error:
            _log.warning("wire.not_let_in", address=str(self._address), error=str(error))
            self.end(error.why)
            return
        if not was_up:
            self._tried.set()
            if self._stream.refusal is not None:
                self.end(str(self._stream.refusal))
        deliver(deliveries)

    def hung_up(self, error: Exception | None) -> None:
        self.end(hung_up_text(self._stream.state, str(self._address)) if error is None else tls_error_text(error))

    def end(self, why: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)

    def _submit(self, command: Command, reply: Reply) -> None:
        instead = (reply, Closed("connection")) if self._is_closed else self._stream.submit(command, reply)
        if instead is not None:
            reply(instead[1])

    def _send(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)


class _Stream(asyncio.Protocol):
    def __init__(self, node: AsyncRemoteNode) -> None:
        self._node = node

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._node.opened(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._node.received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._node.hung_up(error)
