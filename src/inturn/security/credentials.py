"""Credentials of a client: the token or certificate for a server, and the CAs that the client trusts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inturn.model.errors import InvalidInput
from inturn.security.settings import TlsSettings
from inturn.security.tokens import check_token

TOKEN, TOKEN_FILE = "INTURN_TOKEN", "INTURN_TOKEN_FILE"
TLS_CA, TLS_CERT, TLS_KEY = "INTURN_TLS_CA", "INTURN_TLS_CERT", "INTURN_TLS_KEY"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Spark serializes the credentials for its tasks. The representation shows no token."""

    token: str | None = field(default=None, repr=False)
    tls: TlsSettings | None = None

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token)
        if self.tls is not None and not isinstance(self.tls, TlsSettings):
            raise InvalidInput(f"tls={self.tls!r}: give TlsSettings")


NONE = Credentials()


def token_from_environment(environment: Mapping[str, str] | None = None) -> str | None:
    """The token in INTURN_TOKEN, or in the file with the path INTURN_TOKEN_FILE; None without both variables.

    Only the command line reads the variables by itself. A program must pass the token:
    `connect(address, token=inturn.token_from_environment())`.
    """
    environment = os.environ if environment is None else environment
    token, file = environment.get(TOKEN), environment.get(TOKEN_FILE)
    if token and file:
        raise InvalidInput(f"{TOKEN} and {TOKEN_FILE} are both set; unset one of them")
    if token:
        return check_token(token.strip())
    if not file:
        return None
    try:
        return check_token(Path(file).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{TOKEN_FILE}: {file!r} cannot be read: {error}") from error


def credentials_from_environment(environment: Mapping[str, str] | None = None) -> Credentials:
    """Like `token_from_environment`, with the files INTURN_TLS_CA, INTURN_TLS_CERT and INTURN_TLS_KEY."""
    environment = os.environ if environment is None else environment
    files = [environment.get(name) or None for name in (TLS_CA, TLS_CERT, TLS_KEY)]
    tls = TlsSettings(*files) if any(files) else None
    return Credentials(token_from_environment(environment), tls)
