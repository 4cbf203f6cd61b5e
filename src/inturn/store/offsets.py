"""Committed offsets of groups, and growth gates.

A group has finished all messages below its committed offset, and the messages of the finished set above the offset.
`GateRows` holds the child partitions that are open to a group, and moves parking lots and key requests to a child that
opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pyroaring import BitMap64
from sqlalchemy import Connection, and_, bindparam, case, delete, exists, func, insert, null, or_, select, update

from inturn.model.errors import InvalidInput, StaleEpoch
from inturn.model.logs import get_logger
from inturn.model.offsets import FOREIGN_MIN, CommitTracker
from inturn.protocol.commands import Progress
from inturn.store.database import Database, check_bytes, check_number
from inturn.store.keys import Failures, KeyRequests
from inturn.store.parking_lots import ParkingLots
from inturn.store.partition_ids import PartitionIds
from inturn.store.schema import failures, gates, groups, key_requests, leases, lots, offsets, parked, partitions

FINISHED_BYTES_MAX = 1 << 20

_log = get_logger("inturn.state")

_ROW = (offsets.c.group_id == bindparam("of_group"), offsets.c.partition_id == bindparam("of_partition"))
_SELECT_GROUP = (
    select(partitions.c.position, offsets.c.next_offset)
    .join(partitions, partitions.c.id == offsets.c.partition_id)
    .where(offsets.c.group_id == bindparam("of_group"))
    .order_by(partitions.c.position)
)
_SELECT_GROUP_FINISHED = (
    select(partitions.c.position, offsets.c.partition_id, offsets.c.finished)
    .join(partitions, partitions.c.id == offsets.c.partition_id)
    .where(offsets.c.group_id == bindparam("of_group"), offsets.c.finished != bindparam("nothing"))
)
_SELECT_ONE = select(offsets.c.next_offset, offsets.c.finished, offsets.c.epoch, offsets.c.commit_number).where(*_ROW)
_ADVANCE = (
    update(offsets)
    .where(
        *_ROW,
        or_(
            offsets.c.epoch < bindparam("by_epoch"),
            and_(offsets.c.epoch == bindparam("by_epoch"), offsets.c.commit_number < bindparam("number")),
        ),
        ~exists().where(
            leases.c.group_id == bindparam("of_group"),
            leases.c.partition_id == bindparam("of_partition"),
            leases.c.epoch > bindparam("by_epoch"),
        ),
    )
    .values(
        next_offset=case((offsets.c.next_offset < bindparam("to"), bindparam("to")), else_=offsets.c.next_offset),
        finished=bindparam("above"),
        epoch=bindparam("by_epoch"),
        commit_number=bindparam("number"),
        updated_at_ms=bindparam("now_ms"),
    )
)
_SET = (
    update(offsets)
    .where(*_ROW)
    .values(
        next_offset=bindparam("to"),
        finished=bindparam("above"),
        epoch=bindparam("by_epoch"),
        commit_number=bindparam("number"),
        updated_at_ms=bindparam("now_ms"),
    )
)
_INSERT = insert(offsets).values(
    group_id=bindparam("of_group"),
    partition_id=bindparam("of_partition"),
    next_offset=bindparam("to"),
    finished=bindparam("above"),
    epoch=bindparam("by_epoch"),
    commit_number=bindparam("number"),
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
_SELECT_ID = select(partitions.c.id).where(
    partitions.c.broker_group == bindparam("of_broker_group"), partitions.c.name == bindparam("of_name")
)
_SELECT_FLOOR = select(partitions.c.offset_floor).where(partitions.c.id == bindparam("of_partition"))
_SELECT_HIGHEST = select(func.max(offsets.c.next_offset)).where(offsets.c.partition_id == bindparam("of_partition"))
_SELECT_HIGHEST_PARKED = select(func.max(parked.c.offset)).where(parked.c.origin_id == bindparam("of_partition"))
_SELECT_HIGHEST_FAILED = select(func.max(failures.c.offset)).where(
    failures.c.partition_id == bindparam("of_partition"), failures.c.offset < FOREIGN_MIN
)
_SELECT_FINISHED = select(offsets.c.group_id, offsets.c.finished).where(
    offsets.c.partition_id == bindparam("of_partition"), offsets.c.finished != bindparam("nothing")
)
_SELECT_NAMES = (
    select(groups.c.name.label("group"), partitions.c.broker_group, partitions.c.name.label("partition"))
    .join(partitions, partitions.c.subject_id == groups.c.subject_id)
    .where(groups.c.id == bindparam("of_group"), partitions.c.id == bindparam("of_partition"))
)


@dataclass(frozen=True, slots=True)
class CommittedPlace:
    """The progress of a group in a partition: offsets below `offset` and offsets in `finished` are finished."""

    offset: int = 0
    finished: bytes = b""
    epoch: int = field(default=0, compare=False)  # of the last commit
    number: int = field(default=0, compare=False)  # of the last commit, in that epoch


class OffsetRows:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)
        self._failures = Failures(database)
        self._lots = ParkingLots(database)
        self._requests = KeyRequests(database)

    def committed(self, group_id: int) -> dict[int, int]:
        """The next offset to consume, by partition index. Empty for an unknown group."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_GROUP, {"of_group": group_id})
            return {row.position: row.next_offset for row in rows}

    def finished_counts(self, group_id: int) -> dict[int, int]:
        """The number of finished offsets above the committed offset, by partition index, without zeros."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_GROUP_FINISHED, {"of_group": group_id, "nothing": b""}).all()
        sets = {row.position: _finished_set(group_id, row.partition_id, row.finished) for row in rows}
        return {position: len(found) for position, found in sets.items() if found}

    def place(self, group_id: int, partition: int) -> CommittedPlace:
        """The committed place of a partition. Raises NotFound for an unknown group or partition."""
        with self._database.transaction() as connection:
            row = {"of_group": group_id, "of_partition": self._partition_ids.one(connection, group_id, partition)}
            found = connection.execute(_SELECT_ONE, row).first()
            return CommittedPlace() if found is None else CommittedPlace(*found)

    def commit(self, group_id: int, progress: Progress, now_ms: int) -> bool:
        """Store offset and finished set durably. Returns False for a late copy, without a change.

        The offset never goes back. A commit is a late copy unless its number is higher than the stored number of the
        same epoch. Raises StaleEpoch if the lease was granted, or the group reset, with a higher epoch since. This is
        the last check: the caller checks before that the lease is still held. Raises NotFound for an unknown partition.
        """
        check_offset(progress.offset)
        check_number("epoch", progress.epoch)
        check_number("number", progress.number)
        check_bytes("the finished set", progress.finished, FINISHED_BYTES_MAX)
        with self._database.transaction() as connection:
            partition_id = self._partition_ids.one(connection, group_id, progress.partition)
            return _advance(connection, group_id, partition_id, progress, now_ms)

    def reset(self, group_id: int, new_offsets: Mapping[int, int], now_ms: int) -> None:
        """Move all partitions of the group to new offsets, forwards or backwards, in a transaction.

        Deletes finished sets, failures, parking lots and requests that were not carried out. Ends all leases and raises
        their epochs, so that a former holder cannot commit over the reset. The caller checks that no lease is live.
        Raises InvalidInput unless there is an offset for every partition.
        """
        with self._database.transaction() as connection:
            partition_ids = self._partition_ids.of_group(connection, group_id)
            if set(new_offsets) != set(range(len(partition_ids))):
                raise InvalidInput(
                    f"a reset of partitions {sorted(new_offsets)}: give one offset for each partition, 0 to "
                    f"{len(partition_ids) - 1}"
                )
            connection.execute(_RAISE_EPOCHS, {"of_group": group_id, "now_ms": now_ms})
            for index, partition_id in enumerate(partition_ids):
                check_offset(new_offsets[index])
                # Before rows are deleted: their offsets were delivered and must not be used again.
                floor = _highest(connection, partition_id)
                connection.execute(_RAISE_FLOOR, {"of_partition": partition_id, "floor": floor})
                _put(connection, group_id, partition_id, new_offsets[index], now_ms)
            self._failures.clear(connection, group_id)
            self._lots.clear(connection, group_id)
            self._requests.clear(connection, group_id)
            clear_gates(connection, group_id)

    def highest(self, partition_name: str, broker_group: str = "local") -> int:
        """One past the highest offset that any group ever committed, finished, parked or failed in this partition; 0
        without any. The log continues at or above this offset.

        Resets do not lower the value: a consumed offset was delivered, and must not be used again.
        """
        with self._database.transaction() as connection:
            partition_id = connection.execute(
                _SELECT_ID, {"of_broker_group": broker_group, "of_name": partition_name}
            ).scalar()
            return 0 if partition_id is None else _highest(connection, partition_id)


def start_row(group_id: int, partition_id: int, offset: int, now_ms: int) -> dict[str, object]:
    """The row of a group that starts at `offset` in a partition."""
    return {
        "group_id": group_id,
        "partition_id": partition_id,
        "next_offset": offset,
        "finished": b"",
        "epoch": 0,
        "commit_number": 0,
        "updated_at_ms": now_ms,
    }


def finished_count(finished: bytes) -> int:
    """The number of offsets in a finished set; 0 for a set that cannot be decoded."""
    if not finished:
        return 0
    try:
        return len(BitMap64.deserialize(finished))
    except ValueError:
        return 0


def highest_finished(finished: bytes) -> int:
    """The highest offset of a finished set, or -1. Raises InvalidInput for a set that cannot be decoded."""
    found = _read_finished(finished)
    return found.max() if found else -1


def _read_finished(finished: bytes) -> BitMap64:
    try:
        return BitMap64.deserialize(finished) if finished else BitMap64()
    except ValueError as error:
        raise InvalidInput(f"a finished set of {len(finished)} bytes cannot be read: {error}") from None


def with_finished(place: CommittedPlace, finished: bytes) -> tuple[int, bytes]:
    """Offset and finished set of a place after adding a finished set. Raises InvalidInput for a set that cannot be
    decoded."""
    tracker = CommitTracker(place.offset, place.finished)
    tracker.add(_read_finished(finished))
    return tracker.snapshot()


def check_offset(offset: object) -> None:
    """Raise InvalidInput unless the offset is a whole number that a log can reach."""
    check_number("offset", offset)


def _advance(connection: Connection, group_id: int, partition_id: int, progress: Progress, now_ms: int) -> bool:
    row = {"of_group": group_id, "of_partition": partition_id}
    values = {
        **row,
        "to": progress.offset,
        "above": progress.finished,
        "by_epoch": progress.epoch,
        "number": progress.number,
        "now_ms": now_ms,
    }
    if connection.execute(_ADVANCE, values).rowcount:
        return True
    current = connection.execute(_SELECT_LEASE_EPOCH, row).scalar()
    if current is not None and current > progress.epoch:
        names = connection.execute(_SELECT_NAMES, row).one()
        raise StaleEpoch(names.group, f"{names.broker_group}/{names.partition}", progress.epoch, current)
    if connection.execute(_SELECT_ONE, row).first() is not None:
        return False
    connection.execute(_INSERT, values)
    return True


def _put(connection: Connection, group_id: int, partition_id: int, offset: int, now_ms: int) -> None:
    row = {"of_group": group_id, "of_partition": partition_id}
    epoch = connection.execute(_SELECT_LEASE_EPOCH, row).scalar() or 0
    values = {**row, "to": offset, "above": b"", "by_epoch": epoch, "number": 0, "now_ms": now_ms}
    if not connection.execute(_SET, values).rowcount:
        connection.execute(_INSERT, values)


def _highest(connection: Connection, partition_id: int) -> int:
    """See `OffsetRows.highest`. Failed offsets count, because a new message there would inherit their attempts."""
    row = {"of_partition": partition_id}
    floor: int = connection.execute(_SELECT_FLOOR, row).scalar_one()
    next_offset: int | None = connection.execute(_SELECT_HIGHEST, row).scalar()
    used = [
        connection.execute(_SELECT_HIGHEST_PARKED, row).scalar(),
        connection.execute(_SELECT_HIGHEST_FAILED, row).scalar(),
        *(
            _highest_finished(group_id, partition_id, finished)
            for group_id, finished in connection.execute(_SELECT_FINISHED, {**row, "nothing": b""})
        ),
    ]
    return max(floor, next_offset or 0, *(offset + 1 for offset in used if offset is not None))


def _highest_finished(group_id: int, partition_id: int, finished: bytes) -> int | None:
    bitmap = _finished_set(group_id, partition_id, finished)
    return bitmap.max() if bitmap else None


def _finished_set(group_id: int, partition_id: int, finished: bytes) -> BitMap64 | None:
    try:
        return BitMap64.deserialize(finished)
    except ValueError as error:
        # The group cannot continue in this partition and needs a reset. For a reset, the folder must open.
        _log.error("state.finished_set_unreadable", group_id=group_id, partition_id=partition_id, error=str(error))
        return None


_SELECT_GATES = select(gates.c.group_id, partitions.c.position).join(
    partitions, partitions.c.id == gates.c.partition_id
)
_INSERT_GATE = insert(gates).values(
    group_id=bindparam("of_group"), partition_id=bindparam("of_partition"), opened_at_ms=bindparam("now_ms")
)
_DELETE_GATES = delete(gates).where(gates.c.group_id == bindparam("of_group"))
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
# Failures of messages in a parking lot. Resuming counts attempts from 0, and the offsets are not offsets of the child.
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
        """Group id and partition index of all open children."""
        with self._database.transaction() as connection:
            return {(row.group_id, row.position) for row in connection.execute(_SELECT_GATES)}

    def open(self, group_id: int, child: int, keys: Mapping[int, Iterable[bytes]], now_ms: int) -> None:
        """Open a child for good, and move the parking lots and requests of these keys from their parents to the
        child. `keys` is by parent."""
        with self._database.transaction() as connection:
            child_id = self._partition_ids.one(connection, group_id, child)
            connection.execute(_INSERT_GATE, {"of_group": group_id, "of_partition": child_id, "now_ms": now_ms})
            for parent, some in keys.items():
                parent_id = self._partition_ids.one(connection, group_id, parent)
                for key in some:
                    row = {"of_group": group_id, "from_partition": parent_id, "of_key": key}
                    for move in _MOVE:
                        connection.execute(move, {**row, "to_partition": child_id})
                    connection.execute(_DELETE_FAILURES, row)


def clear_gates(connection: Connection, group_id: int) -> None:
    """Close all gates of a group. Called within the transaction of a reset."""
    connection.execute(_DELETE_GATES, {"of_group": group_id})
