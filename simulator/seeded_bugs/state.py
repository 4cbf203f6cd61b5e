"""Bugs of the store: data that must survive, and does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, exists, insert, select, update

import inturn.store.offsets
from inturn.broker.broker import Broker
from inturn.broker.leases import Lease, LeaseKey, LeaseTable
from inturn.model.errors import StaleEpoch
from inturn.protocol.commands import Failure, LotChange, Progress
from inturn.store.keys import Failures
from inturn.store.leases import LeaseRows
from inturn.store.parking_lots import ParkingLots
from inturn.store.producers import OpenedProducer, Producers
from inturn.store.schema import leases, offsets
from simulator.seeded_bugs.broker import commit_is_not_checked_by_the_broker
from simulator.seeded_bugs.bug import Bugs, Patch

BUGS = Bugs()
_instead_of, _add = BUGS.instead_of, BUGS.add

_grant = LeaseRows.grant
_open_producer = Producers.open
_put_failures = Failures.put
_change_lots = ParkingLots.change


@_instead_of(LeaseRows, "grant")
def epoch_is_not_raised(self: LeaseRows, group_id: int, partition: int, owner: str, *rest: Any) -> int:
    """A grant to the same owner as before keeps the epoch."""
    before = next((row for row in self.all() if (row.group_id, row.partition) == (group_id, partition)), None)
    epoch = _grant(self, group_id, partition, owner, *rest)
    if before is None or before.owner not in (None, owner):
        return epoch
    _set_epoch(self, group_id, partition, before.epoch)
    return before.epoch


@_instead_of(LeaseRows, "grant")
def epoch_lives_in_memory(self: LeaseRows, group_id: int, partition: int, owner: str, *rest: Any) -> int:
    """Epochs are counted in memory: a restart of the node resets them."""
    _grant(self, group_id, partition, owner, *rest)
    epochs: dict[tuple[int, int], int] = self.__dict__.setdefault("epochs", {})
    epoch = epochs[group_id, partition] = epochs.get((group_id, partition), 0) + 1
    _set_epoch(self, group_id, partition, epoch)
    return epoch


def _set_epoch(rows: LeaseRows, group_id: int, partition: int, epoch: int) -> None:
    with rows._database.transaction() as connection:
        place = {
            "of_group": group_id,
            "of_partition": rows._partition_ids.one(connection, group_id, partition),
            "to_epoch": epoch,
        }
        connection.execute(_SET_EPOCH, place)


_SET_EPOCH = (
    update(leases)
    .where(leases.c.group_id == bindparam("of_group"), leases.c.partition_id == bindparam("of_partition"))
    .values(epoch=bindparam("to_epoch"))
)


@_instead_of(LeaseRows, "release_with")
def release_forgets_the_progress(self: LeaseRows, group_id: int, progress: Progress, now_ms: int) -> bool:
    """A release gives the lease back, but does not commit."""
    return self.release(group_id, progress.partition, progress.epoch, now_ms)


@_instead_of(Producers, "open")
def producer_id_is_given_twice(self: Producers, name: str | None, nonce: str | None = None) -> OpenedProducer:
    """All producers without a name get the same id."""
    opened = _open_producer(self, name, nonce)
    return opened if name is not None else opened._replace(id=1_000_000)


_OF_PLACE = (offsets.c.group_id == bindparam("of_group"), offsets.c.partition_id == bindparam("of_partition"))
_PUT = (
    update(offsets)
    .where(*_OF_PLACE)
    .values(
        next_offset=bindparam("to"),
        finished=bindparam("above"),
        epoch=bindparam("by_epoch"),
        commit_number=bindparam("number"),
        updated_at_ms=bindparam("now_ms"),
    )
)
_PUT_FORWARD = _PUT.where(offsets.c.next_offset <= bindparam("to"))
_PUT_FENCED_FORWARD = _PUT_FORWARD.where(
    ~exists().where(
        leases.c.group_id == bindparam("of_group"),
        leases.c.partition_id == bindparam("of_partition"),
        leases.c.epoch > bindparam("by_epoch"),
    )
)


def _advance_unfenced(
    connection: Connection, group_id: int, partition_id: int, progress: Progress, now_ms: int
) -> bool:
    values = {
        "of_group": group_id,
        "of_partition": partition_id,
        "to": progress.offset,
        "above": progress.finished,
        "by_epoch": progress.epoch,
        "number": progress.number,
        "now_ms": now_ms,
    }
    if connection.execute(_PUT_FORWARD, values).rowcount:
        return True
    if connection.execute(select(offsets.c.epoch).where(*_OF_PLACE), values).first() is None:
        connection.execute(insert(offsets).values(_NEW_PLACE), values)
        return True
    return False


_NEW_PLACE: dict[str, Any] = {
    "group_id": bindparam("of_group"),
    "partition_id": bindparam("of_partition"),
    "next_offset": bindparam("to"),
    "finished": bindparam("above"),
    "epoch": bindparam("by_epoch"),
    "commit_number": bindparam("number"),
    "updated_at_ms": bindparam("now_ms"),
}


def _check_the_owner_only(self: LeaseTable, key: LeaseKey, owner: str, epoch: int) -> Lease:
    lease = self.get(key)
    if lease is None or lease.owner != owner:
        raise StaleEpoch(key.group.name, str(key.partition), epoch, 0 if lease is None else lease.epoch)
    return lease


_add(
    "commit_goes_back",
    "store",
    "A commit that arrives late moves the group back.",
    Patch(inturn.store.offsets, "_ADVANCE", _PUT),
)
_add(
    "commit_is_not_fenced_anywhere",
    "store",
    "Broker and store accept commits of any epoch.",
    Patch(Broker, "_holds", commit_is_not_checked_by_the_broker),
    Patch(inturn.store.offsets, "_advance", _advance_unfenced),
)
_add(
    "epoch_is_not_checked",
    "broker",
    "The owner of a lease may pull and commit with an old epoch of its own; the store accepts the commit, too.",
    Patch(LeaseTable, "check", _check_the_owner_only),
    Patch(inturn.store.offsets, "_advance", _advance_unfenced),
)
_add(
    "late_copy_of_a_commit_is_stored",
    "store",
    "A late copy of a commit replaces newer commits of its epoch, except the offset: the offset never goes back.",
    Patch(inturn.store.offsets, "_ADVANCE", _PUT_FENCED_FORWARD),
)


@_instead_of(Failures, "put")
def attempts_are_stored_once(
    self: Failures, connection: Connection, group_id: int, partition_id: int, failed: Iterable[Failure], now_ms: int
) -> None:
    """The failure of a message is stored, but not the number of attempts."""
    once = [msgspec.structs.replace(one, attempts=min(one.attempts, 1)) for one in failed]
    _put_failures(self, connection, group_id, partition_id, once, now_ms)


@_instead_of(ParkingLots, "change")
def one_message_of_a_commit_is_parked(
    self: ParkingLots,
    connection: Connection,
    group_id: int,
    partition_id: int,
    changes: Iterable[LotChange],
    now_ms: int,
) -> None:
    """Of several messages of a key that are parked with one commit, only the first is stored."""
    first = [msgspec.structs.replace(change, added=change.added[:1]) for change in changes]
    _change_lots(self, connection, group_id, partition_id, first, now_ms)
