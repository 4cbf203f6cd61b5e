"""Bugs of the wire: the client's end, frames, the node's end."""

from __future__ import annotations

import inturn.protocol.frames
import inturn.transport.client_stream
from inturn.model.errors import InturnError
from inturn.protocol.commands import Answer
from inturn.protocol.frames import Frame, FrameReader
from inturn.transport.client_stream import ClientStream, Delivery
from inturn.transport.server_session import ServerSession
from simulator.seeded_bugs.bug import Bugs, Patch

BUGS = Bugs()
_instead_of, _add, _add_edit = BUGS.instead_of, BUGS.add, BUGS.add_edit

# The client's end

_link_lost = ClientStream.lost

_add(
    "numbers_come_round_too_soon",
    "transport",
    "A request gets the number of an unanswered request.",
    Patch(inturn.transport.client_stream, "NUMBER_MAX", 15),
)


def _lost_but_kept(self: ClientStream, why: str, now_s: float) -> list[Delivery]:
    pending = dict(self._pending)
    _link_lost(self, why, now_s)
    self._pending, self._number = pending, 0
    return []


_add(
    "requests_are_kept_over_a_reconnect",
    "transport",
    "Unanswered requests survive a lost stream, and the numbers start again with the next stream.",
    Patch(ClientStream, "lost", _lost_but_kept),
)


@_instead_of(ClientStream, "lost")
def lost_requests_are_not_answered(self: ClientStream, why: str, now_s: float) -> list[Delivery]:
    """Unanswered commands are forgotten when the stream is lost."""
    _link_lost(self, why, now_s)
    return []


@_instead_of(ClientStream, "is_silent")
def silence_is_not_noticed(self: ClientStream, now_s: float) -> bool:
    """A client waits for ever on a stream that was cut unnoticed."""
    return False


_add_edit(
    "second_copy_of_an_answer_ends_the_stream",
    "A second answer to a request counts as a damaged frame.",
    ClientStream,
    "received",
    "elif frame.number == 0 and isinstance(answer, InturnError):",
    "else:",
)


# Frames

_add_edit(
    "rest_of_a_read_is_dropped",
    "When a read ends in the middle of a frame, the piece is forgotten.",
    FrameReader,
    "_cut",
    "self._rest += view[at:]",
    "pass",
)
_add_edit(
    "damaged_frames_are_taken",
    "The checksum of a frame is not checked.",
    FrameReader,
    "_cut",
    "& 0xFFFFFFFF != checksum:",
    "< 0:",
)
_add(
    "damaged_length_is_believed",
    "protocol",
    "A client waits for the rest of a frame with a wrong length, while other answers come.",
    Patch(inturn.protocol.frames, "_check_guard", lambda length, guard: None),
)


# The node's end

_session_handle = ServerSession._handle
_session_answer = ServerSession.answer
_session_go_on = ServerSession.go_on


def _handle_and_note(self: ServerSession, frame: Frame) -> None:
    self.__dict__["newest"] = frame.number
    _session_handle(self, frame)


def _answer_the_newest(self: ServerSession, number: int, size_bytes: int, answer: Answer | InturnError) -> None:
    _session_answer(self, self.__dict__["newest"], size_bytes, answer)


_add(
    "session_answers_the_newest_request",
    "transport",
    "A delayed answer gets the number of the last request.",
    Patch(ServerSession, "_handle", _handle_and_note),
    Patch(ServerSession, "answer", _answer_the_newest),
)


@_instead_of(ServerSession, "go_on")
def full_session_drops_what_it_cannot_take(self: ServerSession) -> None:
    """What comes while too much is unanswered is forgotten."""
    if self.is_full:
        self._inbox.clear()
    _session_go_on(self)


@_instead_of(ServerSession, "lost")
def node_does_not_hear_of_a_lost_stream(self: ServerSession) -> None:
    """A stream is lost, and the node is not notified."""
    self.is_closed = True
    self._inbox.clear()
