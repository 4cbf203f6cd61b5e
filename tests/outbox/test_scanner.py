"""P8: a single scanner with a lease sends the rows, every key in the order of ids, every row once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import inturn
from inturn import Connection, Limits, Outbox, Scanner
from inturn.errors import InvalidInput, OutboxHeld
from inturn.model.errors import AccessDenied, DiskFull, InturnError, LogDamaged, LogStopped, ProducerFenced
from inturn.outbox import scan_session as session
from inturn.protocol.commands import Answer, Append, Command, Read, Reply
from tests.contract.bed import eventually
from tests.outbox.conftest import QUICK, STEADY
from tests.outbox.shop import by_key, check_once_and_in_order, fill, made, opened, stored

WAIT_S = 40.0


def wait_until_empty(outbox: Outbox) -> None:
    eventually(lambda: outbox.status().waiting == 0, "the outbox is empty")


def test_a_scanner_sends_what_is_there_and_what_comes(mq: Connection, url: str) -> None:
    outbox = made(url)
    fill(outbox, url, 300)
    with outbox.scan(mq, STEADY) as scanner:
        wait_until_empty(outbox)
        fill(outbox, url, 300, start=300)
        wait_until_empty(outbox)
        assert scanner.statistics().is_scanning
    assert scanner.statistics().sent == 600
    check_once_and_in_order(stored(mq), 600)
    assert outbox.status().scanner is None, "the lease was given back"


def test_thousands_of_rows_go_in_many_batches(mq: Connection, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    outbox = made(url)
    fill(outbox, url, 5000, keys=50)
    told: list[int] = []
    assert outbox.scan(mq, STEADY).run_once(advance=told.append).sent == 5000
    check_once_and_in_order(stored(mq), 5000)
    assert sum(told) <= 5000


def test_two_scanners_at_once_share_one_lease_and_the_second_takes_over(mq: Connection, url: str) -> None:
    outbox = made(url)
    first, second = outbox.scan(mq, STEADY), outbox.scan(mq, STEADY)
    first.start()
    eventually(lambda: first.statistics().is_scanning, "the first has it")
    second.start()
    fill(outbox, url, 200)
    wait_until_empty(outbox)
    assert (first.statistics().sent, second.statistics().sent) == (200, 0)
    with pytest.raises(OutboxHeld, match="is scanned by"):
        outbox.scan(mq, STEADY).run_once()
    first.stop()
    fill(outbox, url, 200, start=200)
    wait_until_empty(outbox)
    assert second.statistics().sent == 200
    second.stop()
    check_once_and_in_order(stored(mq), 400)


def test_many_scanners_that_come_and_go_send_everything_once(mq: Connection, url: str) -> None:
    outbox = made(url)

    def fill_in_parts() -> None:
        for part in range(12):
            fill(outbox, url, 50, start=50 * part)

    filler = threading.Thread(target=fill_in_parts)
    filler.start()
    for _ in range(8):
        with outbox.scan(mq, STEADY), outbox.scan(mq, STEADY):
            time.sleep(0.03)
    filler.join()
    with outbox.scan(mq, STEADY):
        wait_until_empty(outbox)
    check_once_and_in_order(stored(mq), 600)


def test_a_refused_row_holds_back_its_key_alone_until_it_can_be_sent(mq: Connection, url: str) -> None:
    """Never silently: the row and the status show the reason."""
    outbox = made(url)
    with opened(url) as connection:
        outbox.put(connection, "later", b"1", key="k")
        outbox.put(connection, "later", b"2", key="k")
        outbox.put(connection, "orders", b"free", key="k")
        connection.commit()
    with outbox.scan(mq, STEADY):
        eventually(lambda: [message.body for message in stored(mq)] == [b"free"], "the other one is sent")
        eventually(lambda: outbox.status().refused, "it is noted")
        eventually(lambda: outbox.status().waiting == 2, "the other one is gone")
        status = outbox.status()
        assert (status.refused[0].subject, status.refused[0].key) == ("later", b"k")
        assert "no subject 'later'" in status.refused[0].error
        mq.create_subject("later", partitions=1)
        wait_until_empty(outbox)
    assert [message.body for message in stored(mq, "later")] == [b"1", b"2"]


def test_what_stands_behind_many_rows_that_are_held_back_is_sent(mq: Connection, url: str) -> None:
    outbox = made(url)
    with opened(url) as connection:
        for number in range(30):
            outbox.put(connection, "no.such", b"%d" % number, key="k")
        outbox.put(connection, "orders", b"30", key="k")
        connection.commit()
    few = inturn.OutboxSettings(batch=4, lease=STEADY.lease)
    done = outbox.scan(mq, few).run_once()
    assert (done.sent, done.refused) == (1, 1)
    assert outbox.status().waiting == 30


def test_a_row_that_is_too_large_for_its_subject_waits_and_can_be_deleted(mq: Connection, url: str) -> None:
    mq.create_subject("small", partitions=1, limits=Limits(body_bytes=3))
    outbox = made(url)
    with opened(url) as connection:
        outbox.put(connection, "small", b"too large", key="k")
        outbox.put(connection, "small", b"fit", key="k")
        connection.commit()
    with outbox.scan(mq, STEADY):
        eventually(lambda: outbox.status().refused and outbox.status().refused[0].attempts >= 2, "tried again")
        assert stored(mq, "small") == []
        with opened(url) as connection:
            connection.execute("DELETE FROM inturn_outbox WHERE error IS NOT NULL")
            connection.commit()
        wait_until_empty(outbox)
    assert [message.body for message in stored(mq, "small")] == [b"fit"]


def test_where_senders_choose_the_partition_the_row_names_it(mq: Connection, url: str) -> None:
    mq.create_subject("chosen", partitions=3, routing="selector")
    outbox = made(url)
    with opened(url) as connection:
        outbox.put(connection, "chosen", b"x", key="k", partition=2)
        outbox.put(connection, "chosen", b"y", key="other")
        connection.commit()
    outbox.scan(mq, STEADY).run_once()
    assert [(message.partition, message.body) for message in stored(mq, "chosen")] == [(2, b"x")]
    (refused,) = outbox.status().refused
    assert "selector" in refused.error


class TroubledNode:
    """The node of a connection. Appends to some partitions fail or get no answer."""

    def __init__(self, mq: Connection) -> None:
        self._node = mq.node
        self.errors: dict[int, InturnError] = {}

    @property
    def node(self) -> TroubledNode:
        return self

    def submit(self, command: Command, reply: Reply) -> None:
        if isinstance(command, Append):
            error = self.errors.get(command.partition)
            if error is not None:
                reply(error)
                return
        self._node.submit(command, reply)


def keys_by_partition(mq: Connection) -> dict[int, str]:
    route = mq.subject("orders").route
    return {route.by_slot[inturn.slot_of(f"key-{number}".encode())]: f"key-{number}" for number in range(100)}


def test_a_partition_that_is_stuck_does_not_hold_up_the_others(mq: Connection, url: str) -> None:
    """As for the queues of a producer."""
    outbox, troubled, keys = made(url), TroubledNode(mq), keys_by_partition(mq)
    troubled.errors[0] = DiskFull("p0")
    settings = inturn.OutboxSettings(poll_s=0.01, stuck_s=0.05, lane=5, in_flight=40, batch=10, lease=STEADY.lease)
    with opened(url) as connection:
        for number in range(100):
            outbox.put(connection, "orders", b"%d" % number, key=keys[number % 2])
        connection.commit()
    with outbox.scan(troubled, settings):
        eventually(lambda: len(stored(mq)) == 50, "those of the other partition are stored")
        eventually(lambda: outbox.status().waiting == 50, "and only they")
        troubled.errors.clear()
        wait_until_empty(outbox)
    check_once_and_in_order(stored(mq), 100)


def test_a_log_that_has_stopped_is_tried_again_and_the_others_go_on(mq: Connection, url: str) -> None:
    outbox, troubled, keys = made(url), TroubledNode(mq), keys_by_partition(mq)
    troubled.errors[0] = LogStopped("p0", "a sync failed")
    with opened(url) as connection:
        for number in range(20):
            outbox.put(connection, "orders", b"%d" % number, key=keys[number % 2])
        connection.commit()
    with outbox.scan(troubled, STEADY):
        eventually(lambda: len(stored(mq)) == 10, "those of the other partition are stored")
        eventually(lambda: outbox.status().refused, "it is told")
        troubled.errors.clear()
        wait_until_empty(outbox)
    check_once_and_in_order(stored(mq), 20)


class LostAnswers(TroubledNode):
    """Appends are stored, but get no answer."""

    def submit(self, command: Command, reply: Reply) -> None:
        if isinstance(command, Append):
            stored = threading.Event()

            def heard(answer: Answer | InturnError) -> None:
                stored.set()

            self._node.submit(command, heard)
            stored.wait(WAIT_S)
        else:
            self._node.submit(command, reply)


def test_what_was_stored_without_an_answer_is_recalled_from_the_logs_and_not_sent_again(
    mq: Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = made(url)
    fill(outbox, url, 30)
    crashed = outbox.scan(LostAnswers(mq), QUICK)
    crashed.start()
    eventually(lambda: len(stored(mq)) == 30, "all are stored")
    with mq.producer() as producer:
        for number in range(100):  # messages of other producers in between
            producer.send("orders", b"%d" % (1000 + number), key="other")
    assert outbox.status().waiting == 30
    _kill(crashed, monkeypatch)
    with outbox.scan(mq, STEADY) as scanner:
        fill(outbox, url, 10, start=30)
        wait_until_empty(outbox)
        assert (scanner.statistics().recalled, scanner.statistics().sent) == (30, 10)
    check_once_and_in_order([message for message in stored(mq) if message.key != b"other"], 40)


class Unreadable(TroubledNode):
    """Reads of some partitions fail."""

    def submit(self, command: Command, reply: Reply) -> None:
        if isinstance(command, Read) and command.partition in self.errors:
            reply(self.errors[command.partition])
        else:
            self._node.submit(command, reply)


@pytest.mark.parametrize(
    ("unreadable", "error"),
    [([0], LogDamaged("p0", 0, "a header")), ([0, 1, 2, 3], AccessDenied("shop", "read on subject 'orders'", "ask"))],
    ids=["damaged", "not-allowed"],
)
def test_what_cannot_be_read_is_sent_again_and_stops_nothing(
    mq: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: list[int], error: InturnError
) -> None:
    """P8: rows of such a partition are sent a second time, in the order of the key. No other row is repeated."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    outbox = made(url)
    fill(outbox, url, 60, keys=20)
    crashed = outbox.scan(LostAnswers(mq), QUICK)
    crashed.start()
    eventually(lambda: len(stored(mq)) == 60, "all are stored")
    once = by_key(stored(mq))
    again = by_key([message for message in stored(mq) if message.partition in unreadable])
    count = sum(map(len, again.values()))
    assert 0 < count < 60 or len(unreadable) == 4
    _kill(crashed, monkeypatch)
    troubled = Unreadable(mq)
    troubled.errors = dict.fromkeys(unreadable, error)
    with outbox.scan(troubled, STEADY) as scanner:
        wait_until_empty(outbox)
        assert (scanner.statistics().recalled, scanner.statistics().sent) == (60 - count, count)
    assert by_key(stored(mq)) == {key: numbers + again.get(key, []) for key, numbers in once.items()}


def test_a_frozen_scanner_that_goes_on_sends_nothing_more(
    mq: Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scanner is frozen between the last check of the lease and the send.

    Meanwhile a second scanner has started. The late send is refused, because the first scanner is fenced.
    """
    outbox, held, go_on = made(url), threading.Event(), threading.Event()
    fill(outbox, url, 50)
    frozen = outbox.scan(mq, QUICK)
    ends: list[Exception] = []
    send = session.ScanSession._send_chosen

    def freeze_and_send(self: session.ScanSession) -> None:
        if threading.current_thread() is thread and not held.is_set():
            held.set()
            go_on.wait(WAIT_S)
        send(self)

    monkeypatch.setattr(session.ScanSession, "_send_chosen", freeze_and_send)

    def scan_frozen() -> None:
        with pytest.raises((ProducerFenced, inturn.errors.OutboxLost)) as caught:
            frozen.run_once()
        ends.append(caught.value)

    thread = threading.Thread(target=scan_frozen)
    thread.start()
    assert held.wait(WAIT_S)
    with outbox.scan(mq, STEADY) as scanner:
        wait_until_empty(outbox)
        fill(outbox, url, 50, start=50)
        wait_until_empty(outbox)
        go_on.set()
        thread.join(WAIT_S)
        fill(outbox, url, 50, start=100)
        wait_until_empty(outbox)
        assert scanner.statistics().sent == 150
    check_once_and_in_order(stored(mq), 150)
    assert (frozen.statistics().sent, len(ends)) == (0, 1)
    assert by_key(stored(mq))[b"key-0"] == list(range(0, 150, 5))


def test_a_stale_scanner_that_opens_the_producer_late_only_makes_the_other_begin_again(
    mq: Connection, url: str
) -> None:
    outbox = made(url)
    store = outbox._store()
    name = "outbox-" + store.read_lease("n").name
    store.close()
    with outbox.scan(mq, QUICK):
        fill(outbox, url, 50)
        wait_until_empty(outbox)
        mq.producer(name=name).close()
        fill(outbox, url, 50, start=50)
        wait_until_empty(outbox)
    check_once_and_in_order(stored(mq), 100)
    assert by_key(stored(mq))


def test_a_connection_that_is_closed_ends_the_scanner_and_loses_nothing(tmp_path: Path, url: str) -> None:
    outbox = made(url)
    first = inturn.connect(tmp_path / "other", flush="os")
    first.create_subject("orders", partitions=4)
    scanner = outbox.scan(first, QUICK)
    scanner.start()
    fill(outbox, url, 20)
    wait_until_empty(outbox)
    first.close()
    fill(outbox, url, 20, start=20)
    eventually(lambda: scanner.error is not None, "it ends")
    assert outbox.status().refused == ()
    scanner.stop()
    with inturn.connect(tmp_path / "other", flush="os") as again:
        with outbox.scan(again, QUICK):
            wait_until_empty(outbox)
        check_once_and_in_order(stored(again), 40)


def test_a_restart_of_the_server_is_waited_for(tmp_path: Path, url: str) -> None:
    from inturn.server.server import Server
    from inturn.transport.address import Address

    outbox = made(url)
    service = Server(tmp_path / "served", address=Address("127.0.0.1"))
    address = service.address
    mq = inturn.connect(str(address))
    mq.create_subject("orders", partitions=4)
    with outbox.scan(mq, QUICK):
        fill(outbox, url, 100)
        service.close(grace_s=0.0)
        fill(outbox, url, 100, start=100)
        time.sleep(0.2)
        service = Server(tmp_path / "served", address=address)
        fill(outbox, url, 100, start=200)
        wait_until_empty(outbox)
    check_once_and_in_order(stored(mq), 300)
    mq.close()
    service.close(grace_s=0.0)


def test_settings_of_another_kind_are_refused(mq: Connection) -> None:
    with pytest.raises(InvalidInput, match="OutboxSettings"):
        Outbox("x.db", settings=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="Limits"):
        Outbox("x.db", limits=3)  # type: ignore[arg-type]


def _kill(scanner: Scanner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill, as far as threads can be killed: wait for nothing, write nothing, release nothing."""
    monkeypatch.setattr(session, "CLOSE_S", 0.0)
    monkeypatch.setattr(scanner._store, "release", lambda epoch: None)
    monkeypatch.setattr(scanner._store, "settle", lambda *_: None)
    scanner.stop()
