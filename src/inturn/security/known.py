"""What is known of one principal, on all of its streams: its rules, its quota, how many streams it has."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from inturn.model import commands
from inturn.model.clock import Clock
from inturn.model.commands import Command
from inturn.security.access import Access, Rule
from inturn.security.actions import Need, needed
from inturn.security.meter import Metered

DECISIONS_MAX = 10_000  # remembered; a client can ask for as many names as it likes
_of_group: Callable[[Any], Any] = attrgetter("subject", "group")
# Commands that come again and again: by what their decision is remembered, without finding out what they need.
_PLACES: dict[type[Command], Callable[[Any], Any]] = {
    commands.Append: attrgetter("subject"),
    commands.Read: _of_group,
    commands.Pull: _of_group,
    commands.Commit: _of_group,
    commands.Renew: _of_group,
    commands.Heartbeat: _of_group,
    commands.Fetch: _of_group,
    commands.Acknowledge: _of_group,
}


class Known:
    """`access` None: it may do everything."""

    def __init__(self, principal: str, access: Access | None, clock: Clock) -> None:
        self.principal = principal
        self.stream_count = 0
        self.connections_max: int | None = None
        self.metered: Metered | None = None
        self._clock = clock
        self._rules: tuple[Rule, ...] | None = None
        self._decisions: dict[object, bool] = {}
        if access is not None:
            self.follow(access)

    def follow(self, access: Access) -> None:
        """The rules are these from now on. Quotas count anew."""
        self._rules = access.rules_for(self.principal)
        self._decisions.clear()
        quota = access.quota_for(self.principal)
        self.connections_max = None if quota is None else quota.connections
        rates = (None, None) if quota is None else (quota.commands_per_s, quota.bytes_per_s)
        self.metered = None if rates == (None, None) else Metered(*rates, self._clock.monotonic)

    @property
    def may_everything(self) -> bool:
        return self._rules is None

    @property
    def is_forgettable(self) -> bool:
        """It has no streams, and would begin anew with what it has."""
        return not self.stream_count and (self.metered is None or self.metered.is_full)

    def may_send(self, command: Command) -> bool:
        if self._rules is None:
            return True
        kind = type(command)
        place = _PLACES.get(kind)
        if place is None:
            need = needed(command)
            return need is None or self.may(need)
        key = kind, place(command)
        decided = self._decisions.get(key)
        if decided is None:
            need = needed(command)
            decided = self._remember(key, need is None or self._is_allowed(need))
        return decided

    def may(self, need: Need) -> bool:
        if self._rules is None:
            return True
        decided = self._decisions.get(need)
        return self._remember(need, self._is_allowed(need)) if decided is None else decided

    def _is_allowed(self, need: Need) -> bool:
        assert self._rules is not None
        return any(rule.allows(need) for rule in self._rules)

    def _remember(self, key: object, decided: bool) -> bool:
        if len(self._decisions) >= DECISIONS_MAX:
            self._decisions.clear()
        self._decisions[key] = decided
        return decided
