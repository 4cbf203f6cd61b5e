"""Stored subjects with their partitions and routes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, String, bindparam, cast, insert, literal, select, update

from inturn.model.errors import AlreadyExists, InvalidInput, NotFound
from inturn.model.routing import Descent, Partition, Route, SlotRange, check_partition_count, even_ranges
from inturn.model.settings import BATCH_BYTES_MAX, Keyless, Limits, Routing, Strategy, one_of
from inturn.model.subject import Subject, check_name
from inturn.store.cluster import LOCAL_BROKER_GROUP
from inturn.store.database import Cache, Database
from inturn.store.offsets import start_row
from inturn.store.partition_ids import PartitionIds
from inturn.store.schema import descents, groups, offsets, partitions, routes, subjects

FIRST_ROUTE_VERSION = 1

_SELECT_ONE = select(subjects).where(subjects.c.name == bindparam("wanted"))
_SELECT_NAMES = select(subjects.c.name).order_by(subjects.c.id)
_SELECT_PARTITIONS = (
    select(partitions.c.broker_group, partitions.c.name)
    .where(partitions.c.subject_id == bindparam("of_subject"))
    .order_by(partitions.c.position)
)
_SELECT_ROUTE = (
    select(routes.c.version, routes.c.ranges)
    .where(routes.c.subject_id == bindparam("of_subject"))
    .order_by(routes.c.version.desc())
    .limit(1)
)
_INSERT_SUBJECT = insert(subjects).returning(subjects.c.id)
_INSERT_PARTITION = insert(partitions)
_NAME_PARTITIONS = (
    update(partitions)
    .where(partitions.c.subject_id == bindparam("of_subject"), partitions.c.position >= bindparam("from_position"))
    .values(name=literal("p").concat(cast(partitions.c.id, String)))
)
_INSERT_ROUTE = insert(routes)
_INSERT_DESCENT = insert(descents)
_CHILD, _PARENT = partitions.alias(), partitions.alias()
_SELECT_DESCENTS = (
    select(_CHILD.c.position.label("child"), _PARENT.c.position.label("parent"), descents.c.slots, descents.c.barrier)
    .join(_CHILD, _CHILD.c.id == descents.c.child_id)
    .join(_PARENT, _PARENT.c.id == descents.c.parent_id)
    .where(_CHILD.c.subject_id == bindparam("of_subject"))
    .order_by(descents.c.version, _CHILD.c.position, _PARENT.c.position)
)
_SELECT_GROUP_IDS = select(groups.c.id).where(groups.c.subject_id == bindparam("of_subject"))
_INSERT_OFFSET = insert(offsets)


class Subjects:
    """Subjects are cached after the first read: change subjects only through this object."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._partition_ids = PartitionIds(database)
        self._known: Cache[str, Subject] = Cache(database)

    def create(
        self,
        name: str,
        partition_count: int,
        routing: Routing,
        strategy: Strategy,
        limits: Limits,
        now_ms: int,
        broker_groups: Sequence[str] = (LOCAL_BROKER_GROUP,),
        *,
        keyless: Keyless = Keyless.INDEPENDENT,
        reserved: bool = False,
        is_chosen: bool = False,
    ) -> Subject:
        """Create the subject with its partitions and its first route, in a transaction.

        `reserved` allows inturn's own names. The partitions are placed in the broker groups in turn. `is_chosen`: the
        caller requires exactly these broker groups.

        With equal settings, an existing subject is returned. Raises AlreadyExists if a setting differs, InvalidName or
        InvalidInput for an invalid value. Names that differ in case are different subjects.
        """
        check_name("subject", name, reserved=reserved)
        for broker_group in broker_groups:
            check_name("broker group", broker_group)
        check_partition_count(name, partition_count)
        homes = [broker_groups[index % len(broker_groups)] for index in range(partition_count)]
        wanted = Subject(
            name,
            Route(
                name,
                FIRST_ROUTE_VERSION,
                tuple(Partition(home, "") for home in homes),
                even_ranges(partition_count),
            ),
            one_of(Routing, "routing", routing),
            one_of(Strategy, "strategy", strategy),
            _checked_limits(limits),
            one_of(Keyless, "keyless", keyless),
        )
        with self._database.transaction() as connection:
            existing = self.find(name)
            if existing is None:
                _check_size(limits)
                _insert(connection, wanted, now_ms)
                return self._load(connection, name)
        if difference := _difference(existing, wanted, is_chosen=is_chosen):
            raise AlreadyExists("subject", name, difference)
        return existing

    def grow(self, grown: Route, now_ms: int) -> Subject:
        """Add the new partitions and descents of a grown route, in a transaction.

        Existing groups begin at offset 0 in the new partitions, whatever their start position was, because all messages
        in the new partitions are later.
        """
        with self._database.transaction() as connection:
            subject = self.get(grown.subject)
            row = connection.execute(_SELECT_ONE, {"wanted": grown.subject}).one()
            first = subject.partition_count
            _insert_partitions(connection, row.id, grown.partitions[first:], first)
            _insert_route(connection, row.id, grown)
            ids = self._insert_descents(connection, grown, len(subject.route.descents))
            group_ids = connection.execute(_SELECT_GROUP_IDS, {"of_subject": row.id}).scalars().all()
            starts = [start_row(group_id, child, 0, now_ms) for group_id in group_ids for child in ids[first:]]
            if starts:
                connection.execute(_INSERT_OFFSET, starts)
            return self._load(connection, grown.subject)

    def learn(self, subject: Subject, now_ms: int) -> Subject:
        """Store a subject, or its newer route, that a different server has made, in a transaction. Returns the stored
        subject: an older route changes nothing."""
        with self._database.transaction() as connection:
            existing = self.find(subject.name)
            if existing is None:
                _insert(connection, subject, now_ms)
                self._insert_descents(connection, subject.route, 0)
                return self._load(connection, subject.name)
        return existing if existing.route.version >= subject.route.version else self.grow(subject.route, now_ms)

    def get(self, name: str) -> Subject:
        """The subject, with its newest route. Raises NotFound."""
        subject = self.find(name)
        if subject is None:
            raise _not_found(name)
        return subject

    def find(self, name: str) -> Subject | None:
        """The subject, with its newest route, or None."""
        known = self._known.get(name)
        if known is not None:
            return known
        with self._database.transaction() as connection:
            if connection.execute(_SELECT_ONE, {"wanted": name}).first() is None:
                return None
            return self._load(connection, name)

    def all(self) -> list[Subject]:
        """All subjects in the order of their creation."""
        with self._database.transaction() as connection:
            names = connection.execute(_SELECT_NAMES).scalars().all()
            return [self.get(name) for name in names]

    def partition_ids(self, subject: str) -> tuple[int, ...]:
        """The database ids of the subject's partitions, by index. Raises NotFound."""
        with self._database.transaction() as connection:
            ids = self._partition_ids.of_subject(connection, subject)
        if not ids:
            raise _not_found(subject)
        return ids

    def _insert_descents(self, connection: Connection, route: Route, first: int) -> Sequence[int]:
        """Insert the descents from index `first` on. Returns the ids of all partitions."""
        ids = self._partition_ids.of_subject(connection, route.subject)
        rows = [_descent_row(one, ids, route.version) for one in route.descents[first:]]
        if rows:
            connection.execute(_INSERT_DESCENT, rows)
        return ids

    def _load(self, connection: Connection, name: str) -> Subject:
        row = connection.execute(_SELECT_ONE, {"wanted": name}).one()
        subject = _subject(row, _route(connection, name, row.id))
        self._known.put(name, subject)
        return subject


def _not_found(name: str) -> NotFound:
    return NotFound("subject", name, "create it first, or check the name (case matters)")


def _check_size(limits: Limits) -> None:
    """Check the limits of a new subject. An existing subject may be older than this limit."""
    total_bytes = limits.body_bytes + limits.key_bytes + limits.properties_bytes
    if total_bytes > BATCH_BYTES_MAX:
        raise InvalidInput(
            f"{limits!r}: a message of {total_bytes} bytes, but {BATCH_BYTES_MAX} is the largest; store larger content "
            "elsewhere and send a reference"
        )


def _checked_limits(limits: object) -> Limits:
    if not isinstance(limits, Limits):
        raise InvalidInput(f"limits {limits!r}: give a Limits object")
    for value in (limits.body_bytes, limits.key_bytes, limits.properties_bytes):
        if not isinstance(value, int):
            raise InvalidInput(f"{limits!r}: the limits must be whole numbers of bytes, not {value!r}")
    return limits


def _difference(existing: Subject, wanted: Subject, *, is_chosen: bool) -> str:
    """The differences between an existing subject and a request, as text; empty without differences."""
    # The broker groups were chosen at creation. Only a caller that requires broker groups is refused.
    homes = _homes(existing, wanted.partition_count) if is_chosen else ""
    grown = max(existing.partition_count, wanted.partition_count)
    pairs = [
        # A subject that has grown since its creation matches the original request.
        ("partitions", existing.partition_count, grown if existing.route.descents else wanted.partition_count),
        ("routing", existing.routing, wanted.routing),
        ("strategy", existing.strategy, wanted.strategy),
        ("limits", existing.limits, wanted.limits),
        ("keyless", existing.keyless, wanted.keyless),
        ("broker groups", homes, _homes(wanted, existing.partition_count) if is_chosen else ""),
    ]
    return ", ".join(f"{what} {there} (not {asked})" for what, there, asked in pairs if there != asked)


def _homes(subject: Subject, partition_count: int) -> str:
    """The broker groups of the first partitions, as text."""
    return ", ".join(one.broker_group for one in subject.route.partitions[:partition_count])


def _insert(connection: Connection, subject: Subject, now_ms: int) -> None:
    subject_id = connection.execute(
        _INSERT_SUBJECT,
        {
            "name": subject.name,
            "routing": subject.routing.value,
            "strategy": subject.strategy.value,
            "keyless": subject.keyless.value,
            "body_bytes_max": subject.limits.body_bytes,
            "key_bytes_max": subject.limits.key_bytes,
            "properties_bytes_max": subject.limits.properties_bytes,
            "created_at_ms": now_ms,
        },
    ).scalar_one()
    _insert_partitions(connection, subject_id, subject.route.partitions, 0)
    _insert_route(connection, subject_id, subject.route)


def _insert_partitions(connection: Connection, subject_id: int, added: Sequence[Partition], first: int) -> None:
    connection.execute(
        _INSERT_PARTITION,
        [
            {
                "subject_id": subject_id,
                "position": position,
                "broker_group": partition.broker_group,
                "name": partition.name or f"new-{subject_id}-{position}",  # until the id is known
                "offset_floor": 0,
            }
            for position, partition in enumerate(added, first)
        ],
    )
    if not all(partition.name for partition in added):  # else the server that made the subject has named them
        connection.execute(_NAME_PARTITIONS, {"of_subject": subject_id, "from_position": first})


def _insert_route(connection: Connection, subject_id: int, route: Route) -> None:
    ranges = json.dumps([[slots.start, slots.stop, slots.partition] for slots in route.ranges])
    connection.execute(_INSERT_ROUTE, {"subject_id": subject_id, "version": route.version, "ranges": ranges})


def _descent_row(descent: Descent, ids: Sequence[int], version: int) -> dict[str, object]:
    return {
        "child_id": ids[descent.child],
        "parent_id": ids[descent.parent],
        "version": version,
        "slots": descent.slots,
        "barrier": descent.barrier,
    }


def _route(connection: Connection, name: str, subject_id: int) -> Route:
    row = connection.execute(_SELECT_ROUTE, {"of_subject": subject_id}).one()
    found = connection.execute(_SELECT_PARTITIONS, {"of_subject": subject_id})
    return Route(
        name,
        row.version,
        tuple(Partition(partition.broker_group, partition.name) for partition in found),
        tuple(SlotRange(*slots) for slots in json.loads(row.ranges)),
        tuple(Descent(*one) for one in connection.execute(_SELECT_DESCENTS, {"of_subject": subject_id})),
    )


def _subject(row: Row[Any], route: Route) -> Subject:
    limits = Limits(row.body_bytes_max, row.key_bytes_max, row.properties_bytes_max)
    return Subject(row.name, route, Routing(row.routing), Strategy(row.strategy), limits, Keyless(row.keyless))
