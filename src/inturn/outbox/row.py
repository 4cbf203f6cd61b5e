"""A row of an outbox: a message that waits to be sent.

Also writes rows inside a transaction of the user, through any supported kind of connection.
"""

from __future__ import annotations

import sqlite3
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection as AlchemyConnection
from sqlalchemy import text

from inturn.model.errors import InvalidInput
from inturn.model.message import Outgoing
from inturn.model.settings import Limits
from inturn.model.subject import check_name
from inturn.outbox.table import ddl
from inturn.producer.validation import as_bytes, check_size, checked_id, checked_key, checked_properties, checked_tags

TOKEN = "%outbox"  # the property that names the row in the log
_tags = msgspec.json.Decoder(tuple[str, ...])
_properties = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Row:
    """A row as read. Other programs may write any content into the table: `message` raises InvalidInput with the
    reason."""

    id: int
    token: str
    subject: str
    key: bytes | None
    body: bytes
    tags: str
    properties: str
    message_id: str | None
    partition: int | None
    created_at_ms: int
    attempts: int

    @property
    def place(self) -> tuple[str, bytes] | None:
        """Subject and key. Rows of one place are sent one after the other; None for a row without a key."""
        return None if self.key is None else (self.subject, self.key)

    def message(self) -> Outgoing:
        """The message as put. A message without a message id gets the token of the row. Raises InvalidInput."""
        try:
            tags, properties = _tags.decode(self.tags), _properties.decode(self.properties)
        except msgspec.MsgspecError as error:
            raise InvalidInput(
                f"tags {self.tags[:60]!r} and properties {self.properties[:60]!r} must be a JSON array and a JSON "
                f"object of texts: {error}"
            ) from None
        message_id = self.token if self.message_id is None else self.message_id
        return Outgoing(self.body, self.key, self.created_at_ms, tags, properties, message_id)


def checked_values(
    subject: str,
    body: bytes,
    partition: int | None,
    limits: Limits,
    *,
    key: str | bytes | None = None,
    tags: tuple[str, ...] = (),
    properties: dict[str, str] | None = None,
    message_id: str | None = None,
) -> dict[str, Any]:
    """The values of a row, by column, checked as a producer checks a message. Raises InvalidInput."""
    check_name("subject", subject)
    body = as_bytes("body", body)
    check_size("the body", len(body), limits.body_bytes, "Limits.body_bytes")
    key = checked_key(key, limits.key_bytes)
    if properties:
        checked_properties(properties, limits.properties_bytes)
    if tags != ():
        tags, _ = checked_tags(tags, limits.properties_bytes)
    if message_id is not None:
        checked_id(message_id, limits.key_bytes)
    if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int) or partition < 0):
        raise InvalidInput(f"partition={partition!r}: give the index of a partition, or leave it out")
    return {
        "subject": subject,
        "key": key,
        "body": body,
        "tags": json_text(tags),
        "properties": json_text(properties or {}),
        "message_id": message_id,
        "partition": partition,
    }


def json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()


_KINDS = "a SQLAlchemy Connection or Session, a sqlite3.Connection or a psycopg.Connection"


def put_row(connection: object, table: str, values: dict[str, Any]) -> int:
    """Insert the row, run no other statement, and return the id."""
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
    """In the transaction of this connection, if a transaction was begun."""
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
    """The SQLAlchemy connection; for a session, the connection of the transaction."""
    if isinstance(connection, AlchemyConnection):
        return connection
    orm = sys.modules.get("sqlalchemy.orm")  # loaded if the caller has a session
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
