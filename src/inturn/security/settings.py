"""What protects a server: where the files are, and whether it may be reached without."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from inturn.model.errors import InvalidInput
from inturn.security.tls import ServerTlsSettings


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """`tokens` and the client CA in `tls` are the two ways to authenticate; with both, the certificate is always asked
    for, and a token says who it is. `access` needs one of them. Without it everybody who is known may do everything.
    """

    tokens: str | None = None  # a token file
    access: str | None = None  # an access file
    tls: ServerTlsSettings | None = None
    audit_log: str | None = None
    is_insecure: bool = False  # may be reached by others though it asks nobody who they are

    def __post_init__(self) -> None:
        if self.access is not None and not self.authenticates:
            raise InvalidInput(
                f"access file {self.access!r}: rules are about principals, and nobody is asked who they are; give a "
                "token file (--tokens), or a CA of client certificates (--tls-client-ca)"
            )

    @property
    def authenticates(self) -> bool:
        return self.tokens is not None or (self.tls is not None and self.tls.client_ca_file is not None)

    def check_host(self, host: str) -> None:
        """InvalidInput if others than this machine would be let in without being asked who they are."""
        if self.authenticates or self.is_insecure or is_loopback(host):
            return
        raise InvalidInput(
            f"{host!r} can be reached from other machines, and nobody would be asked who they are; make tokens "
            "(`inturn token create`, --tokens), use client certificates (--tls-client-ca), or listen on 127.0.0.1. "
            "--insecure serves all the same: whoever reaches the port can then read, write and delete everything"
        )


def is_loopback(host: str) -> bool:
    """Only this machine reaches it. A name is taken for one that others reach, unless it is localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
