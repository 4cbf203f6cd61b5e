"""From what was pulled to messages. Needs no lock, so that nobody waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from inturn.model.batch import StoredBatch, decode, is_intact
from inturn.model.commands import Fetched, Pulled
from inturn.model.errors import LogDamaged
from inturn.model.message import Message, Origin


@dataclass(frozen=True, slots=True)
class Opened:
    """What was pulled, with the messages of each batch up to the first that is damaged."""

    pulled: Pulled
    messages: list[list[Message]]
    damage: LogDamaged | None = None


@dataclass(frozen=True, slots=True)
class OpenedFetch:
    """The same of what a member of a shared group was given."""

    fetched: Fetched
    opened: Opened


def opened(pulled: Pulled, subject: str, partition: int) -> Opened:
    origin = Origin(subject, partition)
    messages: list[list[Message]] = []
    for batch in pulled.batches:
        try:
            messages.append(_decoded(batch, origin))
        except LogDamaged as error:
            return Opened(pulled, messages, error)
    return Opened(pulled, messages)


def _decoded(batch: StoredBatch, origin: Origin) -> list[Message]:
    place = f"{origin.subject}/{origin.partition}"
    if not is_intact(batch):
        raise LogDamaged(place, batch.header.base_offset, "the checksum of a batch does not fit its content")
    try:
        return decode(batch, origin)
    except Exception as error:  # whatever a decoder or decompressor says of content that it cannot read
        raise LogDamaged(place, batch.header.base_offset, f"a batch cannot be decoded: {error}") from error
