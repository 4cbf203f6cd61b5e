"""Which children are open to a group, and what moves to them when they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from inturn.state.database import Database
from inturn.state.partition_ids import PartitionIds
from inturn.state.schema import failures, gates, key_requests, lots, parked, partitions

_SELECT_ALL = select(gates.c.group_id, partitions.c.position).join(partitions, partitions.c.id == gates.c.partition_id)
_INSERT = insert(gates).values(
    group_id=bindparam("of_group"), partition_id=bindparam("of_partition"), opened_at_ms=bindparam("now_ms")
)
_DELETE_GROUP = delete(gates).where(gates.c.group_id == bindparam("of_group"))
_MOVE = [
    update(table)
    .where(
        table.c.group_id == bindparam("of_group"),
        table.c.partition_id == bindparam("from_partition"),
        table.c.key == bindparam("of_key"),
    )
    .values(partition_id=bindparam("to_partition"))
    for table in (lots, parked, key_requests)
]
# Of messages in a lot. Resuming counts their attempts anew, and their offsets are none of the child's.
_DELETE_FAILURES = delete(failures).where(
    failures.c.group_id == bindparam("of_group"),
    failures.c.partition_id == bindparam("from_partition"),
    failures.c.key == bindparam("of_key"),
)


class GateRows:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)

    def all(self) -> set[tuple[int, int]]:
        """Group id and partition index of every child that is open."""
        with self._database.transaction() as connection:
            return {(row.group_id, row.position) for row in connection.execute(_SELECT_ALL)}

    def open(self, group_id: int, child: int, keys: Mapping[int, Iterable[bytes]], now_ms: int) -> None:
        """Open a child for good. Lots and requests of these keys, by parent, are the child's from here on."""
        with self._database.transaction() as connection:
            child_id = self._partition_ids.one(connection, group_id, child)
            connection.execute(_INSERT, {"of_group": group_id, "of_partition": child_id, "now_ms": now_ms})
            for parent, some in keys.items():
                parent_id = self._partition_ids.one(connection, group_id, parent)
                for key in some:
                    row = {"of_group": group_id, "from_partition": parent_id, "of_key": key}
                    for move in _MOVE:
                        connection.execute(move, {**row, "to_partition": child_id})
                    connection.execute(_DELETE_FAILURES, row)


def clear(connection: Connection, group_id: int) -> None:
    """Within the transaction of a reset."""
    connection.execute(_DELETE_GROUP, {"of_group": group_id})
