"""The message: what a producer stores, and what a handler gets.

Tag expressions: which messages of a subject a group wants.

`paid || shipped` wants messages that have any of these tags; `*`, or nothing, wants all. A message without tags is
wanted by `*` only. As text an expression has one form (sorted, each tag once; empty for all), so that members who mean
the same agree, whatever they wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from inturn.model.errors import InvalidInput


class Outgoing(msgspec.Struct, array_like=True, gc=False):
    """What is stored of a message. A new field goes to the end, with a default, so that old logs stay readable.

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
    """A message read from the log. `offset` and `origin` come from where it stands and are not stored with it."""

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
        """The `message_id` it was sent with, or else its place in the log."""
        return self.message_id if self.message_id is not None else f"{self.subject}/{self.partition}@{self.offset}"


SEPARATOR = "||"
EVERYTHING = "*"
TAGS_LENGTH_MAX = 4000

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class TagFilter:
    """`traces` are the bytes that a batch must have somewhere to hold a message with one of the tags."""

    wanted: frozenset[str]
    traces: tuple[bytes, ...]

    def wants(self, tags: Iterable[str]) -> bool:
        return not self.wanted.isdisjoint(tags)

    def may_want(self, body: bytes) -> bool:
        """False: no message that is stored in these bytes has such a tag. Far quicker than to look at each."""
        return any(trace in body for trace in self.traces)


def tags_text(expression: str | None) -> str:
    """The one form of an expression; empty if all messages are wanted. Raises InvalidInput."""
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
            raise InvalidInput(f"tags={expression!r}: {part!r} is no text that UTF-8 knows") from None
    return f" {SEPARATOR} ".join(sorted(set(parts)))


@lru_cache(maxsize=1024)
def tag_filter(expression: str) -> TagFilter | None:
    """What an expression asks for; None if that is everything. Raises InvalidInput."""
    text = tags_text(expression)
    if not text:
        return None
    tags = text.split(f" {SEPARATOR} ")
    return TagFilter(frozenset(tags), tuple(_encoder.encode(tag) for tag in tags))
