"""The server: sessions on the sockets of one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, cast

from inturn.model.clock import Clock
from inturn.model.errors import InvalidInput
from inturn.model.event_loop import new_event_loop
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings
from inturn.wire.address import Address
from inturn.wire.doors import Doors
from inturn.wire.session import Pass, ServedNode, ServerSettings, Session

_log = get_logger("inturn.wire")
OUT_BYTES_MAX = 256 << 20  # of answers that a client does not take
OUT_BYTES_HIGH = 4 << 20
WATCH_S = 5.0
GUARDED_WATCH_S = 1.0  # so soon a token that was revoked is of no use any more
KEEP_ALIVE_S = 1.0  # of clients that have to wait: they give up after 6
CLOSING_TURNS = 5


class Guard(Protocol):
    """Who is let in, and what they may do. Called in the server's event loop."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For addresses that are reached over a network."""
        ...

    def visitor(self, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool) -> Pass:
        """What a new client may do. `is_local`: it came through a socket that only the folder's user can open."""
        ...

    def reload(self, *, always: bool = False) -> None:
        """Read again what was changed by its operator, or `always`."""
        ...


class Server:
    """Serves a node from `listen` to `close`."""

    def __init__(
        self,
        node: ServedNode,
        lease: LeaseSettings,
        clock: Clock,
        software: str,
        settings: ServerSettings | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`guard` None: whoever comes may do everything."""
        self.guard = guard
        self.node = node
        self.lease = lease
        self.clock = clock
        self.software = software
        self.settings = settings if settings is not None else ServerSettings()
        self.peers: set[_Peer] = set()
        self.doors: Doors[_Visit] = Doors(self.settings)
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

    def reload(self) -> None:
        """Have the guard read its files again, from any thread."""
        with contextlib.suppress(RuntimeError):  # it was closed just now
            self._loop.call_soon_threadsafe(self._look_at_guard, True)

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
                await asyncio.wait_for(self._ended.wait(), WATCH_S if self.guard is None else GUARDED_WATCH_S)
            self._look_at_guard(False)
            now_s = self.clock.monotonic()
            for peer in list(self.peers):
                peer.hang_up_if_silent(now_s)

    def _look_at_guard(self, always: bool) -> None:
        if self.guard is None:
            return
        self.guard.reload(always=always)
        for peer in list(self.peers):
            peer.hang_up_if_invalid()

    async def _listen(self, address: Address) -> Address:
        if address.path is not None:
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                bound.bind(address.path)
                self._unix_paths.append(address.path)
                os.chmod(address.path, 0o600)  # before anybody can be heard there
                unix_server = await self._loop.create_unix_server(lambda: _Peer(self, is_local=True), sock=bound)
            except BaseException:
                bound.close()
                raise
            self._servers.append(unix_server)
            return address
        tls = None if self.guard is None else self.guard.tls
        enter: Callable[[], asyncio.Protocol] = lambda: _Peer(self)  # noqa: E731
        if tls is not None:
            enter = lambda: _Handshake(self, tls)  # noqa: E731
        server = await self._loop.create_server(enter, address.host, address.port)
        self._servers.append(server)
        return Address(address.host, server.sockets[0].getsockname()[1], is_tls=tls is not None)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for path in self._unix_paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        await asyncio.sleep(0)
        # Whoever was accepted at the last moment is here only a little later.
        for _ in range(CLOSING_TURNS):
            for visit in self.doors.all():
                visit.abort()
            for peer in list(self.peers):
                peer.abort()
            await asyncio.sleep(0.001 if self.peers else 0)
        self._ended.set()


class _Visit(Protocol):
    """A stream that is there, in whatever state."""

    def abort(self) -> None: ...


class _Handshake(asyncio.Protocol):
    """A stream before TLS has begun: it counts and has its time from the start, as any other."""

    def __init__(self, server: Server, tls: ssl.SSLContext) -> None:
        self._server = server
        self._tls = tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()  # TLS goes on reading
        self._peer = _Peer(self._server)
        if self._server.is_closed or not self._peer.enter(self._transport, self):
            self._transport.abort()
            return
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(
                self._transport,
                self._peer,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=self._server.settings.greeting_s,
            )
        except OSError as error:  # whatever TLS does not like, or it took too long
            _log.info("wire.tls_failed", error=str(error))
            transport = None
        if transport is None:
            self._peer.leave()
            self._transport.abort()
            return
        self._peer.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._peer.leave()

    def abort(self) -> None:
        self._transport.abort()
        self._peer.leave()


class _Peer(asyncio.Protocol):
    """A session on a socket."""

    session: Session

    def __init__(self, server: Server, *, is_local: bool = False) -> None:
        self._server = server
        self._is_local = is_local
        self._visit: _Visit | None = None
        self._address = ""
        self._out: deque[bytes] = deque()
        self._is_flushing = False  # a flush comes by itself
        self._is_reading = True
        self._is_resuming = False  # when its quota allows
        self._heard_at_s = server.clock.monotonic()
        self._hangs_up = False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        is_let_in = not self._server.is_closed and (self._visit is not None or self.enter(self._transport, self))
        self.session = self._new_session()
        self._server.peers.add(self)
        if not is_let_in:
            self._transport.abort()
            return
        if self._visit is not self:
            self._server.doors.replace(cast(_Visit, self._visit), self)
            self._visit = self
        self._transport.set_write_buffer_limits(high=OUT_BYTES_HIGH)

    def enter(self, transport: asyncio.Transport, visit: _Visit) -> bool:
        """Before anything is read: False if there is no room, else there is until `leave`."""
        self._address = _host_of(transport)
        doors, settings = self._server.doors, self._server.settings
        why = doors.come(visit, "" if self._is_local else self._address)
        if why is not None:
            _log.warning("wire.too_many_connections", limit=why, address=self._address)
            return False
        self._visit = visit
        self._late = asyncio.get_running_loop().call_later(settings.greeting_s, self._hang_up_if_ungreeted)
        return True

    def leave(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._visit is not None:
            self._server.doors.leave(self._visit)

    def _new_session(self) -> Session:
        server = self._server
        visitor = None
        if server.guard is not None:
            certificate = self._transport.get_extra_info("peercert")
            visitor = server.guard.visitor(self._address, certificate, is_local=self._is_local)
        return Session(
            server.node, server.settings, server.lease, server.software, self._send, self._hang_up_soon, visitor
        )

    def data_received(self, data: bytes) -> None:
        self._heard_at_s = self._server.clock.monotonic()
        self._is_flushing = True
        self.session.received(data)
        if self._late is not None and self.session.is_greeted:
            self._greeted()
        self.flush()
        self._look()

    def _greeted(self) -> None:
        if self._late is not None and self._visit is not None:
            self._late.cancel()
            self._late = None
            self._server.doors.greeted(self._visit)

    def _hang_up_if_ungreeted(self) -> None:
        if self._late is not None and self._visit is not None:
            _log.info("wire.not_greeted", greeting_s=self._server.settings.greeting_s, address=self._address)
            self._visit.abort()

    def pause_writing(self) -> None:
        self.session.pause(True)
        self._look()

    def resume_writing(self) -> None:
        self.session.pause(False)
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        self.leave()
        if self in self._server.peers:
            self._server.peers.discard(self)
            self.session.lost()

    def hang_up_if_silent(self, now_s: float) -> None:
        self._look()
        if now_s >= self._heard_at_s + self._server.settings.silence_s and self._is_reading:
            _log.info("wire.silent", silence_s=self._server.settings.silence_s)
            self._transport.abort()

    def hang_up_if_invalid(self) -> None:
        """Its token was revoked, or has expired."""
        if not self.session.is_valid:
            _log.info("wire.token_over", address=self._address)
            self._transport.abort()

    def abort(self) -> None:
        """Without another word: what comes from the node from now on is not to be heard."""
        self.session.is_closed = True
        self._transport.abort()

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
        if not self._is_reading:
            self._resume_later()

    def _resume_later(self) -> None:
        """If it is its quota that the client waits for, nothing else will tell that it is over."""
        wait_s = self.session.quota_wait_s
        if wait_s > 0 and not self._is_resuming and not self._transport.is_closing():
            self._is_resuming = True
            asyncio.get_running_loop().call_later(min(wait_s, KEEP_ALIVE_S), self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        if self._transport.is_closing() or self.session.is_closed:
            return
        self._heard_at_s = self._server.clock.monotonic()  # it could not be heard
        if self.session.quota_wait_s > 0:
            self.session.keep_alive()
        else:
            self.session.go_on()
        self._look()


def _host_of(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""
