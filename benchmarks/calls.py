"""Start and end times of the calls of a handler: the same notes for a consumer and for its peer."""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

from inturn.model.errors import InturnError

_What = TypeVar("_What")


class Calls(Generic[_What]):
    """Appending to a list is atomic: calls wait for no lock."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.began: list[_What] = []  # in the order of their starts
        self._began_at_s: list[float] = []
        self._ended_at_s: list[float] = []
        self._are_over = threading.Event()

    def begin(self, what: _What) -> None:
        self.began.append(what)
        self._began_at_s.append(time.perf_counter())

    def end(self) -> None:
        self._ended_at_s.append(time.perf_counter())
        if len(self._ended_at_s) == self.count:
            self._are_over.set()

    def wait(self, timeout_s: float) -> None:
        if not self._are_over.wait(timeout_s):
            done = len(self._ended_at_s)
            raise InturnError(f"only {done} of {self.count} calls were over after {timeout_s:.0f} s: no progress")

    @property
    def took_s(self) -> float:
        """From the first begin to the last end."""
        return max(self._ended_at_s) - min(self._began_at_s)
