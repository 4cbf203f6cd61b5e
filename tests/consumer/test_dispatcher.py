"""Order by key and no order, through ConsumerCore: lanes, failures, flow control, hand-over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inturn.consumer.outcome import DONE, KEEP, Next, Outcome
from inturn.consumer.partition_lease import Stage
from inturn.consumer.scheduler import OVERDUE_S
from inturn.model.batch import StoredBatch, decode, parse_header
from inturn.model.errors import DiskFull, GroupConflict, StaleEpoch
from inturn.model.message import Origin, Outgoing
from inturn.model.offsets import CommitTracker
from inturn.model.result import ResultKind
from inturn.model.settings import FlowControl, KeyAction, Keyless, Order, Strategy
from inturn.model.subject import retry_subject
from inturn.protocol.commands import (
    Acquire,
    Commit,
    Committed,
    Done,
    Failure,
    Granted,
    Leave,
    Lot,
    Move,
    Progress,
    Pull,
    Release,
)
from tests.consumer.fake_node import Bench, Job, failing, stored_batch

RAISED = Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, ValueError("no"))
SUSPENDED = Outcome(Next.REPEAT, ResultKind.FAILED, 2.0)
ROLLBACK = Outcome(Next.ROLLBACK, ResultKind.FAILED, 1.0)
MOVED = Outcome(Next.MOVE, ResultKind.EXCEPTION, 0.0, ValueError("no"))
BUSY = DiskFull("state")


def keyed(keys: str = "", **settings: object) -> Bench:
    """Partition 0 is held under order by key, with a waiting message for every letter."""
    bench = Bench(order=Order.KEY, **settings)  # type: ignore[arg-type]
    if keys:
        bench.store_keys(keys)
    bench.settle()
    assert bench.state.lease.stage is Stage.ACTIVE
    return bench


def more(bench: Bench, keys: str, partition: int = 0) -> None:
    bench.store_keys(keys, partition)
    bench.settle()


def last_progress(bench: Bench) -> Progress:
    commit = bench.sent(Commit)[-1]
    assert isinstance(commit, Commit)
    return commit.progress[0]


def offsets(calls: list[tuple[int, int]]) -> list[int]:
    return [offset for offset, _ in calls]


def work_out(bench: Bench, seconds: float = 40.0) -> list[int]:
    """All handlers succeed from now on, until no message is left. Return the offsets in the order of handling."""
    bench.settle()
    handled = bench.handle_all()
    until_s = bench.now_s + seconds
    while bench.now_s < until_s:
        bench.live(0.5)
        handled += bench.handle_all()
    return handled


def moved_offsets(move: object) -> list[int]:
    assert isinstance(move, Move)
    header = parse_header(move.batch.header(0, 0, 0, 0), 0, 0)
    assert header is not None
    messages = decode(StoredBatch(header, memoryview(move.batch.payload)), Origin("x", 0))
    return [int(message.properties["%offset"]) for message in messages]


# Which lanes run at the same time


def test_keys_are_independent_and_each_is_handled_in_order() -> None:
    bench = keyed("abaab")
    bench.chunk = 1
    first, second = bench.job(), bench.job()
    assert bench.take() is None, "two keys, two workers"
    a, b = first.next(), second.next()
    assert a is not None
    assert b is not None
    assert (a.offset, b.offset) == (0, 1), "the longest first"
    first.end()
    second.end()
    assert [one for one in bench.handle_all() if one in (2, 3)] == [2, 3]
    bench.live(0.5)
    assert bench.committed() == 5


def test_messages_without_a_key_are_independent_of_each_other() -> None:
    bench = keyed("---")
    bench.chunk = 1
    jobs = [bench.job() for _ in range(3)]
    assert sorted(message.offset for job in jobs if (message := job.next()) is not None) == [0, 1, 2]


def test_messages_without_a_key_wait_in_one_lane_if_the_subject_says_so() -> None:
    bench = keyed("---a", keyless=Keyless.ONE_LANE)
    bench.chunk = 1
    job = bench.job()
    assert job.next() is not None
    assert bench.job().next() is not None, "the key is independent of them"
    assert bench.take() is None
    job.end()
    assert bench.handle_all() == [1, 2]


def test_an_empty_key_is_a_key() -> None:
    bench = keyed()
    bench.logs[0].append(stored_batch(0, [Outgoing(b"x", b""), Outgoing(b"x", b"")]))
    bench.settle()
    bench.chunk = 1
    assert bench.job().next() is not None
    assert bench.take() is None


def test_without_order_all_messages_are_independent() -> None:
    bench = Bench(order=Order.NONE, strategy=Strategy.BEST_EFFORT)
    bench.store_keys("aaa-")
    bench.settle()
    bench.chunk = 1
    jobs = [bench.job() for _ in range(4)]
    assert sorted(message.offset for job in jobs if (message := job.next()) is not None) == [0, 1, 2, 3]
    for job in reversed(jobs[1:]):
        job.end()
    bench.live(0.5)
    assert bench.committed() == 0, "the first still runs"
    successor = bench.successor(strategy=Strategy.BEST_EFFORT)
    successor.settle()
    assert successor.handle_all() == [0]


def test_without_order_a_failure_goes_to_the_retry_subject_and_holds_back_nothing() -> None:
    bench = Bench(order=Order.NONE, strategy=Strategy.BEST_EFFORT)
    bench.store_keys("aaa")
    bench.settle()
    assert sorted(offsets(bench.work(failing(MOVED, 1)))) == [0, 1, 2]
    bench.poll()
    assert bench.has(Move)
    bench.live(0.5)
    assert [moved_offsets(move) for move in bench.node.moves] == [[1]]
    assert bench.committed() == 3


def test_a_batch_holds_messages_of_one_key_only() -> None:
    bench = keyed("abababaa", batch=3)
    batches = []
    while (job := bench.take(3)) is not None:
        while (given := job.next_batch()) is not None:
            batches.append([(message.key, message.offset) for message in given])
        job.end()
    assert [[offset for _, offset in batch] for batch in batches] == [[0, 2, 4], [6, 7], [1, 3, 5]]
    assert all(len({key for key, _ in batch}) == 1 for batch in batches)


def test_a_batch_that_fails_is_repeated_as_a_whole_and_its_key_waits() -> None:
    bench = keyed("aaab", batch=2)
    job = bench.job(2)
    assert job.next_batch() is not None
    assert not job.settle(SUSPENDED)
    assert [message.offset for message in job.next_batch() or []] == [3], "the other key goes on in the same run"
    job.end()
    bench.live(2.0)
    assert {one.offset: one.attempts for one in bench.node.partitions[0].failures.values()} == {0: 1, 1: 1}
    job = bench.job(2)
    assert [message.offset for message in job.next_batch() or []] == [0, 1]
    assert job.context.attempt == 2
    job.end()
    assert bench.handle_all() == [2]


# Failures


def test_a_failing_key_holds_back_only_itself() -> None:
    bench = keyed("abab-a")
    assert sorted(offsets(bench.work(failing(RAISED, 0)))) == [0, 1, 3, 4]
    bench.settle()
    more(bench, "ab")
    assert bench.handle_all() == [7]
    bench.live(0.5)
    assert bench.handle_all() == [0, 2, 5, 6]
    bench.live(0.5)
    assert bench.committed() == 8


def test_what_is_finished_behind_a_failing_message_is_not_repeated_after_a_crash() -> None:
    """C7: the finished offsets are committed with the committed offset."""
    bench = keyed("abab-a")
    bench.work(failing(SUSPENDED, 0))
    bench.live(0.5)
    assert bench.committed() == 0
    assert sorted(work_out(bench.successor())) == [0, 2, 5]


def test_no_retry_before_the_commit_that_tells_of_the_failure_is_answered() -> None:
    bench = keyed("ab")
    assert offsets(bench.work(failing(RAISED, 0))) == [0, 1]
    bench.poll()
    assert bench.has(Commit), "at once, not after the interval"
    assert [(one.offset, one.attempts) for one in last_progress(bench).failed] == [(0, 1)]
    for _ in range(5):
        bench.wait(1.0)
        bench.settle(Commit)
        assert bench.take() is None, "back-off is over, but the attempt may not be durable"
    bench.answer_all()
    assert bench.work() == [(0, 2)]


def test_the_commit_that_counts_is_the_one_with_the_failure() -> None:
    """A commit that was already sent does not contain a later failure."""
    bench = keyed("aab")
    bench.chunk = 1
    other = bench.job()
    assert other.next() is not None
    job = bench.job()
    assert job.next() is not None
    job.end()
    bench.wait(0.2)
    bench.poll()
    early = bench.take_command(Commit)
    assert other.run.settle(RAISED) is False
    other.end()
    bench.wait(0.2)
    bench.poll()
    bench.answer(early, bench.good_answer(early))
    assert bench.take() is None
    bench.poll()
    bench.answer_all()
    assert bench.job().next() is not None


def test_the_count_of_attempts_survives_a_crash() -> None:
    bench = keyed("aa")
    for attempt in (1, 2, 3):
        assert bench.work(failing(RAISED, 0)) == [(0, attempt)]
        bench.live(0.5)
    successor = bench.successor()
    successor.settle()
    assert successor.work() == [(0, 4), (1, 1)]
    successor.live(0.5)
    assert bench.node.partitions[0].failures == {}, "over: it is settled"


def test_the_count_of_attempts_survives_a_release() -> None:
    bench = keyed("aa")
    job = bench.job()
    assert job.next() is not None
    bench.assign()
    bench.settle()
    assert bench.state.lease.stage is Stage.DRAINING
    job.settle(RAISED)
    job.end()
    bench.settle()
    assert 0 not in bench.core.partitions
    successor = bench.successor()
    successor.assigned = (0,)
    successor.settle()
    assert successor.work() == [(0, 2), (1, 1)]


def test_a_crash_before_the_commit_does_not_count() -> None:
    bench = keyed("a")
    bench.work(failing(RAISED, 0))
    bench.poll()
    successor = bench.successor()
    successor.settle()
    assert successor.work() == [(0, 1)]


def test_exceptions_wait_twice_as_long_every_time_from_10_ms_to_30_s() -> None:
    """C10."""
    bench = keyed("a")
    waits = []
    for _ in range(14):
        assert len(bench.work(failing(RAISED, 0))) == 1
        failed_at_s = bench.now_s
        bench.settle()
        due_s = bench.core.dispatcher.next_due_s()
        while bench.now_s + 0.5 < due_s:
            bench.live(0.5)
        bench.now_s = due_s - 0.001
        bench.settle()
        assert bench.take() is None
        bench.now_s = due_s
        waits.append(due_s - failed_at_s)
    assert waits == pytest.approx([min(30.0, 0.01 * 2**number) for number in range(14)])


def test_a_handler_that_asks_for_a_time_gets_it() -> None:
    bench = keyed("a")
    for _ in range(3):
        assert len(bench.work(failing(SUSPENDED, 0))) == 1
        bench.live(1.9)
        assert bench.take() is None
        bench.live(0.1)


def test_best_effort_goes_on_when_the_message_is_safe_in_the_retry_subject() -> None:
    bench = keyed("aab", strategy=Strategy.BEST_EFFORT)
    assert sorted(offsets(bench.work(failing(MOVED, 0)))) == [0, 2]
    bench.settle(Move)
    assert bench.take() is None, "its key waits"
    bench.live(0.2)
    assert bench.committed() == 1
    assert bench.handle_all() == [1]
    (move,) = bench.node.moves
    assert (move.to_subject, move.to_partition) == (retry_subject("billing", "orders"), 2), "the third level"


# Exhausted attempts


def used_up(on_exhausted: str, keys: str = "aabab", **settings: object) -> Bench:
    """Message 0 has failed in both of two attempts."""
    bench = keyed(keys, max_attempts=2, on_exhausted=on_exhausted, **settings)
    for attempt in (1, 2):
        assert (0, attempt) in bench.work(failing(RAISED, 0))
        if attempt == 1:
            bench.live(0.5)
    return bench


def test_block_holds_the_key_for_ever_and_nothing_else() -> None:
    bench = used_up("block")
    bench.live(100.0)
    assert bench.take() is None
    more(bench, "ab")
    assert bench.handle_all() == [6]
    assert bench.node.partitions[0].failures[0] == Failure(0, b"a", 2, "ValueError: no", 2, True)


def test_block_is_known_to_the_next_holder() -> None:
    bench = used_up("block")
    bench.live(0.5)
    successor = bench.successor(max_attempts=2)
    assert work_out(successor) == []
    successor.request(KeyAction.RESUME, b"a")
    successor.settle()
    assert successor.work() == [(0, 1), (1, 1), (3, 1)]


def test_a_blocked_key_that_is_resumed_has_all_its_attempts_again() -> None:
    bench = used_up("block")
    bench.live(0.5)
    bench.request(KeyAction.RESUME, b"a")
    bench.settle()
    assert bench.work(failing(RAISED, 0)) == [(0, 1)]
    bench.live(0.5)
    assert bench.work(failing(RAISED, 0)) == [(0, 2)]
    bench.live(50.0)
    assert bench.take() is None, "blocked again"


def test_a_key_resumed_before_its_block_was_stored_is_resumed() -> None:
    bench = used_up("block")
    bench.poll()
    commit = bench.take_command(Commit)
    bench.request(KeyAction.RESUME, b"a")
    bench.settle(Commit)
    assert bench.work() == [(0, 1), (1, 1), (3, 1)]
    bench.answer(commit, bench.good_answer(commit))
    bench.live(0.5)
    assert bench.committed() == 5
    assert bench.node.partitions[0].failures == {}


def test_a_dead_letter_is_durable_before_its_offset_is_finished_and_its_key_goes_on() -> None:
    """The contract: no message is lost."""
    bench = used_up("dead-letter")
    for _ in range(5):
        bench.settle(Move)
        bench.wait(0.5)
        assert bench.take() is None
    assert bench.committed() == 0
    move = bench.take_command(Move)
    assert isinstance(move, Move)
    assert moved_offsets(move) == [0]
    bench.answer(move, BUSY)
    bench.poll()
    assert not bench.has(Move)
    bench.wait(0.3)
    bench.poll()
    again = bench.take_command(Move)
    assert isinstance(again, Move)
    assert again.batch is move.batch
    assert bench.take() is None
    bench.answer(again, Done())
    assert bench.handle_all() == [1, 3]
    bench.live(0.5)
    assert bench.committed() == 5
    assert bench.node.partitions[0].failures == {}


def test_a_dead_letter_that_is_answered_late_is_safe_all_the_same() -> None:
    bench = used_up("dead-letter", answer_timeout_s=1.0)
    bench.poll()
    move = bench.take_command(Move)
    bench.wait(1.1)
    bench.settle(Move)
    again = bench.take_command(Move)
    bench.answer(move, Done())
    assert bench.handle_all() == [1, 3]
    bench.answer(again, Done())
    assert bench.handle_all() == []
    bench.live(0.5)
    assert bench.committed() == 5


def test_a_partition_is_given_back_after_what_is_on_its_way_is_safe() -> None:
    bench = used_up("dead-letter")
    bench.settle(Move)
    bench.assign()
    bench.settle(Move)
    assert bench.state.lease.stage is Stage.DRAINING
    assert not bench.sent(Release)
    bench.answer(bench.take_command(Move), Done())
    bench.settle()
    assert 0 not in bench.core.partitions
    assert bench.committed() == 1


def test_a_message_without_a_key_is_not_parked_but_a_dead_letter() -> None:
    bench = used_up("park", "-a")
    bench.live(0.5)
    assert [moved_offsets(move) for move in bench.node.moves] == [[0]]
    assert bench.committed() == 2


def test_park_takes_the_key_away_and_the_others_do_not_notice() -> None:
    bench = used_up("park")
    bench.live(0.5)
    stored = bench.node.partitions[0]
    assert stored.lots[b"a"].offsets == [0, 1, 3]
    assert stored.lots[b"a"].reason == "failed 2 times"
    assert bench.committed() == 5, "the partition is past them"
    more(bench, "aba")
    assert bench.handle_all() == [6]
    bench.live(0.5)
    assert stored.lots[b"a"].offsets == [0, 1, 3, 5, 7]
    assert bench.committed() == 8
    assert bench.state.buffer.waiting_count == bench.state.buffer.waiting_bytes == 0


# Commits that are lost, late or refused


def test_a_commit_without_an_answer_is_said_again_with_a_higher_number() -> None:
    bench = keyed("ab", answer_timeout_s=1.0)
    bench.work(failing(RAISED, 0))
    bench.poll()
    lost = bench.take_command(Commit)
    assert isinstance(lost, Commit)
    bench.wait(1.1)
    bench.poll()
    again = bench.take_command(Commit)
    assert isinstance(again, Commit)
    assert again.progress[0].number > lost.progress[0].number
    assert again.progress[0].failed == lost.progress[0].failed
    bench.answer(lost, Committed((0,)))
    assert bench.take() is None, "a late answer changes nothing"
    bench.answer(again, bench.good_answer(again))
    assert bench.work() == [(0, 2)]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_failure_whose_commit_did_not_arrive_is_said_again_though_nothing_else_happens(is_lost: bool) -> None:
    """No message is finished, so the offsets give no reason for a commit. The failure alone must cause the commit."""
    bench = keyed("a", answer_timeout_s=1.0)
    bench.work(failing(RAISED, 0))
    bench.poll()
    commit = bench.take_command(Commit)
    if not is_lost:
        bench.answer(commit, BUSY)
    bench.live(3.0, step_s=0.1)
    assert bench.work() == [(0, 2)]


def test_a_request_whose_commit_did_not_arrive_is_said_again_though_nothing_else_happens() -> None:
    bench = keyed(answer_timeout_s=1.0)
    bench.request(KeyAction.PARK, b"a")
    bench.settle(Commit)
    bench.answer(bench.take_command(Commit), BUSY)
    bench.live(3.0, step_s=0.1)
    assert bench.node.requests == []
    assert b"a" in bench.node.partitions[0].lots


def test_the_partition_is_lost_if_its_commit_is_refused() -> None:
    bench = keyed("ab")
    bench.work(failing(RAISED, 0))
    bench.poll()
    bench.answer(bench.take_command(Commit), Committed(()))
    assert bench.state.lease.stage is Stage.LOST
    assert bench.take() is None


def test_what_the_holder_before_finished_is_not_offered_again() -> None:
    bench = Bench(order=Order.KEY)
    bench.store_keys("abcabc")
    tracker = CommitTracker(1)
    tracker.add([2, 4])
    stored = bench.node.partitions[0]
    stored.offset, stored.finished = tracker.snapshot()
    bench.settle()
    assert sorted(bench.handle_all()) == [1, 3, 5]
    bench.live(0.5)
    assert (stored.offset, stored.finished) == (6, b"")


def test_order_by_partition_refuses_a_group_with_parked_keys() -> None:
    bench = Bench(order=Order.PARTITION)
    bench.poll()
    bench.answer_all()
    bench.poll()
    bench.answer(bench.take_command(Acquire), Granted(1, 0, 10.0, lots=(Lot(b"a", "parked"),)))
    bench.poll()
    bench.answer(bench.take_command(Release), Done())
    bench.poll()
    bench.answer(bench.take_command(Leave), Done())
    assert isinstance(bench.core.error, GroupConflict)


# Hand-over in every state of a key


def is_suspended(bench: Bench) -> None:
    bench.work(failing(SUSPENDED, 0))
    bench.settle()


def is_running(bench: Bench) -> None:
    bench.chunk = 1
    assert bench.job().next() is not None


def is_half_done(bench: Bench) -> None:
    job = bench.job()
    assert [job.next() is not None for _ in range(2)] == [True, True]
    bench.live(0.5)


def is_parked(bench: Bench) -> None:
    bench.request(KeyAction.PARK, b"a")
    bench.settle()
    bench.handle_all()
    bench.request(KeyAction.RESUME, b"a")


def is_being_resumed(bench: Bench) -> None:
    bench.node.lot_rows_max = 1
    bench.request(KeyAction.PARK, b"a")
    bench.settle()
    bench.request(KeyAction.RESUME, b"a")
    bench.settle()
    bench.chunk = 1
    bench.job().end()


def is_being_resumed_and_failing(bench: Bench) -> None:
    bench.request(KeyAction.PARK, b"a")
    bench.settle()
    bench.request(KeyAction.RESUME, b"a")
    bench.settle()
    bench.work(failing(SUSPENDED, 0))
    bench.settle()


STATES = [is_suspended, is_running, is_half_done, is_parked, is_being_resumed, is_being_resumed_and_failing]


@pytest.mark.parametrize("state", STATES)
def test_after_a_crash_the_next_holder_goes_on_in_order_and_nothing_is_lost(state: Callable[[Bench], None]) -> None:
    bench = keyed("aabab")
    seen: list[int] = []
    bench.watch = lambda message: seen.append(message.offset)
    state(bench)
    successor = bench.successor()
    successor.store_keys("ab")
    handled = work_out(successor)
    of_a = [offset for offset in handled if offset in (0, 1, 3, 5)]
    assert of_a == sorted(of_a)
    assert {*seen, *handled} == set(range(7))
    assert of_a[-1] == 5
    assert bench.committed() == 7
    assert bench.node.partitions[0].lots == {}
    assert bench.node.partitions[0].failures == {}


@pytest.mark.parametrize("state", [one for one in STATES if one not in (is_running, is_half_done)])
def test_after_a_release_nothing_that_was_finished_is_repeated(state: Callable[[Bench], None]) -> None:
    bench = keyed("aabab")
    done: list[int] = []
    bench.watch = lambda message: done.append(message.offset)
    state(bench)
    failed = [0] if state in (is_suspended, is_being_resumed_and_failing) else []
    bench.assign()
    bench.settle()
    assert 0 not in bench.core.partitions
    successor = bench.successor()
    successor.assigned = (0,)
    handled = work_out(successor)
    assert sorted(handled) == sorted(set(range(5)) - set(done) | set(failed))
    assert [one for one in handled if one in (0, 1, 3)] == sorted(one for one in handled if one in (0, 1, 3))


# Runs of several partitions


def two_partitions(keys: str = "aab") -> Bench:
    bench = Bench((0, 1), order=Order.KEY)
    bench.store_keys(keys, 0)
    bench.store_keys(keys, 1)
    bench.settle()
    return bench


def test_a_run_goes_on_with_another_partition_if_one_is_lost_in_the_middle() -> None:
    bench = two_partitions()
    job = bench.job()
    assert len(job.run.todo) == 4
    first = job.next()
    assert first is not None
    lost, kept = first.partition, 1 - first.partition
    bench.answer(bench.take_command(Pull, lost), StaleEpoch("billing", str(lost), 1, 2))
    assert bench.core.partitions[lost].lease.stage is Stage.LOST
    rest = []
    while (message := job.next()) is not None:
        rest.append((message.partition, message.offset))
    assert [partition for partition, _ in rest] == [kept] * 3
    assert [offset for _, offset in rest if offset != 2] == [0, 1]
    before = len(bench.sent(Commit))
    job.end()
    bench.settle()
    for commit in bench.sent(Commit)[before:]:
        assert isinstance(commit, Commit)
        assert not any(one.partition == lost and one.epoch == 1 for one in commit.progress)
    bench.live(0.5)
    assert sorted(bench.handle_all()) == [0, 1, 2], "the lost one all over again"


def test_what_a_slow_run_has_not_begun_is_given_back_when_its_partition_is_drained() -> None:
    bench = two_partitions()
    job = bench.job()
    first = job.next()
    assert first is not None
    busy, idle = first.partition, 1 - first.partition
    assert bench.core.partitions[idle].buffer.lanes_in_runs == 2
    bench.assign(busy)
    bench.settle()
    assert idle not in bench.core.partitions, "it does not wait for the handler of another partition"
    assert busy in bench.core.partitions
    second = job.next()
    assert second is not None
    assert second.partition == busy
    job.end()


def test_keys_behind_a_slow_handler_of_the_same_run_go_on_with_another_worker() -> None:
    bench = keyed("aabbcc")
    slow = bench.job()
    assert slow.next() is not None
    bench.wait(OVERDUE_S)
    assert sorted(bench.handle_all()) == [2, 3, 4, 5]
    bench.live(0.5)
    assert bench.committed() == 0
    slow.end()
    assert bench.handle_all() == [1]


# Flow control


def fill(bench: Bench, keys: str, times: int) -> None:
    """Messages arrive, and are handled on arrival."""
    for _ in range(times):
        more(bench, keys)
        bench.handle_all()
        bench.wait(0.01)
    bench.settle()


@pytest.mark.parametrize("how", ["runs", "fails", "blocks"])
def test_a_stuck_key_does_not_stop_the_others_before_the_span_is_full_and_is_named_then(how: str) -> None:
    bench = keyed("a", flow=FlowControl(buffered_count=20, span=300), max_attempts=1 if how == "blocks" else None)
    job: Job | None = None
    if how == "runs":
        bench.chunk = 1
        job = bench.job()
        assert job.next() is not None
        bench.live(1.5)
        bench.chunk = 100
    else:
        bench.work(failing(Outcome(Next.REPEAT, ResultKind.FAILED, 30.0), 0))
        bench.settle()
    fill(bench, "aaaab", 20)
    assert bench.state.buffer.waiting_count > 20, "so much waits behind the stuck key"
    assert not bench.state.buffer.is_paused
    assert bench.core.blocking() == {}
    assert bench.state.buffer.pull_offset == 101
    fill(bench, "aaaab", 60)
    assert bench.state.buffer.is_paused
    assert 300 <= bench.state.span < 310, "no more than the span, but for the last pull"
    assert bench.state.buffer.pull_offset < bench.end()
    (head,) = bench.core.blocking().values()
    assert (head.key, head.offset) == (b"a", 0)
    bench.live(20.0)
    assert bench.state.lease.stage is Stage.ACTIVE, "a paused partition keeps its lease"
    if job is not None:
        job.end()
    else:
        bench.request(KeyAction.SKIP, b"a", 0)
    bench.live(12.0)
    bench.handle_all()
    handled = work_out(bench, 5.0)
    assert handled
    assert bench.committed() == bench.end()
    assert bench.core.blocking() == {}


def test_pulling_pauses_while_too_many_messages_wait_that_are_not_stuck() -> None:
    bench = keyed(flow=FlowControl(buffered_count=20))
    more(bench, "abcdefghij" * 3)
    assert bench.state.buffer.is_paused
    assert bench.core.blocking() == {}
    bench.handle_all()
    assert bench.core.wants_poll
    bench.settle()
    assert not bench.state.buffer.is_paused


def test_pulling_pauses_while_too_many_bytes_wait() -> None:
    bench = keyed(flow=FlowControl(buffered_bytes=1000))
    bench.store_keys("abc", body=bytes(300))
    bench.settle()
    assert not bench.state.buffer.is_paused
    bench.store_keys("a", body=bytes(300))
    bench.settle()
    assert bench.state.buffer.is_paused
    assert bench.state.buffer.waiting_bytes == 1200
    bench.handle_all()
    bench.settle()
    assert bench.state.buffer.waiting_bytes == 0
    assert not bench.state.buffer.is_paused


def test_parked_messages_do_not_count_as_waiting() -> None:
    bench = keyed(flow=FlowControl(buffered_count=20, buffered_bytes=1000, span=100))
    bench.request(KeyAction.PARK, b"a")
    for _ in range(50):
        more(bench, "aaaaaaaaaa")
    assert not bench.state.buffer.is_paused
    assert len(bench.node.partitions[0].lots[b"a"].rows) == 500
    assert bench.committed() == 500


# Manual acknowledgement


def test_a_rollback_repeats_what_its_own_key_has_not_committed() -> None:
    bench = keyed("aaabb", ack="manual")
    outcomes = {0: KEEP, 1: KEEP, 2: ROLLBACK, 3: KEEP, 4: DONE}
    assert sorted(offsets(bench.work(lambda message, context: outcomes[message.offset]))) == [0, 1, 2, 3, 4]
    bench.live(0.5)
    assert bench.committed() == 0
    assert CommitTracker(0, bench.node.partitions[0].finished).last == 4, "the other key is committed"
    bench.live(0.5)
    assert bench.work(lambda message, context: DONE) == [(0, 2), (1, 2), (2, 2)]
    bench.live(0.5)
    assert bench.committed() == 5


def test_what_is_kept_is_committed_with_a_later_message_of_its_key_only() -> None:
    bench = keyed("ab", ack="manual")
    bench.work(lambda message, context: KEEP)
    bench.live(0.5)
    assert bench.committed() == 0
    more(bench, "b")
    bench.work(lambda message, context: DONE)
    bench.live(0.5)
    assert bench.committed() == 0
    more(bench, "a")
    bench.work(lambda message, context: DONE)
    bench.live(0.5)
    assert bench.committed() == 4


def test_what_was_kept_is_repeated_after_a_hand_over() -> None:
    bench = keyed("aab", ack="manual")
    bench.work(lambda message, context: KEEP if message.key == b"a" else DONE)
    bench.assign()
    bench.settle()
    assert 0 not in bench.core.partitions
    successor = bench.successor(ack="manual")
    successor.assigned = (0,)
    successor.settle()
    assert offsets(successor.work(lambda message, context: DONE)) == [0, 1]


def test_the_attempts_of_all_messages_of_a_rollback_survive_a_hand_over() -> None:
    bench = keyed("aaa", ack="manual")
    outcomes = {0: KEEP, 1: KEEP, 2: ROLLBACK}
    bench.work(lambda message, context: outcomes[message.offset])
    bench.live(0.5)
    successor = bench.successor(ack="manual")
    successor.settle()
    assert successor.work(lambda message, context: DONE) == [(0, 2), (1, 2), (2, 2)]
