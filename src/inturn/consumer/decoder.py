"""From what was pulled to messages. Needs no lock, so that nobody waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyroaring import BitMap64

from inturn.model.batch import StoredBatch, decode, is_intact
from inturn.model.errors import LogDamaged
from inturn.model.message import Message, Origin, TagFilter
from inturn.protocol.commands import Fetched, Pulled


@dataclass(frozen=True, slots=True)
class DecodedPull:
    """What was pulled, with the messages of each batch up to the first that is damaged. `unwanted` are offsets that
    the tags of the group leave out."""

    pulled: Pulled
    messages: list[list[Message]]
    damage: LogDamaged | None = None
    filtered_out: BitMap64 = field(default_factory=BitMap64)


@dataclass(frozen=True, slots=True)
class DecodedFetch:
    """What a member of a shared group was given, with the messages of all batches that can be read: none of them waits
    for another."""

    fetched: Fetched
    messages: list[Message]
    damage: list[LogDamaged]  # one for each batch that cannot be read


def decode_pull(pulled: Pulled, subject: str, partition: int, tags: TagFilter | None = None) -> DecodedPull:
    """The node has left out what `tags` do not want, as far as it could: a server may be older, or not know how to
    decompress a batch."""
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
        raise LogDamaged(place, batch.header.base_offset, "the checksum of a batch does not fit its content")
    try:
        return decode(batch, origin)
    except Exception as error:  # whatever a decoder or decompressor says of content that it cannot read
        raise LogDamaged(place, batch.header.base_offset, f"a batch cannot be decoded: {error}") from error
