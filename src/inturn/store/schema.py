"""The tables of the database, their creation, and migrations from older versions.

Rows refer to partitions by id; other layers use the index within the subject (`position`). Folders and batches outside
of the database refer to ids of partitions, groups and producers. So an id is never used twice, not even after a
deletion: AUTOINCREMENT on SQLite, a sequence on PostgreSQL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.schema import CreateIndex, CreateTable

from inturn.model.errors import SchemaMismatch

SCHEMA_VERSION = 5
_UNKNOWN_VERSION = 0

Migration: TypeAlias = Callable[[Connection], None]


def _remember_lives_and_nonces(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE leases ADD COLUMN life_ms BIGINT NOT NULL DEFAULT 15000")
    connection.exec_driver_sql("ALTER TABLE producers ADD COLUMN nonce VARCHAR")


def _let_subjects_grow(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE key_requests ADD COLUMN origin INTEGER")
    for table in (descents, gates):
        connection.exec_driver_sql(str(CreateTable(table).compile(dialect=connection.dialect)))


def _tell_modes_of_groups(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE groups ADD COLUMN mode VARCHAR NOT NULL DEFAULT 'exclusive'")
    connection.exec_driver_sql("ALTER TABLE groups ADD COLUMN set_order VARCHAR")


def _let_there_be_broker_groups(connection: Connection) -> None:
    for table in (node_role, broker_groups, seals):
        connection.exec_driver_sql(str(CreateTable(table).compile(dialect=connection.dialect)))


# The first migration leads from version 1 to 2, and so on: always SCHEMA_VERSION - 1 migrations.
MIGRATIONS: Sequence[Migration] = (
    _remember_lives_and_nonces,
    _let_subjects_grow,
    _tell_modes_of_groups,
    _let_there_be_broker_groups,
)

metadata = MetaData()

# Ids that the database counts. In SQLite only INTEGER is counted automatically; INTEGER has 64 bits there.
_COUNTED = BigInteger().with_variant(Integer(), "sqlite")

schema_version = Table(
    "schema_version",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
)

subjects = Table(
    "subjects",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("routing", String, nullable=False),
    Column("strategy", String, nullable=False),
    Column("keyless", String, nullable=False),
    Column("body_bytes_max", BigInteger, nullable=False),
    Column("key_bytes_max", BigInteger, nullable=False),
    Column("properties_bytes_max", BigInteger, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

partitions = Table(
    "partitions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("subject_id", ForeignKey("subjects.id"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("broker_group", String, nullable=False),
    Column("name", String, nullable=False),
    # The highest offset committed before a reset. Offsets below were delivered, so the log must not use them again.
    Column("offset_floor", BigInteger, nullable=False),
    UniqueConstraint("subject_id", "position"),
    UniqueConstraint("broker_group", "name"),
    sqlite_autoincrement=True,
)

routes = Table(
    "routes",
    metadata,
    Column("subject_id", ForeignKey("subjects.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("ranges", Text, nullable=False),
)

descents = Table(
    "descents",
    metadata,
    Column("child_id", ForeignKey("partitions.id"), primary_key=True),
    Column("parent_id", ForeignKey("partitions.id"), primary_key=True),
    Column("version", Integer, nullable=False),  # of the route that moved the slots
    Column("slots", LargeBinary, nullable=False),
    Column("barrier", BigInteger, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("subject_id", ForeignKey("subjects.id"), nullable=False),
    Column("name", String, nullable=False),
    Column("start", String, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("mode", String, nullable=False),  # a GroupMode; never changes
    Column("set_order", String),  # null: the members' settings decide
    UniqueConstraint("subject_id", "name"),
    sqlite_autoincrement=True,
)

offsets = Table(
    "offsets",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("partition_id", ForeignKey("partitions.id"), primary_key=True),
    Column("next_offset", BigInteger, nullable=False),
    Column("finished", LargeBinary, nullable=False, default=b""),  # a roaring bitmap of offsets, or empty
    Column("epoch", BigInteger, nullable=False),
    Column("commit_number", BigInteger, nullable=False, default=0),  # the highest number of that epoch
    Column("updated_at_ms", BigInteger, nullable=False),
    Index("offsets_by_partition", "partition_id", "next_offset"),
)

leases = Table(
    "leases",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("partition_id", ForeignKey("partitions.id"), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("owner", String),  # null: released
    Column("ask", BigInteger, nullable=False),  # the owner's acquire number that was granted
    Column("local", Boolean, nullable=False),
    Column("changed_at_ms", BigInteger, nullable=False),  # the time of the grant, or of the release without an owner
    Column("life_ms", BigInteger, nullable=False),  # the life at the grant; settings may have changed since
)

gates = Table(
    "gates",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("partition_id", ForeignKey("partitions.id"), primary_key=True),  # an open child partition
    Column("opened_at_ms", BigInteger, nullable=False),
)

failures = Table(
    "failures",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("partition_id", ForeignKey("partitions.id"), primary_key=True),
    Column("offset", BigInteger, primary_key=True, autoincrement=False),
    Column("key", LargeBinary),
    Column("attempts", BigInteger, nullable=False),
    Column("error", Text, nullable=False),
    Column("waiting", BigInteger, nullable=False),
    Column("is_exhausted", Boolean, nullable=False),
    Column("first_at_ms", BigInteger, nullable=False),
    Column("last_at_ms", BigInteger, nullable=False),
)

lots = Table(
    "lots",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("partition_id", ForeignKey("partitions.id"), primary_key=True),  # the lease holder runs the parking lot
    Column("key", LargeBinary, primary_key=True),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("since_ms", BigInteger, nullable=False),
)

parked = Table(
    "parked",
    metadata,
    Column("position", _COUNTED, primary_key=True),
    Column("group_id", ForeignKey("groups.id"), nullable=False),
    Column("partition_id", ForeignKey("partitions.id"), nullable=False),  # of the parking lot
    Column("key", LargeBinary, nullable=False),
    Column("origin_id", ForeignKey("partitions.id"), nullable=False),  # the source of the message
    Column("offset", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),
    UniqueConstraint("group_id", "origin_id", "offset"),
    Index("parked_by_lot", "group_id", "partition_id", "key", "position"),
    # Readers continue behind a position, so a position is never used twice either.
    sqlite_autoincrement=True,
)

key_requests = Table(
    "key_requests",
    metadata,
    Column("id", _COUNTED, primary_key=True),
    Column("group_id", ForeignKey("groups.id"), nullable=False),
    Column("partition_id", ForeignKey("partitions.id"), nullable=False),
    Column("key", LargeBinary, nullable=False),
    Column("kind", String, nullable=False),
    Column("offset", BigInteger),
    Column("by", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("origin", Integer),  # index of the message's source partition, if different
    Column("asked_at_ms", BigInteger, nullable=False),
    Column("done_at_ms", BigInteger),  # null: not carried out yet. Rows stay as a record of who requested what
    Index("key_requests_by_key", "group_id", "key", "id"),
    sqlite_autoincrement=True,
)

members = Table(
    "members",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("member", String, primary_key=True),
    Column("online", Boolean, nullable=False),
    Column("changed_at_ms", BigInteger, nullable=False),
)

producers = Table(
    "producers",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String, unique=True),
    Column("epoch", BigInteger, nullable=False),
    Column("nonce", String),  # of the last opening
    sqlite_autoincrement=True,
)

# At most 1 row. Without a row: a node that is meta and broker at once.
node_role = Table(
    "node_role",
    metadata,
    Column("role", String, primary_key=True),
    Column("broker_group", String, nullable=False),
    Column("folder_id", String, nullable=False),
)

broker_groups = Table(
    "broker_groups",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("state", String, nullable=False),
    Column("address", String, nullable=False),
    Column("folder_id", String, nullable=False),
    Column("changed_at_ms", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

# A growth that has begun: the partitions of the subject refuse appends by a route before this version.
seals = Table(
    "seals",
    metadata,
    Column("subject_id", ForeignKey("subjects.id"), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("growth", String, nullable=False),
)

_INSERT_VERSION = insert(schema_version).values(version=bindparam("new"))
_UPDATE_VERSION = update(schema_version).values(version=bindparam("new"))
_SELECT_VERSION = select(schema_version.c.version)


def create(connection: Connection, version: int = SCHEMA_VERSION) -> None:
    """Make all tables in an empty database. Call inside a transaction."""
    for statement in _definitions(connection.dialect):
        connection.exec_driver_sql(statement)
    connection.execute(_INSERT_VERSION, {"new": version})


def prepare(
    connection: Connection, version: int = SCHEMA_VERSION, migrations: Sequence[Migration] = MIGRATIONS
) -> None:
    """Make the tables in an empty database, or migrate an older database. Call inside a transaction.

    Raises SchemaMismatch for a newer database, or for a database of other software (reported as version 0).
    """
    names = set(inspect(connection).get_table_names())
    if not names:
        create(connection, version)
        return
    found = _found_version(connection) if schema_version.name in names else _UNKNOWN_VERSION
    if not 1 <= found <= version:
        raise SchemaMismatch(found, version)
    if found < version:
        for migration in migrations[found - 1 : version - 1]:
            migration(connection)
        connection.execute(_UPDATE_VERSION, {"new": version})


def _found_version(connection: Connection) -> int:
    rows = connection.execute(_SELECT_VERSION).scalars().all()
    return rows[0] if len(rows) == 1 and isinstance(rows[0], int) else _UNKNOWN_VERSION


@functools.cache
def _definitions(dialect: Dialect) -> tuple[str, ...]:
    """The statements that make the tables. Cached: compiling takes longer than running, and simulations make many
    databases."""
    elements: list[CreateTable | CreateIndex] = []
    for table in metadata.sorted_tables:
        elements.append(CreateTable(table))
        elements.extend(CreateIndex(index) for index in table.indexes)
    return tuple(str(element.compile(dialect=dialect)) for element in elements)
