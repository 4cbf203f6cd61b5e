"""Batches made to harm readers: small on the wire, huge in memory, or with false headers."""

from __future__ import annotations

import resource
from array import array
from pathlib import Path

import msgspec
import pytest
import zstandard

from inturn.errors import InvalidInput, LogDamaged
from inturn.model.batch import (
    DECOMPRESSED_BYTES_MAX,
    ZSTD,
    Batch,
    BatchHeader,
    StoredBatch,
    chosen,
    content_bytes,
    decode,
    encode,
    payload_checksum,
)
from inturn.model.message import Origin, Outgoing
from inturn.model.routing import SlotSet
from inturn.protocol.codec import VERSIONS
from inturn.protocol.commands import Append, Appended, Hello
from tests.contract.bed import Seen, eventually, quick
from tests.security.conftest import Serve

ORIGIN = Origin("orders", 0)


def bomb(size_bytes: int, *, says_size: bool = True) -> bytes:
    """Zeros, compressed a thousandfold and more."""
    compressor = zstandard.ZstdCompressor(level=1)
    made = compressor.compressobj(size=size_bytes) if says_size else compressor.compressobj()
    parts = [made.compress(bytes(1 << 20)) for _ in range(size_bytes >> 20)]
    return b"".join(parts) + made.flush()


def batch_of(body: bytes, count: int = 1) -> Batch:
    payload = bytes(2 * count) + body
    return Batch(count, 0, 0, 0, 1, ZSTD, payload_checksum(payload), payload)


def stored(batch: Batch) -> StoredBatch:
    header = BatchHeader(ZSTD, len(batch.payload), batch.count, 1, 0, 0, 0, 0, 0, 0, batch.checksum)
    return StoredBatch(header, memoryview(batch.payload))


@pytest.mark.parametrize("says_size", [True, False])
def test_a_bomb_gives_an_error_and_no_memory_is_taken(says_size: bool) -> None:
    body = bomb(256 << 20, says_size=says_size)
    assert len(body) < 64 << 10
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match=r"the limit is|larger than declared"):
        decode(stored(batch_of(body)), ORIGIN)
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) << 10
    assert grown_bytes < DECOMPRESSED_BYTES_MAX + (16 << 20)


def test_a_size_that_is_a_lie_is_an_error() -> None:
    body = bytearray(bomb(128 << 20))
    small = zstandard.ZstdCompressor().compress(bytes(100_000))
    assert content_bytes(bytes(body)) == 128 << 20
    lie = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(100_000))
    at = lie.index(content_bytes(small).to_bytes(4, "little"))  # type: ignore[union-attr]
    lie = lie[:at] + (50).to_bytes(4, "little") + lie[at + 4 :]
    assert content_bytes(lie) == 50
    with pytest.raises(InvalidInput):
        decode(stored(batch_of(lie)), ORIGIN)


@pytest.mark.parametrize("size_bytes", [0, 1, 255, 256, 300, 65_535, 65_791, 65_792, 1_000_000])
def test_the_size_of_a_frame_is_read_as_zstd_writes_it(size_bytes: int) -> None:
    compressed = zstandard.ZstdCompressor().compress(bytes(size_bytes))
    assert content_bytes(compressed) == size_bytes == zstandard.frame_content_size(compressed)
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size_bytes))
    assert content_bytes(unsaid) is None


@pytest.mark.parametrize("data", [b"", b"\x28\xb5\x2f", b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\xff", b"nonsense" * 4])
def test_what_is_no_frame_has_no_size(data: bytes) -> None:
    assert content_bytes(data) is None


def test_what_a_producer_sends_is_taken() -> None:
    batch = encode([Outgoing(bytes(1_000_000))] * 20, array("H", [0] * 20), compression="zstd")
    assert len(decode(stored(batch), ORIGIN)) == 20


def test_more_messages_than_it_says_are_an_error() -> None:
    """The extra messages would get the offsets of other messages."""
    body = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode([Outgoing(b"a"), Outgoing(b"b")]))
    with pytest.raises(InvalidInput, match="a batch declares 1 messages, and has 2"):
        decode(stored(batch_of(body)), ORIGIN)


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(bomb(128 << 20)),
        batch_of(zstandard.ZstdCompressor().compress(b"\xc1")),
        batch_of(zstandard.ZstdCompressor().compress(msgspec.msgpack.encode([None, None]))),
    ],
    ids=["bomb", "nonsense", "count"],
)
def test_a_server_that_chooses_slots_is_not_harmed(batch: Batch) -> None:
    """Choosing slots is the only place where a server decodes a batch. An unreadable batch is passed on unchanged."""
    assert chosen(stored(batch), SlotSet.of([1])) == stored(batch)


def test_a_bomb_is_not_stored(serve: Serve) -> None:
    guarded = serve("shop")
    guarded.connect("shop").create_subject("orders", partitions=1)
    with guarded.raw() as raw:
        raw.ask(Hello(VERSIONS, "x", guarded.tokens["shop"]))
        for body in (bomb(128 << 20), bomb(2 << 20, says_size=False)):
            assert isinstance(raw.ask(Append("orders", 0, batch_of(body))), InvalidInput)
        good = encode([Outgoing(b"a", b"k")], array("H", [0]), compression="zstd")
        assert isinstance(raw.ask(Append("orders", 0, good)), Appended)


def test_what_nobody_can_decode_is_told_by_its_place(serve: Serve, quiet: None) -> None:
    """A principal with `produce` can store nonsense. Readers and consumers report the position, and are not harmed."""
    guarded = serve("shop")
    shop = guarded.connect("shop")
    shop.create_subject("orders", partitions=1)
    with guarded.raw() as raw:
        raw.ask(Hello(VERSIONS, "x", guarded.tokens["shop"]))
        good = encode([Outgoing(b"a", b"k")], array("H", [0]))
        nonsense = batch_of(zstandard.ZstdCompressor().compress(b"\xc1" * 10))
        assert [type(raw.ask(Append("orders", 0, one))) for one in (good, nonsense)] == [Appended, Appended]
    reader = shop.reader("orders")
    assert [one.body for one in reader.read(0)] == [b"a"]
    with pytest.raises(LogDamaged, match="damaged at offset 1"):
        reader.read(0)
    seen = Seen()
    with shop.consumer("orders", "billing", seen, settings=quick()) as consumer:
        seen.wait_for(1)
        eventually(lambda: any("offset 1" in one for one in consumer.statistics().errors), "it says where")
    assert seen.bodies == [b"a"]


def test_names_never_become_paths(serve: Serve) -> None:
    """Files on disk are named by ids from the server."""
    guarded = serve("shop")
    shop = guarded.connect("shop")
    for name in ("../../outside", "a/b", "..", "a\x00b", "/etc/passwd", "%dead%g%s"):
        with pytest.raises(InvalidInput):
            shop.create_subject(name)
    shop.create_subject("a.b", partitions=1)
    names = [path.name for path in Path(guarded.folder, "data").rglob("*")]
    assert not any("a.b" in name for name in names)
