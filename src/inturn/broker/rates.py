"""Rates per second over the last ten seconds."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from inturn.model.time import Clock

WINDOW_S = 10

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class _Track:
    """The counts of the last ten seconds; the count of second `n` is at index `n % WINDOW_S`."""

    total: int
    since_s: float
    second: int
    counts: list[int] = field(default_factory=lambda: [0] * WINDOW_S)

    def move_to(self, second: int) -> None:
        """Set the counts of the seconds between the last count and now to 0."""
        for passed in range(max(self.second + 1, second - WINDOW_S + 1), second + 1):
            self.counts[passed % WINDOW_S] = 0
        self.second = max(self.second, second)


class Rates(Generic[KeyT]):
    """The growth per second of totals, by key, over the last ten seconds. May be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tracks: dict[KeyT, _Track] = {}
        self._lock = threading.Lock()

    def start(self, key: KeyT, total: int) -> None:
        """Set the total of a key without counting. A known key keeps its counts."""
        now_s = self._clock.monotonic()
        with self._lock:
            track = self._tracks.get(key)
            if track is None:
                self._tracks[key] = _Track(total, now_s, int(now_s))
            else:
                track.total = total

    def reached(self, key: KeyT, total: int) -> None:
        """Count up to a new total. A total that is not higher, or the first total of a key, counts as 0."""
        now_s = self._clock.monotonic()
        with self._lock:
            track = self._tracks.get(key)
            if track is None:
                self._tracks[key] = _Track(total, now_s, int(now_s))
                return
            track.move_to(int(now_s))
            track.counts[track.second % WINDOW_S] += max(0, total - track.total)
            track.total = max(track.total, total)

    def per_s(self, key: KeyT) -> float:
        now_s = self._clock.monotonic()
        with self._lock:
            track = self._tracks.get(key)
            if track is None:
                return 0.0
            track.move_to(int(now_s))
            # The oldest second is dropped as a whole. A window below 1 second would exaggerate the rate.
            window_s = min(WINDOW_S - 1 + now_s % 1, now_s - track.since_s)
            return sum(track.counts) / max(1.0, window_s)
