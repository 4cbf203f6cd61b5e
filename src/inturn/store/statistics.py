"""Rows for the statistics of all groups, read in pages: other transactions wait for a page at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import and_, bindparam, case, exists, func, or_, select, tuple_

from inturn.store.database import Database
from inturn.store.offsets import finished_count
from inturn.store.schema import failures, groups, lots, offsets, partitions

PAGE_COUNT = 200
FAILURES_COUNT_MAX = 10_000  # counted per group; further failures are ignored

_PAGE = (
    select(offsets.c.group_id, offsets.c.partition_id, partitions.c.position, offsets.c.next_offset, offsets.c.finished)
    .join(partitions, partitions.c.id == offsets.c.partition_id)
    .where(
        tuple_(offsets.c.group_id, offsets.c.partition_id)
        > tuple_(bindparam("after_group"), bindparam("after_partition"))
    )
    .order_by(offsets.c.group_id, offsets.c.partition_id)
    .limit(bindparam("at_most"))
)
_TROUBLED = (
    select(groups.c.id)
    .where(or_(exists().where(failures.c.group_id == groups.c.id), exists().where(lots.c.group_id == groups.c.id)))
    .order_by(groups.c.id)
)
_FAILED = (
    select(failures.c.partition_id, failures.c.key, failures.c.offset, failures.c.is_exhausted)
    .where(failures.c.group_id == bindparam("of_group"))
    .limit(bindparam("at_most"))
    .subquery()
)
_IS_PARKED = exists().where(
    and_(
        lots.c.group_id == bindparam("of_group"),
        lots.c.partition_id == _FAILED.c.partition_id,
        lots.c.key == _FAILED.c.key,
    )
)
# A message without a key is a lane of its own.
_LANES = (
    select(func.max(case((_FAILED.c.is_exhausted, 1), else_=0)).label("is_blocked"))
    .where(~_IS_PARKED)
    .group_by(_FAILED.c.partition_id, _FAILED.c.key, case((_FAILED.c.key.is_(None), _FAILED.c.offset), else_=-1))
    .subquery()
)
_FAILING = select(_LANES.c.is_blocked, func.count()).group_by(_LANES.c.is_blocked)
_PARKED = select(lots.c.state, func.count()).where(lots.c.group_id == bindparam("of_group")).group_by(lots.c.state)


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """How many offsets of a partition a group has finished, counted from offset 0."""

    group_id: int
    partition: int
    done: int


class StatisticsRows:
    """All methods may be called from any thread, without the node's lock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def places(self) -> Iterator[GroupPlace]:
        """The places of all groups. Every page is a separate snapshot."""
        after = {"after_group": 0, "after_partition": 0}
        while True:
            with self._database.transaction() as connection:
                rows = connection.execute(_PAGE, {**after, "at_most": PAGE_COUNT}).all()
            for row in rows:
                yield GroupPlace(row.group_id, row.position, row.next_offset + finished_count(row.finished))
            if len(rows) < PAGE_COUNT:
                return
            after = {"after_group": rows[-1].group_id, "after_partition": rows[-1].partition_id}

    def troubled(self) -> list[int]:
        """The ids of groups that have failed messages or parking lots."""
        with self._database.transaction() as connection:
            return list(connection.execute(_TROUBLED).scalars())

    def key_states(self, group_id: int) -> dict[str, int]:
        """The number of keys of the group that are "failing", "blocked", "parked" or "resuming", without zeros.
        Every message without a key counts as a key."""
        row = {"of_group": group_id}
        with self._database.transaction() as connection:
            failing = connection.execute(_FAILING, {**row, "at_most": FAILURES_COUNT_MAX}).all()
            parked = connection.execute(_PARKED, row).all()
        found = {"blocked" if is_blocked else "failing": count for is_blocked, count in failing}
        return {**found, **{row.state: row[1] for row in parked}}

    def check(self) -> None:
        """Raises StorageError, or Closed, if the database does not answer."""
        with self._database.transaction() as connection:
            connection.execute(select(1)).scalar()
