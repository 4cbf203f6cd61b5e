"""B2, B4: stored leases and epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from inturn.model.errors import InvalidInput, NotFound, StaleEpoch
from inturn.model.settings import Limits, Routing, Strategy
from inturn.protocol.commands import Progress
from inturn.store.database import Database
from inturn.store.groups import Groups
from inturn.store.leases import LeaseRow, LeaseRows
from inturn.store.offsets import OffsetRows
from inturn.store.subjects import Subjects


def test_every_grant_has_a_higher_epoch(database: Database, group_id: int) -> None:
    leases = LeaseRows(database)
    first = leases.grant(group_id, 0, "m", False, 1)
    second = leases.grant(group_id, 0, "n", True, 2)
    assert leases.release(group_id, 0, second, 3)
    third = leases.grant(group_id, 0, "m", False, 4)
    assert (first, second, third) == (1, 2, 3)
    assert leases.all() == [LeaseRow(group_id, 0, 3, "m", False)]


def test_partitions_and_groups_have_epochs_of_their_own(database: Database, group_id: int) -> None:
    leases = LeaseRows(database)
    other = Groups(database).create("orders", "shipping", "first", [0, 0, 0], 1)
    leases.grant(group_id, 0, "m", False, 1)
    assert leases.grant(group_id, 1, "m", False, 1) == 1
    assert leases.grant(other, 0, "m", False, 1) == 1


def test_epochs_never_repeat_across_reopening(tmp_path: Path) -> None:
    seen = []
    for _ in range(4):
        database = Database.open(tmp_path / "state.db")
        Subjects(database).create("orders", 1, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
        group_id = Groups(database).create("orders", "billing", "first", [0], 1)
        leases = LeaseRows(database)
        leases.release_local(1)
        for _ in range(3):
            seen.append(leases.grant(group_id, 0, "m", True, 1))
            leases.release(group_id, 0, seen[-1], 1)
        seen.append(leases.grant(group_id, 0, "m", True, 1))
        database.close()
    assert seen == list(range(1, 17))


def test_a_release_commits_and_clears_the_owner(database: Database, group_id: int) -> None:
    leases = LeaseRows(database)
    epoch = leases.grant(group_id, 2, "m", False, 1)
    assert leases.release_with(group_id, Progress(2, epoch, 8, number=1), 1)
    assert leases.all() == [LeaseRow(group_id, 2, epoch, None, False)]
    assert OffsetRows(database).committed(group_id) == {0: 0, 1: 0, 2: 8}


def test_a_release_without_progress_leaves_the_offset(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    for offset in (8, None, 8, 3):
        epoch = leases.grant(group_id, 0, "m", False, 1)
        if offset is None:
            assert leases.release(group_id, 0, epoch, 1)
        else:
            assert leases.release_with(group_id, Progress(0, epoch, offset, number=1), 1)
        assert offsets.committed(group_id)[0] == 8


def test_a_release_with_a_late_copy_gives_the_lease_back_and_commits_nothing(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    epoch = leases.grant(group_id, 0, "m", False, 1)
    offsets.commit(group_id, Progress(0, epoch, 8, number=2), 1)
    assert not leases.release_with(group_id, Progress(0, epoch, 9, number=2), 1)
    assert leases.all()[0].owner is None
    assert offsets.committed(group_id)[0] == 8


def test_a_release_with_another_epoch_or_twice_changes_nothing(database: Database, group_id: int) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)

    def refused(epoch: int) -> bool:
        assert not leases.release(group_id, 0, epoch, 1)
        with pytest.raises(StaleEpoch):
            leases.release_with(group_id, Progress(0, epoch, 9, number=9), 1)
        return offsets.committed(group_id)[0] == 0

    assert refused(1)  # never granted
    old = leases.grant(group_id, 0, "m", False, 1)
    new = leases.grant(group_id, 0, "n", False, 1)
    assert refused(old)
    assert refused(new + 1)
    assert leases.all() == [LeaseRow(group_id, 0, new, "n", False)]
    assert leases.release(group_id, 0, new, 1)
    assert refused(new)


@pytest.mark.parametrize("table", ["offsets", "leases"])
def test_a_release_that_fails_half_way_does_neither(database: Database, group_id: int, table: str) -> None:
    leases, offsets = LeaseRows(database), OffsetRows(database)
    epoch = leases.grant(group_id, 0, "m", True, 1)
    with database.transaction() as connection:
        connection.execute(
            text(f"CREATE TRIGGER fail AFTER UPDATE ON {table} BEGIN SELECT RAISE(ABORT, 'injected'); END")
        )
    with pytest.raises(IntegrityError, match="injected"):
        leases.release_with(group_id, Progress(0, epoch, 8, number=1), 1)
    assert leases.all() == [LeaseRow(group_id, 0, epoch, "m", True)]
    assert offsets.committed(group_id)[0] == 0
    with database.transaction() as connection:
        connection.execute(text("DROP TRIGGER fail"))
    assert leases.release_with(group_id, Progress(0, epoch, 8, number=1), 1)


def test_a_release_with_a_bad_offset_keeps_the_lease(database: Database, group_id: int) -> None:
    leases = LeaseRows(database)
    epoch = leases.grant(group_id, 0, "m", True, 1)
    with pytest.raises(InvalidInput):
        leases.release_with(group_id, Progress(0, epoch, -1, number=1), 1)
    assert leases.all()[0].owner == "m"


def test_reopening_releases_the_leases_of_the_dead_process_only(database: Database, group_id: int) -> None:
    leases = LeaseRows(database)
    leases.grant(group_id, 0, "inside", True, 1)
    leases.grant(group_id, 1, "outside", False, 1)
    leases.release(group_id, 2, leases.grant(group_id, 2, "inside", True, 1), 1)
    assert leases.release_local(2) == [LeaseRow(group_id, 0, 1, "inside", True)]
    assert [row.owner for row in leases.all()] == [None, "outside", None]
    assert leases.release_local(3) == []
    assert leases.grant(group_id, 0, "inside", True, 4) == 2


def test_a_lease_of_nothing_cannot_be_granted(database: Database, group_id: int) -> None:
    leases = LeaseRows(database)
    for group, partition in ((group_id, 3), (group_id, -1), (group_id + 1, 0)):
        with pytest.raises(NotFound):
            leases.grant(group, partition, "m", True, 1)
    assert leases.all() == []
