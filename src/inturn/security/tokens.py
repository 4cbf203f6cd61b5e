"""Tokens and principals. A client sends a token, and the server finds the principal of the token.

A token file has only hashes, so a reader of the file cannot act as a principal. A token is shown once, when it is made.
Tokens are random with 256 bits, so a plain hash cannot be guessed: slow hashes are for passwords that people choose.

    inturn_<id>_<secret>

The id finds the record, and may be shown. The hash of the whole token is compared in constant time.

A principal is the identity of a client for rules, quotas and the audit log.
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
ANONYMOUS = "%anonymous"  # on a server without authentication
LOCAL = "%local"  # through the socket in the folder: only the owner of the files can open the socket
_ALLOWED = re.compile(r"[A-Za-z0-9._@:/-]+\Z", re.ASCII)


def check_principal(name: object) -> str:
    """The name, if valid. Raises InvalidInput. inturn's own principals begin with %, which is not allowed here."""
    if not isinstance(name, str) or not 1 <= len(name) <= PRINCIPAL_LENGTH_MAX or not _ALLOWED.match(name):
        raise InvalidInput(
            f"principal {name!r}: use 1 to {PRINCIPAL_LENGTH_MAX} of the characters A-Z a-z 0-9 . _ @ : / -"
        )
    return name


def certificate_principal(certificate: Mapping[str, Any]) -> str:
    """The principal of a client certificate, as decoded by `ssl`: the common name, or else the first DNS name."""
    names = _common_names(certificate.get("subject", ())) or _dns_names(certificate.get("subjectAltName", ()))
    if not names:
        raise AuthenticationFailed("the client certificate has no name (neither common name nor DNS name)")
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
_NO_HASH = "0" * 64  # for an unknown token, so that the comparison takes the same time
_UNKNOWN = "the token is unknown here, or was revoked"


class TokenRecord(msgspec.Struct, frozen=True):
    """The stored part of a token."""

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
    """The tokens of a file."""

    def __init__(self, records: Iterable[TokenRecord] = ()) -> None:
        self.by_id = {one.id: one for one in records}

    def find(self, token: str, now_ms: int) -> TokenRecord:
        """The record of a valid token. Raises AuthenticationFailed, with a text that reveals nothing to the sender."""
        record = self.by_id.get(token.removeprefix(_PREFIX).partition("_")[0])
        is_right = hmac.compare_digest(_hash(token), _NO_HASH if record is None else record.hash)
        if record is None or not is_right:
            raise AuthenticationFailed(_UNKNOWN)
        if record.is_expired(now_ms):
            raise AuthenticationFailed("the token has expired")
        return record

    def holds(self, record: TokenRecord, now_ms: int) -> bool:
        """Whether a record that was found before is still valid."""
        return self.by_id.get(record.id) == record and not record.is_expired(now_ms)


class TokenFile:
    """A token file. Several processes may change the file; readers see the old or the new content."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> Tokens:
        """Read the file. Raises InvalidInput if the file cannot be read."""
        return Tokens(self._content().tokens)

    def create(self, principal: str, now_ms: int, expires_at_ms: int | None = None, note: str = "") -> str:
        """Make and return a new token. Makes a missing file. Other tokens of the principal stay valid."""
        check_principal(principal)
        if expires_at_ms is not None and expires_at_ms <= now_ms:
            raise InvalidInput("the expiry time of the token has already passed; give a later time")
        with self._changing() as content:
            known = {one.id for one in content.tokens}
            token_id = next(one for one in iter(lambda: secrets.token_hex(_ID_BYTES), "") if one not in known)
            token = f"{_PREFIX}{token_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
            content.tokens.append(TokenRecord(token_id, principal, _hash(token), now_ms, expires_at_ms, note))
        return token

    def revoke(self, token_id: str) -> TokenRecord:
        """Delete a token. Servers that use the file close the connections of the token. Raises NotFound."""
        if not self.path.exists():
            raise self._not_found(token_id)
        with self._changing() as content:
            for one in content.tokens:
                if one.id == token_id:
                    content.tokens.remove(one)
                    return one
            raise self._not_found(token_id)

    def _not_found(self, token_id: str) -> NotFound:
        return NotFound("token", token_id, f"list the tokens in {str(self.path)!r}: `inturn token list`")

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
        """Lock the file, and store the content that the `with` block has changed, unless the block raises."""
        lock = _opened_lock(f"{self.path}.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._content() if self.path.exists() else _Content(_FORMAT, [])
            yield content
            _replace(self.path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        finally:
            os.close(lock)


def check_token(token: object) -> str:
    """The token, if it may be sent. Raises InvalidInput, with a text that does not show the token."""
    if not isinstance(token, str):
        raise InvalidInput(f"the token is a {type(token).__name__}; give the text that `inturn token create` printed")
    if not token or len(token) > TOKEN_LENGTH_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput("the token is empty, too long, or has characters that no token has; copy the token again")
    return token


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def _opened_lock(path: str) -> int:
    """Open or make the lock file, never through a link: else the owner of the folder could make root change the owner
    of a file elsewhere."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        number = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, flags)
    _give_to_owner_of(Path(path).parent, number)
    return number


def _give_to_owner_of(folder: Path, number: int) -> None:
    """Give a new file to the owner of the folder: root may make tokens, and the server that reads them runs as the
    owner of the folder."""
    owner = folder.stat()
    with contextlib.suppress(PermissionError):  # in a folder of a different user, the file stays with this user
        os.fchown(number, owner.st_uid, owner.st_gid)


def _give_as(former: Path, number: int) -> None:
    """Copy owner and mode of the replaced file: else the server could not read the new file, and would miss
    revocations."""
    found = former.stat()
    try:
        os.fchown(number, found.st_uid, found.st_gid)
    except PermissionError:
        raise InvalidInput(
            f"token file {str(former)!r} belongs to user {found.st_uid} and group {found.st_gid}, who could not read "
            "the file any more if you changed it; run this as that user, or as root"
        ) from None
    os.fchmod(number, stat.S_IMODE(found.st_mode))


def _replace(path: Path, data: bytes) -> None:
    """Replace the file, wholly or not at all. Owner and mode of an existing file stay; only the owner can read a new
    file."""
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
