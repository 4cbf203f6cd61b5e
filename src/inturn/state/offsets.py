"""Committed offsets of groups: everything below is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, exists, func, insert, null, select, update

from inturn.model.errors import InvalidInput, StaleEpoch
from inturn.state.database import Database
from inturn.state.partition_ids import PartitionIds
from inturn.state.schema import groups, leases, offsets, partitions

_OFFSET_MAX = 2**63 - 1

_ROW = (offsets.c.group_id == bindparam("of_group"), offsets.c.partition_id == bindparam("of_partition"))
_SELECT_GROUP = (
    select(partitions.c.position, offsets.c.next_offset)
    .join(partitions, partitions.c.id == offsets.c.partition_id)
    .where(offsets.c.group_id == bindparam("of_group"))
    .order_by(partitions.c.position)
)
_SELECT_ONE = select(offsets.c.next_offset).where(*_ROW)
_ADVANCE = (
    update(offsets)
    .where(
        *_ROW,
        offsets.c.next_offset < bindparam("offset"),
        ~exists().where(
            leases.c.group_id == bindparam("of_group"),
            leases.c.partition_id == bindparam("of_partition"),
            leases.c.epoch > bindparam("by_epoch"),
        ),
    )
    .values(next_offset=bindparam("offset"), epoch=bindparam("by_epoch"), updated_at_ms=bindparam("now_ms"))
)
_SET = (
    update(offsets)
    .where(*_ROW)
    .values(next_offset=bindparam("offset"), epoch=bindparam("by_epoch"), updated_at_ms=bindparam("now_ms"))
)
_INSERT = insert(offsets).values(
    group_id=bindparam("of_group"),
    partition_id=bindparam("of_partition"),
    next_offset=bindparam("offset"),
    epoch=bindparam("by_epoch"),
    updated_at_ms=bindparam("now_ms"),
)
_SELECT_LEASE_EPOCH = select(leases.c.epoch).where(
    leases.c.group_id == bindparam("of_group"), leases.c.partition_id == bindparam("of_partition")
)
_RAISE_EPOCHS = (
    update(leases)
    .where(leases.c.group_id == bindparam("of_group"))
    .values(epoch=leases.c.epoch + 1, owner=null(), changed_at_ms=bindparam("now_ms"))
)
_RAISE_FLOOR = (
    update(partitions)
    .where(partitions.c.id == bindparam("of_partition"), partitions.c.offset_floor < bindparam("floor"))
    .values(offset_floor=bindparam("floor"))
)
_SELECT_FLOOR = select(partitions.c.id, partitions.c.offset_floor).where(
    partitions.c.broker_group == bindparam("of_broker_group"), partitions.c.name == bindparam("of_name")
)
_SELECT_HIGHEST = select(func.max(offsets.c.next_offset)).where(offsets.c.partition_id == bindparam("of_partition"))
_SELECT_NAMES = (
    select(groups.c.name.label("group"), partitions.c.broker_group, partitions.c.name.label("partition"))
    .join(partitions, partitions.c.subject_id == groups.c.subject_id)
    .where(groups.c.id == bindparam("of_group"), partitions.c.id == bindparam("of_partition"))
)


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """Everything below `offset` is done, says the holder of the lease with this epoch."""

    group_id: int
    partition: int
    offset: int
    epoch: int


class Offsets:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)

    def committed(self, group_id: int) -> dict[int, int]:
        """The next offset to consume, by partition index. Empty for an unknown group."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_GROUP, {"of_group": group_id})
            return {row.position: row.next_offset for row in rows}

    def commit(self, group_id: int, partition: int, offset: int, epoch: int, now_ms: int) -> bool:
        """Store the offset durably; true if it moved. A lower or equal one changes nothing: it never goes back.

        Raises StaleEpoch if the lease was granted, or the group reset, with a higher epoch since. That is the last
        line: whether the lease is still held is for the caller to know. Raises NotFound for an unknown partition.
        """
        check_offset(offset)
        with self._database.transaction() as connection:
            partition_id = self._partition_ids.one(connection, group_id, partition)
            return _advance(connection, group_id, partition_id, offset, epoch, now_ms)

    def commit_many(self, commits: Iterable[OffsetCommit], now_ms: int) -> None:
        """Like `commit` for each, in one transaction: if one raises, none is stored."""
        with self._database.transaction():
            for one in commits:
                self.commit(one.group_id, one.partition, one.offset, one.epoch, now_ms)

    def reset(self, group_id: int, new_offsets: Mapping[int, int], now_ms: int) -> None:
        """Put every partition of the group to a new offset, forwards or backwards, in one transaction.

        Leases are ended and their epochs raised, so nobody who had one can commit over it. The caller makes sure
        that none is live. Raises InvalidInput unless there is one offset for each partition.
        """
        with self._database.transaction() as connection:
            partition_ids = self._partition_ids.of_group(connection, group_id)
            if set(new_offsets) != set(range(len(partition_ids))):
                raise InvalidInput(
                    f"a reset of partitions {sorted(new_offsets)}: it must have one offset for each of 0 to "
                    f"{len(partition_ids) - 1}"
                )
            connection.execute(_RAISE_EPOCHS, {"of_group": group_id, "now_ms": now_ms})
            for index, partition_id in enumerate(partition_ids):
                check_offset(new_offsets[index])
                _put(connection, group_id, partition_id, new_offsets[index], now_ms)

    def highest(self, partition_name: str, broker_group: str = "local") -> int:
        """The highest next offset any group ever had in this partition; 0 if none. A log continues there or above.

        Resets do not lower it: what was consumed once was given out, so its offset must not be used again.
        """
        with self._database.transaction() as connection:
            row = connection.execute(
                _SELECT_FLOOR, {"of_broker_group": broker_group, "of_name": partition_name}
            ).first()
            if row is None:
                return 0
            highest: int | None = connection.execute(_SELECT_HIGHEST, {"of_partition": row.id}).scalar()
            floor: int = row.offset_floor
            return max(floor, highest or 0)


def check_offset(offset: object) -> None:
    """Raise InvalidInput unless it is a whole number that a log can reach."""
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= _OFFSET_MAX:
        raise InvalidInput(f"offset {offset!r}: it must be a whole number from 0 to {_OFFSET_MAX}")


def _advance(connection: Connection, group_id: int, partition_id: int, offset: int, epoch: int, now_ms: int) -> bool:
    row = {"of_group": group_id, "of_partition": partition_id}
    values = {**row, "offset": offset, "by_epoch": epoch, "now_ms": now_ms}
    if connection.execute(_ADVANCE, values).rowcount:
        return True
    current = connection.execute(_SELECT_LEASE_EPOCH, row).scalar()
    if current is not None and current > epoch:
        names = connection.execute(_SELECT_NAMES, row).one()
        raise StaleEpoch(names.group, f"{names.broker_group}/{names.partition}", epoch, current)
    if connection.execute(_SELECT_ONE, row).scalar() is not None:
        return False
    connection.execute(_INSERT, values)
    return True


def _put(connection: Connection, group_id: int, partition_id: int, offset: int, now_ms: int) -> None:
    row = {"of_group": group_id, "of_partition": partition_id}
    epoch = connection.execute(_SELECT_LEASE_EPOCH, row).scalar() or 0
    before = connection.execute(_SELECT_ONE, row).scalar()
    values = {**row, "offset": offset, "by_epoch": epoch, "now_ms": now_ms}
    if before is None:
        connection.execute(_INSERT, values)
        return
    connection.execute(_RAISE_FLOOR, {"of_partition": partition_id, "floor": before})
    connection.execute(_SET, values)
