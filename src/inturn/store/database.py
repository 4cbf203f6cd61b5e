"""The database of a node: a single connection, and a single transaction at a time.

`Cache` holds query results that never change after a commit. The `check_…` functions validate values of clients before
the values go into a row, because a database may accept values that it cannot return.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from sqlalchemy import URL, Connection, Engine, RootTransaction, create_engine, event
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, StaticPool

from inturn.model.errors import Closed, InvalidInput, StorageError
from inturn.store import schema

NUMBER_MAX = 2**63 - 1
KEY_BYTES_MAX = 1 << 20  # for all subjects; the subject's own limit is checked when a message is sent
BUSY_TIMEOUT_S = 5.0

_STOPPING = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_NEXT_STEP = {
    sqlite3.SQLITE_FULL: "the disk is full and nothing was changed; free some space, then try again",
    sqlite3.SQLITE_BUSY: "another process has locked the database; close the folder there, then try again",
    sqlite3.SQLITE_CANTOPEN: "check that the folder exists and is writable, then try again",
    sqlite3.SQLITE_READONLY: "nothing was changed; make the file and its folder writable, then try again",
    sqlite3.SQLITE_IOERR: "check the disk, then close and open the folder again",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; run `inturn doctor`, then restore the file",
    sqlite3.SQLITE_NOTADB: "the file is not a database of inturn; move the file away, or use another folder",
}


class Database:
    """The durable state of a node. All methods may be called from any thread; transactions run one after the other.

    Committed changes survive kill -9 and power loss (unless in memory). Failures of the storage raise StorageError.
    After an I/O error the content of the disk is unknown, so the database refuses all transactions until it is opened
    again.
    """

    def __init__(self, engine: Engine, connection: Connection) -> None:
        """Use `Database.open`."""
        self.lock = threading.RLock()
        self.rollback_count = 0
        self._engine = engine
        self._connection = connection
        self._open_blocks = 0
        self._failure: BaseException | None = None  # of an inner block
        self._stopped: str | None = None
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None) -> Database:
        """Open or make the file. None: a database in memory, empty at every open, gone when closed.

        Raises SchemaMismatch for a file of a different version, StorageError for a file that cannot be opened.
        """
        engine = _memory_engine() if path is None else _file_engine(os.path.abspath(path))
        try:
            connection = engine.connect()
        except (DatabaseError, sqlite3.DatabaseError) as error:
            engine.dispose()
            raise StorageError("state", _explain(error)) from error
        database = cls(engine, connection)
        try:
            with database.transaction() as opened:
                if path is None:
                    schema.create(opened)
                else:
                    schema.prepare(opened)
        except BaseException:
            database.close()
            raise
        return database

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All changes of the block are stored, or none. The changes are durable when the block is left.

        A block inside a block of the same thread joins the outer transaction. If an exception leaves an inner block,
        the whole transaction is rolled back. If the outer block suppresses the exception, the outermost block raises
        the exception again.
        """
        with self.lock:
            self._check_usable()
            try:
                if self._open_blocks:
                    with self._joined():
                        yield self._connection
                else:
                    with self._outermost():
                        yield self._connection
            except DatabaseError as error:
                if not isinstance(error, OperationalError) and type(error) is not DatabaseError:
                    raise  # a bug in inturn, such as a violated constraint
                raise self._failed(error) from error

    def close(self) -> None:
        """Close the file. May be called twice. An in-memory database is gone."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self._connection.close()
                self._engine.dispose()

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[None]:
        transaction = self._connection.begin()
        self._open_blocks = 1
        try:
            yield
            if self._failure is not None:
                raise self._failure
            transaction.commit()
        except BaseException:
            self.rollback_count += 1
            self._roll_back(transaction)
            raise
        finally:
            self._open_blocks = 0
            self._failure = None

    def _roll_back(self, transaction: RootTransaction) -> None:
        transaction.rollback()
        self._connection.connection.rollback()  # SQLAlchemy sends no rollback after a failed commit

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        self._open_blocks += 1
        try:
            yield
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            raise
        finally:
            self._open_blocks -= 1

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed("database")
        if self._stopped is not None:
            raise StorageError("state", self._stopped)

    def _failed(self, error: DatabaseError) -> StorageError:
        explanation = _explain(error)
        if _primary_code(error) in _STOPPING:
            self._stopped = f"the database has stopped: {explanation}"
        return StorageError("state", explanation)


def _primary_code(error: DatabaseError | sqlite3.DatabaseError) -> int | None:
    cause = error.orig if isinstance(error, DatabaseError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _explain(error: DatabaseError | sqlite3.DatabaseError) -> str:
    cause = error.orig if isinstance(error, DatabaseError) else error
    code = _primary_code(error)
    next_step = "fix the cause, then try again"
    if code is not None:
        next_step = _NEXT_STEP.get(code, next_step)
    return f"the database reported {str(cause)!r}: {next_step}"


@functools.cache
def _memory_engine() -> Engine:
    """The engine of all in-memory databases; every connection is a separate database.

    All databases share the compiled statements: for a simulation, compiling statements for every database would take
    longer than the rest of the history.
    """
    engine = create_engine("sqlite://", poolclass=NullPool, connect_args={"check_same_thread": False})
    _take_over_transactions(engine)
    return engine


def _file_engine(path: str) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=path),
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_S},
    )
    _take_over_transactions(engine)
    event.listen(engine, "connect", _make_durable)
    return engine


def _take_over_transactions(engine: Engine) -> None:
    """Begin transactions with the write lock. The driver would begin transactions late and without the write lock."""

    def connected(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)


def _make_durable(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone does not reach the disk


Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Cached query results. A rollback clears the cache, because cached values may belong to the transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rollback_count = database.rollback_count
        self._values: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """Waits for transactions of other threads, so that only committed values are returned."""
        with self._database.lock:
            self._forget_rolled_back()
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Call inside the transaction that read or wrote the value."""
        self._forget_rolled_back()
        self._values[key] = value

    def _forget_rolled_back(self) -> None:
        if self._rollback_count != self._database.rollback_count:
            self._rollback_count = self._database.rollback_count
            self._values.clear()


def check_number(what: str, value: object) -> None:
    """Raise InvalidInput unless the value is a whole number from 0 to the largest number of a column."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= NUMBER_MAX:
        raise InvalidInput(f"{what} {value!r}: it must be a whole number from 0 to {NUMBER_MAX}")


def check_bytes(what: str, value: object, bytes_max: int) -> None:
    """Raise InvalidInput unless the value is bytes, at most `bytes_max` long."""
    if not isinstance(value, bytes):
        raise InvalidInput(f"{what} is a {type(value).__name__}: it must be bytes")
    if len(value) > bytes_max:
        raise InvalidInput(f"{what} has {len(value)} bytes: the limit is {bytes_max}")


def check_text(what: str, value: object, length_max: int) -> None:
    """Raise InvalidInput unless the value is a text, at most `length_max` long."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is a {type(value).__name__}: it must be a text")
    if len(value) > length_max:
        raise InvalidInput(f"{what} has {len(value)} characters: the limit is {length_max}")


def storable(text: str, length_max: int) -> str:
    """The text, cut to the limit, with escapes for characters that no database accepts (lone surrogates, zeros)."""
    return text[:length_max].encode(errors="backslashreplace").decode().replace("\0", "\\0")
