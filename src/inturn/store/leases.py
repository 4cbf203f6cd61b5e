"""Stored leases and stored progress.

A lease row has the member that may consume a partition for a group, and the epoch. Progress is the offset, finished
set, failures, parking lots and key requests of a partition; a commit stores all of them, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, false, insert, null, select, true, update

from inturn.model.errors import StaleEpoch
from inturn.protocol.commands import Failure, Lot, Progress
from inturn.store.database import Database, check_number
from inturn.store.keys import Failures, KeyRequests, check_failure
from inturn.store.offsets import CommittedPlace, OffsetRows
from inturn.store.parking_lots import ParkingLots, check_change
from inturn.store.partition_ids import PartitionIds
from inturn.store.schema import leases, partitions

_ROW = (leases.c.group_id == bindparam("of_group"), leases.c.partition_id == bindparam("of_partition"))
_SELECT_ALL = (
    select(
        leases.c.group_id,
        partitions.c.position,
        leases.c.epoch,
        leases.c.owner,
        leases.c.local,
        leases.c.ask,
        leases.c.life_ms,
    )
    .join(partitions, partitions.c.id == leases.c.partition_id)
    .order_by(leases.c.group_id, partitions.c.position)
)
_SELECT_LOCAL = _SELECT_ALL.where(leases.c.local == true(), leases.c.owner.is_not(None))
_GRANT = (
    update(leases)
    .where(*_ROW)
    .values(
        epoch=leases.c.epoch + 1,
        owner=bindparam("to_owner"),
        ask=bindparam("by_ask"),
        local=bindparam("is_local"),
        changed_at_ms=bindparam("now_ms"),
        life_ms=bindparam("for_ms"),
    )
    .returning(leases.c.epoch)
)
_GRANT_FIRST = insert(leases).values(
    group_id=bindparam("of_group"),
    partition_id=bindparam("of_partition"),
    epoch=bindparam("first_epoch"),
    owner=bindparam("to_owner"),
    ask=bindparam("by_ask"),
    local=bindparam("is_local"),
    changed_at_ms=bindparam("now_ms"),
    life_ms=bindparam("for_ms"),
)
_RELEASE = (
    update(leases)
    .where(*_ROW, leases.c.epoch == bindparam("by_epoch"), leases.c.owner.is_not(None))
    .values(owner=null(), changed_at_ms=bindparam("now_ms"))
)
_OUTLIVE_OWNER = (
    update(leases)
    .where(*_ROW, leases.c.epoch == bindparam("by_epoch"))
    .values(local=false(), changed_at_ms=bindparam("now_ms"))
)
_RAISE_EPOCH = (
    update(leases)
    .where(*_ROW)
    .values(epoch=leases.c.epoch + 1, owner=null(), changed_at_ms=bindparam("now_ms"))
    .returning(leases.c.epoch)
)
_RELEASE_LOCAL = (
    update(leases)
    .where(leases.c.local == true(), leases.c.owner.is_not(None))
    .values(owner=null(), changed_at_ms=bindparam("now_ms"))
)

FIRST_EPOCH = 1


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A stored lease. After a release `owner` is None and the epoch stays. `local`: the owner runs in the node's
    process."""

    group_id: int
    partition: int
    epoch: int
    owner: str | None
    local: bool
    ask: int = 0  # the owner's acquire number that was granted
    life_ms: int = 0


class LeaseRows:
    """The durable part of leases. The rows do not record expiry: the broker tracks the time of leases in memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)
        self._progress = ProgressRows(database)

    def all(self) -> list[LeaseRow]:
        """All leases that were ever granted, in their last state, sorted by group and partition."""
        with self._database.transaction() as connection:
            return [LeaseRow(*row) for row in connection.execute(_SELECT_ALL)]

    def grant(
        self, group_id: int, partition: int, owner: str, local: bool, now_ms: int, ask: int = 0, life_ms: int = 0
    ) -> int:
        """Grant the lease to an owner and return the new epoch, higher than all earlier epochs. Durable when this
        returns.

        A present holder loses the lease: the caller checks that the lease may be granted. Raises NotFound for an
        unknown group or partition.
        """
        with self._database.transaction() as connection:
            values = {
                "of_group": group_id,
                "of_partition": self._partition_ids.one(connection, group_id, partition),
                "to_owner": owner,
                "by_ask": ask,
                "is_local": local,
                "now_ms": now_ms,
                "for_ms": life_ms,
            }
            epoch = connection.execute(_GRANT, values).scalar()
            if epoch is None:
                epoch = FIRST_EPOCH
                connection.execute(_GRANT_FIRST, {**values, "first_epoch": epoch})
            return epoch

    def raise_epoch(self, group_id: int, partition: int, now_ms: int) -> int:
        """Raise the epoch without an owner, for shared groups: receipts of earlier epochs become invalid."""
        with self._database.transaction() as connection:
            row = {"of_group": group_id, "of_partition": self._partition_ids.one(connection, group_id, partition)}
            epoch = connection.execute(_RAISE_EPOCH, {**row, "now_ms": now_ms}).scalar()
            if epoch is None:
                epoch = FIRST_EPOCH
                nobody = {"to_owner": None, "by_ask": 0, "is_local": False, "for_ms": 0, "now_ms": now_ms}
                connection.execute(_GRANT_FIRST, {**row, **nobody, "first_epoch": epoch})
            return epoch

    def release(self, group_id: int, partition: int, epoch: int, now_ms: int) -> bool:
        """Clear the owner. Returns False, without a change, if the lease is no longer held with this epoch."""
        with self._database.transaction() as connection:
            values = {
                "of_group": group_id,
                "of_partition": self._partition_ids.one(connection, group_id, partition),
                "by_epoch": epoch,
                "now_ms": now_ms,
            }
            return connection.execute(_RELEASE, values).rowcount > 0

    def outlive_owner(self, group_id: int, partition: int, epoch: int, now_ms: int) -> None:
        """Keep the lease of this epoch when the process of the node ends: claimants in other processes work under the
        lease."""
        with self._database.transaction() as connection:
            values = {
                "of_group": group_id,
                "of_partition": self._partition_ids.one(connection, group_id, partition),
                "by_epoch": epoch,
                "now_ms": now_ms,
            }
            connection.execute(_OUTLIVE_OWNER, values)

    def release_with(self, group_id: int, progress: Progress, now_ms: int) -> bool:
        """Store the progress and clear the owner, both or neither. Returns False if the progress was a late copy.

        Raises StaleEpoch if the lease is no longer held with this epoch, and the errors of `ProgressRows.store`.
        """
        with self._database.transaction():
            stored = self._progress.store(group_id, [progress], now_ms)
            if not self.release(group_id, progress.partition, progress.epoch, now_ms):
                raise StaleEpoch(f"with id {group_id}", str(progress.partition), progress.epoch, progress.epoch)
            return bool(stored)

    def release_local(self, now_ms: int) -> list[LeaseRow]:
        """Release all leases of owners in the process of the node, and return the leases in their former state.

        Called at opening: the former process has ended, so no handler runs under these leases.
        """
        with self._database.transaction() as connection:
            held = [LeaseRow(*row) for row in connection.execute(_SELECT_LOCAL)]
            if held:
                connection.execute(_RELEASE_LOCAL, {"now_ms": now_ms})
            return held


@dataclass(frozen=True, slots=True)
class StoredProgress:
    """The progress of a partition, where the next lease holder continues."""

    place: CommittedPlace
    failures: tuple[Failure, ...]
    lots: tuple[Lot, ...]


class ProgressRows:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)
        self._offsets = OffsetRows(database)
        self._failures = Failures(database)
        self._lots = ParkingLots(database)
        self._requests = KeyRequests(database)

    def of_partition(self, group_id: int, partition: int) -> StoredProgress:
        with self._database.transaction():
            return StoredProgress(
                self._offsets.place(group_id, partition),
                self._failures.of_partition(group_id, partition),
                self._lots.of_partition(group_id, partition),
            )

    def store(self, group_id: int, progress: Sequence[Progress], now_ms: int) -> list[Progress]:
        """Store progress durably in a transaction, and return the stored progress: late copies are left out and change
        nothing.

        After an error, none of the progress is stored. Raises the errors of `OffsetRows.commit`; InvalidInput for
        values that no row can hold, or for a key that would become free while messages are parked.
        """
        for one in progress:
            _check(one)
        with self._database.transaction() as connection:
            return [one for one in progress if self._store(connection, group_id, one, now_ms)]

    def _store(self, connection: Connection, group_id: int, progress: Progress, now_ms: int) -> bool:
        if not self._offsets.commit(group_id, progress, now_ms):
            return False
        if not (progress.failed or progress.settled or progress.lots or progress.requests):
            return True
        partition_id = self._partition_ids.one(connection, group_id, progress.partition)
        if progress.failed:
            self._failures.put(connection, group_id, partition_id, progress.failed, now_ms)
        if progress.settled:
            # After `failed`: a message may have failed and been finished since the last commit.
            self._failures.settle(connection, group_id, partition_id, progress.settled)
        if progress.lots:
            self._lots.change(connection, group_id, partition_id, progress.lots, now_ms)
        if progress.requests:
            self._requests.mark_done(connection, group_id, partition_id, progress.requests, now_ms)
        return True


def _check(progress: Progress) -> None:
    for failure in progress.failed:
        check_failure(failure)
    for offset in progress.settled:
        check_number("offset", offset)
    for change in progress.lots:
        check_change(change)
    for request_id in progress.requests:
        check_number("request id", request_id)
