"""A consumer that has nothing to do says so: `next_due_s` lies ahead while a handler runs."""

from __future__ import annotations

import pytest

from inturn.model.commands import Commit, Release
from inturn.model.errors import DiskFull, StorageError
from tests.consumer.fake_node import Bench


@pytest.fixture
def bench() -> Bench:
    """With the usual settings, and partition 0 held, with five messages waiting."""
    made = Bench()
    made.store(0, 5)
    made.settle()
    return made


def test_a_run_that_has_handled_nothing_yet_is_no_reason_to_poll_again(bench: Bench) -> None:
    run = bench.take()
    assert run.next(bench.now_s) is not None
    assert bench.poll() == []
    assert bench.core.next_due_s(bench.now_s) > bench.now_s


def test_a_handler_that_blocks_for_long_is_looked_after_at_leisure(bench: Bench) -> None:
    """Poll whenever the core asks for it, for ten seconds of its time: not more often than commits are looked for."""
    run = bench.take()
    assert run.next(bench.now_s) is not None
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
    run = bench.take()
    for _ in range(3):
        assert run.next(bench.now_s) is not None
    bench.now_s = max(bench.core.next_due_s(bench.now_s), bench.now_s + 0.1)
    bench.settle()
    assert bench.committed[0] == 2
    assert bench.core.next_due_s(bench.now_s) > bench.now_s


def test_a_commit_that_nobody_answers_is_no_reason_to_poll_again(bench: Bench) -> None:
    run = bench.take()
    for _ in range(3):
        assert run.next(bench.now_s) is not None
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
