"""What is known in the last act: what the server tells of the group, what the traces tell of who did it, the drain."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from demo.board import short
from demo.events import Event, Events
from demo.incident_sale import INCIDENT_PARTITIONS, ONLINE, IncidentScale
from demo.incident_trace import HandledCounts
from inturn.model.time import SystemClock
from inturn.producer.send_batch import Stored
from inturn.protocol.commands import GroupDescription
from inturn.testing.history import SendAcknowledged

if TYPE_CHECKING:
    from inturn.spark.ordered.drain_report import DrainProgress

RATE_S = 2.0  # rates are over the last so many seconds
now_s = SystemClock.monotonic  # the clock that traces are counted on


@dataclass(slots=True)
class IncidentPartition:
    end: int = 0
    done: int = 0
    owner: str | None = None
    epoch: int = 0

    @property
    def lag(self) -> int:
        return max(0, self.end - self.done)


@dataclass(frozen=True, slots=True)
class IncidentLook:
    """A copy of the board at one moment."""

    at_s: float
    phase: str
    address: str
    partitions: tuple[IncidentPartition, ...]
    handled_by: dict[str, int]
    sent_per_s: float
    done_per_s: float
    events: tuple[Event, ...]

    @property
    def sent(self) -> int:
        return sum(one.end for one in self.partitions)

    @property
    def done(self) -> int:
        return sum(one.done for one in self.partitions)

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.partitions)

    @property
    def eta_s(self) -> float | None:
        """How long what waits would take at this rate, if nothing more came."""
        return self.lag / self.done_per_s if self.done_per_s > 0 and self.lag else None


@dataclass(slots=True)
class IncidentBoard:
    """Written by the story, read by the view. Times in it are of the clock of the traces."""

    scale: IncidentScale
    events: Events
    traces: Path
    address: str = ""
    pids: dict[str, int] = field(default_factory=dict)
    phase: str = "starting"
    began_s: float = field(default_factory=now_s)
    sent: list[tuple[float, SendAcknowledged]] = field(default_factory=list)  # and when that was acknowledged
    partitions: list[IncidentPartition] = field(
        default_factory=lambda: [IncidentPartition() for _ in range(INCIDENT_PARTITIONS)]
    )
    _counts: HandledCounts = field(init=False)
    _handled_by: Counter[str] = field(default_factory=Counter)
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)  # when, sent, done
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._counts = HandledCounts(self.traces)

    def look(self) -> IncidentLook:
        with self._lock:
            sent_per_s, done_per_s = self._rates()
            return IncidentLook(
                self.events.now_s,
                self.phase,
                self.address,
                tuple(replace(one) for one in self.partitions),
                {name: self._handled_by[name] for name in (*ONLINE, *sorted(set(self._handled_by) - set(ONLINE)))},
                sent_per_s,
                done_per_s,
                self.events.so_far(),
            )

    def _rates(self) -> tuple[float, float]:
        if len(self._samples) < 2:
            return 0.0, 0.0
        (first_s, first_sent, first_done), (last_s, last_sent, last_done) = self._samples[0], self._samples[-1]
        passed_s = last_s - first_s
        if passed_s < 0.2:
            return 0.0, 0.0
        return (last_sent - first_sent) / passed_s, max(0.0, (last_done - first_done) / passed_s)

    # Told by the story

    def acknowledged(self, stored: Stored, key: str, message_id: str) -> None:
        event = SendAcknowledged(stored.subject, stored.partition, stored.offset, key.encode(), message_id)
        with self._lock:
            self.sent.append((now_s(), event))

    def described(self, group: GroupDescription) -> None:
        """What the server says of the group; and what was recorded by now."""
        handled_by = self._counts.read()
        with self._lock:
            for known, one in zip(self.partitions, group.partitions, strict=True):
                known.end, known.done = one.end_offset, one.committed + one.finished_count
                known.owner, known.epoch = None if one.owner is None else short(one.owner), one.epoch
            self._handled_by = handled_by
            at_s = now_s()
            self._samples.append(
                (at_s, sum(one.end for one in self.partitions), sum(one.done for one in self.partitions))
            )
            while len(self._samples) > 2 and at_s - self._samples[0][0] > RATE_S:
                self._samples.popleft()

    def drained(self, look: DrainProgress) -> None:
        self.enter({"taking over": "hand-over", "working": f"Spark, round {look.round}"}.get(look.phase, "hand-back"))

    def enter(self, phase: str) -> None:
        with self._lock:
            if phase != self.phase:
                self.phase = phase
                self._samples.clear()  # what was before is another story

    def owned(self) -> Counter[str]:
        with self._lock:
            return Counter(one.owner for one in self.partitions if one.owner is not None)

    def sent_events(self) -> Sequence[SendAcknowledged]:
        with self._lock:
            return [event for _, event in self.sent]
