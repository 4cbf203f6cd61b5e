"""A row of an outbox: one message that waits to be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from inturn.model.errors import InvalidInput
from inturn.model.message import Outgoing
from inturn.model.names import check_name
from inturn.model.settings import Limits
from inturn.producer.acceptance import as_bytes, check_size, checked_id, checked_key, checked_properties, checked_tags

TOKEN = "%outbox"  # the property that names the row in the log
_tags = msgspec.json.Decoder(tuple[str, ...])
_properties = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Row:
    """As it was read. What somebody else wrote into the table may be anything: `message` says what is wrong with it."""

    id: int
    token: str
    subject: str
    key: bytes | None
    body: bytes
    tags: str
    properties: str
    message_id: str | None
    partition: int | None
    created_at_ms: int
    attempts: int

    @property
    def place(self) -> tuple[str, bytes] | None:
        """Rows of one place are sent one after the other; without a key there is none."""
        return None if self.key is None else (self.subject, self.key)

    def message(self) -> Outgoing:
        """The message as it was put. Without a message id of its own it has the row's token. Raises InvalidInput."""
        try:
            tags, properties = _tags.decode(self.tags), _properties.decode(self.properties)
        except msgspec.MsgspecError as error:
            raise InvalidInput(
                f"tags {self.tags[:60]!r} and properties {self.properties[:60]!r} must be a JSON array and a JSON "
                f"object of texts: {error}"
            ) from None
        message_id = self.token if self.message_id is None else self.message_id
        return Outgoing(self.body, self.key, self.created_at_ms, tags, properties, message_id)


def checked_values(
    subject: str,
    body: bytes,
    key: str | bytes | None,
    tags: tuple[str, ...],
    properties: dict[str, str] | None,
    message_id: str | None,
    partition: int | None,
    limits: Limits,
) -> dict[str, Any]:
    """What is written into the table, by column; checked as a producer checks it. Raises InvalidInput."""
    check_name("subject", subject)
    body = as_bytes("body", body)
    check_size("the body", len(body), limits.body_bytes, "Limits.body_bytes")
    key = checked_key(key, limits.key_bytes)
    if properties:
        checked_properties(properties, limits.properties_bytes)
    if tags != ():
        tags, _ = checked_tags(tags, limits.properties_bytes)
    if message_id is not None:
        checked_id(message_id, limits.key_bytes)
    if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int) or partition < 0):
        raise InvalidInput(f"partition={partition!r}: give the index of a partition, or leave it out")
    return {
        "subject": subject,
        "key": key,
        "body": body,
        "tags": json_text(tags),
        "properties": json_text(properties or {}),
        "message_id": message_id,
        "partition": partition,
    }


def json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()
