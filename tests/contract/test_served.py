"""A server and clients: restarts, hand-over, leases that may still be held."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inturn
from inturn import Connection, Flush, LeaseSettings, LogSettings, Message
from inturn.consumer.context import Context
from inturn.model.errors import ConnectionLost, InvalidInput, LeaseHeld, ServerStopping, StaleEpoch
from inturn.protocol.commands import (
    Acquire,
    Assignment,
    Commit,
    Committed,
    Granted,
    Heartbeat,
    OpenProducer,
    ProducerOpened,
    Progress,
    Pull,
    Pulled,
)
from inturn.protocol.request import ask
from inturn.server.server import Server
from inturn.transport.address import Address
from inturn.transport.server_session import ServerSettings
from tests.contract.bed import (
    SHORT_LEASE,
    STEADY_LEASE,
    WAIT_S,
    Seen,
    Witness,
    committed,
    eventually,
    is_renewed,
    quick,
    send_all,
)


class Served:
    """A server that can be started again at the same address, and connections to the server."""

    def __init__(self, path: Path, lease: LeaseSettings | None = None, witness: Witness | None = None) -> None:
        self._path = path
        self.options: dict[str, Any] = {"lease": lease, "log": LogSettings(flush=Flush.OS)}
        if witness is not None:
            self.options["observer"] = witness.recorder
        self._opened: list[Connection] = []
        self._address = Address("127.0.0.1")
        self.start()

    def start(self) -> None:
        self.service = Server(self._path, address=self._address, **self.options)
        self._address = self.service.address

    def connect(self) -> Connection:
        self._opened.append(inturn.connect(str(self._address)))
        return self._opened[-1]

    def close(self) -> None:
        for connection in self._opened:
            with contextlib.suppress(inturn.InturnError):
                connection.close()
        self.service.close(grace_s=0.0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def short(tmp_path: Path, witness: Witness) -> Iterator[Served]:
    """With leases of 0.6 s, and an observer of all leases."""
    made = Served(tmp_path / "data", SHORT_LEASE, witness)
    yield made
    made.close()


def test_the_servers_lease_settings_hold_for_its_clients(short: Served) -> None:
    mq = short.connect()
    assert mq.node.lease == SHORT_LEASE


def test_what_is_the_servers_cannot_be_said_by_a_client(served: Served) -> None:
    with pytest.raises(InvalidInput, match="inturn serve"):
        inturn.connect(str(served.service.address), flush="os")


@pytest.mark.parametrize(
    "address", ["inturn://", "http://127.0.0.1:7420", "inturn://h:99999", "inturn://h/path", "inturn+unix://"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="inturn://host:port"):
        inturn.connect(address)


def test_a_server_that_is_not_there_is_named(served: Served) -> None:
    served.close()
    began_s = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:\d+.*inturn serve"):
        inturn.connect(str(served.service.address))
    assert time.monotonic() - began_s < WAIT_S / 2


def test_connect_can_wait_for_a_server_that_comes_later(served: Served) -> None:
    import threading

    served.service.close(grace_s=0.0)
    threading.Timer(0.3, served.start).start()
    with inturn.connect(str(served.service.address), wait_s=WAIT_S) as mq:
        assert mq.subjects() == []


def test_everything_goes_on_after_a_restart_of_the_server(short: Served, witness: Witness) -> None:
    """P4, B4, C3: sends and handlers before and after the restart. No message is lost or out of order."""
    mq = short.connect()
    mq.create_subject("orders", 4)
    seen = Seen()
    with mq.consumer("orders", "g", witness.watch(seen), order="key", settings=quick()):
        with mq.producer() as producer:
            for round_number in range(3):
                handles = [
                    (producer.send("orders", b"%d" % number, key=b"key-%d" % (number % 8)), b"key-%d" % (number % 8))
                    for number in range(round_number * 100, round_number * 100 + 100)
                ]
                if round_number:
                    short.service.close(grace_s=1.0 if round_number == 1 else 0.0)
                    short.start()
                for handle, key in handles:
                    witness.sent(handle.result(2 * WAIT_S), key)
        eventually(lambda: committed(mq, subject="orders") == 300, "all is committed", timeout_s=20)
    witness.judge(order="key")


def test_a_lease_that_may_still_be_held_is_not_given_away_after_a_restart(served: Served) -> None:
    """B2: the node does not know the time of the last renewal, so the node waits for a full life."""
    life_s = 2.0
    served.service.close(grace_s=0.0)
    served.options["lease"] = LeaseSettings(life_s=life_s, renew_s=0.5, margin_s=0.1)
    served.start()
    mq = served.connect()
    mq.create_subject("line", 1)
    ask(mq.node, Heartbeat("line", "g", "first", "partition", "first"), Assignment)
    granted = ask(mq.node, Acquire("line", "g", 0, "first", 1), Granted)
    time.sleep(0.2)
    served.service.close(grace_s=0.0)
    served.start()
    began_s = time.monotonic()
    ask(mq.node, Heartbeat("line", "g", "second", "partition", "first"), Assignment)
    with pytest.raises(LeaseHeld, match="first"):
        ask(mq.node, Acquire("line", "g", 0, "second", 1), Granted)
    assert ask(mq.node, Pull("line", "g", 0, "first", granted.epoch, 0, 1000), Pulled).batches == ()
    successor = None
    while successor is None:
        ask(mq.node, Heartbeat("line", "g", "second", "partition", "first"), Assignment)
        with contextlib.suppress(LeaseHeld):
            successor = ask(mq.node, Acquire("line", "g", 0, "second", 2, wait_s=0.1), Granted)
    assert successor.epoch > granted.epoch
    assert time.monotonic() - began_s >= life_s * 0.95
    commit = Commit("line", "g", "first", (Progress(0, granted.epoch, 0),))
    assert ask(mq.node, commit, Committed).partitions == (), "late, and refused"
    with pytest.raises(StaleEpoch):
        ask(mq.node, Pull("line", "g", 0, "first", granted.epoch, 0, 1000), Pulled)


def test_a_lease_keeps_the_life_it_was_granted_with_when_the_server_comes_back_with_a_shorter_one(
    tmp_path: Path,
) -> None:
    """B2: the holder relies on the old life, even when cut off or frozen."""
    long = LeaseSettings(life_s=2.0, renew_s=0.5, margin_s=0.1)
    served = Served(tmp_path / "data", long)
    try:
        mq = served.connect()
        mq.create_subject("line", 1)
        ask(mq.node, Heartbeat("line", "g", "first", "partition", "first"), Assignment)
        granted = ask(mq.node, Acquire("line", "g", 0, "first", 1), Granted)
        assert granted.life_s == 2.0
        served.service.close(grace_s=0.0)
        served.options["lease"] = SHORT_LEASE
        served.start()
        began_s = time.monotonic()
        successor = None
        while successor is None:
            ask(mq.node, Heartbeat("line", "g", "second", "partition", "first"), Assignment)
            with contextlib.suppress(LeaseHeld):
                successor = ask(mq.node, Acquire("line", "g", 0, "second", 1, wait_s=0.1), Granted)
        assert time.monotonic() - began_s >= 1.9
        assert successor.life_s == SHORT_LEASE.life_s
    finally:
        served.close()


def test_a_consumer_keeps_up_with_a_server_that_came_back_with_shorter_leases(tmp_path: Path) -> None:
    # The renewal interval of the first lease is too long for the second lease. The second lease survives a pause of the
    # machine.
    served = Served(tmp_path / "data", LeaseSettings(life_s=120.0, renew_s=60.0, margin_s=0.1))
    try:
        mq = served.connect()
        mq.create_subject("line", 1)
        seen = Seen()
        with mq.consumer("line", "g", seen, settings=quick()):
            send_all(mq, "line", 1)
            seen.wait_for(1)
            served.service.close(grace_s=1.0)
            served.options["lease"] = STEADY_LEASE
            served.start()
            send_all(mq, "line", 1)
            seen.wait_for(2)
            for _ in range(3):
                is_renewed(mq)
    finally:
        served.close()


def test_a_late_copy_of_the_opening_of_a_producer_fences_nobody(served: Served) -> None:
    """P5."""
    mq = served.connect()
    mq.create_subject("line", 1)
    opening = OpenProducer("writer", "nonce-1")
    first = ask(mq.node, opening, ProducerOpened)
    assert ask(mq.node, opening, ProducerOpened) == first
    second = ask(mq.node, OpenProducer("writer", "nonce-2"), ProducerOpened)
    assert (second.producer_id, second.epoch) == (first.producer_id, first.epoch + 1)


def test_a_graceful_hand_over_takes_no_time(served: Served) -> None:
    """C17: although the lease has 15 s to live. No message is handled twice or left out."""
    mq, others = served.connect(), served.connect()
    mq.create_subject("orders", 4)
    first, second = Seen(), Seen()
    leaving = mq.consumer("orders", "g", first, settings=quick())
    with leaving, others.consumer("orders", "g", second, settings=quick()):
        send_all(mq, "orders", 200)
        eventually(lambda: len(first.messages) + len(second.messages) == 200, "both have handled all")
        began_s = time.monotonic()
        leaving.stop()
        count = len(second.messages)
        send_all(mq, "orders", 200)
        second.wait_for(count + 200)
        assert time.monotonic() - began_s < WAIT_S / 2
    assert len(first.messages) + len(second.messages) == 400


def test_a_stopping_server_lets_the_commits_in_and_takes_no_new_work(served: Served) -> None:
    mq = served.connect()
    mq.create_subject("line", 1)

    def slow(message: Message, context: Context) -> None:
        time.sleep(0.3)

    seen = Seen(slow)
    with mq.consumer("line", "g", seen, settings=quick(concurrency=1)):
        send_all(mq, "line", 3)
        seen.wait_for(1)
        began_s = time.monotonic()
        assert served.service.close(grace_s=WAIT_S), "everybody gave back what they had in time"
        assert time.monotonic() - began_s < WAIT_S / 2
        handled = len(seen.messages)
        served.start()
        group = mq.group("line", "g").describe().partitions[0]
        assert group.committed >= handled, "what was handled is committed, though the server was stopping"
        seen.wait_for(3)
    assert [message.offset for message in seen.messages] == [0, 1, 2], "none twice, none left out"


def test_new_work_is_refused_while_the_server_stops(served: Served) -> None:
    mq = served.connect()
    mq.create_subject("line", 1)
    node = served.service._opened.node
    node.stop_gently()
    with pytest.raises(ServerStopping):
        ask(mq.node, Acquire("line", "g", 0, "m", 1), Granted, patience_s=0.0)


def test_a_member_that_vanishes_is_counted_out_soon_but_keeps_its_lease(served: Served) -> None:
    """M7: at once when a client disconnects. The lease still lives, because handlers may run."""
    gone, stays = served.connect(), served.connect()
    gone.create_subject("line", 1)
    ask(gone.node, Heartbeat("line", "g", "gone", "partition", "first"), Assignment)
    ask(gone.node, Acquire("line", "g", 0, "gone", 1), Granted)
    ask(stays.node, Heartbeat("line", "g", "stays", "partition", "first"), Assignment)
    gone.node.close()

    def assigned() -> tuple[int, ...]:
        return ask(stays.node, Heartbeat("line", "g", "stays", "partition", "first"), Assignment).partitions

    eventually(lambda: assigned() == (0,), "the other is to have it")
    with pytest.raises(LeaseHeld):
        ask(stays.node, Acquire("line", "g", 0, "stays", 1), Granted)


def test_a_request_that_waits_for_a_client_that_is_gone_gets_no_lease(served: Served) -> None:
    """Otherwise the partition would stand still for the life of a lease."""
    gone, stays = served.connect(), served.connect()
    gone.create_subject("line", 1)
    for node, member in ((gone.node, "gone"), (stays.node, "stays"), (stays.node, "holder")):
        ask(node, Heartbeat("line", "g", member, "partition", "first"), Assignment)
    granted = ask(stays.node, Acquire("line", "g", 0, "holder", 1), Granted)
    gone.node.submit(Acquire("line", "g", 0, "gone", 1, wait_s=30.0), lambda _: None)
    # After this answer the request is waiting.
    ask(gone.node, Heartbeat("line", "g", "gone", "partition", "first"), Assignment)
    gone.node.close()
    eventually(lambda: served.service.connection_count == 1, "the server has noticed")
    from inturn.protocol.commands import Done, Release

    ask(stays.node, Release("line", "g", "holder", Progress(0, granted.epoch, 0)), Done)
    assert ask(stays.node, Acquire("line", "g", 0, "stays", 2), Granted).epoch == granted.epoch + 1


def test_too_many_connections_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    service = Server(tmp_path / "data", address=Address("127.0.0.1"), settings=ServerSettings(connections=2))
    try:
        with inturn.connect(str(service.address)) as first, inturn.connect(str(service.address)) as second:
            with pytest.raises(ConnectionLost):
                inturn.connect(str(service.address))
            assert first.subjects() == second.subjects() == []
    finally:
        service.close(grace_s=0.0)
