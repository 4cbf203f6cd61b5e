"""The producer with the thread, against a node that answers when the test says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from inturn.model.errors import BufferFull, Closed, DiskFull, SendTimeout
from inturn.model.settings import ProducerSettings
from inturn.model.time import SystemClock
from inturn.producer import send_batch as flight_module
from inturn.producer.producer import Producer
from inturn.producer.send_batch import SendBatch
from inturn.protocol.commands import Append, Command, FindSubject, OpenProducer, ProducerOpened, Reply
from tests.producer.fake_log import FakeLog, key_for, some_subject


class FakeNode:
    """Never answers for the partitions in `silent`. `open_up` sends the withheld answers."""

    def __init__(self, partitions: int = 2) -> None:
        self.subject = some_subject(partitions)
        self.logs = [FakeLog(f"p{index}") for index in range(partitions)]
        self.silent: set[int] = set()
        self.failures: list[DiskFull] = []
        self._held: list[tuple[Append, Reply]] = []
        self._lock = threading.Lock()

    def submit(self, command: Command, reply: Reply) -> None:
        match command:
            case OpenProducer():
                reply(ProducerOpened(7, 0))
            case FindSubject():
                reply(self.subject)
            case Append():
                with self._lock:
                    if command.partition in self.silent:
                        self._held.append((command, reply))
                        return
                    answer = self.failures.pop() if self.failures else self.logs[command.partition].append(command)
                reply(answer)

    def open_up(self) -> None:
        with self._lock:
            self.silent.clear()
            held, self._held = self._held, []
            answers = [(reply, self.logs[command.partition].append(command)) for command, reply in held]
        for reply, answer in answers:
            reply(answer)


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def new_producer(node: FakeNode):
    made: list[Producer] = []

    def make(**settings: object) -> Producer:
        made.append(Producer(node, SystemClock(), ProducerSettings(**settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    node.open_up()
    for producer in made:
        producer.close(40.0)


NewProducer = Callable[..., Producer]


def test_a_slow_partition_does_not_hold_up_another(node: FakeNode, new_producer: NewProducer) -> None:
    """P6."""
    node.silent = {0}
    producer = new_producer(in_flight=1)
    slow = [producer.send("orders", b"", key=key_for(node.subject, 0)) for _ in range(100)]
    for number in range(100):
        assert producer.send_sync("orders", b"", key=key_for(node.subject, 1), timeout_s=40).offset == number
    assert not any(handle.done for handle in slow)


def test_a_full_buffer_makes_send_wait_until_there_is_room(node: FakeNode, new_producer: NewProducer) -> None:
    node.silent = {0, 1}
    producer = new_producer(buffer_bytes=500, buffer_wait_s=60.0)
    for _ in range(4):
        producer.send("orders", b"x" * 100, key="k")
    waiting = threading.Event()
    sent: list[object] = []

    def send_one_more() -> None:
        waiting.set()
        sent.append(producer.send("orders", b"last", key="k"))

    thread = threading.Thread(target=send_one_more)
    thread.start()
    waiting.wait()
    thread.join(0.05)
    assert sent == []
    node.open_up()
    thread.join(40)
    assert len(sent) == 1
    producer.flush(40)


def test_a_buffer_that_stays_full_is_an_error_that_names_the_setting(node: FakeNode, new_producer: NewProducer) -> None:
    node.silent = {0, 1}
    producer = new_producer(buffer_bytes=100, buffer_wait_s=0.02)
    producer.send("orders", b"x" * 100, key="k")
    with pytest.raises(BufferFull, match="buffer_bytes") as caught:
        producer.send("orders", b"y", key="k")
    assert caught.value.retriable
    node.open_up()
    producer.flush(40)
    assert sum(len(log.bodies) for log in node.logs) == 1


def test_a_synchronous_send_that_times_out_stays_queued(node: FakeNode, new_producer: NewProducer) -> None:
    """P3."""
    node.silent = {0, 1}
    producer = new_producer()
    with pytest.raises(SendTimeout, match="may still be stored"):
        producer.send_sync("orders", b"a", key="k", timeout_s=0.02)
    node.open_up()
    producer.flush(40)
    assert [log.bodies for log in node.logs if log.bodies] == [[b"a"]]


def test_failures_that_pass_are_not_seen_by_the_caller(node: FakeNode, new_producer: NewProducer) -> None:
    """P4, P7."""
    node.failures = [DiskFull("p") for _ in range(3)]
    producer = new_producer(backoff_min_s=0.001)
    handles = [producer.send("orders", b"%d" % number, key="k") for number in range(50)]
    assert [handle.result(40).offset for handle in handles] == list(range(50))


def test_a_closed_producer_says_so(node: FakeNode, new_producer: NewProducer) -> None:
    producer = new_producer()
    producer.close()
    producer.close()
    for send in (producer.send, producer.send_sync):
        with pytest.raises(Closed, match="producer is closed"):
            send("orders", b"", key="k")


def test_closing_with_a_time_fails_what_was_not_acknowledged(node: FakeNode, new_producer: NewProducer) -> None:
    node.silent = {0, 1}
    producer = new_producer()
    handle = producer.send("orders", b"a", key="k")
    with pytest.raises(SendTimeout):
        producer.close(0.02)
    with pytest.raises(Closed):
        handle.result(1)


def test_two_threads_that_wait_for_one_flight_are_both_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: messages of two threads can share a batch. Here both threads create the event at the same moment."""
    both_inside, first_waits = threading.Barrier(2), threading.Event()
    real = threading.Event

    def slow_event() -> threading.Event:
        with contextlib.suppress(threading.BrokenBarrierError):
            if both_inside.wait(0.1) == 1:
                first_waits.wait(0.05)  # long enough for the second thread to continue with a separate event
        return real()

    shared = SendBatch("orders", 0)
    over: list[bool] = []
    threads = [threading.Thread(target=lambda: over.append(shared.wait(40.0))) for _ in range(2)]
    monkeypatch.setattr(flight_module, "threading", SimpleNamespace(Event=slow_event))
    for thread in threads:
        thread.start()
    threads[0].join(0.25)
    assert over == []
    shared.finish(0)
    for thread in threads:
        thread.join(20)
    assert over == [True, True]
    for thread in threads:
        thread.join()
