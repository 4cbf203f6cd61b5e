from __future__ import annotations

import importlib
import pkgutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, Select, UpdateBase, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

import inturn.store
from inturn.model.errors import InvalidInput, SchemaMismatch, StorageError
from inturn.model.settings import GroupMode, Limits, Role, Routing, Strategy
from inturn.store import schema
from inturn.store.cluster import BrokerGroupRows, take_role
from inturn.store.database import Database
from inturn.store.groups import Groups
from inturn.store.producers import Producers
from inturn.store.subjects import Subjects


def _file_with(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_file_of_this_version_can_be_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    Database.open(path).close()
    Database.open(path).close()


@pytest.mark.parametrize("found", [schema.SCHEMA_VERSION + 1, 0, -1])
def test_a_newer_or_unknown_version_is_refused_and_left_alone(tmp_path: Path, found: int) -> None:
    path = tmp_path / "state.db"
    Database.open(path).close()
    _file_with(path, f"UPDATE schema_version SET version = {found}")
    with pytest.raises(SchemaMismatch) as caught:
        Database.open(path)
    assert (caught.value.found, caught.value.known) == (found, schema.SCHEMA_VERSION)


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TABLE somebody_elses (x)"],
        ["CREATE TABLE schema_version (version)"],
        ["CREATE TABLE schema_version (version)", "INSERT INTO schema_version VALUES ('one')"],
        ["CREATE TABLE schema_version (version)", "INSERT INTO schema_version VALUES (1), (1)"],
    ],
)
def test_a_database_that_is_not_ours_is_refused(tmp_path: Path, statements: list[str]) -> None:
    path = tmp_path / "state.db"
    _file_with(path, *statements)
    with pytest.raises(SchemaMismatch) as caught:
        Database.open(path)
    assert caught.value.found == 0


def test_a_file_that_is_no_database_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="move the file away"):
        Database.open(path)


def test_there_is_a_migration_for_every_older_version() -> None:
    assert len(schema.MIGRATIONS) == schema.SCHEMA_VERSION - 1


def _add_colour(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE subjects ADD COLUMN colour VARCHAR"))


def test_an_older_version_is_migrated_step_by_step(database: Database) -> None:
    steps: list[int] = []
    newest = schema.SCHEMA_VERSION + 2
    migrations = [*schema.MIGRATIONS, _add_colour, lambda _: steps.append(newest)]
    with database.transaction() as connection:
        schema.prepare(connection, newest, migrations)
        schema.prepare(connection, newest, migrations)  # nothing left to migrate
        assert connection.execute(text("SELECT version FROM schema_version")).scalar() == newest
        connection.execute(text("SELECT colour FROM subjects"))
    assert steps == [newest]


def _without_broker_groups(connection: Connection) -> None:
    for table in ("node_role", "broker_groups", "seals"):
        connection.execute(text(f"DROP TABLE {table}"))


def _without_modes_of_groups(connection: Connection) -> None:
    _without_broker_groups(connection)
    connection.execute(text("ALTER TABLE groups DROP COLUMN mode"))
    connection.execute(text("ALTER TABLE groups DROP COLUMN set_order"))


def test_a_folder_of_version_4_is_a_node_whose_broker_group_is_available(tmp_path: Path) -> None:
    """P9, M1: version 4 had no roles."""
    database = Database.open(tmp_path / "state.db")
    Subjects(database).create("orders", 1, Routing.SLOTS, Strategy.STRICT, Limits(), 0)
    with database.transaction() as connection:
        _without_broker_groups(connection)
        connection.execute(text("UPDATE schema_version SET version = 4"))
    database.close()
    database = Database.open(tmp_path / "state.db")
    assert take_role(database, Role.NODE, "") == ""
    assert BrokerGroupRows(database).all() == []
    with pytest.raises(InvalidInput, match="subjects of its own"):
        take_role(database, Role.BROKER, "east")
    database.close()


def test_groups_of_version_3_are_exclusive_and_keep_the_order_they_ask_for(tmp_path: Path) -> None:
    """C12: version 3 had no other modes."""
    database = Database.open(tmp_path / "state.db")
    Subjects(database).create("orders", 1, Routing.SLOTS, Strategy.STRICT, Limits(), 0)
    Groups(database).create("orders", "billing", "first", [0], 0)
    with database.transaction() as connection:
        _without_modes_of_groups(connection)
        connection.execute(text("UPDATE schema_version SET version = 3"))
    database.close()
    database = Database.open(tmp_path / "state.db")
    groups = Groups(database)
    assert [(one.name, one.mode) for one in groups.all()] == [("billing", GroupMode.EXCLUSIVE)]
    assert groups.orders() == {}
    database.close()


def test_a_folder_of_version_1_goes_on_with_its_leases_and_producers(tmp_path: Path) -> None:
    """In version 1, leases had no stored life and producers had no nonce."""
    database = Database.open(tmp_path / "state.db")
    with database.transaction() as connection:
        _without_modes_of_groups(connection)
        for table in ("descents", "gates"):
            connection.execute(text(f"DROP TABLE {table}"))
        connection.execute(text("ALTER TABLE key_requests DROP COLUMN origin"))
        connection.execute(text("ALTER TABLE leases DROP COLUMN life_ms"))
        connection.execute(text("ALTER TABLE producers DROP COLUMN nonce"))
        connection.execute(text("UPDATE schema_version SET version = 1"))
        connection.execute(text("INSERT INTO producers (name, epoch) VALUES ('writer', 4)"))
    database.close()
    database = Database.open(tmp_path / "state.db")
    assert Producers(database).open("writer", "mine").epoch == 5
    with database.transaction() as connection:
        assert connection.execute(text("SELECT version FROM schema_version")).scalar() == schema.SCHEMA_VERSION
        connection.execute(text("SELECT life_ms FROM leases"))
    database.close()


def test_a_failing_migration_changes_nothing(database: Database) -> None:
    def fail(_connection: Connection) -> None:
        raise RuntimeError("half way")

    newest = schema.SCHEMA_VERSION + 2
    with pytest.raises(RuntimeError), database.transaction() as connection:
        schema.prepare(connection, newest, [*schema.MIGRATIONS, _add_colour, fail])
    with database.transaction() as connection:
        assert connection.execute(text("SELECT version FROM schema_version")).scalar() == schema.SCHEMA_VERSION
        assert "colour" not in connection.execute(text("SELECT * FROM subjects")).keys()


def test_every_statement_can_be_said_to_postgresql() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    compiled = 0
    for table in schema.metadata.sorted_tables:
        assert str(CreateTable(table).compile(dialect=dialect))
    for found in pkgutil.iter_modules(inturn.store.__path__):
        module = importlib.import_module(f"inturn.store.{found.name}")
        for value in vars(module).values():
            if isinstance(value, Select | UpdateBase):
                assert str(value.compile(dialect=dialect))
                compiled += 1
    assert compiled > 30
