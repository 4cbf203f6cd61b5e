"""Groups of a subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, select, update

from inturn.model.errors import InvalidInput, NotFound
from inturn.model.names import check_name
from inturn.model.settings import GroupMode, Order
from inturn.state.cache import Cache
from inturn.state.database import Database
from inturn.state.offsets import check_offset, start_row
from inturn.state.partition_ids import PartitionIds
from inturn.state.schema import groups, offsets, subjects

_SELECT_ONE = (
    select(groups.c.id)
    .join(subjects, subjects.c.id == groups.c.subject_id)
    .where(subjects.c.name == bindparam("subject"), groups.c.name == bindparam("group"))
)
_SELECT_ALL = (
    select(subjects.c.name.label("subject"), groups.c.name, groups.c.id, groups.c.start, groups.c.mode)
    .join(subjects, subjects.c.id == groups.c.subject_id)
    .order_by(groups.c.id)
)
_SELECT_ORDERS = select(groups.c.id, groups.c.set_order).where(groups.c.set_order.is_not(None))
_SET_ORDER = update(groups).where(groups.c.id == bindparam("of_group")).values(set_order=bindparam("to_order"))
_SELECT_SUBJECT = select(subjects.c.id).where(subjects.c.name == bindparam("subject"))
_INSERT_GROUP = insert(groups).returning(groups.c.id)
_INSERT_OFFSET = insert(offsets)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    subject: str
    name: str
    id: int
    start: str
    mode: GroupMode = GroupMode.EXCLUSIVE

    @property
    def is_exclusive(self) -> bool:
        return self.mode is GroupMode.EXCLUSIVE


class Groups:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)
        self._known: Cache[tuple[str, str], int] = Cache(database)

    def find(self, subject: str, group: str) -> int | None:
        """The id of the group, or None if the subject or the group is not there."""
        known = self._known.get((subject, group))
        if known is not None:
            return known
        with self._database.transaction() as connection:
            found = connection.execute(_SELECT_ONE, {"subject": subject, "group": group}).scalar()
            if found is not None:
                self._known.put((subject, group), found)
            return found

    def create(
        self,
        subject: str,
        group: str,
        start: str,
        start_offsets: Sequence[int],
        now_ms: int,
        mode: GroupMode = GroupMode.EXCLUSIVE,
    ) -> int:
        """Create the group with the offset where it starts in each partition, in one transaction, and return its id.

        A group that is there is returned as it is: its offsets do not move, its mode stays. Raises InvalidName or
        InvalidInput unless there is one offset per partition, NotFound if there is no such subject.
        """
        check_name("group", group)
        with self._database.transaction() as connection:
            existing = self.find(subject, group)
            if existing is not None:
                return existing
            return self._insert(connection, subject, group, start, start_offsets, now_ms, mode)

    def all(self) -> list[GroupRecord]:
        """All groups of all subjects, in the order of their creation."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_ALL).all()
        return [GroupRecord(row.subject, row.name, row.id, row.start, GroupMode(row.mode)) for row in rows]

    def orders(self) -> dict[int, Order]:
        """What was decided about the order of groups, by their ids."""
        with self._database.transaction() as connection:
            return {row.id: Order(row.set_order) for row in connection.execute(_SELECT_ORDERS)}

    def set_order(self, group_id: int, order: Order | None) -> None:
        """Decide, durably, which order the members keep to; None: the one they ask for."""
        with self._database.transaction() as connection:
            values = {"of_group": group_id, "to_order": None if order is None else order.value}
            connection.execute(_SET_ORDER, values)

    def _insert(
        self,
        connection: Connection,
        subject: str,
        group: str,
        start: str,
        start_offsets: Sequence[int],
        now_ms: int,
        mode: GroupMode,
    ) -> int:
        partition_ids = self._partition_ids.of_subject(connection, subject)
        if not partition_ids:
            raise NotFound("subject", subject, "create it first, or check the name (case matters)")
        if len(start_offsets) != len(partition_ids):
            raise InvalidInput(
                f"group {group!r}: {len(start_offsets)} start offsets for {len(partition_ids)} partitions; "
                "give one for each"
            )
        for offset in start_offsets:
            check_offset(offset)
        subject_id = connection.execute(_SELECT_SUBJECT, {"subject": subject}).scalar_one()
        group_id: int = connection.execute(
            _INSERT_GROUP,
            {"subject_id": subject_id, "name": group, "start": start, "created_at_ms": now_ms, "mode": mode.value},
        ).scalar_one()
        connection.execute(
            _INSERT_OFFSET,
            [
                start_row(group_id, partition_id, offset, now_ms)
                for partition_id, offset in zip(partition_ids, start_offsets, strict=True)
            ],
        )
        self._known.put((subject, group), group_id)
        return group_id
