"""C11: parking lots. Messages are in order, every message once. A key is free only when the lot is empty."""

from __future__ import annotations

from itertools import count

import pytest

from inturn.model.errors import InvalidInput
from inturn.protocol.commands import Lot, LotChange, ParkedMessage, Progress
from inturn.store import parking_lots as lots_module
from inturn.store.database import Database
from inturn.store.groups import Groups
from inturn.store.leases import ProgressRows
from inturn.store.parking_lots import REASON_LENGTH_MAX, ParkingLotRow, ParkingLots

_numbers = count(1)


def change(database: Database, group_id: int, *changes: LotChange, partition: int = 0, now_ms: int = 1) -> None:
    progress = Progress(partition, 1, 0, next(_numbers), lots=changes)
    assert ProgressRows(database).store(group_id, [progress], now_ms)


def park(database: Database, group_id: int, key: bytes, *offsets: int, partition: int = 0, now_ms: int = 1) -> None:
    added = tuple(ParkedMessage(partition, offset, b"m%d" % offset) for offset in offsets)
    change(database, group_id, LotChange(key, "parked", added=added), partition=partition, now_ms=now_ms)


def parked(database: Database, group_id: int, key: bytes = b"k", partition: int = 0) -> list[int]:
    content = ParkingLots(database).read(group_id, partition, key, 0, 1 << 20)
    assert content.is_end
    return [one.offset for one in content.messages]


def test_messages_stay_in_the_order_they_were_added(database: Database, group_id: int) -> None:
    park(database, group_id, b"k", 5, 3)
    park(database, group_id, b"other", 4)
    park(database, group_id, b"k", 9, 7)
    assert parked(database, group_id) == [5, 3, 9, 7]
    content = ParkingLots(database).read(group_id, 0, b"k", 0, 1 << 20)
    assert [one.content for one in content.messages] == [b"m5", b"m3", b"m9", b"m7"]
    positions = [one.position for one in content.messages]
    assert positions == sorted(set(positions))


def test_a_message_that_is_there_already_stays_where_it_is(database: Database, group_id: int) -> None:
    park(database, group_id, b"k", 1, 2)
    park(database, group_id, b"k", 3, 1, 2, 4, 4)
    assert parked(database, group_id) == [1, 2, 3, 4]
    park(database, group_id, b"another key", 1)
    assert parked(database, group_id, b"another key") == []


def test_the_same_offset_of_another_partition_or_group_is_another_message(database: Database, group_id: int) -> None:
    other = Groups(database).create("orders", "shipping", "first", [0, 0, 0], 1)
    park(database, group_id, b"k", 1)
    park(database, group_id, b"k", 1, partition=1)
    park(database, other, b"k", 1)
    assert parked(database, group_id) == parked(database, group_id, partition=1) == parked(database, other) == [1]


def test_removing_takes_from_this_lot_only(database: Database, group_id: int) -> None:
    park(database, group_id, b"k", 1, 2, 3)
    park(database, group_id, b"other", 4)
    change(database, group_id, LotChange(b"k", "resuming", removed=((0, 1), (0, 3), (0, 4), (1, 2), (0, 99))))
    assert parked(database, group_id) == [2]
    assert parked(database, group_id, b"other") == [4]


def test_newer_messages_go_to_the_tail_while_the_head_is_run(database: Database, group_id: int) -> None:
    park(database, group_id, b"k", 1, 2)
    added = (ParkedMessage(0, 8, b"new"),)
    change(database, group_id, LotChange(b"k", "resuming", added=added, removed=((0, 1),)))
    assert parked(database, group_id) == [2, 8]
    assert ParkingLots(database).of_partition(group_id, 0) == (Lot(b"k", "resuming"),)


def test_a_key_is_free_in_the_commit_that_removes_its_last_message(database: Database, group_id: int) -> None:
    park(database, group_id, b"k", 1, 2)
    change(database, group_id, LotChange(b"k", "free", removed=((0, 1), (0, 2))))
    assert ParkingLots(database).of_group(group_id) == []
    assert not ParkingLots(database).is_there(group_id, 0, b"k")
    change(database, group_id, LotChange(b"k", "free"))  # the key is free already


@pytest.mark.parametrize("adds", [False, True])
def test_a_key_whose_lot_is_not_empty_cannot_be_free(database: Database, group_id: int, adds: bool) -> None:
    """Newer messages would overtake the rest of the lot.

    This is a bug of the lease holder, so the holder gets an error.
    """
    park(database, group_id, b"k", 1, 2)
    added = (ParkedMessage(0, 9, b"m"),) if adds else ()
    removed = ((0, 1), (0, 2)) if adds else ((0, 1),)
    progress = Progress(0, 1, 50, next(_numbers), lots=(LotChange(b"k", "free", "", added, removed),))
    with pytest.raises(InvalidInput, match="b'k' cannot be free"):
        ProgressRows(database).store(group_id, [progress], 1)
    assert parked(database, group_id) == [1, 2]
    assert ParkingLots(database).of_partition(group_id, 0) == (Lot(b"k", "parked"),)
    assert ProgressRows(database).of_partition(group_id, 0).place.offset == 0


def test_a_lot_keeps_since_when_and_why_until_there_is_a_new_reason(database: Database, group_id: int) -> None:
    lots = ParkingLots(database)
    change(database, group_id, LotChange(b"k", "parked", "first"), now_ms=10)
    change(database, group_id, LotChange(b"k", "resuming"), now_ms=20)
    assert lots.of_group(group_id) == [ParkingLotRow(0, b"k", "resuming", "first", 10, None, 0)]
    change(database, group_id, LotChange(b"k", "parked", "x" * 5_000), now_ms=30)
    assert lots.of_group(group_id) == [ParkingLotRow(0, b"k", "parked", "x" * REASON_LENGTH_MAX, 10, None, 0)]


def test_the_lots_of_a_group_tell_their_head_and_load(database: Database, group_id: int) -> None:
    park(database, group_id, b"b", 7, 3, partition=1, now_ms=20)
    park(database, group_id, b"a", 4, partition=2, now_ms=10)
    change(database, group_id, LotChange(b"c", "parked", "asked for"), now_ms=5)
    assert ParkingLots(database).of_group(group_id) == [
        ParkingLotRow(0, b"c", "parked", "asked for", 5, None, 0),
        ParkingLotRow(2, b"a", "parked", "", 10, 4, 1),
        ParkingLotRow(1, b"b", "parked", "", 20, 7, 2),
    ]
    assert ParkingLots(database).head(group_id, 1, b"b") == (1, 7)
    assert ParkingLots(database).head(group_id, 0, b"c") is None


def test_keys_are_bytes_of_any_kind(database: Database, group_id: int) -> None:
    keys = [b"\x00", b"\xff\xfe", b"", b"'; DROP TABLE lots; --", b"K", b"k"]
    for offset, key in enumerate(keys):
        park(database, group_id, key, offset)
    assert [parked(database, group_id, key) for key in keys] == [[offset] for offset in range(len(keys))]


def test_reading_is_bounded_but_gives_one_at_least(database: Database, group_id: int) -> None:
    added = tuple(ParkedMessage(0, offset, b"x" * 100) for offset in range(5))
    change(database, group_id, LotChange(b"k", "parked", added=added))
    read: list[list[int]] = []
    after, is_end = 0, False
    while not is_end:
        content = ParkingLots(database).read(group_id, 0, b"k", after, 250)
        read.append([one.offset for one in content.messages])
        after, is_end = content.messages[-1].position, content.is_end
    assert read == [[0, 1], [2, 3], [4]]
    assert [one.offset for one in ParkingLots(database).read(group_id, 0, b"k", 0, 1).messages] == [0]
    assert ParkingLots(database).read(group_id, 0, b"k", after, 250).messages == ()
    assert ParkingLots(database).read(group_id, 0, b"nothing", 0, 250).is_end


def test_reading_is_bounded_by_count_too(database: Database, group_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lots_module, "READ_COUNT_MAX", 2)
    park(database, group_id, b"k", 1, 2, 3)
    first = ParkingLots(database).read(group_id, 0, b"k", 0, 1 << 20)
    assert ([one.offset for one in first.messages], first.is_end) == ([1, 2], False)
    rest = ParkingLots(database).read(group_id, 0, b"k", first.messages[-1].position, 1 << 20)
    assert ([one.offset for one in rest.messages], rest.is_end) == ([3], True)


@pytest.mark.parametrize("after", [-1, 2**63])
def test_reading_behind_nowhere_is_refused(database: Database, group_id: int, after: int) -> None:
    with pytest.raises(InvalidInput):
        ParkingLots(database).read(group_id, 0, b"k", after, 100)


def test_positions_are_never_given_twice(database: Database, group_id: int) -> None:
    park(database, group_id, b"k", 1)
    (first,) = ParkingLots(database).read(group_id, 0, b"k", 0, 100).messages
    change(database, group_id, LotChange(b"k", "free", removed=((0, 1),)))
    park(database, group_id, b"k", 2)
    (second,) = ParkingLots(database).read(group_id, 0, b"k", 0, 100).messages
    assert second.position > first.position
