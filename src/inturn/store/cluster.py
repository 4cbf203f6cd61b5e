"""Stored facts about the cluster: the role of a folder, broker groups, and seals.

The role of a folder never changes, because other servers know the folder's partitions by this role. Broker groups have
the state that operators set and the addresses of their brokers. A seal belongs to a subject that is about to grow: the
subject's partitions accept no appends by the old route.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import bindparam, delete, func, insert, select, text, update

from inturn.model.errors import InvalidInput
from inturn.model.settings import BrokerGroupState, Role
from inturn.model.subject import check_name
from inturn.store.database import Database
from inturn.store.schema import broker_groups, node_role, seals, subjects

LOCAL_BROKER_GROUP = "local"
REQUEST_IDS = 1 << 40  # ids of key requests per broker group

_SELECT_BROKER_GROUPS = select(
    broker_groups.c.number,
    broker_groups.c.name,
    broker_groups.c.state,
    broker_groups.c.address,
    broker_groups.c.folder_id,
).order_by(broker_groups.c.name)
_INSERT_BROKER_GROUP = insert(broker_groups).returning(broker_groups.c.number)
_CHANGE = (
    update(broker_groups)
    .where(broker_groups.c.name == bindparam("of_name"))
    .values(state=bindparam("to_state"), address=bindparam("to_address"), changed_at_ms=bindparam("now_ms"))
)


@dataclass(frozen=True, slots=True)
class BrokerGroupRow:
    """A stored broker group. `number` rises and is never used twice. No address: the broker group of this node."""

    number: int
    name: str
    state: BrokerGroupState = BrokerGroupState.AVAILABLE
    address: str = ""
    folder_id: str = ""


class BrokerGroupRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[BrokerGroupRow]:
        """All broker groups, sorted by name."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_BROKER_GROUPS).all()
        return [BrokerGroupRow(row[0], row[1], BrokerGroupState(row[2]), row[3], row[4]) for row in rows]

    def add(self, name: str, address: str, folder_id: str, now_ms: int) -> BrokerGroupRow:
        """Add a new, available broker group. Durable when this returns."""
        values = {
            "name": name,
            "state": BrokerGroupState.AVAILABLE.value,
            "address": address,
            "folder_id": folder_id,
            "changed_at_ms": now_ms,
        }
        with self._database.transaction() as connection:
            number: int = connection.execute(_INSERT_BROKER_GROUP, values).scalar_one()
        return BrokerGroupRow(number, name, BrokerGroupState.AVAILABLE, address, folder_id)

    def change(self, name: str, state: BrokerGroupState, address: str, now_ms: int) -> None:
        """Change state and address. Durable when this returns."""
        values = {"of_name": name, "to_state": state.value, "to_address": address, "now_ms": now_ms}
        with self._database.transaction() as connection:
            connection.execute(_CHANGE, values)


_OF_SUBJECT = select(subjects.c.id).where(subjects.c.name == bindparam("of_name"))
_SELECT_SEALS = (
    select(subjects.c.name, seals.c.version, seals.c.growth)
    .join(subjects, subjects.c.id == seals.c.subject_id)
    .order_by(subjects.c.id)
)
_DELETE = delete(seals).where(seals.c.subject_id == bindparam("of_subject"))
_INSERT_SEAL = insert(seals)


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal of a subject. `growth` names the growth attempt that set the seal."""

    subject: str
    version: int
    growth: str


class SealRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, Seal]:
        """All seals, by subject."""
        with self._database.transaction() as connection:
            return {row.name: Seal(*row) for row in connection.execute(_SELECT_SEALS)}

    def put(self, seal: Seal) -> None:
        """Set the seal of a subject; replaces an earlier seal. Durable when this returns."""
        with self._database.transaction() as connection:
            subject_id = connection.execute(_OF_SUBJECT, {"of_name": seal.subject}).scalar_one()
            connection.execute(_DELETE, {"of_subject": subject_id})
            connection.execute(_INSERT_SEAL, {"subject_id": subject_id, "version": seal.version, "growth": seal.growth})

    def remove(self, subject: str) -> None:
        with self._database.transaction() as connection:
            subject_id = connection.execute(_OF_SUBJECT, {"of_name": subject}).scalar_one()
            connection.execute(_DELETE, {"of_subject": subject_id})


_SELECT = select(node_role.c.role, node_role.c.broker_group, node_role.c.folder_id)
_SELECT_SUBJECT_COUNT = select(func.count()).select_from(subjects)
_INSERT_ROLE = insert(node_role)


def take_role(database: Database, role: Role, broker_group: str) -> str:
    """Give the folder this role for good, and return the folder's id.

    Raises InvalidInput if the folder has a different role, or was a node before.
    """
    check_name("broker group", broker_group or LOCAL_BROKER_GROUP)
    with database.transaction() as connection:
        found = connection.execute(_SELECT).first()
        if found is not None:
            if (found.role, found.broker_group) != (role.value, broker_group):
                raise InvalidInput(
                    f"this folder belongs to {_text(Role(found.role), found.broker_group)}, not to "
                    f"{_text(role, broker_group)}; serve the folder in its own role, or use another folder"
                )
            return str(found.folder_id)
        if role is Role.NODE:
            return ""
        if connection.execute(_SELECT_SUBJECT_COUNT).scalar_one():
            raise InvalidInput(
                f"this folder has subjects of its own, and cannot become the folder of {_text(role, broker_group)}; "
                "use a new folder"
            )
        folder_id = uuid.uuid4().hex
        connection.execute(_INSERT_ROLE, {"role": role.value, "broker_group": broker_group, "folder_id": folder_id})
        return folder_id


def own_broker_group(database: Database) -> str:
    """The broker group of the logs in the folder; empty for meta, because meta has no logs."""
    with database.transaction() as connection:
        found = connection.execute(_SELECT).first()
    return LOCAL_BROKER_GROUP if found is None else str(found.broker_group)


def count_requests_from(database: Database, number: int) -> None:
    """From now on, use ids of key requests that no other broker group of the cluster uses."""
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
