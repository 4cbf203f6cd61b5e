"""The doors of a server: how many streams there may be, before anything of them is read.

Most of those who have not said yet who they are do so within milliseconds. The host that keeps the doors full without a
word loses the oldest of its own: others get in.

The door of a server that talks TLS: connections are counted and timed from the moment that they are there.
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
from inturn.transport.server_stream import Peer

if TYPE_CHECKING:
    from inturn.transport.server_session import Guard
    from inturn.transport.stream_server import Server


class Visit(Protocol):
    def abort(self) -> None:
        """Hang up; calls `leave`, now or later."""


_Visit = TypeVar("_Visit", bound=Visit)


class Doors(Generic[_Visit]):
    """Used by one thread."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._hosts: dict[_Visit, str] = {}
        self._ungreeted: dict[_Visit, None] = {}  # oldest first
        self._per_host: Counter[str] = Counter()
        self._silent_per_host: Counter[str] = Counter()  # of `_ungreeted`

    def come(self, visit: _Visit, host: str) -> str | None:
        """None if there is room, which it has until `leave`; else the limit. No `host`: it is not counted by host."""
        settings = self._settings
        if len(self._hosts) >= settings.connections:
            return f"{settings.connections} connections"
        if host and self._per_host[host] >= settings.connections_per_address:
            return f"{settings.connections_per_address} connections of one address"
        if len(self._ungreeted) >= settings.ungreeted:
            oldest = self._oldest_of_the_most()
            self.leave(oldest)
            oldest.abort()
        self._hosts[visit] = host
        self._ungreeted[visit] = None
        self._per_host[host] += 1
        self._silent_per_host[host] += 1
        return None

    def _oldest_of_the_most(self) -> _Visit:
        """The oldest that was not greeted, of the host (or of those) that has the most of them."""
        most = max(self._silent_per_host.values())
        return next(one for one in self._ungreeted if self._silent_per_host[self._hosts[one]] == most)

    def replace(self, visit: _Visit, by: _Visit) -> None:
        """The same stream, in its next state; as old as it was."""
        if visit in self._hosts:
            self._hosts[by] = self._hosts.pop(visit)
            self._ungreeted = {by if one is visit else one: None for one in self._ungreeted}

    def all(self) -> list[_Visit]:
        return list(self._hosts)

    def greeted(self, visit: _Visit) -> None:
        """It has said who it is."""
        if visit in self._ungreeted:
            del self._ungreeted[visit]
            _count_down(self._silent_per_host, self._hosts[visit])

    def leave(self, visit: _Visit) -> None:
        """Again is no harm."""
        self.greeted(visit)
        host = self._hosts.pop(visit, None)
        if host is not None:
            _count_down(self._per_host, host)


def _count_down(counts: Counter[str], host: str) -> None:
    counts[host] -= 1
    if not counts[host]:
        del counts[host]


_log = get_logger("inturn.wire")
ACCEPT_AGAIN_S = 0.1
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsDoor:
    """Takes connections itself, so that they count and have their time before TLS has heard a word of them."""

    def __init__(self, server: Server, guard: Guard, listening: socket.socket) -> None:
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
        """In a forked child: all of them are the parent's."""
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
        except OSError as error:  # a client that is gone again, or no room for another file
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
        if task.cancelled():  # perhaps before it had begun
            handshake.end()


class _Handshake:
    """A stream until TLS is there."""

    task: asyncio.Task[None]

    def __init__(self, server: Server, guard: Guard, accepted: socket.socket, host: str) -> None:
        self._server = server
        self._guard = guard
        self.socket = accepted
        self._peer = Peer(server)
        self._host = host

    def begin(self) -> bool:
        """False if there is no room."""
        tls = self._guard.tls
        assert tls is not None, "or there would be no such door"
        if self._server.is_closed or not self._peer.enter(self._host, self):
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
                lambda: self._peer, self.socket, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:  # whatever TLS does not like, or it took too long
            _log.info("wire.tls_failed", address=self._host, error=str(error))
            refusal = _refusal(error)
            if refusal is not None:
                self._guard.refused(self._host, "TLS", refusal)
            self.end()

    def end(self) -> None:
        self._peer.leave()
        self.socket.close()

    def abort(self) -> None:
        self.task.cancel()


def _refusal(error: OSError) -> str | None:
    """Why a client was not let in; None if it was not the server that said no, or nobody knows who it was to be."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no certificate was shown"
    return None
