from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from inturn.model.errors import InvalidName
from inturn.store.database import Database
from inturn.store.producers import Producers


def test_producers_without_a_name_get_an_id_never_given_before(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        database = Database.open(tmp_path / "state.db")
        seen += [Producers(database).open(None) for _ in range(3)]
        database.close()
    ids = [producer.id for producer in seen]
    assert ids == sorted(set(ids))
    assert min(ids) > 0  # 0 in a batch means no producer
    assert {producer.epoch for producer in seen} == {0}


def test_a_name_keeps_its_id_and_its_epoch_goes_up(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        database = Database.open(tmp_path / "state.db")
        seen += [Producers(database).open("till") for _ in range(2)]
        Producers(database).open(None)
        database.close()
    assert {producer.id for producer in seen} == {seen[0].id}
    assert [producer.epoch for producer in seen] == list(range(6))


def test_the_epochs_of_named_producers_can_be_loaded(database: Database) -> None:
    producers = Producers(database)
    till, _ = producers.open("till")
    producers.open(None)
    shop, _ = producers.open("shop")
    producers.open("till")
    assert producers.epochs() == {till: 1, shop: 0}


def test_the_newest_id_is_known_after_a_restart_whether_it_has_a_name_or_not(tmp_path: Path) -> None:
    for name in (None, "till", None, None, "shop", "till"):
        database = Database.open(tmp_path / "state.db")
        newest = Producers(database).newest_id()
        opened = Producers(database).open(name)
        assert Producers(database).newest_id() == max(newest, opened.id)
        database.close()
    database = Database.open(None)
    assert Producers(database).newest_id() == 0
    database.close()


def test_names_that_differ_in_case_are_different_producers(database: Database) -> None:
    assert Producers(database).open("till").id != Producers(database).open("Till").id


def test_rows_of_producers_without_a_name_do_not_pile_up(database: Database) -> None:
    for _ in range(10):
        Producers(database).open(None)
    with database.transaction() as connection:
        assert connection.execute(text("SELECT count(*) FROM producers")).scalar() == 1


def test_a_bad_name_is_refused(database: Database) -> None:
    with pytest.raises(InvalidName):
        Producers(database).open("")
