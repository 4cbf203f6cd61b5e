"""Requests and replies: submit a command and wait for the answer; replies as objects.

A caller in this process passes a plain function as a reply. Such a reply has no session: see `session_of`.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol, TypeVar

from inturn.model.errors import ConnectionLost, InturnError, ServerStopping
from inturn.protocol.commands import Answer, Command, Node, Reply


class SessionReply:
    """A reply with the server session that the answer goes to; None: the answer goes to no session.

    A node drops the waiting commands of a session whose stream is gone: see `ServedNode.hung_up`.
    """

    __slots__ = ("session",)

    session: object

    def __call__(self, answer: Answer | InturnError) -> None:
        raise NotImplementedError


class WrappedReply(SessionReply):
    """A reply that acts on the answer before or after passing the answer on. The session is that of the inner reply."""

    __slots__ = ("_reply",)

    def __init__(self, reply: Reply) -> None:
        self.session = session_of(reply)
        self._reply = reply


def session_of(reply: Reply) -> object:
    """The server session of a reply; None for a plain function."""
    return reply.session if isinstance(reply, SessionReply) else None


_Wanted = TypeVar("_Wanted")
PATIENCE_S = 15.0  # time for a restart of a server
_PAUSE_S = 0.05


class Ask(Protocol):
    """A function that submits a command to some node, waits, and returns the answer or raises the error."""

    def __call__(self, command: Command, wanted: type[_Wanted], /) -> _Wanted: ...


def ask(node: Node, command: Command, wanted: type[_Wanted], patience_s: float = PATIENCE_S) -> _Wanted:
    """Submit a command, wait, and return the answer or raise the error. Without a connection, the command is repeated
    for `patience_s`."""
    check_may_wait = getattr(node, "check_may_wait", None)
    if check_may_wait is not None:
        check_may_wait()
    until_s = time.monotonic() + patience_s
    while True:
        answer = _ask_once(node, command)
        if isinstance(answer, ConnectionLost | ServerStopping) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)
            continue
        if isinstance(answer, InturnError):
            raise answer
        if not isinstance(answer, wanted):
            raise InturnError(f"{type(command).__name__} was answered with {answer!r}, not {wanted.__name__}")
        return answer


def _ask_once(node: Node, command: Command) -> Answer | InturnError:
    answers: list[Answer | InturnError] = []
    answered = threading.Lock()  # a bare lock wakes its waiter sooner than an event
    answered.acquire()

    def reply(answer: Answer | InturnError) -> None:
        answers.append(answer)
        answered.release()

    node.submit(command, reply)
    answered.acquire()
    return answers[0]
