"""A guarded server on loopback, with certificates and clients."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import trustme

import inturn
from inturn import Connection, LeaseSettings, LogSettings, TlsSettings
from inturn.security.settings import SecuritySettings, ServerTlsSettings
from inturn.security.tokens import TokenFile
from inturn.server.server import Server
from inturn.transport.address import Address
from inturn.transport.server_session import ServerSettings
from tests.faults.hostile import Raw

NOW_MS = 1_800_000_000_000
LEASE = LeaseSettings(life_s=12.0, renew_s=0.15, margin_s=0.05)


class Certificates:
    """Certificates of a test CA."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *hosts: str, common_name: str | None = None) -> tuple[str, str]:
        """The files of a certificate and the key."""
        made = self._ca.issue_cert(*hosts, common_name=common_name)
        cert, key = str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key")
        Path(cert).unlink(missing_ok=True)
        for blob in made.cert_chain_pems:
            blob.write_to_path(cert, append=True)
        made.private_key_pem.write_to_path(key)
        return cert, key


class Guarded:
    """`with_tokens` names the principals with tokens. `access` is the text of an access file."""

    def __init__(
        self,
        folder: Path,
        *principals: str,
        access: str | None = None,
        tls: ServerTlsSettings | None = None,
        settings: ServerSettings | None = None,
        lease: LeaseSettings = LEASE,
        log: LogSettings | None = None,
        **more: Any,
    ) -> None:
        self.folder = folder
        self.token_file = TokenFile(folder / "tokens.json")
        self.access_file = folder / "access.toml"
        self.audit_file = folder / "audit.jsonl"
        self.tokens = {one: self.token_file.create(one, NOW_MS) for one in principals}
        if access is not None:
            self.access_file.write_text(access)
        self.service = Server(
            folder / "data",
            address=Address("127.0.0.1"),
            lease=lease,
            log=log if log is not None else LogSettings(flush="os"),  # type: ignore[arg-type]
            settings=settings,
            security=SecuritySettings(
                tokens=str(self.token_file.path) if principals else None,
                access=None if access is None else str(self.access_file),
                tls=tls,
                audit_log=str(self.audit_file),
            ),
            **more,
        )
        self._opened: list[Connection] = []

    @property
    def address(self) -> str:
        return str(self.service.address)

    @property
    def port(self) -> int:
        return self.service.address.port

    def connect(self, principal: str | None = None, tls: TlsSettings | None = None, **more: Any) -> Connection:
        token = None if principal is None else self.tokens[principal]
        self._opened.append(inturn.connect(self.address, token=token, tls=tls, **more))
        return self._opened[-1]

    def local(self) -> Connection:
        """Through the socket in the folder."""
        self._opened.append(inturn.connect(self.folder / "data"))
        return self._opened[-1]

    def raw(self) -> Raw:
        return Raw(self.port)

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]

    def refusals(self) -> list[dict[str, Any]]:
        return [one for one in self.audited() if one["event"] == "refused"]

    def rewrite_access(self, text: str) -> None:
        new = self.access_file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.access_file)
        self.service.reload()

    def close(self) -> None:
        for one in self._opened:
            with contextlib.suppress(inturn.InturnError):
                one.close()
        self.service.close(grace_s=0.0)
