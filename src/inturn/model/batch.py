"""Batches: the unit that is stored, checked and moved. The same bytes from producer to log to consumer.

    header   fixed, little endian, see `_HEADER`
    payload  slot vector (one u16 per message), then the messages as msgpack, the latter compressed or not

Two checksums (xxh3-64). The payload's is the producer's and travels to the consumer. The header's is the log's:
it covers the offset and the payload's checksum, and is seeded by the partition, so that bytes left over from
another log never fit. Nothing is hashed twice, everything is covered.

A reader that wants some slots only, or some tags, is given batches in which the other messages are nil (`chosen`,
`tagged`), and members of shared groups are given parts of batches (`cut`); these exist on their way to the reader, and
are never stored.

`synced_end` is how far the log was known to be on disk when this batch was written. It tells a torn tail
(nothing after it was acknowledged) from damage in the middle (a later batch vouches for the damaged one).

How large the content of a zstd frame says that it is, from its first bytes: before anything is decompressed.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from inturn.model.errors import InvalidInput
from inturn.model.message import Message, Origin, Outgoing, TagFilter
from inturn.model.routing import SLOT_COUNT, SlotSet
from inturn.model.settings import MIB

MARK = b"\x28\xb5\x2f\xfd"
HEADER_BYTES_MAX = 18
_DICTIONARY_BYTES = (0, 1, 2, 4)
_SIZE_BYTES = (0, 2, 4, 8)


def content_bytes(frame: bytes | memoryview) -> int | None:
    """None if it does not say, or is no frame."""
    head = bytes(frame[:HEADER_BYTES_MAX])
    if not head.startswith(MARK) or len(head) <= len(MARK):
        return None
    descriptor = head[4]
    is_single = bool(descriptor & 0x20)
    kind = descriptor >> 6
    size = 1 if kind == 0 and is_single else _SIZE_BYTES[kind]
    at = 5 + (not is_single) + _DICTIONARY_BYTES[descriptor & 3]
    field = head[at : at + size]
    if not size or len(field) < size:
        return None
    return int.from_bytes(field, "little") + (256 if size == 2 else 0)


MAGIC = b"iT"
VERSION = 1
NO_COMPRESSION = 0
ZSTD = 1
CHOSEN = 2  # not compressed, and messages that are not for this reader are nil
_COMPRESSION_LEVEL = 3
_ZSTD_MISSING = "zstd-compressed batches need the extra: pip install 'inturn[zstd]'"

# magic 2, version 1, compression 1, payload length 4, count 4, route version 4, base offset 8, producer id 8,
# producer epoch 4, padding 4, first sequence 8, stored at 8, synced end 8, payload checksum 8, header checksum 8
_HEADER = struct.Struct("<2sBBIIIQQIIQQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
PAYLOAD_BYTES_MAX = 2**31 - 1
# A producer gathers less than 50 MB into a batch. What says that it is more was made to harm whoever reads it.
DECOMPRESSED_BYTES_MAX = 64 * MIB

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])
_chosen_decoder = msgspec.msgpack.Decoder(list[Message | None])
_contents_decoder = msgspec.msgpack.Decoder(list[Outgoing | None])
_raw_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


class _Tagged(msgspec.Struct, array_like=True, gc=False):
    """An Outgoing of which only the tags are looked at."""

    body: msgspec.Raw
    key: msgspec.Raw = msgspec.Raw()
    born_at_ms: msgspec.Raw = msgspec.Raw()
    tags: tuple[str, ...] = ()


_tagged_decoder = msgspec.msgpack.Decoder(list[_Tagged])


class Batch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Messages ready to be stored: what a producer hands to the log."""

    count: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    route_version: int
    compression: int
    checksum: int
    payload: bytes

    def header(self, base_offset: int, stored_at_ms: int, synced_end: int, seed: int) -> bytes:
        """The header this batch gets at its place in the log of the partition with this seed."""
        fields = _HEADER.pack(
            MAGIC,
            VERSION,
            self.compression,
            len(self.payload),
            self.count,
            self.route_version,
            base_offset,
            self.producer_id,
            self.producer_epoch,
            0,
            self.first_sequence,
            stored_at_ms,
            synced_end,
            self.checksum,
        )
        return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields, seed))


class BatchHeader(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A header whose checksum was right."""

    compression: int
    payload_bytes: int
    count: int
    route_version: int
    base_offset: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    stored_at_ms: int
    synced_end: int
    checksum: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def total_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


class StoredBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A batch as it stands in the log. The payload's checksum is checked by `decode`, at the reader."""

    header: BatchHeader
    payload: memoryview


def parse_header(data: bytes | memoryview, position: int, seed: int) -> BatchHeader | None:
    """The header at this position, or None if there is no whole and intact one."""
    if len(data) - position < HEADER_BYTES or data[position : position + 2] != MAGIC:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, position + _HEADER.size)
    if xxh3_64_intdigest(data[position : position + _HEADER.size], seed) != checksum:
        return None
    f = _HEADER.unpack_from(data, position)
    if f[1] != VERSION or f[4] == 0:
        return None
    return BatchHeader(f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[10], f[11], f[12], f[13])


def payload_checksum(payload: bytes | memoryview) -> int:
    return xxh3_64_intdigest(payload)


def partition_seed(name: str) -> int:
    """The seed of the header checksums in one partition's log."""
    return xxh3_64_intdigest(name.encode())


def encode(
    messages: Sequence[Outgoing],
    slots: array[int],
    *,
    producer_id: int = 0,
    producer_epoch: int = 0,
    first_sequence: int = 0,
    route_version: int = 1,
    compression: str | None = None,
) -> Batch:
    """Pack messages with their slots (`array("H")`, one per message)."""
    body = _encoder.encode(messages)
    if compression == "zstd":
        body = _compress(body)
    payload = _little_endian(slots).tobytes() + body
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidInput(
            f"a batch of {len(payload)} bytes is over the limit of {PAYLOAD_BYTES_MAX}; send less at once"
        )
    return Batch(
        len(messages),
        producer_id,
        producer_epoch,
        first_sequence,
        route_version,
        ZSTD if compression == "zstd" else NO_COMPRESSION,
        xxh3_64_intdigest(payload),
        payload,
    )


def is_intact(batch: StoredBatch) -> bool:
    """Whether the payload is what the producer sent."""
    header = batch.header
    return len(batch.payload) == header.payload_bytes and xxh3_64_intdigest(batch.payload) == header.checksum


def decode(batch: StoredBatch, origin: Origin) -> list[Message]:
    """The messages of an intact batch (see `is_intact`), each with its offset; those that were chosen, if any were.

    Raises InvalidInput for what no producer of ours would send: it is no msgpack, or too large when decompressed."""
    if batch.header.compression == CHOSEN:
        return _decode_chosen(batch, origin)
    messages = _decoded(_decoder, batch)
    offset = batch.header.base_offset
    for message in messages:
        message.offset = offset
        message.origin = origin
        offset += 1
    return messages


def _decode_chosen(batch: StoredBatch, origin: Origin) -> list[Message]:
    messages = []
    for offset, message in enumerate(_decoded(_chosen_decoder, batch), batch.header.base_offset):
        if message is not None:
            message.offset = offset
            message.origin = origin
            messages.append(message)
    return messages


def contents(batch: StoredBatch) -> list[Outgoing]:
    """What an intact batch stores, without places, which is quicker than `decode`. Where messages were left out
    (see `chosen`) there is None, which whoever asked for other slots does not look at."""
    return _decoded(_contents_decoder, batch)  # type: ignore[arg-type]


_Decoded = TypeVar("_Decoded")


def _decoded(decoder: msgspec.msgpack.Decoder[list[_Decoded]], batch: StoredBatch) -> list[_Decoded]:
    try:
        messages = decoder.decode(_body(batch))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(f"a batch that cannot be decoded: {error}") from None
    if len(messages) != batch.header.count:
        raise InvalidInput(f"a batch of {batch.header.count} messages that has {len(messages)}")
    return messages


def chosen(batch: StoredBatch, slots: SlotSet) -> StoredBatch:
    """The same batch with nil for messages of other slots. A damaged one stays as it is, for its reader to find, and so
    does one that cannot be looked into: its content is nonsense, or zstd is not installed."""
    if not is_intact(batch):
        return batch
    wanted, vector = slots.flags, slots_of(batch)
    if max(vector) >= SLOT_COUNT:  # an old log may have such: each has to be somebody's, and nobody else's
        vector = array("H", [slot % SLOT_COUNT for slot in vector])
    try:
        return _with_nil(batch, _decoded(_raw_decoder, batch), [wanted[slot] for slot in vector])
    except InvalidInput:
        return batch


def tagged(batch: StoredBatch, tags: TagFilter) -> tuple[StoredBatch | None, Sequence[int]]:
    """The batch with nil for messages whose tags are not wanted, or None if none is; and the offsets of those.

    A damaged batch stays as it is, for its reader to find: what its tags were, nobody knows.
    """
    header = batch.header
    if not is_intact(batch):
        return batch, ()
    try:
        body = bytes(_body(batch))
        if not tags.may_want(body):
            return None, range(header.base_offset, header.next_offset)
        wanted = [tags.wants(one.tags) for one in _tagged_decoder.decode(body)]
        if len(wanted) != header.count:
            return batch, ()
        unwanted = [offset for offset, is_wanted in enumerate(wanted, header.base_offset) if not is_wanted]
        if not unwanted:
            return batch, ()
        if len(unwanted) == header.count:
            return None, range(header.base_offset, header.next_offset)
        return _with_nil(batch, _raw_decoder.decode(body), wanted), unwanted
    except Exception:  # whatever a decoder or decompressor says of content that it cannot read
        return batch, ()


def _with_nil(batch: StoredBatch, messages: Sequence[msgspec.Raw], wanted: Sequence[int]) -> StoredBatch:
    """The same batch with those of its messages that are wanted, and a checksum of its own."""
    header = batch.header
    chosen_body = _encoder.encode([one if is_wanted else None for one, is_wanted in zip(messages, wanted, strict=True)])
    payload = bytes(batch.payload[: 2 * header.count]) + chosen_body
    header = msgspec.structs.replace(
        header, compression=CHOSEN, payload_bytes=len(payload), checksum=xxh3_64_intdigest(payload)
    )
    return StoredBatch(header, memoryview(payload))


def cut(batch: StoredBatch, offsets: Sequence[int]) -> StoredBatch:
    """The part of a batch that has these offsets, in rising order, with nil for others between them. A damaged one
    stays as it is, for its reader to find."""
    header = batch.header
    if len(offsets) == header.count or not is_intact(batch):
        return batch
    try:
        messages = _decoded(_raw_decoder, batch)
    except InvalidInput:
        return batch
    first, last = offsets[0] - header.base_offset, offsets[-1] - header.base_offset
    kept: list[msgspec.Raw | None] = [None] * (last - first + 1)
    for offset in offsets:
        kept[offset - offsets[0]] = messages[offset - header.base_offset]
    payload = bytes(batch.payload[2 * first : 2 * (last + 1)]) + _encoder.encode(kept)
    header = msgspec.structs.replace(
        header,
        compression=CHOSEN,
        payload_bytes=len(payload),
        count=len(kept),
        base_offset=offsets[0],
        checksum=xxh3_64_intdigest(payload),
    )
    return StoredBatch(header, memoryview(payload))


def _body(batch: StoredBatch) -> memoryview | bytes:
    body = memoryview(batch.payload)[2 * batch.header.count :]
    return _decompress(body) if batch.header.compression == ZSTD else body


def content_bytes_of(batch: StoredBatch) -> int:
    """How large its messages are together when they are not compressed, as it says itself: nothing is decompressed."""
    body = memoryview(batch.payload)[2 * batch.header.count :]
    size_bytes = content_bytes(body) if batch.header.compression == ZSTD else None
    return len(body) if size_bytes is None else size_bytes


def slots_of(batch: StoredBatch) -> array[int]:
    """The slot of each message, without decoding any."""
    slots = array("H", bytes(batch.payload[: 2 * batch.header.count]))
    return _little_endian(slots)


def _little_endian(slots: array[int]) -> array[int]:
    if sys.byteorder == "big":  # pragma: no cover
        slots = array("H", slots)
        slots.byteswap()
    return slots


def _compress(body: bytes) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise InvalidInput(_ZSTD_MISSING) from error
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(body)


def _decompress(body: memoryview) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise InvalidInput(_ZSTD_MISSING) from error
    size_bytes = content_bytes(body)
    if size_bytes is not None and size_bytes > DECOMPRESSED_BYTES_MAX:
        raise InvalidInput(
            f"a compressed batch says that it has {size_bytes} bytes; the limit is {DECOMPRESSED_BYTES_MAX}, and no "
            "producer of inturn sends as much: find out who may produce here"
        )
    try:
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=DECOMPRESSED_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"a compressed batch that is damaged, or larger than it says: {error}") from None
