"""P2, M3: a key leads to a slot, a slot to exactly one partition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import xxhash

from inturn.model.errors import InvalidInput
from inturn.model.routing import (
    PARTITION_COUNT_MAX,
    SLOT_COUNT,
    Partition,
    Route,
    SlotRange,
    even_ranges,
    key_bytes,
    slot_of,
)

# Computed once with xxh64, seed 42, mod 1024. The values must never change, or keys would change partitions.
GOLDEN = {
    b"": 772,
    b"a": 204,
    b"order-1": 515,
    b"customer-42": 827,
    "schlüssel".encode(): 951,
    b"\x00\xff": 34,
}


def some_route(ranges: tuple[SlotRange, ...], partitions: int = 2) -> Route:
    return Route("orders", 1, tuple(Partition("local", f"p{index}") for index in range(partitions)), ranges)


@pytest.mark.parametrize(("key", "slot"), GOLDEN.items())
def test_the_slot_of_a_key_never_changes(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


def test_a_slot_is_the_hash_that_spark_computes_too() -> None:
    for number in range(2000):
        key = f"key-{number}".encode()
        assert slot_of(key) == xxhash.xxh64_intdigest(key, 42) % 1024


def test_text_and_its_utf8_bytes_are_the_same_key() -> None:
    assert key_bytes("schlüssel") == "schlüssel".encode()
    assert key_bytes(b"raw") == b"raw"


def test_keys_are_spread_over_all_slots() -> None:
    seen = {slot_of(f"{number}".encode()) for number in range(20_000)}
    assert seen == set(range(SLOT_COUNT))


def test_every_slot_belongs_to_exactly_one_partition_whatever_their_count() -> None:
    """M3, for every possible count."""
    for count in range(1, PARTITION_COUNT_MAX + 1):
        ranges = even_ranges(count)
        edges = [(one.start, one.stop) for one in ranges]
        assert edges[0][0] == 0
        assert edges[-1][1] == SLOT_COUNT
        assert all(before[1] == after[0] for before, after in pairwise(edges))
        sizes = {stop - start for start, stop in edges}
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert [one.partition for one in ranges] == list(range(count))


def test_two_partitions_have_the_halves() -> None:
    """M3: `[0, 512) → #1, [512, 1024) → #2`."""
    assert even_ranges(2) == (SlotRange(0, 512, 0), SlotRange(512, 1024, 1))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 1024])
def test_a_route_knows_the_partition_of_every_slot(count: int) -> None:
    route = some_route(even_ranges(count), count)
    for one in route.ranges:
        assert set(route.by_slot[one.start : one.stop]) == {one.partition}
    assert len(route.by_slot) == SLOT_COUNT


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ((SlotRange(0, 512, 0),), "slot 512 belongs to no partition"),
        ((SlotRange(0, 513, 0), SlotRange(512, 1024, 1)), "slot 512 belongs to two"),
        ((SlotRange(0, 512, 0), SlotRange(513, 1024, 1)), "slot 512 belongs to no"),
        ((SlotRange(0, 1025, 0),), "outside"),
        ((SlotRange(-1, 1024, 0),), "outside"),
        ((SlotRange(0, 1024, 2),), "outside"),
        ((SlotRange(0, 1024, -1),), "outside"),
        ((SlotRange(5, 5, 0), SlotRange(0, 1024, 1)), "outside"),
        ((), "slot 0 belongs to no"),
    ],
)
def test_a_route_that_leaves_out_or_doubles_a_slot_cannot_be_made(ranges: tuple[SlotRange, ...], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        some_route(ranges)


def test_several_ranges_may_lead_to_one_partition() -> None:
    route = some_route((SlotRange(0, 10, 0), SlotRange(10, 20, 1), SlotRange(20, 1024, 0)))
    assert (route.by_slot[9], route.by_slot[10], route.by_slot[20]) == (0, 1, 0)


def test_a_partition_is_written_as_group_and_name() -> None:
    assert str(Partition("local", "p7")) == "local/p7"
