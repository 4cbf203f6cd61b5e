"""Leases: who may consume a partition for a group, and since which epoch.

Rows in the database hold owner and epoch; deadlines live here, on the monotonic clock. A lease is taken from its
owner only after this table itself has seen no renewal for a full life. Time decides who may *ask*; what protects
the data is the epoch, which every pull and commit has to bring.

How often leases change hands: all together since the start, and each of them of late.
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
GRANTS_KEPT = 32  # of one lease
UNSTABLE_GRANTS = 5  # granted so often within that time, a lease does not come to rest
UNSTABLE_COUNT_MAX = 100


class LeaseChanges:
    """Call it under the node's lock. `counts` is by what happened: "granted", "released", "expired" (counted when
    somebody else gets it), "gone" (with the process of its holder)."""

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
        """Those that were granted again and again in the last ten minutes; the worst first."""
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
    life_s: float  # as it was granted: its holder counts with that, also after the settings were changed
    last_owner: str | None = None
    is_local: bool = False  # over when the process of the node is
    claims_from_s: float = float("-inf")  # before this there may be claims that nobody remembers
    is_wanted_back: bool = False  # its owner wants to release it: nothing is claimed any more

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
        self.remote: set[str] = set()  # members that live in other processes
        self._leases: dict[tuple[int, int], Lease] = {}
        self.life_s = settings.life_s
        self.changes = LeaseChanges(clock)

    def load(self, groups: dict[int, GroupRecord]) -> None:
        """After a restart: consumers of a dead process are gone; every other lease counts as just renewed."""
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
        """Grant the lease with a higher epoch than ever before, or raise LeaseHeld."""
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
            # A late copy of an ask whose lease was given back: nobody would use it.
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
        if lease is not None and ends:  # only now: it holds until the next one is durable
            self._end(key, lease, ends)
        granted = Lease(command.member, epoch, command.ask, now_s + self.life_s, self.life_s, is_local=is_local)
        self._leases[key.group.id, key.partition] = granted
        self.changes.granted(key.group, key.partition)
        if self._observer is not None:
            self._observer.lease_granted(key.group.subject, key.group.name, key.partition, command.member, epoch)
        return granted

    def check(self, key: LeaseKey, owner: str, epoch: int) -> Lease:
        """The lease, if this owner holds it with this epoch; StaleEpoch if not."""
        lease = self.get(key)
        if lease is None or lease.owner != owner or lease.epoch != epoch:
            raise StaleEpoch(key.group.name, str(key.partition), epoch, 0 if lease is None else lease.epoch)
        return lease

    def outlive_owner(self, key: LeaseKey, owner: str, epoch: int) -> None:
        """From here on the lease does not end with the process of its owner, durably; nothing if it is not held so."""
        lease = self.get(key)
        if lease is not None and lease.is_local and (lease.owner, lease.epoch) == (owner, epoch):
            self._rows.outlive_owner(key.group.id, key.partition, epoch, self._clock.time_ms())
            lease.is_local = False

    def raise_epoch(self, key: LeaseKey) -> int:
        """A new epoch that nobody holds: for shared groups, whose receipts are valid within one."""
        epoch = self._rows.raise_epoch(key.group.id, key.partition, self._clock.time_ms())
        self._leases[key.group.id, key.partition] = Lease(None, epoch, 0, self._clock.monotonic(), self.life_s)
        return epoch

    def renew(self, key: LeaseKey, owner: str, epoch: int) -> None:
        self._renew(self.check(key, owner, epoch), self._clock.monotonic())

    def release(self, key: LeaseKey, owner: str, progress: Progress) -> bool:
        """Commit and give back, in one transaction; false if the progress was a late copy, which changed nothing."""
        lease = self.check(key, owner, progress.epoch)
        is_stored = self._rows.release_with(key.group.id, progress, self._clock.time_ms())
        if is_stored and self._observer is not None:
            self._observer.committed(key.group.subject, key.group.name, owner, progress)
        self._end(key, lease, "released")
        return is_stored

    def release_all(
        self, group: GroupRecord, owner: str, is_kept: Callable[[LeaseKey], bool] = lambda _: False
    ) -> list[int]:
        """Give back whatever this owner still holds in the group; it commits nothing. Returns the partitions. What is
        kept ends by itself."""
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
        """The partitions of the group whose leases are live, by owner, in order."""
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
        """How many leases are live, by the id of their group, where any are."""
        now_s = self._clock.monotonic()
        return Counter(group_id for (group_id, _), lease in self._leases.items() if lease.is_live(now_s))

    def forget(self, group: GroupRecord) -> None:
        """Load a group's leases anew, after their epochs were raised in the database."""
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
