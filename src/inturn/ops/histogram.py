"""How long something takes: counts in buckets, cheap to add to."""

from __future__ import annotations

import threading
from bisect import bisect_left

# From a tenth of a millisecond, which a sync of a quick disk takes, to what somebody waits for in vain.
BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """Any thread may add. It costs a third of a microsecond."""

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        self._lock = threading.Lock()

    def add(self, took_s: float) -> None:
        place = bisect_left(self._bounds_s, took_s)
        with self._lock:
            self._counts[place] += 1
            self._sum_s += took_s

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus has them (up to a bound, all below it included), and the sum."""
        with self._lock:
            counts, sum_s = list(self._counts), self._sum_s
        buckets, total = [], 0
        for bound, count in zip((*(f"{one:g}" for one in self._bounds_s), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, sum_s
