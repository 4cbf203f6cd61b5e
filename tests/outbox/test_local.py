"""P7, P8: messages that a best-effort producer could not send go to the outbox, and are sent later in order by key."""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import inturn
from inturn import Connection, Kept, Message, Outbox, ProducerSettings, SendHandle, Stored
from inturn.errors import ConnectionLost, InvalidInput, ProducerFenced, SendFailed
from inturn.model.errors import InturnError
from inturn.model.time import SystemClock
from inturn.producer.producer import Producer
from inturn.protocol.commands import Append, Command, OpenProducer, Reply
from inturn.server.server import Server
from inturn.transport.address import Address
from tests.contract.bed import eventually
from tests.outbox.conftest import QUICK, STEADY
from tests.outbox.shop import stored
from tests.outbox.test_scanner import wait_until_empty

HASTY = ProducerSettings(tries_max=2, backoff_min_s=0.001, backoff_max_s=0.002, batch_count=3)


class Outage:
    """A node whose appends fail while `is_down`.

    Appends of a scanner (named producers) fail only while `is_down_for_all`.
    """

    def __init__(self, mq: Connection) -> None:
        self._node = mq.node
        self.is_down = self.is_down_for_all = False
        self.error: InturnError = ConnectionLost("nowhere", "no route")
        self._named: set[int] = set()

    def submit(self, command: Command, reply: Reply) -> None:
        if isinstance(command, OpenProducer) and command.name is not None:
            self._node.submit(command, lambda answer: (self._named.add(answer.producer_id), reply(answer)))  # type: ignore[union-attr, arg-type, func-returns-value]
            return
        if isinstance(command, Append):
            is_named = command.batch.producer_id in self._named
            if self.is_down_for_all or (self.is_down and not is_named):
                reply(self.error)
                return
        self._node.submit(command, reply)


class Bed:
    """A producer with an outbox, through a node that can be down."""

    def __init__(self, mq: Connection, path: Path) -> None:
        mq.create_subject("loose", partitions=2, strategy="best-effort")
        mq.create_subject("strict", partitions=1)
        self.mq = mq
        self.outbox = Outbox(path, settings=STEADY)
        self.node = Outage(mq)
        self._producers: list[Producer] = []

    def open(self, name: str | None = None) -> Producer:
        clock = SystemClock()
        fallback = self.outbox.fallback_store(self.node, clock)
        self._producers.append(Producer(self.node, clock, HASTY, name=name, fallback=fallback))
        return self._producers[-1]

    def close(self) -> None:
        for producer in self._producers:
            if not producer.is_closed:
                producer.close(40.0)

    def bodies(self, subject: str = "loose") -> list[bytes]:
        return [message.body for message in stored(self.mq, subject)]


@pytest.fixture
def bed(mq: Connection, tmp_path: Path) -> Iterator[Bed]:
    made = Bed(mq, tmp_path / "outbox.db")
    yield made
    made.close()


def kept(handle: SendHandle) -> Kept:
    result = handle.result(40.0)
    assert isinstance(result, Kept)
    return result


def test_what_finally_failed_is_kept_and_its_handle_says_so(bed: Bed) -> None:
    producer = bed.open()
    bed.node.is_down_for_all = True
    result = kept(producer.send("loose", b"1", key="k", properties={"mine": "yes"}, tags=("t",), message_id="m"))
    assert (result.subject, result.offset, result.partition) == ("loose", -1, -1)
    assert result.row_id == 1
    assert bed.outbox.status().waiting == 1
    assert bed.bodies() == []
    bed.node.is_down_for_all = False
    wait_until_empty(bed.outbox)
    (message,) = stored(bed.mq, "loose")
    assert (message.key, message.tags, message.message_id, message.properties["mine"]) == (b"k", ("t",), "m", "yes")


def test_later_messages_of_a_kept_key_go_behind_it_and_others_do_not(bed: Bed) -> None:
    producer = bed.open()
    bed.node.is_down_for_all = True
    kept(producer.send("loose", b"1", key="k"))
    handles = [producer.send("loose", b"%d" % number, key="k") for number in range(2, 30)]
    assert [kept(handle).row_id for handle in handles] == list(range(2, 30))
    bed.node.is_down_for_all = False
    assert type(producer.send_sync("loose", b"other", key="other")) is Stored
    producer.flush(40.0)
    wait_until_empty(bed.outbox)
    assert [body for body in bed.bodies() if body != b"other"] == [b"%d" % number for number in range(1, 30)]


def test_when_the_outbox_is_empty_a_key_is_sent_directly_again(bed: Bed) -> None:
    producer = bed.open()
    bed.node.is_down_for_all = True
    kept(producer.send("loose", b"1", key="k"))
    bed.node.is_down_for_all = False
    wait_until_empty(bed.outbox)
    numbers = iter(range(2, 1000))
    eventually(lambda: type(producer.send_sync("loose", b"%d" % next(numbers), key="k")) is Stored, "it is free")
    wait_until_empty(bed.outbox)
    bodies = [int(body) for body in bed.bodies()]
    assert bodies == sorted(set(bodies))


def test_a_busy_key_does_not_stay_in_the_outbox_for_ever(bed: Bed) -> None:
    """The program sends to the key all the time.

    When the rows of the key are sent, later messages are not put any more.
    """
    producer = bed.open()
    bed.node.is_down_for_all = True
    handles = [producer.send("loose", b"%d" % number, key="k") for number in range(20)]
    kept(handles[-1])
    bed.node.is_down_for_all = False
    is_free = threading.Event()
    number = 20
    while not is_free.is_set():
        handles.append(producer.send("loose", b"%d" % number, key="k"))
        handles[-1].when_done(lambda handle=handles[-1]: is_free.set() if type(handle.result(0)) is Stored else None)  # type: ignore[misc]
        number += 1
        assert number < 100_000
        is_free.wait(0.003)
    producer.flush(40.0)
    wait_until_empty(bed.outbox)
    bodies = [int(body) for body in bed.bodies()]
    assert bodies == list(range(number))


def test_all_that_waits_behind_a_failed_message_goes_with_it_in_the_order_of_sending(bed: Bed) -> None:
    """Send batches of three messages each: many are queued when the first send batch is given up."""
    producer = bed.open()
    bed.node.is_down_for_all = True
    handles = [producer.send("loose", b"%d" % number, key=f"k{number % 4}") for number in range(100)]
    assert sorted(kept(handle).row_id for handle in handles) == list(range(1, 101))
    bed.node.is_down_for_all = False
    wait_until_empty(bed.outbox)
    assert sorted(int(body) for body in bed.bodies()) == list(range(100))
    for key in range(4):
        of_key = [int(message.body) for message in stored(bed.mq, "loose") if message.key == b"k%d" % key]
        assert of_key == list(range(key, 100, 4))


def test_a_flapping_node_loses_nothing_and_every_handle_is_answered(bed: Bed) -> None:
    producer = bed.open()
    handles = []
    for number in range(300):
        if number % 30 == 0:
            bed.node.is_down = number % 60 == 0
        handles.append(producer.send("loose", b"%d" % number, key=f"k{number % 5}"))
        if number % 7 == 0:
            handles[-1].result(40.0)
    bed.node.is_down = False
    producer.flush(40.0)
    wait_until_empty(bed.outbox)
    assert all(handle.done for handle in handles)
    assert any(isinstance(handle.result(), Kept) for handle in handles)
    assert {int(body) for body in bed.bodies()} == set(range(300))
    for key in range(5):
        of_key = [int(message.body) for message in stored(bed.mq, "loose") if message.key == b"k%d" % key]
        assert of_key == list(range(key, 300, 5)), "nothing was stored that was given up here, so order is whole"


def test_messages_without_a_key_are_kept_and_hold_nothing_back(bed: Bed) -> None:
    producer = bed.open()
    bed.node.is_down_for_all = True
    kept(producer.send("loose", b"1"))
    bed.node.is_down_for_all = False
    assert type(producer.send_sync("loose", b"2")) is Stored
    wait_until_empty(bed.outbox)
    assert sorted(bed.bodies()) == [b"1", b"2"]


def test_strict_subjects_do_not_use_it(bed: Bed) -> None:
    """P7: under strict, a message waits at the head of the queue until success."""
    producer = bed.open()
    bed.node.is_down = True
    handle = producer.send("strict", b"1", key="k")
    kept(producer.send("loose", b"x", key="k"))
    assert not handle.done
    bed.node.is_down = False
    assert type(handle.result(40.0)) is Stored


def test_what_is_not_sent_when_the_producer_closes_is_kept(bed: Bed) -> None:
    producer = bed.open()
    bed.node.error = ConnectionLost("nowhere", "no route")
    slow = ProducerSettings(tries_max=1000, backoff_max_s=0.05)
    clock = SystemClock()
    producer = Producer(bed.node, clock, slow, fallback=bed.outbox.fallback_store(bed.node, clock))
    bed.node.is_down_for_all = True
    handles = [producer.send("loose", b"%d" % number, key="k") for number in range(10)]
    with pytest.raises(inturn.errors.SendTimeout):
        producer.close(0.1)
    assert [kept(handle).row_id for handle in handles] == list(range(1, 11))
    bed.node.is_down_for_all = False
    later = bed.open()
    wait_until_empty(bed.outbox)
    later.close()
    assert bed.bodies() == [b"%d" % number for number in range(10)]


def test_what_an_earlier_run_has_left_is_sent_first(bed: Bed) -> None:
    producer = bed.open()
    bed.node.is_down_for_all = True
    for number in range(5):
        kept(producer.send("loose", b"%d" % number, key="k"))
    producer.close()
    again = bed.open()
    assert isinstance(again.send_sync("loose", b"5", key="k"), Kept), "it goes behind what is there"
    bed.node.is_down_for_all = False
    wait_until_empty(bed.outbox)
    assert bed.bodies() == [b"%d" % number for number in range(6)]


def test_a_fenced_producer_keeps_nothing(bed: Bed) -> None:
    """The producer was replaced: later messages are refused, not postponed."""
    first = bed.open("writer")
    first.send_sync("loose", b"1", key="k")
    second = bed.open("writer")
    second.send_sync("loose", b"2", key="k")
    with pytest.raises(ProducerFenced):
        first.send_sync("loose", b"3", key="k")
    assert bed.outbox.status().waiting == 0


def test_an_outbox_that_cannot_be_written_is_told_to_the_sender(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bed.open()
    fallback = producer._fallback._store  # type: ignore[union-attr]

    def full(rows: object) -> list[int]:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(fallback, "write", full)
    bed.node.is_down_for_all = True
    with pytest.raises(SendFailed, match=r"outbox could not keep it either: database or disk is full"):
        producer.send("loose", b"1", key="k").result(40.0)
    bed.node.is_down_for_all = False
    assert type(producer.send_sync("loose", b"2", key="k")) is Stored, "the key is not kept"


def test_where_senders_choose_the_partition_it_is_kept_with_the_message(bed: Bed) -> None:
    bed.mq.create_subject("chosen", partitions=3, strategy="best-effort", routing="selector")
    producer = bed.open()
    bed.node.is_down_for_all = True
    handle = producer.send("chosen", b"x", key="k", selector=lambda *_: 2)
    kept(handle)
    kept(producer.send("chosen", b"y", key="k", selector=lambda *_: 2))
    bed.node.is_down_for_all = False
    wait_until_empty(bed.outbox)
    assert [(message.partition, message.body) for message in stored(bed.mq, "chosen")] == [(2, b"x"), (2, b"y")]


def test_two_producers_may_share_an_outbox(bed: Bed) -> None:
    one, two = bed.open(), bed.open()
    bed.node.is_down_for_all = True
    kept(one.send("loose", b"1", key="a"))
    kept(two.send("loose", b"2", key="b"))
    bed.node.is_down_for_all = False
    wait_until_empty(bed.outbox)
    assert sorted(bed.bodies()) == [b"1", b"2"]


def test_a_connection_gives_its_producer_an_outbox_and_a_real_outage_is_lived_through(tmp_path: Path) -> None:
    service = Server(tmp_path / "served", address=Address("127.0.0.1"))
    address = service.address
    mq = inturn.connect(str(address))
    mq.create_subject("loose", partitions=2, strategy="best-effort")
    outbox = Outbox(tmp_path / "outbox.db", settings=QUICK)
    producer = mq.producer(settings=dataclasses.replace(HASTY, answer_timeout_s=0.5), outbox=outbox)
    producer.send_sync("loose", b"0", key="k")
    service.close(grace_s=0.0)
    handles = [producer.send("loose", b"%d" % number, key="k") for number in range(1, 50)]
    assert all(isinstance(handle.result(40.0), Kept) for handle in handles)
    service = Server(tmp_path / "served", address=address)
    wait_until_empty(outbox)
    assert [message.body for message in stored(mq, "loose")] == [b"%d" % number for number in range(50)]
    mq.close()
    service.close(grace_s=0.0)


def test_something_else_is_no_outbox(mq: Connection) -> None:
    with pytest.raises(InvalidInput, match="outbox="):
        mq.producer(outbox="outbox.db")  # type: ignore[arg-type]


KILLED = """
import sys, logging, structlog, inturn
from inturn.server.server import Server
from inturn.transport.address import Address
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
folder = sys.argv[1]
service = Server(folder + "/served", address=Address("127.0.0.1"))
mq = inturn.connect(str(service.address))
mq.create_subject("loose", partitions=2, strategy="best-effort")
settings = inturn.ProducerSettings(tries_max=2, backoff_min_s=0.001, backoff_max_s=0.002)
lease = inturn.OutboxSettings(lease=inturn.LeaseSettings(life_s=0.6, renew_s=0.15, margin_s=0.05))
producer = mq.producer(settings=settings, outbox=inturn.Outbox(folder + "/outbox.db", settings=lease))
producer.send_sync("loose", b"0", key="k")
service.close(grace_s=0.0)
for number in range(1, 1000):
    kept = producer.send("loose", b"%d" % number, key="k").result(60)
    assert isinstance(kept, inturn.Kept)
    print(number, flush=True)
"""


def test_what_a_handle_says_is_kept_survives_kill_9(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], stdout=subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(20)][-1]
    process.send_signal(signal.SIGKILL)
    told = max([told, *(int(line) for line in process.communicate()[0].split())])
    with inturn.connect(tmp_path / "served") as mq:
        outbox = Outbox(tmp_path / "outbox.db", settings=QUICK)
        assert outbox.status().waiting >= told
        with mq.producer(outbox=outbox):
            eventually(lambda: outbox.status().waiting == 0, "the next run sends it")
        numbers = [int(message.body) for message in stored(mq, "loose")]
    assert numbers == list(range(len(numbers)))
    assert numbers[-1] >= told


def test_handlers_get_kept_messages_as_any_others(bed: Bed) -> None:
    producer = bed.open()
    bed.node.is_down_for_all = True
    kept(producer.send("loose", b"1", key="k"))
    bed.node.is_down_for_all = False
    came = threading.Event()
    seen: list[Message] = []

    def handle(message: Message, context: inturn.Context) -> None:
        seen.append(message)
        came.set()

    with bed.mq.consumer("loose", "g", handle, order="key"):
        assert came.wait(5.0)
    assert seen[0].body == b"1"
