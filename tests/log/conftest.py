"""A log on a simulated disk. The test controls time and background jobs."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable

import pytest

from inturn.log.partition_log import PartitionLog
from inturn.model.batch import Batch, StoredBatch, encode, is_intact
from inturn.model.errors import InturnError
from inturn.model.message import Outgoing
from inturn.model.routing import Partition
from inturn.model.settings import LogSettings
from inturn.model.time import Timers
from inturn.protocol.commands import Appended
from simulator.disk import SimDisk

FOLDER = "data/p1"


class HandClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return int(self.now_s * 1000)


class Bench:
    """A machine: disk, clock, and the jobs that wait to run."""

    def __init__(self, seed: int = 0) -> None:
        self.disk = SimDisk(random.Random(seed))
        self.clock = HandClock()
        self.timers = Timers()
        self.jobs: deque[Callable[[], None]] = deque()
        self.folder = FOLDER

    def open(self, floor: int = 0, name: str = "p1", **settings: object) -> PartitionLog:
        settings.setdefault("reserve_bytes", 0)
        chosen = LogSettings(**settings)  # type: ignore[arg-type]
        return PartitionLog(
            self.disk,
            f"data/{name}",
            Partition("b", name),
            chosen,
            self.clock,
            self.jobs.append,
            self.timers,
            floor,
        )

    def run_jobs(self) -> None:
        while self.jobs:
            self.jobs.popleft()()

    def crash(self) -> None:
        self.jobs.clear()
        self.timers = Timers()
        self.disk.crash()

    def kill(self) -> None:
        self.jobs.clear()
        self.timers = Timers()
        self.disk.kill()

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.timers.run_due(self.clock.now_s)
        self.run_jobs()

    def append(self, log: PartitionLog, batch: Batch, gap: bool = False) -> int:
        """Append, and run jobs until the answer comes."""
        answers: list[Appended | InturnError] = []
        log.append(batch, answers.append, gap)
        self.run_jobs()
        (answer,) = answers
        if isinstance(answer, InturnError):
            raise answer
        return answer.base_offset

    def segment_path(self, number: int = -1, name: str = "p1") -> str:
        return [path for path in self.disk.paths() if path.startswith(f"data/{name}/") and path.endswith(".log")][
            number
        ]


def some_batch(
    text: str = "hello", count: int = 1, producer: int = 0, sequence: int = 0, epoch: int = 0, route: int = 1
) -> Batch:
    messages = [Outgoing(f"{text}-{number}".encode()) for number in range(count)]
    return encode(
        messages,
        array("H", [7] * count),
        producer_id=producer,
        producer_epoch=epoch,
        first_sequence=sequence,
        route_version=route,
    )


def read_all(log: PartitionLog, offset: int = 0, max_bytes: int = 1 << 20) -> list[StoredBatch]:
    batches: list[StoredBatch] = []
    while found := log.read(offset, max_bytes):
        assert all(is_intact(batch) for batch in found)
        batches.extend(found)
        offset = found[-1].header.next_offset
    return batches


def contents(log: PartitionLog, offset: int = 0, max_bytes: int = 1 << 20) -> dict[int, bytes]:
    """Base offset → payload."""
    return {batch.header.base_offset: bytes(batch.payload) for batch in read_all(log, offset, max_bytes)}


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def new_bench() -> Callable[[int], Bench]:
    return Bench


@pytest.fixture
def batch() -> Callable[..., Batch]:
    return some_batch


@pytest.fixture
def stored() -> Callable[..., dict[int, bytes]]:
    return contents
