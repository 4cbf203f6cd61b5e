"""The guard of a server: authenticates clients, authorizes commands, and enforces quotas.

A server has a single `Guard` for all streams, and a `SessionGuard` per stream. `ActivePrincipal` holds the rules, quota
and streams of a principal. All code runs in the server's event loop, except the audit of acts: any thread may reply.

`NameOwners` binds names to the principal that uses a name first, until the server stops. Members and producers are
identified by names and numbers that other clients can see or guess. With an owner, no other principal can pull under a
member's lease, release the lease, or fence a producer.

`WatchedFiles` finds changed files.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Hashable, Mapping
from operator import attrgetter
from typing import Any

from inturn.model.errors import AuthenticationFailed, InvalidInput
from inturn.model.logs import get_logger
from inturn.model.time import Clock
from inturn.protocol import commands
from inturn.protocol.commands import Command, Hello
from inturn.security.access import Access, Rule, read_access
from inturn.security.audit_log import AuditLog
from inturn.security.permissions import Need, needed
from inturn.security.rate_limit import PrincipalMeter
from inturn.security.session_guard import SessionGuard
from inturn.security.settings import SecuritySettings
from inturn.security.tokens import ANONYMOUS, LOCAL, TokenFile, TokenRecord, Tokens, certificate_principal

_log = get_logger("inturn.security")


class Guard:
    """Made before the server listens. Invalid files raise InvalidInput here; later, at `reload`, they are only
    logged."""

    def __init__(self, settings: SecuritySettings, clock: Clock) -> None:
        self._settings = settings
        self.clock = clock
        self._watched = WatchedFiles()
        for name, path in self._paths():
            self._watched.add(name, path)
        self._token_file = None if settings.tokens is None else TokenFile(settings.tokens)
        self.tokens = Tokens() if self._token_file is None else self._token_file.read()
        self._access = None if settings.access is None else read_access(settings.access)
        self.tls: ssl.SSLContext | None = None if settings.tls is None else settings.tls.context()
        self.audit_log = None if settings.audit_log is None else AuditLog(settings.audit_log, clock)
        self.members = NameOwners()
        self.producers = NameOwners()
        self._not_reloaded: dict[str, str] = {}  # error by name of the file
        self._principals: dict[str, ActivePrincipal] = {}  # with a stream, or with a partly used quota

    def session_guard(self, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool) -> SessionGuard:
        """The session guard of a new stream. `certificate` is the client's certificate, if TLS has verified it."""
        return SessionGuard(self, address, certificate, is_local=is_local)

    def authenticate(self, hello: Hello, certificate: Mapping[str, Any] | None) -> tuple[str, TokenRecord | None]:
        """The principal, and the token that authenticated the principal. Raises AuthenticationFailed."""
        if hello.token and self._token_file is not None:
            record = self.tokens.find(hello.token, self.clock.time_ms())
            return record.principal, record
        if certificate:
            return certificate_principal(certificate), None
        if self._settings.authenticates:
            raise AuthenticationFailed("the server asks for a token, and none was sent")
        return ANONYMOUS, None

    def refused(self, address: str, command: str, why: str) -> None:
        """Write a refusal of an address into the audit log, if there is an audit log."""
        if self.audit_log is not None:
            self.audit_log.refused(address, address=address, command=command, why=why)

    def principal(self, principal: str) -> ActivePrincipal:
        """The state of a principal, shared by all of the principal's streams."""
        found = self._principals.get(principal)
        if found is None:
            rules = None if principal == LOCAL else self._access
            found = self._principals[principal] = ActivePrincipal(principal, rules, self.clock)
        return found

    def forget(self, active: ActivePrincipal) -> None:
        """Drop a principal without streams. A principal with a partly used quota stays, so that a new connection does
        not reset the quota."""
        if active.is_forgettable:
            self._principals.pop(active.principal, None)

    def reload(self, *, always: bool = False) -> None:
        """Read changed files again. A file that cannot be read changes nothing, is logged, and is tried again at every
        call: the cause may be elsewhere, such as the mode of a folder.

        Called every second. Also drops principals without streams whose quota is fully available again.
        """
        for active in list(self._principals.values()):
            self.forget(active)
        changed = self._watched.changed(always=always)
        for name in dict.fromkeys((*changed, *self._not_reloaded)):
            try:
                self._reload(name)
            except InvalidInput as error:
                if name in changed or self._not_reloaded.get(name) != str(error):
                    _log.error("security.not_reloaded", what=name, error=str(error))
                self._not_reloaded[name] = str(error)
            else:
                self._not_reloaded.pop(name, None)
                _log.info("security.reloaded", what=name)

    def _reload(self, name: str) -> None:
        if name == "tokens" and self._token_file is not None:
            former, self.tokens = self.tokens, self._token_file.read()
            self._note_tokens(former)
        elif name == "access" and self._settings.access is not None:
            self._access = read_access(self._settings.access)
            for active in self._principals.values():
                if active.principal != LOCAL:
                    active.follow(self._access)
        elif name == "tls" and self._settings.tls is not None:
            self.tls = self._settings.tls.context()  # present streams keep their context

    def _note_tokens(self, former: Tokens) -> None:
        if self.audit_log is None:
            return
        before, after = former.by_id, self.tokens.by_id
        for event, ids in (("token.created", after.keys() - before), ("token.revoked", before.keys() - after)):
            for token_id in sorted(ids):
                self.audit_log.noted(event, token=token_id, principal=(after | before)[token_id].principal)

    def _paths(self) -> list[tuple[str, str]]:
        settings = self._settings
        named = [("tokens", settings.tokens), ("access", settings.access)]
        if settings.tls is not None:
            named += [("tls", file) for file in settings.tls.files]
        return [(name, path) for name, path in named if path is not None]

    def close(self) -> None:
        if self.audit_log is not None:
            self.audit_log.close()


DECISIONS_MAX = 10_000  # cached; a client can send any number of names
_of_group: Callable[[Any], Any] = attrgetter("subject", "group")
# Frequent commands: decisions are cached by these attributes, without computing the needed permission.
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


class ActivePrincipal:
    """A principal with streams, or with a partly used quota. `access` None: the principal may do everything."""

    def __init__(self, principal: str, access: Access | None, clock: Clock) -> None:
        self.principal = principal
        self.stream_count = 0
        self.connections_max: int | None = None
        self.metered: PrincipalMeter | None = None
        self._clock = clock
        self._rules: tuple[Rule, ...] | None = None
        self._decisions: dict[object, bool] = {}
        if access is not None:
            self.follow(access)

    def follow(self, access: Access) -> None:
        """Use these rules from now on. Quotas start again."""
        self._rules = access.rules_for(self.principal)
        self._decisions.clear()
        quota = access.quota_for(self.principal)
        self.connections_max = None if quota is None else quota.connections
        rates = (None, None) if quota is None else (quota.commands_per_s, quota.bytes_per_s)
        self.metered = None if rates == (None, None) else PrincipalMeter(*rates, self._clock.monotonic)

    @property
    def may_everything(self) -> bool:
        return self._rules is None

    @property
    def is_forgettable(self) -> bool:
        """Whether the principal has no streams, and its quota is fully available."""
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


NAMES_MAX = 10_000  # per principal; beyond that the oldest names are dropped, at the risk of their owner only


class NameOwners:
    """The owners of names. Not thread-safe."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._owners: dict[Hashable, str] = {}
        self._names: dict[str, dict[Hashable, None]] = {}  # by principal, oldest first

    def owner(self, name: Hashable) -> str | None:
        return self._owners.get(name)

    def take(self, principal: str, *names: Hashable) -> Hashable | None:
        """Make the principal the owner of names. If a name has a different owner, returns this name and takes none."""
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
        """Make the principal the owner of a name, whoever owned the name before."""
        if self._owners.get(name) != principal:
            self.forget(name)
            self._take(name, principal)

    def forget(self, name: Hashable) -> None:
        """Remove the owner of a name."""
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


class WatchedFiles:
    """Files by name, checked for changes. A name may have several files."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, str, tuple[int, ...] | None]] = []

    def add(self, name: str, path: str) -> None:
        self._seen.append((name, path, _file_version(path)))

    def changed(self, *, always: bool = False) -> list[str]:
        """The names with a changed file since the last call, without duplicates. `always`: all names."""
        names: dict[str, None] = {}
        for place, (name, path, version) in enumerate(self._seen):
            found = _file_version(path)
            if always or found != version:
                self._seen[place] = (name, path, found)
                names[name] = None
        return list(names)


def _file_version(path: str) -> tuple[int, ...] | None:
    """Changes with the file, its content or its owner; None for a missing file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
