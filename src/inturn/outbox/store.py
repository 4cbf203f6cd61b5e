"""Reads and writes the database of an outbox. All changes by a scanner are fenced by the lease."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, bindparam, create_engine, delete, event, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from inturn.model.errors import InvalidInput, OutboxFailed, OutboxLost
from inturn.outbox.recovery import Offsets
from inturn.outbox.row import Row, create_tables
from inturn.outbox.scan_core import ScanLease, settled_id
from inturn.outbox.table import TRIGGER, OutboxTables, ddl

BUSY_TIMEOUT_S = 5.0
CHUNK = 500  # ids in one statement
_decoder = msgspec.json.Decoder(Offsets)

# One statement reads the newest id and the locks; the snapshot of the ids is older than the read of the locks.
_OPEN_POSTGRESQL = """
SELECT (SELECT max(id) FROM {table}), ARRAY(
    SELECT objid::bigint FROM pg_locks
    WHERE locktype = 'advisory' AND classid = '{table}'::regclass::oid AND objsubid = 2
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""
_TRIGGER_POSTGRESQL = """
SELECT count(*) FROM pg_trigger
WHERE tgrelid = '{table}'::regclass AND tgname = '{trigger}' AND tgenabled IN ('O', 'A')
"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that was refused now, and the reason."""

    row_id: int
    error: str


@dataclass(frozen=True, slots=True)
class ReadableRows:
    """Rows behind a cursor that may be sent. `up_to` is set if no other rows exist up to this id."""

    rows: list[Row]
    up_to: int | None
    open_count: int  # open transactions that hold rows back


def open_engine(database: str | os.PathLike[str] | Engine, *, create: bool) -> Engine:
    """A path is a SQLite file, which must exist unless `create`. InvalidInput if the database cannot be opened."""
    if isinstance(database, Engine):
        ddl(database.dialect.name)
        return database
    text = os.fspath(database)
    if "://" not in text:
        text = f"sqlite:///{text}"
    try:
        url = make_url(text)
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        ddl(url.get_backend_name())
        engine = create_engine(url)
    except (SQLAlchemyError, NoSuchModuleError, ValueError) as error:
        raise InvalidInput(f"database {_without_password(text)!r} cannot be opened: {error}") from None
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{error.name} is not installed; pip install 'inturn[postgres]'") from None
    if engine.dialect.name == "sqlite":
        file = url.database or ":memory:"
        if not create and not file.startswith((":memory:", "file:")) and not os.path.exists(file):
            raise InvalidInput(f"no database file {file!r}; give the database that messages are put into")
        event.listen(engine, "connect", _wait_when_busy)
    return engine


def _wait_when_busy(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")


def _without_password(text: str) -> str:
    head, separator, tail = text.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if separator else text


class OutboxStore:
    """One outbox in one database. Safe to use from several threads; every call takes a connection of its own."""

    def __init__(
        self, engine: Engine, tables: OutboxTables, *, owns_engine: bool = True, transaction_s: float = 5.0
    ) -> None:
        """`transaction_s`: PostgreSQL ends an outbox transaction that is idle for so long. A process frozen in a
        transaction would otherwise keep the locks, and with the locks the lease."""
        self.name = tables.name
        self._owns_engine = owns_engine
        self._tables = tables
        self._is_postgresql = engine.dialect.name == "postgresql"
        # Every statement must see all rows committed by then, whatever the default of the database.
        self._engine = engine.execution_options(isolation_level="READ COMMITTED") if self._is_postgresql else engine
        name = tables.name
        self._patience_sql = f"SET LOCAL idle_in_transaction_session_timeout = {int(transaction_s * 1000)}"
        self._open_sql = _OPEN_POSTGRESQL.format(table=name)
        self._trigger_sql = _TRIGGER_POSTGRESQL.format(table=name, trigger=TRIGGER)

    # Tables

    def create(self) -> None:
        with self._transaction() as connection:
            create_tables(connection, self._tables.name)

    def check(self) -> None:
        """Raises InvalidInput if the tables do not exist, or lack the trigger."""
        rows, scanner = self._tables.rows, self._tables.scanner
        try:
            with self._engine.connect() as connection:
                connection.execute(select(rows).limit(0))
                connection.execute(select(scanner).limit(0))
                is_ordered = not self._is_postgresql or connection.exec_driver_sql(self._trigger_sql).scalar_one()
        except DBAPIError as error:
            if error.connection_invalidated or not _says_missing(error):
                raise OutboxFailed(self._tables.name, _told(error)) from error
            raise InvalidInput(
                f"there is no outbox {self._tables.name!r} in this database ({_told(error)}); make the tables with "
                f"create_table(), or with the output of `inturn outbox ddl --dialect {self._engine.dialect.name}`"
            ) from None
        if not is_ordered:
            raise InvalidInput(
                f"table {self._tables.name!r} lacks the trigger {TRIGGER}, needed for the order of rows; "
                "make the trigger with create_table(), or with the output of `inturn outbox ddl --dialect postgresql`"
            )

    # The lease

    def read_lease(self, name: str) -> ScanLease:
        """The lease. On the first scan the lease is made, free and under this name."""
        found = self.find_lease()
        if found is None:
            table = self._tables.scanner
            values = {"one": 1, "name": name, "epoch": 0, "beat": 0, "life_ms": 0, "marks": "{}"}
            quickest = postgresql.insert if self._is_postgresql else sqlite.insert
            with self._transaction() as connection:  # another scanner may be quicker
                connection.execute(quickest(table).values(values).on_conflict_do_nothing())
            found = self.find_lease()
        assert found is not None
        return found

    def take_lease(self, seen: ScanLease, owner: str, life_s: float) -> int | None:
        """Become the owner, unless something happened since it was read; the epoch, or None."""
        table = self._tables.scanner
        statement = (
            update(table)
            .where(table.c.epoch == seen.epoch, table.c.beat == seen.beat)
            .values(owner=owner, epoch=seen.epoch + 1, beat=0, life_ms=int(life_s * 1000))
        )
        with self._transaction() as connection:
            taken = connection.execute(statement).rowcount == 1
        return seen.epoch + 1 if taken else None

    def release(self, epoch: int) -> None:
        """Give it back, if it is still ours."""
        table = self._tables.scanner
        with self._transaction() as connection:
            connection.execute(update(table).where(table.c.epoch == epoch).values(owner=None, beat=table.c.beat + 1))

    def recovery_offsets(self, epoch: int) -> Offsets:
        """What the scanners before have left. OutboxLost if the lease is not ours any more."""
        table = self._tables.scanner
        with self._engine_errors(), self._engine.connect() as connection:
            found = connection.execute(select(table.c.marks).where(table.c.epoch == epoch)).first()
        if found is None:
            raise OutboxLost(self._tables.name)
        return _decoder.decode(found.marks)

    # Rows

    def newest_id(self) -> int:
        rows = self._tables.rows
        with self._engine_errors(), self._engine.connect() as connection:
            return connection.execute(select(func.max(rows.c.id))).scalar_one() or 0

    def read_rows(self, cursor: int, limit: int) -> ReadableRows:
        """Rows behind the cursor, up to the newest id below which no transaction can add a row any more."""
        rows = self._tables.rows
        with self._engine_errors(), self._engine.connect() as connection:
            if self._is_postgresql:
                newest, lows = connection.exec_driver_sql(self._open_sql).one()
            else:
                newest, lows = connection.execute(select(func.max(rows.c.id))).scalar_one(), []
            horizon = settled_id(newest or 0, lows)
            if horizon <= cursor:
                return ReadableRows([], None, len(lows))
            columns = [column for column in rows.c if column.name != "error"]
            statement = (
                select(*columns)
                .where(rows.c.id > cursor, rows.c.id <= horizon)
                .order_by(rows.c.id)
                .limit(bindparam("most"))
            )
            found = [_row(one) for one in connection.execute(statement, {"most": limit})]
        return ReadableRows(found, horizon if len(found) < limit else None, len(lows))

    def settle(self, epoch: int, stored: Sequence[int], refused: Sequence[Refusal], recovery: Offsets) -> None:
        """Renew the lease, delete stored rows, record refusals, and write the recovery offsets. Raises OutboxLost."""
        rows, scanner = self._tables.rows, self._tables.scanner
        text = msgspec.json.encode(recovery).decode()
        fence = update(scanner).where(scanner.c.epoch == epoch).values(beat=scanner.c.beat + 1, marks=text)
        with self._transaction() as connection:
            if connection.execute(fence).rowcount != 1:
                raise OutboxLost(self._tables.name)
            for ids in _chunks(stored):
                connection.execute(delete(rows).where(rows.c.id.in_(ids)))
            for one in refused:
                change = update(rows).where(rows.c.id == one.row_id)
                connection.execute(change.values(attempts=rows.c.attempts + 1, error=one.error))

    # The fallback of a producer

    def add(self, values: Sequence[dict[str, Any]]) -> list[int]:
        """Write rows, all or none; return the ids, in this order."""
        table = self._tables.rows
        statement = insert(table).returning(table.c.id)
        with self._transaction() as connection:
            return [connection.execute(statement, one).scalar_one() for one in values]

    def waiting_keys(self) -> list[tuple[str, bytes, int]]:
        """The keys with rows, and the id of the last row of every key."""
        rows = self._tables.rows
        place = rows.c.subject, rows.c.key
        statement = select(*place, func.max(rows.c.id)).where(rows.c.key.is_not(None)).group_by(*place)
        with self._engine_errors(), self._engine.connect() as connection:
            return [(subject, bytes(key), last) for subject, key, last in connection.execute(statement)]

    def gone(self, ids: Sequence[int]) -> set[int]:
        rows = self._tables.rows
        present: set[int] = set()
        with self._engine_errors(), self._engine.connect() as connection:
            for chunk in _chunks(ids):
                present.update(connection.execute(select(rows.c.id).where(rows.c.id.in_(chunk))).scalars())
        return set(ids) - present

    # Status

    def count(self) -> tuple[int, int | None]:
        """The number of rows, and when the oldest row was made."""
        rows = self._tables.rows
        with self._engine_errors(), self._engine.connect() as connection:
            found = connection.execute(select(func.count(), func.min(rows.c.created_at_ms)).select_from(rows)).one()
        return found[0], found[1]

    def refused(self, limit: int) -> list[tuple[Row, str]]:
        rows = self._tables.rows
        statement = select(rows).where(rows.c.error.is_not(None)).order_by(rows.c.id).limit(limit)
        with self._engine_errors(), self._engine.connect() as connection:
            return [(_row(one), one.error) for one in connection.execute(statement)]

    def find_lease(self) -> ScanLease | None:
        """The lease, or None before the first scan."""
        table = self._tables.scanner
        with self._engine_errors(), self._engine.connect() as connection:
            found = connection.execute(select(table)).first()
        if found is None:
            return None
        return ScanLease(found.name, found.owner, found.epoch, found.beat, found.life_ms, _decoder.decode(found.marks))

    def open_transactions(self) -> int:
        """The number of open transactions with rows; such transactions hold back rows behind."""
        if not self._is_postgresql:
            return 0
        with self._engine_errors(), self._engine.connect() as connection:
            return len(connection.exec_driver_sql(self._open_sql).one()[1])

    def close(self) -> None:
        """Close the connections, unless the engine belongs to the user."""
        if self._owns_engine:
            self._engine.dispose()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._engine_errors(), self._engine.begin() as connection:
            if self._is_postgresql:
                connection.exec_driver_sql(self._patience_sql)
            yield connection

    @contextlib.contextmanager
    def _engine_errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise OutboxFailed(self._tables.name, _told(error)) from error


def _row(found: Any) -> Row:
    key = None if found.key is None else bytes(found.key)
    return Row(
        id=found.id,
        token=found.token,
        subject=found.subject,
        key=key,
        body=bytes(found.body),
        tags=found.tags,
        properties=found.properties,
        message_id=found.message_id,
        partition=found.partition,
        created_at_ms=found.created_at_ms,
        attempts=found.attempts,
    )


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


def _told(error: SQLAlchemyError) -> str:
    """The error text of the database, without the statement and the values."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _says_missing(error: DBAPIError) -> bool:
    return "no such" in str(error.orig) or getattr(error.orig, "sqlstate", None) in ("42P01", "42703", "3F000")
