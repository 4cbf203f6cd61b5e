from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inturn.model.errors import AlreadyExists, InvalidInput, InvalidName, NotFound
from inturn.model.routing import PARTITION_COUNT_MAX, even_ranges
from inturn.model.settings import Keyless, Limits, Routing, Strategy
from inturn.model.subject import Subject
from inturn.store.database import Database
from inturn.store.subjects import Subjects


def _create(database: Database, name: Any = "orders", partition_count: Any = 3, **changes: Any) -> Subject:
    settings = {"routing": Routing.SLOTS, "strategy": Strategy.STRICT, "limits": Limits(), "now_ms": 1, **changes}
    return Subjects(database).create(name, partition_count, **settings)


def test_a_new_subject_has_an_even_route_of_version_one(database: Database) -> None:
    subject = _create(database, limits=Limits(10, 20, 30), strategy="best-effort", routing="selector")
    assert subject.route.version == 1
    assert subject.route.ranges == even_ranges(3)
    assert (subject.limits, subject.strategy, subject.routing) == (
        Limits(10, 20, 30),
        Strategy.BEST_EFFORT,
        Routing.SELECTOR,
    )


def test_partition_names_are_ours_and_unique(database: Database) -> None:
    partitions = [*_create(database, "a").route.partitions, *_create(database, "b").route.partitions]
    assert [str(partition) for partition in partitions] == [f"local/p{number}" for number in range(1, 7)]


def test_a_subject_is_the_same_after_reopening(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "state.db")
    created = _create(database, keyless="one-lane")
    assert created.keyless is Keyless.ONE_LANE
    database.close()
    database = Database.open(tmp_path / "state.db")
    assert Subjects(database).get("orders") == created
    assert Subjects(database).all() == [created]
    database.close()


def test_creating_the_same_again_returns_what_is_there(database: Database) -> None:
    assert _create(database) == _create(database, now_ms=2)
    assert len(Subjects(database).all()) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"partition_count": 4}, "partitions 3 (not 4)"),
        ({"strategy": Strategy.BEST_EFFORT}, "strategy strict (not best-effort)"),
        ({"routing": Routing.SELECTOR}, "routing slots (not selector)"),
        ({"limits": Limits(body_bytes=1)}, "not Limits(body_bytes=1"),
        ({"keyless": Keyless.ONE_LANE}, "keyless independent (not one-lane)"),
        ({"broker_groups": ("b2",), "is_chosen": True}, "broker groups local, local, local (not b2, b2, b2)"),
    ],
)
def test_other_settings_for_a_subject_that_is_there_are_refused(
    database: Database, change: dict[str, Any], named: str
) -> None:
    before = _create(database)
    with pytest.raises(AlreadyExists) as caught:
        _create(database, **change)
    assert named in str(caught.value)
    assert Subjects(database).get("orders") == before


@pytest.mark.parametrize("count", [0, -1, PARTITION_COUNT_MAX + 1, 1.0, "3", None, True])
def test_a_bad_partition_count_is_refused_with_the_limit(database: Database, count: Any) -> None:
    with pytest.raises(InvalidInput, match=f"1 to {PARTITION_COUNT_MAX}"):
        _create(database, partition_count=count)
    assert Subjects(database).all() == []


def test_the_largest_partition_count_is_accepted(database: Database) -> None:
    assert _create(database, partition_count=PARTITION_COUNT_MAX).partition_count == PARTITION_COUNT_MAX


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 201, "a%b", "ä", "a\n", None, 7])
def test_a_bad_name_is_refused(database: Database, name: Any) -> None:
    with pytest.raises(InvalidName):
        _create(database, name)


@pytest.mark.parametrize(
    "change",
    [{"routing": "round-robin"}, {"strategy": "maybe"}, {"limits": None}],
)
def test_a_bad_setting_is_refused(database: Database, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        _create(database, **change)


def test_names_that_differ_in_case_are_different_subjects(database: Database) -> None:
    _create(database, "orders", 1)
    _create(database, "Orders", 2)
    assert [subject.name for subject in Subjects(database).all()] == ["orders", "Orders"]
    assert Subjects(database).get("Orders").partition_count == 2


def test_a_missing_subject_is_named_with_the_next_step(database: Database) -> None:
    subjects = Subjects(database)
    assert subjects.find("orders") is None
    for look in (subjects.get, subjects.partition_ids):
        with pytest.raises(NotFound, match="no subject 'orders'; create it first"):
            look("orders")
    _create(database)
    assert subjects.get("orders").name == "orders"  # the earlier absence is not cached


def test_partition_ids_are_in_the_order_of_the_route(database: Database) -> None:
    _create(database)
    assert Subjects(database).partition_ids("orders") == (1, 2, 3)


def test_a_subject_that_was_rolled_back_is_forgotten(database: Database) -> None:
    subjects = Subjects(database)

    def create_and_fail() -> None:
        with database.transaction():
            subjects.create("orders", 3, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
            assert subjects.find("orders") is not None
            raise RuntimeError

    with pytest.raises(RuntimeError):
        create_and_fail()
    assert subjects.find("orders") is None
