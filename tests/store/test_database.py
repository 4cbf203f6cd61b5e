from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError

from inturn.model.errors import Closed, StorageError
from inturn.model.settings import Limits, Routing, Strategy
from inturn.protocol.commands import Progress
from inturn.store import database as database_module
from inturn.store.database import Database
from inturn.store.groups import Groups
from inturn.store.keys import Failures
from inturn.store.leases import LeaseRows
from inturn.store.offsets import OffsetRows
from inturn.store.parking_lots import ParkingLots
from inturn.store.producers import Producers
from inturn.store.subjects import Subjects


def _add(database: Database, name: str) -> None:
    with database.transaction() as connection:
        connection.execute(text("INSERT INTO producers (name, epoch) VALUES (:name, 0)"), {"name": name})


def _names(database: Database) -> list[str]:
    with database.transaction() as connection:
        return list(connection.execute(text("SELECT name FROM producers ORDER BY name")).scalars())


def test_an_exception_rolls_everything_back(database: Database) -> None:
    def add_and_fail() -> None:
        with database.transaction():
            _add(database, "a")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        add_and_fail()
    assert _names(database) == []


def test_an_inner_block_joins_the_outer_one(database: Database) -> None:
    def fail_after_an_inner_block() -> None:
        with database.transaction():
            with database.transaction():
                _add(database, "a")
            _add(database, "b")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_after_an_inner_block()
    with database.transaction():
        _add(database, "c")
        _add(database, "d")
    assert _names(database) == ["c", "d"]


def test_a_swallowed_failure_of_an_inner_block_fails_the_whole_transaction(database: Database) -> None:
    def half_do() -> None:
        with database.transaction():
            _add(database, "b")
            raise LookupError("half done")

    def swallow() -> None:
        with database.transaction():
            _add(database, "a")
            with contextlib.suppress(LookupError):
                half_do()

    with pytest.raises(LookupError, match="half done"):
        swallow()
    assert _names(database) == []
    _add(database, "c")
    assert _names(database) == ["c"]


def test_a_failed_commit_leaves_the_database_usable(database: Database) -> None:
    def fail_at_the_commit() -> None:
        with database.transaction() as connection:
            connection.execute(text("PRAGMA defer_foreign_keys = ON"))
            connection.execute(text("INSERT INTO members VALUES (99, 'nobody', 1, 0)"))

    with pytest.raises(IntegrityError):
        fail_at_the_commit()
    _add(database, "a")
    assert _names(database) == ["a"]


def test_foreign_keys_are_checked(database: Database) -> None:
    with pytest.raises(IntegrityError), database.transaction() as connection:
        connection.execute(text("INSERT INTO members VALUES (99, 'nobody', 1, 0)"))


def test_threads_take_turns(database: Database) -> None:
    def add_some(prefix: str) -> None:
        for number in range(50):
            _add(database, f"{prefix}{number}")

    threads = [threading.Thread(target=add_some, args=(prefix,)) for prefix in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_names(database)) == 200


def test_in_memory_databases_are_separate(database: Database) -> None:
    other = Database.open(None)
    _add(database, "a")
    assert _names(other) == []
    other.close()
    assert _names(database) == ["a"]


def test_a_closed_database_says_so(database: Database) -> None:
    database.close()
    database.close()
    with pytest.raises(Closed), database.transaction():
        pass


def test_a_file_is_written_durably(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "state.db")
    with database.transaction() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
        assert connection.execute(text("PRAGMA busy_timeout")).scalar() == 5000
    database.close()


def test_a_path_is_a_path_whatever_it_looks_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (":memory:", "a?b=c#d %41.db"):
        Database.open(path).close()
        assert (tmp_path / path).is_file()


def test_a_missing_folder_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="check that the folder exists"):
        Database.open(tmp_path / "missing" / "state.db")


def test_a_full_disk_is_a_storage_error_and_passes(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "state.db")
    with database.transaction() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar()
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))

    def fill_the_disk() -> None:
        with database.transaction():
            for number in range(1000):
                _add(database, f"{number:0>100}")

    with pytest.raises(StorageError, match="free some space"):
        fill_the_disk()
    assert _names(database) == []
    with database.transaction() as connection:
        connection.execute(text("PRAGMA max_page_count = 1000000"))
    _add(database, "a")
    assert _names(database) == ["a"]
    database.close()


def test_nothing_is_accepted_after_an_io_error_until_reopened(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    database = Database.open(path)
    _add(database, "a")
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    with pytest.raises(StorageError, match="check the disk"), database.transaction():
        raise OperationalError("COMMIT", None, error)
    with pytest.raises(StorageError, match="has stopped"), database.transaction():
        pass
    database.close()
    database = Database.open(path)
    assert _names(database) == ["a"]
    database.close()


def test_a_lock_of_another_process_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "state.db"
    database = Database.open(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="another process"), database.transaction():
        pass
    other.close()
    _add(database, "a")
    assert _names(database) == ["a"]
    database.close()


def test_state_outlives_the_node_on_top_of_it(database: Database) -> None:
    Subjects(database).create("orders", 2, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
    group_id = Groups(database).create("orders", "billing", "first", [0, 0], 1)
    epoch = LeaseRows(database).grant(group_id, 1, "m", True, 1)
    OffsetRows(database).commit(group_id, Progress(1, epoch, 7, number=1), 1)
    Producers(database).open("till")
    # all other state is built again, as after a crash
    assert Subjects(database).get("orders").partition_count == 2
    assert Groups(database).find("orders", "billing") == group_id
    assert OffsetRows(database).committed(group_id) == {0: 0, 1: 7}
    assert LeaseRows(database).grant(group_id, 1, "n", True, 1) == epoch + 1
    assert Producers(database).open("till").epoch == 1


_COMMIT_UNTIL_KILLED = """
import sys
from inturn.protocol.commands import Progress
from inturn.store.database import Database
from inturn.store.leases import LeaseRows
from inturn.store.offsets import OffsetRows
database = Database.open(sys.argv[1])
leases, offsets = LeaseRows(database), OffsetRows(database)
for offset in range(1, 1_000_000):
    epoch = leases.grant(1, 0, "m", True, 1)
    offsets.commit(1, Progress(0, epoch, offset, number=1), 1)
    print(epoch, offset, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    database = Database.open(path)
    Subjects(database).create("orders", 1, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
    assert Groups(database).create("orders", "billing", "first", [0], 1) == 1
    database.close()
    command = [sys.executable, "-c", _COMMIT_UNTIL_KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = [next(process.stdout) for _ in range(200)]
        process.kill()
        printed += process.stdout.readlines()
    whole = [line for line in printed if line.endswith("\n")]
    epoch, offset = map(int, whole[-1].split())
    database = Database.open(path)
    assert OffsetRows(database).committed(1)[0] in (offset, offset + 1)
    (lease,) = LeaseRows(database).release_local(2)
    assert lease.epoch >= epoch
    assert LeaseRows(database).grant(1, 0, "n", True, 2) > epoch
    database.close()


_PARK_UNTIL_KILLED = """
import sys
from inturn.protocol.commands import Failure, LotChange, ParkedMessage, Progress
from inturn.store.database import Database
from inturn.store.leases import ProgressRows
database = Database.open(sys.argv[1])
rows = ProgressRows(database)
for number in range(1, 1_000_000):
    added = tuple(ParkedMessage(0, 3 * number + i, b"m") for i in range(3))
    failed = (Failure(number, b"k", 1, ""),)
    rows.store(1, [Progress(0, 1, number, number, failed=failed, lots=(LotChange(b"k", "parked", added=added),))], 1)
    print(number, flush=True)
"""


def test_after_kill_9_all_of_a_commit_is_there_or_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    database = Database.open(path)
    Subjects(database).create("orders", 1, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
    assert Groups(database).create("orders", "billing", "first", [0], 1) == 1
    database.close()
    command = [sys.executable, "-c", _PARK_UNTIL_KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = [next(process.stdout) for _ in range(100)]
        process.kill()
        printed += process.stdout.readlines()
    acknowledged = int([line for line in printed if line.endswith("\n")][-1])
    database = Database.open(path)
    stored = OffsetRows(database).committed(1)[0]
    assert stored in (acknowledged, acknowledged + 1)
    assert len(Failures(database).of_partition(1, 0)) == stored
    assert [row.parked_count for row in ParkingLots(database).of_group(1)] == [3 * stored]
    database.close()
