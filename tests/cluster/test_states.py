"""P9: broker groups that are read-only, unavailable or dead: strict waits, best effort uses other broker groups."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

import inturn
from inturn import Connection, ProducerSettings
from inturn.errors import BrokerGroupClosed, InvalidInput, NotFound, SendTimeout
from tests.contract.bed import (
    SHORT_LEASE,
    WAIT_S,
    GroupedBed,
    Seen,
    committed,
    eventually,
    has_joined,
    in_one_of,
    of_key,
    quick,
    send,
    send_all,
    waits_because,
)

PATIENT = ProducerSettings(backoff_min_s=0.01, backoff_max_s=0.02)


def key_in(mq: Connection, subject: str, broker_group: str) -> str:
    """A key of the given broker group."""
    route = mq.subject(subject).route
    return next(
        key
        for key in (f"k{number}" for number in range(1000))
        if route.partitions[route.by_slot[inturn.slot_of(key.encode())]].broker_group == broker_group
    )


@pytest.mark.parametrize("state", ["read-only", "unavailable"])
def test_a_strict_producer_waits_until_the_broker_group_is_back(mq: Connection, state: str) -> None:
    mq.create_subject("orders", 2)
    key = key_in(mq, "orders", "east")
    mq.set_broker_group("east", state)
    with mq.producer(settings=PATIENT) as producer:
        waiting = [producer.send("orders", b"%d" % number, key=key) for number in range(5)]
        waits_because(waiting[0], f"'east' is {state}")
        other = producer.send_sync("orders", b"x", key=key_in(mq, "orders", "west"), timeout_s=WAIT_S)
        assert other.home is None
        mq.set_broker_group("east", "available")
        stored = [one.result(WAIT_S) for one in waiting]
    assert [(one.partition, one.offset, one.home) for one in stored] == [(0, number, None) for number in range(5)]


@pytest.mark.parametrize("state", ["read-only", "unavailable"])
def test_a_best_effort_producer_goes_round_it_and_says_so(
    mq: Connection, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    mq.create_subject("orders", 4, strategy="best-effort")
    key = key_in(mq, "orders", "east")
    home = mq.subject("orders").route.by_slot[inturn.slot_of(key.encode())]
    mq.set_broker_group("east", state)
    with caplog.at_level(logging.WARNING, "inturn.producer"), mq.producer(settings=PATIENT) as producer:
        stored = producer.send_sync("orders", b"x", key=key, timeout_s=WAIT_S)
        assert mq.subject("orders").route.partitions[stored.partition].broker_group == "west"
        assert stored.home == home
        told = [one.getMessage() for one in caplog.records if "producer.routed_around" in one.getMessage()]
        assert len(told) == 1
        assert f"'east' is {state}" in told[0]
        mq.set_broker_group("east", "available")
        assert producer.send_sync("orders", b"y", key=key, timeout_s=WAIT_S).home is None


def test_best_effort_with_no_way_round_fails_with_what_is_in_the_way(mq: Connection) -> None:
    mq.create_subject("orders", 2, strategy="best-effort", broker_groups=["east"])
    mq.set_broker_group("east", "read-only")
    producer = mq.producer(settings=PATIENT)
    handle = producer.send("orders", b"x", key="k")
    with pytest.raises(inturn.errors.SendFailed, match="read-only"):
        handle.result(WAIT_S)
    producer.close()


def test_what_is_read_only_is_consumed_and_what_is_unavailable_waits(mq: Connection) -> None:
    mq.create_subject("line", 2)
    send_all(mq, "line", 40)
    mq.set_broker_group("east", "read-only")
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=quick(pull_wait_s=0.2)):
        seen.wait_for(40)
        eventually(lambda: committed(mq) == 40, "all is committed")
        mq.set_broker_group("east", "available")
        mq.set_broker_group("east", "unavailable")
        west = key_in(mq, "line", "west")
        with mq.producer(settings=PATIENT) as producer:
            waiting = producer.send("line", b"later", key=key_in(mq, "line", "east"))
            producer.send_sync("line", b"now", key=west, timeout_s=WAIT_S)
            seen.wait_for(41)
            assert seen.bodies[40] == b"now"
            with pytest.raises(BrokerGroupClosed, match="unavailable"):
                mq.reader("line").read(0)
            mq.set_broker_group("east", "available")
            waiting.result(WAIT_S)
        seen.wait_for(42)
    assert sorted(seen.bodies[40:]) == [b"later", b"now"]  # no message twice: the leases stayed


def test_a_state_is_kept_when_meta_and_brokers_are_started_again(cluster: GroupedBed, mq: Connection) -> None:
    mq.create_subject("orders", 2)
    mq.set_broker_group("east", "read-only")
    mq = cluster.reopen()
    assert [(one.name, one.state) for one in mq.broker_groups()] == [("east", "read-only"), ("west", "available")]
    with mq.producer(settings=PATIENT) as producer:
        waiting = producer.send("orders", b"x", key=key_in(mq, "orders", "east"))
        with pytest.raises(SendTimeout):
            waiting.result(0.1)
        mq.set_broker_group("east", "available")
        waiting.result(WAIT_S)


def test_best_effort_goes_round_a_broker_that_is_dead_and_strict_waits_for_it(mortal: GroupedBed) -> None:
    mq = mortal.open()
    for name, strategy in (("loose", "best-effort"), ("tight", "strict")):
        mq.create_subject(name, 2, strategy=strategy)
    key = key_in(mq, "tight", "east")
    with mq.producer(settings=ProducerSettings(backoff_min_s=0.01, backoff_max_s=0.05)) as producer:
        producer.send_sync("tight", b"0", key=key, timeout_s=WAIT_S)
        mortal.brokers.pop("east").close(0.0)
        eventually(lambda: not mq.broker_groups()[0].is_heard, "east is counted dead")
        assert mq.broker_groups()[0].condition == "dead"
        (brokers,) = [part for part in mq.describe_node().parts if part.name == "brokers"]
        assert (brokers.is_ready, brokers.why) == (True, "1 of 2 brokers are not heard: east")
        eventually(lambda: producer.send_sync("loose", b"x", key=key, timeout_s=WAIT_S).home == 0, "it goes to west")
        waiting = producer.send("tight", b"1", key=key)
        waits_because(waiting, "dead")
        with pytest.raises(BrokerGroupClosed, match="'east' is dead"):
            mq.describe_subject("tight")
        mortal.start_broker("east")  # at a different port
        assert (waiting.result(WAIT_S).partition, waiting.result().offset) == (0, 1)
    assert [message.body for message in mq.reader("tight")] == [b"0", b"1"]


def test_a_consumer_keeps_what_it_holds_at_one_broker_while_another_is_dead(mortal: GroupedBed) -> None:
    """B3: a commit or renewal for both brokers still reaches the living broker."""
    mq = mortal.open(lease=SHORT_LEASE)
    mq.create_subject("line", 2)
    east, west = key_in(mq, "line", "east"), key_in(mq, "line", "west")
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=quick(pull_wait_s=0.1, answer_timeout_s=0.5)):
        send(mq, "line", f"{east}:0", f"{west}:0")
        seen.wait_for(2)
        eventually(lambda: committed(mq) == 2, "both are committed")
        mortal.brokers.pop("west").close(0.0)
        numbers = iter(range(1, 1_000_000))

        def newest() -> tuple[str, int]:
            """The last message from the broker group, and the epoch of the lease."""
            return [
                (message.body.decode(), epoch)
                for message, epoch in zip(seen.messages, seen.epochs, strict=False)
                if message.key == east.encode()
            ][-1]

        def keeps_it() -> None:
            _, epoch = newest()
            until_s = time.monotonic() + 3 * SHORT_LEASE.life_s
            while time.monotonic() < until_s or mq.broker_groups()[1].is_heard:
                body = str(next(numbers))
                send(mq, "line", f"{east}:{body}")
                eventually(lambda body=body: newest()[0] == body, "it goes on")  # type: ignore[misc]
                assert newest()[1] == epoch, "it has lost the lease"

        in_one_of(4, keeps_it)  # the bound: every renewal comes within the short life of the lease
        mortal.start_broker("west")
        send(mq, "line", f"{west}:back")
        eventually(lambda: of_key(seen.messages, west) == ["0", "back"], "it goes on there, too")


def test_what_fails_in_a_read_only_broker_group_moves_to_where_its_retry_subject_is(
    mq: Connection, quiet: None
) -> None:
    """B6: the broker with the lease checks the lease and passes the message on."""
    mq.create_subject("line", 2)
    east, west = key_in(mq, "line", "east"), key_in(mq, "line", "west")
    send(mq, "line", f"{east}:in-east", f"{west}:in-west")
    mq.set_broker_group("west", "read-only")

    def fail(*message_and_context: object) -> None:
        raise RuntimeError("no")

    letters = quick(max_attempts=1, on_exhausted="dead-letter")
    with mq.consumer("line", "g", fail, order="key", settings=letters):
        eventually(lambda: has_joined(mq), "there is the group")
        eventually(lambda: len(mq.group("line", "g").dead_letters().list()) == 2, "both are dead letters")
        found = mq.group("line", "g").dead_letters().list()
        assert {(one.message.body, one.partition) for one in found} == {(b"in-east", 0), (b"in-west", 1)}
        eventually(lambda: committed(mq) == 2, "neither is open here any more")
        mq.set_broker_group("east", "read-only")  # the broker group of the dead letters
        mq.set_broker_group("west", "available")
        send(mq, "line", f"{west}:later")
        described = mq.group("line", "g").describe().partitions[1]
        assert (described.committed, described.end_offset) == (1, 2)
        mq.set_broker_group("east", "available")
        eventually(lambda: len(mq.group("line", "g").dead_letters().list()) == 3, "it waited")


def test_a_node_without_a_cluster_can_be_made_read_only(tmp_path: Path) -> None:
    with inturn.connect(tmp_path / "data") as node:
        node.create_subject("orders", 1)
        node.set_broker_group("local", "read-only")
    with inturn.connect(tmp_path / "data") as node:
        assert node.broker_groups()[0].state == "read-only"
        with node.producer(settings=PATIENT) as producer:
            waiting = producer.send("orders", b"x", key="k")
            waits_because(waiting, "'local' is read-only")
            node.set_broker_group("local", "available")
            assert waiting.result(WAIT_S).offset == 0
        with pytest.raises(NotFound, match="no broker group 'east'"):
            node.set_broker_group("east", "read-only")
        with pytest.raises(InvalidInput, match="closed"):
            node.set_broker_group("local", "closed")


def test_a_key_that_may_be_with_a_dead_broker_is_not_said_to_be_nowhere(mortal: GroupedBed) -> None:
    """M2: where a selector chooses partitions, any broker may have the key."""
    mq = mortal.open()
    mq.create_subject("chosen", 2, routing="selector")
    with mq.consumer("chosen", "g", lambda message, context: None, settings=quick()):
        eventually(lambda: has_joined(mq, "chosen", "g"), "it is joined")
    for name in ("west", "east"):
        mortal.brokers.pop(name).close(0.0)
        eventually(lambda: sum(one.is_heard for one in mq.broker_groups()) == len(mortal.brokers), "it counts as dead")
        with pytest.raises(BrokerGroupClosed, match="is dead"):
            mq.group("chosen", "g").describe_key("k")
