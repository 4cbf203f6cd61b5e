"""The doors of a server: how many streams there may be, before anything of them is read.

Most of those who have not said yet who they are do so within milliseconds. The host that keeps the doors full without a
word loses the oldest of its own: others get in.
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
        self._silent_per_host: Counter[str] = Counter()  # of `_ungreeted`

    def come(self, visit: _Visit, host: str) -> str | None:
        """None if there is room, which it has until `leave`; else the limit. No `host`: it is not counted by host."""
        settings = self._settings
        if len(self._hosts) >= settings.connections:
            return f"{settings.connections} connections"
        if host and self._per_host[host] >= settings.connections_per_address:
            return f"{settings.connections_per_address} connections of one address"
        if len(self._ungreeted) >= settings.ungreeted:
            oldest = self._oldest_of_the_most()
            self.leave(oldest)
            oldest.abort()
        self._hosts[visit] = host
        self._ungreeted[visit] = None
        self._per_host[host] += 1
        self._silent_per_host[host] += 1
        return None

    def _oldest_of_the_most(self) -> _Visit:
        """The oldest that was not greeted, of the host (or of those) that has the most of them."""
        most = max(self._silent_per_host.values())
        return next(one for one in self._ungreeted if self._silent_per_host[self._hosts[one]] == most)

    def replace(self, visit: _Visit, by: _Visit) -> None:
        """The same stream, in its next state; as old as it was."""
        if visit in self._hosts:
            self._hosts[by] = self._hosts.pop(visit)
            self._ungreeted = {by if one is visit else one: None for one in self._ungreeted}

    def all(self) -> list[_Visit]:
        return list(self._hosts)

    def greeted(self, visit: _Visit) -> None:
        """It has said who it is."""
        if visit in self._ungreeted:
            del self._ungreeted[visit]
            _count_down(self._silent_per_host, self._hosts[visit])

    def leave(self, visit: _Visit) -> None:
        """Again is no harm."""
        self.greeted(visit)
        host = self._hosts.pop(visit, None)
        if host is not None:
            _count_down(self._per_host, host)


def _count_down(counts: Counter[str], host: str) -> None:
    counts[host] -= 1
    if not counts[host]:
        del counts[host]
