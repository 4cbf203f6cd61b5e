"""Partition ids: rows refer to a partition by id, all other layers by the index within the subject."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select

from inturn.model.errors import NotFound
from inturn.store.database import Cache, Database
from inturn.store.schema import groups, partitions, subjects

_OF_GROUP = (
    select(partitions.c.id)
    .join(groups, groups.c.subject_id == partitions.c.subject_id)
    .where(groups.c.id == bindparam("group_id"))
    .order_by(partitions.c.position)
)
_OF_SUBJECT = (
    select(partitions.c.id)
    .join(subjects, subjects.c.id == partitions.c.subject_id)
    .where(subjects.c.name == bindparam("name"))
    .order_by(partitions.c.position)
)


class PartitionIds:
    """Call all methods inside a transaction. A subject may get new partitions; partitions never go or change index."""

    def __init__(self, database: Database) -> None:
        self._by_group: Cache[int, tuple[int, ...]] = Cache(database)

    def of_subject(self, connection: Connection, name: str) -> tuple[int, ...]:
        """The ids of all partitions by index; empty for an unknown subject."""
        return tuple(connection.execute(_OF_SUBJECT, {"name": name}).scalars())

    def of_group(self, connection: Connection, group_id: int) -> tuple[int, ...]:
        """The ids of all partitions of the group's subject by index. Raises NotFound for an unknown group."""
        ids = tuple(connection.execute(_OF_GROUP, {"group_id": group_id}).scalars())
        if not ids:
            raise NotFound("group with id", str(group_id), "create the group first")
        self._by_group.put(group_id, ids)
        return ids

    def one(self, connection: Connection, group_id: int, index: int) -> int:
        """The id of a partition. Raises NotFound for an unknown group or index."""
        ids = self._by_group.get(group_id)
        if ids is None or index >= len(ids):
            ids = self.of_group(connection, group_id)
        if not 0 <= index < len(ids):
            raise NotFound("partition", str(index), f"the subject of this group has 0 to {len(ids) - 1}")
        return ids[index]
