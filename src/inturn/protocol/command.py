"""The base of all commands, and the greeting between a client and a server."""

from __future__ import annotations

import msgspec

from inturn.model.settings import LeaseSettings


class Command(msgspec.Struct, frozen=True, gc=False):
    pass


class Done(msgspec.Struct, frozen=True, gc=False):
    pass


class Hello(Command, frozen=True, gc=False):
    """The first frame of a client; a server accepts no other first frame. Answered with Welcome, VersionMismatch,
    AuthenticationFailed or QuotaExceeded."""

    versions: tuple[int, int]  # of the protocol: lowest and highest of the client
    software: str = ""
    token: str = ""

    def __repr__(self) -> str:
        """Without the token, which is a secret."""
        return f"Hello(versions={self.versions!r}, software={self.software!r})"


class Welcome(msgspec.Struct, frozen=True, gc=False):
    """The protocol version of the stream, and limits of the server."""

    version: int
    software: str
    frame_bytes: int  # the largest accepted frame
    lease: LeaseSettings
    role: str = ""  # one of Role; empty: meta and broker in one node


class Ping(Command, frozen=True, gc=False):
    """Answered with Done. A server hangs up on a client that is silent for a minute."""
