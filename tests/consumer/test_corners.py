"""Corner cases of two events at once: moving and handing over, skipping and reading, failing and draining."""

from __future__ import annotations

import threading
import time

import pytest

from inturn.consumer.outcome import KEEP
from inturn.consumer.worker_threads import WorkerThreads
from inturn.model.errors import InvalidInput
from inturn.model.settings import FlowControl, KeyAction, OnExhausted, Order, Strategy
from inturn.protocol.commands import Move
from tests.consumer.fake_node import Bench, failing
from tests.consumer.test_dispatcher import MOVED, RAISED, SUSPENDED, keyed
from tests.consumer.test_forgetting import end_runs, partitions_in_memory
from tests.consumer.test_parking import ask, lot, parked


def test_an_empty_pull_makes_no_lane() -> None:
    """All messages of a batch were finished already: an empty lane would stand beside the real lane."""
    bench = Bench(order=Order.PARTITION)
    bench.store(0, 3)
    bench.settle()
    dispatcher, state = bench.core.dispatcher, bench.state
    dispatcher.offer(state, [])
    dispatcher.offer(state, [])
    first = bench.job()
    assert first.next() is not None
    assert bench.take() is None, "one handler at a time"


def test_a_batch_has_only_messages_that_were_tried_as_often() -> None:
    """Otherwise later messages would be given up together with the failed message."""
    bench = keyed("a", batch=10, max_attempts=3, on_exhausted=OnExhausted.DEAD_LETTER)
    for _ in range(2):
        job = bench.job(10)
        assert job.next_batch() is not None
        job.settle(RAISED)
        job.end()
        bench.live(1.0)
    bench.store_keys("aaaa")
    bench.settle()
    job = bench.job(10)
    assert [message.offset for message in job.next_batch() or ()] == [0]
    job.settle(RAISED)
    job.end()
    bench.live(1.0)
    assert [move.batch.count for move in bench.node.moves] == [1]
    job = bench.job(10)
    assert [message.offset for message in job.next_batch() or ()] == [1, 2, 3, 4]


def test_a_lot_message_that_is_being_moved_leaves_the_lot_though_its_partition_is_given_back() -> None:
    bench = parked("aa", max_attempts=1, on_exhausted=OnExhausted.DEAD_LETTER)
    ask(bench, KeyAction.RESUME)
    bench.work(failing(RAISED, 0))
    bench.settle(Move)
    bench.core.stop(bench.now_s)
    bench.settle(Move)
    assert lot(bench).offsets == [0, 1], "not safe yet"
    bench.settle()
    assert bench.core.is_stopped
    assert [move.batch.count for move in bench.node.moves] == [1]
    assert lot(bench).offsets == [1]


def test_a_message_that_is_skipped_before_it_is_read_does_not_run() -> None:
    """The read is sent before the commit that removes the message."""
    bench = parked("aaaa", rows_max=2)
    ask(bench, KeyAction.RESUME)
    job = bench.job()
    for offset in (0, 1):
        message = job.next()
        assert message is not None
        assert message.offset == offset
    bench.request(KeyAction.SKIP, b"a", 2)
    job.end()
    bench.live(1.0)
    assert bench.handle_all() == [3]
    bench.live(1.0)
    assert bench.node.partitions[0].lots == {}


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_handler_that_fails_while_its_partition_drains_leaves_nothing_in_memory(is_parked: bool) -> None:
    before = partitions_in_memory()
    for _ in range(5):
        bench = parked("aab") if is_parked else keyed("aab")
        if is_parked:
            ask(bench, KeyAction.RESUME)
        job = bench.job()
        assert job.next() is not None
        bench.core.stop(bench.now_s)
        bench.settle()
        job.settle(SUSPENDED)
        end_runs(bench)
        bench.settle()
        assert bench.core.is_stopped
        del bench, job
    assert partitions_in_memory() <= before


def test_many_messages_are_moved_without_making_everybody_wait() -> None:
    count = 5000
    bench = Bench(order=Order.NONE, strategy=Strategy.BEST_EFFORT)
    bench.store(0, count)
    bench.settle()
    bench.work(lambda message, context: MOVED)
    began_s = time.process_time()
    bench.settle()
    assert time.process_time() - began_s < 5.0, "each is looked at once, not as often as there are others"
    bench.live(1.0)
    assert sum(move.batch.count for move in bench.node.moves) == count
    assert bench.committed() == count


def test_what_a_stuck_key_waits_for_is_named_though_a_lot_with_older_messages_runs() -> None:
    bench = parked("ab", flow=FlowControl(span=20))
    ask(bench, KeyAction.RESUME)
    lot_job = bench.job()
    assert lot_job.next() is not None
    bench.store_keys("b")
    bench.settle()
    stuck = bench.job()
    assert stuck.next() is not None
    for _ in range(6):
        bench.store_keys("cdefg")
        bench.settle()
        bench.work()
        bench.live(0.5)
    (head,) = bench.core.blocking().values()
    assert head.key == b"b"


def test_big_messages_behind_a_stuck_key_do_not_stop_the_others_at_once() -> None:
    bench = keyed("a", flow=FlowControl(buffered_bytes=1000))
    job = bench.job()
    assert job.next() is not None
    bench.store_keys("aaaaaaaaaaaa", body=b"x" * 100)
    bench.settle()
    bench.live(2.0)
    bench.store_keys("b")
    bench.settle()
    assert bench.handle_all() == [13], "the other key is pulled and runs"
    for _ in range(5):
        bench.store_keys("aaaaaaaaaaaa", body=b"x" * 100)
        bench.live(1.0)
    assert bench.state.buffer.is_paused
    (head,) = bench.core.blocking().values()
    assert (head.key, head.offset) == (b"a", 0)


def test_a_message_on_its_own_becomes_a_dead_letter_whatever_was_chosen() -> None:
    """No operator could resume the message: key requests name a key."""
    bench = keyed("-a", max_attempts=1, on_exhausted=OnExhausted.BLOCK)
    bench.work(failing(RAISED, 0, 1))
    bench.live(1.0)
    assert [move.to_subject for move in bench.node.moves] == ["%dead%billing%orders"]
    assert bench.committed() == 1, "the one with a key is blocked"


def test_the_span_is_limited_by_what_can_be_committed() -> None:
    with pytest.raises(InvalidInput, match="4000000"):
        FlowControl(span=50_000_000)


def test_kept_messages_are_not_named_as_failed() -> None:
    bench = keyed("ab", ack="manual")
    bench.work(lambda message, context: KEEP)
    bench.live(1.0)
    assert bench.node.partitions[0].failures == {}


def test_handlers_that_hang_do_not_keep_others_from_running_while_the_process_is_busy() -> None:
    """The count is of handlers that make progress, not of handlers that have started."""
    room = [0]
    lock = threading.Lock()
    workers = WorkerThreads("test", 4, lock, lambda run, takes: None, None, lambda now_s, cores: room[0])  # type: ignore[arg-type]
    workers._is_saturated, workers._looked_at_s = True, float("inf")
    workers.start()
    deadline_s = time.monotonic() + 40
    while workers._waiting < 4 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with lock:
        workers.wake(4)
        assert workers._woken == 0, "as many get on as can compute"
        room[0] = 1
        workers.wake(4)
        assert workers._woken == 1
        workers.end()
    workers.join()
