"""Members that join, leave and die, and the contract meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from inturn import Connection, Consumer, ConsumerSettings, Context, Message, suspend
from tests.contract.bed import (
    SHORT_LEASE,
    STEADY_LEASE,
    WAIT_S,
    Bed,
    Seen,
    Witness,
    eventually,
    in_one_of,
    is_renewed,
    quick,
    send_all,
)


@pytest.fixture
def line(mq: Connection) -> Connection:
    mq.create_subject("line", 1)
    return mq


def test_a_graceful_stop_finishes_the_running_handler_and_commits(line: Connection) -> None:
    """C2, C17: the next lease holder repeats no message."""
    send_all(line, "line", 10)
    entered, gate = threading.Event(), threading.Event()

    def handle(message: Message, context: Context) -> None:
        if message.body == b"3":
            entered.set()
            gate.wait(WAIT_S)

    first = Seen(handle)
    consumer = line.consumer("line", "g", first, settings=quick())
    consumer.start()
    assert entered.wait(WAIT_S)
    stopping = threading.Thread(target=consumer.stop)
    stopping.start()
    eventually(lambda: not consumer.leases(), "it is stopping")
    assert line.group("line", "g").describe().partitions[0].owner == consumer.name
    second = Seen()
    successor = line.consumer("line", "g", second, settings=quick())
    successor.start()
    time.sleep(0.05)
    assert second.messages == [], "a handler still running keeps the lease"
    gate.set()
    second.wait_for(6)
    stopping.join(WAIT_S)
    successor.stop()
    assert first.bodies == [b"0", b"1", b"2", b"3"]
    assert second.bodies == [b"4", b"5", b"6", b"7", b"8", b"9"]
    assert second.epochs[0] > first.epochs[0]


def test_a_hand_over_takes_well_under_a_second(line: Connection) -> None:
    """C17: the next member is woken without polling. With the default settings and the default lease."""

    def hand_over() -> None:
        send_all(line, "line", 1)
        first, second = Seen(), Seen()
        with line.consumer("line", "g", first) as one, line.consumer("line", "g", second) as two:
            eventually(lambda: first.messages or second.messages, "one of them has it")
            holder, taker = (one, second) if first.messages else (two, first)
            began_s = time.monotonic()
            assert holder.stop()
            send_all(line, "line", 1)
            taker.wait_for(1)
            took_s = time.monotonic() - began_s
            began_s = time.monotonic()
        assert took_s < 0.9
        assert time.monotonic() - began_s < 0.5, "stopping the last one takes no time either"

    in_one_of(5, hand_over)  # the bound: a hand-over takes less than 0.9 s


def test_stopping_a_consumer_that_waits_for_a_lease_takes_no_time(mq: Connection) -> None:
    """C17: the new member is assigned partitions, but a handler of the first member still runs there."""
    send_all(mq, "orders", 40, keys=20)
    gate = threading.Event()

    def block(message: Message, context: Context) -> None:
        gate.wait(WAIT_S)

    busy = Seen(block)
    waits_long = ConsumerSettings(pull_wait_s=30.0)  # for leases, too
    holder, newcomer = mq.consumer("orders", "g", busy), mq.consumer("orders", "g", Seen(), settings=waits_long)
    holder.start()
    busy.wait_for(4)
    newcomer.start()
    eventually(lambda: len(mq.group("orders", "g").describe().members) == 2, "it has joined")
    time.sleep(0.05)  # now the consumer asks for the leases
    began_s = time.monotonic()
    assert newcomer.stop()
    took_s = time.monotonic() - began_s
    gate.set()
    assert took_s < WAIT_S / 2


def test_a_killed_consumer_is_succeeded_after_its_lease_and_only_what_is_open_is_repeated(bed: Bed) -> None:
    """B2, B4, the contract."""
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("line", 1)
    send_all(mq, "line", 20, witness=witness)
    reached, gate = threading.Event(), threading.Event()

    def handle(message: Message, context: Context) -> None:
        if message.body == b"7":
            reached.set()
            gate.wait(WAIT_S)

    first, second = Seen(witness.watch(handle)), Seen(witness.watch(lambda message, context: None))
    consumer = mq.consumer("line", "g", first, settings=quick(), name="first")
    consumer.start()
    assert reached.wait(WAIT_S)
    at_s = time.monotonic()
    left_s = mq.group("line", "g").describe().partitions[0].remaining_s or 0.0
    consumer.kill()
    successor = mq.consumer("line", "g", second, settings=quick(), name="second")
    successor.start()
    second.wait_for(1)
    waited_s = time.monotonic() - at_s
    gate.set()
    eventually(lambda: mq.group("line", "g").describe().partitions[0].committed == 20, "all is committed")
    successor.stop()
    assert left_s <= waited_s < WAIT_S / 2, "after the lease, and soon after it"
    offsets = list(dict.fromkeys(message.offset for message in second.messages))
    assert offsets == list(range(offsets[0], 20))
    assert offsets[0] <= 7
    verdict = witness.judge()
    assert verdict.sent == 20


def test_a_living_consumer_keeps_its_partitions_when_leases_are_shorter_than_heartbeats(bed: Bed) -> None:
    """M7, M9: no other member wants the partitions, and no command fails."""
    mq = bed.open(flush="os", lease=STEADY_LEASE)
    mq.create_subject("line", 1)
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=ConsumerSettings(heartbeat_s=60.0, pull_wait_s=60.0)):
        send_all(mq, "line", 1)
        seen.wait_for(1)
        for _ in range(3):
            is_renewed(mq)
        send_all(mq, "line", 1)
        seen.wait_for(2)
    assert seen.epochs == [1, 1]


def test_several_consumers_come_and_go_and_the_contract_holds(bed: Bed) -> None:
    """M7, C1, C2, C17, the contract: checked by the order checker."""
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("many", 8)
    seen = Seen(witness.watch(lambda message, context: None))
    consumers: list[Consumer] = []

    def join() -> None:
        consumers.append(mq.consumer("many", "g", seen, settings=quick(), name=f"c{len(consumers)}"))
        consumers[-1].start()

    join()
    sent = 0
    for step in range(8):
        send_all(mq, "many", 100, keys=40, witness=witness)
        sent += 100
        if step < 4:
            join()
        else:
            consumers[step - 4].stop()
        seen.wait_for(sent // 2)
    seen.wait_for(sent)
    eventually(lambda: sum(p.lag for p in mq.group("many", "g").describe().partitions) == 0, "all is committed")
    for consumer in consumers:
        assert consumer.stop()
    verdict = witness.judge()
    assert verdict.sent == sent == 800
    assert verdict.duplicates == 0, "nobody crashed, so nothing is repeated"
    assert verdict.lease_grants > 8


def test_consumers_that_fail_and_are_killed_keep_the_contract(bed: Bed) -> None:
    """B4, C10, the contract."""
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("many", 4)
    count = [0]
    lock = threading.Lock()

    def handle(message: Message, context: Context) -> object:
        with lock:
            count[0] += 1
            if count[0] % 17 == 0:
                return suspend(0.01)
            if count[0] % 23 == 0:
                raise RuntimeError("no")
        return None

    seen = Seen(witness.watch(handle))
    consumers = [mq.consumer("many", "g", seen, settings=quick(), name=f"c{n}") for n in range(3)]
    for consumer in consumers:
        consumer.start()
    send_all(mq, "many", 200, keys=40, witness=witness)
    seen.wait_for(20)
    consumers[0].kill()
    send_all(mq, "many", 100, keys=40, witness=witness)
    eventually(lambda: sum(p.lag for p in mq.group("many", "g").describe().partitions) == 0, "all is committed")
    for consumer in consumers[1:]:
        assert consumer.stop()
    assert witness.judge().sent == 300


def test_more_consumers_than_partitions_leave_some_without_work(line: Connection) -> None:
    send_all(line, "line", 20)
    seen = Seen()
    consumers = [line.consumer("line", "g", seen, settings=quick()) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    seen.wait_for(20)
    eventually(lambda: len(line.group("line", "g").describe().members) == 3, "all have joined")
    for consumer in consumers:
        assert consumer.stop()
    assert len(seen.messages) == 20


def test_partitions_are_shared_evenly(mq: Connection) -> None:
    """M7, M8."""
    consumers = [mq.consumer("orders", "g", Seen(), settings=quick()) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    eventually(lambda: [len(c.statistics().partitions) for c in consumers] == [2, 2], "two each")
    consumers[0].stop()
    eventually(lambda: len(consumers[1].statistics().partitions) == 4, "the other has all")
    consumers[1].stop()


def test_two_groups_do_not_know_of_each_other(mq: Connection) -> None:
    send_all(mq, "orders", 50)
    gate = threading.Event()
    stuck, free = Seen(lambda message, context: gate.wait(WAIT_S) and None), Seen()
    with mq.consumer("orders", "stuck", stuck, settings=quick()), mq.consumer("orders", "free", free, settings=quick()):
        free.wait_for(50)
        stuck.wait_for(1)
        eventually(lambda: sum(p.lag for p in mq.group("orders", "free").describe().partitions) == 0, "free is done")
        assert sum(p.committed for p in mq.group("orders", "stuck").describe().partitions) == 0
        gate.set()
        stuck.wait_for(50)


def test_two_consumers_of_the_same_name_never_handle_the_same_message_at_once(bed: Bed) -> None:
    """B4, the contract: a member name is for people. A lease still has a single owner."""
    witness = Witness()
    mq = bed.open(flush="os", lease=STEADY_LEASE, observer=witness.recorder)
    mq.create_subject("line", 1)
    send_all(mq, "line", 50, witness=witness)
    seen = Seen(witness.watch(lambda message, context: time.sleep(0.001)))
    consumers = [mq.consumer("line", "g", seen, settings=quick(), name="worker") for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    seen.wait_for(50)
    eventually(lambda: mq.group("line", "g").describe().partitions[0].lag == 0, "all is committed")
    for consumer in consumers:
        consumer.stop()
    assert witness.judge().duplicates == 0


def test_a_group_says_who_has_what_and_how_far(mq: Connection) -> None:
    send_all(mq, "orders", 40, keys=20)
    seen = Seen()
    with mq.consumer("orders", "g", seen, settings=quick(), name="worker"):
        seen.wait_for(40)
        eventually(lambda: sum(p.lag for p in mq.group("orders", "g").describe().partitions) == 0, "all is committed")
        description = mq.group("orders", "g").describe()
        (member,) = description.members
        assert member.startswith("worker-")
        assert {partition.owner for partition in description.partitions} == {member}
        assert all(partition.remaining_s and partition.remaining_s > 0 for partition in description.partitions)
        assert sum(partition.committed for partition in description.partitions) == 40
    after = mq.group("orders", "g").describe()
    assert after.members == ()
    assert {partition.owner for partition in after.partitions} == {None}
