"""The user's side: a database with a user's table, connections of every kind, and a check of the sent messages."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

import sqlalchemy
from sqlalchemy.orm import Session

from inturn import Connection, Message, Outbox
from inturn.outbox.row import TOKEN

KINDS = ["dbapi", "alchemy-connection", "alchemy-session"]


def engine_of(url: str) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))


@contextlib.contextmanager
def opened(url: str, kind: str = "dbapi") -> Iterator[Any]:
    """A connection without a started transaction."""
    if kind != "dbapi":
        engine = engine_of(url)
        with engine.connect() if kind == "alchemy-connection" else Session(engine) as connection:
            yield connection
        engine.dispose()
    elif url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            yield connection
    else:
        import psycopg

        with contextlib.closing(psycopg.connect(url)) as connection:
            yield connection


def made(url: str, **options: Any) -> Outbox:
    """An outbox with an existing table."""
    outbox = Outbox(url, **options)
    with opened(url) as connection:
        outbox.create_table(connection)
        connection.commit()
    return outbox


def fill(outbox: Outbox, url: str, count: int, keys: int = 5, start: int = 0) -> None:
    """Put numbers as bodies, in a single transaction."""
    with opened(url) as connection:
        for number in range(start, start + count):
            outbox.put(connection, "orders", b"%d" % number, key=f"key-{number % keys}")
        connection.commit()


def stored(mq: Connection, subject: str = "orders") -> list[Message]:
    return list(mq.reader(subject))


def by_key(messages: list[Message]) -> dict[bytes | None, list[int]]:
    """The numbers of every key, in the order of the log."""
    found: dict[bytes | None, list[int]] = {}
    for message in messages:
        found.setdefault(message.key, []).append(int(message.body))
    return found


def check_once_and_in_order(messages: list[Message], count: int) -> None:
    """All numbers are stored once, and the numbers of a key are in order."""
    assert sorted(int(message.body) for message in messages) == list(range(count))
    for numbers in by_key(messages).values():
        assert numbers == sorted(numbers)
    tokens = [message.properties[TOKEN] for message in messages]
    assert len(set(tokens)) == count
