"""The node's end of streams under simulation: real server sessions, with virtual time in place of sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from inturn.model.settings import LeaseSettings
from inturn.transport.server_session import ServerSession, ServerSettings
from simulator.node import SimNode
from simulator.stream import SimPipe, SimStream, Weather
from simulator.world import SimClient, World

_WATCH_S = 1.0

Received: TypeAlias = Callable[[SimStream, bytes], None]
Ended: TypeAlias = Callable[[SimStream], None]


class SimServer:
    """As `Server`: accepts connections, and closes silent connections."""

    def __init__(
        self,
        world: World,
        node: SimNode,
        lease: LeaseSettings,
        settings: ServerSettings,
        weather: Weather,
        coverage: Counter[str],
    ) -> None:
        self.node = node
        self.lease = lease
        self.settings = settings
        self.world = world
        self.coverage = coverage
        self.peers: dict[_Peer, None] = {}  # in the order of their connections
        self._weather = weather
        world.after(_WATCH_S, self._watch)

    def accept(self, client: SimClient, received: Received, ended: Ended) -> SimStream | None:
        """A new stream; None if the node is down. The functions are not called while the client is frozen or dead."""
        if not self.node.is_up:
            return None
        peer = _Peer(self)
        to_node = self._pipe(peer.received, peer.ended)
        to_client = self._pipe(
            lambda data: client.do(partial(received, stream, data)), lambda: client.do(partial(ended, stream))
        )
        peer.stream = stream = SimStream(to_node, to_client)
        self.peers[peer] = None
        return stream

    def _pipe(self, arrived: Callable[[bytes], None], ended: Callable[[], None]) -> SimPipe:
        return SimPipe(self.world, self._weather, self.coverage, arrived, ended)

    def crashed(self) -> None:
        """The process is gone. The system closes the streams, unless the machine is gone, too."""
        for peer in list(self.peers):
            peer.session.is_closed = True
            if self.world.happens(0.4):
                peer.stream.left_by_node()
            else:
                peer.stream.closed_by_node(resets=self.world.happens(0.5))
        self.peers.clear()

    def _watch(self) -> None:
        for peer in list(self.peers):
            peer.hang_up_if_silent()
        self.world.after(_WATCH_S, self._watch)


class _Peer:
    """A session on a stream."""

    stream: SimStream

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self._heard_at_s = server.world.now_s
        self._is_full = False
        self.session = ServerSession(server.node, server.settings, server.lease, "simulated", self._send, self._hang_up)

    def received(self, data: bytes) -> None:
        if self not in self._server.peers:
            return
        self._heard_at_s = self._server.world.now_s
        self._server.coverage["stream.bytes of a client that is gone"] += self.stream.is_left
        self.session.received(data)
        self._look()

    def ended(self) -> None:
        if self in self._server.peers:
            self._lost(resets=True)

    def hang_up_if_silent(self) -> None:
        if self._server.world.now_s >= self._heard_at_s + self._server.settings.silence_s and not self._is_full:
            self._server.coverage["stream.given up by the node, silence"] += 1
            self._lost(resets=True)

    def _lost(self, *, resets: bool) -> None:
        del self._server.peers[self]
        self._server.node.watch_gone(self.session)
        self.stream.closed_by_node(resets=resets)
        self.session.lost()

    def _send(self, frame: bytes) -> None:
        self.stream.to_client.write(frame)
        self.session.written(len(frame))
        if self._is_full or self.session.has_waiting:
            self._server.world.after(0.0, self._go_on)

    def _hang_up(self) -> None:
        """Close the stream after the bytes sent so far."""
        if not self.stream.is_damaged:
            self._server.node.problems.append("nonsense in a stream that nobody damaged: the node hung up")
        self._server.coverage["stream.given up by the node, nonsense"] += 1
        self._server.world.after(0.0, self._end)

    def _end(self) -> None:
        if self in self._server.peers:
            self._lost(resets=False)

    def _go_on(self) -> None:
        if self in self._server.peers:
            self.session.go_on()
            self._look()

    def _look(self) -> None:
        self._is_full = self.session.is_full
        self._server.coverage["stream.too much unanswered"] += self._is_full
        # A session answers an internal error with an error; in a simulation the internal error ends the history.
        if self._server.node.failure is not None:
            raise self._server.node.failure
