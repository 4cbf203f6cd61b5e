"""Messages of producers and handlers, and tag expressions that select the messages of a group.

`paid || shipped` selects messages that have any of these tags; `*` or an empty expression selects all messages. A
message without tags is selected by `*` only. The text of an expression has one normal form (sorted, without
duplicates; empty for all), so that members with equal expressions agree even if the spelling differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from inturn.model.errors import InvalidInput


class Outgoing(msgspec.Struct, array_like=True, gc=False):
    """The stored part of a message. A new field goes to the end, with a default: old logs stay readable.

    `key` is the order key: messages of one key are handled in the order they were stored.
    """

    body: bytes
    key: bytes | None = None
    born_at_ms: int = 0
    tags: tuple[str, ...] = ()
    properties: dict[str, str] = {}
    message_id: str | None = None


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The subject and the index of the partition a message was read from."""

    subject: str
    partition: int


_NOWHERE = Origin("", -1)


class Message(Outgoing, gc=False):
    """A message read from the log. `offset` and `origin` come from its place in the log and are not stored."""

    offset: int = -1
    origin: Origin = _NOWHERE

    @property
    def subject(self) -> str:
        return self.origin.subject

    @property
    def partition(self) -> int:
        return self.origin.partition

    @property
    def key_text(self) -> str | None:
        """The key as text; bytes that are not UTF-8 appear as escapes."""
        return None if self.key is None else self.key.decode(errors="backslashreplace")

    @property
    def id(self) -> str:
        """The `message_id` given to `send`, or else the place of the message in the log."""
        return self.message_id if self.message_id is not None else f"{self.subject}/{self.partition}@{self.offset}"


SEPARATOR = "||"
EVERYTHING = "*"
TAGS_LENGTH_MAX = 4000

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class TagFilter:
    """A decoded tag expression. A batch that holds a message with a wanted tag contains one of the byte strings
    `traces`."""

    wanted: frozenset[str]
    traces: tuple[bytes, ...]

    def wants(self, tags: Iterable[str]) -> bool:
        return not self.wanted.isdisjoint(tags)

    def may_want(self, body: bytes) -> bool:
        """False: no message in these bytes has a wanted tag. Much faster than decoding the messages."""
        return any(trace in body for trace in self.traces)


def tags_text(expression: str | None) -> str:
    """The normal form of an expression; empty if all messages are wanted. Raises InvalidInput."""
    if expression is None:
        return ""
    if not isinstance(expression, str):
        raise InvalidInput(f"tags={expression!r}: give an expression such as 'paid || shipped', or '*' for all")
    if len(expression) > TAGS_LENGTH_MAX:
        raise InvalidInput(f"tags: an expression of {len(expression)} characters; the limit is {TAGS_LENGTH_MAX}")
    parts = [part.strip() for part in expression.split(SEPARATOR)]
    if parts in ([""], [EVERYTHING]):
        return ""
    for part in parts:
        if not part or part == EVERYTHING:
            raise InvalidInput(
                f"tags={expression!r}: {part!r} is no tag; join tags as in 'paid || shipped', or give '*' alone for all"
            )
        try:
            part.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"tags={expression!r}: {part!r} is no valid UTF-8 text; use other characters") from None
    return f" {SEPARATOR} ".join(sorted(set(parts)))


@lru_cache(maxsize=1024)
def tag_filter(expression: str) -> TagFilter | None:
    """The filter of an expression; None if the expression selects all messages. Raises InvalidInput."""
    text = tags_text(expression)
    if not text:
        return None
    tags = text.split(f" {SEPARATOR} ")
    return TagFilter(frozenset(tags), tuple(_encoder.encode(tag) for tag in tags))
