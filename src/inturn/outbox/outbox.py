"""The outbox: messages in a table of a database, until a scanner sends the messages.

`Outbox` is the public class. `FallbackOutbox` is the outbox of a producer: messages that could not be sent, and a
scanner in the same process that sends them later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from sqlalchemy import Engine

from inturn.model.errors import InvalidInput
from inturn.model.settings import Limits, checked
from inturn.model.time import Clock
from inturn.outbox.row import checked_values, create_tables, json_text, put_row
from inturn.outbox.scanner import Connected, Scanner
from inturn.outbox.store import OutboxStore, open_engine
from inturn.outbox.table import DEFAULT_TABLE, OutboxSettings, check_table_name, make_tables
from inturn.producer.fallback import FallbackRow
from inturn.producer.validation import MessageOptions
from inturn.protocol.commands import Node


class FallbackOutbox:
    """A `FallbackStore`. The scanner takes part in the lease of the outbox: several producers may share an outbox."""

    def __init__(self, store: OutboxStore, node: Node, clock: Clock, settings: OutboxSettings) -> None:
        store.create()
        self._store = store
        self._scanner = Scanner(store, node, settings, clock)
        self._scanner.start()

    def waiting(self) -> list[tuple[str, bytes, int]]:
        return self._store.waiting_keys()

    def write(self, rows: Sequence[FallbackRow]) -> list[int]:
        ids = self._store.add([_values(row) for row in rows])
        self._scanner.wake()
        return ids

    def gone(self, row_ids: Sequence[int]) -> set[int]:
        return self._store.gone(row_ids)

    def close(self) -> None:
        self._scanner.stop()
        self._store.close()


def _values(row: FallbackRow) -> dict[str, object]:
    message = row.message
    return {
        "subject": row.subject,
        "key": message.key,
        "body": message.body,
        "tags": json_text(message.tags),
        "properties": json_text(message.properties),
        "message_id": message.message_id,
        "partition": row.partition,
        "created_at_ms": message.born_at_ms,
    }


REFUSED_COUNT = 100


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that could not be sent: the row, the number of attempts, and the last error. The row is tried again; to
    give the row up, delete the row from the table."""

    id: int
    subject: str
    key: bytes | None
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The content of an outbox, and the current scanner."""

    table: str
    waiting: int  # rows, refused rows included
    oldest_at_ms: int | None  # when the oldest row was put
    refused: tuple[RefusedRow, ...]  # the first hundred
    scanner: str | None  # holder of the lease, or last holder that ended without a release
    epoch: int  # counts the scanners
    open_transactions: int  # transactions with rows that have not ended (PostgreSQL)


class Outbox:
    """A table of messages that wait to be sent. Put messages into the table in the transaction that makes them true.

    `database` is the place of the table, for scanning: the path of a SQLite file, a URL (`sqlite:///shop.db`,
    `postgresql://user@host/shop`), or a SQLAlchemy Engine. `put` alone needs no database. `limits` are those of the
    subjects: a message over a limit is better refused by `put` than by the scanner.
    """

    def __init__(
        self,
        database: str | os.PathLike[str] | Engine | None = None,
        *,
        table: str = DEFAULT_TABLE,
        limits: Limits | None = None,
        settings: OutboxSettings | None = None,
    ) -> None:
        self.table = check_table_name(table)
        self._limits = checked(limits, Limits, "limits") or Limits()
        self._settings = checked(settings, OutboxSettings, "settings") or OutboxSettings()
        if database is not None and not isinstance(database, str | os.PathLike | Engine):
            raise InvalidInput(f"database={database!r}: give a path, a URL or a SQLAlchemy Engine")
        self._database = database

    def create_table(self, connection: object) -> None:
        """Make the table of messages and the table of the scanner, unless the tables exist. Runs in the transaction of
        this connection: commit the transaction."""
        create_tables(connection, self.table)

    def put(
        self,
        connection: object,
        subject: str,
        body: bytes,
        *,
        partition: int | None = None,
        **options: Unpack[MessageOptions],
    ) -> int:
        """Insert a message into the table, in the transaction of this connection; return the id of the row.

        The message is sent after the commit, and never after a rollback. The connection is a SQLAlchemy Connection or
        Session, a sqlite3.Connection or a psycopg.Connection. Messages of one key are stored in the order of the row
        ids. Bad input raises InvalidInput before the row is written; facts known only to the node (does the subject
        exist?) are checked by the scanner. `partition` is for subjects with routing "selector". The other options are
        `key`, `tags`, `properties` and `message_id`, as in `Producer.send`.
        """
        values = checked_values(subject, body, partition, self._limits, **options)
        return put_row(connection, self.table, values)

    def scan(self, connection: Connected, settings: OutboxSettings | None = None) -> Scanner:
        """A scanner that sends the messages of the table through this connection; not started yet.

        Use the scanner in a `with` block, or call `start` and `stop`. Stop the scanner before the connection is closed.
        """
        chosen = checked(settings, OutboxSettings, "settings") or self._settings
        return Scanner(self._store(chosen.lease.life_s), connection.node, chosen)

    def fallback_store(self, node: Node, clock: Clock) -> FallbackOutbox:
        """For a producer: see `Connection.producer`."""
        return FallbackOutbox(self._store(create=True), node, clock, self._settings)

    def status(self) -> OutboxStatus:
        """Waiting rows, refused rows with the reason, and the current scanner."""
        store = self._store()
        try:
            store.check()
            waiting, oldest_at_ms = store.count()
            refused = tuple(
                RefusedRow(row.id, row.subject, row.key, row.attempts, error)
                for row, error in store.refused(REFUSED_COUNT)
            )
            lease = store.find_lease()
            return OutboxStatus(
                table=self.table,
                waiting=waiting,
                oldest_at_ms=oldest_at_ms,
                refused=refused,
                scanner=lease.owner if lease is not None else None,
                epoch=lease.epoch if lease is not None else 0,
                open_transactions=store.open_transactions(),
            )
        finally:
            store.close()

    def _store(self, transaction_s: float = 5.0, *, create: bool = False) -> OutboxStore:
        if self._database is None:
            raise InvalidInput("this outbox has no database; give one: Outbox('postgresql://…')")
        return OutboxStore(
            open_engine(self._database, create=create),
            make_tables(self.table),
            owns_engine=not isinstance(self._database, Engine),
            transaction_s=transaction_s,
        )
