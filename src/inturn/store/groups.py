"""Groups of subjects, and the online state of their members.

A member's row changes only when the member comes online or goes offline; deadlines of members are kept in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, false, insert, select, true, update

from inturn.model.errors import InvalidInput, NotFound
from inturn.model.settings import GroupMode, Order
from inturn.model.subject import check_name
from inturn.store.database import Cache, Database
from inturn.store.offsets import check_offset, start_row
from inturn.store.partition_ids import PartitionIds
from inturn.store.schema import groups, members, offsets, subjects

_SELECT_GROUP = (
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
        """The id of the group, or None if the subject or the group does not exist."""
        known = self._known.get((subject, group))
        if known is not None:
            return known
        with self._database.transaction() as connection:
            found = connection.execute(_SELECT_GROUP, {"subject": subject, "group": group}).scalar()
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
        """Create the group with its start offset in every partition, in a transaction, and return the group's id.

        An existing group is returned without any change of its offsets or mode. Raises InvalidName; InvalidInput unless
        there is an offset for every partition; NotFound for an unknown subject.
        """
        check_name("group", group)
        with self._database.transaction() as connection:
            existing = self.find(subject, group)
            if existing is not None:
                return existing
            return self._insert(
                connection=connection,
                subject=subject,
                group=group,
                start=start,
                start_offsets=start_offsets,
                now_ms=now_ms,
                mode=mode,
            )

    def all(self) -> list[GroupRecord]:
        """All groups of all subjects, in the order of their creation."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_ALL).all()
        return [GroupRecord(row.subject, row.name, row.id, row.start, GroupMode(row.mode)) for row in rows]

    def orders(self) -> dict[int, Order]:
        """The orders that operators have set, by group id."""
        with self._database.transaction() as connection:
            return {row.id: Order(row.set_order) for row in connection.execute(_SELECT_ORDERS)}

    def set_order(self, group_id: int, order: Order | None) -> None:
        """Set the order of a group durably. None: the members' settings decide."""
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
                "give one offset for each partition"
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


_ROW = (members.c.group_id == bindparam("of_group"), members.c.member == bindparam("who"))
_SELECT_MEMBER = select(members.c.online).where(*_ROW)
_SELECT_ONLINE = (
    select(members.c.group_id, members.c.member, members.c.changed_at_ms)
    .where(members.c.online == true())
    .order_by(members.c.group_id, members.c.member)
)
_UPDATE = update(members).where(*_ROW).values(online=bindparam("is_online"), changed_at_ms=bindparam("now_ms"))
_INSERT = insert(members).values(
    group_id=bindparam("of_group"),
    member=bindparam("who"),
    online=bindparam("is_online"),
    changed_at_ms=bindparam("now_ms"),
)
_ALL_OFFLINE = (
    update(members).where(members.c.online == true()).values(online=false(), changed_at_ms=bindparam("now_ms"))
)


@dataclass(frozen=True, slots=True)
class OnlineMember:
    group_id: int
    member: str
    since_ms: int


class Members:
    def __init__(self, database: Database) -> None:
        self._database = database

    def set_online(self, group_id: int, member: str, online: bool, now_ms: int) -> bool:
        """Store whether the member is online. Returns whether the state changed; without a change, writes nothing."""
        row = {"of_group": group_id, "who": member}
        with self._database.transaction() as connection:
            known = connection.execute(_SELECT_MEMBER, row).scalar()
            if online == bool(known):
                return False
            statement = _INSERT if known is None else _UPDATE
            connection.execute(statement, {**row, "is_online": online, "now_ms": now_ms})
            return True

    def online(self) -> list[OnlineMember]:
        """All online members, sorted by group and name."""
        with self._database.transaction() as connection:
            return [OnlineMember(*row) for row in connection.execute(_SELECT_ONLINE)]

    def all_offline(self, now_ms: int) -> int:
        """Set all members offline, at opening: no member is connected yet. Returns how many members were online."""
        with self._database.transaction() as connection:
            return connection.execute(_ALL_OFFLINE, {"now_ms": now_ms}).rowcount
