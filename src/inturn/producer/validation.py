"""The options of a message, and checks of every message before it is accepted, by a producer or by an outbox.

A check returns the value to store, or raises InvalidInput (LimitExceeded for a value that is too large).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypedDict

from inturn.model.errors import InvalidInput, LimitExceeded
from inturn.model.message import Outgoing
from inturn.model.routing import Partition
from inturn.model.subject import RESERVED

# Called with the partitions of the subject, the message and `arg`; returns the index of a partition.
Selector: TypeAlias = Callable[[Sequence[Partition], Outgoing, object], int]


class MessageOptions(TypedDict, total=False):
    """Options of `Outbox.put`. Every option may be left out."""

    key: str | bytes | None  # messages of one key are stored in order; None (default): no order
    tags: tuple[str, ...]  # consumers and readers can filter by tags; default ()
    properties: dict[str, str] | None  # headers; names must not begin with "%"
    message_id: str | None  # your own id; by default the id is made of partition and offset


class SendOptions(MessageOptions, total=False):
    """Options of `Producer.send`, `Producer.send_sync` and `AsyncProducer.send`. Every option may be left out."""

    selector: Selector | None  # chooses the partition; only for subjects with routing "selector"
    arg: object  # given to the selector; also the key, unless `key` is given


def as_bytes(what: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        raise InvalidInput(f"the {what} is text; encode it first: {what}.encode()")
    allowed = "str or bytes" if what == "key" else "bytes"
    raise InvalidInput(f"the {what} is of type {type(value).__name__}; give {allowed}")


def check_size(what: str, size: int, limit: int, setting: str) -> None:
    if size > limit:
        raise LimitExceeded(what, size, limit, setting)


def checked_key(key: str | bytes | None, limit: int) -> bytes | None:
    if key is None:
        return None
    encoded = encoded_key(key)
    check_size("the key", len(encoded), limit, "Limits.key_bytes")
    return encoded


def encoded_key(key: str | bytes) -> bytes:
    """A key of any size, as bytes."""
    return utf8("key", key) if isinstance(key, str) else as_bytes("key", key)


def utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise not_text(what, text, error) from None


def not_text(what: str, text: object, error: UnicodeEncodeError) -> InvalidInput:
    return InvalidInput(f"the {what} {text!r} is not valid text: {error.reason}")


def checked_properties(properties: dict[str, str], limit: int) -> int:
    size = 0
    if not isinstance(properties, dict):
        raise InvalidInput(f"properties is a {type(properties).__name__}; give a dict of str to str")
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"property {name!r} is {value!r}; names and values must be str")
        if name.startswith(RESERVED):
            raise InvalidInput(f"property {name!r} begins with {RESERVED!r}, which is reserved; use another name")
        size += len(utf8("property", name)) + len(utf8("property", value))
    if size > limit:
        raise LimitExceeded("properties", size, limit, "Limits.properties_bytes")
    return size


def checked_tags(tags: Iterable[str], limit: int) -> tuple[tuple[str, ...], int]:
    kept = () if isinstance(tags, str) or not isinstance(tags, Iterable) else tuple(tags)
    if isinstance(tags, str) or not isinstance(tags, Iterable) or not all(isinstance(tag, str) for tag in kept):
        raise InvalidInput(f"tags is {tags!r}; give a tuple of str")
    size = sum(len(utf8("tag", tag)) for tag in kept)
    if size > limit:
        raise LimitExceeded("tags", size, limit, "Limits.properties_bytes")
    return kept, size


def checked_id(message_id: str, limit: int) -> int:
    if not isinstance(message_id, str):
        raise InvalidInput(f"message_id is a {type(message_id).__name__}; give a str")
    size = len(utf8("message_id", message_id))
    if size > limit:
        raise LimitExceeded("message_id", size, limit, "Limits.key_bytes")
    return size
