"""What the last act is about: the night of the big sale. Who orders how much, and what each is told. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

INCIDENT_SUBJECT = "order.book"
INCIDENT_GROUP = "notify"
INCIDENT_PARTITIONS = 4
ONLINE = ("ada", "ben")  # two processes, and what each can do at once
ONLINE_CONCURRENCY = 4
TASK_CONCURRENCY = 64
TASK_COUNT = 2
NOTIFY_S = 0.004  # a notification
SKEW = 0.6  # the n-th customer gets 1 / n ** SKEW as many as the first


@dataclass(frozen=True, slots=True)
class IncidentScale:
    """How much is done: the rush of the sale, then a trickle that goes on until `after_s` after the hand-back."""

    rush: int
    rush_s: float
    trickle_per_s: int
    after_s: float
    customers: int
    round_s: float  # of the drain
    lease_s: float


# Online 2 × 4 handlers × 1 / 4 ms = 2,000 per second at best: the rush is nearly four times as fast. On Spark 2 × 64
# would be 32,000; two cores do some 20,000. The first of 2,000 customers gets 2 % of all, one after the other.
FULL_INCIDENT = IncidentScale(45_000, 6.0, 400, 1.5, 2000, 10.0, 5.0)
QUICK_INCIDENT = IncidentScale(6000, 1.0, 200, 0.5, 500, 10.0, 5.0)


def customer_key(customer: int) -> str:
    return f"customer-{customer}"


def notifications(customers: int, seed: int = 11) -> Iterator[tuple[str, int]]:
    """Without end: whom it is for, and which of theirs it is, from 1 on."""
    rng = random.Random(seed)
    heights = list(accumulate((rank + 1) ** -SKEW for rank in range(customers)))
    told: Counter[int] = Counter()
    while True:
        for customer in rng.choices(range(1, customers + 1), cum_weights=heights, k=1000):
            told[customer] += 1
            yield customer_key(customer), told[customer]


def notification_id(key: str, number: int) -> str:
    return f"{key}/{number}"


class Inbox:
    """What the customers see: whether each got the first, the second, the third, and so on."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._confused: set[str] = set()

    def note(self, message_id: str) -> None:
        """A customer was told. Again is no harm, too early is."""
        key, _, number = message_id.rpartition("/")
        last = self._last.get(key, 0)
        if int(number) > last + 1:
            self._confused.add(key)
        self._last[key] = max(last, int(number))

    @property
    def customers(self) -> int:
        return len(self._last)

    @property
    def in_order(self) -> int:
        return len(self._last) - len(self._confused)
