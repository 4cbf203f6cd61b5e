"""Broker groups as they are kept: what operators let them do, and where their brokers are."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import bindparam, insert, select, update

from inturn.model.settings import BrokerGroupState
from inturn.state.database import Database
from inturn.state.schema import broker_groups

_SELECT_ALL = select(
    broker_groups.c.number,
    broker_groups.c.name,
    broker_groups.c.state,
    broker_groups.c.address,
    broker_groups.c.folder_id,
).order_by(broker_groups.c.name)
_INSERT = insert(broker_groups).returning(broker_groups.c.number)
_CHANGE = (
    update(broker_groups)
    .where(broker_groups.c.name == bindparam("of_name"))
    .values(state=bindparam("to_state"), address=bindparam("to_address"), changed_at_ms=bindparam("now_ms"))
)


@dataclass(frozen=True, slots=True)
class BrokerGroupRow:
    """`number` counts up, and is never given twice. Without an address it is the node itself."""

    number: int
    name: str
    state: BrokerGroupState = BrokerGroupState.AVAILABLE
    address: str = ""
    folder_id: str = ""


class BrokerGroupRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[BrokerGroupRow]:
        """By name."""
        with self._database.transaction() as connection:
            rows = connection.execute(_SELECT_ALL).all()
        return [BrokerGroupRow(row[0], row[1], BrokerGroupState(row[2]), row[3], row[4]) for row in rows]

    def add(self, name: str, address: str, folder_id: str, now_ms: int) -> BrokerGroupRow:
        """One that was not there, available. Durable when this returns."""
        values = {
            "name": name,
            "state": BrokerGroupState.AVAILABLE.value,
            "address": address,
            "folder_id": folder_id,
            "changed_at_ms": now_ms,
        }
        with self._database.transaction() as connection:
            number: int = connection.execute(_INSERT, values).scalar_one()
        return BrokerGroupRow(number, name, BrokerGroupState.AVAILABLE, address, folder_id)

    def change(self, name: str, state: BrokerGroupState, address: str, now_ms: int) -> None:
        """Durable when this returns."""
        values = {"of_name": name, "to_state": state.value, "to_address": address, "now_ms": now_ms}
        with self._database.transaction() as connection:
            connection.execute(_CHANGE, values)
