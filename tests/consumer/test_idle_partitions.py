"""An idle consumer does not poll: `next_due_s` lies ahead while a handler runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inturn.consumer.outcome import Next, Outcome
from inturn.consumer.scheduler import OVERDUE_S
from inturn.model.errors import DiskFull, StorageError
from inturn.model.result import ResultKind
from inturn.model.settings import Order
from inturn.protocol.commands import Commit, Release
from tests.consumer.fake_node import Bench, failing


@pytest.fixture
def bench() -> Bench:
    """The default settings. Partition 0 is held, with five waiting messages."""
    made = Bench()
    made.store(0, 5)
    made.settle()
    return made


def test_a_run_that_has_handled_nothing_yet_is_no_reason_to_poll_again(bench: Bench) -> None:
    job = bench.job()
    assert job.next() is not None
    assert bench.poll() == []
    assert bench.core.next_due_s(bench.now_s) > bench.now_s


def test_a_handler_that_blocks_for_long_is_looked_after_at_leisure(bench: Bench) -> None:
    """Poll whenever the core asks, for ten seconds of simulated time: not more often than the commit interval."""
    job = bench.job()
    assert job.next() is not None
    until_s = bench.now_s + 10.0
    polls = 0
    while bench.now_s < until_s:
        bench.settle()
        due_s = bench.core.next_due_s(bench.now_s)
        assert due_s > bench.now_s
        bench.now_s = due_s
        polls += 1
    assert polls < 150


def test_what_a_run_has_done_so_far_is_committed_while_it_goes_on(bench: Bench) -> None:
    job = bench.job()
    for _ in range(3):
        assert job.next() is not None
    bench.now_s = max(bench.core.next_due_s(bench.now_s), bench.now_s + 0.1)
    bench.settle()
    assert bench.committed() == 2
    assert bench.core.next_due_s(bench.now_s) > bench.now_s


def test_a_commit_that_nobody_answers_is_no_reason_to_poll_again(bench: Bench) -> None:
    job = bench.job()
    for _ in range(3):
        assert job.next() is not None
    bench.wait(0.2)
    bench.poll()
    assert bench.has(Commit)
    for _ in range(5):
        bench.wait(0.2)
        assert bench.poll() == []
        assert bench.core.next_due_s(bench.now_s) > bench.now_s


@pytest.mark.parametrize("error", [StorageError("state", "I/O error"), DiskFull("state")])
def test_a_release_that_fails_is_sent_again_after_a_pause(bench: Bench, error: StorageError) -> None:
    bench.core.stop(bench.now_s)
    bench.poll()
    bench.answer(bench.take_command(Release), error)
    assert bench.poll() == []
    due_s = bench.core.next_due_s(bench.now_s)
    assert due_s > bench.now_s
    for _ in range(20):
        bench.now_s = max(bench.core.next_due_s(bench.now_s), bench.now_s + 0.01)
        if any(isinstance(command, Release) for command in bench.poll()):
            break
    assert bench.has(Release)
    bench.settle()
    assert bench.core.is_stopped


def failed_by(bench: Bench) -> None:
    bench.work(failing(Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, ValueError("no")), 0))


def handled_by(bench: Bench) -> None:
    bench.handle_all()


@pytest.mark.parametrize("what", [handled_by, failed_by])
def test_a_commit_that_fails_is_sent_again_after_a_pause(bench: Bench, what: Callable[[Bench], None]) -> None:
    """The pause after an error also applies to an urgent commit, when an attempt waits for the commit."""
    what(bench)
    bench.wait(0.2)
    bench.poll()
    bench.answer(bench.take_command(Commit), DiskFull("state"))
    sent_again = False
    for _ in range(30):
        if any(isinstance(command, Commit) for command in bench.poll()):
            sent_again = True
            break
        due_s = bench.core.next_due_s(bench.now_s)
        assert due_s > bench.now_s, "nothing to say, and no time to sleep"
        bench.now_s = min(due_s, bench.now_s + 0.05)
    assert sent_again


def test_a_partition_whose_lease_has_ended_is_not_taken_again_and_again(bench: Bench) -> None:
    """The thread that polls may be waiting for the node, so no poll happens. Workers must not run a busy loop."""
    bench.wait(9.5)
    for _ in range(3):
        job = bench.take()
        if job is None:
            break
        assert job.next() is None, "the lease is over"
        job.end()
    assert bench.take() is None


def test_keys_behind_a_slow_handler_are_no_reason_to_poll_again_while_all_workers_are_busy() -> None:
    """Some of the keys were taken back, and wait for a worker. An idle worker looks for work without a poll."""
    bench = Bench(order=Order.KEY)
    bench.store_keys("abcdefghij")
    bench.settle()
    assert bench.job().next() is not None
    for _ in range(20):
        bench.wait(OVERDUE_S)
        bench.settle()
        assert bench.core.next_due_s(bench.now_s) > bench.now_s
