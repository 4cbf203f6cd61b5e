"""What people asked of keys, and whether it was acted upon. Rows stay: they say who asked what, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from inturn.model.commands import KeyRequest, RequestState
from inturn.state.bounds import storable
from inturn.state.database import Database
from inturn.state.partition_ids import PartitionIds
from inturn.state.schema import key_requests, partitions

BY_LENGTH_MAX = 1_000
WHY_LENGTH_MAX = 1_000

_OF_GROUP = key_requests.c.group_id == bindparam("of_group")
_SELECT = select(
    key_requests.c.group_id,
    key_requests.c.id,
    partitions.c.position,
    key_requests.c.key,
    key_requests.c.kind,
    key_requests.c.offset,
    key_requests.c.by,
    key_requests.c.why,
    key_requests.c.origin,
    key_requests.c.asked_at_ms,
    key_requests.c.done_at_ms,
).join(partitions, partitions.c.id == key_requests.c.partition_id)
_SELECT_ONE = _SELECT.where(_OF_GROUP, key_requests.c.id == bindparam("wanted"))
_SELECT_OPEN = _SELECT.where(key_requests.c.done_at_ms.is_(None)).order_by(key_requests.c.id)
_SELECT_KEY = (
    _SELECT.where(
        _OF_GROUP,
        key_requests.c.key == bindparam("of_key"),
        key_requests.c.partition_id == bindparam("of_partition"),
    )
    .order_by(key_requests.c.id.desc())
    .limit(bindparam("at_most"))
)
_SELECT_MARKS = select(key_requests.c.group_id, func.max(key_requests.c.id).label("mark")).group_by(
    key_requests.c.group_id
)
_INSERT = insert(key_requests).returning(key_requests.c.id)
_MARK_DONE = (
    update(key_requests)
    .where(
        _OF_GROUP,
        key_requests.c.partition_id == bindparam("of_partition"),
        key_requests.c.id == bindparam("which"),
        key_requests.c.done_at_ms.is_(None),
    )
    .values(done_at_ms=bindparam("now_ms"))
)
_DELETE_OPEN = delete(key_requests).where(_OF_GROUP, key_requests.c.done_at_ms.is_(None))


class KeyRequests:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)

    def add(self, group_id: int, request: KeyRequest, now_ms: int) -> KeyRequest:
        """Store it durably, and return it with the id that it got."""
        by, why = storable(request.by, BY_LENGTH_MAX), storable(request.why, WHY_LENGTH_MAX)
        with self._database.transaction() as connection:
            row = {
                "group_id": group_id,
                "partition_id": self._partition_ids.one(connection, group_id, request.partition),
                "key": request.key,
                "kind": request.kind,
                "offset": request.offset,
                "by": by,
                "why": why,
                "origin": request.origin,
                "asked_at_ms": now_ms,
                "done_at_ms": None,
            }
            request_id: int = connection.execute(_INSERT, row).scalar_one()
        return msgspec.structs.replace(request, id=request_id, by=by, why=why)

    def find(self, group_id: int, request_id: int) -> RequestState | None:
        with self._database.transaction() as connection:
            row = connection.execute(_SELECT_ONE, {"of_group": group_id, "wanted": request_id}).first()
        return None if row is None else _state(row)

    def history(self, group_id: int, partition: int, key: bytes, count_max: int) -> tuple[RequestState, ...]:
        """The newest first, done or not."""
        with self._database.transaction() as connection:
            partition_id = self._partition_ids.one(connection, group_id, partition)
            wanted = {"of_group": group_id, "of_partition": partition_id, "of_key": key, "at_most": count_max}
            return tuple(_state(row) for row in connection.execute(_SELECT_KEY, wanted))

    def waiting(self) -> list[tuple[int, RequestState]]:
        """All that were not acted upon, each with the id of its group, in the order they were asked."""
        with self._database.transaction() as connection:
            return [(row.group_id, _state(row)) for row in connection.execute(_SELECT_OPEN)]

    def marks(self) -> dict[int, int]:
        """The highest id of each group that has any."""
        with self._database.transaction() as connection:
            return {row.group_id: row.mark for row in connection.execute(_SELECT_MARKS)}

    # Within the transaction of a commit or a reset

    def mark_done(
        self, connection: Connection, group_id: int, partition_id: int, ids: Iterable[int], now_ms: int
    ) -> None:
        """Those of other partitions, or done before, are left as they are."""
        row = {"of_group": group_id, "of_partition": partition_id, "now_ms": now_ms}
        connection.execute(_MARK_DONE, [{**row, "which": request_id} for request_id in ids])

    def clear(self, connection: Connection, group_id: int) -> None:
        """Take back what was not acted upon."""
        connection.execute(_DELETE_OPEN, {"of_group": group_id})


def _state(row: Any) -> RequestState:
    request = KeyRequest(row.id, row.position, row.key, row.kind, row.offset, row.by, row.why, row.origin)
    return RequestState(request, row.asked_at_ms, row.done_at_ms)
