"""Time, passed in so that a simulation can stand in for it."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back. Every duration and every deadline is counted on these."""
        ...

    def time_ms(self) -> int:
        """Wall-clock milliseconds, for people to read. They decide nothing."""
        ...


# Goes on while the machine sleeps, where there is such a clock: a lease does not wait for whoever was suspended.
_monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


class SystemClock:
    monotonic = staticmethod(_monotonic)

    @staticmethod
    def time_ms() -> int:
        return time.time_ns() // 1_000_000
