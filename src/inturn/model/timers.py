"""Things to do later, as a plain heap: whoever owns the time calls `run_due`."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Timer:
    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Callable[[], None]) -> None:
        self.at_s = at_s
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Timers:
    """`on_earlier` is called when a new timer is due before all others, so that a sleeping owner can wake up."""

    def __init__(self, on_earlier: Callable[[], None] | None = None) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._lock = threading.Lock()
        self.on_earlier = on_earlier

    def at(self, at_s: float, action: Callable[[], None]) -> Timer:
        timer = Timer(at_s, action)
        with self._lock:
            heapq.heappush(self._heap, (at_s, next(self._count), timer))
            first = self._heap[0][2] is timer
        if first and self.on_earlier is not None:
            self.on_earlier()
        return timer

    def next_due_s(self) -> float | None:
        with self._lock:
            while self._heap and self._heap[0][2].action is None:
                heapq.heappop(self._heap)
            return self._heap[0][0] if self._heap else None

    def run_due(self, now_s: float) -> None:
        while True:
            with self._lock:
                if not self._heap or self._heap[0][0] > now_s:
                    return
                timer = heapq.heappop(self._heap)[2]
                action, timer.action = timer.action, None
            if action is not None:
                action()
