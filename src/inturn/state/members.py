"""Which members of a group are online. Deadlines live in memory; this is written when the state changes."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import bindparam, false, insert, select, true, update

from inturn.state.database import Database
from inturn.state.schema import members

_ROW = (members.c.group_id == bindparam("of_group"), members.c.member == bindparam("who"))
_SELECT_ONE = select(members.c.online).where(*_ROW)
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
        """Remember that the member came or went; true if that is a change. Otherwise nothing is written."""
        row = {"of_group": group_id, "who": member}
        with self._database.transaction() as connection:
            known = connection.execute(_SELECT_ONE, row).scalar()
            if online == bool(known):
                return False
            statement = _INSERT if known is None else _UPDATE
            connection.execute(statement, {**row, "is_online": online, "now_ms": now_ms})
            return True

    def online(self) -> list[OnlineMember]:
        """All members that are online, by group and name."""
        with self._database.transaction() as connection:
            return [OnlineMember(*row) for row in connection.execute(_SELECT_ONLINE)]

    def all_offline(self, now_ms: int) -> int:
        """For reopening: nobody is connected yet. Returns how many were online."""
        with self._database.transaction() as connection:
            return connection.execute(_ALL_OFFLINE, {"now_ms": now_ms}).rowcount
