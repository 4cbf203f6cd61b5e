"""Tag expressions: which messages of a subject a group wants.

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
