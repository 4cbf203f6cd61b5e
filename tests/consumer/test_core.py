"""ConsumerCore without threads: the test chooses every command, answer and moment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inturn.consumer.outcome import DONE, Next, Outcome
from inturn.consumer.partition_lease import Stage
from inturn.consumer.scheduler import CHUNK_S
from inturn.model.errors import (
    AccessDenied,
    Closed,
    DiskFull,
    GroupConflict,
    LeaseHeld,
    LogDamaged,
    NotFound,
    StaleEpoch,
    StorageError,
)
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import FlowControl
from inturn.protocol.commands import (
    Acquire,
    Command,
    Commit,
    Committed,
    Done,
    Granted,
    Heartbeat,
    Leave,
    Pull,
    Pulled,
    Release,
    Renew,
    Renewed,
)
from tests.consumer.fake_node import Bench, Job, batch_of, damaged, undecodable

STALE = StaleEpoch("billing", "0", 1, 2)
FOR_EVER = float("inf")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def active(bench: Bench, count: int = 5) -> None:
    """Partition 0 is held, with the given number of waiting messages."""
    bench.store(0, count)
    bench.settle()
    assert bench.core.partitions[0].lease.stage is Stage.ACTIVE


def test_a_partition_is_pulled_only_after_its_lease_is_granted(bench: Bench) -> None:
    """C1."""
    (beat,) = bench.poll()
    assert isinstance(beat, Heartbeat)
    bench.answer(bench.take_command(Heartbeat), bench.good_answer(beat))
    bench.poll()
    assert bench.has(Acquire, 0)
    assert not bench.has(Pull)
    bench.answer(bench.take_command(Acquire), Granted(4, 17, 10.0))
    bench.poll()
    pull = bench.take_command(Pull)
    assert isinstance(pull, Pull)
    assert (pull.epoch, pull.offset) == (4, 17), "C3: from the committed offset"


def test_a_lease_that_is_held_is_asked_for_again_with_a_new_number(bench: Bench) -> None:
    """C1."""
    bench.poll()
    beat = bench.take_command(Heartbeat)
    bench.answer(beat, bench.good_answer(beat))
    bench.poll()
    first = bench.take_command(Acquire)
    bench.answer(first, LeaseHeld("billing", "0", "m2"))
    bench.poll()
    second = bench.take_command(Acquire)
    assert isinstance(first, Acquire)
    assert isinstance(second, Acquire)
    assert second.ask > first.ask
    assert not bench.has(Pull)


def test_grant_pull_run_commit(bench: Bench) -> None:
    active(bench)
    assert bench.handle_all() == [0, 1, 2, 3, 4]
    bench.settle()
    assert bench.committed() == 5


def test_what_is_done_is_committed_while_the_run_goes_on_and_nothing_else_is(bench: Bench) -> None:
    """A slow handler must not hold back the commits of the partition until the end of the run."""
    active(bench)
    job = bench.job()
    for _ in range(3):
        assert job.next() is not None
    bench.live(3.0)
    assert bench.committed() == 2
    assert not job.settle(SUSPENDED)
    job.end()
    bench.live(1.0)
    assert bench.committed() == 2


def test_a_partition_is_taken_by_one_worker_at_a_time(bench: Bench) -> None:
    """C4."""
    active(bench)
    job = bench.job()
    assert job.next() is not None
    bench.store(0, 3)
    bench.settle()
    assert bench.take() is None
    job.end()
    assert bench.handle_all() == [1, 2, 3, 4, 5, 6, 7]


def test_partitions_take_turns() -> None:
    bench = Bench(assigned=(0, 1, 2))
    for index in range(3):
        for _ in range(3):
            bench.store(index, 2000)
    bench.settle()
    bench.chunk = 10
    order = []
    for _ in range(6):
        job = bench.job()
        while job.next() is not None:
            pass
        order.append(job.context.partition)
        job.end()
    assert sorted(order[:3]) == sorted(order[3:]) == [0, 1, 2]


# Answers that are lost, late or doubled


@pytest.mark.parametrize(("kind", "after_s"), [(Heartbeat, 3.0), (Acquire, 4.0), (Pull, 4.0)])
def test_a_command_without_an_answer_is_sent_again(kind: type, after_s: float) -> None:
    """The first heartbeat must not be held back."""
    bench = Bench(answer_timeout_s=3.0, pull_wait_s=1.0, heartbeat_s=1.0)
    for _ in range(5):
        bench.poll()
        if bench.has(kind):
            break
        for command in list(bench.pending):
            bench.pending.remove(command)
            bench.answer(command, bench.good_answer(command))
    lost = bench.take_command(kind)
    bench.wait(after_s - 0.1)
    bench.poll()
    assert not bench.has(kind)
    bench.wait(0.2)
    bench.poll()
    assert bench.has(kind)
    bench.answer(lost, bench.good_answer(lost))  # late: the command is not waiting any more
    assert bench.has(kind)


def test_a_commit_without_an_answer_is_sent_again(bench: Bench) -> None:
    active(bench)
    bench.handle_all()
    bench.poll()
    lost = bench.take_command(Commit)
    bench.wait(4.0)
    bench.poll()
    bench.answer(lost, Committed((0,)))
    assert not bench.has(Commit), "answered in time: nothing to repeat"
    bench.store(0, 1)
    bench.settle()
    bench.handle_all()
    bench.live(12.0)
    assert bench.committed() == 6


def test_a_release_without_an_answer_is_sent_again_and_then_over_is_over(bench: Bench) -> None:
    """C2."""
    bench = Bench(answer_timeout_s=1.0)
    active(bench)
    bench.core.stop(bench.now_s)
    bench.poll()
    first = bench.take_command(Release)
    bench.wait(1.1)
    bench.poll()
    second = bench.take_command(Release)
    bench.answer(first, Done())
    assert 0 in bench.core.partitions, "a late answer changes nothing"
    bench.answer(second, STALE)
    bench.settle()
    assert bench.core.is_stopped


def test_an_old_grant_is_ignored(bench: Bench) -> None:
    bench = Bench(answer_timeout_s=1.0, pull_wait_s=1.0)
    bench.poll()
    beat = bench.take_command(Heartbeat)
    bench.answer(beat, bench.good_answer(beat))
    bench.poll()
    first = bench.take_command(Acquire)
    bench.wait(2.1)
    bench.poll()
    second = bench.take_command(Acquire)
    bench.answer(first, Granted(1, 0, 10.0))
    assert bench.core.partitions[0].lease.stage is Stage.ASKING
    bench.answer(second, Granted(2, 0, 10.0))
    assert bench.core.partitions[0].lease.epoch == 2


def test_a_pull_answered_twice_is_taken_once(bench: Bench) -> None:
    bench.store(0, 3)
    bench.settle()
    pulls = [one for one in bench.seen if isinstance(one, Pull)]
    bench.answer(pulls[0], Pulled((batch_of(0, 3),), 3, 3))
    assert bench.handle_all() == [0, 1, 2]
    assert bench.take() is None


def test_a_pull_of_an_earlier_lease_is_ignored(bench: Bench) -> None:
    bench.settle()
    old = bench.take_command(Pull)
    bench.assign()
    bench.settle()
    bench.assign(0)
    bench.settle()
    assert bench.core.partitions[0].lease.epoch == 2
    bench.answer(old, Pulled((batch_of(0, 3),), 3, 3))
    assert bench.take() is None


# Losing the lease


def lose_by_pull(bench: Bench) -> None:
    bench.answer(bench.take_command(Pull), STALE)


def lose_by_renew(bench: Bench) -> None:
    bench.wait(2.0)
    bench.poll()
    bench.answer(bench.take_command(Renew), Renewed(()))


def lose_by_commit(bench: Bench) -> None:
    bench.state.progress.tracker.add([0])
    bench.wait(1.0)
    bench.poll()
    bench.answer(bench.take_command(Commit), Committed(()))


def lose_by_time(bench: Bench) -> None:
    bench.wait(9.0)  # life 10 - margin 1
    bench.poll()


LOSING = [lose_by_pull, lose_by_renew, lose_by_commit, lose_by_time]


@pytest.mark.parametrize("lose", LOSING)
def test_a_lost_lease_starts_nothing_and_commits_nothing(lose) -> None:
    """B4, C2."""
    bench = Bench()
    active(bench)
    job = bench.job()
    assert job.next() is not None
    lose(bench)
    assert bench.core.partitions[0].lease.stage is Stage.LOST
    before = len(bench.seen)
    bench.poll()
    assert not any(isinstance(one, Acquire | Pull) for one in bench.seen[before:]), "its handler still runs"
    job.run.until_s = FOR_EVER
    assert job.next() is None, "no handler is started after it"
    job.end()
    bench.live(1.0)
    later = bench.seen[before:]
    assert not any(isinstance(one, Commit) for one in later)
    assert not any(isinstance(one, Release) for one in later)


@pytest.mark.parametrize("lose", LOSING)
def test_a_lost_lease_is_asked_for_again_only_when_its_handler_has_ended(lose) -> None:
    """C2: a consumer never runs two handlers of a partition at once."""
    bench = Bench()
    active(bench)
    job = bench.job()
    assert job.next() is not None
    lose(bench)
    bench.pending = [one for one in bench.pending if isinstance(one, Heartbeat)]
    for _ in range(5):
        bench.poll()
        assert not bench.has(Acquire)
    job.end()
    bench.settle()
    assert bench.core.partitions[0].lease.stage is Stage.ACTIVE
    assert bench.core.partitions[0].lease.epoch == 2
    assert bench.handle_all() == [0, 1, 2, 3, 4], "from the committed offset, all over again"


def test_the_deadline_is_looked_at_before_every_message(bench: Bench) -> None:
    """The contract: no handler starts after the deadline, even without a poll."""
    active(bench)
    job = bench.job()
    job.run.until_s = FOR_EVER
    assert job.next() is not None
    bench.wait(8.9)
    assert job.next() is not None
    bench.wait(0.1)
    assert job.next() is None


def test_the_deadline_counts_from_before_the_lease_was_asked_for(bench: Bench) -> None:
    bench.poll()
    beat = bench.take_command(Heartbeat)
    bench.answer(beat, bench.good_answer(beat))
    bench.poll()
    asked_at_s = bench.now_s
    bench.wait(3.0)
    bench.answer(bench.take_command(Acquire), Granted(1, 0, 10.0))
    assert bench.core.partitions[0].lease.deadline_s == pytest.approx(asked_at_s + 10.0 - 1.0)


def test_renewals_keep_the_lease_for_as_long_as_they_are_answered(bench: Bench) -> None:
    """B3."""
    active(bench)
    job = bench.job()
    job.run.until_s = FOR_EVER
    assert job.next() is not None
    bench.live(60.0)
    assert job.next() is not None
    assert bench.core.partitions[0].lease.stage is Stage.ACTIVE
    assert bench.core.partitions[0].lease.epoch == 1


def test_a_lease_lost_while_idle_is_taken_again_at_once(bench: Bench) -> None:
    """No handler runs, so there is no wait: the next poll asks again."""
    bench.settle()
    lose_by_pull(bench)
    bench.settle()
    assert bench.core.partitions[0].lease.stage is Stage.ACTIVE
    assert bench.core.partitions[0].lease.epoch == 2


# Release


def test_draining_waits_for_the_running_handler_then_commits_and_releases(bench: Bench) -> None:
    """C2, C17."""
    active(bench)
    job = bench.job()
    job.run.until_s = FOR_EVER
    assert [job.next() is not None for _ in range(2)] == [True, True]
    bench.assign()
    bench.settle()
    assert bench.core.partitions[0].lease.stage is Stage.DRAINING
    assert not any(isinstance(one, Release) for one in bench.seen)
    bench.live(30.0)
    assert bench.core.partitions[0].lease.stage is Stage.DRAINING, "a handler still running keeps the lease"
    assert job.next() is None
    job.end()
    bench.settle()
    (release,) = [one for one in bench.seen if isinstance(one, Release)]
    assert (release.progress.epoch, release.progress.offset) == (1, 2)
    assert 0 not in bench.core.partitions


def test_a_drained_partition_is_not_pulled(bench: Bench) -> None:
    active(bench)
    assert bench.job().next() is not None
    bench.assign()
    bench.settle()
    before = len(bench.seen)
    bench.live(10.0)
    assert not any(isinstance(one, Pull) for one in bench.seen[before:])


def test_a_partition_that_comes_back_while_it_is_given_back_is_asked_for_anew(bench: Bench) -> None:
    active(bench)
    job = bench.job()
    assert job.next() is not None
    bench.assign()
    bench.settle()
    bench.assign(0)
    bench.settle()
    assert not any(one.ask > 1 for one in bench.seen if isinstance(one, Acquire))
    job.run.until_s = FOR_EVER
    assert job.next() is None
    job.end()
    bench.settle()
    assert bench.core.partitions[0].lease.epoch == 2
    assert bench.handle_all() == [1, 2, 3, 4]


def test_stopping_with_nothing_held_leaves_at_once(bench: Bench) -> None:
    bench.poll()
    bench.core.stop(bench.now_s)
    bench.settle()
    assert bench.core.is_stopped


def test_stopping_while_waiting_for_a_lease_leaves_at_once(bench: Bench) -> None:
    """C17: no handler runs and no lease is held, so there is no wait."""
    bench.poll()
    beat = bench.take_command(Heartbeat)
    bench.answer(beat, bench.good_answer(beat))
    bench.poll()
    assert bench.has(Acquire)
    bench.core.stop(bench.now_s)
    bench.poll()
    assert bench.has(Leave), f"not before {bench.core.next_due_s(bench.now_s) - bench.now_s:g} s from now"


def test_stopping_after_a_lost_lease_leaves_at_once(bench: Bench) -> None:
    active(bench)
    job = bench.job()
    assert job.next() is not None
    lose_by_pull(bench)
    bench.core.stop(bench.now_s)
    bench.poll()
    assert not bench.has(Leave), "its handler still runs"
    job.end()
    bench.poll()
    assert bench.has(Leave), f"not before {bench.core.next_due_s(bench.now_s) - bench.now_s:g} s from now"


def test_stopping_gives_a_partition_in_trouble_back_at_once(bench: Bench) -> None:
    """C17: the pause after a failed pull is for pulls only."""
    bench.settle()
    bench.answer(bench.take_command(Pull), LogDamaged("local/p0", 0, "a checksum does not fit"))
    bench.core.stop(bench.now_s)
    bench.poll()
    assert bench.has(Release), f"not before {bench.core.next_due_s(bench.now_s) - bench.now_s:g} s from now"


def test_leaving_a_node_that_is_gone_is_leaving(bench: Bench) -> None:
    bench.core.stop(bench.now_s)
    bench.poll()
    bench.answer(bench.take_command(Leave), Closed("node"))
    assert bench.core.is_stopped


@pytest.mark.parametrize("error", [NotFound("subject", "orders", "x"), GroupConflict("billing", "x"), Closed("node")])
def test_what_cannot_pass_stops_the_consumer_and_is_kept(bench: Bench, error: Exception) -> None:
    bench.poll()
    bench.answer(bench.take_command(Heartbeat), error)
    assert bench.core.error is error


@pytest.mark.parametrize("good_count", [0, 1, 2])
def test_whatever_is_not_allowed_stops_the_consumer(bench: Bench, good_count: int) -> None:
    """Not only a heartbeat: a broadcast consumer may be allowed to join, but not to read."""
    denied = AccessDenied("shop", "consume on subject 'orders'", "ask for a rule")
    kinds: list[type[Command]] = [Heartbeat, Acquire, Pull]
    for kind in kinds[:good_count]:
        bench.poll()
        command = bench.take_command(kind)
        bench.answer(command, bench.good_answer(command))
    bench.poll()
    bench.answer(bench.take_command(kinds[good_count]), denied)
    assert bench.core.error is denied


def test_an_error_of_the_state_is_waited_out(bench: Bench) -> None:
    bench.poll()
    bench.answer(bench.take_command(Heartbeat), StorageError("state", "busy"))
    assert bench.core.error is None
    assert bench.poll() == []
    bench.wait(1.0)
    bench.poll()
    assert bench.has(Heartbeat)


# A failing partition


def test_a_partition_in_trouble_does_not_stop_another() -> None:
    """C10."""
    bench = Bench(assigned=(0, 1))
    bench.store(1, 3)
    bench.settle()
    bench.answer(bench.take_command(Pull, 0), LogDamaged("local/p0", 0, "x"))
    assert bench.handle_all() == [0, 1, 2]
    bench.live(20.0)
    assert bench.committed(1) == 3
    assert bench.core.partitions[0].lease.stage is Stage.ACTIVE, "its lease is renewed"


def test_a_damaged_batch_is_not_skipped(bench: Bench) -> None:
    good, bad, behind = batch_of(0, 2), batch_of(2, 2), batch_of(4, 2)
    bench.logs[0] = [good, damaged(bad), behind]
    bench.settle()
    assert bench.handle_all() == [0, 1]
    for _ in range(10):
        bench.live(3.0)
        assert bench.handle_all() == []
    assert bench.committed() == 2
    assert isinstance(bench.core.partitions[0].lease.error, LogDamaged)
    assert bench.core.partitions[0].lease.error.offset == 2
    bench.logs[0][1] = bad  # the batch was damaged only in transit
    bench.live(10.0)
    assert bench.handle_all() == [2, 3, 4, 5]


def test_damage_in_a_batch_that_is_half_done_repeats_nothing() -> None:
    """The contract: a committed message is not started again."""
    bench = Bench()
    bench.node.partitions[0].offset = 3
    whole = batch_of(0, 6)
    bench.logs[0] = [damaged(whole)]
    bench.settle()
    assert bench.handle_all() == []
    bench.logs[0] = [whole]
    bench.live(10.0)
    assert bench.handle_all() == [3, 4, 5]


def test_a_batch_that_cannot_be_decoded_is_not_skipped() -> None:
    """The contract: no message is skipped. Examples: zstd without the extra, or a newer format."""
    bench = Bench()
    bench.logs[0] = [batch_of(0, 2), undecodable(2, 2), batch_of(4, 2)]
    bench.settle()
    handled: list[int] = []
    for number in range(6):
        if number == 2:
            bench.logs[0].append(batch_of(6, 2))
        handled += bench.handle_all()
        bench.live(6.0)
    assert handled == [0, 1]
    assert bench.committed() == 2
    assert bench.core.partitions[0].lease.error is not None


def test_a_gap_at_the_end_of_the_log_is_passed_when_everything_before_it_is_done(bench: Bench) -> None:
    """A tail was lost: the gap holds no message, so no message is skipped."""
    bench.store(0, 3)
    bench.settle()
    pull = bench.take_command(Pull)
    bench.answer(pull, Pulled((), 10, 10))
    bench.live(1.0)
    assert bench.committed() == 0, "three messages wait"
    assert bench.handle_all() == [0, 1, 2]
    bench.live(1.0)
    assert bench.committed() in (3, 10)
    bench.logs[0].append(batch_of(10, 2))
    bench.live(10.0)
    assert bench.handle_all() == [10, 11]
    bench.live(1.0)
    assert bench.committed() == 12


def test_offsets_that_retention_took_away_are_counted(bench: Bench) -> None:
    bench.logs[0] = [batch_of(10, 2)]
    bench.settle()
    assert bench.core.partitions[0].buffer.missing == 10
    assert bench.handle_all() == [10, 11]


def test_a_full_disk_at_the_node_is_tried_again_soon(bench: Bench) -> None:
    bench.settle()
    bench.answer(bench.take_command(Pull), DiskFull("p0"))
    assert not any(isinstance(one, Pull) for one in bench.poll())
    bench.wait(0.5)
    assert any(isinstance(one, Pull) for one in bench.poll())


# Repeating


def finish_with(bench: Bench, done: int, outcome: Outcome) -> list[tuple[int, int]]:
    """Handle the given number of messages with success, then a message with the outcome.

    Return (offset, attempt) of each call.
    """
    job = bench.job()
    calls = []
    for _ in range(done):
        message = job.next()
        assert message is not None
        calls.append((message.offset, job.context.attempt))
        job.settle(DONE)
    message = job.next()
    assert message is not None
    calls.append((message.offset, job.context.attempt))
    assert not job.settle(outcome)
    job.end()
    return calls


SUSPENDED = Outcome(Next.REPEAT, ResultKind.FAILED, 2.0)


def test_a_suspended_message_is_repeated_after_its_time_and_holds_back_what_follows(bench: Bench) -> None:
    """C9, C10."""
    active(bench)
    assert finish_with(bench, 1, SUSPENDED) == [(0, 1), (1, 1)]
    bench.live(1.9)
    assert bench.take() is None
    assert bench.committed() == 1
    bench.live(0.1)
    assert finish_with(bench, 0, SUSPENDED) == [(1, 2)]
    bench.live(2.0)
    assert finish_with(bench, 2, SUSPENDED) == [(1, 3), (2, 1), (3, 1)]


def test_a_suspended_partition_does_not_hold_back_another() -> None:
    """C10."""
    bench = Bench(assigned=(0, 1))
    bench.store(0, 2)
    bench.settle()
    finish_with(bench, 0, SUSPENDED)
    bench.store(1, 2)
    bench.settle()
    assert bench.job().next() is not None
    assert bench.state.buffer.lanes_in_runs == 0
    assert bench.core.partitions[1].buffer.lanes_in_runs == 1


def test_a_run_ends_after_its_time_and_goes_on_later(bench: Bench) -> None:
    """C4: a run lasts about CHUNK_S at most, so that other lanes get a turn."""
    active(bench)
    job = bench.job()
    assert job.next() is not None
    bench.wait(1.9 * CHUNK_S)
    assert job.next() is not None
    bench.wait(0.2 * CHUNK_S)
    assert job.next() is None
    job.end()
    assert bench.handle_all() == [2, 3, 4]


def test_every_message_of_a_rollback_counts_another_attempt() -> None:
    """C9: an attempt is a call of a handler for a message. A repeated message gets a new attempt."""
    bench = Bench(ack="manual")
    active(bench, 3)
    seen: list[list[int]] = []
    for _ in range(3):
        job = bench.job()
        attempts = []
        for outcome in (
            Outcome(Next.KEEP, ResultKind.SUCCESS),
            Outcome(Next.KEEP, ResultKind.SUCCESS),
            Outcome(Next.ROLLBACK, ResultKind.FAILED, 1.0),
        ):
            assert job.next() is not None
            attempts.append(job.context.attempt)
            job.settle(outcome)
        job.end()
        seen.append(attempts)
        bench.live(1.0)
    assert seen == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]


# Flow control and idleness


@pytest.mark.parametrize(
    "flow", [FlowControl(buffered_count=4), FlowControl(buffered_bytes=1), FlowControl(span=4)], ids=repr
)
def test_pulling_pauses_while_too_much_waits_and_resumes(flow: FlowControl) -> None:
    """C13, B3."""
    bench = Bench(flow=flow)
    active(bench, 5)
    state = bench.state
    assert state.buffer.is_paused
    bench.pending.clear()
    before = len(bench.seen)
    bench.live(200.0)
    assert not any(isinstance(one, Pull) for one in bench.seen[before:])
    assert any(isinstance(one, Renew) for one in bench.seen[before:])
    assert state.lease.stage is Stage.ACTIVE, "a withheld pull counts as a pull, and the lease is renewed"
    assert state.lease.epoch == 1
    bench.handle_all()
    bench.settle()
    assert bench.has(Pull)


def test_a_partition_that_could_not_be_pulled_is_dropped_and_taken_again() -> None:
    """C3."""
    bench = Bench(idle_s_max=20.0)
    bench.settle()
    for _ in range(60):
        while bench.has(Pull):
            bench.answer(bench.take_command(Pull), LogDamaged("local/p0", 0, "x"))
        bench.live(0.5)
        if bench.node.partitions[0].epoch > 1:
            break
    assert any(isinstance(one, Release) for one in bench.seen)
    assert bench.core.partitions[0].lease.epoch == 2


# No busy loop

actions = st.lists(
    st.sampled_from(
        ["poll", "answer", "lose", "stale", "error", "wait", "take", "finish", "suspend", "store", "assign", "stop"]
    ),
    max_size=60,
)


def act(bench: Bench, action: str, jobs: list[Job], choose: st.DataObject) -> None:
    match action:
        case "poll":
            bench.poll()
        case "answer" | "lose" | "stale" | "error" if bench.pending:
            command = choose.draw(st.sampled_from(bench.pending))
            bench.pending.remove(command)
            if action == "stale":
                bench.answer(command, STALE)
            elif action == "error":
                bench.answer(command, StorageError("p0", "busy"))
            elif action == "answer" and (answer := bench.good_answer(command)) is not None:
                bench.answer(command, answer)
        case "wait":
            bench.wait(choose.draw(st.sampled_from([0.01, 0.5, 3.0, 11.0])))
        case "take":
            job = bench.take()
            if job is not None:
                for _ in range(choose.draw(st.integers(1, 3))):
                    if job.next() is None:
                        break
                jobs.append(job)
        case "finish" | "suspend" if jobs:
            job = jobs.pop()
            if action == "suspend" and job.run.given:
                job.settle(SUSPENDED)
            job.end()
        case "store":
            bench.store(choose.draw(st.integers(0, 2)), 2)
        case "assign":
            bench.assign(*choose.draw(st.sets(st.integers(0, 2))))
        case "stop":
            bench.core.stop(bench.now_s)


@given(actions=actions, choose=st.data())
@settings(max_examples=150, deadline=None)
def test_a_core_with_nothing_to_say_sleeps(actions: list[str], choose: st.DataObject) -> None:
    """After a poll without commands, the next due time is later than now."""
    bench = Bench(assigned=(0, 1), commit_interval_s=0.1)
    jobs: list[Job] = []
    for action in actions:
        act(bench, action, jobs, choose)
        if not bench.core.poll(bench.now_s) and not bench.core.is_stopped:
            assert bench.core.next_due_s(bench.now_s) > bench.now_s


@given(actions=actions, choose=st.data())
@settings(max_examples=300, deadline=None)
def test_a_poll_says_everything_there_is_to_say(actions: list[str], choose: st.DataObject) -> None:
    """The caller sleeps after a poll without commands.

    A command that only a second poll returns would wait for a heartbeat.
    """
    bench = Bench(assigned=(0, 1), commit_interval_s=0.1)
    jobs: list[Job] = []
    for action in actions:
        act(bench, action, jobs, choose)
        if not bench.poll():
            assert bench.core.poll(bench.now_s) == []


@given(actions=actions, choose=st.data())
@settings(max_examples=150, deadline=None)
def test_committed_offsets_never_pass_what_was_handled(actions: list[str], choose: st.DataObject) -> None:
    """The contract: no message is skipped."""
    bench = Bench(assigned=(0, 1), commit_interval_s=0.1)
    jobs: list[Job] = []
    handled = HandledSoFar()
    bench.watch = handled.given
    for action in actions:
        act(bench, action, jobs, choose)
        for index in range(3):
            assert bench.committed(index) <= handled.ends[index]


class HandledSoFar:
    """How far the handlers got in every partition, without a hole."""

    def __init__(self) -> None:
        self.ends = {0: 0, 1: 0, 2: 0}

    def given(self, message: Message) -> None:
        assert message.offset <= self.ends[message.partition], "skipped"
        self.ends[message.partition] = max(self.ends[message.partition], message.offset + 1)
