"""What may go into a row. Values come from clients; a database would take some that it cannot give back."""

from __future__ import annotations

from inturn.model.errors import InvalidInput

NUMBER_MAX = 2**63 - 1
KEY_BYTES_MAX = 1 << 20  # of any subject; its own limit is checked where a key enters


def check_number(what: str, value: object) -> None:
    """Raise InvalidInput unless it is a whole number, 0 or above, that a column can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= NUMBER_MAX:
        raise InvalidInput(f"{what} {value!r}: it must be a whole number from 0 to {NUMBER_MAX}")


def check_bytes(what: str, value: object, bytes_max: int) -> None:
    """Raise InvalidInput unless it is bytes, and not more than this."""
    if not isinstance(value, bytes):
        raise InvalidInput(f"{what} is a {type(value).__name__}: it must be bytes")
    if len(value) > bytes_max:
        raise InvalidInput(f"{what} has {len(value)} bytes: the limit is {bytes_max}")


def check_text(what: str, value: object, length_max: int) -> None:
    """Raise InvalidInput unless it is a text, and not longer than this."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is a {type(value).__name__}: it must be a text")
    if len(value) > length_max:
        raise InvalidInput(f"{what} has {len(value)} characters: the limit is {length_max}")


def storable(text: str, length_max: int) -> str:
    """The text, cut, with what no database takes (half characters, zeros) as escapes."""
    return text[:length_max].encode(errors="backslashreplace").decode().replace("\0", "\\0")
