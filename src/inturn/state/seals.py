"""Seals as a broker keeps them: a subject is about to grow, and its partitions take nothing by the old route."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import bindparam, delete, insert, select

from inturn.state.database import Database
from inturn.state.schema import seals, subjects

_OF_SUBJECT = select(subjects.c.id).where(subjects.c.name == bindparam("of_name"))
_SELECT_ALL = (
    select(subjects.c.name, seals.c.version, seals.c.growth)
    .join(subjects, subjects.c.id == seals.c.subject_id)
    .order_by(subjects.c.id)
)
_DELETE = delete(seals).where(seals.c.subject_id == bindparam("of_subject"))
_INSERT = insert(seals)


@dataclass(frozen=True, slots=True)
class Seal:
    """`growth` names the attempt that it was made for."""

    subject: str
    version: int
    growth: str


class SealRows:
    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, Seal]:
        """By subject."""
        with self._database.transaction() as connection:
            return {row.name: Seal(*row) for row in connection.execute(_SELECT_ALL)}

    def put(self, seal: Seal) -> None:
        """In place of one that may be there. Durable when this returns."""
        with self._database.transaction() as connection:
            subject_id = connection.execute(_OF_SUBJECT, {"of_name": seal.subject}).scalar_one()
            connection.execute(_DELETE, {"of_subject": subject_id})
            connection.execute(_INSERT, {"subject_id": subject_id, "version": seal.version, "growth": seal.growth})

    def remove(self, subject: str) -> None:
        with self._database.transaction() as connection:
            subject_id = connection.execute(_OF_SUBJECT, {"of_name": subject}).scalar_one()
            connection.execute(_DELETE, {"of_subject": subject_id})
