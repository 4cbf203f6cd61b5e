"""Limits on the connections of a server, and the listener for TLS.

Connections are counted before their first byte is read. Most clients greet within milliseconds. A host that fills the
limit of ungreeted connections loses the oldest of its own, so clients of other hosts can connect. TLS connections are
counted and timed from their acceptance on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from inturn.model.logs import get_logger
from inturn.transport.server_session import ServerSettings
from inturn.transport.server_stream import ServerStream

if TYPE_CHECKING:
    from inturn.transport.server import StreamServer
    from inturn.transport.server_session import GuardProtocol


class CountedConnection(Protocol):
    def abort(self) -> None:
        """Hang up. Calls `leave`, now or later."""


_Connection = TypeVar("_Connection", bound=CountedConnection)


class ConnectionLimits(Generic[_Connection]):
    """Counts connections. Called by one thread."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._hosts: dict[_Connection, str] = {}
        self._ungreeted: dict[_Connection, None] = {}  # oldest first
        self._per_host: Counter[str] = Counter()
        self._ungreeted_per_host: Counter[str] = Counter()  # of `_ungreeted`

    def admit(self, connection: _Connection, host: str) -> str | None:
        """Count the connection until `leave`, and return None; or return the limit that is reached. An empty `host` has
        no limit."""
        settings = self._settings
        if len(self._hosts) >= settings.connections:
            return f"{settings.connections} connections"
        if host and self._per_host[host] >= settings.connections_per_address:
            return f"{settings.connections_per_address} connections of one address"
        if len(self._ungreeted) >= settings.ungreeted:
            oldest = self._oldest_of_busiest()
            self.leave(oldest)
            oldest.abort()
        self._hosts[connection] = host
        self._ungreeted[connection] = None
        self._per_host[host] += 1
        self._ungreeted_per_host[host] += 1
        return None

    def _oldest_of_busiest(self) -> _Connection:
        """The oldest ungreeted connection of the host, or hosts, with the most ungreeted connections."""
        most = max(self._ungreeted_per_host.values())
        return next(one for one in self._ungreeted if self._ungreeted_per_host[self._hosts[one]] == most)

    def replace(self, connection: _Connection, by: _Connection) -> None:
        """The same connection as a new object. The age of the connection stays."""
        if connection in self._hosts:
            self._hosts[by] = self._hosts.pop(connection)
            self._ungreeted = {by if one is connection else one: None for one in self._ungreeted}

    def all(self) -> list[_Connection]:
        return list(self._hosts)

    def greeted(self, connection: _Connection) -> None:
        """The client of the connection has greeted."""
        if connection in self._ungreeted:
            del self._ungreeted[connection]
            _count_down(self._ungreeted_per_host, self._hosts[connection])

    def leave(self, connection: _Connection) -> None:
        """May be called twice."""
        self.greeted(connection)
        host = self._hosts.pop(connection, None)
        if host is not None:
            _count_down(self._per_host, host)


def _count_down(counts: Counter[str], host: str) -> None:
    counts[host] -= 1
    if not counts[host]:
        del counts[host]


_log = get_logger("inturn.wire")
ACCEPT_AGAIN_S = 0.1
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsListener:
    """Accepts connections itself, so that connections are counted and timed before the TLS handshake."""

    def __init__(self, server: StreamServer, guard: GuardProtocol, listening: socket.socket) -> None:
        self._server = server
        self._guard = guard
        self.listening = listening
        listening.setblocking(False)
        self._handshakes: set[_Handshake] = set()
        self._again: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self.listening)
        self.listening.close()

    def disown(self) -> None:
        """In a forked child: all sockets are the parent's."""
        for one in (self.listening, *(handshake.socket for handshake in self._handshakes)):
            with contextlib.suppress(OSError):
                os.close(one.fileno())

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self.listening, self._accept)

    def _accept(self) -> None:
        try:
            accepted, address = self.listening.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:  # the client is gone again, or there are too many open files
            _log.warning("wire.not_accepted", error=str(error))
            if error.errno in _NO_ROOM:
                loop = asyncio.get_running_loop()
                loop.remove_reader(self.listening)
                self._again = loop.call_later(ACCEPT_AGAIN_S, self._listen)
            return
        handshake = _Handshake(self._server, self._guard, accepted, str(address[0]))
        if handshake.begin():
            self._handshakes.add(handshake)
            handshake.task.add_done_callback(partial(self._over, handshake))

    def _over(self, handshake: _Handshake, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        if task.cancelled():  # perhaps before the task began
            handshake.end()


class _Handshake:
    """A connection during its TLS handshake."""

    task: asyncio.Task[None]

    def __init__(self, server: StreamServer, guard: GuardProtocol, accepted: socket.socket, host: str) -> None:
        self._server = server
        self._guard = guard
        self.socket = accepted
        self._stream = ServerStream(server)
        self._host = host

    def begin(self) -> bool:
        """False: a limit of connections is reached."""
        tls = self._guard.tls
        assert tls is not None, "a TLS listener needs a TLS context"
        if self._server.is_closed or not self._stream.enter(self._host, self):
            self.socket.close()
            return False
        self.task = asyncio.get_running_loop().create_task(self._shake_hands(tls))
        return True

    async def _shake_hands(self, tls: ssl.SSLContext) -> None:
        timeout_s = self._server.settings.greeting_s
        try:
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._stream, self.socket, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:  # any error of TLS, or the handshake took too long
            _log.info("wire.tls_failed", address=self._host, error=str(error))
            refusal = _refusal(error)
            if refusal is not None:
                self._guard.refused(self._host, "TLS", refusal)
            self.end()

    def end(self) -> None:
        self._stream.leave()
        self.socket.close()

    def abort(self) -> None:
        self.task.cancel()


def _refusal(error: OSError) -> str | None:
    """Why the server refused the client; None if the client hung up, or no certificate is concerned."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no certificate was shown"
    return None
