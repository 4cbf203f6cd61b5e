"""The doors of a server: how many streams there may be, before anything of them is read.

Most of those who have not said yet who they are do so within milliseconds. Whoever keeps the doors full without a word
loses the oldest of its own: others get in.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar

from inturn.wire.session import ServerSettings


class Visit(Protocol):
    def abort(self) -> None:
        """Hang up; calls `leave`, now or later."""


_Visit = TypeVar("_Visit", bound=Visit)


class Doors(Generic[_Visit]):
    """Used by one thread."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._hosts: dict[_Visit, str] = {}
        self._ungreeted: dict[_Visit, None] = {}  # oldest first
        self._per_host: Counter[str] = Counter()

    def come(self, visit: _Visit, host: str) -> str | None:
        """None if there is room, which it has until `leave`; else the limit. No `host`: it is not counted by host."""
        settings = self._settings
        if len(self._hosts) >= settings.connections:
            return f"{settings.connections} connections"
        if host and self._per_host[host] >= settings.connections_per_address:
            return f"{settings.connections_per_address} connections of one address"
        if len(self._ungreeted) >= settings.ungreeted:
            oldest = next(iter(self._ungreeted))
            self.leave(oldest)
            oldest.abort()
        self._hosts[visit] = host
        self._ungreeted[visit] = None
        self._per_host[host] += 1
        return None

    def replace(self, visit: _Visit, by: _Visit) -> None:
        """The same stream, in its next state; as old as it was."""
        if visit in self._hosts:
            self._hosts[by] = self._hosts.pop(visit)
            self._ungreeted = {by if one is visit else one: None for one in self._ungreeted}

    def all(self) -> list[_Visit]:
        return list(self._hosts)

    def greeted(self, visit: _Visit) -> None:
        """It has said who it is."""
        self._ungreeted.pop(visit, None)

    def leave(self, visit: _Visit) -> None:
        """Again is no harm."""
        self._ungreeted.pop(visit, None)
        host = self._hosts.pop(visit, None)
        if host is not None:
            self._per_host[host] -= 1
            if not self._per_host[host]:
                del self._per_host[host]
