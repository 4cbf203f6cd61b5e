"""Released partitions are freed.

Lanes are hidden from the garbage collector: a reference cycle through a lane would leak.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from inturn.consumer.partition_state import PartitionState
from inturn.model.settings import KeyAction
from inturn.protocol.commands import Commit
from tests.consumer.fake_node import Bench, failing
from tests.consumer.test_dispatcher import SUSPENDED, keyed

TIMES = 10


def partitions_in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, PartitionState) for one in gc.get_objects())


def is_waiting(bench: Bench) -> None:
    """Messages wait. No other state."""


def is_running(bench: Bench) -> None:
    bench.job().next()


def is_suspended(bench: Bench) -> None:
    bench.work(failing(SUSPENDED, 0))
    bench.settle()


def is_suspended_and_not_stored(bench: Bench) -> None:
    bench.work(failing(SUSPENDED, 0))
    bench.poll()


def is_parked(bench: Bench) -> None:
    bench.request(KeyAction.PARK, b"a")
    bench.settle()


def is_resumed(bench: Bench) -> None:
    is_parked(bench)
    bench.request(KeyAction.RESUME, b"a")
    bench.settle()


def is_released(bench: Bench) -> None:
    """Released before the last commit was answered."""
    bench.core.stop(bench.now_s)
    bench.settle(Commit)
    end_runs(bench)
    bench.settle(Commit)
    assert bench.core.is_stopped


def is_lost(bench: Bench) -> None:
    bench.wait(9.5)
    bench.poll()
    end_runs(bench)
    bench.poll()


def is_killed(bench: Bench) -> None:
    bench.core.kill()
    end_runs(bench)


def end_runs(bench: Bench) -> None:
    for job in bench._jobs:
        if job.run in bench.core.scheduler.runs:
            job.end()


STATES = [is_waiting, is_running, is_suspended, is_suspended_and_not_stored, is_parked, is_resumed]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", [is_released, is_lost, is_killed])
def test_a_partition_that_is_over_leaves_nothing_in_memory(
    state: Callable[[Bench], None], way: Callable[[Bench], None]
) -> None:
    before = partitions_in_memory()
    for _ in range(TIMES):
        bench = keyed("aab")
        state(bench)
        way(bench)
        del bench
    assert partitions_in_memory() <= before
