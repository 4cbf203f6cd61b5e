"""Decodes pulled and fetched batches into messages. Called without the lock of the consumer."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyroaring import BitMap64

from inturn.model.batch import StoredBatch, decode, is_intact
from inturn.model.errors import LogDamaged
from inturn.model.message import Message, Origin, TagFilter
from inturn.protocol.commands import Fetched, Pulled


@dataclass(frozen=True, slots=True)
class DecodedPull:
    """The answer to a Pull, with the messages of the batches up to the first damaged batch. `filtered_out` are offsets
    that the tags of the group leave out."""

    pulled: Pulled
    messages: list[list[Message]]
    damage: LogDamaged | None = None
    filtered_out: BitMap64 = field(default_factory=BitMap64)


@dataclass(frozen=True, slots=True)
class DecodedFetch:
    """The answer to a Fetch of a shared group, with the messages of all readable batches. No message waits for a
    damaged batch."""

    fetched: Fetched
    messages: list[Message]
    damage: list[LogDamaged]  # per batch that cannot be read


def decode_pull(pulled: Pulled, subject: str, partition: int, tags: TagFilter | None = None) -> DecodedPull:
    """Decode a Pulled, and apply `tags`: the node filters as far as possible, but an older server may not, or may not
    be able to decompress a batch."""
    origin = Origin(subject, partition)
    filtered_out = BitMap64.deserialize(pulled.unwanted) if pulled.unwanted else BitMap64()
    messages: list[list[Message]] = []
    for batch in pulled.batches:
        try:
            found = _decoded(batch, origin)
        except LogDamaged as error:
            return DecodedPull(pulled, messages, error, filtered_out)
        if tags is not None and (left := [one.offset for one in found if not tags.wants(one.tags)]):
            filtered_out.update(left)
            found = [one for one in found if tags.wants(one.tags)]
        messages.append(found)
    return DecodedPull(pulled, messages, None, filtered_out)


def decode_fetch(fetched: Fetched, subject: str, partition: int) -> DecodedFetch:
    origin = Origin(subject, partition)
    messages: list[Message] = []
    damage: list[LogDamaged] = []
    for batch in fetched.pulled.batches:
        try:
            messages += _decoded(batch, origin)
        except LogDamaged as error:
            damage.append(error)
    return DecodedFetch(fetched, messages, damage)


def _decoded(batch: StoredBatch, origin: Origin) -> list[Message]:
    place = f"{origin.subject}/{origin.partition}"
    if not is_intact(batch):
        raise LogDamaged(place, batch.header.base_offset, "the checksum of a batch does not match its content")
    try:
        return decode(batch, origin)
    except Exception as error:  # a decoder or decompressor may raise any class
        raise LogDamaged(place, batch.header.base_offset, f"a batch cannot be decoded: {error}") from error
