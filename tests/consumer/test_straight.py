"""With handlers of microseconds a partition is a single straight lane, until a key needs separate treatment."""

from __future__ import annotations

import pytest

from inturn.consumer.lane import STRAIGHT, Lane
from inturn.consumer.outcome import Next, Outcome
from inturn.consumer.partition_lease import Stage
from inturn.consumer.scheduler import CHUNK_S, OVERDUE_S
from inturn.model.result import ResultKind
from inturn.model.settings import KeyAction, Order
from tests.consumer.fake_node import Bench, failing
from tests.consumer.test_dispatcher import more

RAISED = Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, ValueError("no"))


def quick(keys: str = "", order: Order = Order.KEY, **settings: object) -> Bench:
    """Handlers have been quick so far."""
    bench = Bench(order=order, **settings)  # type: ignore[arg-type]
    bench.core.scheduler._handling_s = CHUNK_S / bench.chunk
    bench.store_keys(keys)
    bench.settle()
    return bench


def straight_of(bench: Bench) -> Lane | None:
    return bench.state.buffer.lanes.get(STRAIGHT)


@pytest.mark.parametrize("order", [Order.KEY, Order.NONE])
def test_all_keys_run_in_the_order_of_the_log(order: Order) -> None:
    bench = quick("abcab-c-a", order)
    assert list(bench.state.buffer.lanes) == [STRAIGHT]
    more(bench, "dab")
    assert bench.handle_all() == list(range(12))
    bench.live(1.0)
    assert bench.committed() == 12
    assert bench.state.buffer.lanes == {}


@pytest.mark.parametrize("settings", [{"ack": "manual"}, {"batch": 3}])
def test_what_belongs_to_a_key_is_kept_by_key(settings: dict[str, object]) -> None:
    """Manual commits, manual rollbacks, and batches belong to a single key."""
    bench = quick("aabb", Order.KEY, **settings)
    assert sorted(map(str, bench.state.buffer.lanes)) == [str(b"a"), str(b"b")]


def test_slow_handlers_have_lanes_by_key() -> None:
    bench = Bench(order=Order.KEY)
    bench.store_keys("ab")
    bench.settle()
    assert STRAIGHT not in bench.state.buffer.lanes


def test_a_message_that_fails_holds_back_its_key_alone() -> None:
    bench = quick("abcaba")
    calls = bench.work(failing(RAISED, 1))
    assert calls[:2] == [(0, 1), (1, 1)]
    assert sorted(offset for offset, _ in calls[2:]) == [2, 3, 5]
    assert straight_of(bench) is None
    more(bench, "bc")
    assert bench.handle_all() == [7], "the key that failed waits, and what came behind it"
    bench.live(1.0)
    assert [offset for offset, _ in bench.work()] == [1, 4, 6]
    more(bench, "ab")
    assert straight_of(bench) is not None, "nothing is the matter any more"
    assert bench.handle_all() == [8, 9]
    bench.live(1.0)
    assert bench.committed() == 10


def test_the_attempt_counts() -> None:
    bench = quick("ab")
    bench.work(failing(RAISED, 0))
    bench.live(1.0)
    assert bench.work() == [(0, 2)]


def test_other_keys_do_not_wait_for_a_handler_that_takes_long() -> None:
    bench = quick("aabab")
    slow = bench.job()
    assert slow.next() is not None
    bench.wait(OVERDUE_S)
    bench.settle()
    more(bench, "ca")
    assert sorted(bench.handle_all()) == [2, 4, 5]
    assert [lane.runs_now for lane in bench.state.buffer.lanes.values()] == [True]
    slow.end()
    assert bench.handle_all() == [1, 3, 6]
    bench.live(1.0)
    assert bench.committed() == 7


def test_a_handler_that_takes_long_and_fails_then_is_repeated_before_the_rest_of_its_key() -> None:
    bench = quick("aaba")
    slow = bench.job()
    assert slow.next() is not None
    bench.wait(OVERDUE_S)
    assert bench.handle_all() == [2]
    slow.settle(RAISED)
    slow.end()
    assert bench.handle_all() == []
    bench.live(1.0)
    assert bench.work() == [(0, 2), (1, 1), (3, 1)]


def test_what_was_taken_and_not_begun_when_it_was_spread_is_not_lost() -> None:
    """A worker advances first, and checks for permission afterwards."""
    bench = quick("abab")
    job = bench.job()
    assert job.next() is not None
    lane = straight_of(bench)
    assert lane is not None
    lane.at += 1  # the next message is taken
    bench.core.dispatcher.spread(lane)
    assert bench.handle_all() == [2], "of the key that was taken nothing runs"
    lane.at -= 1  # the message is given back
    job.end()
    assert bench.handle_all() == [1, 3]


def test_a_lane_that_no_worker_has_begun_is_spread_as_a_whole() -> None:
    bench = quick("abab")
    job = bench.job()
    lane = straight_of(bench)
    assert lane is not None
    bench.core.dispatcher.spread(lane)
    assert sorted(bench.handle_all()) == [0, 1, 2, 3]
    assert job.next() is None
    job.end()
    bench.live(1.0)
    assert bench.committed() == 4


def test_a_key_is_parked_out_of_a_straight_lane() -> None:
    bench = quick("abab")
    bench.request(KeyAction.PARK, b"b")
    bench.live(1.0)
    assert straight_of(bench) is None
    assert bench.handle_all() == [0, 2]
    bench.live(1.0)
    assert bench.committed() == 4
    more(bench, "ab")
    assert straight_of(bench) is None, "what comes of a parked key goes to its lot"
    assert bench.handle_all() == [4]


def test_a_request_while_it_runs_waits_for_the_handler_of_its_key() -> None:
    bench = quick("bbab")
    job = bench.job()
    assert job.next() is not None
    bench.request(KeyAction.PARK, b"b")
    bench.live(1.0)
    assert bench.handle_all() == [2]
    assert not bench.state.progress.parking_lots
    job.end()
    bench.live(1.0)
    assert list(bench.state.progress.parking_lots) == [b"b"]
    assert bench.handle_all() == []
    assert bench.committed() == 4


def test_nothing_is_begun_when_the_lease_is_over() -> None:
    bench = quick("abab")
    job = bench.job()
    assert job.next() is not None
    bench.wait(1e6)
    assert job.next() is None
    job.end()
    assert bench.handle_all() == []
    bench.poll()
    assert 0 not in bench.core.partitions or bench.state.lease.stage is not Stage.ACTIVE


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_overdue", [False, True])
def test_a_partition_that_is_taken_away_is_given_back_when_the_running_handler_is_over(
    is_overdue: bool, fails: bool
) -> None:
    bench = quick("abab")
    job = bench.job()
    assert job.next() is not None
    if is_overdue:
        bench.wait(OVERDUE_S)
        bench.poll()
    bench.assign()
    bench.settle()
    assert bench.state.lease.stage is Stage.DRAINING
    if fails:
        job.settle(RAISED)
    assert job.next() is None
    job.end()
    bench.settle()
    assert bench.core.partitions == {}
    assert bench.committed() == (0 if fails else 1)
    assert [one.attempts for one in bench.node.partitions[0].failures.values()] == ([1] if fails else [])


def test_when_handlers_become_slower_what_is_left_gets_lanes_by_key() -> None:
    bench = quick("abcabc")
    bench.chunk = 2
    job = bench.job()
    assert job.next() is not None
    assert job.next() is not None
    job.end()
    assert sorted(bench.state.buffer.lanes, key=str) == [b"a", b"b", b"c"]
    assert sorted(bench.handle_all()) == [2, 3, 4, 5]
