from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from inturn.model.errors import InvalidInput, InvalidName, NotFound
from inturn.model.settings import Limits, Routing, Strategy
from inturn.protocol.commands import Progress
from inturn.store.database import Database
from inturn.store.groups import GroupRecord, Groups
from inturn.store.leases import LeaseRows
from inturn.store.offsets import OffsetRows
from inturn.store.subjects import Subjects


@pytest.fixture
def groups(database: Database) -> Groups:
    for name in ("orders", "returns"):
        Subjects(database).create(name, 2, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
    return Groups(database)


def test_a_new_group_starts_where_it_was_told_in_every_partition(database: Database, groups: Groups) -> None:
    group_id = groups.create("orders", "billing", "last", [5, 9], 1)
    assert OffsetRows(database).committed(group_id) == {0: 5, 1: 9}


def test_creating_a_group_again_moves_nothing(database: Database, groups: Groups) -> None:
    group_id = groups.create("orders", "billing", "last", [5, 9], 1)
    assert groups.create("orders", "billing", "first", [0, 0], 2) == group_id
    assert OffsetRows(database).committed(group_id) == {0: 5, 1: 9}
    assert groups.all() == [GroupRecord("orders", "billing", group_id, "last")]


def test_groups_of_one_name_on_two_subjects_are_two(database: Database, groups: Groups) -> None:
    one = groups.create("orders", "billing", "first", [0, 0], 1)
    two = groups.create("returns", "billing", "first", [0, 0], 1)
    assert one != two
    assert (groups.find("orders", "billing"), Groups(database).find("returns", "billing")) == (one, two)
    assert groups.find("orders", "Billing") is None
    assert groups.find("nothing", "billing") is None
    assert [group.subject for group in groups.all()] == ["orders", "returns"]


def test_a_group_without_a_subject_is_refused(groups: Groups) -> None:
    with pytest.raises(NotFound, match="no subject 'nothing'"):
        groups.create("nothing", "billing", "first", [0], 1)


@pytest.mark.parametrize("offsets", [[], [0], [0, 0, 0], [0, -1], [0, 1.5], [0, True], [0, 2**63]])
def test_bad_start_offsets_are_refused_and_no_group_is_made(groups: Groups, offsets: list[Any]) -> None:
    with pytest.raises(InvalidInput):
        groups.create("orders", "billing", "first", offsets, 1)
    assert groups.all() == []


def test_a_bad_group_name_is_refused(groups: Groups) -> None:
    with pytest.raises(InvalidName):
        groups.create("orders", "a/b", "first", [0, 0], 1)


def test_a_group_is_made_with_all_its_offsets_or_not_at_all(database: Database, groups: Groups) -> None:
    with database.transaction() as connection:
        connection.execute(
            text(
                "CREATE TRIGGER fail BEFORE INSERT ON offsets WHEN NEW.next_offset = 9 "
                "BEGIN SELECT RAISE(ABORT, 'injected'); END"
            )
        )
    with pytest.raises(IntegrityError, match="injected"):
        groups.create("orders", "billing", "first", [5, 9], 1)
    assert groups.all() == []
    assert groups.find("orders", "billing") is None


def test_a_group_that_was_rolled_back_is_forgotten(database: Database, groups: Groups) -> None:
    leases = LeaseRows(database)

    def create_and_fail() -> None:
        with database.transaction():
            leases.grant(groups.create("orders", "billing", "first", [0, 0], 1), 0, "m", True, 1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        create_and_fail()
    assert groups.find("orders", "billing") is None
    # The next group gets the id of the rolled-back group, with partitions of a different subject.
    group_id = groups.create("returns", "billing", "first", [0, 0], 1)
    epoch = leases.grant(group_id, 1, "m", True, 1)
    assert leases.release_with(group_id, Progress(1, epoch, 4, number=1), 1)
    assert OffsetRows(database).committed(group_id) == {0: 0, 1: 4}
