"""The client on an event loop: `Link` around a transport, without threads. It looks like a node, as `RemoteNode` does.

Commands may be submitted from any thread; replies are called in the loop.
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
    Link,
    LinkSettings,
    LinkState,
    NotLetIn,
    deliver,
    hung_up_text,
    tls_error_text,
)

_log = get_logger("inturn.wire")
_READ_S = 0.05  # for what has come while the process was frozen to be read
_LOOK_S = 0.5  # how often it is looked whether the loop still runs


class AsyncRemoteNode:
    """Made and closed in the loop that it lives in, which must run as long as it is used. `tls` comes with the name of
    the server."""

    def __init__(
        self,
        address: Address,
        software: str,
        clock: Clock,
        settings: LinkSettings | None = None,
        token: str = "",
        tls: tuple[ssl.SSLContext, str] | None = None,
    ) -> None:
        self._address = address
        self._tls = None if tls is None else tls[0]
        self._server_name = None if tls is None else tls[1]
        self._clock = clock
        self._settings = settings if settings is not None else LinkSettings()
        self._link = Link(str(address), software, self._settings, random.Random(), self._send, token)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[str] | None = None  # why the present stream is over
        self._tried = asyncio.Event()
        self._is_closed = False
        self._task = self._loop.create_task(self._run())

    @property
    def lease(self) -> LeaseSettings | None:
        """As the server told; None before it was first reached."""
        return self._link.lease

    @property
    def role(self) -> Role:
        """What the server is, as it told."""
        return self._link.role

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server has answered. Raises what is in the way: after the first try, or `timeout_s` later."""
        until_s = self._clock.monotonic() + timeout_s
        while True:
            await self._tried.wait()
            self._tried.clear()
            if self._link.state is LinkState.UP:
                return
            if self._link.refusal is not None:
                raise self._link.refusal
            if self._is_closed or self._clock.monotonic() >= until_s:
                raise ConnectionLost(str(self._address), self._link.why)

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
        """For those who are about to wait for an answer. InturnError where it could never come."""
        if threading.current_thread() is self._thread and not self._is_closed:
            raise InturnError(
                f"this would wait for the event loop that it runs in, where the answers of {self._address} come; await "
                "the method of the same name, or call it in another thread"
            )

    def ask(self, command: Command) -> asyncio.Future[Answer]:
        """Submit a command in the loop; the future has its answer or its error."""
        asked: asyncio.Future[Answer] = self._loop.create_future()

        def reply(answer: Answer | InturnError) -> None:
            if asked.done():  # it was cancelled
                return
            if isinstance(answer, InturnError):
                asked.set_exception(answer)
            else:
                asked.set_result(answer)

        self._submit(command, reply)
        return asked

    def close(self) -> None:
        """In any thread. It waits until that is done, but in the loop, which will do it."""
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
        with contextlib.suppress(RuntimeError):  # the loop was closed just now, and all that was in it
            closing = asyncio.run_coroutine_threadsafe(self.aclose(), self._loop)
            while self._loop.is_running():  # if it stops, nobody will ever answer
                if concurrent.futures.wait([closing], _LOOK_S).done:
                    return

    async def aclose(self) -> None:
        """In the loop."""
        self._is_closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def disown(self) -> None:
        """In a forked child: neither the loop nor the stream is ours."""
        self._is_closed = True
        if (number := self._file_number()) >= 0:
            # Not closed: the transport still owns the number, and would close it again when somebody else has it.
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), number, inheritable=False)

    def _file_number(self) -> int:
        """Of the stream; -1 if there is none."""
        if self._transport is None:
            return -1
        number: int = self._transport.get_extra_info("socket").fileno()
        return number

    def _hang_up(self) -> None:
        """Without the loop, which does not run: it would close the stream when it runs again, if ever."""
        if (number := self._file_number()) >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as stream:
                stream.shutdown(socket.SHUT_RDWR)

    async def _run(self) -> None:
        why = "the connection is closed"
        try:
            while self._link.refusal is None and not self._is_closed:
                lost = await self._connect_and_talk()
                deliver(self._link.lost(lost, self._clock.monotonic()))
                self._tried.set()
                _log.info("wire.lost", address=str(self._address), why=lost)
                await asyncio.sleep(max(0.0, self._link.retry_at_s - self._clock.monotonic()))
        except Exception as error:  # a task that dies in silence would be waited for
            if not self._is_closed:  # else it is the ruins of a loop that never ran to its end
                _log.exception("wire.failed", address=str(self._address))
            why = f"the client failed: {error!r}"
        finally:
            if self._link.refusal is None:  # which would be the better answer
                self._is_closed = True
            self._drop(why)
            self._tried.set()

    def _drop(self, why: str) -> None:
        """Hang up, and tell those who wait. In the loop, or when it does not run."""
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._transport.abort()
        lost = self._link.lost(why, self._clock.monotonic())
        deliver([(reply, Closed("connection")) for reply, _ in lost])

    async def _connect_and_talk(self) -> str:
        """Returns why that is over."""
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
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one of a host
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
            is_silent = self._link.is_silent(now_s)
            if is_silent and was_silent:
                break
            # Once is not enough: after a freeze of this process timers run before what has come meanwhile is read.
            was_silent = is_silent
            await asyncio.sleep(_READ_S if is_silent else max(0.001, self._link.next_due_s() - now_s))
        self.end(f"no answer for {self._settings.silence_s:g} s")

    def opened(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._link.opened(self._clock.monotonic())

    def received(self, data: bytes) -> None:
        was_up = self._link.state is LinkState.UP
        try:
            deliveries = self._link.received(data, self._clock.monotonic())
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
            if self._link.refusal is not None:
                self.end(str(self._link.refusal))
        deliver(deliveries)

    def hung_up(self, error: Exception | None) -> None:
        self.end(hung_up_text(self._link.state, str(self._address)) if error is None else tls_error_text(error))

    def end(self, why: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)

    def _submit(self, command: Command, reply: Reply) -> None:
        instead = (reply, Closed("connection")) if self._is_closed else self._link.submit(command, reply)
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
