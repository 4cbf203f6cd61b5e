"""Earlier bugs: busy loops, lost answers, dying threads, full disks, wrong input."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Any

import pytest

import inturn
from inturn import (
    Connection,
    ConsumerSettings,
    Context,
    Hook,
    InturnError,
    LeaseSettings,
    LogSettings,
    Message,
    ProducerSettings,
    Result,
    RetryDelays,
)
from inturn.consumer.core import ConsumerCore
from inturn.errors import InvalidInput, LogDamaged, NotFound, ProducerError, ProducerFenced, StorageError
from inturn.producer.core import ProducerCore
from inturn.protocol.commands import Answer, Append, Command, Move, Node, Release, Reply
from tests.contract.bed import WAIT_S, Bed, Seen, eventually, flip_byte_of, quick, send_all, waits_because

SOON_S = 10.0  # a bug delays by at least WAIT_S


@pytest.fixture
def line(mq: Connection) -> Connection:
    """With the subject "line" of a single partition."""
    mq.create_subject("line", partitions=1)
    return mq


def send_line(mq: Connection, *bodies: bytes) -> None:
    with mq.producer() as producer:
        for body in bodies:
            producer.send("line", body, key="k")


def committed(mq: Connection, group: str = "g", subject: str = "line") -> int:
    try:
        return sum(one.committed for one in mq.group(subject, group).describe().partitions)
    except NotFound:
        return 0  # no member has joined yet


def took_s(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


Submit = Callable[[Command, Reply], None]


class Between:
    """Stands before a node: commands of the given kind go to `instead`, other commands go to the node."""

    def __init__(self, node: Node, kind: type[Command], instead: Callable[[Any, Reply, Submit], None]) -> None:
        self._real = node.submit
        self._kind = kind
        self._instead = instead
        self.count = 0

    def submit(self, command: Command, reply: Reply) -> None:
        if isinstance(command, self._kind):
            self.count += 1
            self._instead(command, reply, self._real)
        else:
            self._real(command, reply)


def put_between(
    monkeypatch: pytest.MonkeyPatch,
    mq: Connection,
    kind: type[Command],
    instead: Callable[[Any, Reply, Submit], None],
) -> Between:
    between = Between(mq.node, kind, instead)
    monkeypatch.setattr(mq.node, "submit", between.submit)
    return between


# Busy loops


def test_a_handler_that_blocks_does_not_keep_its_consumer_busy(
    line: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = 0
    real = ConsumerCore.poll

    def poll(core: ConsumerCore, now_s: float) -> list[Command]:
        nonlocal polls
        polls += 1
        return real(core, now_s)

    monkeypatch.setattr(ConsumerCore, "poll", poll)
    go_on = threading.Event()
    seen = Seen(lambda message, context: go_on.wait(WAIT_S) and None)
    send_line(line, b"0", b"1", b"2")
    # Heartbeats wake the consumer meanwhile.
    with line.consumer("line", "g", seen, settings=quick(commit_interval_s=0.1)):
        try:
            seen.wait_for(1)
            before = polls
            time.sleep(0.5)
            during = polls - before
        finally:
            go_on.set()
    assert during < 100


def test_what_a_slow_handler_has_done_is_committed_while_it_goes_on(line: Connection) -> None:
    go_on = threading.Event()

    def handle(message: Message, context: Context) -> None:
        time.sleep(0.1)
        if message.offset == 2:
            go_on.wait(2 * WAIT_S)

    seen = Seen(handle)
    send_line(line, *(b"%d" % number for number in range(4)))
    with line.consumer("line", "g", seen):
        try:
            eventually(lambda: committed(line) == 2, "both are committed")
        finally:
            go_on.set()


def test_a_release_that_fails_is_sent_again_after_a_pause(line: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = put_between(
        monkeypatch, line, Release, lambda command, reply, real: reply(StorageError("state", "I/O error"))
    )
    seen = Seen()
    send_line(line, b"0")
    consumer = line.consumer("line", "g", seen, settings=quick())
    consumer.start()
    seen.wait_for(1)
    stopping = threading.Thread(target=consumer.stop, args=(2 * WAIT_S,))
    stopping.start()
    eventually(lambda: refused.count, "it is sent")
    time.sleep(0.5)
    assert 1 <= refused.count < 10
    consumer.kill()
    stopping.join(WAIT_S)


# Answers that are lost or late


@pytest.mark.parametrize("what", ["append", "answer"])
def test_a_synchronous_send_whose_answer_is_lost_is_sent_again_and_stored_once(
    line: Connection, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def lose_first(command: Append, reply: Reply, real: Submit) -> None:
        if appends.count > 1:
            real(command, reply)
        elif what == "answer":
            real(command, lambda answer: None)

    appends = put_between(monkeypatch, line, Append, lose_first)
    with line.producer(settings=ProducerSettings(answer_timeout_s=0.2)) as producer:
        began_s = time.monotonic()
        stored = producer.send_sync("line", b"once", key="k", timeout_s=WAIT_S)
        assert time.monotonic() - began_s < SOON_S
        assert stored.offset == 0
        assert producer.send_sync("line", b"next", key="k", timeout_s=WAIT_S).offset == 1
    assert [message.body for message in line.reader("line")] == [b"once", b"next"]


def fails_in_line(message: Message, context: Context) -> None:
    if message.subject == "line" and message.body == b"bad":
        raise RuntimeError("not now")


def loose(**settings: Any) -> ConsumerSettings:
    return quick(strategy="best-effort", **settings)


def test_a_partition_goes_on_when_the_answer_to_a_retry_comes_later_than_it_is_waited_for(
    line: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[threading.Timer] = []

    def delay(command: Move, reply: Reply, real: Submit) -> None:
        def late(answer: Answer | InturnError) -> None:
            timers.append(threading.Timer(0.5, reply, (answer,)))
            timers[-1].start()

        real(command, late)

    put_between(monkeypatch, line, Move, delay)
    seen = Seen(fails_in_line)
    send_line(line, b"bad", b"good")
    settings = loose(answer_timeout_s=0.2, retry=RetryDelays((60.0,), first_level=0))
    with line.consumer("line", "g", seen, settings=settings):
        eventually(lambda: committed(line) == 2, "the partition goes on behind the failed one")
    for timer in timers:
        timer.join()
    assert seen.bodies == [b"bad", b"good"]
    assert {message.body for message in line.reader("%retry%g%line")} == {b"bad"}


@pytest.mark.parametrize("held_back", ["command", "answer"])
def test_a_graceful_stop_neither_repeats_nor_loses_what_is_on_its_way_to_the_retry_subject(
    line: Connection, monkeypatch: pytest.MonkeyPatch, held_back: str
) -> None:
    on_its_way = threading.Event()
    go_on: list[Callable[[], None]] = []

    def hold(command: Move, reply: Reply, real: Submit) -> None:
        if held_back == "command":
            go_on.append(lambda: real(command, reply))
            on_its_way.set()
        else:

            def keep(answer: Answer | InturnError) -> None:
                go_on.append(lambda: reply(answer))
                on_its_way.set()

            real(command, keep)

    put_between(monkeypatch, line, Move, hold)
    send_line(line, b"bad")
    first = Seen(fails_in_line)
    consumer = line.consumer("line", "g", first, settings=loose(retry=RetryDelays((60.0,), first_level=0)))
    consumer.start()
    assert on_its_way.wait(WAIT_S)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(consumer.stop(WAIT_S)))
    stopping.start()
    eventually(lambda: not consumer.leases(), "the stop has begun")
    for one in go_on:
        one()
    stopping.join()
    monkeypatch.undo()
    assert stopped == [True]
    assert committed(line) == 1
    assert [message.body for message in line.reader("%retry%g%line")] == [b"bad"]
    second = Seen()
    with line.consumer("line", "g", second, settings=loose(retry=RetryDelays((0.05,), first_level=0))):
        second.wait_for(1)
        eventually(lambda: committed(line, subject="%retry%g%line") == 1, "the retry is committed")
    assert first.bodies == second.bodies == [b"bad"]
    assert second.messages[0].subject == "%retry%g%line"


# Threads


def test_a_consumer_whose_thread_fails_says_so_and_can_be_stopped(
    line: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(core: ConsumerCore, now_s: float) -> list[Command]:
        raise RuntimeError("a mistake in poll")

    monkeypatch.setattr(ConsumerCore, "poll", poll)
    consumer = line.consumer("line", "g", Seen(), settings=quick())
    consumer.start()
    with pytest.raises(InturnError, match="a mistake in poll"):
        consumer.wait(WAIT_S)
    assert "a mistake in poll" in str(consumer.error)
    assert took_s(consumer.stop) < SOON_S
    assert consumer.is_over


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_hook_that_exits_ends_no_worker(line: Connection, where: str) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(1)

    hook = Hook()
    setattr(hook, where, leave)
    seen = Seen()
    send_line(line, b"0", b"1", b"2")
    with line.consumer("line", "g", seen, settings=quick(concurrency=1), hooks=[hook]):
        eventually(lambda: committed(line) == 3, "all is committed")
    assert seen.bodies == [b"0", b"1", b"2"]


@pytest.mark.parametrize("how", ["send", "send_sync"])
def test_a_producer_whose_thread_fails_leaves_nobody_waiting(
    line: Connection, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    producer = line.producer()
    producer.send_sync("line", b"before", key="k")

    def poll(core: ProducerCore, now_s: float) -> list[object]:
        raise RuntimeError("a mistake in poll")

    monkeypatch.setattr(ProducerCore, "poll", poll)
    began_s = time.monotonic()
    if how == "send":
        with pytest.raises(InturnError, match="a mistake in poll"):
            producer.send("line", b"x", key="k").result(WAIT_S)
    else:
        with pytest.raises((InturnError, RuntimeError), match="a mistake in poll"):
            producer.send_sync("line", b"x", key="k", timeout_s=WAIT_S)
    with contextlib.suppress(InturnError):
        producer.close(WAIT_S)
    assert time.monotonic() - began_s < SOON_S
    with pytest.raises(InturnError):
        producer.send("line", b"x", key="k").result(WAIT_S)


def test_stop_inside_a_handler_returns_at_once_and_the_consumer_stops_afterwards(line: Connection) -> None:
    waited_s: list[float] = []
    seen = Seen(lambda message, context: waited_s.append(took_s(consumer.stop)))
    consumer = line.consumer("line", "g", seen, settings=quick())
    send_line(line, b"0")
    consumer.start()
    assert consumer.wait(WAIT_S)
    assert waited_s[0] < SOON_S
    assert consumer.is_over
    assert consumer.error is None
    assert committed(line) == 1
    assert line.group("line", "g").describe().partitions[0].owner is None


def test_stop_inside_a_handler_of_a_retry_lets_that_handler_commit(line: Connection) -> None:
    waited_s: list[float] = []

    def handle(message: Message, context: Context) -> None:
        fails_in_line(message, context)
        waited_s.append(took_s(consumer.stop))

    consumer = line.consumer("line", "g", handle, settings=loose(retry=RetryDelays((0.05,), first_level=0)))
    send_line(line, b"bad")
    consumer.start()
    assert consumer.wait(WAIT_S)
    eventually(lambda: waited_s, "the handler returned")
    assert waited_s[0] < SOON_S
    eventually(lambda: committed(line, subject="%retry%g%line") == 1, "the retry is committed", timeout_s=SOON_S)
    eventually(
        lambda: all(one.owner is None for one in line.group("%retry%g%line", "g").describe().partitions),
        "the lease of the retry subject is free",
        timeout_s=SOON_S,  # an unreleased lease would live for 15 s
    )


def test_stop_inside_a_handler_does_not_wait_for_a_retry_that_is_being_handled(line: Connection) -> None:
    retrying, go_on = threading.Event(), threading.Event()
    waited_s: list[float] = []

    def handle(message: Message, context: Context) -> None:
        fails_in_line(message, context)
        if message.body == b"bad":
            retrying.set()
            go_on.wait(WAIT_S)
        else:
            waited_s.append(took_s(lambda: consumer.stop(WAIT_S)))

    consumer = line.consumer("line", "g", handle, settings=loose(retry=RetryDelays((0.05,), first_level=0)))
    send_line(line, b"bad")
    with consumer:
        assert retrying.wait(WAIT_S)
        send_line(line, b"stop")
        try:
            eventually(lambda: waited_s, "the handler returned")
        finally:
            go_on.set()
        assert consumer.wait(WAIT_S)
    assert waited_s[0] < SOON_S


def test_the_statistics_of_a_connection_are_those_of_the_consumers_that_run(line: Connection) -> None:
    assert line.statistics() == []
    seen = Seen()
    send_line(line, b"0", b"1")
    with line.consumer("line", "g", seen, settings=quick()):
        seen.wait_for(2)
        eventually(lambda: line.statistics()[0].ok_count == 2, "both are counted")
        (statistics,) = line.statistics()
        assert statistics.partitions == (0,)
        eventually(lambda: line.statistics()[0].lag == 0, "nothing is left")
    assert line.statistics() == []


# Manual acknowledgement


def test_ack_and_success_together_commit(line: Connection) -> None:
    def handle(message: Message, context: Context) -> Result:
        context.ack()
        return Result.SUCCESS

    send_line(line, b"0", b"1", b"2")
    with line.consumer("line", "g", handle, settings=quick(ack="manual")):
        eventually(lambda: committed(line) == 3, "all is committed")


def test_nothing_acknowledged_waits_for_a_commit_if_something_before_it_does(line: Connection) -> None:
    answers = {b"0": Result.SUCCESS, b"1": Result.SUCCESS, b"2": None, b"3": Result.COMMIT}
    seen = Seen(lambda message, context: answers[message.body])
    send_line(line, b"0", b"1", b"2")
    with line.consumer("line", "g", seen, settings=loose(ack="manual")):
        seen.wait_for(3)
        time.sleep(0.2)  # twenty times as long as between two commits
        assert committed(line) == 0
        send_line(line, b"3")
        eventually(lambda: committed(line) == 4, "the commit takes all before it along")
    assert seen.bodies == [b"0", b"1", b"2", b"3"]


def test_nothing_acknowledged_goes_on_and_commits_if_nothing_waits_for_a_commit(line: Connection) -> None:
    seen = Seen()
    send_line(line, b"0", b"1")
    with line.consumer("line", "g", seen, settings=loose(ack="manual")):
        eventually(lambda: committed(line) == 2, "both are committed")
    assert seen.bodies == [b"0", b"1"]


# Errors as objects


def depth(traceback: TracebackType | None) -> int:
    return 0 if traceback is None else 1 + depth(traceback.tb_next)


def fenced_producer(mq: Connection) -> inturn.Producer:
    producer = mq.producer("ledger")
    mq.producer("ledger")
    return producer


def test_the_result_of_a_failed_send_raises_an_error_of_its_own_each_time(line: Connection) -> None:
    producer = fenced_producer(line)
    handle = producer.send("line", b"x", key="k")
    calls: list[Callable[[], object]] = [
        lambda: handle.result(WAIT_S),
        lambda: producer.send("line", b"x", key="k"),
    ]
    for call in calls:
        errors: list[ProducerFenced] = []
        for _ in range(20):
            with pytest.raises(ProducerFenced) as caught:
                call()
            errors.append(caught.value)
        assert len({id(error) for error in errors}) == 20
        assert len({str(error) for error in errors}) == 1
        assert {(error.producer, error.current - error.epoch) for error in errors} == {("ledger", 1)}
        assert len({depth(error.__traceback__) for error in errors}) == 1
    kept = handle._batch.error
    assert kept is not None
    assert depth(kept.__traceback__) <= 4  # the frames of the node; raising the error again adds none


def example_of(kind: type[InturnError]) -> InturnError:
    values: dict[str, object] = {
        "str": "text",
        "int": 7,
        "float": 1.5,
        "object": [1],
        "int | None": 8,
        "str | None": "why",
        "Sequence[str]": ("a", "b"),
        "tuple[int, int]": (1, 2),
        "tuple[int, ...]": (1, 2, 3),
    }
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return kind("a message")  # the error has no parameters of the class
    return kind(*(values[str(one.annotation)] for one in parameters))


@pytest.mark.parametrize("name", inturn.errors.__all__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_every_error_can_be_copied_and_pickled_with_its_fields(name: str, again: Callable[[Any], Any]) -> None:
    error = example_of(getattr(inturn.errors, name))
    made = again(error)
    assert made is not error
    assert type(made) is type(error)
    assert (str(made), made.args, made.retriable) == (str(error), error.args, error.retriable)
    assert vars(made) == vars(error)


@pytest.mark.parametrize("how", ["send_sync", "result"])
def test_an_error_that_was_raised_already_is_not_raised_again_by_close(line: Connection, how: str) -> None:
    producer = fenced_producer(line)
    if how == "send_sync":
        with pytest.raises(ProducerFenced):
            producer.send_sync("line", b"x", key="k", timeout_s=WAIT_S)
    else:
        handle = producer.send("line", b"x", key="k")
        with pytest.raises(ProducerFenced):
            handle.result(WAIT_S)
    producer.flush(WAIT_S)
    producer.close(WAIT_S)


@pytest.mark.parametrize("how", ["flush", "close"])
def test_an_error_that_nobody_saw_is_raised_by_flush_or_close(line: Connection, how: str) -> None:
    producer = fenced_producer(line)
    producer.send("line", b"x", key="k")
    with pytest.raises(ProducerFenced):
        getattr(producer, how)(WAIT_S)
    producer.close(WAIT_S)


# Programs, disks


NO_CLOSE = """
import sys, inturn
options = {} if "://" in sys.argv[1] else {"flush": "os"}
mq = inturn.connect(sys.argv[1], **options)
mq.create_subject("orders", 4)
producer = mq.producer()
for number in range(5000):
    producer.send("orders", b"%d" % number, key=b"%d" % (number % 10))
if sys.argv[2] == "raises":
    raise SystemExit("it ends like this")
"""


@pytest.mark.parametrize("end", ["ends", "raises"])
def test_a_program_that_ends_without_closing_loses_nothing_that_it_sent(bed: Bed, end: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", NO_CLOSE, bed.target(), end], capture_output=True, text=True, timeout=90
    )
    assert ran.returncode == (1 if end == "raises" else 0), ran.stderr
    assert "Traceback" not in ran.stderr
    bodies = [int(message.body) for message in bed.open().reader("orders")]
    assert sorted(bodies) == list(range(5000))


def test_a_full_disk_refuses_appends_while_reading_and_committing_go_on(bed: Bed) -> None:
    """B1."""
    mq = bed.open(flush="os")
    mq.create_subject("line", 1)
    send_line(mq, b"0", b"1", b"2")
    mq = bed.reopen(log=LogSettings(flush=inturn.Flush.OS, reserve_bytes=1 << 60))
    producer = mq.producer()
    waits_because(producer.send("line", b"refused", key="k"), "disk is full")
    assert [message.body for message in mq.reader("line")] == [b"0", b"1", b"2"]
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=quick()):
        eventually(lambda: committed(mq) == 3, "what was there is committed")
    assert seen.bodies == [b"0", b"1", b"2"]
    with contextlib.suppress(ProducerError):
        producer.close(0.05)
    mq = bed.reopen(flush="os")
    assert committed(mq) == 3
    with mq.producer() as producer:
        assert producer.send_sync("line", b"3", key="k", timeout_s=WAIT_S).offset == 3
    assert [message.body for message in mq.reader("line")] == [b"0", b"1", b"2", b"3"]


def test_a_partition_that_does_not_answer_holds_up_no_other(mq: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6."""
    held: list[tuple[Command, Reply]] = []
    submit, silent = mq.node.submit, 0

    def between(command: Command, reply: Reply) -> None:
        if isinstance(command, Append) and command.partition == silent:
            held.append((command, reply))
        else:
            submit(command, reply)

    monkeypatch.setattr(mq.node, "submit", between)
    keys = [[f"{n}" for n in range(100) if inturn.slot_of(f"{n}".encode()) // 256 == place] for place in range(4)]
    with mq.producer() as producer:
        waiting = [producer.send("orders", b"%d" % number, key=keys[silent][0]) for number in range(3)]
        for place in (1, 2, 3):
            stored = [producer.send_sync("orders", b"x", key=key, timeout_s=WAIT_S) for key in keys[place][:10]]
            assert [one.partition for one in stored] == [place] * 10
        assert not any(handle.done for handle in waiting)
        silent = -1
        for command, reply in held:
            submit(command, reply)
        assert [handle.result(WAIT_S).offset for handle in waiting] == [0, 1, 2]


def test_damage_is_logged_loudly_and_the_other_partitions_go_on(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    """B1."""
    mq = bed.open(flush="os")
    mq.create_subject("orders", 4)
    with mq.producer() as producer:
        for number in range(5):  # every message in a separate batch
            body = b"the one that is damaged" if number == 3 else b"%d" % number
            stored = producer.send_sync("orders", body, key="k")
            producer.send_sync("orders", b"x", key="other")
    place, other = stored.partition, inturn.slot_of(b"other") // 256
    assert place != other
    bed.close()
    flip_byte_of(bed.path, b"the one that is damaged")
    mq = bed.open(flush="os")
    seen = Seen()
    with caplog.at_level(logging.ERROR, "inturn.consumer"), mq.consumer("orders", "g", seen, settings=quick()):

        def loud() -> list[str]:
            return [
                record.getMessage()
                for record in caplog.records
                if record.name == "inturn.consumer" and record.levelno >= logging.ERROR
            ]

        eventually(loud, "the damage is logged")
        eventually(lambda: mq.group("orders", "g").describe().partitions[place].committed == 3, "what is before it")
        eventually(lambda: mq.group("orders", "g").describe().partitions[other].committed == 5, "the other partition")
        assert f"orders/{place}" in loud()[0]
        assert "offset 3" in loud()[0]
    assert [message.body for message in seen.messages if message.partition == place] == [b"0", b"1", b"2"]
    with pytest.raises(LogDamaged, match="offset 3"):
        list(mq.reader("orders"))


# Wrong input


@pytest.mark.parametrize("how", ["send", "send_sync"])
def test_properties_whose_names_begin_with_a_percent_sign_are_refused(line: Connection, how: str) -> None:
    with line.producer() as producer:
        with pytest.raises(InvalidInput, match="%attempts"):
            getattr(producer, how)("line", b"x", key="k", properties={"fine": "1", "%attempts": "7"})
        producer.send_sync("line", b"y", key="k", properties={"a%": "%"})
    assert [message.body for message in line.reader("line")] == [b"y"]


def generating(message: Message, context: Context) -> Iterator[None]:
    yield


def test_a_decorator_refuses_at_once_what_cannot_run(mq: Connection) -> None:
    with pytest.raises(InvalidInput, match="yield"):
        mq.handler("orders", "g")(generating)
    with pytest.raises(InvalidInput, match="message, context"):
        mq.handler("orders", "g")(lambda message: None)  # type: ignore[type-var]
    with pytest.raises(InvalidInput, match="order"):
        mq.handler("orders", "g", order="sideways")
    with pytest.raises(InvalidInput, match="group"):
        mq.handler("orders", "a group")
    with pytest.raises(InvalidInput, match="nothing to run"):
        mq.run(0.1)


LONG_AGO = datetime(1, 1, 1)
WRONG: dict[str, Callable[[Any], object]] = {
    "send to a list": lambda mq: mq.producer().send([], b"x"),
    "send to a dict": lambda mq: mq.producer().send({}, b"x"),
    "send to None": lambda mq: mq.producer().send(None, b"x"),
    "send to bytes": lambda mq: mq.producer().send(b"orders", b"x"),
    "send_sync to a list": lambda mq: mq.producer().send_sync([], b"x"),
    "send text": lambda mq: mq.producer().send("orders", "x"),
    "producer named 5": lambda mq: mq.producer(5),
    "producer with settings 5": lambda mq: mq.producer(settings=5),
    "create_subject of a list": lambda mq: mq.create_subject([]),
    "create_subject with text partitions": lambda mq: mq.create_subject("more", "4"),
    "create_subject with limits 5": lambda mq: mq.create_subject("more", 1, limits=5),
    "subject of a list": lambda mq: mq.subject([]),
    "subject of None": lambda mq: mq.subject(None),
    "describe_subject of a list": lambda mq: mq.describe_subject([]),
    "reader of a list": lambda mq: mq.reader([]),
    "reader of 5": lambda mq: mq.reader(5),
    "reader from long ago": lambda mq: mq.reader("orders", start=LONG_AGO),
    "read partition 99": lambda mq: mq.reader("orders").read(99),
    "read partition -1": lambda mq: mq.reader("orders").read(-1),
    "read a text partition": lambda mq: mq.reader("orders").read("0"),
    "consumer of a list": lambda mq: mq.consumer([], "g", Seen()),
    "consumer of no group": lambda mq: mq.consumer("orders", None, Seen()),
    "consumer with settings 5": lambda mq: mq.consumer("orders", "g", Seen(), settings=5),
    "consumer with hooks 5": lambda mq: mq.consumer("orders", "g", Seen(), hooks=5),
    "consumer with hooks of 5": lambda mq: mq.consumer("orders", "g", Seen(), hooks=[5]),
    "consumer from 3.5": lambda mq: mq.consumer("orders", "g", Seen(), start=3.5),
    "consumer from long ago": lambda mq: mq.consumer("orders", "g", Seen(), start=LONG_AGO),
    "consumer with handler 5": lambda mq: mq.consumer("orders", "g", 5),
    "consumer named []": lambda mq: mq.consumer("orders", "g", Seen(), name=[]),
    "handler with settings 5": lambda mq: mq.handler("orders", "g", settings=5),
    "describe_group of a list": lambda mq: mq.group("orders", []).describe(),
    "describe_group of a list's": lambda mq: mq.group([], "g").describe(),
    "reset_group to long ago": lambda mq: mq.group("orders", "g").reset(LONG_AGO),
    "reset_group of None": lambda mq: mq.group("orders", None).reset("first"),
    "create_subject with keyless 5": lambda mq: mq.create_subject("more", 1, keyless=5),
    "keys of a list": lambda mq: mq.group([], "g").keys(),
    "keys of no group": lambda mq: mq.group("orders", None).keys(),
    "describe_key of None": lambda mq: mq.group("orders", "g").describe_key(None),
    "key_head of 5": lambda mq: mq.group("orders", "g").key_head(5),
    "park_key of None": lambda mq: mq.group("orders", "g").park(None),
    "park_key of a list's": lambda mq: mq.group([], "g").park("k"),
    "park_key by 5": lambda mq: mq.group("orders", "g").park("k", by=5),
    "resume_key why 5": lambda mq: mq.group("orders", "g").resume("k", why=5),
    "resume_key in partition x": lambda mq: mq.group("orders", "g").resume("k", partition="x"),
    "skip_key at x": lambda mq: mq.group("orders", "g").skip("k", offset="x"),
    "skip_key waiting x": lambda mq: mq.group("orders", "g").skip("k", wait_s="x"),
    "dead_letters of a list": lambda mq: mq.group([], "g").dead_letters(),
    "dead_letters of no group": lambda mq: mq.group("orders", None).dead_letters(),
    "connect to 5": lambda mq: inturn.connect(5),  # type: ignore[arg-type]
    "connect to None": lambda mq: inturn.connect(None),  # type: ignore[arg-type]
    "connect to a name with NUL": lambda mq: inturn.connect("a\0b"),
    "connect with lease 5": lambda mq: inturn.connect(mq.target + "-other", lease=5),  # type: ignore[arg-type]
    "connect with log 5": lambda mq: inturn.connect(mq.target + "-other", log=5),  # type: ignore[arg-type]
    "a lease for ever": lambda mq: LeaseSettings(life_s=float("inf")),
    "a lease for no number": lambda mq: LeaseSettings(life_s=float("nan")),
    "retry after 5": lambda mq: ConsumerSettings(retry=5),  # type: ignore[arg-type]
    "retry after no number": lambda mq: RetryDelays((float("nan"),), 0),
    "retry never": lambda mq: RetryDelays((float("inf"),), 0),
    "suspend for no number": lambda mq: inturn.suspend(float("nan")),
    "suspend for text": lambda mq: inturn.suspend("x"),  # type: ignore[arg-type]
}


def test_values_of_a_wrong_kind_are_refused_in_our_words(mq: Connection) -> None:
    """A single connection for all values: the start of a bed takes longer than all refusals."""
    answers: dict[str, object] = {}
    for what, wrong in WRONG.items():
        try:
            answers[what] = f"accepted: {wrong(mq)!r}"
        except Exception as error:
            answers[what] = error
    assert {what: one for what, one in answers.items() if not (isinstance(one, InturnError) and str(one))} == {}


def test_wrong_input_leaves_nothing_behind(mq: Connection) -> None:
    for wrong in WRONG.values():
        with contextlib.suppress(Exception):
            wrong(mq)
    send_all(mq, "orders", 8)
    assert len(list(mq.reader("orders"))) == 8
    assert [subject.name for subject in mq.subjects()] == ["orders"]
