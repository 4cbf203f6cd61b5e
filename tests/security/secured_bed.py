"""The bed of the contract suite with all security features: TLS, a client certificate, a token, a rule per action."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import inturn
from inturn import Connection, LogSettings, TlsSettings
from inturn.errors import ProducerError
from inturn.security.permissions import Permission
from inturn.security.settings import SecuritySettings, ServerTlsSettings
from inturn.security.tokens import TokenFile
from inturn.server.server import Server
from inturn.transport.address import Address
from tests.contract.bed import Bed
from tests.security.bed import Certificates

RULES = "".join(
    f'[[allow]]\nprincipals = "tester"\nactions = "{action}"\nsubjects = "*"\ngroups = "*"\n' for action in Permission
)


class SecuredBed(Bed):
    def __init__(self, path: Path, certificates: Certificates) -> None:
        super().__init__(path)
        self._service: Server | None = None
        folder = path.parent
        tokens = TokenFile(folder / "tokens.json")
        self._token = tokens.create("tester", 0)
        (folder / "access.toml").write_text(RULES)
        self.audit_file = folder / "audit.jsonl"
        server = certificates.issue("secured", "127.0.0.1")
        client = certificates.issue("host", "host.example.com", common_name="host")
        self._tls = TlsSettings(certificates.ca_file, *client)
        self._security = SecuritySettings(
            tokens=str(tokens.path),
            access=str(folder / "access.toml"),
            tls=ServerTlsSettings(*server, certificates.ca_file),
            audit_log=str(self.audit_file),
        )

    def open(self, **options: Any) -> Connection:
        if self._service is None:
            flush = options.pop("flush", None)
            log = options.pop("log", None) or LogSettings(**({} if flush is None else {"flush": flush}))
            self._service = Server(
                self.path,
                log=log,
                lease=options.pop("lease", None),
                observer=options.pop("observer", None),
                address=Address("127.0.0.1"),
                security=self._security,
            )
        self._opened.append(inturn.connect(str(self._service.address), token=self._token, tls=self._tls))
        return self._opened[-1]

    def close(self) -> None:
        while self._opened:
            with contextlib.suppress(ProducerError):  # of a send that fails on purpose
                self._opened.pop().close()
        if self._service is not None:
            self._service.close(grace_s=0.0)
            self._service = None
