"""The client's thread and socket, against a server's end in the hands of the test."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from inturn.model.errors import Closed, InturnError, NotFound
from inturn.model.settings import LeaseSettings
from inturn.model.time import SystemClock
from inturn.protocol.codec import pack, unpack
from inturn.protocol.commands import Answer, FindSubject, ListSubjects, Ping, SubjectList, Welcome
from inturn.protocol.frames import FrameReader
from inturn.transport.client import RemoteNode
from inturn.transport.client_stream import StreamSettings

WAIT_S = 40.0


class JumpingClock(SystemClock):
    """Time that continues while a process is stopped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return SystemClock.monotonic() + self.ahead_s


class Played:
    """A client, and the server's end of the first stream. There is no second stream."""

    def __init__(self, **settings: float) -> None:
        self._end, theirs = socket.socketpair()
        self._end.settimeout(WAIT_S)
        self._dialed = [theirs]
        self._reader = FrameReader(1 << 20)
        self.clock = JumpingClock()
        self.answers: queue.Queue[Answer | InturnError] = queue.Queue()
        self.node = RemoteNode(self._dial, "there", "inturn/x", self.clock, StreamSettings(**settings))
        ((number, _),) = self.hear()
        self.say(number, Welcome(1, "inturn/test", 100_000, LeaseSettings()))
        self.node.wait_until_up(WAIT_S)

    def _dial(self, timeout_s: float) -> socket.socket:
        if not self._dialed:
            raise ConnectionRefusedError("no second stream")
        return self._dialed.pop()

    def hear(self) -> list[tuple[int, Any]]:
        """The next frames, or an empty list when the client has closed the stream."""
        while data := self._end.recv(65536):
            frames = self._reader.feed(data)
            if frames:
                return [(frame.number, unpack(frame)) for frame in frames]
        return []

    def say(self, number: int, answer: Any) -> None:
        self._end.sendall(pack(number, answer))

    def close(self) -> None:
        self.node.close()
        self._end.close()


@pytest.fixture
def played() -> Iterator[Played]:
    made = Played()
    yield made
    made.close()


def test_what_waits_in_the_socket_is_read_before_silence_is_judged(played: Played) -> None:
    """A process that was stopped for longer than `silence_s` has not read the bytes that came meanwhile."""

    def stopped(answer: Answer | InturnError) -> None:
        played.say(second, NotFound("subject", "a", "make it"))
        played.clock.ahead_s += 60.0
        played.answers.put(answer)

    played.node.submit(ListSubjects(), stopped)
    ((first, _),) = played.hear()
    played.node.submit(FindSubject("a"), played.answers.put)
    ((second, _),) = played.hear()
    played.say(first, SubjectList(()))
    assert played.answers.get(timeout=WAIT_S) == SubjectList(())
    assert isinstance(played.answers.get(timeout=WAIT_S), NotFound), "not ConnectionLost"


def test_a_server_that_says_nothing_is_asked_and_then_given_up() -> None:
    played = Played(ping_s=0.05, silence_s=1.0)
    heard = []
    while came := played.hear():
        heard += [type(command) for _, command in came]
    played.close()
    assert set(heard) == {Ping}
    assert 2 <= len(heard) <= 20


def _fails(timeout_s: float) -> socket.socket:
    raise RuntimeError("of nobody's making")


def test_a_client_whose_thread_has_failed_is_closed_like_any_other() -> None:
    node = RemoteNode(_fails, "there", "inturn/x", SystemClock())
    pipe = node._wake_in, node._wake_out
    with pytest.raises(Closed):
        node.wait_until_up(WAIT_S)
    node._thread.join(WAIT_S)
    node.close()
    for number in pipe:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_closing_a_client_twice_does_not_close_what_others_have_opened_since(played: Played) -> None:
    played.node.close()
    with contextlib.ExitStack() as opened:
        numbers = [opened.enter_context(open(os.devnull)).fileno() for _ in range(8)]
        played.node.close()
        played.node.disown()
        for number in numbers:
            os.fstat(number)
