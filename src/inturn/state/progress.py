"""Progress as it is kept: offset, finished set, failures, parking lots and requests change together, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from inturn.model.commands import Failure, Lot, Progress
from inturn.state.bounds import check_number
from inturn.state.database import Database
from inturn.state.failures import Failures, check_failure
from inturn.state.key_requests import KeyRequests
from inturn.state.lots import Lots, check_change
from inturn.state.offsets import CommittedPlace, Offsets
from inturn.state.partition_ids import PartitionIds


@dataclass(frozen=True, slots=True)
class StoredProgress:
    """What the next holder of a partition's lease goes on from."""

    place: CommittedPlace
    failures: tuple[Failure, ...]
    lots: tuple[Lot, ...]


class ProgressRows:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)
        self._offsets = Offsets(database)
        self._failures = Failures(database)
        self._lots = Lots(database)
        self._requests = KeyRequests(database)

    def of_partition(self, group_id: int, partition: int) -> StoredProgress:
        with self._database.transaction():
            return StoredProgress(
                self._offsets.place(group_id, partition),
                self._failures.of_partition(group_id, partition),
                self._lots.of_partition(group_id, partition),
            )

    def store(self, group_id: int, progress: Sequence[Progress], now_ms: int) -> list[Progress]:
        """Store all of it durably, in one transaction, and return it without the late copies, which changed nothing.

        If one raises, nothing of any is stored. Raises what `Offsets.commit` does, and InvalidInput for what no row
        can hold or for a key that is to be free while something is parked.
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
            # After `failed`: what failed and is over since the last commit is over.
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
