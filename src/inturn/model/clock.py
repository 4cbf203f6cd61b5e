"""Time, passed in so that a simulation can stand in for it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back. Every duration and every deadline is counted on these."""
        ...

    def time_ms(self) -> int:
        """Wall-clock milliseconds, for people to read. They decide nothing."""
        ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def time_ms() -> int:
        return time.time_ns() // 1_000_000
