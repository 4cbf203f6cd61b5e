"""A world with its own time: events in a heap, one seed for all chance. It is also the clock of everything in it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

_WALL_START_MS = 1_700_000_000_000
EVENTS_MAX = 300_000  # a usual history has some thousands


class TimeStandsStill(Exception):
    """Far too much happened: most likely something happens again and again at the same moment."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        super().__init__(f"{EVENTS_MAX} events by {now_s:.3f} s: something goes round in circles")


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.wall_jump_ms = 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._happened = 0

    def monotonic(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return _WALL_START_MS + int(self.now_s * 1000) + self.wall_jump_ms

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._count), action))

    def run(self, until_s: float) -> None:
        """Let events happen up to this time. Raises TimeStandsStill."""
        events = self._events
        while events and events[0][0] <= until_s:
            at_s, _, action = heapq.heappop(events)
            self.now_s = max(self.now_s, at_s)
            self._happened += 1
            if self._happened > EVENTS_MAX:
                raise TimeStandsStill(self.now_s)
            action()
        self.now_s = until_s

    def spread(self, low_s: float, high_s: float) -> float:
        return self.rng.uniform(low_s, high_s)

    def happens(self, chance: float) -> bool:
        return self.rng.random() < chance
