"""A stuck key does not delay other keys until the span is full, and is named then. Changes of concurrency."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from inturn import Blocking, Connection, ConsumerSettings, Context, FlowControl, Message, Result
from inturn.errors import InvalidInput
from tests.contract.bed import STEADY_LEASE, WAIT_S, Bed, Seen, committed, eventually, is_renewed, of_key, quick, send

SPAN = 200


def spanned(**settings: Any) -> ConsumerSettings:
    flow = settings.pop("flow", FlowControl(buffered_count=100, span=SPAN))
    return quick(**{"pull_bytes": 2000, "flow": flow, **settings})


def fill(mq: Connection, count: int = 500) -> None:
    """Send a message of the key "stuck", then messages of other keys, in small batches."""
    send(mq, "line", "stuck:0")
    for start in range(0, count, 20):
        send(mq, "line", *(f"k{number % 25}:{number}" for number in range(start, start + 20)))


class Stuck:
    """Does not return for the key "stuck" until released."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def __call__(self, message: Message, context: Context) -> None:
        if message.key == b"stuck":
            self.let_go.wait(2 * WAIT_S)


def others(seen: Seen) -> int:
    return len({message.offset for message in seen.messages if message.key != b"stuck"})


def test_a_stuck_key_lets_the_others_go_on_until_the_span_and_is_named_then(bed: Bed) -> None:
    """C13."""
    mq = bed.open(flush="os", lease=STEADY_LEASE)
    mq.create_subject("line", 1)
    fill(mq)
    stuck = Stuck()
    seen = Seen(stuck)
    consumer = mq.consumer("line", "g", seen, order="key", settings=spanned())
    with capture_logs() as logs, consumer:
        eventually(lambda: others(seen) >= SPAN - 1, "the others go on up to the span")
        eventually(lambda: consumer.statistics().blocking, "the key is named")
        statistics = consumer.statistics()
        assert statistics.blocking == (Blocking(0, 0, "stuck"),)
        assert statistics.paused == (0,)
        for _ in range(2):
            is_renewed(mq)  # a paused partition keeps the lease
        assert mq.group("line", "g").describe().partitions[0].owner == consumer.name
        assert others(seen) < SPAN + 60, "the span, and what one pull brings"
        stuck.let_go.set()
        eventually(lambda: committed(mq) == 501, "then all of them")
        assert consumer.statistics().blocking == ()
    events = [event for event in logs if event["event"] == "consumer.paused_by_key"]
    assert [(one["key"], one["partition"], one["offset"], one["group"]) for one in events] == [("stuck", 0, 0, "g")]
    assert events[0]["log_level"] == "warning"
    assert len(seen.messages) == 501


def test_a_failing_key_that_fills_the_span_is_named_by_keys_too(line: Connection) -> None:
    """C13."""
    fill(line)
    is_mended = threading.Event()

    def fail(message: Message, context: Context) -> None:
        if message.key == b"stuck" and not is_mended.is_set():
            raise RuntimeError("no connection")

    seen = Seen(fail)
    consumer = line.consumer("line", "g", seen, order="key", settings=spanned(backoff_min_s=0.05, backoff_max_s=0.05))
    with capture_logs() as logs, consumer:
        eventually(lambda: consumer.statistics().blocking, "the span is full")
        assert consumer.statistics().blocking == (Blocking(0, 0, "stuck"),)
        eventually(lambda: line.group("line", "g").keys(), "its failure is known")
        (found,) = line.group("line", "g").keys()
        assert (found.key, found.state, found.offset) == (b"stuck", "failing", 0)
        assert consumer.statistics().failing_count == 1
        is_mended.set()
        eventually(lambda: committed(line) == 501, "then all of them")
    assert len([event for event in logs if event["event"] == "consumer.paused_by_key"]) == 1


def test_messages_behind_a_stuck_one_do_not_fill_the_buffer_of_the_others(line: Connection) -> None:
    """C13: more messages wait behind the stuck message than flow control allows in the buffer."""
    send(line, "line", "stuck:first")
    for start in range(0, 300, 20):
        send(line, "line", *(f"stuck:{number}" for number in range(start, start + 20)))
    send(line, "line", *(f"k{number}:{number}" for number in range(50)))
    stuck = Stuck()
    seen = Seen(stuck)
    settings = spanned(flow=FlowControl(buffered_count=50, span=10_000))
    with line.consumer("line", "g", seen, order="key", settings=settings):
        eventually(lambda: others(seen) == 50, "the others")
        assert of_key(seen.messages, "stuck") == ["first"]
        stuck.let_go.set()
        eventually(lambda: committed(line) == 351, "all of them")


@pytest.mark.usefixtures("quiet")
def test_a_parked_key_does_not_fill_the_span(line: Connection) -> None:
    """C13."""

    def fail(message: Message, context: Context) -> None:
        if message.key == b"stuck":
            raise RuntimeError("no connection")

    fill(line)
    seen = Seen(fail)
    settings = spanned(max_attempts=2, on_exhausted="park")
    with line.consumer("line", "g", seen, order="key", settings=settings):
        eventually(lambda: committed(line) == 501, "all of them")
    assert others(seen) == 500


def test_a_stuck_key_of_one_partition_does_not_pause_another(mq: Connection) -> None:
    """C13."""
    mq.create_subject("two", 2, routing="selector")
    with mq.producer() as producer:
        for number in range(800):
            key = "stuck" if number == 0 else f"k{number % 20}"
            producer.send("two", b"%d" % number, key=key, selector=lambda partitions, *_, at=number % 2: at)
            if number % 20 == 0:
                producer.flush(WAIT_S)
    stuck = Stuck()
    seen = Seen(stuck)
    consumer = mq.consumer("two", "g", seen, order="key", settings=spanned())
    with consumer:
        eventually(lambda: committed(mq, subject="two") == 400, "the other partition")
        assert [one.committed for one in mq.group("two", "g").describe().partitions] == [0, 400]
        eventually(lambda: consumer.statistics().blocking, "the first is paused")
        assert {one.partition for one in consumer.statistics().blocking} == {0}
        stuck.let_go.set()
        eventually(lambda: committed(mq, subject="two") == 800, "all of them")


def test_flow_control_of_manual_acknowledgement_names_the_key_that_does_not_commit(line: Connection) -> None:
    """C13."""
    fill(line)
    commit = threading.Event()

    def handle(message: Message, context: Context) -> Result:
        return Result.SUCCESS if message.key == b"stuck" and not commit.is_set() else Result.COMMIT

    seen = Seen(handle)
    consumer = line.consumer("line", "g", seen, order="key", settings=spanned(ack="manual"))
    with consumer:
        eventually(lambda: consumer.statistics().blocking == (Blocking(0, 0, "stuck"),), "it is named")


# C16: concurrency while running


class Running:
    """Counts running handlers. Every handler waits until the test says so."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._may_go = 0
        self.now = self.most = 0

    def __call__(self, message: Message, context: Context) -> None:
        with self._changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self._changed.wait_for(lambda: self._may_go > 0, 2 * WAIT_S)
            self._may_go -= 1
            self.now -= 1

    def let_go(self, count: int) -> None:
        with self._changed:
            self._may_go += count
            self._changed.notify_all()


def test_threads_come_and_go_while_it_runs(line: Connection) -> None:
    """C16."""
    running = Running()
    send(line, "line", *(f"k{number}:x" for number in range(100)))
    consumer = line.consumer("line", "g", running, order="key", settings=quick(concurrency=2))
    with consumer:
        try:
            eventually(lambda: running.now == 2, "two")
            consumer.concurrency = 12
            assert consumer.concurrency == 12
            assert consumer.statistics().concurrency == 12
            eventually(lambda: running.now == 12, "twelve")
            consumer.concurrency = 3
            running.let_go(9)
            eventually(lambda: running.now == 3, "three, when the others have ended")
            time.sleep(0.1)
            assert running.now == 3
            running.let_go(3)
            eventually(lambda: running.now == 3, "still three")
            consumer.concurrency = 5
            eventually(lambda: running.now == 5, "five")
        finally:
            running.let_go(1000)
        eventually(lambda: committed(line) == 100, "all of them")
    assert running.most == 12


def test_tasks_come_and_go_while_it_runs(line: Connection) -> None:
    """C16."""
    running = 0
    may_go = 0

    async def handle(message: Message, context: Context) -> None:
        nonlocal running, may_go
        running += 1
        while may_go <= 0:
            await asyncio.sleep(0.001)
        may_go -= 1
        running -= 1

    send(line, "line", *(f"k{number}:x" for number in range(200)))
    consumer = line.consumer("line", "g", handle, order="key", settings=quick(concurrency=2))
    with consumer:
        try:
            eventually(lambda: running == 2, "two")
            consumer.concurrency = 50
            eventually(lambda: running == 50, "fifty")
            consumer.concurrency = 4
            may_go = 46
            eventually(lambda: running == 4, "four, when the others have ended")
            time.sleep(0.1)
            assert running == 4
            consumer.concurrency = 10
            eventually(lambda: running == 10, "ten")
        finally:
            may_go = 1000
        eventually(lambda: committed(line) == 200, "all of them")


def test_changes_under_load_keep_the_order(line: Connection) -> None:
    """C16."""
    seen = Seen(lambda message, context: time.sleep(0.001))
    send(line, "line", *(f"k{number % 30}:{number}" for number in range(900)))
    consumer = line.consumer("line", "g", seen, order="key", settings=quick(concurrency=1))
    with consumer:
        for count in (8, 1, 16, 2, 30, 1, 12):
            consumer.concurrency = count
            time.sleep(0.02)
        eventually(lambda: committed(line) == 900, "all of them")
    for key in range(30):
        assert of_key(seen.messages, f"k{key}") == [str(number) for number in range(key, 900, 30)]


def test_a_concurrency_that_makes_no_sense_is_refused(line: Connection) -> None:
    """C16."""
    consumer = line.consumer("line", "g", Seen(), order="key", settings=quick(concurrency=2))
    for wrong in (0, -1, 1.5, "many", None, True):
        with pytest.raises(InvalidInput, match="concurrency"):
            consumer.concurrency = wrong  # type: ignore[assignment]
    assert consumer.concurrency == 2


def test_it_may_be_changed_before_the_start_and_after_the_stop(line: Connection) -> None:
    """C16."""
    running = Running()
    send(line, "line", *(f"k{number}:x" for number in range(6)))
    consumer = line.consumer("line", "g", running, order="key", settings=quick(concurrency=1))
    consumer.concurrency = 6
    with consumer:
        eventually(lambda: running.now == 6, "six")
        running.let_go(6)
    consumer.concurrency = 3
    assert consumer.concurrency == 3


def test_the_lag_does_not_count_what_is_finished_behind_a_key_that_hangs(mq: Connection) -> None:
    """C7."""
    mq.create_subject("line", 1)
    send(mq, "line", "stuck:0", *(f"k{number}:0" for number in range(9)))
    ends = threading.Event()

    def handle(message: Message, context: Context) -> None:
        if message.key == b"stuck":
            ends.wait(2 * WAIT_S)

    seen = Seen(handle)
    with mq.consumer("line", "g", seen, order="key", settings=quick()):
        seen.wait_for(10)
        eventually(lambda: mq.group("line", "g").describe().partitions[0].lag == 1, "only the one that hangs")
        assert mq.group("line", "g").describe().partitions[0].committed == 0
        ends.set()
        eventually(lambda: mq.group("line", "g").describe().partitions[0].lag == 0, "all are done")
