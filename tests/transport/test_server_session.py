"""The server's end of a stream: greeting, limits, and the effects that a client can and cannot cause."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from inturn.model.batch import NO_COMPRESSION, ZSTD, Batch, payload_checksum
from inturn.model.errors import InturnError, InvalidInput, ProtocolError, VersionMismatch
from inturn.model.routing import SLOT_COUNT
from inturn.model.settings import LeaseSettings
from inturn.model.subject import NAME_LENGTH_MAX, RESERVED_LENGTH_MAX, Subject
from inturn.protocol.codec import pack, unpack
from inturn.protocol.commands import (
    Append,
    Command,
    Done,
    FindSubject,
    Hello,
    ListSubjects,
    Move,
    Ping,
    Pull,
    Reply,
    SubjectList,
)
from inturn.protocol.frames import NUMBER_MAX, FrameReader
from inturn.transport.server_session import ServerSession, ServerSettings
from tests.security.played import all_commands, sample

NAME_FIELDS = ("subject", "to_subject", "name", "group", "member", "owner", "nonce")


class FakeNode:
    """Records commands, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Command, Reply]] = deque()
        self.gone: list[object] = []
        self.error: Exception | None = None

    def submit(self, command: Command, reply: Reply) -> None:
        raise AssertionError("a client in another process is remote")

    def submit_remote(self, command: Command, reply: Reply) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append((command, reply))

    def hung_up(self, session: object) -> None:
        self.gone.append(session)


class Played:
    def __init__(self, **settings: Any) -> None:
        self.node = FakeNode()
        self.sent = bytearray()
        self.is_hung_up = False
        self.session = ServerSession(
            self.node, ServerSettings(**settings), LeaseSettings(), "inturn/test", self.sent.extend, self._hang_up
        )
        self._reader = FrameReader(1 << 30)

    def _hang_up(self) -> None:
        self.is_hung_up = True

    def greet(self) -> None:
        self.send(1, Hello((1, 1), "test"))
        ((number, welcome),) = self.answers()
        assert number == 1
        assert welcome.version == 1

    def send(self, number: int, command: Any) -> None:
        self.session.received(bytes(pack(number, command)))

    def answers(self) -> list[tuple[int, Any]]:
        found = [(frame.number, unpack(frame)) for frame in self._reader.feed(bytes(self.sent))]
        self.sent.clear()
        return found


@pytest.fixture
def played() -> Played:
    made = Played()
    made.greet()
    return made


def test_commands_go_to_the_node_and_answers_back_with_their_numbers(played: Played) -> None:
    played.send(7, ListSubjects())
    played.send(8, FindSubject("a"))
    assert [command for command, _ in played.node.asked] == [ListSubjects(), FindSubject("a")]
    played.node.asked[1][1](InvalidInput("no"))
    played.node.asked[0][1](SubjectList(()))
    (eight, no), (seven, yes) = played.answers()
    assert (eight, type(no)) == (8, InvalidInput)
    assert (seven, yes) == (7, SubjectList(()))


def test_a_second_copy_of_a_command_is_not_done_again(played: Played) -> None:
    """A proxy may repeat frames. The numbers of a stream count up."""
    played.send(2, ListSubjects())
    played.send(2, ListSubjects())
    played.send(5, ListSubjects())
    played.send(2, ListSubjects())
    assert len(played.node.asked) == 2


@pytest.mark.parametrize("first", [1, 2**31 + 5, NUMBER_MAX])
def test_a_client_that_comes_again_goes_on_counting(first: int) -> None:
    played = Played()
    played.send(first, Hello((1, 1)))
    played.send(first % NUMBER_MAX + 1, ListSubjects())
    assert len(played.node.asked) == 1


def test_numbers_come_round(played: Played) -> None:
    numbers = [2**31 - 5, 2**31 + 5, NUMBER_MAX, 1, 2]
    for number in numbers:
        played.send(number, ListSubjects())
    assert len(played.node.asked) == len(numbers)


def test_a_ping_is_answered_without_the_node(played: Played) -> None:
    played.send(3, Ping())
    assert played.answers() == [(3, Done())]
    assert not played.node.asked


@pytest.mark.parametrize("versions", [(2, 9), (-1, 0)])
def test_no_common_version_is_refused_with_both_named(versions: tuple[int, int]) -> None:
    played = Played()
    played.send(1, Hello(versions))
    ((number, error),) = played.answers()
    assert number == 1
    assert isinstance(error, VersionMismatch)
    assert error.theirs == versions
    assert error.ours == (1, 1)
    assert played.is_hung_up


def test_a_newer_client_that_knows_ours_is_welcome() -> None:
    played = Played()
    played.send(1, Hello((1, 99)))
    ((_, welcome),) = played.answers()
    assert welcome.version == 1


@pytest.mark.parametrize("first", [Ping(), ListSubjects(), SubjectList(())])
def test_whoever_does_not_greet_is_hung_up_on(first: Any) -> None:
    played = Played()
    played.send(1, first)
    ((number, error),) = played.answers()
    assert (number, type(error)) == (0, ProtocolError)
    assert played.is_hung_up
    played.send(2, Hello((1, 1)))
    assert played.answers() == []


def test_before_the_greeting_frames_are_small() -> None:
    played = Played()
    played.session.received(bytes(pack(1, Hello((1, 1), "x" * 2000)))[:4])
    assert played.is_hung_up


def test_bytes_that_are_no_frame_end_the_stream(played: Played) -> None:
    played.session.received(b"GET / HTTP/1.1\r\n")
    assert played.is_hung_up
    played.session.lost()
    assert played.node.gone == [played.session]


def test_a_body_that_cannot_be_understood_is_answered_and_the_stream_goes_on(played: Played) -> None:
    played.send(2, FindSubject(5))  # type: ignore[arg-type]
    played.send(3, SubjectList(()))
    played.send(4, Hello((1, 1)))
    played.send(5, Pull("s", "g", 0, "m", 1, 0, 100, float("nan")))
    played.send(6, ListSubjects())
    assert [(number, type(error)) for number, error in played.answers()] == [
        (number, InvalidInput) for number in (2, 3, 4, 5)
    ]
    assert len(played.node.asked) == 1


def test_a_damaged_batch_never_reaches_the_log(played: Played) -> None:
    payload = b"\0\0\x91something"  # a slot and a message
    good = Batch(1, 1, 1, 0, 1, 0, payload_checksum(payload), payload)
    played.send(2, Append("s", 0, Batch(1, 1, 1, 0, 1, 0, 1234, payload)))
    played.send(3, Append("s", 0, Batch(100, 1, 1, 0, 1, 0, payload_checksum(payload), payload)))
    played.send(4, Append("s", 0, good))
    assert [number for number, error in played.answers() if "damaged" in str(error)] == [2, 3]
    assert [command for command, _ in played.node.asked] == [Append("s", 0, good)]


@pytest.mark.parametrize("compression", [NO_COMPRESSION, ZSTD])
def test_a_batch_with_a_slot_that_is_not_there_never_reaches_the_log(played: Played, compression: int) -> None:
    """P2, M5: no partition has such a slot. A search for the messages of a slot would fail."""
    body = b"\x92ab" if compression == NO_COMPRESSION else b"\x28\xb5\x2f\xfd\x20\x03 and so on"

    def batch(slot: int) -> Batch:
        payload = b"\0\0" + slot.to_bytes(2, "little") + body
        return Batch(2, 1, 1, 0, 1, compression, payload_checksum(payload), payload)

    for number, slot in zip((2, 4, 6), (SLOT_COUNT, 5000, 65_535), strict=True):
        played.send(number, Append("s", 0, batch(slot)))
        played.send(number + 1, Move("s", "g", 0, "m", 1, "t", 0, batch(slot)))
    assert ["slots are 0 to 1023" in str(error) for _, error in played.answers()] == [True] * 6
    assert not played.node.asked
    played.send(20, Append("s", 0, batch(SLOT_COUNT - 1)))
    assert [command for command, _ in played.node.asked] == [Append("s", 0, batch(SLOT_COUNT - 1))]


@pytest.mark.parametrize("kind", all_commands(), ids=lambda kind: kind.__name__)
def test_names_that_nothing_can_have_are_refused_before_anybody_keeps_them(kind: type[Command], played: Played) -> None:
    """A name could fill a frame. The guard remembers names, logs names, and matches names against patterns."""
    named = [name for name in kind.__struct_fields__ if name in NAME_FIELDS]
    for number, name in enumerate(named, start=2):
        long, usual = "n" * 1001, getattr(sample(kind), name)
        played.send(number, sample(kind, **{name: replace(usual, name=long) if isinstance(usual, Subject) else long}))
        ((_, refused),) = played.answers()
        assert isinstance(refused, InvalidInput), name
        assert "1001 characters" in str(refused)
        assert len(str(refused)) < 200, "the answer does not bring it back"
    assert not played.node.asked


def test_the_longest_names_that_there_are_go_through(played: Played) -> None:
    """A retry subject has a longer name than any subject of a user."""
    pull = Pull("s" * RESERVED_LENGTH_MAX, "g" * NAME_LENGTH_MAX, 0, "m" * 1000, 1, 0, 1)
    played.send(2, pull)
    assert [command for command, _ in played.node.asked] == [pull]


SIZED = [kind for kind in all_commands() if "max_bytes" in kind.__struct_fields__]


@pytest.mark.parametrize("kind", SIZED, ids=lambda kind: kind.__name__)
def test_nothing_can_ask_for_more_than_is_allowed(kind: type[Command]) -> None:
    assert {"Pull", "Read", "ReadLot", "Fetch", "DescribeKey"} <= {one.__name__ for one in SIZED}
    played = Played(pull_bytes=1000)
    played.greet()
    played.send(2, sample(kind, max_bytes=10**12))
    played.send(3, sample(kind, max_bytes=10))
    assert [command.max_bytes for command, _ in played.node.asked] == [1000, 10]  # type: ignore[attr-defined]


def test_an_error_of_ours_is_answered_and_the_stream_goes_on(played: Played) -> None:
    played.node.error = ZeroDivisionError("oops")
    played.send(2, ListSubjects())
    ((number, error),) = played.answers()
    assert (number, type(error)) == (2, InturnError)
    assert "oops" in str(error)


def test_nothing_more_is_looked_at_while_too_much_is_unanswered() -> None:
    played = Played(unanswered_count=2)
    played.greet()
    for number in range(2, 8):
        played.send(number, ListSubjects())
    assert played.session.is_full
    assert len(played.node.asked) == 3
    played.node.asked.popleft()[1](SubjectList(()))
    played.node.asked.popleft()[1](SubjectList(()))
    assert not played.session.is_full
    played.session.go_on()
    assert played.session.is_full
    assert len(played.node.asked) == 3, "one is left of the first three, two came"


def test_nothing_more_is_looked_at_while_answers_are_not_taken(played: Played) -> None:
    played.session.pause(True)
    played.send(2, ListSubjects())
    assert not played.node.asked
    played.session.pause(False)
    assert len(played.node.asked) == 1


def test_an_answer_after_the_end_of_the_stream_is_dropped(played: Played) -> None:
    played.send(2, ListSubjects())
    played.session.lost()
    played.node.asked[0][1](SubjectList(()))
    assert played.answers() == []


def test_an_answer_that_is_too_large_is_told_so() -> None:
    played = Played(frame_bytes=2000)
    played.greet()
    played.send(2, ListSubjects())
    played.node.asked[0][1](InvalidInput("x" * 5000))
    ((_, error),) = played.answers()
    assert "5" in str(error)
    assert "ask for less" in str(error)
