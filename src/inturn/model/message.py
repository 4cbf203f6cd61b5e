"""The message: what a producer stores, and what a handler gets."""

from __future__ import annotations

import msgspec


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
