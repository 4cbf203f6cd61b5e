"""How to come to a server: where it is, and how to talk TLS there."""

from __future__ import annotations

import ssl
from dataclasses import replace

from inturn.model.logs import get_logger
from inturn.security.credentials import Credentials
from inturn.security.settings import is_loopback
from inturn.security.tls import TlsSettings
from inturn.wire.address import Address, parse_address

_log = get_logger("inturn.connection")


def dialled(target: str, credentials: Credentials) -> tuple[Address, tuple[ssl.SSLContext, str] | None]:
    """Where to connect to, and how to talk TLS there, if that is to be done. InvalidInput if files are wrong."""
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
