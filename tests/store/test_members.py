from __future__ import annotations

from sqlalchemy import text

from inturn.store.database import Database
from inturn.store.groups import Members, OnlineMember


def test_members_come_and_go(database: Database, group_id: int) -> None:
    members = Members(database)
    assert members.set_online(group_id, "b", True, 1)
    assert members.set_online(group_id, "a", True, 2)
    assert members.online() == [OnlineMember(group_id, "a", 2), OnlineMember(group_id, "b", 1)]
    assert members.set_online(group_id, "a", False, 3)
    assert members.online() == [OnlineMember(group_id, "b", 1)]
    assert members.set_online(group_id, "a", True, 4)
    assert members.online()[0] == OnlineMember(group_id, "a", 4)


def test_only_changes_are_written(database: Database, group_id: int) -> None:
    members = Members(database)
    members.set_online(group_id, "a", True, 1)
    with database.transaction() as connection:
        before = connection.execute(text("SELECT total_changes()")).scalar()
    assert not members.set_online(group_id, "a", True, 2)
    assert not members.set_online(group_id, "unknown", False, 2)
    with database.transaction() as connection:
        assert connection.execute(text("SELECT total_changes()")).scalar() == before


def test_after_reopening_nobody_is_online(database: Database, group_id: int) -> None:
    members = Members(database)
    for name in ("a", "b", "c"):
        members.set_online(group_id, name, True, 1)
    members.set_online(group_id, "c", False, 1)
    assert members.all_offline(2) == 2
    assert members.online() == []
    assert members.all_offline(3) == 0
    assert members.set_online(group_id, "a", True, 4)
