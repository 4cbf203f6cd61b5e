"""Producer ids and epochs. With a higher epoch, a named producer fences its predecessor."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import bindparam, delete, func, insert, select, update

from inturn.model.subject import check_name
from inturn.protocol.commands import NamedProducer
from inturn.store.database import Database
from inturn.store.schema import producers

FIRST_EPOCH = 0

_TAKE_OVER = (
    update(producers)
    .where(producers.c.name == bindparam("of_name"))
    .values(epoch=producers.c.epoch + 1, nonce=bindparam("by_nonce"))
    .returning(producers.c.id, producers.c.epoch)
)
_INSERT = (
    insert(producers)
    .values(name=bindparam("of_name"), epoch=FIRST_EPOCH, nonce=bindparam("by_nonce"))
    .returning(producers.c.id)
)
_SELECT_OPENED = select(producers.c.id, producers.c.epoch).where(
    producers.c.name == bindparam("of_name"), producers.c.nonce == bindparam("by_nonce")
)
_FORGET_UNNAMED = delete(producers).where(producers.c.name.is_(None), producers.c.id < bindparam("newest_id"))
_SELECT_NEWEST = select(func.coalesce(func.max(producers.c.id), 0))
_SELECT_EPOCH = select(producers.c.epoch).where(producers.c.id == bindparam("of_id"))
_LEARN = insert(producers).values(id=bindparam("of_id"), name=bindparam("of_name"), epoch=bindparam("to_epoch"))
_RAISE = update(producers).where(producers.c.id == bindparam("of_id")).values(epoch=bindparam("to_epoch"))
_SELECT_NAMED = select(producers.c.id, producers.c.name, producers.c.epoch).where(producers.c.name.is_not(None))


class OpenedProducer(NamedTuple):
    id: int
    epoch: int


class Producers:
    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, name: str | None, nonce: str | None = None) -> OpenedProducer:
        """Open a producer; durable when this returns. Raises InvalidName.

        Without a name: a new id, never used before, with epoch 0. With a name: always the same id, and every call
        raises the epoch by 1, except a repeated call with the nonce of the last call.
        """
        if name is not None:
            check_name("producer", name)
        with self._database.transaction() as connection:
            values = {"of_name": name, "by_nonce": nonce}
            if name is not None:
                opened = None if nonce is None else connection.execute(_SELECT_OPENED, values).first()
                if opened is not None:
                    return OpenedProducer(opened.id, opened.epoch)
                taken = connection.execute(_TAKE_OVER, values).first()
                if taken is not None:
                    return OpenedProducer(taken.id, taken.epoch)
            producer_id = connection.execute(_INSERT, values).scalar_one()
            if name is None:
                # An unnamed producer is never opened again, and ids are not reused: only the newest row is needed.
                connection.execute(_FORGET_UNNAMED, {"newest_id": producer_id})
            return OpenedProducer(producer_id, FIRST_EPOCH)

    def learn(self, producer: NamedProducer) -> bool:
        """Store a producer that was opened on a different server; durable when this returns. False if the producer was
        known with this epoch or a higher epoch."""
        with self._database.transaction() as connection:
            values = {"of_name": producer.name, "of_id": producer.producer_id, "to_epoch": producer.epoch}
            known = connection.execute(_SELECT_EPOCH, values).scalar()
            if known is None:
                connection.execute(_LEARN, values)
            elif known < producer.epoch:
                connection.execute(_RAISE, values)
            return known is None or known < producer.epoch

    def named(self) -> list[NamedProducer]:
        """All named producers."""
        with self._database.transaction() as connection:
            return [NamedProducer(row.name, row.id, row.epoch) for row in connection.execute(_SELECT_NAMED)]

    def epochs(self) -> dict[int, int]:
        """The current epoch of every named producer, by id."""
        with self._database.transaction() as connection:
            return {row.id: row.epoch for row in connection.execute(_SELECT_NAMED)}

    def newest_id(self) -> int:
        """The highest id so far, or 0: ids rise, and the row of the newest producer is never deleted."""
        with self._database.transaction() as connection:
            newest: int = connection.execute(_SELECT_NEWEST).scalar_one()
            return newest
