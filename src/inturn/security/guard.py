"""The guard of a server: who comes in, and what each of them may do. One for all streams; each stream gets a pass.

Everything here runs in the server's event loop, but for what becomes of an act, which any thread may tell.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from inturn.model.clock import Clock
from inturn.model.commands import Hello
from inturn.model.errors import AuthenticationFailed, InvalidInput
from inturn.model.logs import get_logger
from inturn.security.access import read_access
from inturn.security.audit_log import AuditLog
from inturn.security.known import Known
from inturn.security.owners import Owners
from inturn.security.principal import ANONYMOUS, LOCAL, certificate_principal
from inturn.security.settings import SecuritySettings
from inturn.security.tokens import TokenFile, TokenRecord, Tokens
from inturn.security.visitor import Visitor
from inturn.security.watched import WatchedFiles

_log = get_logger("inturn.security")


class Guard:
    """Made before the server listens: what is wrong with its files is raised here, and only logged later."""

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
        self.members = Owners()
        self.producers = Owners()
        self._not_reloaded: dict[str, str] = {}  # names of files, and why
        self._known: dict[str, Known] = {}  # principals with a stream, or with something used

    def visitor(self, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool) -> Visitor:
        """A new stream; `certificate` is the client's, as far as TLS has checked one."""
        return Visitor(self, address, certificate, is_local=is_local)

    def authenticate(self, hello: Hello, certificate: Mapping[str, Any] | None) -> tuple[str, TokenRecord | None]:
        """The principal, and the token that says so."""
        if hello.token and self._token_file is not None:
            record = self.tokens.find(hello.token, self.clock.time_ms())
            return record.principal, record
        if certificate:
            return certificate_principal(certificate), None
        if self._settings.authenticates:
            raise AuthenticationFailed("the server asks for a token, and none was sent")
        return ANONYMOUS, None

    def refused(self, address: str, command: str, why: str) -> None:
        """Written into the audit log, if there is one, as a refusal of that address."""
        if self.audit_log is not None:
            self.audit_log.refused(address, address=address, command=command, why=why)

    def known(self, principal: str) -> Known:
        """What is known of it, from all of its streams."""
        found = self._known.get(principal)
        if found is None:
            rules = None if principal == LOCAL else self._access
            found = self._known[principal] = Known(principal, rules, self.clock)
        return found

    def forget(self, known: Known) -> None:
        """Its last stream is gone. What it used stays used: to come again is no way round a quota."""
        if known.is_forgettable:
            self._known.pop(known.principal, None)

    def reload(self, *, always: bool = False) -> None:
        """Read files again that have changed. One that cannot be read changes nothing, is told, and is tried again at
        every look: what was wrong may have been elsewhere, such as the mode of a folder.

        Called every second: those who are gone are forgotten here, once what they used has come back."""
        for known in list(self._known.values()):
            self.forget(known)
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
            for known in self._known.values():
                if known.principal != LOCAL:
                    known.follow(self._access)
        elif name == "tls" and self._settings.tls is not None:
            self.tls = self._settings.tls.context()  # streams that are there keep the one they know

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
