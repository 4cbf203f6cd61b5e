"""A server session on a socket of the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, cast

from inturn.model.logs import get_logger
from inturn.transport.server_session import ServerSession

if TYPE_CHECKING:
    from inturn.transport.listener import CountedConnection
    from inturn.transport.server import StreamServer

_log = get_logger("inturn.wire")
OUT_BYTES_MAX = 256 << 20  # of answers that the client has not taken
OUT_BYTES_HIGH = 4 << 20
KEEP_ALIVE_S = 1.0  # between frames to a waiting client, which drops a stream that is silent for 6 s


class ServerStream(asyncio.Protocol):
    """A connection from the first byte, or from the end of the TLS handshake, to the last byte."""

    session: ServerSession

    def __init__(self, server: StreamServer, *, is_local: bool = False) -> None:
        self._server = server
        self._is_local = is_local
        self._counted: CountedConnection | None = None  # this stream, or its TLS handshake
        self._address = ""
        self._out: deque[bytes] = deque()
        self._is_flushing = False  # a flush will follow
        self._is_reading = True
        self._is_resuming = False  # a timer for the quota runs
        self._heard_at_s = server.clock.monotonic()
        self._hangs_up = False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        is_counted = self._counted is not None or self.enter(_host_of(self._transport), self)
        self.session = self._new_session()
        self._server.streams.add(self)
        if not is_counted or self._server.is_closed:
            self._transport.abort()
            return
        if self._counted is not None and self._counted is not self:  # a handshake until now
            self._server.limits.replace(self._counted, self)
            self._counted = self
        self._transport.set_write_buffer_limits(high=OUT_BYTES_HIGH)

    def enter(self, host: str, connection: CountedConnection) -> bool:
        """Count the connection before its first byte is read, until `leave`. False: a limit is reached."""
        self._address = host
        settings = self._server.settings
        limit = self._server.limits.admit(connection, "" if self._is_local else self._address)
        if limit is not None:
            _log.warning("wire.too_many_connections", limit=limit, address=self._address)
            return False
        self._counted = connection
        self._late = asyncio.get_running_loop().call_later(settings.greeting_s, self._hang_up_if_ungreeted)
        return True

    def leave(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if self._counted is not None:
            self._server.limits.leave(self._counted)

    def _new_session(self) -> ServerSession:
        server = self._server
        session_guard = None
        if server.guard is not None:
            certificate = self._transport.get_extra_info("peercert")
            session_guard = server.guard.session_guard(self._address, certificate, is_local=self._is_local)
        return ServerSession(
            server.node,
            server.settings,
            server.lease,
            server.software,
            self._send,
            self._hang_up_soon,
            server.on_error,
            session_guard,
            server.role,
        )

    def data_received(self, data: bytes) -> None:
        self._heard_at_s = self._server.clock.monotonic()
        self._is_flushing = True
        self.session.received(data)
        if self._late is not None and self.session.is_greeted:
            self._greeted()
        self.flush()
        self._update_reading()

    def _greeted(self) -> None:
        if self._late is not None and self._counted is not None:
            self._late.cancel()
            self._late = None
            self._server.limits.greeted(self._counted)

    def _hang_up_if_ungreeted(self) -> None:
        if self._late is not None and self._counted is not None:
            _log.info("wire.not_greeted", greeting_s=self._server.settings.greeting_s, address=self._address)
            self._counted.abort()

    def pause_writing(self) -> None:
        self.session.pause(True)
        self._update_reading()

    def resume_writing(self) -> None:
        self.session.pause(False)
        self._update_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.leave()
        if self in self._server.streams:
            self._server.streams.discard(self)
            self.session.lost()

    def hang_up_if_silent(self, now_s: float) -> None:
        self._update_reading()
        if now_s >= self._heard_at_s + self._server.settings.silence_s and self._is_reading:
            _log.info("wire.silent", silence_s=self._server.settings.silence_s)
            self._transport.abort()

    def hang_up_if_invalid(self) -> None:
        """The client's token was revoked, or has expired."""
        if not self.session.is_valid:
            _log.info("wire.token_over", address=self._address)
            self._transport.abort()

    @property
    def untaken_bytes(self) -> int:
        return self.session.unwritten_bytes + self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Hang up at once: answers of the node are dropped from now on."""
        self.session.is_closed = True
        self._transport.abort()

    def disown(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._transport.get_extra_info("socket").fileno())

    def flush(self) -> None:
        self._is_flushing = False
        out = self._out
        if self._transport.is_closing():
            out.clear()  # the client is gone; other streams wait to be flushed
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
            self._update_reading()

    def _send(self, frame: bytes) -> None:
        self._out.append(frame)
        if not self._is_flushing:
            self._is_flushing = True
            self._server.wake(self)

    def _hang_up_soon(self) -> None:
        self._hangs_up = True

    def _update_reading(self) -> None:
        """Read only while the session is not full."""
        if self.session.is_full == self._is_reading and not self._transport.is_closing():
            self._is_reading = not self._is_reading
            if self._is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        if not self._is_reading or self.session.has_waiting:
            self._resume_later()

    def _resume_later(self) -> None:
        """If the client waits for its quota, only a timer ends the wait."""
        wait_s = self.session.deaf_s or self.session.quota_wait_s
        if wait_s > 0 and not self._is_resuming and not self._transport.is_closing():
            self._is_resuming = True
            asyncio.get_running_loop().call_later(min(wait_s, KEEP_ALIVE_S), self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        if self._transport.is_closing() or self.session.is_closed:
            return
        if not self._is_reading:
            self._heard_at_s = self._server.clock.monotonic()  # the server did not read meanwhile
        if self.session.quota_wait_s > 0:
            self.session.keep_alive()
        self.session.go_on()
        self._update_reading()


def _host_of(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""
