"""From lines to messages: where the key of a line is, and what is wrong with a line that has none. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from inturn.model.errors import InvalidInput

_SKIP_BYTES = 1024 * 1024


class BadLine(InvalidInput):
    """A line that cannot be sent. The `sent` messages before it are stored and stay."""

    def __init__(self, line: int, why: str, sent: int) -> None:
        self.line, self.why, self.sent = line, why, sent
        super().__init__(
            f"line {line}: {why}; the {sent} sent before it are stored and stay; "
            f"mend it and send the rest from line {line} on, or use --skip-bad"
        )


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # counted from 1
    data: bytes  # without its end
    read_bytes: int
    is_cut: bool = False  # it was longer than allowed; the rest of it was skipped


@dataclass(frozen=True, slots=True)
class Keying:
    """Where keys come from: one for all, a field of the JSON object, or the beginning of the line. Or nowhere."""

    key: bytes | None = None
    field: tuple[str, ...] = ()
    separator: bytes = b""
    is_json: bool = False

    def split(self, line: bytes) -> tuple[bytes | None, bytes]:
        """(key, body) of a line. Raises ValueError with the reason if it has none."""
        key, body = self.key, line
        if self.separator:
            start, found, body = line.partition(self.separator)
            if not found:
                raise ValueError(f"there is no separator {_text(self.separator)} in {_text(line)}")
            key = start
        if self.is_json or self.field:
            value = _json_object(body)
            if self.field:
                key = _key_at(value, self.field)
        if key == b"":
            raise ValueError(f"the key is empty in {_text(line)}")
        return key, body


def read_lines(stream: BinaryIO, bytes_max: int) -> Iterator[Line]:
    """Lines without their ends (\\n or \\r\\n). Never holds more than `bytes_max` of one, however long it is."""
    number = 0
    while data := stream.readline(bytes_max + 2):
        number += 1
        read_bytes, last = len(data), data
        while not last.endswith(b"\n") and (last := stream.readline(_SKIP_BYTES)):
            read_bytes += len(last)
        is_cut = read_bytes > len(data)
        if data.endswith(b"\n"):
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        yield Line(number, data, read_bytes, is_cut or len(data) > bytes_max)


def _json_object(body: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {_text(body)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {_kind(value)}, not an object: {_text(body)}")
    return value


def _key_at(value: object, path: tuple[str, ...]) -> bytes:
    for depth, name in enumerate(path):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"there is no field {'.'.join(path[: depth + 1])!r}")
        value = value[name]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"field {'.'.join(path)!r} is a {_kind(value)}; a key is a text or a whole number")
    return str(value).encode()


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list():
            return "list"
    return "object"


def _text(data: bytes) -> str:
    """The beginning of it, for an error message."""
    shown = data[:40].decode(errors="backslashreplace")
    return repr(shown) + ("…" if len(data) > 40 else "")
