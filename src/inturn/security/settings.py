"""Security settings of servers and clients: files, TLS, and whether a server may be reached without authentication.

TLS 1.2 is the oldest accepted version.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from dataclasses import dataclass

from inturn.model.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS of a client: the trusted CAs, and the certificate for servers that require a client certificate.

    The server's certificate must be signed by a CA of `ca_file` (default: the system's CAs), and must name the host of
    the address, or `server_name`. These checks cannot be switched off.
    """

    ca_file: str | None = None
    cert_file: str | None = None  # of the client, with its chain
    key_file: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise InvalidInput("TlsSettings.key_file is given without cert_file; give the certificate of the key")
        for name in ("ca_file", "cert_file", "key_file", "server_name"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidInput(f"TlsSettings.{name} is {value!r}; give a str")

    def context(self) -> ssl.SSLContext:
        """Read the files. Raises InvalidInput for invalid files."""
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
    """TLS of a server: the certificate, and optionally the CA of client certificates (`client_ca_file`). With a client
    CA, clients must show a certificate."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files into a new context. Raises InvalidInput for invalid files.

        Loading into a context in use would leave the context without a key if certificate and key do not fit.
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
    """Refuse encrypted keys: without this function, OpenSSL would ask for a password on the terminal."""
    raise ValueError("the key is encrypted; give one without a password, readable for the server's user only")


def _unusable(error: OSError | ValueError, *files: str | None) -> InvalidInput:
    named = [one for one in files if one is not None]
    missing = next((one for one in named if not os.access(one, os.R_OK)), None)
    if missing is not None:
        return InvalidInput(f"TLS file {missing!r} is missing, or cannot be read")
    return InvalidInput(f"TLS files {', '.join(map(repr, named))} cannot be used: {error}")


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """The security of a server. `tokens` and the client CA in `tls` are the two ways to authenticate clients.

    With both, a client certificate is always required, and a token decides about the principal. `access` needs
    authentication. Without `access`, all authenticated clients may do everything.
    """

    tokens: str | None = None  # a token file
    access: str | None = None  # an access file
    tls: ServerTlsSettings | None = None
    audit_log: str | None = None
    is_insecure: bool = False  # other machines may connect without authentication

    def __post_init__(self) -> None:
        if self.access is not None and not self.authenticates:
            raise InvalidInput(
                f"access file {self.access!r}: rules are about principals, and clients are not authenticated; give a "
                "token file (--tokens), or a CA of client certificates (--tls-client-ca)"
            )

    @property
    def authenticates(self) -> bool:
        return self.tokens is not None or (self.tls is not None and self.tls.client_ca_file is not None)

    def check_host(self, host: str) -> None:
        """Raise InvalidInput if other machines could connect without authentication."""
        if self.authenticates or self.is_insecure or is_loopback(host):
            return
        raise InvalidInput(
            f"{host!r} can be reached from other machines, and clients would not be authenticated; make tokens "
            "(`inturn token create`, --tokens), use client certificates (--tls-client-ca), or listen on 127.0.0.1. "
            "--insecure serves without authentication: all clients that reach the port can then read, write and delete "
            "everything"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. All names except localhost count as reachable by other
    machines."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
