"""Who owns a name: whichever principal uses it first, as long as the server lives.

Members and producers are known to a node by names and numbers that others can see or guess. Here they belong to a
principal, so that nobody can pull under somebody else's lease, give it back, or fence somebody else's producer.
"""

from __future__ import annotations

from collections.abc import Hashable

NAMES_MAX = 10_000  # of one principal; beyond that the first are forgotten, which puts only their owner at risk


class Owners:
    """Not safe to use from several threads."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._owners: dict[Hashable, str] = {}
        self._names: dict[str, dict[Hashable, None]] = {}  # of each principal, oldest first

    def owner(self, name: Hashable) -> str | None:
        return self._owners.get(name)

    def take(self, principal: str, *names: Hashable) -> Hashable | None:
        """The names are this principal's from now on. If one of them is another's, that one, and none is taken."""
        owners = self._owners
        new = []
        for name in names:
            owner = owners.get(name)
            if owner is None:
                new.append(name)
            elif owner != principal:
                return name
        for name in new:
            self._take(name, principal)
        return None

    def give(self, principal: str, name: Hashable) -> None:
        """The name is this principal's from now on, whosever it was."""
        if self._owners.get(name) != principal:
            self.forget(name)
            self._take(name, principal)

    def forget(self, name: Hashable) -> None:
        """It is nobody's."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            names = self._names[owner]
            del names[name]
            if not names:
                del self._names[owner]

    def _take(self, name: Hashable, principal: str) -> None:
        names = self._names.setdefault(principal, {})
        if len(names) >= self._names_max:
            oldest = next(iter(names))
            del names[oldest], self._owners[oldest]
        names[name] = None
        self._owners[name] = principal
