"""The statistics of a consumer: counts and rates, and the snapshot that `Consumer.statistics` returns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inturn.consumer.run import Run
from inturn.model.errors import InturnError


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """A snapshot of a consumer. Rates are over the last ten seconds."""

    partitions: tuple[int, ...]
    lag: int
    ok_count: int
    failed_count: int
    slow_count: int
    ok_per_s: float
    failed_per_s: float
    handling_ms_mean: float
    waiting_count: int
    paused: tuple[int, ...]
    missing: int  # offsets that retention or a lost tail had removed before they could be read
    errors: tuple[str, ...]
    concurrency: int = 0
    failing_count: int = 0  # messages that failed and will be repeated, or wait for an operator
    parked: tuple[str, ...] = ()  # keys
    blocking: tuple[Blocking, ...] = ()
    handling_s: float = 0.0  # the total time in handlers
    refused_count: int = 0  # shared groups: messages acknowledged after the receipt expired; they are delivered again
    unwanted_count: int = 0  # messages that the tags filtered out


@dataclass(frozen=True, slots=True)
class Blocking:
    """A partition is paused because a limit of FlowControl is reached, and the partition waits for this message."""

    partition: int
    offset: int
    key: str | None
    limit: str = "span"  # or "buffered_bytes"


@dataclass(frozen=True, slots=True)
class HeldLease:
    epoch: int
    committed: int  # as far as this consumer knows
    missing: int = 0  # offsets that were gone before they could be read
    error: InturnError | None = None  # why the partition cannot be read at the moment


@dataclass(frozen=True, slots=True)
class KeptLease:
    """A lease of a consumer that only holds leases, and the progress of the partition at the time of the grant."""

    epoch: int
    offset: int
    finished: bytes  # above `offset`: a roaring bitmap, or nothing
    failed: tuple[int, ...]  # offsets that wait to be repeated
    parked: tuple[bytes, ...]  # keys
    is_wanted_back: bool = False  # the lease is about to go to another member


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
