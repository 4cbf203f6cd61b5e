"""How much happens per second, of late."""

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
    """What was counted in each of the last ten seconds; second `n` is in place `n % WINDOW_S`."""

    total: int
    since_s: float
    second: int
    counts: list[int] = field(default_factory=lambda: [0] * WINDOW_S)

    def move_to(self, second: int) -> None:
        """The seconds between the last count and now are empty."""
        for passed in range(max(self.second + 1, second - WINDOW_S + 1), second + 1):
            self.counts[passed % WINDOW_S] = 0
        self.second = max(self.second, second)


class Rates(Generic[KeyT]):
    """Counts totals that grow, one for each key, and tells how fast they did over the last ten seconds. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tracks: dict[KeyT, _Track] = {}
        self._lock = threading.Lock()

    def start(self, key: KeyT, total: int) -> None:
        """What is there already does not count. One that is known keeps what it has counted."""
        now_s = self._clock.monotonic()
        with self._lock:
            track = self._tracks.get(key)
            if track is None:
                self._tracks[key] = _Track(total, now_s, int(now_s))
            else:
                track.total = total

    def reached(self, key: KeyT, total: int) -> None:
        """A total that is not higher than before counts nothing; neither does the first of a key."""
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
            # The oldest second is gone as a whole; one that has just begun to count says nothing about a whole second.
            window_s = min(WINDOW_S - 1 + now_s % 1, now_s - track.since_s)
            return sum(track.counts) / max(1.0, window_s)
