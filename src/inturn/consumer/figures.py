"""What a consumer tells of itself, to whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

from inturn.model.errors import InturnError


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """A look at a consumer. Rates are over the last ten seconds."""

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
    failing_count: int = 0  # messages that failed and will be repeated, or wait for somebody to decide
    parked: tuple[str, ...] = ()  # keys
    blocking: tuple[Blocking, ...] = ()
    handling_s: float = 0.0  # in handlers, all together
    refused_count: int = 0  # shared groups: messages acknowledged after their receipt was over; they came again
    unwanted_count: int = 0  # messages that were passed by for their tags


@dataclass(frozen=True, slots=True)
class Blocking:
    """A partition is paused since a limit of FlowControl is reached, and this message is what it waits for."""

    partition: int
    offset: int
    key: str | None
    limit: str = "span"  # or "buffered_bytes"


@dataclass(frozen=True, slots=True)
class HeldLease:
    epoch: int
    committed: int  # as far as this consumer knows
    missing: int = 0  # offsets that were gone before they could be read
    error: InturnError | None = None  # why it cannot be read just now


@dataclass(frozen=True, slots=True)
class KeptLease:
    """A lease of a consumer that only keeps it, and how far the partition was when it was granted."""

    epoch: int
    offset: int
    finished: bytes  # above `offset`: a roaring bitmap, or nothing
    failed: tuple[int, ...]  # offsets that wait to be repeated
    parked: tuple[bytes, ...]  # keys
    is_wanted_back: bool = False  # it is about to be given to somebody else
