"""A clock for tests that moves only on request."""

from __future__ import annotations

import threading

from inturn.model.errors import InvalidInput

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000


class FakeClock:
    """Implements `inturn.model.time.Clock`. May be read and moved from any thread.

    The time is an integer of nanoseconds, so that a million small steps add up exactly.
    """

    def __init__(self, monotonic_s: float = 0.0, wall_ms: int = 1_700_000_000_000) -> None:
        self._now_ns = round(monotonic_s * _NS_PER_S)
        self._wall_lead_ns = wall_ms * _NS_PER_MS - self._now_ns
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self._now_ns / _NS_PER_S

    def time_ms(self) -> int:
        with self._lock:
            return (self._now_ns + self._wall_lead_ns) // _NS_PER_MS

    def advance(self, seconds: float) -> None:
        """Advance both clocks. Raises InvalidInput for a negative time: use `jump_wall` to set the wall clock back."""
        if not seconds >= 0:
            raise InvalidInput(f"FakeClock.advance({seconds!r}): time does not go back; see jump_wall()")
        with self._lock:
            self._now_ns += round(seconds * _NS_PER_S)

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward, or back if negative. The monotonic clock does not change."""
        with self._lock:
            self._wall_lead_ns += round(seconds * _NS_PER_S)

    def set_wall_ms(self, wall_ms: int) -> None:
        """Set the wall clock. The monotonic clock does not change."""
        with self._lock:
            self._wall_lead_ns = wall_ms * _NS_PER_MS - self._now_ns
