"""Batches: decoding returns the encoded messages, and every flipped byte is found."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inturn.model.batch import (
    CHOSEN,
    HEADER_BYTES,
    BatchHeader,
    StoredBatch,
    chosen,
    decode,
    encode,
    is_intact,
    parse_header,
    partition_seed,
    payload_checksum,
    slots_of,
)
from inturn.model.message import Message, Origin, Outgoing
from inturn.model.routing import SLOT_COUNT, SlotSet

SEED = partition_seed("p1")
ORIGIN = Origin("orders", 3)


def stored(messages: list[Outgoing], slots: list[int], compression: str | None = None) -> tuple[bytes, bytes]:
    batch = encode(
        messages,
        array("H", slots),
        producer_id=5,
        producer_epoch=2,
        first_sequence=77,
        route_version=9,
        compression=compression,
    )
    return batch.header(100, 1_700_000_000_000, 90, SEED), batch.payload


def parsed(header: bytes) -> BatchHeader:
    found = parse_header(header, 0, SEED)
    assert found is not None
    return found


outgoing = st.builds(
    Outgoing,
    body=st.binary(max_size=50),
    key=st.none() | st.binary(max_size=10),
    born_at_ms=st.integers(0, 2**62),
    tags=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    properties=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    message_id=st.none() | st.text(max_size=10),
)


@given(
    messages=st.lists(st.tuples(outgoing, st.integers(0, 1023)), min_size=1, max_size=20),
    compression=st.sampled_from([None, "zstd"]),
)
def test_what_is_encoded_is_decoded(messages: list[tuple[Outgoing, int]], compression: str | None) -> None:
    sent = [message for message, _ in messages]
    slots = [slot for _, slot in messages]
    header, payload = stored(sent, slots, compression)
    batch = StoredBatch(parsed(header), memoryview(payload))
    assert is_intact(batch)
    assert list(slots_of(batch)) == slots
    got = decode(batch, ORIGIN)
    for number, (before, after) in enumerate(zip(sent, got, strict=True)):
        fields = ("body", "key", "born_at_ms", "tags", "properties", "message_id")
        assert [getattr(after, name) for name in fields] == [getattr(before, name) for name in fields]
        assert (after.offset, after.subject, after.partition) == (100 + number, "orders", 3)


def test_the_header_tells_what_it_was_given() -> None:
    header, payload = stored([Outgoing(b"a"), Outgoing(b"b")], [1, 2])
    found = parsed(header)
    assert (found.base_offset, found.next_offset, found.count) == (100, 102, 2)
    assert (found.producer_id, found.producer_epoch, found.first_sequence) == (5, 2, 77)
    assert (found.route_version, found.stored_at_ms, found.synced_end) == (9, 1_700_000_000_000, 90)
    assert found.total_bytes == len(header) + len(payload) == HEADER_BYTES + len(payload)


def test_every_flipped_byte_of_a_header_is_noticed() -> None:
    header, _ = stored([Outgoing(b"a")], [1])
    for place in range(len(header)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(header)
            damaged[place] ^= flip
            assert parse_header(bytes(damaged), 0, SEED) is None, f"byte {place}"


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_flipped_byte_of_a_payload_is_noticed(compression: str | None) -> None:
    header, payload = stored([Outgoing(b"hello" * 5, b"key"), Outgoing(b"")], [1, 2], compression)
    found = parsed(header)
    for place in range(len(payload)):
        damaged = bytearray(payload)
        damaged[place] ^= 0x01
        assert not is_intact(StoredBatch(found, memoryview(bytes(damaged)))), f"byte {place}"


def test_a_payload_that_was_cut_or_padded_is_noticed() -> None:
    header, payload = stored([Outgoing(b"hello")], [1])
    found = parsed(header)
    for length in range(len(payload)):
        assert not is_intact(StoredBatch(found, memoryview(payload[:length])))
        assert not is_intact(StoredBatch(found, memoryview(payload[:length] + bytes(len(payload) - length))))
    assert not is_intact(StoredBatch(found, memoryview(payload + b"\x00")))


def test_a_header_that_was_cut_is_no_header() -> None:
    header, _ = stored([Outgoing(b"a")], [1])
    assert all(parse_header(header[:length], 0, SEED) is None for length in range(len(header)))
    assert parse_header(bytes(HEADER_BYTES), 0, SEED) is None


def test_a_header_of_another_partition_does_not_fit() -> None:
    header, _ = stored([Outgoing(b"a")], [1])
    assert parse_header(header, 0, partition_seed("p2")) is None


def test_a_header_is_found_at_its_position() -> None:
    header, _ = stored([Outgoing(b"a")], [1])
    assert parse_header(memoryview(b"xxx" + header), 3, SEED) == parsed(header)


def test_an_old_message_without_the_newer_fields_can_be_read() -> None:
    import msgspec

    old = msgspec.msgpack.encode([[b"body"]])
    payload = array("H", [1]).tobytes() + old
    header = BatchHeader(0, len(payload), 1, 1, 0, 0, 0, 0, 0, 0, 0)
    (message,) = decode(StoredBatch(header, memoryview(payload)), ORIGIN)
    assert (message.body, message.key, message.tags, message.properties) == (b"body", None, (), {})


def test_a_message_has_sensible_defaults() -> None:
    message = Message(b"body")
    assert (message.key, message.tags, message.properties, message.message_id) == (None, (), {}, None)
    assert (message.offset, message.subject, message.partition) == (-1, "", -1)
    assert message.key_text is None


def test_messages_do_not_share_their_properties() -> None:
    one, other = Message(b""), Message(b"")
    one.properties["a"] = "b"
    assert other.properties == {}


def test_a_message_is_named_by_its_id_or_else_its_place() -> None:
    message = Message(b"", offset=12, origin=ORIGIN)
    assert message.id == "orders/3@12"
    message.message_id = "mine"
    assert message.id == "mine"


def test_a_key_that_is_no_text_can_be_shown() -> None:
    assert Message(b"", "ä".encode()).key_text == "ä"
    assert Message(b"", b"\xff").key_text == "\\xff"


# Choosing by slot


def whole(messages: list[tuple[Outgoing, int]], compression: str | None = None) -> StoredBatch:
    header, payload = stored([one for one, _ in messages], [slot for _, slot in messages], compression)
    return StoredBatch(parsed(header), memoryview(payload))


@given(
    messages=st.lists(st.tuples(outgoing, st.integers(0, 1023)), min_size=1, max_size=20),
    wanted=st.sets(st.integers(0, 1023)),
    compression=st.sampled_from([None, "zstd"]),
)
def test_what_is_chosen_is_as_it_was_and_nothing_else_is_there(
    messages: list[tuple[Outgoing, int]], wanted: set[int], compression: str | None
) -> None:
    wanted |= {slot for _, slot in messages[::2]}
    batch = whole(messages, compression)
    picked = chosen(batch, SlotSet.of(wanted))
    assert is_intact(picked)
    assert picked.header.compression == CHOSEN
    assert decode(picked, ORIGIN) == [
        message for message, (_, slot) in zip(decode(batch, ORIGIN), messages, strict=True) if slot in wanted
    ]
    assert list(slots_of(picked)) == [slot for _, slot in messages]
    same = ("base_offset", "count", "producer_id", "producer_epoch", "first_sequence", "stored_at_ms")
    assert all(getattr(picked.header, name) == getattr(batch.header, name) for name in same)


def test_choosing_leaves_the_batch_itself_alone() -> None:
    batch = whole([(Outgoing(b"a"), 1), (Outgoing(b"b"), 2)])
    before = bytes(batch.payload)
    chosen(batch, SlotSet.of([2]))
    assert bytes(batch.payload) == before
    assert is_intact(batch)


def test_a_message_whose_slot_is_none_goes_to_one_of_all_readers_and_to_no_other() -> None:
    """P2, S3: no producer sends such a message, but a log may contain such a message.

    Whole batches would go to all readers.
    """
    batch = whole([(Outgoing(b"a"), 1), (Outgoing(b"b"), 5000), (Outgoing(b"c"), 65_535)])
    readers = [SlotSet.of(range(start, SLOT_COUNT, 4)) for start in range(4)]
    picked = [[one.body for one in decode(chosen(batch, slots), ORIGIN)] for slots in readers]
    assert sorted(body for bodies in picked for body in bodies) == [b"a", b"b", b"c"]


def test_nothing_may_be_chosen_of_a_batch() -> None:
    picked = chosen(whole([(Outgoing(b"a"), 1)]), SlotSet.of([2]))
    assert decode(picked, ORIGIN) == []
    assert picked.header.next_offset == 101


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_damaged_batch_stays_as_it_is_for_its_reader_to_find(compression: str | None) -> None:
    batch = whole([(Outgoing(b"a"), 1), (Outgoing(b"b"), 2)], compression)
    for place in range(len(batch.payload)):
        payload = bytearray(batch.payload)
        payload[place] ^= 0x10
        damaged = StoredBatch(batch.header, memoryview(bytes(payload)))
        assert chosen(damaged, SlotSet.of([1])) is damaged


def test_a_batch_that_cannot_be_read_stays_as_it_is() -> None:
    payload = bytes(2) + b"\xc1 not msgpack"
    header = BatchHeader(0, len(payload), 1, 1, 100, 0, 0, 0, 0, 0, payload_checksum(payload))
    batch = StoredBatch(header, memoryview(payload))
    assert is_intact(batch)
    assert chosen(batch, SlotSet.of([1])) is batch
