"""C11: parking, resuming and skipping a key, through ConsumerCore."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inturn.consumer.key_requests import KeyRequests
from inturn.consumer.outcome import KEEP, Next, Outcome
from inturn.model.errors import DiskFull
from inturn.model.message import Message, Origin
from inturn.model.offsets import mark_of
from inturn.model.result import ResultKind
from inturn.model.settings import KeyAction, LotState, Order, Strategy
from inturn.protocol.commands import Assignment, Commit, Heartbeat, KeyRequest, Move, ReadLot
from tests.consumer.fake_node import LEASE, SUBJECT, Bench, StoredLot, failing
from tests.consumer.test_dispatcher import MOVED, RAISED, SUSPENDED, keyed, last_progress, more, used_up, work_out

LONG = Outcome(Next.REPEAT, ResultKind.FAILED, 30.0)


def lot(bench: Bench, key: bytes = b"a") -> StoredLot:
    return bench.node.partitions[0].lots[key]


def ask(bench: Bench, kind: KeyAction, offset: int | None = None, key: bytes = b"a") -> int:
    number = bench.request(kind, key, offset)
    bench.settle()
    return number


def parked(keys: str, rows_max: int = 1000, **settings: object) -> Bench:
    """Key a is parked with all messages. All other messages are finished."""
    bench = keyed(keys, **settings)
    bench.node.lot_rows_max = rows_max
    ask(bench, KeyAction.PARK)
    bench.handle_all()
    bench.live(0.5)
    assert lot(bench).offsets == [offset for offset, key in enumerate(keys) if key == "a"]
    return bench


# Park


def test_a_key_is_parked_when_somebody_asks_for_it() -> None:
    bench = keyed("aba")
    number = ask(bench, KeyAction.PARK)
    assert lot(bench).offsets == [0, 2]
    assert lot(bench).reason == "because"
    assert last_progress(bench).requests == (number,)
    assert bench.handle_all() == [1]
    bench.live(0.5)
    assert bench.committed() == 3


def test_parking_waits_for_the_handler_that_runs_and_starts_nothing_more() -> None:
    bench = keyed("aaab")
    job = bench.job()
    assert job.next() is not None
    ask(bench, KeyAction.PARK)
    assert bench.node.partitions[0].lots == {}
    assert bench.node.requests, "not acted upon yet"
    following = job.next()
    assert following is not None
    assert following.offset == 3, "the other key of the run goes on"
    job.end()
    bench.settle()
    assert lot(bench).offsets == [1, 2]
    assert bench.node.requests == []
    bench.live(0.5)
    assert bench.committed() == 4


def test_why_a_key_was_parked_is_kept_although_a_handler_ran_at_that_moment() -> None:
    bench = keyed("aa")
    job = bench.job()
    assert job.next() is not None
    ask(bench, KeyAction.PARK)
    job.end()
    bench.settle()
    assert lot(bench).reason == "because"


def test_parking_a_key_whose_handler_fails_meanwhile_parks_the_failed_message_first() -> None:
    bench = keyed("aa")
    job = bench.job()
    assert job.next() is not None
    ask(bench, KeyAction.PARK)
    job.settle(RAISED)
    job.end()
    bench.settle()
    assert lot(bench).offsets == [0, 1]
    assert bench.node.partitions[0].failures[0].attempts == 1


def test_parking_waits_for_a_message_that_is_being_moved() -> None:
    bench = keyed("aaa", strategy=Strategy.BEST_EFFORT)
    bench.work(failing(MOVED, 0))
    bench.settle(Move)
    bench.request(KeyAction.PARK, b"a")
    bench.settle(Move)
    assert bench.node.requests
    bench.settle()
    assert lot(bench).offsets == [1, 2]
    assert bench.node.requests == []


def test_a_key_that_nothing_was_pulled_of_can_be_parked() -> None:
    bench = keyed()
    ask(bench, KeyAction.PARK)
    assert lot(bench).offsets == []
    more(bench, "aba")
    assert bench.handle_all() == [1]
    bench.settle()
    assert lot(bench).offsets == [0, 2]


def test_a_suspended_key_that_is_parked_is_not_tried_when_its_time_comes() -> None:
    bench = keyed("aa")
    bench.work(failing(SUSPENDED, 0))
    bench.settle()
    ask(bench, KeyAction.PARK)
    assert work_out(bench) == []
    assert lot(bench).offsets == [0, 1]


def test_what_was_kept_is_parked_before_what_follows() -> None:
    bench = keyed("aaa", ack="manual")
    job = bench.job()
    assert job.next() is not None
    job.settle(KEEP)
    job.end()
    ask(bench, KeyAction.PARK)
    assert lot(bench).offsets == [0, 1, 2]


@pytest.mark.parametrize("order", [Order.PARTITION, Order.NONE])
def test_only_order_by_key_can_park(order: Order) -> None:
    bench = Bench(order=order)
    bench.store_keys("aa")
    bench.settle()
    ask(bench, KeyAction.PARK)
    assert bench.node.requests == [], "answered, though nothing could be done"
    assert bench.node.partitions[0].lots == {}
    assert len(bench.handle_all()) == 2


# Delivery of key requests


def test_a_request_counts_only_above_the_mark() -> None:
    """An assignment may be older than the grant. The grant carried all requests from before the grant."""
    bench = keyed("ab")
    old = KeyRequest(3, 0, b"a", KeyAction.PARK.value)
    bench.state.progress.last_request_id = 3
    bench.generation += 1
    bench.wait(3.0)
    bench.poll()
    beat = bench.take_command(Heartbeat)
    bench.answer(beat, Assignment(bench.generation, (0,), SUBJECT, LEASE.life_s, (old,)))
    bench.settle()
    assert b"a" not in bench.state.progress.parking_lots


def test_a_request_that_waits_is_acted_upon_by_whoever_is_granted_the_partition() -> None:
    bench = Bench(order=Order.KEY)
    bench.store_keys("aab")
    number = bench.node.request(KeyAction.PARK, b"a")
    bench.settle()
    assert bench.state.progress.last_request_id == number
    assert lot(bench).offsets == [0, 1]
    assert bench.node.requests == []


def test_a_request_is_acted_upon_once_though_assignments_repeat_it() -> None:
    bench = keyed("a", answer_timeout_s=100.0)
    bench.request(KeyAction.PARK, b"a")
    bench.settle(Commit)
    bench.generation += 1
    bench.settle(Commit)
    assert bench.state.progress.key_requests == []
    assert len(bench.sent(Commit)) == 1
    bench.settle()
    assert lot(bench).offsets == [0]


def test_a_request_for_another_partition_is_left_alone() -> None:
    bench = keyed("a")
    bench.request(KeyAction.PARK, b"a", partition=1)
    bench.settle()
    assert bench.node.requests
    assert bench.handle_all() == [0]


def test_requests_of_one_key_are_acted_upon_in_the_order_they_were_asked() -> None:
    """Park, and resume before the running handler is over: in the end the key runs."""
    bench = keyed("aaa")
    job = bench.job()
    assert job.next() is not None
    bench.request(KeyAction.PARK, b"a")
    bench.request(KeyAction.RESUME, b"a")
    bench.settle()
    job.end()
    bench.settle()
    assert work_out(bench) == [1, 2]
    assert bench.node.partitions[0].lots == {}
    assert bench.node.requests == []


def test_a_request_that_waits_for_a_handler_does_not_hold_back_another_key() -> None:
    bench = keyed("aabb")
    bench.chunk = 1
    assert bench.job().next() is not None
    bench.request(KeyAction.PARK, b"a")
    bench.request(KeyAction.PARK, b"b")
    bench.settle()
    assert b"b" in bench.node.partitions[0].lots
    assert b"a" not in bench.node.partitions[0].lots


# Resume


def test_a_resumed_key_runs_from_its_head_and_is_free_when_the_last_row_is_removed() -> None:
    bench = parked("abaa")
    ask(bench, KeyAction.RESUME)
    assert lot(bench).state is LotState.RESUMING
    bench.chunk = 1
    for offset in (0, 2, 3):
        assert b"a" in bench.node.partitions[0].lots, "not free before"
        job = bench.job()
        message = job.next()
        assert message is not None
        assert (message.offset, message.key, message.partition, message.subject) == (offset, b"a", 0, "orders")
        job.end()
        bench.settle()
    assert bench.node.partitions[0].lots == {}
    assert bench.node.partitions[0].freed == [b"a"]
    more(bench, "a")
    assert bench.handle_all() == [4]


def test_a_lot_that_is_empty_is_free_as_soon_as_it_is_resumed() -> None:
    bench = keyed()
    ask(bench, KeyAction.PARK)
    ask(bench, KeyAction.RESUME)
    assert bench.node.partitions[0].freed == [b"a"]


def test_a_lot_is_read_in_pieces_and_newer_messages_go_to_its_tail_until_its_end_was_read() -> None:
    bench = parked("aaaaa", rows_max=2)
    ask(bench, KeyAction.RESUME)
    assert len(bench.sent(ReadLot)) == 1, "the next piece when there is nothing to run"
    more(bench, "ab")
    assert lot(bench).offsets == [0, 1, 2, 3, 4, 5], "to the tail"
    assert sorted(bench.handle_all()) == [0, 1, 6]
    bench.settle()
    assert bench.handle_all() == [2, 3]
    bench.settle()
    assert bench.state.progress.parking_lots[b"a"].is_read, "4 and 5 are the rest"
    more(bench, "a")
    assert 7 not in lot(bench).offsets, "behind the last rows, in the lane"
    bench.chunk = 1
    job = bench.job()
    message = job.next()
    assert message is not None
    assert message.offset == 4
    job.end()
    bench.settle()
    assert lot(bench).offsets == [5]
    assert bench.handle_all() == [5, 7]
    bench.live(0.5)
    assert bench.node.partitions[0].freed == [b"a"]
    assert bench.committed() == 8


def test_a_message_that_comes_while_the_end_is_being_read_runs_behind_it_once() -> None:
    """The consumer cannot know whether the node stored the message before or after reading the lot."""
    for is_stored_first in (True, False):
        bench = parked("aa")
        bench.request(KeyAction.RESUME, b"a")
        bench.settle(ReadLot)
        bench.store_keys("a")
        bench.settle(ReadLot, Commit)
        read = bench.take_command(ReadLot)
        content = None if is_stored_first else bench.good_answer(read)
        bench.settle(ReadLot)
        assert lot(bench).offsets == [0, 1, 2]
        bench.answer(read, bench.good_answer(read) if content is None else content)
        assert work_out(bench, 2.0) == [0, 1, 2]
        assert bench.node.partitions[0].freed == [b"a"]


def test_a_read_that_fails_is_repeated() -> None:
    bench = parked("aa")
    bench.request(KeyAction.RESUME, b"a")
    bench.settle(ReadLot)
    bench.answer(bench.take_command(ReadLot), DiskFull("state"))
    assert work_out(bench, 2.0) == [0, 1]


def test_a_read_without_an_answer_is_repeated_and_its_late_answer_ignored() -> None:
    bench = parked("aa", answer_timeout_s=1.0)
    bench.request(KeyAction.RESUME, b"a")
    bench.settle(ReadLot)
    late = bench.take_command(ReadLot)
    content = bench.good_answer(late)
    bench.wait(1.1)
    bench.settle()
    assert bench.handle_all() == [0, 1]
    bench.answer(late, content)
    assert work_out(bench, 2.0) == []
    assert bench.node.partitions[0].lots == {}


def test_a_resumed_key_that_fails_waits_and_goes_on_in_order() -> None:
    bench = parked("aba")
    ask(bench, KeyAction.RESUME)
    assert bench.work(failing(RAISED, 0)) == [(0, 1)]
    more(bench, "ab")
    assert bench.handle_all() == [4]
    bench.live(0.5)
    assert bench.work() == [(0, 2), (2, 1), (3, 1)]
    bench.live(0.5)
    assert bench.node.partitions[0].lots == {}
    assert bench.node.partitions[0].failures == {}
    assert bench.committed() == 5


def test_a_key_that_is_parked_again_while_it_is_resumed_keeps_its_order() -> None:
    bench = parked("aaaa", rows_max=2)
    ask(bench, KeyAction.RESUME)
    bench.chunk = 1
    job = bench.job()
    assert job.next() is not None
    job.end()
    more(bench, "a")
    ask(bench, KeyAction.PARK)
    assert lot(bench).state is LotState.PARKED
    assert lot(bench).offsets == [1, 2, 3, 4]
    more(bench, "a")
    assert bench.take() is None
    ask(bench, KeyAction.RESUME)
    assert work_out(bench, 5.0) == [1, 2, 3, 4, 5]
    assert bench.node.partitions[0].freed == [b"a"]
    assert bench.committed() == 6


def test_a_key_parked_again_with_newer_messages_behind_its_last_rows_keeps_its_order() -> None:
    bench = parked("aa")
    ask(bench, KeyAction.RESUME)
    more(bench, "aa")
    assert lot(bench).offsets == [0, 1]
    ask(bench, KeyAction.PARK)
    assert lot(bench).offsets == [0, 1, 2, 3]
    ask(bench, KeyAction.RESUME)
    assert work_out(bench, 2.0) == [0, 1, 2, 3]


def test_parking_again_while_a_read_is_on_its_way_ignores_its_answer() -> None:
    bench = parked("aa")
    bench.request(KeyAction.RESUME, b"a")
    bench.settle(ReadLot)
    bench.request(KeyAction.PARK, b"a")
    bench.settle(ReadLot)
    bench.settle()
    assert bench.take() is None
    ask(bench, KeyAction.RESUME)
    assert work_out(bench, 2.0) == [0, 1]


def test_a_resumed_key_whose_attempts_are_used_up_again_is_parked_again() -> None:
    bench = used_up("park", "aaba")
    bench.live(0.5)
    ask(bench, KeyAction.RESUME)
    assert bench.work(failing(RAISED, 0)) == [(0, 1)], "counted from the beginning"
    bench.live(0.5)
    assert bench.work(failing(RAISED, 0)) == [(0, 2)]
    bench.live(0.5)
    assert lot(bench).state is LotState.PARKED
    assert lot(bench).offsets == [0, 1, 3]
    assert bench.node.partitions[0].failures[0].attempts == 2
    ask(bench, KeyAction.RESUME)
    assert work_out(bench, 2.0) == [0, 1, 3]
    assert bench.node.partitions[0].failures == {}


def test_a_resumed_message_that_becomes_a_dead_letter_is_removed_when_it_is_safe() -> None:
    bench = parked("aa", max_attempts=1, on_exhausted="dead-letter")
    ask(bench, KeyAction.RESUME)
    assert bench.work(failing(RAISED, 0)) == [(0, 1)]
    bench.settle(Move)
    assert lot(bench).offsets == [0, 1]
    bench.settle()
    assert lot(bench).offsets == [1]
    assert bench.handle_all() == [1]
    bench.settle()
    assert bench.node.partitions[0].lots == {}


def test_rows_removed_by_a_commit_that_was_not_answered_do_not_run_again() -> None:
    """A key is parked again before the answer to the commit that removes the first row, and resumed at once."""
    bench = parked("aaa", rows_max=2)
    ask(bench, KeyAction.RESUME)
    bench.chunk = 1
    job = bench.job()
    assert job.next() is not None
    job.end()
    bench.request(KeyAction.PARK, b"a")
    bench.request(KeyAction.RESUME, b"a")
    bench.settle(Commit)
    bench.settle()
    assert work_out(bench, 2.0) == [1, 2]
    assert bench.node.partitions[0].freed == [b"a"]


def test_what_is_parked_and_skipped_before_a_commit_is_answered_does_not_run_when_its_key_is_resumed() -> None:
    bench = keyed("aab")
    bench.request(KeyAction.PARK, b"a")
    bench.request(KeyAction.SKIP, b"a", 0)
    bench.request(KeyAction.RESUME, b"a")
    bench.settle(Commit)
    bench.settle()
    assert work_out(bench, 2.0) == [2, 1]
    assert bench.node.partitions[0].freed == [b"a"]


def test_many_keys_are_resumed_at_once() -> None:
    bench = keyed("abcabcabc")
    bench.node.lot_rows_max = 1
    for key in (b"a", b"b", b"c"):
        bench.request(KeyAction.PARK, key)
    bench.settle()
    for key in (b"a", b"b", b"c"):
        bench.request(KeyAction.RESUME, key)
    handled = work_out(bench, 5.0)
    for first in range(3):
        assert [offset for offset in handled if offset % 3 == first] == [first, first + 3, first + 6]
    assert sorted(bench.node.partitions[0].freed) == [b"a", b"b", b"c"]


# Skip


def test_skipping_a_suspended_message_lets_its_key_go_on_at_once() -> None:
    bench = keyed("aab")
    bench.work(failing(LONG, 0))
    bench.settle()
    ask(bench, KeyAction.SKIP, 0)
    assert bench.work() == [(1, 1)]
    bench.live(0.5)
    assert bench.committed() == 3
    assert bench.node.partitions[0].failures == {}
    assert bench.node.requests == []


def test_skipping_a_blocked_message_lets_its_key_go_on() -> None:
    bench = used_up("block")
    bench.live(0.5)
    ask(bench, KeyAction.SKIP, 0)
    assert bench.work() == [(1, 1), (3, 1)]
    bench.live(0.5)
    assert bench.committed() == 5


def test_skipping_a_message_that_runs_waits_and_then_it_depends_on_its_end() -> None:
    for outcome, rest in ((None, [1]), (RAISED, [1])):
        bench = keyed("aa")
        job = bench.job()
        assert job.next() is not None
        ask(bench, KeyAction.SKIP, 0)
        assert bench.node.requests
        if outcome is not None:
            job.settle(outcome)
        job.end()
        bench.settle()
        assert bench.node.requests == []
        assert work_out(bench, 1.0) == rest
        assert bench.committed() == 2


def test_skipping_what_is_not_the_first_any_more_drops_nothing() -> None:
    bench = keyed("aaa")
    bench.chunk = 1
    job = bench.job()
    assert job.next() is not None
    job.end()
    ask(bench, KeyAction.SKIP, 0)
    assert bench.handle_all() == [1, 2]


def test_skipping_the_head_of_a_parked_key_removes_its_row() -> None:
    bench = parked("aaa")
    ask(bench, KeyAction.SKIP, 0)
    assert lot(bench).offsets == [1, 2]
    assert lot(bench).state is LotState.PARKED
    ask(bench, KeyAction.RESUME)
    assert work_out(bench, 2.0) == [1, 2]


def test_skipping_the_head_of_a_key_that_is_resumed_and_fails() -> None:
    bench = parked("aa")
    ask(bench, KeyAction.RESUME)
    bench.work(failing(LONG, 0))
    bench.settle()
    ask(bench, KeyAction.SKIP, 0)
    assert lot(bench).offsets == [1]
    assert bench.work() == [(1, 1)]
    bench.live(0.5)
    assert bench.node.partitions[0].freed == [b"a"]


def test_skipping_the_last_row_of_a_key_frees_it() -> None:
    bench = parked("a")
    ask(bench, KeyAction.RESUME)
    bench.work(failing(LONG, 0))
    bench.settle()
    ask(bench, KeyAction.SKIP, 0)
    assert bench.node.partitions[0].freed == [b"a"]
    assert bench.state.progress.parking_lots == {}


def test_skipping_while_the_lot_is_being_read_waits_for_what_is_read() -> None:
    bench = parked("aa")
    bench.request(KeyAction.RESUME, b"a")
    bench.settle(ReadLot)
    bench.request(KeyAction.SKIP, b"a", 0)
    bench.settle(ReadLot)
    assert any(one.kind == KeyAction.SKIP for one in bench.node.requests)
    bench.settle()
    assert work_out(bench, 2.0) == [1]
    assert bench.node.requests == []
    assert bench.node.partitions[0].freed == [b"a"]


def test_skipping_a_message_that_was_not_pulled_yet() -> None:
    """The message failed at the previous lease holder. The next lease holder learns of the request with the grant."""
    bench = keyed("ba")
    bench.work(failing(LONG, 1))
    bench.live(0.5)
    successor = bench.successor()
    successor.node.request(KeyAction.SKIP, b"a", 1)
    assert work_out(successor) == []
    assert successor.committed() == 2
    assert successor.node.requests == []
    assert successor.node.partitions[0].failures == {}


def test_a_message_that_fails_after_another_was_skipped_waits_for_its_own_commit() -> None:
    """The skipped message and the next message wait for different answers."""
    bench = keyed("aa")
    bench.work(failing(RAISED, 0))
    bench.poll()
    commit = bench.take_command(Commit)
    bench.request(KeyAction.SKIP, b"a", 0)
    bench.settle(Commit)
    assert bench.work(failing(RAISED, 1)) == [(1, 1)]
    bench.wait(1.0)
    bench.answer(commit, bench.good_answer(commit))
    assert bench.take() is None
    bench.settle()
    assert bench.work() == [(1, 2)]


def test_a_message_on_its_way_to_the_dead_letters_is_not_overtaken_when_the_time_of_a_skipped_one_comes() -> None:
    bench = keyed("aaa", max_attempts=2, on_exhausted="dead-letter")
    bench.work(failing(SUSPENDED, 0))
    bench.settle()
    ask(bench, KeyAction.SKIP, 0)
    assert bench.work(failing(RAISED, 1)) == [(1, 1)]
    bench.live(0.5)
    assert bench.work(failing(RAISED, 1)) == [(1, 2)]
    for _ in range(4):
        bench.wait(0.5)
        bench.settle(Move)
        assert bench.take() is None
    bench.settle()
    bench.chunk = 1
    assert bench.job().next() is not None
    assert bench.take() is None, "one worker for one key"


def test_skip_under_order_by_partition_drops_the_first_message() -> None:
    bench = Bench(max_attempts=1)
    bench.store_keys("aab")
    bench.settle()
    bench.work(failing(RAISED, 0))
    bench.live(0.5)
    assert bench.take() is None
    ask(bench, KeyAction.SKIP, 0)
    assert bench.handle_all() == [1, 2]
    bench.live(0.5)
    assert bench.committed() == 3


def test_resume_under_order_by_partition_tries_the_first_message_again() -> None:
    bench = Bench(max_attempts=1)
    bench.store_keys("aab")
    bench.settle()
    bench.work(failing(RAISED, 0))
    bench.live(0.5)
    ask(bench, KeyAction.RESUME)
    assert bench.work() == [(0, 1), (1, 1), (2, 1)]


def test_a_skip_of_a_message_that_is_over_drops_no_other() -> None:
    """C11, M5: the skipped message was in a parent.

    The message at the head has the same offset, but in this partition.
    """
    settled: list[int] = []
    state = SimpleNamespace(index=2, progress=SimpleNamespace(settle=settled.append))
    requests = object.__new__(KeyRequests)
    lane = SimpleNamespace(
        run=None, waiting=1, at=0, messages=[Message(b"x", b"k", offset=10, origin=Origin("line", 2))]
    )
    request = KeyRequest(1, 2, b"k", "skip", offset=10, origin=0)
    assert requests._act_skip(state, None, lane, request)  # type: ignore[arg-type]
    assert lane.at == 0
    assert settled == [mark_of(0, 10, 2)]
