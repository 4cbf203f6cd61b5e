"""Leases: the member that may consume a partition for a group, and the epoch of its lease.

Rows in the database hold owner and epoch; deadlines are kept in memory, on the monotonic clock. A lease expires only
after this table itself has seen no renewal for a full life. Time decides which member may *acquire*; the epoch protects
the data, because every pull and commit must carry the epoch.

`LeaseChanges` counts the changes of all leases since the start, and finds unstable leases.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from inturn.model.errors import LeaseHeld, StaleEpoch
from inturn.model.settings import LeaseSettings
from inturn.model.time import Clock
from inturn.protocol.commands import Acquire, Progress, RestlessLease
from inturn.protocol.observer import Observer
from inturn.store.groups import GroupRecord
from inturn.store.leases import LeaseRows

WITHIN_S = 600.0
GRANTS_KEPT = 32  # remembered grants per lease
UNSTABLE_GRANTS = 5  # a lease with this many grants within WITHIN_S is unstable
UNSTABLE_COUNT_MAX = 100


class LeaseChanges:
    """Counts of lease changes. Call all methods under the node's lock.

    `counts` is by event: "granted", "released", "expired" (counted at the next grant to a different member), "gone"
    (the process of the holder ended).
    """

    def __init__(self, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._granted_at_s: dict[tuple[GroupRecord, int], deque[float]] = {}

    def granted(self, group: GroupRecord, partition: int) -> None:
        self.counts["granted"] += 1
        grants = self._granted_at_s.get((group, partition))
        if grants is None:
            grants = self._granted_at_s[group, partition] = deque(maxlen=GRANTS_KEPT)
        grants.append(self._clock.monotonic())

    def ended(self, why: str) -> None:
        self.counts[why] += 1

    def unstable(self) -> tuple[RestlessLease, ...]:
        """The unstable leases of the last ten minutes, with the most grants first."""
        since_s = self._clock.monotonic() - WITHIN_S
        found = []
        for (group, partition), grants in self._granted_at_s.items():
            count = sum(at_s >= since_s for at_s in grants)
            if count >= UNSTABLE_GRANTS:
                found.append(RestlessLease(group.subject, group.name, partition, count))
        found.sort(key=lambda one: (-one.grant_count, one.subject, one.group, one.partition))
        return tuple(found[:UNSTABLE_COUNT_MAX])


@dataclass(slots=True)
class Lease:
    owner: str | None
    epoch: int
    ask: int
    deadline_s: float
    life_s: float  # as granted to the holder; settings may have changed since
    last_owner: str | None = None
    is_local: bool = False  # ends with the process of the node
    claims_from_s: float = float("-inf")  # before this time, unknown claims of the time before a restart may be live
    is_wanted_back: bool = False  # the owner wants to release the lease: new claims are refused

    def is_live(self, now_s: float) -> bool:
        return self.owner is not None and now_s < self.deadline_s


@dataclass(frozen=True, slots=True)
class LeaseKey:
    group: GroupRecord
    partition: int


class LeaseTable:
    def __init__(
        self, rows: LeaseRows, clock: Clock, settings: LeaseSettings, observer: Observer | None, *, local: bool
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._observer = observer
        self._local = local
        self.remote: set[str] = set()  # members in other processes
        self._leases: dict[tuple[int, int], Lease] = {}
        self.life_s = settings.life_s
        self.changes = LeaseChanges(clock)

    def load(self, groups: dict[int, GroupRecord]) -> None:
        """Load all leases after a restart. Leases of consumers in the ended process end; all other leases count as just
        renewed."""
        for row in self._rows.release_local(self._clock.time_ms()):
            if row.owner is not None:
                self.changes.ended("gone")
            if self._observer is not None and row.owner is not None:
                group = groups[row.group_id]
                self._observer.lease_ended(group.subject, group.name, row.partition, row.owner, row.epoch, "gone")
        now_s = self._clock.monotonic()
        for row in self._rows.all():
            life_s = row.life_ms / 1000
            self._leases[row.group_id, row.partition] = Lease(
                row.owner, row.epoch, row.ask, now_s + life_s, life_s, claims_from_s=now_s + life_s
            )

    def get(self, key: LeaseKey) -> Lease | None:
        return self._leases.get((key.group.id, key.partition))

    def acquire(self, key: LeaseKey, command: Acquire) -> Lease:
        """Grant the lease with a higher epoch than ever before, or raise LeaseHeld. Raises StaleEpoch for a late
        copy. A repeated acquire number renews the lease."""
        now_s = self._clock.monotonic()
        lease = self.get(key)
        ends = ""
        if lease is not None and lease.owner is not None:
            if lease.owner == command.member:
                if lease.ask == command.ask:
                    self._renew(lease, now_s)
                    return lease
                if lease.ask > command.ask:
                    raise StaleEpoch(key.group.name, str(key.partition), command.ask, lease.ask)
                ends = "released"
            elif lease.is_live(now_s):
                raise LeaseHeld(key.group.name, str(key.partition), lease.owner)
            else:
                ends = "expired"
        if lease is not None and lease.last_owner == command.member and command.ask <= lease.ask:
            # A late copy of an acquire whose lease was released: no member would use the lease.
            raise StaleEpoch(key.group.name, str(key.partition), command.ask, lease.ask)
        is_local = self._local and command.member not in self.remote and not command.outlives
        epoch = self._rows.grant(
            key.group.id,
            key.partition,
            command.member,
            is_local,
            self._clock.time_ms(),
            command.ask,
            math.ceil(self.life_s * 1000),
        )
        if lease is not None and ends:  # only now: the lease is valid until the next grant is durable
            self._end(key, lease, ends)
        granted = Lease(command.member, epoch, command.ask, now_s + self.life_s, self.life_s, is_local=is_local)
        self._leases[key.group.id, key.partition] = granted
        self.changes.granted(key.group, key.partition)
        if self._observer is not None:
            self._observer.lease_granted(key.group.subject, key.group.name, key.partition, command.member, epoch)
        return granted

    def check(self, key: LeaseKey, owner: str, epoch: int) -> Lease:
        """The lease, if this owner holds the lease with this epoch. Raises StaleEpoch."""
        lease = self.get(key)
        if lease is None or lease.owner != owner or lease.epoch != epoch:
            raise StaleEpoch(key.group.name, str(key.partition), epoch, 0 if lease is None else lease.epoch)
        return lease

    def outlive_owner(self, key: LeaseKey, owner: str, epoch: int) -> None:
        """Keep the lease when the process of its owner ends, durably. Has no effect unless this owner holds the lease
        with this epoch."""
        lease = self.get(key)
        if lease is not None and lease.is_local and (lease.owner, lease.epoch) == (owner, epoch):
            self._rows.outlive_owner(key.group.id, key.partition, epoch, self._clock.time_ms())
            lease.is_local = False

    def raise_epoch(self, key: LeaseKey) -> int:
        """A new epoch without an owner, for shared groups: receipts are valid within an epoch."""
        epoch = self._rows.raise_epoch(key.group.id, key.partition, self._clock.time_ms())
        self._leases[key.group.id, key.partition] = Lease(None, epoch, 0, self._clock.monotonic(), self.life_s)
        return epoch

    def renew(self, key: LeaseKey, owner: str, epoch: int) -> None:
        self._renew(self.check(key, owner, epoch), self._clock.monotonic())

    def release(self, key: LeaseKey, owner: str, progress: Progress) -> bool:
        """Commit and release in a transaction. Returns False if the progress was a late copy and changed nothing."""
        lease = self.check(key, owner, progress.epoch)
        is_stored = self._rows.release_with(key.group.id, progress, self._clock.time_ms())
        if is_stored and self._observer is not None:
            self._observer.committed(key.group.subject, key.group.name, owner, progress)
        self._end(key, lease, "released")
        return is_stored

    def release_all(
        self, group: GroupRecord, owner: str, is_kept: Callable[[LeaseKey], bool] = lambda _: False
    ) -> list[int]:
        """Release all leases of an owner in the group, without a commit. Returns the partitions.

        Leases for which `is_kept` returns True are not released: these expire.
        """
        owned = [
            (partition, lease)
            for (group_id, partition), lease in self._leases.items()
            if group_id == group.id and lease.owner == owner and not is_kept(LeaseKey(group, partition))
        ]
        for partition, lease in owned:
            self._rows.release(group.id, partition, lease.epoch, self._clock.time_ms())
            self._end(LeaseKey(group, partition), lease, "released")
        return [partition for partition, _ in owned]

    def holders(self, group: GroupRecord) -> dict[str, tuple[int, ...]]:
        """The partitions of the group with a live lease, by owner, sorted."""
        now_s = self._clock.monotonic()
        found: dict[str, tuple[int, ...]] = {}
        for (group_id, partition), lease in sorted(self._leases.items()):
            if group_id == group.id and lease.owner is not None and lease.is_live(now_s):
                found[lease.owner] = (*found.get(lease.owner, ()), partition)
        return found

    def expires_at_s(self, key: LeaseKey) -> float | None:
        lease = self.get(key)
        return None if lease is None or lease.owner is None else lease.deadline_s

    def live_count(self) -> int:
        now_s = self._clock.monotonic()
        return sum(lease.is_live(now_s) for lease in self._leases.values())

    def live_counts(self) -> dict[int, int]:
        """The number of live leases by group id, without zeros."""
        now_s = self._clock.monotonic()
        return Counter(group_id for (group_id, _), lease in self._leases.items() if lease.is_live(now_s))

    def forget(self, group: GroupRecord) -> None:
        """Load a group's leases again, after a reset has raised their epochs in the database."""
        for row in self._rows.all():
            if row.group_id == group.id:
                key = LeaseKey(group, row.partition)
                former = self.get(key)
                if former is not None:
                    self._end(key, former, "expired")
                now_s = self._clock.monotonic()
                self._leases[group.id, row.partition] = Lease(row.owner, row.epoch, row.ask, now_s, self.life_s)

    def _renew(self, lease: Lease, now_s: float) -> None:
        lease.deadline_s = now_s + lease.life_s

    def _end(self, key: LeaseKey, lease: Lease, why: str) -> None:
        owner, lease.owner = lease.owner, None
        lease.last_owner = owner
        if owner is None:
            return
        self.changes.ended(why)
        if self._observer is not None:
            self._observer.lease_ended(key.group.subject, key.group.name, key.partition, owner, lease.epoch, why)
