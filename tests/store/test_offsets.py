"""B5, C7: stored committed offsets and finished sets."""

from __future__ import annotations

from typing import Any

import pytest
from pyroaring import BitMap64
from sqlalchemy import text

from inturn.model.errors import InvalidInput, NotFound, StaleEpoch
from inturn.protocol.commands import Progress
from inturn.store.database import Database
from inturn.store.groups import Groups
from inturn.store.leases import LeaseRow, LeaseRows
from inturn.store.offsets import FINISHED_BYTES_MAX, CommittedPlace, OffsetRows


def test_a_commit_moves_its_own_partition_only(database: Database, group_id: int) -> None:
    assert OffsetRows(database).commit(group_id, Progress(1, 1, 5, number=1), 1)
    assert OffsetRows(database).committed(group_id) == {0: 0, 1: 5, 2: 0}


def test_a_commit_never_moves_backwards(database: Database, group_id: int) -> None:
    offsets = OffsetRows(database)
    offsets.commit(group_id, Progress(0, 1, 5, number=1), 1)
    assert offsets.commit(group_id, Progress(0, 1, 4, number=2), 2)
    assert offsets.commit(group_id, Progress(0, 1, 5, number=3, finished=b"7"), 2)
    assert offsets.place(group_id, 0) == CommittedPlace(5, b"7"), "with an equal offset the rest is stored all the same"


def test_a_late_copy_changes_nothing(database: Database, group_id: int) -> None:
    offsets = OffsetRows(database)
    assert offsets.commit(group_id, Progress(0, 1, 5, number=2, finished=b"7"), 1)
    assert not offsets.commit(group_id, Progress(0, 1, 6, number=2, finished=b"8"), 1)
    assert not offsets.commit(group_id, Progress(0, 1, 6, number=1, finished=b"8"), 1)
    assert offsets.place(group_id, 0) == CommittedPlace(5, b"7")


def test_numbers_begin_again_with_every_epoch(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    for offset in (5, 6):
        epoch = leases.grant(group_id, 0, "m", False, 1)
        assert offsets.commit(group_id, Progress(0, epoch, offset, number=1), 1)
    assert offsets.committed(group_id)[0] == 6


def test_a_late_copy_with_an_older_epoch_is_refused_whatever_its_number(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    old = leases.grant(group_id, 0, "m", False, 1)
    leases.grant(group_id, 0, "n", False, 1)
    with pytest.raises(StaleEpoch):
        offsets.commit(group_id, Progress(0, old, 5, number=1_000), 1)
    assert offsets.place(group_id, 0) == CommittedPlace()


def test_a_finished_set_is_kept_as_it_came_and_is_bounded(database: Database, group_id: int) -> None:
    offsets = OffsetRows(database)
    offsets.commit(group_id, Progress(0, 1, 0, number=1, finished=b"x" * FINISHED_BYTES_MAX), 1)
    with pytest.raises(InvalidInput, match=f"the limit is {FINISHED_BYTES_MAX}"):
        offsets.commit(group_id, Progress(0, 1, 0, number=2, finished=b"x" * (FINISHED_BYTES_MAX + 1)), 1)
    assert offsets.place(group_id, 0) == CommittedPlace(0, b"x" * FINISHED_BYTES_MAX)


@pytest.mark.parametrize("number", [-1, 2**63, True, None])
def test_a_bad_number_or_epoch_is_refused(database: Database, group_id: int, number: Any) -> None:
    for progress in (Progress(0, 1, 5, number=number), Progress(0, number, 5, number=1)):
        with pytest.raises(InvalidInput):
            OffsetRows(database).commit(group_id, progress, 1)


def test_a_commit_keeps_the_epoch_it_came_with(database: Database, group_id: int) -> None:
    OffsetRows(database).commit(group_id, Progress(0, 7, 5, number=1), 123)
    with database.transaction() as connection:
        row = connection.execute(text("SELECT epoch, updated_at_ms FROM offsets WHERE next_offset = 5")).one()
    assert tuple(row) == (7, 123)


def test_a_commit_with_an_epoch_that_was_passed_on_is_refused(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    old = leases.grant(group_id, 0, "m", False, 1)
    new = leases.grant(group_id, 0, "n", False, 1)
    with pytest.raises(StaleEpoch) as caught:
        offsets.commit(group_id, Progress(0, old, 5, number=1), 1)
    assert (caught.value.group, caught.value.partition) == ("billing", "local/p1")
    assert (caught.value.epoch, caught.value.current) == (old, new)
    assert offsets.commit(group_id, Progress(0, new, 5, number=1), 1)


def test_a_partition_without_an_offset_gets_one_with_its_first_commit(database: Database, group_id: int) -> None:
    with database.transaction() as connection:
        connection.execute(text("DELETE FROM offsets"))
    assert OffsetRows(database).committed(group_id) == {}
    assert OffsetRows(database).commit(group_id, Progress(2, 1, 3, number=1), 1)
    assert OffsetRows(database).committed(group_id) == {2: 3}


@pytest.mark.parametrize("offset", [-1, 1.5, None, True, "5", 2**63])
def test_a_bad_offset_is_refused(database: Database, group_id: int, offset: Any) -> None:
    with pytest.raises(InvalidInput):
        OffsetRows(database).commit(group_id, Progress(0, 1, offset, number=1), 1)


@pytest.mark.parametrize("partition", [-1, 3])
def test_an_unknown_partition_is_refused(database: Database, group_id: int, partition: int) -> None:
    with pytest.raises(NotFound, match="0 to 2"):
        OffsetRows(database).commit(group_id, Progress(partition, 1, 1, number=1), 1)


def test_an_unknown_group_is_refused(database: Database, group_id: int) -> None:
    with pytest.raises(NotFound):
        OffsetRows(database).commit(group_id + 1, Progress(0, 1, 1, number=1), 1)
    assert OffsetRows(database).committed(group_id + 1) == {}


def test_a_reset_moves_all_partitions_either_way(database: Database, group_id: int) -> None:
    offsets = OffsetRows(database)
    offsets.commit(group_id, Progress(0, 1, 5, number=1), 1)
    offsets.reset(group_id, {0: 2, 1: 9, 2: 0}, 1)
    assert offsets.committed(group_id) == {0: 2, 1: 9, 2: 0}


def test_after_a_reset_nobody_can_commit_with_an_old_epoch(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    epoch = leases.grant(group_id, 0, "m", False, 1)
    offsets.reset(group_id, {0: 2, 1: 0, 2: 0}, 1)
    with pytest.raises(StaleEpoch):
        offsets.commit(group_id, Progress(0, epoch, 8, number=1), 1)
    assert not leases.release(group_id, 0, epoch, 1)
    with pytest.raises(StaleEpoch):
        leases.release_with(group_id, Progress(0, epoch, 8, number=1), 1)
    assert leases.all() == [LeaseRow(group_id, 0, epoch + 1, None, False)]
    assert offsets.committed(group_id)[0] == 2
    assert offsets.commit(group_id, Progress(0, leases.grant(group_id, 0, "m", False, 1), 3, number=1), 1)


def test_a_reset_leaves_other_groups_alone(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    other = Groups(database).create("orders", "shipping", "first", [1, 1, 1], 1)
    epoch = leases.grant(other, 0, "m", False, 1)
    offsets.reset(group_id, {0: 2, 1: 2, 2: 2}, 1)
    assert offsets.committed(other) == {0: 1, 1: 1, 2: 1}
    assert offsets.commit(other, Progress(0, epoch, 4, number=1), 1)


@pytest.mark.parametrize("new", [{}, {0: 1}, {0: 1, 1: 1, 3: 1}, {0: 1, 1: 1, 2: -1}])
def test_a_reset_of_some_partitions_or_to_nowhere_changes_nothing(
    database: Database, group_id: int, new: dict[int, int]
) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    epoch = leases.grant(group_id, 0, "m", False, 1)
    with pytest.raises(InvalidInput):
        offsets.reset(group_id, new, 1)
    assert offsets.committed(group_id) == {0: 0, 1: 0, 2: 0}
    assert offsets.commit(group_id, Progress(0, epoch, 1, number=1), 1)


def test_the_highest_offset_is_that_of_the_furthest_group(database: Database, group_id: int) -> None:
    offsets = OffsetRows(database)
    Groups(database).create("orders", "shipping", "last", [7, 0, 0], 1)
    offsets.commit(group_id, Progress(0, 1, 5, number=1), 1)
    offsets.commit(group_id, Progress(1, 1, 3, number=1), 1)
    assert [offsets.highest(f"p{number}") for number in (1, 2, 3)] == [7, 3, 0]
    assert offsets.highest("p99") == 0
    assert offsets.highest("p1", "another") == 0


def test_a_reset_does_not_lower_the_highest_offset(database: Database, group_id: int) -> None:
    offsets = OffsetRows(database)
    offsets.commit(group_id, Progress(0, 1, 5, number=1), 1)
    offsets.reset(group_id, {0: 0, 1: 0, 2: 0}, 1)
    offsets.commit(group_id, Progress(0, 1, 2, number=2), 1)
    offsets.reset(group_id, {0: 0, 1: 0, 2: 0}, 1)
    assert offsets.highest("p1") == 5


def test_the_highest_offset_is_above_all_that_is_finished(database: Database, group_id: int) -> None:
    offsets = OffsetRows(database)
    offsets.commit(group_id, Progress(0, 1, 5, number=1, finished=BitMap64([7, 9]).serialize()), 1)
    offsets.commit(group_id, Progress(1, 1, 5, number=1, finished=BitMap64().serialize()), 1)
    assert [offsets.highest("p1"), offsets.highest("p2")] == [10, 5]
    offsets.reset(group_id, {0: 0, 1: 0, 2: 0}, 1)
    assert offsets.place(group_id, 0) == CommittedPlace()
    assert offsets.highest("p1") == 10


def test_a_finished_set_that_cannot_be_read_does_not_keep_a_log_closed(
    database: Database, group_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The group needs a reset, and for a reset the folder must open."""
    offsets = OffsetRows(database)
    offsets.commit(group_id, Progress(0, 1, 5, number=1, finished=b"no bitmap"), 1)
    assert offsets.highest("p1") == 5
    assert "state.finished_set_unreadable" in caplog.text
    offsets.reset(group_id, {0: 0, 1: 0, 2: 0}, 1)
    assert offsets.highest("p1") == 5
