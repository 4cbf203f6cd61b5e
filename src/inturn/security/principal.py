"""Principals: who a client is, as far as rules, quotas and the audit log are concerned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from inturn.model.errors import AuthenticationFailed, InvalidInput

PRINCIPAL_LENGTH_MAX = 200
ANONYMOUS = "%anonymous"  # on a server that asks nobody
LOCAL = "%local"  # through the socket in the folder: whoever may open it owns the files
_ALLOWED = re.compile(r"[A-Za-z0-9._@:/-]+\Z", re.ASCII)


def check_principal(name: object) -> str:
    """The name if it may be one, else InvalidInput. Our own begin with %, which is not allowed."""
    if not isinstance(name, str) or not 1 <= len(name) <= PRINCIPAL_LENGTH_MAX or not _ALLOWED.match(name):
        raise InvalidInput(
            f"principal {name!r}: use 1 to {PRINCIPAL_LENGTH_MAX} of the characters A-Z a-z 0-9 . _ @ : / -"
        )
    return name


def certificate_principal(certificate: Mapping[str, Any]) -> str:
    """Whom a client certificate names, as `ssl` tells it: the common name, or else the first DNS name."""
    names = _common_names(certificate.get("subject", ())) or _dns_names(certificate.get("subjectAltName", ()))
    if not names:
        raise AuthenticationFailed("the client certificate names nobody (neither common name nor DNS name)")
    try:
        return check_principal(names[0])
    except InvalidInput as error:
        raise AuthenticationFailed(f"the client certificate: {error}") from None


def _common_names(subject: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    return [value for part in subject for name, value in part if name == "commonName"]


def _dns_names(alternatives: Sequence[tuple[str, str]]) -> list[str]:
    return [value for kind, value in alternatives if kind == "DNS"]
