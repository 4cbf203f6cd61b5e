"""Replies as objects: a reply to a server session, and replies that wrap a reply.

A caller in this process passes a plain function as a reply. Such a reply has no session: see `session_of`.
"""

from __future__ import annotations

from inturn.model.errors import InturnError
from inturn.protocol.commands import Answer, Reply


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
