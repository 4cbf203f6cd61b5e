"""C12, M6: a group asks for an order, and an operator may decide the order.

Members follow a stricter decided order, and stop at a weaker decided order.
"""

from __future__ import annotations

import threading

import pytest

from inturn import Connection, Context, Message, OnExhausted, suspend
from inturn.errors import GroupConflict, InvalidInput, NotFound
from tests.contract.bed import WAIT_S, Bed, Seen, Witness, committed, eventually, quick, send, send_all


class Most:
    """How many handlers run at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self.most = 0

    def __call__(self, message: Message, context: Context) -> None:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        threading.Event().wait(0.002)
        with self._lock:
            self._running -= 1


def made(mq: Connection, order: str = "key") -> None:
    """The group "g" on "line" exists."""
    with mq.consumer("line", "g", lambda message, context: None, order=order, settings=quick()):
        eventually(lambda: [one.group for one in mq.groups()] == ["g"], "the group is made")


def test_a_member_that_asks_for_key_order_keeps_partition_order_if_that_was_decided(line: Connection) -> None:
    made(line)
    line.group("line", "g").set_order("partition")
    witness, most = Witness(), Most()
    send_all(line, "line", 60, witness=witness)
    with line.consumer("line", "g", witness.watch(most), order="key", settings=quick(concurrency=8)):
        eventually(lambda: committed(line) == 60, "all of them")
        found = line.group("line", "g").describe()
        assert (found.order, found.set_order) == ("partition", "partition")
    assert most.most == 1
    witness.judge(order="partition")


def test_members_change_over_while_they_run_and_nothing_is_lost_or_out_of_order(mq: Connection) -> None:
    witness = Witness()
    send_all(mq, "orders", 300, witness=witness)
    most = Most()
    seen = Seen(most)
    members = [mq.consumer("orders", "g", witness.watch(seen), order="key", settings=quick()) for _ in range(2)]
    for member in members:
        member.start()
    seen.wait_for(40)
    mq.group("orders", "g").set_order("partition")
    seen.wait_for(150)
    mq.group("orders", "g").set_order(None)
    eventually(lambda: committed(mq, subject="orders") == 300, "all of them")
    assert all(member.stop() for member in members)
    assert witness.judge(order="key").duplicates == 0
    assert mq.group("orders", "g").describe().set_order is None


def test_after_the_change_one_at_a_time_runs_and_before_it_several_do(line: Connection) -> None:
    send_all(line, "line", 200)
    before, after = Most(), Most()
    changed, epochs = threading.Event(), set[int]()

    def handle(message: Message, context: Context) -> object:
        if context.epoch in epochs:
            return suspend(0.01)  # so that messages are left after the change
        return (after if changed.is_set() else before)(message, context)

    seen = Seen(handle)
    with line.consumer("line", "g", seen, order="key", settings=quick(concurrency=8)):
        seen.wait_for(50)
        epochs.update(seen.epochs)
        line.group("line", "g").set_order("partition")
        eventually(lambda: seen.epochs[-1] not in epochs, "it has the lease anew")
        changed.set()
        eventually(lambda: committed(line) == 200, "all of them")
    assert before.most > 1
    assert after.most == 1


@pytest.mark.parametrize(("asked", "decided"), [("partition", "key"), ("partition", "none"), ("key", "none")])
def test_a_member_stops_with_an_error_at_a_weaker_order(line: Connection, asked: str, decided: str) -> None:
    made(line, asked)
    line.group("line", "g").set_order(decided)
    seen = Seen()
    consumer = line.consumer("line", "g", seen, order=asked, settings=quick())
    send(line, "line", "k:1")
    consumer.start()
    with pytest.raises(GroupConflict, match=f"order='{decided}' was set.*made for order='{asked}'.*group set"):
        consumer.wait(WAIT_S)
    assert seen.bodies == []
    eventually(lambda: not line.group("line", "g").describe().members, "it has left")
    with line.consumer("line", "g", seen, order=decided, settings=quick()):
        seen.wait_for(1)


def test_a_running_member_stops_at_a_weaker_order_and_commits_what_it_did(line: Connection) -> None:
    seen = Seen()
    send(line, "line", "k:1", "k:2")
    consumer = line.consumer("line", "g", seen, settings=quick())
    consumer.start()
    seen.wait_for(2)
    line.group("line", "g").set_order("none")
    with pytest.raises(GroupConflict, match="order='none' was set"):
        consumer.wait(WAIT_S)
    assert committed(line) == 2


def test_a_member_that_parks_keys_stops_where_there_are_none(line: Connection) -> None:
    made(line)
    line.group("line", "g").set_order("partition")
    settings = quick(max_attempts=2, on_exhausted=OnExhausted.PARK)
    consumer = line.consumer("line", "g", Seen(), order="key", settings=settings)
    consumer.start()
    with pytest.raises(GroupConflict, match="its settings park keys"):
        consumer.wait(WAIT_S)


def test_a_group_with_parked_keys_stays_at_order_by_key(line: Connection, quiet: None) -> None:
    send(line, "line", "k:1")
    settings = quick(max_attempts=1, on_exhausted=OnExhausted.PARK)
    with line.consumer("line", "g", lambda message, context: suspend(0.01), order="key", settings=settings):
        eventually(lambda: committed(line) == 1, "it is parked")
    with pytest.raises(GroupConflict, match="1 of its keys are parked"):
        line.group("line", "g").set_order("partition")
    line.group("line", "g").set_order("key")


def test_whoever_asks_for_what_was_decided_may_join_others_that_follow_it(mq: Connection) -> None:
    """Like a drain, which asks for the order of the group."""
    send_all(mq, "orders", 40)
    seen = Seen()
    with mq.consumer("orders", "g", seen, order="key", settings=quick()):
        seen.wait_for(40)
        with (
            pytest.raises(GroupConflict, match="its members use order='key'"),
            mq.consumer("orders", "g", seen, order="partition", settings=quick()) as early,
        ):
            early.wait(WAIT_S)
        mq.group("orders", "g").set_order("partition")
        with mq.consumer("orders", "g", seen, order="partition", settings=quick()) as late:
            eventually(lambda: len(late.leases()) == 2, "it has its share")
            mq.group("orders", "g").set_order(None)
            with pytest.raises(GroupConflict, match="'partition'"):
                late.wait(WAIT_S)


def test_the_decision_survives_a_restart(bed: Bed, line: Connection) -> None:
    made(line)
    line.group("line", "g").set_order("partition")
    later = bed.reopen(flush="os")
    assert later.group("line", "g").describe().set_order == "partition"
    assert later.group("line", "g").describe().order == "partition"


def test_what_cannot_be_decided_is_refused(line: Connection) -> None:
    with pytest.raises(NotFound, match="no group"):
        line.group("line", "g").set_order("key")
    with pytest.raises(InvalidInput, match="order='sorted'"):
        line.group("line", "g").set_order("sorted")
    with line.consumer("line", "s", Seen(), mode="shared", settings=quick()):
        eventually(lambda: [one.group for one in line.groups()] == ["s"], "the group is made")
    with pytest.raises(GroupConflict, match="keeps no order"):
        line.group("line", "s").set_order("key")
