"""What a server asks of a guard, if it has one; `inturn.security` has the one that there is."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Protocol

from inturn.model.commands import Command, Hello, Reply


class Guard(Protocol):
    """Who is let in, and what they may do. Called in the server's event loop."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For addresses that are reached over a network; another one when certificates have changed."""
        ...

    def visitor(self, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool) -> Pass:
        """What a new client may do. `is_local`: it came through a socket that only the folder's user can open."""
        ...

    def refused(self, address: str, command: str, why: str) -> None:
        """A client was not let in before it could be a visitor."""
        ...

    def reload(self, *, always: bool = False) -> None:
        """Read again what was changed by its operator, or `always`."""
        ...


class Metered(Protocol):
    """What a principal may do per second. What it used beyond that makes it wait."""

    def take_command(self) -> None: ...

    def take_received(self, size_bytes: int) -> None: ...

    def take_answer(self, size_bytes: int) -> None: ...

    @property
    def bytes_per_s(self) -> float | None:
        """None: as many as it likes."""
        ...

    def wait_s(self) -> float:
        """Until it is within its rate: so long nothing is done for it that could bring it further beyond."""
        ...

    def deaf_s(self) -> float:
        """Of that, how long nothing more of it is looked at: it has sent too much itself. Never more than `wait_s`."""
        ...


class Pass(Protocol):
    """What one client may do, as a guard sees it."""

    @property
    def metered(self) -> Metered | None:
        """Known after `greet`; None: nothing is counted."""
        ...

    @property
    def is_valid(self) -> bool:
        """False: it is to be hung up on."""
        ...

    def greet(self, hello: Hello) -> None:
        """Called once. Raises AuthenticationFailed or QuotaExceeded."""
        ...

    def admitted(self, command: Command, reply: Reply) -> Reply | None:
        """The reply to hand to the node; None if the command was refused, and answered."""
        ...

    def gone(self) -> None:
        """The stream is."""
        ...
