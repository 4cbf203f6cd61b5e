"""How often leases change hands: all together since the start, and each of them of late."""

from __future__ import annotations

from collections import Counter, deque

from inturn.model.clock import Clock
from inturn.model.commands import RestlessLease
from inturn.state.groups import GroupRecord

WITHIN_S = 600.0
GRANTS_KEPT = 32  # of one lease
RESTLESS_GRANTS = 5  # granted so often within that time, a lease does not come to rest
RESTLESS_COUNT_MAX = 100


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

    def restless(self) -> tuple[RestlessLease, ...]:
        """Those that were granted again and again in the last ten minutes; the worst first."""
        since_s = self._clock.monotonic() - WITHIN_S
        found = []
        for (group, partition), grants in self._granted_at_s.items():
            count = sum(at_s >= since_s for at_s in grants)
            if count >= RESTLESS_GRANTS:
                found.append(RestlessLease(group.subject, group.name, partition, count))
        found.sort(key=lambda one: (-one.grant_count, one.subject, one.group, one.partition))
        return tuple(found[:RESTLESS_COUNT_MAX])
