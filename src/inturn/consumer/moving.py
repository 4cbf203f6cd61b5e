"""Messages that go to a retry or dead-letter subject, and what goes with them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from inturn.model.batch import Batch, encode
from inturn.model.message import Message, Outgoing
from inturn.model.slot import slot_of

# Properties of such a message. Producers refuse names that begin with `%`, so these are ours alone.
ATTEMPTS = "%attempts"  # how often it failed so far
SUBJECT = "%subject"  # where it stood first
PARTITION = "%partition"
OFFSET = "%offset"


def past_attempts(message: Message) -> int:
    text = message.properties.get(ATTEMPTS, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def moved_batch(messages: Sequence[Message], attempts: Sequence[int]) -> Batch:
    """The messages as they are stored in the retry or dead-letter subject, each with how often it failed."""
    slots = array("H", [0 if message.key is None else slot_of(message.key) for message in messages])
    return encode([_moved(message, count) for message, count in zip(messages, attempts, strict=True)], slots)


def _moved(message: Message, attempts: int) -> Outgoing:
    origin = {SUBJECT: message.subject, PARTITION: str(message.partition), OFFSET: str(message.offset)}
    properties = origin | message.properties | {ATTEMPTS: str(attempts)}
    return Outgoing(message.body, message.key, message.born_at_ms, message.tags, properties, message.message_id)
