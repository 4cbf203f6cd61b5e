"""The limit of requests on their way at once, for pipelined measurements."""

from __future__ import annotations

import threading

from inturn.model.errors import InturnError

BURST = 1000  # room is given and taken in so many: a lock per request would be measured, too
BURSTS = 8
STALL_S = 60.0


class Window:
    """The sending thread calls `take` and `drain`, the reading thread calls `came_back`."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(BURSTS)
        self._back = 0

    def take(self) -> None:
        """Wait for room for the next burst."""
        if not self._room.acquire(timeout=STALL_S):
            raise InturnError(f"no answer for {STALL_S:.0f} s: no progress")

    def drain(self) -> None:
        """Wait until all are answered."""
        for _ in range(BURSTS):
            self.take()

    def came_back(self, count: int) -> None:
        self._back += count
        while self._back >= BURST:
            self._back -= BURST
            self._room.release()
