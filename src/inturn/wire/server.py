"""The server: sessions on the sockets of one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import cast

from inturn.model.clock import Clock
from inturn.model.errors import InturnError, InvalidInput
from inturn.model.event_loop import new_event_loop
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings
from inturn.wire.address import Address
from inturn.wire.session import ServedNode, ServerSettings, Session

_log = get_logger("inturn.wire")
OUT_BYTES_MAX = 256 << 20  # of answers that a client does not take
OUT_BYTES_HIGH = 4 << 20
WATCH_S = 5.0
CLOSING_TURNS = 5
LOAD_S = 1.0  # how long somebody who looks waits for an answer


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server has to do."""

    connection_count: int
    unanswered_count: int  # commands, those that are held back included
    untaken_bytes: int  # of answers
    delay_s: float  # until its thread came to tell this


class Server:
    """Serves a node from `listen` to `close`."""

    def __init__(
        self,
        node: ServedNode,
        lease: LeaseSettings,
        clock: Clock,
        software: str,
        settings: ServerSettings | None = None,
        on_error: Callable[[InturnError], None] | None = None,
    ) -> None:
        """`on_error` is told of answers that are errors, from any thread."""
        self.node = node
        self.on_error = on_error
        self.lease = lease
        self.clock = clock
        self.software = software
        self.settings = settings if settings is not None else ServerSettings()
        self.peers: set[_Peer] = set()
        self._unix_paths: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._dirty: deque[_Peer] = deque()
        self._is_woken = False
        self.is_closed = False
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="inturn-server", daemon=True)
        self._thread.start()
        self._started.result()

    def listen(self, address: Address) -> Address:
        """Take connections at this address; port 0 is any. Returns the address with the port that it got."""
        listening = asyncio.run_coroutine_threadsafe(self._listen(address), self._loop)
        try:
            return listening.result()
        except OSError as error:
            raise InvalidInput(f"cannot listen at {address}: {error.strerror or error}; choose another") from error

    def load(self, patience_s: float = LOAD_S) -> ServerLoad | None:
        """What it has to do just now; None if it does not come to this question in time. From any other thread."""
        if self.is_closed:
            return None
        asked_at_s = self.clock.monotonic()
        try:
            return asyncio.run_coroutine_threadsafe(self._load(asked_at_s), self._loop).result(patience_s)
        except (TimeoutError, RuntimeError, CancelledError):  # it is busy, or was closed just now
            return None

    def close(self) -> None:
        """Hang up on everybody. What is not answered will not be."""
        if self.is_closed:
            return
        self.is_closed = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._thread.join()

    def disown(self) -> None:
        """In a forked child: the thread is not here. The listening sockets are the parent's."""
        self.is_closed = True
        for server in self._servers:
            for listening in server.sockets:
                with contextlib.suppress(OSError):
                    os.close(listening.fileno())
        for peer in self.peers:
            peer.disown()

    def wake(self, peer: _Peer) -> None:
        """There is something to send, from any thread; one wake-up is for all that come before it."""
        self._dirty.append(peer)
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # it was closed just now
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
                await asyncio.wait_for(self._ended.wait(), WATCH_S)
            now_s = self.clock.monotonic()
            for peer in list(self.peers):
                peer.hang_up_if_silent(now_s)

    async def _load(self, asked_at_s: float) -> ServerLoad:
        return ServerLoad(
            len(self.peers),
            sum(peer.session.unanswered_count for peer in self.peers),
            sum(peer.untaken_bytes for peer in self.peers),
            self.clock.monotonic() - asked_at_s,
        )

    async def _listen(self, address: Address) -> Address:
        if address.path is not None:
            unix_server = await self._loop.create_unix_server(lambda: _Peer(self), address.path)
            self._servers.append(unix_server)
            self._unix_paths.append(address.path)
            try:
                os.chmod(address.path, 0o600)
            except OSError:
                unix_server.close()  # better nobody than everybody
                raise
            return address
        server = await self._loop.create_server(lambda: _Peer(self), address.host, address.port)
        self._servers.append(server)
        return Address(address.host, server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for path in self._unix_paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        await asyncio.sleep(0)
        # Whoever was accepted at the last moment is here only a little later.
        for _ in range(CLOSING_TURNS):
            for peer in list(self.peers):
                peer.abort()
            await asyncio.sleep(0.001 if self.peers else 0)
        self._ended.set()


class _Peer(asyncio.Protocol):
    """A session on a socket."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._out: deque[bytes] = deque()
        self._is_flushing = False  # a flush comes by itself
        self._is_reading = True
        self._heard_at_s = server.clock.monotonic()
        self.session = Session(
            server.node, server.settings, server.lease, server.software, self._send, self._hang_up_soon, server.on_error
        )
        self._hangs_up = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=OUT_BYTES_HIGH)
        self._server.peers.add(self)
        if self._server.is_closed:
            self._transport.abort()
        elif len(self._server.peers) > self._server.settings.connections:
            _log.warning("wire.too_many_connections", limit=self._server.settings.connections)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard_at_s = self._server.clock.monotonic()
        self._is_flushing = True
        self.session.received(data)
        self.flush()
        self._look()

    def pause_writing(self) -> None:
        self.session.pause(True)
        self._look()

    def resume_writing(self) -> None:
        self.session.pause(False)
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.peers.discard(self)
        self.session.lost()

    def hang_up_if_silent(self, now_s: float) -> None:
        self._look()
        if now_s >= self._heard_at_s + self._server.settings.silence_s and self._is_reading:
            _log.info("wire.silent", silence_s=self._server.settings.silence_s)
            self._transport.abort()

    def abort(self) -> None:
        """Without another word: what comes from the node from now on is not to be heard."""
        self.session.is_closed = True
        self._transport.abort()

    @property
    def untaken_bytes(self) -> int:
        return self.session.unwritten_bytes + self._transport.get_write_buffer_size()

    def disown(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._transport.get_extra_info("socket").fileno())

    def flush(self) -> None:
        self._is_flushing = False
        out = self._out
        if not out:
            return
        if len(out) == 1:
            data: bytes | bytearray = out.popleft()
        else:
            frames = []
            while out:
                frames.append(out.popleft())
            data = b"".join(frames)
        self._transport.write(data)
        self.session.written(len(data))
        if self._hangs_up:
            self._transport.close()
        elif self._transport.get_write_buffer_size() > OUT_BYTES_MAX:
            _log.warning("wire.answers_not_taken", limit_bytes=OUT_BYTES_MAX)
            self._transport.abort()
        if not self._is_reading or self.session.has_waiting:
            self.session.go_on()
            self._look()

    def _send(self, frame: bytes) -> None:
        self._out.append(frame)
        if not self._is_flushing:
            self._is_flushing = True
            self._server.wake(self)

    def _hang_up_soon(self) -> None:
        self._hangs_up = True

    def _look(self) -> None:
        """Read only while there is room for what is read."""
        if self.session.is_full == self._is_reading and not self._transport.is_closing():
            self._is_reading = not self._is_reading
            if self._is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
