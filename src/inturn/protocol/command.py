"""What all commands have in common.

Connecting: between a client and a server only.
"""

from __future__ import annotations

import msgspec

from inturn.model.settings import LeaseSettings


class Command(msgspec.Struct, frozen=True, gc=False):
    pass


class Done(msgspec.Struct, frozen=True, gc=False):
    pass


class Hello(Command, frozen=True, gc=False):
    """The first frame of a client; nothing else is taken before. Answered with Welcome, VersionMismatch or
    AuthenticationFailed."""

    versions: tuple[int, int]  # of the protocol, the lowest and the highest that the client speaks
    software: str = ""
    token: str = ""

    def __repr__(self) -> str:
        """Without the token: it is nobody's business but the server's."""
        return f"Hello(versions={self.versions!r}, software={self.software!r})"


class Welcome(msgspec.Struct, frozen=True, gc=False):
    """The version that both speak from now on, and what the client has to keep to."""

    version: int
    software: str
    frame_bytes: int  # the largest frame that is taken
    lease: LeaseSettings
    role: str = ""  # one of Role; empty: a node that is meta and broker in one


class Ping(Command, frozen=True, gc=False):
    """Is anybody there? Answered with Done. A client that has been silent for a minute is hung up on."""
