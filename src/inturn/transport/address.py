"""Addresses of servers: `inturn://host:port`, with TLS `inturns://host:port`, or the path of a socket,
`inturn+unix:///path`.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from inturn.model.errors import InvalidInput
from inturn.model.logs import get_logger
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings, is_loopback

DEFAULT_PORT = 7420
TCP, TLS, UNIX = "inturn", "inturns", "inturn+unix"


@dataclass(frozen=True, slots=True)
class Address:
    """`path` is set for a socket in the file system; otherwise host and port."""

    host: str = ""
    port: int = 0
    path: str | None = None
    is_tls: bool = False

    def __str__(self) -> str:
        if self.path is not None:
            return f"{UNIX}://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TLS if self.is_tls else TCP}://{host}:{self.port}"

    def dial(self, timeout_s: float) -> socket.socket:
        """A connected socket. Raise OSError."""
        if self.path is not None:
            dialed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            dialed.settimeout(timeout_s)
            try:
                dialed.connect(self.path)
            except OSError:
                dialed.close()
                raise
            return dialed
        dialed = socket.create_connection((self.host, self.port), timeout_s)
        dialed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return dialed


def is_address(text: object) -> bool:
    """Whether the text is an address, not the path of a folder."""
    return isinstance(text, str) and "://" in text


def parse_address(text: str) -> Address:
    hint = f"give {TCP}://host:port, {TLS}://host:port for TLS, or {UNIX}:///path/of/socket"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InvalidInput(f"address {text!r}: {error}; {hint}") from None
    if parts.scheme == UNIX:
        if not parts.path or parts.netloc:
            raise InvalidInput(f"address {text!r} has no path; {hint}")
        return Address(path=unquote(parts.path))
    if parts.username or parts.password:
        raise InvalidInput(f"an address has no user and no password in it; {hint}, and the token to connect(token=…)")
    if parts.scheme not in (TCP, TLS) or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise InvalidInput(f"address {text!r} is no address of a server; {hint}")
    return Address(parts.hostname, DEFAULT_PORT if port is None else port, is_tls=parts.scheme == TLS)


_log = get_logger("inturn.connection")


def dialled(target: str, credentials: Credentials) -> tuple[Address, tuple[ssl.SSLContext, str] | None]:
    """The address to dial, and the TLS context with the server's name if the stream uses TLS. Raise InvalidInput for
    wrong files."""
    address = parse_address(target)
    if address.path is not None:
        return address, None
    if credentials.tls is None and not address.is_tls:
        if credentials.token is not None and not is_loopback(address.host):
            _log.warning("connection.token_in_clear", address=str(address), next_step="use inturns://")
        return address, None
    tls = credentials.tls if credentials.tls is not None else TlsSettings()
    name = tls.server_name if tls.server_name is not None else address.host
    return replace(address, is_tls=True), (tls.context(), name)
