"""The tables of an outbox, and the settings of scanning: a table of messages, and a table with one row for the lease.

The statements are written out instead of generated, because users copy the statements into migrations.

PostgreSQL assigns ids before transactions commit, so a row can become visible before a row with a lower id. A trigger
makes every inserting transaction hold a shared advisory lock until the end. The name of the lock has the newest id from
before the first id of the transaction: all ids of the transaction are higher. From these locks a scanner knows how far
to read. SQLite has one writer at a time: ids commit in order.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, MetaData, Table, Text

from inturn.model.errors import InvalidInput
from inturn.model.settings import LeaseSettings


def _short_lease() -> LeaseSettings:
    # Shorter than a consumer's: an early takeover sends no row twice and no row out of order, see decision 0012.
    return LeaseSettings(life_s=6.0, renew_s=1.5, margin_s=0.5)


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """How an outbox is scanned: poll interval, rows in flight at once, retries."""

    poll_s: float = 0.1  # pause after a poll that found no rows
    batch: int = 500  # rows read at once
    in_flight: int = 4000  # rows on the way at once, and
    lane: int = 1000  # at most so many of these for one partition
    stuck_s: float = 1.0  # a partition that stores nothing for so long is passed over; other partitions continue
    retry_s: float = 10.0  # a refused row is tried again after this
    lease: LeaseSettings = field(default_factory=_short_lease)

    def __post_init__(self) -> None:
        for name in ("poll_s", "stuck_s", "retry_s", "batch", "in_flight", "lane"):
            value = getattr(self, name)
            kinds = int | float if name.endswith("_s") else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                raise InvalidInput(f"OutboxSettings.{name} is {value!r}; it must be a number above 0")
        if not isinstance(self.lease, LeaseSettings):
            raise InvalidInput(f"OutboxSettings.lease is {self.lease!r}; give a LeaseSettings")


DEFAULT_TABLE = "inturn_outbox"
NAME_LENGTH_MAX = 48  # derived names are longer, and PostgreSQL cuts names above 63
TRIGGER = "inturn_outbox_open"
DIALECTS = ("postgresql", "sqlite")
_NAME = re.compile(r"[a-z_][a-z0-9_]*\Z", re.ASCII)

_SQLITE = """
CREATE TABLE IF NOT EXISTS {table} (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the order; never given twice
    token TEXT NOT NULL DEFAULT (lower(hex(randomblob(16)))), -- names the row in the log, so that it is stored once
    subject TEXT NOT NULL,
    "key" BLOB,
    body BLOB NOT NULL,
    tags TEXT NOT NULL DEFAULT '[]', -- a JSON array of texts
    properties TEXT NOT NULL DEFAULT '{{}}', -- a JSON object of texts
    message_id TEXT,
    "partition" INTEGER, -- only where senders choose it (routing "selector")
    created_at_ms INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    attempts INTEGER NOT NULL DEFAULT 0,
    error TEXT -- why it was refused last
);
CREATE INDEX IF NOT EXISTS {table}_refused ON {bare} (id) WHERE error IS NOT NULL;
CREATE TABLE IF NOT EXISTS {table}_scanner (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    name TEXT NOT NULL,
    owner TEXT,
    epoch INTEGER NOT NULL,
    beat INTEGER NOT NULL,
    life_ms INTEGER NOT NULL,
    marks TEXT NOT NULL
);
"""

_POSTGRESQL = """
CREATE TABLE IF NOT EXISTS {table} (
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY, -- the order; never given twice
    token text NOT NULL DEFAULT gen_random_uuid()::text, -- names the row in the log, so that it is stored once
    subject text NOT NULL,
    "key" bytea,
    body bytea NOT NULL,
    tags text NOT NULL DEFAULT '[]', -- a JSON array of texts
    properties text NOT NULL DEFAULT '{{}}', -- a JSON object of texts
    message_id text,
    "partition" integer, -- only where senders choose it (routing "selector")
    created_at_ms bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    attempts integer NOT NULL DEFAULT 0,
    error text -- why it was refused last
);
CREATE INDEX IF NOT EXISTS {bare}_refused ON {table} (id) WHERE error IS NOT NULL;
CREATE TABLE IF NOT EXISTS {table}_scanner (
    one integer PRIMARY KEY CHECK (one = 1),
    name text NOT NULL,
    owner text,
    epoch bigint NOT NULL,
    beat bigint NOT NULL,
    life_ms bigint NOT NULL,
    marks text NOT NULL
);
CREATE OR REPLACE FUNCTION {prefix}inturn_outbox_open() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    setting text := 'inturn.outbox_' || TG_RELID;
    newest bigint;
BEGIN
    IF current_setting(setting, true) = 'open' THEN -- once in a transaction is enough
        RETURN NULL;
    END IF;
    newest := coalesce(pg_sequence_last_value(pg_get_serial_sequence(TG_RELID::regclass::text, 'id')), 0);
    -- held until the transaction ends: until then nobody sends a row with an id above this one
    PERFORM pg_advisory_xact_lock_shared(TG_RELID::integer, newest::bit(32)::integer);
    PERFORM set_config(setting, 'open', true);
    RETURN NULL;
END
$$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{table}'::regclass AND tgname = '{trigger}') THEN
        -- for each statement, since that runs before the first id is given out
        CREATE TRIGGER {trigger} BEFORE INSERT ON {table}
            FOR EACH STATEMENT EXECUTE FUNCTION {prefix}inturn_outbox_open();
    END IF;
END
$$;
"""
_TEXTS = {"sqlite": _SQLITE, "postgresql": _POSTGRESQL}


@dataclass(frozen=True, slots=True)
class OutboxTables:
    """The two tables as SQLAlchemy objects."""

    name: str
    rows: Table
    scanner: Table


def check_table_name(name: object) -> str:
    """`table`, or `schema.table`. Used without quotes, so the name must not need quotes."""
    parts = name.split(".") if isinstance(name, str) else []
    if not 1 <= len(parts) <= 2 or not all(_NAME.match(part) and len(part) <= NAME_LENGTH_MAX for part in parts):
        raise InvalidInput(
            f"table name {name!r}: use 1 to {NAME_LENGTH_MAX} of the characters a-z 0-9 _, not a digit first; "
            "a schema may stand before the name, with a dot between"
        )
    return ".".join(parts)


def make_tables(name: str) -> OutboxTables:
    schema, _, bare = check_table_name(name).rpartition(".")
    metadata = MetaData(schema=schema or None)
    rows = Table(
        bare,
        metadata,
        Column("id", BigInteger, primary_key=True),
        Column("token", Text),
        Column("subject", Text),
        Column("key", LargeBinary),
        Column("body", LargeBinary),
        Column("tags", Text),
        Column("properties", Text),
        Column("message_id", Text),
        Column("partition", Integer),
        Column("created_at_ms", BigInteger),
        Column("attempts", Integer),
        Column("error", Text),
    )
    scanner = Table(
        f"{bare}_scanner",
        metadata,
        Column("one", Integer, primary_key=True, autoincrement=False),
        Column("name", Text),
        Column("owner", Text),
        Column("epoch", BigInteger),
        Column("beat", BigInteger),
        Column("life_ms", BigInteger),
        Column("marks", Text),
    )
    return OutboxTables(name, rows, scanner)


def ddl(dialect: str, name: str = DEFAULT_TABLE) -> list[str]:
    """The statements that make the tables, for a migration. Running the statements again changes nothing."""
    if dialect not in _TEXTS:
        raise InvalidInput(f"an outbox can be kept in {' or '.join(DIALECTS)}, not in {dialect!r}")
    schema, _, bare = check_table_name(name).rpartition(".")
    prefix = f"{schema}." if schema else ""
    text = _TEXTS[dialect].format(table=name, bare=bare, prefix=prefix, trigger=TRIGGER)
    return [statement.strip() for statement in re.split(r";\n(?=CREATE|DO|\Z)", text) if statement.strip()]
