"""Writing a row inside a transaction that is somebody else's, through whatever connection they have."""

from __future__ import annotations

import sqlite3
import sys
from typing import Any

from sqlalchemy import Connection as AlchemyConnection
from sqlalchemy import text

from inturn.model.errors import InvalidInput
from inturn.outbox.table import ddl

_KINDS = "a SQLAlchemy Connection or Session, a sqlite3.Connection or a psycopg.Connection"


def put_row(connection: object, table: str, values: dict[str, Any]) -> int:
    """Insert one row and nothing else; its id."""
    names = ", ".join(f'"{name}"' for name in values)
    alchemy = _alchemy(connection)
    if alchemy is not None:
        marks = ", ".join(f":{name}" for name in values)
        statement = text(f"INSERT INTO {table} ({names}) VALUES ({marks}) RETURNING id")
        return int(alchemy.execute(statement, values).scalar_one())
    if isinstance(connection, sqlite3.Connection):
        marks = ", ".join("?" for _ in values)
        inserted = connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))
        return int(inserted.lastrowid or 0)
    psycopg = _psycopg(connection)
    marks = ", ".join("%s" for _ in values)
    with psycopg.cursor(row_factory=_tuple_row()) as cursor:
        cursor.execute(f"INSERT INTO {table} ({names}) VALUES ({marks}) RETURNING id", tuple(values.values()))
        return int(cursor.fetchone()[0])


def create_tables(connection: object, table: str) -> None:
    """In the transaction of this connection, if it has begun one."""
    alchemy = _alchemy(connection)
    if alchemy is not None:
        for statement in ddl(alchemy.dialect.name, table):
            alchemy.exec_driver_sql(statement)
    elif isinstance(connection, sqlite3.Connection):
        for statement in ddl("sqlite", table):
            connection.execute(statement)
    else:
        for statement in ddl("postgresql", table):
            _psycopg(connection).execute(statement)


def _alchemy(connection: object) -> AlchemyConnection | None:
    """The SQLAlchemy connection, of a session the one of its transaction."""
    if isinstance(connection, AlchemyConnection):
        return connection
    orm = sys.modules.get("sqlalchemy.orm")  # who has a session has loaded it
    if orm is None:
        return None
    if isinstance(connection, orm.scoped_session):
        connection = connection()
    if isinstance(connection, orm.Session):
        found: AlchemyConnection = connection.connection()
        return found
    return None


def _psycopg(connection: object) -> Any:
    psycopg = sys.modules.get("psycopg")
    if psycopg is None or not isinstance(connection, psycopg.Connection):
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise InvalidInput(f"an outbox writes through {_KINDS}, not through a {kind}")
    return connection


def _tuple_row() -> Any:
    from psycopg.rows import tuple_row

    return tuple_row
