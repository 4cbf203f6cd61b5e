"""What protects a server: where the files are, and whether it may be reached without.

TLS: what a client checks and shows, and what a server does. TLS 1.2 is the oldest version that is spoken.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from dataclasses import dataclass

from inturn.model.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """How a client talks TLS: whom it trusts, and which certificate it shows to a server that asks for one.

    The server's certificate has to be signed by a CA of `ca_file` (the system's CAs unless given), and has to name the
    host of the address, or `server_name`. That cannot be switched off.
    """

    ca_file: str | None = None
    cert_file: str | None = None  # of the client, with its chain
    key_file: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise InvalidInput("TlsSettings.key_file is given without cert_file; give the certificate it belongs to")
        for name in ("ca_file", "cert_file", "key_file", "server_name"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidInput(f"TlsSettings.{name} is {value!r}; give a str")

    def context(self) -> ssl.SSLContext:
        """Reads the files. InvalidInput if they are not what they should be."""
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise _unusable(error, self.ca_file, self.cert_file, self.key_file) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


@dataclass(frozen=True, slots=True)
class ServerTlsSettings:
    """The certificate of a server, and whose certificates its clients have to show (`client_ca_file`), if any."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Reads the files. InvalidInput if they are not what they should be.

        Always a new one: loading into one that is in use would leave it without a key if the two do not fit.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except (OSError, ValueError) as error:
            raise _unusable(error, self.cert_file, self.key_file) from error
        if self.client_ca_file is not None:
            try:
                context.load_verify_locations(self.client_ca_file)
            except (OSError, ValueError) as error:
                raise _unusable(error, self.client_ca_file) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def files(self) -> tuple[str, ...]:
        named = self.cert_file, self.key_file, self.client_ca_file
        return tuple(one for one in named if one is not None)


def _no_password() -> str:
    """A server has nobody to ask: else OpenSSL would ask the terminal."""
    raise ValueError("the key is encrypted; give one without a password, readable for the server's user only")


def _unusable(error: OSError | ValueError, *files: str | None) -> InvalidInput:
    named = [one for one in files if one is not None]
    missing = next((one for one in named if not os.access(one, os.R_OK)), None)
    if missing is not None:
        return InvalidInput(f"TLS file {missing!r} is not there, or cannot be read")
    return InvalidInput(f"TLS files {', '.join(map(repr, named))} cannot be used: {error}")


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
