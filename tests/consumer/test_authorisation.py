"""M9: a member stops by itself when the authorisation ends. Life 10 s, margin 1 s, renewal every 2 s."""

from __future__ import annotations

import pytest

from inturn.consumer.partition_lease import Stage
from inturn.protocol.commands import Acquire, Assignment, Command, Heartbeat, Pull, Release
from tests.consumer.fake_node import LEASE, SUBJECT, Bench

UNHEARD = Heartbeat  # the kind of command that gets no answer


@pytest.fixture
def bench() -> Bench:
    made = Bench(heartbeat_s=2.0)
    made.store(0, 5)
    made.settle()
    assert made.core.partitions[0].lease.stage is Stage.ACTIVE
    return made


def live_unheard(bench: Bench, seconds: float, step_s: float = 0.5) -> None:
    """The node answers all commands except heartbeats: leases are renewed."""
    until_s = bench.now_s + seconds
    while bench.now_s < until_s:
        bench.now_s = min(until_s, bench.now_s + step_s)
        bench.settle(UNHEARD)


def since(bench: Bench, count: int, kind: type[Command]) -> list[Command]:
    return [one for one in bench.seen[count:] if isinstance(one, kind)]


def test_partitions_are_released_when_the_authorisation_is_over_though_the_leases_live(bench: Bench) -> None:
    bench.handle_all()
    live_unheard(bench, 8.9)
    assert bench.core.partitions[0].lease.stage is Stage.ACTIVE
    live_unheard(bench, 0.1)
    assert bench.sent(Release), "given back, not just dropped: others wait for it"
    assert bench.core.partitions == {}
    assert bench.committed() == 5


def test_they_are_asked_for_again_only_after_another_heartbeat_was_answered(bench: Bench) -> None:
    live_unheard(bench, 9.0)
    before = len(bench.seen)
    live_unheard(bench, 20.0)
    assert not since(bench, before, Acquire)
    assert not since(bench, before, Pull)
    assert since(bench, before, Heartbeat)
    bench.settle()
    assert bench.core.partitions[0].lease.stage is Stage.ACTIVE
    assert bench.core.partitions[0].lease.epoch == 2
    assert bench.handle_all() == [0, 1, 2, 3, 4]


def test_no_handler_is_started_after_it_though_nobody_polled(bench: Bench) -> None:
    live_unheard(bench, 8.5)
    job = bench.job()
    job.run.until_s = float("inf")
    assert job.next() is not None
    bench.wait(0.4)
    assert job.next() is not None
    bench.wait(0.1)
    assert job.next() is None
    assert bench.state.lease.ends_s > bench.now_s
    job.end()
    assert bench.state.lease.stage is Stage.DRAINING
    assert bench.core.wants_poll
    bench.settle(UNHEARD)
    assert bench.committed() == 2
    assert bench.core.partitions == {}


def test_a_handler_that_runs_on_keeps_the_lease_until_it_ends(bench: Bench) -> None:
    job = bench.job()
    assert job.next() is not None
    live_unheard(bench, 30.0)
    assert bench.state.lease.stage is Stage.DRAINING
    assert not bench.sent(Release)
    assert job.next() is None
    job.end()
    bench.settle(UNHEARD)
    assert bench.committed() == 1
    assert bench.core.partitions == {}


def test_it_is_counted_from_before_the_heartbeat_was_sent() -> None:
    bench = Bench()
    bench.store(0, 1)
    bench.poll()
    beat = bench.take_command(Heartbeat)
    bench.wait(4.0)
    bench.answer(beat, Assignment(1, (0,), SUBJECT, LEASE.life_s))
    bench.settle(UNHEARD)
    assert bench.state.lease.stage is Stage.ACTIVE
    assert bench.state.lease.deadline_s == 1000.0 + LEASE.life_s - LEASE.margin_s


def test_heartbeats_that_are_held_back_and_answered_stop_nothing(bench: Bench) -> None:
    bench.live(100.0)
    assert not bench.sent(Release)
    assert len(bench.sent(Acquire)) == 1
    assert 40 <= len(bench.sent(Heartbeat)) <= 60, "every two seconds"


@pytest.mark.parametrize("heartbeat_s", [0.5, 3.0, 60.0])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_heartbeat_that_is_lost_is_repeated_in_time(heartbeat_s: float, lost: int) -> None:
    bench = Bench(heartbeat_s=heartbeat_s)
    bench.store(0, 5)
    bench.live(10.0)
    bench.take_command(Heartbeat)
    for _ in range(lost - 1):
        while not bench.has(Heartbeat):
            bench.wait(0.05)
            bench.settle(UNHEARD)
        bench.take_command(Heartbeat)
    bench.live(20.0, step_s=0.1)
    assert not bench.sent(Release)
    assert len(bench.sent(Acquire)) == 1


def test_the_end_of_the_authorisation_is_a_moment_to_poll(bench: Bench) -> None:
    bench.settle(UNHEARD)
    moments = []
    while bench.core.partitions:
        bench.now_s = bench.core.next_due_s(bench.now_s)
        moments.append(bench.now_s)
        bench.settle(UNHEARD)
    assert moments[-1] == 1009.0


def test_an_authorisation_that_is_over_when_it_comes_does_not_make_it_ask_without_end() -> None:
    """For example, two clocks or two settings that do not match."""
    bench = Bench()
    for _ in range(10):
        bench.poll()
        if bench.has(Heartbeat):
            bench.answer(bench.take_command(Heartbeat), Assignment(1, (0,), SUBJECT, 0.0))
    assert len(bench.sent(Heartbeat)) == 1
    assert bench.core.partitions == {}
    bench.wait(0.2)
    bench.settle()
    assert bench.state.lease.stage is Stage.ACTIVE


def test_a_lease_that_is_over_at_the_same_time_is_lost_not_released(bench: Bench) -> None:
    bench.wait(9.0)
    bench.poll()
    assert not bench.sent(Release)
    assert bench.core.partitions == {} or bench.state.lease.stage is Stage.LOST
