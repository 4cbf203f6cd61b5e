"""Progress and report of a drain, and the monitor in the driver that collects them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inturn.client import Connection
from inturn.model.errors import InturnError
from inturn.model.subject import Subject
from inturn.protocol.commands import ClaimDescription, DescribeGroup, GroupDescription, KeyDescription
from inturn.protocol.request import ask
from inturn.spark.ordered.plan import HotKey, HotKeys
from inturn.spark.ordered.rounds import finished_total, missing_count
from inturn.spark.ordered.task import LimitReached, TaskOutcome

SNAPSHOT_TIMEOUT_S = 1.0  # a snapshot is not worth a longer wait for an unreachable server
RATE_S = 10.0  # rates cover the last so many seconds
TIMELINE_MAX = 2000  # snapshots in the timeline; above the limit every second snapshot is dropped


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """A snapshot of a running drain."""

    phase: str  # "taking over", "working", "handing back", "over"
    seconds: float
    round: int = 0
    done: int = 0  # messages finished since the drain began, by tasks and by consumers
    total: int = 0  # messages that the drain has to finish, as far as known
    lag: int = 0  # of the group
    per_s: float = 0.0
    held: int = 0  # partitions
    partitions: int = 0
    tasks: tuple[ClaimDescription, ...] = ()
    hot_keys: tuple[HotKey, ...] = ()
    committed: tuple[int, ...] = ()
    held_keys: tuple[KeyDescription, ...] = ()  # per partition, the key with the most messages waiting behind it

    @property
    def remaining(self) -> int:
        return max(0, self.total - self.done)

    @property
    def eta_s(self) -> float | None:
        return self.remaining / self.per_s if self.per_s > 0 else None


@dataclass(frozen=True, slots=True)
class DrainReport:
    """The result of a drain. `ended` is the reason for the end:

    - "end": all messages up to the end offsets are finished;
    - "lag": the lag fell to `max_lag`;
    - "held keys": all remaining messages wait behind keys that fail, are blocked or are parked;
    - "limit": there are more messages, but too far beyond such a key (`limits`);
    - "damaged": some remaining messages cannot be read (`damage`);
    - "interrupted": the drain was interrupted."""

    subject: str
    group: str
    order: str
    ended: str
    done: int
    rounds: int
    failed_rounds: int
    failures: int  # handler calls that failed
    lag: int
    take_over_s: float
    work_s: float
    hand_back_s: float
    held_keys: tuple[KeyDescription, ...] = ()
    hot_keys: tuple[HotKey, ...] = ()
    timeline: tuple[DrainProgress, ...] = field(default=(), repr=False)
    outcomes: tuple[TaskOutcome, ...] = field(default=(), repr=False)
    missing: int = 0  # offsets that were removed from the log before a handler was called for them
    retrying: int = 0  # failed messages that the group's consumers retry when their delay is over
    limits: tuple[LimitReached, ...] = ()
    damage: tuple[str, ...] = ()
    is_handed_back: bool = True  # False: handing back was interrupted; partitions are free when their leases expire

    @property
    def per_s(self) -> float:
        return self.done / self.work_s if self.work_s > 0 else 0.0


Watch = Callable[[DrainProgress], None]


@dataclass(slots=True)
class DrainTally:
    """Counts over all rounds of a drain, for its report."""

    rounds: int = 0
    failed_rounds: int = 0
    missing: int = 0
    outcomes: list[TaskOutcome] = field(default_factory=list)
    limits: tuple[LimitReached, ...] = ()
    damage: tuple[str, ...] = ()

    def add(self, outcomes: Sequence[TaskOutcome]) -> None:
        self.outcomes += outcomes
        self.missing += missing_count(outcomes)

    @property
    def failures(self) -> int:
        return sum(one.failed for one in self.outcomes)


class DrainMonitor:
    """Takes snapshots of a drain: calls `watch` with each snapshot and keeps them in a timeline.

    All methods are called by the thread that runs the drain."""

    def __init__(
        self, connection: Connection, subject: Subject, group: str, max_lag: int | None, watch: Watch | None
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._group = group
        self._max_lag = max_lag
        self._watch = watch
        self._hot = HotKeys(connection, subject)
        self._began_s = 0.0
        self._base = 0
        self._total = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._timeline: list[DrainProgress] = []
        self.round = 0
        self.held_count = 0

    def begin(self, began_s: float, described: GroupDescription, ends: Mapping[int, int]) -> None:
        """Count from this state of the group, up to these end offsets by partition."""
        self._began_s = began_s
        self._base = finished_total(described)
        finished = {one.partition: one.committed + one.finished_count for one in described.partitions}
        self._total = sum(max(0, end - finished[partition]) for partition, end in ends.items())

    @property
    def began_s(self) -> float:
        return self._began_s

    @property
    def timeline(self) -> tuple[DrainProgress, ...]:
        return tuple(self._timeline)

    @property
    def hot_keys(self) -> tuple[HotKey, ...]:
        return self._hot.top()

    def snapshot(self, phase: str) -> DrainProgress:
        """Describe the group and report the progress. While the server is unreachable, return the latest snapshot
        instead; raise if there is none."""
        now_s = time.monotonic()
        try:
            command = DescribeGroup(self._subject.name, self._group)
            described = ask(self._connection.node, command, GroupDescription, SNAPSHOT_TIMEOUT_S)
        except InturnError:
            if not self._timeline:
                raise
            return self._timeline[-1]  # rounds and leases report a lost server on their own
        done = finished_total(described) - self._base
        total = self._total if self._max_lag is None else done + max(0, described.lag - self._max_lag)
        per_s = self._rate(now_s, done)
        self._hot.sample({one.partition: one.committed for one in described.partitions})
        progress = DrainProgress(
            phase,
            seconds=now_s - self._began_s,
            round=self.round,
            done=done,
            total=max(total, 0),
            lag=described.lag,
            per_s=max(0.0, per_s),
            held=self.held_count,
            partitions=self._subject.partition_count,
            tasks=described.claims,
            hot_keys=self._hot.top(),
            committed=tuple(one.committed + one.finished_count for one in described.partitions),
            held_keys=tuple(one.blocking for one in described.partitions if one.blocking is not None),
        )
        if len(self._timeline) >= TIMELINE_MAX:
            del self._timeline[1::2]
        self._timeline.append(progress)
        if self._watch is not None:
            self._watch(progress)
        return progress

    def _rate(self, now_s: float, done: int) -> float:
        """Messages per second over the last `RATE_S` seconds."""
        self._recent.append((now_s, done))
        while len(self._recent) > 2 and now_s - self._recent[0][0] > RATE_S:
            self._recent.popleft()
        first_s, first_done = self._recent[0]
        return (done - first_done) / (now_s - first_s) if now_s > first_s else 0.0
