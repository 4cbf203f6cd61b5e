"""Batches: the unit of storing, checking and sending. A batch keeps the same bytes from producer to log to consumer.

    header   fixed, little endian, see `_HEADER`
    payload  slot vector (one u16 per message), then the messages as msgpack; the messages may be compressed

A batch has two checksums (xxh3-64). The payload's checksum is computed by the producer and verified by the consumer.
The header's checksum is computed by the log. It covers the offset and the payload's checksum, and is seeded by the
partition: bytes left over from a different log never fit. All bytes are covered, and no byte is hashed twice.

A reader that wants only some slots or some tags receives batches with nil in place of the other messages (`chosen`,
`tagged`). Members of shared groups receive parts of batches (`cut`). Such batches are made for the reader and are
never stored.

`synced_end` is the offset up to which the log was known to be on disk when the batch was written. Recovery uses
`synced_end` to tell a torn tail (no later message was acknowledged) from damage in the middle (a later batch proves
that the damaged batch was synced).

The size of a zstd frame's content is read from the frame's first bytes, before decompression.
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

# A zstd frame: its first bytes, and the sizes of its header's fields.
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
HEADER_BYTES_MAX = 18
_DICTIONARY_BYTES = (0, 1, 2, 4)
_SIZE_BYTES = (0, 2, 4, 8)


def content_bytes(frame: bytes | memoryview) -> int | None:
    """The content size that a zstd frame declares; None for a frame without a size, or for other bytes."""
    head = bytes(frame[:HEADER_BYTES_MAX])
    if not head.startswith(ZSTD_MAGIC) or len(head) <= len(ZSTD_MAGIC):
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
CHOSEN = 2  # not compressed; messages for other readers are nil
_COMPRESSION_LEVEL = 3
_ZSTD_MISSING = "zstd-compressed batches need the extra: pip install 'inturn[zstd]'"

# magic 2, version 1, compression 1, payload length 4, count 4, route version 4, base offset 8, producer id 8,
# producer epoch 4, padding 4, first sequence 8, stored at 8, synced end 8, payload checksum 8, header checksum 8
_HEADER = struct.Struct("<2sBBIIIQQIIQQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
PAYLOAD_BYTES_MAX = 2**31 - 1
# A producer gathers less than 50 MB into a batch. A batch that declares more was made to harm its reader.
DECOMPRESSED_BYTES_MAX = 64 * MIB

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])
_chosen_decoder = msgspec.msgpack.Decoder(list[Message | None])
_contents_decoder = msgspec.msgpack.Decoder(list[Outgoing | None])
_raw_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


class _Tagged(msgspec.Struct, array_like=True, gc=False):
    """An Outgoing of which only the tags are decoded."""

    body: msgspec.Raw
    key: msgspec.Raw = msgspec.Raw()
    born_at_ms: msgspec.Raw = msgspec.Raw()
    tags: tuple[str, ...] = ()


_tagged_decoder = msgspec.msgpack.Decoder(list[_Tagged])


class Batch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Messages ready to be stored, as sent by a producer."""

    count: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    route_version: int
    compression: int
    checksum: int
    payload: bytes

    def header(self, base_offset: int, stored_at_ms: int, synced_end: int, seed: int) -> bytes:
        """The header of the batch for an offset in the log of the partition with this seed."""
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
    """A header with a correct checksum."""

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
    """A batch as stored in the log. The reader verifies the payload's checksum with `is_intact`."""

    header: BatchHeader
    payload: memoryview


def parse_header(data: bytes | memoryview, position: int, seed: int) -> BatchHeader | None:
    """The header at this position, or None if no whole and intact header is there."""
    if len(data) - position < HEADER_BYTES or data[position : position + 2] != MAGIC:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, position + _HEADER.size)
    if xxh3_64_intdigest(data[position : position + _HEADER.size], seed) != checksum:
        return None
    f = _HEADER.unpack_from(data, position)
    if f[1] != VERSION or f[4] == 0:
        return None
    # By position, in the order of the fields without the padding f[9]: called for every batch.
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
            f"a batch of {len(payload)} bytes is over the limit of {PAYLOAD_BYTES_MAX}; send fewer messages at once"
        )
    return Batch(
        count=len(messages),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        first_sequence=first_sequence,
        route_version=route_version,
        compression=ZSTD if compression == "zstd" else NO_COMPRESSION,
        checksum=xxh3_64_intdigest(payload),
        payload=payload,
    )


def is_intact(batch: StoredBatch) -> bool:
    """Whether the payload is unchanged since the producer sent the batch."""
    header = batch.header
    return len(batch.payload) == header.payload_bytes and xxh3_64_intdigest(batch.payload) == header.checksum


def decode(batch: StoredBatch, origin: Origin) -> list[Message]:
    """The messages of an intact batch (see `is_intact`) with their offsets. Messages that are nil are left out.

    Raises InvalidInput for content that no inturn producer sends: no msgpack, or too large after decompression.
    """
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
    """The messages of an intact batch without subject and offset: faster than `decode`.

    The result has None in place of messages that `chosen` left out. Callers skip the slots of such messages.
    """
    return _decoded(_contents_decoder, batch)  # type: ignore[arg-type]


_Decoded = TypeVar("_Decoded")


def _decoded(decoder: msgspec.msgpack.Decoder[list[_Decoded]], batch: StoredBatch) -> list[_Decoded]:
    try:
        messages = decoder.decode(_body(batch))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(f"a batch that cannot be decoded: {error}") from None
    if len(messages) != batch.header.count:
        raise InvalidInput(f"a batch declares {batch.header.count} messages, and has {len(messages)}")
    return messages


def chosen(batch: StoredBatch, slots: SlotSet) -> StoredBatch:
    """The batch with nil in place of messages of other slots.

    A damaged batch is returned unchanged: the reader finds the damage. A batch that cannot be decoded (invalid content,
    or zstd is not installed) is returned unchanged, too.
    """
    if not is_intact(batch):
        return batch
    wanted, vector = slots.flags, slots_of(batch)
    if max(vector) >= SLOT_COUNT:  # possible in an old log: every message must belong to exactly one slot
        vector = array("H", [slot % SLOT_COUNT for slot in vector])
    try:
        return _with_nil(batch, _decoded(_raw_decoder, batch), [wanted[slot] for slot in vector])
    except InvalidInput:
        return batch


def tagged(batch: StoredBatch, tags: TagFilter) -> tuple[StoredBatch | None, Sequence[int]]:
    """The batch with nil in place of messages that the tags filter out, and the offsets of these messages.

    The batch is None if the tags filter out all messages. A damaged batch is returned unchanged, because its tags
    cannot be read: the reader finds the damage.
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
        filtered_out = [offset for offset, is_wanted in enumerate(wanted, header.base_offset) if not is_wanted]
        if not filtered_out:
            return batch, ()
        if len(filtered_out) == header.count:
            return None, range(header.base_offset, header.next_offset)
        return _with_nil(batch, _raw_decoder.decode(body), wanted), filtered_out
    except Exception:  # any error of a decoder or decompressor on content that cannot be read
        return batch, ()


def _with_nil(batch: StoredBatch, messages: Sequence[msgspec.Raw], wanted: Sequence[int]) -> StoredBatch:
    """The batch with nil in place of messages that are not wanted, and with a new checksum."""
    header = batch.header
    chosen_body = _encoder.encode([one if is_wanted else None for one, is_wanted in zip(messages, wanted, strict=True)])
    payload = bytes(batch.payload[: 2 * header.count]) + chosen_body
    header = msgspec.structs.replace(
        header, compression=CHOSEN, payload_bytes=len(payload), checksum=xxh3_64_intdigest(payload)
    )
    return StoredBatch(header, memoryview(payload))


def cut(batch: StoredBatch, offsets: Sequence[int]) -> StoredBatch:
    """The part of a batch that has these offsets (in rising order), with nil for other offsets between them.

    A damaged batch is returned unchanged: the reader finds the damage.
    """
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
    """The size of all messages before compression, as the batch declares the size. Decompresses no data."""
    body = memoryview(batch.payload)[2 * batch.header.count :]
    size_bytes = content_bytes(body) if batch.header.compression == ZSTD else None
    return len(body) if size_bytes is None else size_bytes


def slots_of(batch: StoredBatch) -> array[int]:
    """The slot of every message, without decoding a message."""
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
            f"a compressed batch declares {size_bytes} bytes; the limit is {DECOMPRESSED_BYTES_MAX}, and no "
            "producer of inturn sends as much; check which clients may produce here"
        )
    try:
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=DECOMPRESSED_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"a compressed batch is damaged, or larger than declared: {error}") from None
