"""Several claimants work on a partition under the same lease: a keeper holds the lease, claimants have slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from inturn import Connection, Consumer, Context, LeaseSettings, Message
from inturn.consumer.claimant import ClaimedPart, ClaimingNode
from inturn.consumer.options import Scope
from inturn.model.errors import GroupConflict
from inturn.model.routing import ALL_SLOTS, SLOT_COUNT, SlotSet, slot_of
from inturn.model.time import SystemClock
from tests.contract.bed import SHORT_LEASE, STEADY_LEASE, WAIT_S, Bed, Seen, Witness, eventually, quick, send_all

GROUP = "g"
KEYS = 16
HALVES = (SlotSet.of(range(0, SLOT_COUNT, 2)), SlotSet.of(range(1, SLOT_COUNT, 2)))


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def mq(bed: Bed, witness: Witness) -> Connection:
    return opened(bed, witness, STEADY_LEASE)


def opened(bed: Bed, witness: Witness, lease: LeaseSettings) -> Connection:
    connection = bed.open(flush="os", lease=lease, observer=witness.recorder)
    connection.create_subject("orders", partitions=2)
    return connection


def nothing(message: Message, context: Context) -> None:
    raise AssertionError("a keeper has no handler to call")


@contextmanager
def keeping(mq: Connection, *, takes_over: bool = True) -> Iterator[Consumer]:
    duty = Scope(keeps_only=True, takes_over=takes_over)
    keeper = mq.consumer("orders", GROUP, nothing, order="key", settings=quick(), name="keeper", duty=duty)
    with keeper:
        if takes_over:
            eventually(lambda: len(keeper.leases()) == 2, "the keeper has both partitions")
        yield keeper


def claimant(
    mq: Connection, keeper: Consumer, seen: object, slots: SlotSet, until: Mapping[int, int], name: str = "task"
) -> Consumer:
    parts = {index: ClaimedPart(keeper.name, lease.epoch, slots) for index, lease in keeper.leases().items()}
    node = ClaimingNode(mq.node, mq.subject("orders"), parts)
    return Consumer(
        node,
        SystemClock(),
        "orders",
        GROUP,
        seen,  # type: ignore[arg-type]
        order="key",
        settings=quick(),
        lease=mq.node.lease,
        name=name,
        duty=Scope(until=until),
    )


def ends(mq: Connection) -> dict[int, int]:
    return {one.index: one.end_offset for one in mq.describe_subject("orders").partitions}


def lag(mq: Connection) -> int:
    return mq.group("orders", GROUP).describe().lag


def slots_seen(seen: Seen) -> set[int]:
    return {slot_of(message.key) for message in seen.messages if message.key is not None}


def test_two_claimants_share_the_partitions_of_a_keeper(mq: Connection, witness: Witness) -> None:
    send_all(mq, "orders", 200, KEYS, witness)
    seen = Seen(), Seen()
    with keeping(mq) as keeper:
        until = ends(mq)
        tasks = [claimant(mq, keeper, witness.watch(seen[index]), HALVES[index], until) for index in (0, 1)]
        for task in tasks:
            task.start()
        assert all(task.wait_until_through(WAIT_S, 2 * WAIT_S) for task in tasks)
        assert len(mq.group("orders", GROUP).describe().claims) == 4
        assert all(task.stop() for task in tasks)
        assert mq.group("orders", GROUP).describe().claims == ()
        assert lag(mq) == 0
    assert len(seen[0].messages) + len(seen[1].messages) == 200
    for index in (0, 1):
        assert seen[index].messages
        assert slots_seen(seen[index]) <= set(HALVES[index])
    assert witness.judge(order="key").duplicates == 0


def test_claimants_share_what_the_node_could_not_cut(
    mq: Connection, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3, C5: like a server without zstd, which passes whole batches on."""
    monkeypatch.setattr("inturn.broker.broker.chosen", lambda batch, slots: batch)
    send_all(mq, "orders", 200, KEYS, witness)
    seen = Seen(), Seen()
    with keeping(mq) as keeper:
        until = ends(mq)
        tasks = [claimant(mq, keeper, witness.watch(seen[index]), HALVES[index], until) for index in (0, 1)]
        for task in tasks:
            task.start()
        assert all(task.wait_until_through(WAIT_S, 2 * WAIT_S) for task in tasks)
        assert all(task.stop() for task in tasks)
        assert lag(mq) == 0
    for index in (0, 1):
        assert slots_seen(seen[index]) <= set(HALVES[index])
    assert witness.judge(order="key").duplicates == 0


def test_a_running_consumer_is_taken_over_and_goes_on_afterwards(mq: Connection, witness: Witness) -> None:
    online, drained = Seen(), Seen()
    with mq.consumer("orders", GROUP, witness.watch(online), order="key", settings=quick(), name="online") as consumer:
        send_all(mq, "orders", 40, KEYS, witness)
        online.wait_for(40)
        before = consumer.statistics().partitions
        assert before == (0, 1)
        with keeping(mq) as keeper:
            eventually(lambda: not consumer.statistics().partitions, "the running one has given all away")
            assert mq.group("orders", GROUP).describe().taken_over_by == keeper.name
            send_all(mq, "orders", 60, KEYS, witness)
            with claimant(mq, keeper, witness.watch(drained), ALL_SLOTS, ends(mq)) as task:
                assert task.wait_until_through(WAIT_S, 2 * WAIT_S)
            assert len(online.messages) == 40
        eventually(lambda: consumer.statistics().partitions == before, "the running one has everything again")
        assert mq.group("orders", GROUP).describe().taken_over_by is None
        send_all(mq, "orders", 20, KEYS, witness)
        online.wait_for(60)
    assert len(drained.messages) == 60
    verdict = witness.judge(order="key")
    assert verdict.sent == 120
    assert verdict.duplicates == 0


def test_a_second_take_over_is_refused(mq: Connection) -> None:
    with keeping(mq):
        duty = Scope(keeps_only=True, takes_over=True)
        second = mq.consumer("orders", GROUP, nothing, order="key", settings=quick(), duty=duty)
        second.start()
        with pytest.raises(GroupConflict, match="has taken it over already"):
            second.wait(WAIT_S)


def test_a_claimant_that_was_killed_is_followed_by_another(bed: Bed, witness: Witness) -> None:
    """The second claimant waits until the first claim ends, and repeats only uncommitted messages."""
    mq = opened(bed, witness, SHORT_LEASE)
    send_all(mq, "orders", 120, KEYS, witness)
    begun = threading.Event()
    released = threading.Event()

    def hang(message: Message, context: Context) -> None:
        if message.offset >= 20:
            begun.set()
            released.wait(WAIT_S)

    first, second = Seen(hang), Seen()
    with keeping(mq) as keeper:
        until = ends(mq)
        doomed = claimant(mq, keeper, witness.watch(first), ALL_SLOTS, until, "doomed")
        doomed.start()
        assert begun.wait(WAIT_S)
        witness.kill(doomed)
        released.set()
        with claimant(mq, keeper, witness.watch(second), ALL_SLOTS, until, "successor") as successor:
            assert successor.wait_until_through(WAIT_S, 2 * WAIT_S)
        assert lag(mq) == 0
    verdict = witness.judge(order="key")
    assert verdict.sent == 120
    assert second.messages


def test_claimants_are_called_back_when_the_keeper_stops(mq: Connection, witness: Witness) -> None:
    """The keeper waits for the claimants. The next consumer does not repeat messages that the claimants finished."""
    send_all(mq, "orders", 100, KEYS, witness)

    def take_time(message: Message, context: Context) -> None:
        threading.Event().wait(0.02)

    slow, rest = Seen(take_time), Seen()
    with keeping(mq) as keeper:
        task = claimant(mq, keeper, witness.watch(slow), HALVES[0], ends(mq))
        task.start()
        slow.wait_for(5)
        assert keeper.stop(20.0)
    assert mq.group("orders", GROUP).describe().claims == ()
    task.stop()
    with mq.consumer("orders", GROUP, witness.watch(rest), order="key", settings=quick()):
        eventually(lambda: lag(mq) == 0, "all is done")
    verdict = witness.judge(order="key")
    assert len(slow.messages) + len(rest.messages) == verdict.finished == 100
    assert verdict.duplicates == 0


def test_a_keeper_may_be_one_member_among_others(mq: Connection, witness: Witness) -> None:
    online, drained = Seen(), Seen()
    with mq.consumer("orders", GROUP, witness.watch(online), order="key", settings=quick(), name="online") as consumer:
        with keeping(mq, takes_over=False) as keeper:
            eventually(lambda: len(keeper.leases()) == 1, "the keeper has its share")
            eventually(lambda: len(consumer.statistics().partitions) == 1, "so has the other")
            (partition,) = keeper.leases()
            send_all(mq, "orders", 60, KEYS, witness)
            until = {partition: ends(mq)[partition]}
            with claimant(mq, keeper, witness.watch(drained), ALL_SLOTS, until) as task:
                assert task.wait_until_through(WAIT_S, 2 * WAIT_S)
            eventually(lambda: lag(mq) == 0, "all is done")
        assert {message.partition for message in drained.messages} == {partition}
    assert witness.judge(order="key").duplicates == 0


def test_a_bound_is_kept(mq: Connection, witness: Witness) -> None:
    send_all(mq, "orders", 60, KEYS, witness)
    seen = Seen()
    with keeping(mq) as keeper:
        until = {index: end // 2 for index, end in ends(mq).items()}
        with claimant(mq, keeper, witness.watch(seen), ALL_SLOTS, until) as task:
            assert task.wait_until_through(WAIT_S, 2 * WAIT_S)
        committed = {one.partition: one.committed for one in mq.group("orders", GROUP).describe().partitions}
        assert committed == until
    assert len(seen.messages) == sum(until.values())
    assert all(message.offset < until[message.partition] for message in seen.messages)
    witness.judge(order="key", complete=False)
