"""The client's end of a stream, against a server's end in the hands of the test."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inturn.model.errors import ConnectionLost, InturnError, InvalidInput, NotFound, ProtocolError, VersionMismatch
from inturn.model.settings import LeaseSettings
from inturn.protocol.codec import pack, unpack
from inturn.protocol.commands import Answer, Done, FindSubject, Hello, ListSubjects, Ping, SubjectList, Welcome
from inturn.protocol.frames import FrameReader
from inturn.transport.client_stream import ClientStream, StreamSettings, StreamState

LEASE = LeaseSettings(life_s=7.0)
WELCOME = Welcome(1, "inturn/test", 100_000, LEASE)


class Played:
    """A link, the sent frames, and the results of the commands."""

    def __init__(self, **settings: float) -> None:
        self.sent = bytearray()
        self.link = ClientStream("there", "inturn/x", StreamSettings(**settings), random.Random(1), self.sent.extend)
        self.answers: list[Answer | InturnError] = []
        self._reader = FrameReader(1 << 20)

    def frames(self) -> list[tuple[int, Any]]:
        found = [(frame.number, unpack(frame)) for frame in self._reader.feed(bytes(self.sent))]
        self.sent.clear()
        return found

    def up(self, now_s: float = 0.0) -> None:
        self.link.opened(now_s)
        ((number, hello),) = self.frames()
        assert isinstance(hello, Hello)
        assert self.link.received(bytes(pack(number, WELCOME)), now_s) == []
        assert self.link.state is StreamState.UP

    def ask(self, command: Any) -> None:
        instead = self.link.submit(command, self.answers.append)
        if instead is not None:
            instead[0](instead[1])

    def receive(self, number: int, answer: Any, now_s: float = 0.0) -> None:
        for reply, given in self.link.received(bytes(pack(number, answer)), now_s):
            reply(given)

    def lose(self, now_s: float = 0.0) -> None:
        for reply, given in self.link.lost("cut", now_s):
            reply(given)


def test_nothing_is_sent_before_the_server_has_answered_the_greeting() -> None:
    played = Played()
    played.ask(ListSubjects())
    assert isinstance(played.answers.pop(), ConnectionLost)
    played.link.opened(0.0)
    played.frames()
    played.ask(ListSubjects())
    assert isinstance(played.answers.pop(), ConnectionLost)
    assert played.frames() == []


def test_the_welcome_brings_the_lease_settings_of_the_server() -> None:
    played = Played()
    played.up()
    assert played.link.lease == LEASE


def test_answers_find_what_they_answer_in_any_order() -> None:
    played = Played()
    played.up()
    played.ask(ListSubjects())
    played.ask(FindSubject("a"))
    (first, _), (second, _) = played.frames()
    played.receive(second, NotFound("subject", "a", "make it"))
    played.receive(first, SubjectList(()))
    assert isinstance(played.answers[0], NotFound)
    assert played.answers[1] == SubjectList(())


def test_a_second_copy_of_an_answer_changes_nothing() -> None:
    played = Played()
    played.up()
    played.ask(ListSubjects())
    ((number, _),) = played.frames()
    played.receive(number, SubjectList(()))
    played.receive(number, SubjectList(()))
    assert played.answers == [SubjectList(())]


def test_what_came_before_nonsense_is_answered_when_the_stream_is_given_up() -> None:
    played = Played()
    played.up()
    played.ask(ListSubjects())
    ((number, _),) = played.frames()
    with pytest.raises(ProtocolError):
        played.link.received(bytes(pack(number, SubjectList(()))) + bytes(64), 0.0)
    played.lose()
    assert [type(answer) for answer in played.answers] == [ConnectionLost]


def test_what_is_unanswered_when_the_stream_is_lost_is_answered_once_and_not_sent_again() -> None:
    played = Played()
    played.up()
    played.ask(ListSubjects())
    ((number, _),) = played.frames()
    played.lose()
    assert [type(answer) for answer in played.answers] == [ConnectionLost]
    assert "cut" in str(played.answers[0])
    played.up(1.0)
    played.receive(number, SubjectList(()), 1.0)  # a late answer: the command is not waiting any more
    assert len(played.answers) == 1


def test_pauses_between_tries_grow_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    played = Played(backoff_min_s=0.1, backoff_max_s=1.0)
    waits = []
    for _ in range(8):
        played.lose(now_s=10.0)
        waits.append(played.link.retry_at_s - 10.0)
    assert 0.05 <= waits[0] <= 0.1
    assert all(0.5 <= wait <= 1.0 for wait in waits[4:])
    played.up(20.0)
    played.ask(ListSubjects())
    ((number, _),) = played.frames()
    played.receive(number, SubjectList(()), 20.0)
    played.lose(now_s=20.0)
    assert played.link.retry_at_s - 20.0 <= 0.1


def test_the_answer_to_a_ping_is_a_success() -> None:
    played = Played(backoff_min_s=0.1, backoff_max_s=1.0, ping_s=2.0)
    for _ in range(8):
        played.lose()
    played.up(0.0)
    assert not played.link.is_silent(2.0)
    ((number, _),) = played.frames()
    played.receive(number, Done(), 2.0)
    played.lose(now_s=2.0)
    assert played.link.retry_at_s - 2.0 <= 0.1


def test_pauses_grow_where_the_server_greets_and_then_talks_nonsense() -> None:
    played = Played(backoff_min_s=0.1, backoff_max_s=1.0)
    for _ in range(8):
        played.up()
        with pytest.raises(ProtocolError):
            played.link.received(b"\0" * 64, 0.0)
        played.lose(now_s=0.0)
    assert played.link.retry_at_s >= 0.5


def test_a_silent_server_is_asked_and_then_given_up() -> None:
    played = Played(ping_s=2.0, silence_s=6.0)
    played.up(0.0)
    assert not played.link.is_silent(1.9)
    assert played.frames() == []
    assert not played.link.is_silent(2.0)
    ((number, ping),) = played.frames()
    assert isinstance(ping, Ping)
    assert not played.link.is_silent(2.1)
    assert played.frames() == [], "once in a while is enough"
    played.receive(number, Done(), 2.2)
    assert played.answers == []
    assert not played.link.is_silent(8.1)
    assert played.link.is_silent(8.2)


def test_a_greeting_that_is_not_answered_is_given_up_too() -> None:
    played = Played(silence_s=6.0)
    played.link.opened(0.0)
    assert not played.link.is_silent(5.9)
    assert played.link.is_silent(6.0)


def test_a_server_of_another_version_is_not_tried_again() -> None:
    played = Played()
    played.link.opened(0.0)
    ((number, _),) = played.frames()
    played.receive(number, VersionMismatch((1, 1), (5, 6), "inturn/9"))
    played.lose()
    assert played.link.state is StreamState.REFUSED
    played.ask(ListSubjects())
    assert isinstance(played.answers[-1], VersionMismatch)


def test_what_the_server_would_not_take_is_refused_here() -> None:
    played = Played()
    played.up()
    played.ask(FindSubject("x" * 100_000))
    assert isinstance(played.answers.pop(), InvalidInput)
    played.ask(FindSubject(object()))  # type: ignore[arg-type]
    assert isinstance(played.answers.pop(), InvalidInput)
    assert played.frames() == []


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(pack(1, ListSubjects())), b"\0" * 64])
def test_a_server_that_is_none_of_ours_ends_the_stream(data: bytes) -> None:
    played = Played()
    played.link.opened(0.0)
    with pytest.raises(ProtocolError):
        played.link.received(data, 0.0)
