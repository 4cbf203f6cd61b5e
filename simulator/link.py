"""The client's end under simulation: the real ClientStream, with virtual time in place of a thread and a socket."""

from __future__ import annotations

from collections import Counter
from functools import partial

from inturn.model.errors import InturnError, ProtocolError
from inturn.model.subject import Subject
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Append,
    Appended,
    Assignment,
    Claim,
    Command,
    Commit,
    Committed,
    Done,
    FindSubject,
    Granted,
    Heartbeat,
    Leave,
    LotContent,
    Move,
    OpenDeadLetters,
    OpenProducer,
    OpenRetry,
    ProducerOpened,
    Pull,
    Pulled,
    ReadLot,
    Release,
    Renew,
    Renewed,
    Reply,
)
from inturn.transport.client_stream import ClientStream, Delivery, StreamSettings
from simulator.server import SimServer
from simulator.stream import SimStream
from simulator.world import SimClient, World

_TIMER_S_MIN = 0.02
ANSWERED_WITHIN_S = 5.0  # in any case: a stream without answers is given up long before
_ANSWERS: dict[type[Command], type] = {
    FindSubject: Subject,
    OpenProducer: ProducerOpened,
    Append: Appended,
    Heartbeat: Assignment,
    Leave: Done,
    Acquire: Granted,
    Claim: Granted,
    Renew: Renewed,
    Pull: Pulled,
    Commit: Committed,
    Release: Done,
    Move: Done,
    ReadLot: LotContent,
    OpenRetry: Subject,
    OpenDeadLetters: Subject,
}


class _Asked:
    """A command that waits for exactly one answer."""

    __slots__ = ("at_s", "command", "reply")

    def __init__(self, command: Command, reply: Reply, at_s: float) -> None:
        self.command = command
        self.reply = reply
        self.at_s = at_s


class SimLink:
    """What `RemoteNode` does: connects, gives up, and connects again."""

    def __init__(
        self, world: World, client: SimClient, server: SimServer, settings: StreamSettings, coverage: Counter[str]
    ) -> None:
        self.problems: list[str] = []
        self._world = world
        self._client = client
        self._server = server
        self._settings = settings
        self._coverage = coverage
        self._link = ClientStream("node", "simulated", settings, world.rng, self._send)
        self._stream: SimStream | None = None
        self._streams: list[SimStream] = []  # older streams may still carry bytes to the node
        self._asked: set[_Asked] = set()
        self._is_closed = False
        self._to_node_blocked = False
        self._to_client_blocked = False
        client.later(0.0, self._dial)

    @property
    def stream(self) -> SimStream | None:
        return self._stream

    def submit(self, command: Command, reply: Reply) -> None:
        asked = _Asked(command, reply, self._world.now_s)
        self._asked.add(asked)
        instead = self._link.submit(command, partial(self._answered, asked))
        if instead is not None:  # real clients handle answers later, too
            self._client.later(0.0, partial(self._deliver, [instead]))

    def block(self, *, to_node: bool, to_client: bool) -> None:
        self._to_node_blocked, self._to_client_blocked = to_node, to_client
        for stream in self._streams:
            stream.to_node.block(to_node)
            stream.to_client.block(to_client)

    def close(self) -> None:
        """The client closes its stream."""
        self._is_closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.closed_by_client(resets=False)

    def died(self) -> None:
        """The system closes the sockets of a dead process; sockets of a dead machine stay open."""
        self._is_closed = True
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self._world.happens(0.3):
            stream.left_by_client()
        else:
            stream.closed_by_client(resets=self._world.happens(0.5))

    def overdue(self) -> list[str]:
        """Commands that should have an answer by now, at least ConnectionLost."""
        if self._is_closed or self._client.is_frozen:
            return []
        return sorted(
            f"never answered: {type(one.command).__name__} of {self._client.name}, asked at {one.at_s:.3f} s"
            for one in self._asked
            if one.at_s < self._world.now_s - ANSWERED_WITHIN_S
        )

    # The stream

    def _dial(self) -> None:
        if self._is_closed:
            return
        if self._to_node_blocked or self._to_client_blocked:
            self._client.later(self._settings.dial_timeout_s, partial(self._lost, "not reached"))
        else:
            self._client.later(self._world.spread(0.0005, 0.005), self._dialed)

    def _dialed(self) -> None:
        if self._is_closed:
            return
        stream = self._server.accept(self._client, self._received, self._ended)
        if stream is None:
            self._lost("refused")
            return
        self._coverage["stream.opened"] += 1
        self._stream = stream
        self._streams = [*self._streams[-3:], stream]
        self.block(to_node=self._to_node_blocked, to_client=self._to_client_blocked)
        self._link.opened(self._world.now_s)
        self._watch(stream)

    def _watch(self, stream: SimStream) -> None:
        if stream is not self._stream:
            return
        now_s = self._world.now_s
        if self._link.is_silent(now_s):
            self._give_up("given up, nobody answers")
        else:
            wait_s = max(_TIMER_S_MIN, self._link.next_due_s() - now_s)
            self._client.later(wait_s, partial(self._watch, stream))

    def _send(self, frame: bytes) -> None:
        if self._stream is not None:
            self._stream.to_node.write(frame)

    def _received(self, stream: SimStream, data: bytes) -> None:
        if stream is not self._stream:
            return
        try:
            deliveries = self._link.received(data, self._world.now_s)
        except ProtocolError as error:
            if not stream.is_damaged:
                self.problems.append(f"nonsense in a stream that nobody damaged: {self._client.name} says {error}")
            self._give_up("given up by the client, nonsense")
            return
        self._deliver(deliveries)

    def _ended(self, stream: SimStream) -> None:
        if stream is self._stream:
            self._give_up("ended by the node")

    def _give_up(self, why: str) -> None:
        """Real clients close the socket; unsent bytes may or may not arrive."""
        assert self._stream is not None
        self._stream.closed_by_client(resets=self._world.happens(0.5))
        self._lost(why)

    def _lost(self, why: str) -> None:
        if self._is_closed:
            return
        self._coverage[f"stream.{why}"] += 1
        self._stream = None
        deliveries = self._link.lost(why, self._world.now_s)
        self._client.later(max(0.0, self._link.retry_at_s - self._world.now_s), self._dial)
        self._deliver(deliveries)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for reply, answer in deliveries:
            if self._client.is_dead:
                return
            reply(answer)

    def _answered(self, asked: _Asked, answer: Answer | InturnError) -> None:
        if asked not in self._asked:
            self.problems.append(f"answered twice: {type(asked.command).__name__} of {self._client.name}")
            return
        self._asked.discard(asked)
        if isinstance(answer, InturnError):
            self._coverage[f"error.{type(answer).__name__}"] += 1
        elif not isinstance(answer, _ANSWERS[type(asked.command)]):
            what = f"{type(asked.command).__name__} of {self._client.name} got {type(answer).__name__}"
            self.problems.append(f"answered with something else: {what}")
            return
        asked.reply(answer)
