"""Bugs of the broker: leases and fencing."""

from __future__ import annotations

from typing import Any

from inturn.broker.broker import Broker
from inturn.broker.leases import Lease, LeaseKey, LeaseTable
from inturn.broker.producer_ids import ProducerIds
from inturn.model.batch import Batch
from inturn.model.errors import StaleEpoch
from inturn.model.time import Clock
from inturn.protocol.commands import Acquire, Progress
from inturn.store.groups import GroupRecord
from inturn.store.leases import LeaseRows
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_instead_of = BUGS.instead_of

_lease_acquire = LeaseTable.acquire
_lease_load = LeaseTable.load
_lease_init = LeaseTable.__init__


@_instead_of(LeaseTable, "check")
def lease_is_not_checked(self: LeaseTable, key: LeaseKey, owner: str, epoch: int) -> Lease:
    """Pulls, renewals, commits and releases are accepted from any consumer, not only from the holder of the lease."""
    lease = self.get(key)
    if lease is None:
        raise StaleEpoch(key.group.name, str(key.partition), epoch, 0)
    return lease


@_instead_of(Broker, "_holds")
def commit_is_not_checked_by_the_broker(self: Broker, group: GroupRecord, member: str, progress: Progress) -> bool:
    """The broker accepts commits without a check of the lease; only the store refuses some."""
    return True


@_instead_of(Lease, "is_live")
def live_lease_is_granted(self: Lease, now_s: float) -> bool:
    """A lease is granted to any consumer that asks, even if the holder has just renewed the lease."""
    return False


@_instead_of(LeaseTable, "load")
def lease_is_over_after_a_restart(self: LeaseTable, groups: dict[int, GroupRecord]) -> None:
    """After a restart of the node every lease counts as expired instead of just renewed."""
    _lease_load(self, groups)
    for lease in self._leases.values():
        lease.deadline_s = self._clock.monotonic()


@_instead_of(LeaseTable, "acquire")
def old_ask_is_granted_again(self: LeaseTable, key: LeaseKey, command: Acquire) -> Lease:
    """A late copy of an old acquire request takes the lease from its holder, though the holder has acquired again."""
    lease = self.get(key)
    if lease is not None and lease.owner == command.member and lease.ask > command.ask:
        lease.ask = 0
    return _lease_acquire(self, key, command)


class _WallClock:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.time_ms() / 1000

    def time_ms(self) -> int:
        return self._clock.time_ms()


@_instead_of(LeaseTable, "__init__")
def lease_ends_by_the_wall_clock(
    self: LeaseTable, rows: LeaseRows, clock: Clock, *arguments: Any, **options: Any
) -> None:
    """Leases are timed by the wall clock; the wall clock may jump."""
    _lease_init(self, rows, _WallClock(clock), *arguments, **options)


@_instead_of(ProducerIds, "check")
def fenced_producer_is_accepted(self: ProducerIds, batch: Batch) -> None:
    """The broker does not know that a newer producer of the same name has opened."""
