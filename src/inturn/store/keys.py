"""Failed messages and key requests.

`Failures` holds messages that failed and wait for a repeat: for the next lease holder, and for operators.
`KeyRequests` holds the requests of operators to park, resume or skip a key. Carried-out requests stay as a record of
who requested what, and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from inturn.model.errors import InvalidInput
from inturn.protocol.commands import Failure, KeyRequest, RequestState
from inturn.store.database import KEY_BYTES_MAX, Database, check_bytes, check_number, storable
from inturn.store.partition_ids import PartitionIds
from inturn.store.schema import failures, key_requests, partitions

ERROR_LENGTH_MAX = 2_000

_FAILURES_OF_GROUP = failures.c.group_id == bindparam("of_group")
_OF_PARTITION = (_FAILURES_OF_GROUP, failures.c.partition_id == bindparam("of_partition"))
_ROW = (*_OF_PARTITION, failures.c.offset == bindparam("at_offset"))
_FAILURE = (
    failures.c.offset,
    failures.c.key,
    failures.c.attempts,
    failures.c.error,
    failures.c.waiting,
    failures.c.is_exhausted,
)
_SELECT_PARTITION = select(*_FAILURE).where(*_OF_PARTITION).order_by(failures.c.offset)
_SELECT_FAILURE_OF_KEY = _SELECT_PARTITION.where(failures.c.key == bindparam("of_key"))
_SELECT_GROUP = (
    select(partitions.c.position, failures.c.first_at_ms, *_FAILURE)
    .join(partitions, partitions.c.id == failures.c.partition_id)
    .where(_FAILURES_OF_GROUP)
    .order_by(partitions.c.position, failures.c.offset)
)
_SELECT_MOST_WAITING = (
    _SELECT_GROUP.order_by(None).order_by(failures.c.waiting.desc(), failures.c.first_at_ms).limit(bindparam("at_most"))
)
_UPDATE = (
    update(failures)
    .where(*_ROW)
    .values(
        key=bindparam("of_key"),
        attempts=bindparam("so_far"),
        error=bindparam("because"),
        waiting=bindparam("behind"),
        is_exhausted=bindparam("is_over"),
        last_at_ms=bindparam("now_ms"),
    )
)
_INSERT_FAILURE = insert(failures).values(
    group_id=bindparam("of_group"),
    partition_id=bindparam("of_partition"),
    offset=bindparam("at_offset"),
    key=bindparam("of_key"),
    attempts=bindparam("so_far"),
    error=bindparam("because"),
    waiting=bindparam("behind"),
    is_exhausted=bindparam("is_over"),
    first_at_ms=bindparam("now_ms"),
    last_at_ms=bindparam("now_ms"),
)
_DELETE = delete(failures).where(*_ROW)
_DELETE_GROUP = delete(failures).where(_FAILURES_OF_GROUP)


@dataclass(frozen=True, slots=True)
class FailureRow:
    partition: int
    first_at_ms: int
    failure: Failure


class Failures:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)

    def of_partition(self, group_id: int, partition: int) -> tuple[Failure, ...]:
        """The failures of a partition, sorted by offset."""
        with self._database.transaction() as connection:
            row = {"of_group": group_id, "of_partition": self._partition_ids.one(connection, group_id, partition)}
            return tuple(Failure(*found) for found in connection.execute(_SELECT_PARTITION, row))

    def of_key(self, group_id: int, partition: int, key: bytes) -> tuple[Failure, ...]:
        """The failures of a key, sorted by offset."""
        with self._database.transaction() as connection:
            partition_id = self._partition_ids.one(connection, group_id, partition)
            row = {"of_group": group_id, "of_partition": partition_id, "of_key": key}
            return tuple(Failure(*found) for found in connection.execute(_SELECT_FAILURE_OF_KEY, row))

    def of_group(self, group_id: int) -> list[FailureRow]:
        """The failures of a group, sorted by partition and offset."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_GROUP, {"of_group": group_id})
            return [FailureRow(partition, first_at_ms, Failure(*rest)) for partition, first_at_ms, *rest in rows]

    def most_waiting(self, group_id: int, count_max: int) -> list[FailureRow]:
        """The failures with the most waiting messages behind them, sorted by partition and offset."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_MOST_WAITING, {"of_group": group_id, "at_most": count_max})
            found = [FailureRow(partition, first_at_ms, Failure(*rest)) for partition, first_at_ms, *rest in rows]
        return sorted(found, key=lambda row: (row.partition, row.failure.offset))

    # Within the transaction of a commit or a reset

    def put(
        self, connection: Connection, group_id: int, partition_id: int, failed: Iterable[Failure], now_ms: int
    ) -> None:
        """Store failures in their present state; the time of the first failure stays."""
        for one in failed:
            values = {
                "of_group": group_id,
                "of_partition": partition_id,
                "at_offset": one.offset,
                "of_key": one.key,
                "so_far": one.attempts,
                "because": storable(one.error, ERROR_LENGTH_MAX),
                "behind": one.waiting,
                "is_over": one.is_exhausted,
                "now_ms": now_ms,
            }
            if not connection.execute(_UPDATE, values).rowcount:
                connection.execute(_INSERT_FAILURE, values)

    def settle(self, connection: Connection, group_id: int, partition_id: int, offsets: Iterable[int]) -> None:
        """Delete the failures at these offsets. An unknown offset is no error."""
        rows = [{"of_group": group_id, "of_partition": partition_id, "at_offset": offset} for offset in offsets]
        connection.execute(_DELETE, rows)

    def clear(self, connection: Connection, group_id: int) -> None:
        connection.execute(_DELETE_GROUP, {"of_group": group_id})


def check_failure(failure: Failure) -> None:
    """Raise InvalidInput for a failure that no row can hold. The error text may have any length: storing cuts it."""
    check_number("offset", failure.offset)
    check_number("attempts", failure.attempts)
    check_number("waiting", failure.waiting)
    if failure.key is not None:
        check_bytes("key", failure.key, KEY_BYTES_MAX)
    if not isinstance(failure.error, str) or not isinstance(failure.is_exhausted, bool):
        raise InvalidInput(f"failure at offset {failure.offset}: error must be a text, is_exhausted true or false")


BY_LENGTH_MAX = 1_000
WHY_LENGTH_MAX = 1_000

_REQUESTS_OF_GROUP = key_requests.c.group_id == bindparam("of_group")
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
_SELECT_ONE = _SELECT.where(_REQUESTS_OF_GROUP, key_requests.c.id == bindparam("wanted"))
_SELECT_OPEN = _SELECT.where(key_requests.c.done_at_ms.is_(None)).order_by(key_requests.c.id)
_SELECT_REQUEST_OF_KEY = (
    _SELECT.where(
        _REQUESTS_OF_GROUP,
        key_requests.c.key == bindparam("of_key"),
        key_requests.c.partition_id == bindparam("of_partition"),
    )
    .order_by(key_requests.c.id.desc())
    .limit(bindparam("at_most"))
)
_SELECT_LAST_IDS = select(key_requests.c.group_id, func.max(key_requests.c.id).label("last_id")).group_by(
    key_requests.c.group_id
)
_INSERT_REQUEST = insert(key_requests).returning(key_requests.c.id)
_MARK_DONE = (
    update(key_requests)
    .where(
        _REQUESTS_OF_GROUP,
        key_requests.c.partition_id == bindparam("of_partition"),
        key_requests.c.id == bindparam("which"),
        key_requests.c.done_at_ms.is_(None),
    )
    .values(done_at_ms=bindparam("now_ms"))
)
_DELETE_OPEN = delete(key_requests).where(_REQUESTS_OF_GROUP, key_requests.c.done_at_ms.is_(None))


class KeyRequests:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)

    def add(self, group_id: int, request: KeyRequest, now_ms: int) -> KeyRequest:
        """Store a request durably, and return the request with its new id."""
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
            request_id: int = connection.execute(_INSERT_REQUEST, row).scalar_one()
        return msgspec.structs.replace(request, id=request_id, by=by, why=why)

    def find(self, group_id: int, request_id: int) -> RequestState | None:
        with self._database.transaction() as connection:
            row = connection.execute(_SELECT_ONE, {"of_group": group_id, "wanted": request_id}).first()
        return None if row is None else _state(row)

    def history(self, group_id: int, partition: int, key: bytes, count_max: int) -> tuple[RequestState, ...]:
        """The requests about a key, newest first, whether carried out or not."""
        with self._database.transaction() as connection:
            partition_id = self._partition_ids.one(connection, group_id, partition)
            wanted = {"of_group": group_id, "of_partition": partition_id, "of_key": key, "at_most": count_max}
            return tuple(_state(row) for row in connection.execute(_SELECT_REQUEST_OF_KEY, wanted))

    def waiting(self) -> list[tuple[int, RequestState]]:
        """All requests that were not carried out yet, with the id of their group, oldest first."""
        with self._database.transaction() as connection:
            return [(row.group_id, _state(row)) for row in connection.execute(_SELECT_OPEN)]

    def last_ids(self) -> dict[int, int]:
        """The highest request id of every group that has requests."""
        with self._database.transaction() as connection:
            return {row.group_id: row.last_id for row in connection.execute(_SELECT_LAST_IDS)}

    # Within the transaction of a commit or a reset

    def mark_done(
        self, connection: Connection, group_id: int, partition_id: int, ids: Iterable[int], now_ms: int
    ) -> None:
        """Record requests as carried out. Requests of other partitions, or already carried out, do not change."""
        row = {"of_group": group_id, "of_partition": partition_id, "now_ms": now_ms}
        connection.execute(_MARK_DONE, [{**row, "which": request_id} for request_id in ids])

    def clear(self, connection: Connection, group_id: int) -> None:
        """Delete requests that were not carried out."""
        connection.execute(_DELETE_OPEN, {"of_group": group_id})


def _state(row: Any) -> RequestState:
    request = KeyRequest(
        id=row.id,
        partition=row.position,
        key=row.key,
        kind=row.kind,
        offset=row.offset,
        by=row.by,
        why=row.why,
        origin=row.origin,
    )
    return RequestState(request, row.asked_at_ms, row.done_at_ms)
