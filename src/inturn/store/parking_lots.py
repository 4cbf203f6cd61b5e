"""Parking lots: the parked keys of a group, and the parked messages of every key in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    LargeBinary,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)

from inturn.model.errors import InvalidInput
from inturn.model.settings import LotState, one_of
from inturn.protocol.commands import Lot, LotChange, LotContent, ParkedMessage
from inturn.store.database import KEY_BYTES_MAX, Database, check_bytes, check_number, check_text, storable
from inturn.store.partition_ids import PartitionIds
from inturn.store.schema import lots, parked, partitions

REASON_LENGTH_MAX = 2_000
CONTENT_BYTES_MAX = 900_000_000  # SQLite's limit for a whole row is a thousand million bytes
READ_COUNT_MAX = 1_000

_OF_GROUP = lots.c.group_id == bindparam("of_group")
_ROW = (_OF_GROUP, lots.c.partition_id == bindparam("of_partition"), lots.c.key == bindparam("of_key"))
_SELECT_PARTITION = (
    select(lots.c.key, lots.c.state)
    .where(_OF_GROUP, lots.c.partition_id == bindparam("of_partition"))
    .order_by(lots.c.since_ms, lots.c.key)
)
_SELECT_STATE = select(lots.c.state).where(*_ROW)
_UPDATE = (
    update(lots)
    .where(*_ROW)
    .values(
        state=bindparam("to_state"),
        reason=case((bindparam("because") == "", lots.c.reason), else_=bindparam("because")),
    )
)
_INSERT = insert(lots).values(
    group_id=bindparam("of_group"),
    partition_id=bindparam("of_partition"),
    key=bindparam("of_key"),
    state=bindparam("to_state"),
    reason=bindparam("because"),
    since_ms=bindparam("now_ms"),
)
_DELETE = delete(lots).where(*_ROW)
_DELETE_GROUP = delete(lots).where(_OF_GROUP)

_PARKED_OF_GROUP = parked.c.group_id == bindparam("of_group")
_IN_LOT = (
    _PARKED_OF_GROUP,
    parked.c.partition_id == bindparam("of_partition"),
    parked.c.key == bindparam("of_key"),
)
_MESSAGE = (
    _PARKED_OF_GROUP,
    parked.c.origin_id == bindparam("of_origin"),
    parked.c.offset == bindparam("at_offset"),
)
# Without ON CONFLICT, because its syntax differs between databases.
_PARK = insert(parked).from_select(
    ["group_id", "partition_id", "key", "origin_id", "offset", "content"],
    select(
        bindparam("of_group", type_=Integer),
        bindparam("of_partition", type_=Integer),
        bindparam("of_key", type_=LargeBinary),
        bindparam("of_origin", type_=Integer),
        bindparam("at_offset", type_=BigInteger),
        bindparam("as_content", type_=LargeBinary),
    ).where(~exists().where(*_MESSAGE)),
)
_UNPARK = delete(parked).where(*_MESSAGE, *_IN_LOT[1:])
_DELETE_PARKED = delete(parked).where(_PARKED_OF_GROUP)
_SELECT_HEAD = (
    select(partitions.c.position.label("partition"), parked.c.offset)
    .join(partitions, partitions.c.id == parked.c.origin_id)
    .where(*_IN_LOT)
    .order_by(parked.c.position)
    .limit(1)
)
_SELECT_SIZES = (
    select(parked.c.position, func.length(parked.c.content).label("size"))
    .where(*_IN_LOT, parked.c.position > bindparam("after"))
    .order_by(parked.c.position)
    .limit(bindparam("at_most"))
)
_SELECT_CONTENT = (
    select(partitions.c.position.label("partition"), parked.c.offset, parked.c.content, parked.c.position)
    .join(partitions, partitions.c.id == parked.c.origin_id)
    .where(*_IN_LOT, parked.c.position > bindparam("after"), parked.c.position <= bindparam("last"))
    .order_by(parked.c.position)
)
_LOADS = (
    select(
        parked.c.partition_id,
        parked.c.key,
        func.min(parked.c.position).label("head"),
        func.count().label("load"),
    )
    .where(_PARKED_OF_GROUP)
    .group_by(parked.c.partition_id, parked.c.key)
    .subquery()
)
_HEADS = parked.alias()
_SELECT_GROUP = (
    select(
        partitions.c.position,
        lots.c.key,
        lots.c.state,
        lots.c.reason,
        lots.c.since_ms,
        _HEADS.c.offset,
        func.coalesce(_LOADS.c.load, 0),
    )
    .join(partitions, partitions.c.id == lots.c.partition_id)
    .outerjoin(_LOADS, and_(_LOADS.c.partition_id == lots.c.partition_id, _LOADS.c.key == lots.c.key))
    .outerjoin(_HEADS, _HEADS.c.position == _LOADS.c.head)
    .where(_OF_GROUP)
    .order_by(lots.c.since_ms, partitions.c.position, lots.c.key)
)


@dataclass(frozen=True, slots=True)
class ParkingLotRow:
    """A parking lot. `head_offset` is None while the parking lot has no messages."""

    partition: int
    key: bytes
    state: str
    reason: str
    since_ms: int
    head_offset: int | None
    parked_count: int


class ParkingLots:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)

    def of_partition(self, group_id: int, partition: int) -> tuple[Lot, ...]:
        """The parking lots of a partition, oldest first. The holder of the partition's lease runs them."""
        with self._database.transaction() as connection:
            row = {"of_group": group_id, "of_partition": self._partition_ids.one(connection, group_id, partition)}
            return tuple(Lot(*found) for found in connection.execute(_SELECT_PARTITION, row))

    def of_group(self, group_id: int) -> list[ParkingLotRow]:
        """The parking lots of a group, oldest first."""
        with self._database.transaction() as connection:
            return [ParkingLotRow(*found) for found in connection.execute(_SELECT_GROUP, {"of_group": group_id})]

    def is_there(self, group_id: int, partition: int, key: bytes) -> bool:
        with self._database.transaction() as connection:
            row = self._row(connection, group_id, partition, key)
            return connection.execute(_SELECT_STATE, row).scalar() is not None

    def head(self, group_id: int, partition: int, key: bytes) -> tuple[int, int] | None:
        """The source partition and offset of the first message in the parking lot, or None."""
        with self._database.transaction() as connection:
            row = self._row(connection, group_id, partition, key)
            found = connection.execute(_SELECT_HEAD, row).first()
            return None if found is None else (found.partition, found.offset)

    def read(self, group_id: int, partition: int, key: bytes, after: int, max_bytes: int) -> LotContent:
        """The messages behind a position, in order, up to `max_bytes`, but at least 1 message unless at the end."""
        check_number("after", after)
        check_bytes("key", key, KEY_BYTES_MAX)
        with self._database.transaction() as connection:
            row = {**self._row(connection, group_id, partition, key), "after": after}
            # Sizes first: a driver may fetch all rows of a query before it returns the first row.
            sizes = connection.execute(_SELECT_SIZES, {**row, "at_most": READ_COUNT_MAX + 1}).all()
            fitting = _fitting([size for _, size in sizes[:READ_COUNT_MAX]], max_bytes)
            if not fitting:
                return LotContent((), True)
            last: int = sizes[fitting - 1].position
            found = connection.execute(_SELECT_CONTENT, {**row, "last": last})
            return LotContent(tuple(ParkedMessage(*message) for message in found), fitting == len(sizes))

    # Within the transaction of a commit or a reset

    def change(
        self, connection: Connection, group_id: int, partition_id: int, changes: Iterable[LotChange], now_ms: int
    ) -> None:
        """Apply changes. Raises InvalidInput if a key would become free while messages are in its parking lot, because
        later messages would overtake the parked messages."""
        for one in changes:
            row = {"of_group": group_id, "of_partition": partition_id, "of_key": one.key}
            if one.added:
                connection.execute(_PARK, [self._added(connection, row, message) for message in one.added])
            if one.removed:
                connection.execute(_UNPARK, [self._message(connection, row, *place) for place in one.removed])
            if one.state == LotState.FREE:
                _free(connection, row)
                continue
            values = {**row, "to_state": one.state, "because": storable(one.reason, REASON_LENGTH_MAX)}
            if not connection.execute(_UPDATE, values).rowcount:
                connection.execute(_INSERT, {**values, "now_ms": now_ms})

    def clear(self, connection: Connection, group_id: int) -> None:
        connection.execute(_DELETE_PARKED, {"of_group": group_id})
        connection.execute(_DELETE_GROUP, {"of_group": group_id})

    def _row(self, connection: Connection, group_id: int, partition: int, key: bytes) -> dict[str, Any]:
        partition_id = self._partition_ids.one(connection, group_id, partition)
        return {"of_group": group_id, "of_partition": partition_id, "of_key": key}

    def _message(self, connection: Connection, row: dict[str, Any], partition: int, offset: int) -> dict[str, Any]:
        origin_id = self._partition_ids.one(connection, row["of_group"], partition)
        return {**row, "of_origin": origin_id, "at_offset": offset}

    def _added(self, connection: Connection, row: dict[str, Any], message: ParkedMessage) -> dict[str, Any]:
        place = self._message(connection, row, message.partition, message.offset)
        return {**place, "as_content": message.content}


def _free(connection: Connection, row: dict[str, Any]) -> None:
    left = connection.execute(_SELECT_HEAD, row).first()
    if left is not None:
        raise InvalidInput(
            f"key {row['of_key']!r} cannot be free: offset {left.offset} and maybe more are still in its parking lot; "
            "remove the parked messages in the same commit"
        )
    connection.execute(_DELETE, row)


def _fitting(sizes: list[int], max_bytes: int) -> int:
    """How many items fit into `max_bytes`; at least 1."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > max_bytes:
            return count
    return len(sizes)


def check_change(change: LotChange) -> None:
    """Raise InvalidInput for a change that no row can hold. The reason may have any length: storing cuts it."""
    one_of(LotState, "state", change.state)
    check_bytes("key", change.key, KEY_BYTES_MAX)
    if not isinstance(change.reason, str):
        check_text("reason", change.reason, REASON_LENGTH_MAX)
    for message in change.added:
        check_number("offset", message.offset)
        check_bytes("a parked message", message.content, CONTENT_BYTES_MAX)
    for _, offset in change.removed:
        check_number("offset", offset)
