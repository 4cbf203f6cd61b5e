"""Tokens: what a client shows to a server to be known as a principal.

A file has their hashes, so whoever reads it can be nobody; the tokens themselves are shown once, when they are made.
They are random, 256 bits, so a plain hash of them cannot be guessed: slow hashes are for what people choose.

    inturn_<id>_<secret>

The id finds the record, and may be shown; the rest is compared in constant time, by its hash.

Principals: who a client is, as far as rules, quotas and the audit log are concerned.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from inturn.model.errors import AuthenticationFailed, InvalidInput, NotFound

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


TOKENS_NAME = "tokens.json"  # in a folder
TOKEN_LENGTH_MAX = 512
_PREFIX = "inturn_"
_SECRET_BYTES = 32
_ID_BYTES = 6
_FORMAT = 1
_NO_HASH = "0" * 64  # of a token that is not there: comparing takes as long
_UNKNOWN = "the token is unknown here, or was revoked"


class TokenRecord(msgspec.Struct, frozen=True):
    """What is kept of a token."""

    id: str
    principal: str
    hash: str  # SHA-256 of the whole token, in hex
    created_at_ms: int
    expires_at_ms: int | None = None
    note: str = ""

    def is_expired(self, now_ms: int) -> bool:
        return self.expires_at_ms is not None and now_ms >= self.expires_at_ms


class _Content(msgspec.Struct):
    format: int
    tokens: list[TokenRecord]


class Tokens:
    """Those of a file as it was read."""

    def __init__(self, records: Iterable[TokenRecord] = ()) -> None:
        self.by_id = {one.id: one for one in records}

    def find(self, token: str, now_ms: int) -> TokenRecord:
        """The record of a token that holds now. AuthenticationFailed says no more than its sender may know."""
        record = self.by_id.get(token.removeprefix(_PREFIX).partition("_")[0])
        is_right = hmac.compare_digest(_hash(token), _NO_HASH if record is None else record.hash)
        if record is None or not is_right:
            raise AuthenticationFailed(_UNKNOWN)
        if record.is_expired(now_ms):
            raise AuthenticationFailed("the token has expired")
        return record

    def holds(self, record: TokenRecord, now_ms: int) -> bool:
        """Whether what was found once may still be used."""
        return self.by_id.get(record.id) == record and not record.is_expired(now_ms)


class TokenFile:
    """Several processes may change it; those that read see it as it was or as it is."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> Tokens:
        """InvalidInput if it cannot be read."""
        return Tokens(self._content().tokens)

    def create(self, principal: str, now_ms: int, expires_at_ms: int | None = None, note: str = "") -> str:
        """A new token; the file is made if it is not there. Others of the same principal stay as they are."""
        check_principal(principal)
        if expires_at_ms is not None and expires_at_ms <= now_ms:
            raise InvalidInput("a token that has expired already is of no use; give a later time")
        with self._changing() as content:
            known = {one.id for one in content.tokens}
            token_id = next(one for one in iter(lambda: secrets.token_hex(_ID_BYTES), "") if one not in known)
            token = f"{_PREFIX}{token_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
            content.tokens.append(TokenRecord(token_id, principal, _hash(token), now_ms, expires_at_ms, note))
        return token

    def revoke(self, token_id: str) -> TokenRecord:
        """Servers that use the file hang up on whoever came with it. NotFound if there is no such token."""
        if not self.path.exists():
            raise self._not_found(token_id)
        with self._changing() as content:
            for one in content.tokens:
                if one.id == token_id:
                    content.tokens.remove(one)
                    return one
            raise self._not_found(token_id)

    def _not_found(self, token_id: str) -> NotFound:
        return NotFound("token", token_id, f"see those in {str(self.path)!r}: `inturn token list`")

    def _content(self) -> _Content:
        try:
            content = msgspec.json.decode(self.path.read_bytes(), type=_Content)
        except OSError as error:
            raise InvalidInput(f"token file {str(self.path)!r} cannot be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"token file {str(self.path)!r} is no token file: {error}") from None
        if content.format != _FORMAT:
            raise InvalidInput(
                f"token file {str(self.path)!r} has format {content.format}, this inturn knows {_FORMAT}"
            )
        return content

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Content]:
        """What the body leaves of the content is stored, unless it raises."""
        lock = _opened_lock(f"{self.path}.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._content() if self.path.exists() else _Content(_FORMAT, [])
            yield content
            _replace(self.path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        finally:
            os.close(lock)


def check_token(token: object) -> str:
    """What may be sent as a token; the message of the error does not show it."""
    if not isinstance(token, str):
        raise InvalidInput(f"the token is a {type(token).__name__}; give the text that `inturn token create` printed")
    if not token or len(token) > TOKEN_LENGTH_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput("the token is empty, too long, or has characters that no token has; copy it again")
    return token


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def _opened_lock(path: str) -> int:
    """Never through a link: whoever owns the folder could have root give away a file that is elsewhere."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        number = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, flags)
    _give_to_owner_of(Path(path).parent, number)
    return number


def _give_to_owner_of(folder: Path, number: int) -> None:
    """A new file: root makes tokens, and the server that reads them is the user whose folder it is."""
    owner = folder.stat()
    with contextlib.suppress(PermissionError):  # in a folder of somebody else it is ours
        os.fchown(number, owner.st_uid, owner.st_gid)


def _give_as(former: Path, number: int) -> None:
    """The owner and the mode of the file whose place it takes: else its server could not read what was revoked."""
    found = former.stat()
    try:
        os.fchown(number, found.st_uid, found.st_gid)
    except PermissionError:
        raise InvalidInput(
            f"token file {str(former)!r} belongs to user {found.st_uid} and group {found.st_gid}, who could not read "
            "it any more if you changed it; run this as that user, or as root"
        ) from None
    os.fchmod(number, stat.S_IMODE(found.st_mode))


def _replace(path: Path, data: bytes) -> None:
    """Whole or not at all. It stays readable for those who could read it; a new one is for its owner only."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            if path.exists():
                _give_as(path, file.fileno())
            else:
                _give_to_owner_of(path.parent, file.fileno())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
