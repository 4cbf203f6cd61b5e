"""A thread that runs timers when they are due."""

from __future__ import annotations

import threading

from inturn.model.clock import Clock
from inturn.model.logs import get_logger
from inturn.model.timers import Timers

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
            # Cleared before looking: what is set from here on ends the wait below.
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
