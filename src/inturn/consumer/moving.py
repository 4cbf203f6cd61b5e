"""Messages that failed under best effort: what goes with them to the retry subject."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from inturn.model.batch import Batch, encode
from inturn.model.message import Message, Outgoing
from inturn.model.slot import slot_of

# Properties of a message in a retry subject. Producers refuse names that begin with `%`, so these are ours alone.
ATTEMPTS = "%attempts"  # how often it failed so far
SUBJECT = "%subject"  # where it stood first
PARTITION = "%partition"
OFFSET = "%offset"


def past_attempts(message: Message) -> int:
    text = message.properties.get(ATTEMPTS, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def moved_batch(messages: Sequence[Message]) -> Batch:
    """The messages as they are stored in the retry subject."""
    slots = array("H", [0 if message.key is None else slot_of(message.key) for message in messages])
    return encode([_moved(message) for message in messages], slots)


def _moved(message: Message) -> Outgoing:
    origin = {SUBJECT: message.subject, PARTITION: str(message.partition), OFFSET: str(message.offset)}
    properties = origin | message.properties | {ATTEMPTS: str(past_attempts(message) + 1)}
    return Outgoing(message.body, message.key, message.born_at_ms, message.tags, properties, message.message_id)
