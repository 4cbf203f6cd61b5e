"""What a consumer has done, and how fast."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inturn.consumer.run import Run

WINDOW_S = 10.0


@dataclass(slots=True)
class Statistics:
    """Counts since the start; rates over the last seconds."""

    ok_count: int = 0
    failed_count: int = 0
    slow_count: int = 0  # calls that took longer than `handler_timeout_s`
    handling_s: float = 0.0
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add(self, run: Run, now_s: float) -> None:
        self.ok_count += run.done
        self.failed_count += run.failures
        self.slow_count += run.slow_count
        self.handling_s += now_s - run.started_at_s
        self._recent.append((now_s, run.done, run.failures))
        self._forget(now_s)

    def ok_per_s(self, now_s: float) -> float:
        self._forget(now_s)
        return sum(ok for _, ok, _ in self._recent) / WINDOW_S

    def failed_per_s(self, now_s: float) -> float:
        self._forget(now_s)
        return sum(failed for _, _, failed in self._recent) / WINDOW_S

    @property
    def handling_ms_mean(self) -> float:
        calls = self.ok_count + self.failed_count
        return 1000 * self.handling_s / calls if calls else 0.0

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()
