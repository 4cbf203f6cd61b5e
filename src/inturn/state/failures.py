"""Messages that failed and wait to be repeated: what the next holder of the lease, and people, have to know of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from inturn.model.commands import Failure
from inturn.model.errors import InvalidInput
from inturn.state.bounds import KEY_BYTES_MAX, check_bytes, check_number, storable
from inturn.state.database import Database
from inturn.state.partition_ids import PartitionIds
from inturn.state.schema import failures, partitions

ERROR_LENGTH_MAX = 2_000

_OF_GROUP = failures.c.group_id == bindparam("of_group")
_OF_PARTITION = (_OF_GROUP, failures.c.partition_id == bindparam("of_partition"))
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
_SELECT_KEY = _SELECT_PARTITION.where(failures.c.key == bindparam("of_key"))
_SELECT_GROUP = (
    select(partitions.c.position, failures.c.first_at_ms, *_FAILURE)
    .join(partitions, partitions.c.id == failures.c.partition_id)
    .where(_OF_GROUP)
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
_INSERT = insert(failures).values(
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
_DELETE_GROUP = delete(failures).where(_OF_GROUP)


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
        """By offset."""
        with self._database.transaction() as connection:
            row = {"of_group": group_id, "of_partition": self._partition_ids.one(connection, group_id, partition)}
            return tuple(Failure(*found) for found in connection.execute(_SELECT_PARTITION, row))

    def of_key(self, group_id: int, partition: int, key: bytes) -> tuple[Failure, ...]:
        """By offset."""
        with self._database.transaction() as connection:
            partition_id = self._partition_ids.one(connection, group_id, partition)
            row = {"of_group": group_id, "of_partition": partition_id, "of_key": key}
            return tuple(Failure(*found) for found in connection.execute(_SELECT_KEY, row))

    def of_group(self, group_id: int) -> list[FailureRow]:
        """By partition and offset."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_GROUP, {"of_group": group_id})
            return [FailureRow(partition, first_at_ms, Failure(*rest)) for partition, first_at_ms, *rest in rows]

    def most_waiting(self, group_id: int, count_max: int) -> list[FailureRow]:
        """Those behind which most waits, by partition and offset."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_MOST_WAITING, {"of_group": group_id, "at_most": count_max})
            found = [FailureRow(partition, first_at_ms, Failure(*rest)) for partition, first_at_ms, *rest in rows]
        return sorted(found, key=lambda row: (row.partition, row.failure.offset))

    # Within the transaction of a commit or a reset

    def put(
        self, connection: Connection, group_id: int, partition_id: int, failed: Iterable[Failure], now_ms: int
    ) -> None:
        """Store each as it is now; when it failed for the first time stays known."""
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
                connection.execute(_INSERT, values)

    def settle(self, connection: Connection, group_id: int, partition_id: int, offsets: Iterable[int]) -> None:
        """Forget them: they are over. One that is not known is no error."""
        rows = [{"of_group": group_id, "of_partition": partition_id, "at_offset": offset} for offset in offsets]
        connection.execute(_DELETE, rows)

    def clear(self, connection: Connection, group_id: int) -> None:
        connection.execute(_DELETE_GROUP, {"of_group": group_id})


def check_failure(failure: Failure) -> None:
    """Raise InvalidInput for one that no row can hold. Its error is cut when it is stored: it may be of any length."""
    check_number("offset", failure.offset)
    check_number("attempts", failure.attempts)
    check_number("waiting", failure.waiting)
    if failure.key is not None:
        check_bytes("key", failure.key, KEY_BYTES_MAX)
    if not isinstance(failure.error, str) or not isinstance(failure.is_exhausted, bool):
        raise InvalidInput(f"failure at offset {failure.offset}: its error must be a text, is_exhausted true or false")
