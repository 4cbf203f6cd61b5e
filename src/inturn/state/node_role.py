"""What a folder is for its cluster, for good: its partitions are known to others by that."""

from __future__ import annotations

import uuid

from sqlalchemy import func, insert, select, text

from inturn.model.errors import InvalidInput
from inturn.model.names import check_name
from inturn.model.settings import Role
from inturn.state.database import Database
from inturn.state.schema import node_role, subjects

LOCAL_BROKER_GROUP = "local"
REQUEST_IDS = 1 << 40  # of key requests, for each broker group

_SELECT = select(node_role.c.role, node_role.c.broker_group, node_role.c.folder_id)
_SELECT_SUBJECT_COUNT = select(func.count()).select_from(subjects)
_INSERT = insert(node_role)


def take_role(database: Database, role: Role, broker_group: str) -> str:
    """The id of the folder. It has this role from now on; InvalidInput if it has another, or was a node before."""
    check_name("broker group", broker_group or LOCAL_BROKER_GROUP)
    with database.transaction() as connection:
        found = connection.execute(_SELECT).first()
        if found is not None:
            if (found.role, found.broker_group) != (role.value, broker_group):
                raise InvalidInput(
                    f"this folder is that of {_text(Role(found.role), found.broker_group)}, not of "
                    f"{_text(role, broker_group)}; serve it as what it is, or use another folder"
                )
            return str(found.folder_id)
        if role is Role.NODE:
            return ""
        if connection.execute(_SELECT_SUBJECT_COUNT).scalar_one():
            raise InvalidInput(
                f"this folder has subjects of its own, and cannot become that of {_text(role, broker_group)}; use "
                "a new one"
            )
        folder_id = uuid.uuid4().hex
        connection.execute(_INSERT, {"role": role.value, "broker_group": broker_group, "folder_id": folder_id})
        return folder_id


def own_broker_group(database: Database) -> str:
    """The broker group whose logs are in the folder; empty for meta, which has none."""
    with database.transaction() as connection:
        found = connection.execute(_SELECT).first()
    return LOCAL_BROKER_GROUP if found is None else str(found.broker_group)


def count_requests_from(database: Database, number: int) -> None:
    """Give key requests ids that no other broker group of the cluster gives, from here on."""
    with database.transaction() as connection:
        first = number * REQUEST_IDS
        row = {"first": first}
        if connection.dialect.name == "sqlite":
            known = connection.execute(text("SELECT seq FROM sqlite_sequence WHERE name = 'key_requests'")).scalar()
            if known is None:
                connection.execute(text("INSERT INTO sqlite_sequence (name, seq) VALUES ('key_requests', :first)"), row)
            elif known < first:
                connection.execute(text("UPDATE sqlite_sequence SET seq = :first WHERE name = 'key_requests'"), row)
        else:
            connection.execute(text("SELECT setval(pg_get_serial_sequence('key_requests', 'id'), :first)"), row)


def _text(role: Role, broker_group: str) -> str:
    match role:
        case Role.META:
            return "a meta server"
        case Role.BROKER:
            return f"the broker of group {broker_group!r}"
    return "a node that is meta and broker in one"
