"""Clocks and timers. Both are passed in, so that a simulation can replace the time.

`Timers` is a heap of actions; the owner of the clock calls `run_due`. `TimerThread` is an owner with a thread.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from inturn.model.logs import get_logger


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back. All durations and deadlines use this clock."""
        ...

    def time_ms(self) -> int:
        """Wall-clock milliseconds for people to read. No decision depends on this clock."""
        ...


# CLOCK_BOOTTIME, where available, continues while the machine sleeps: a lease of a suspended holder expires.
_monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


class SystemClock:
    monotonic = staticmethod(_monotonic)

    @staticmethod
    def time_ms() -> int:
        return time.time_ns() // 1_000_000


class Timer:
    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Callable[[], None]) -> None:
        self.at_s = at_s
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Timers:
    """Actions by due time. May be called from any thread.

    `on_earlier` is called when a new timer is due before all other timers, so that a sleeping owner wakes up.
    """

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


_log = get_logger("inturn.timers")


class TimerThread:
    def __init__(self, clock: Clock) -> None:
        self.timers = Timers(self._wake)
        self._clock = clock
        self._earlier = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="inturn-timers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._earlier.set()
        self._thread.join()

    def _wake(self) -> None:
        self._earlier.set()

    def _run(self) -> None:
        while True:
            # Cleared before the check: a set from here on ends the wait below.
            self._earlier.clear()
            if self._is_closed:
                return
            try:
                self.timers.run_due(self._clock.monotonic())
            except Exception:
                _log.exception("timers.action_failed")
            due_s = self.timers.next_due_s()
            wait_s = None if due_s is None else due_s - self._clock.monotonic()
            if wait_s is None or wait_s > 0:
                self._earlier.wait(wait_s)
