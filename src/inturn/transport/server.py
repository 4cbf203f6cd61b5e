"""The stream server: listeners and server streams on one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import cast

from inturn.model.errors import InturnError, InvalidInput
from inturn.model.event_loop import new_event_loop
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings, Role
from inturn.model.time import Clock
from inturn.transport.address import Address
from inturn.transport.listener import ConnectionLimits, CountedConnection, TlsListener
from inturn.transport.server_session import GuardProtocol, ServedNode, ServerSettings
from inturn.transport.server_stream import ServerStream

_log = get_logger("inturn.wire")
WATCH_S = 5.0
GUARDED_WATCH_S = 1.0  # a revoked token is refused after at most this time
CLOSING_TURNS = 5
LOAD_S = 1.0  # how long `load` waits


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server."""

    connection_count: int
    unanswered_count: int  # commands, waiting long polls included
    untaken_bytes: int  # of answers
    delay_s: float  # until the server's thread answered


BACKLOG = 100  # as in asyncio


class StreamServer:
    """Serves a node from `listen` to `close`."""

    def __init__(
        self,
        node: ServedNode,
        lease: LeaseSettings,
        clock: Clock,
        software: str,
        settings: ServerSettings | None = None,
        on_error: Callable[[InturnError], None] | None = None,
        guard: GuardProtocol | None = None,
        role: Role = Role.NODE,
    ) -> None:
        """`on_error` gets answers that are errors, in any thread. `guard` None: every client may send every command."""
        self.guard = guard
        self.role = role
        self.node = node
        self.on_error = on_error
        self.lease = lease
        self.clock = clock
        self.software = software
        self.settings = settings if settings is not None else ServerSettings()
        self.streams: set[ServerStream] = set()
        self.limits: ConnectionLimits[CountedConnection] = ConnectionLimits(self.settings)
        self._unix_paths: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._tls_listeners: list[TlsListener] = []
        self._dirty: deque[ServerStream] = deque()
        self._is_woken = False
        self.is_closed = False
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="inturn-server", daemon=True)
        self._thread.start()
        self._started.result()

    def listen(self, address: Address) -> Address:
        """Accept connections at this address; port 0: any free port. Returns the address with the actual port."""
        listening = asyncio.run_coroutine_threadsafe(self._listen(address), self._loop)
        try:
            return listening.result()
        except OSError as error:
            raise InvalidInput(f"cannot listen at {address}: {error.strerror or error}; choose another") from error

    def load(self, patience_s: float = LOAD_S) -> ServerLoad | None:
        """The present load; None if the server's thread does not answer in time. Call from any other thread."""
        if self.is_closed:
            return None
        asked_at_s = self.clock.monotonic()
        try:
            return asyncio.run_coroutine_threadsafe(self._load(asked_at_s), self._loop).result(patience_s)
        except (TimeoutError, RuntimeError, CancelledError):  # the server is busy, or was closed just now
            return None

    def reload(self) -> None:
        """Have the guard read its files again. Any thread may call."""
        with contextlib.suppress(RuntimeError):  # the server was closed just now
            self._loop.call_soon_threadsafe(self._reload_guard, True)

    def close(self) -> None:
        """Hang up on all clients. Unanswered commands stay unanswered."""
        if self.is_closed:
            return
        self.is_closed = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._thread.join()

    def disown(self) -> None:
        """In a forked child: the thread does not run here, and the sockets are the parent's."""
        self.is_closed = True
        for server in self._servers:
            for listening in server.sockets:
                with contextlib.suppress(OSError):
                    os.close(listening.fileno())
        for listener in self._tls_listeners:
            listener.disown()
        for stream in self.streams:
            stream.disown()

    def wake(self, stream: ServerStream) -> None:
        """The stream has frames to send. Any thread may call. One wake-up flushes all streams noted before."""
        self._dirty.append(stream)
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the server was closed just now
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._is_woken = False
        while self._dirty:
            self._dirty.popleft().flush()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._started.set_result(None)
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WATCH_S if self.guard is None else GUARDED_WATCH_S)
            self._reload_guard(False)
            now_s = self.clock.monotonic()
            for stream in list(self.streams):
                stream.hang_up_if_silent(now_s)

    async def _load(self, asked_at_s: float) -> ServerLoad:
        return ServerLoad(
            len(self.streams),
            sum(stream.session.unanswered_count for stream in self.streams),
            sum(stream.untaken_bytes for stream in self.streams),
            self.clock.monotonic() - asked_at_s,
        )

    def _reload_guard(self, always: bool) -> None:
        if self.guard is None:
            return
        self.guard.reload(always=always)
        for stream in list(self.streams):
            stream.hang_up_if_invalid()

    async def _listen(self, address: Address) -> Address:
        if address.path is not None:
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                bound.bind(address.path)
                self._unix_paths.append(address.path)
                os.chmod(address.path, 0o600)  # before the first client can connect
                unix_server = await self._loop.create_unix_server(lambda: ServerStream(self, is_local=True), sock=bound)
            except BaseException:
                bound.close()
                raise
            self._servers.append(unix_server)
            return address
        if self.guard is not None and self.guard.tls is not None:
            return await self._listen_tls(address, self.guard)
        server = await self._loop.create_server(lambda: ServerStream(self), address.host, address.port)
        self._servers.append(server)
        return Address(address.host, server.sockets[0].getsockname()[1])

    async def _listen_tls(self, address: Address, guard: GuardProtocol) -> Address:
        found = await self._loop.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, where in dict.fromkeys(found):
            listening = socket.create_server(cast(tuple[str, int], where[:2]), family=family, backlog=BACKLOG)
            listening.setblocking(False)
            self._tls_listeners.append(TlsListener(self, guard, listening))
        return Address(address.host, self._tls_listeners[0].listening.getsockname()[1], is_tls=True)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for listener in self._tls_listeners:
            listener.close()
        for path in self._unix_paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        await asyncio.sleep(0)
        # A connection that was accepted at the last moment appears only a little later.
        for _ in range(CLOSING_TURNS):
            for connection in self.limits.all():
                connection.abort()
            for stream in list(self.streams):
                stream.abort()
            await asyncio.sleep(0.001 if self.streams else 0)
        self._ended.set()
