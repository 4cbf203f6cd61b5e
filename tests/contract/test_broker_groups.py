"""Broker groups: a node has the single broker group `local`; a cluster has several."""

from __future__ import annotations

import pytest

from inturn import Connection, ProducerSettings, Subject
from inturn.errors import NotFound, SendFailed
from tests.contract.bed import WAIT_S, Bed, Seen, committed, eventually, quick, send, waits_because

PATIENT = ProducerSettings(backoff_min_s=0.01, backoff_max_s=0.02)


def homes(subject: Subject) -> list[str]:
    return [one.broker_group for one in subject.route.partitions]


def test_partitions_are_in_broker_groups_that_are_there_and_stay_in_them(mq: Connection) -> None:
    """M1, M2: a new subject uses two broker groups, or a single broker group if there is no second."""
    groups = mq.broker_groups()
    subject = mq.subject("orders")
    assert set(homes(subject)) == {one.name for one in groups}
    assert sum(one.partition_count for one in groups) == 4
    assert mq.create_subject("orders", 4) == subject
    assert [one.partition for one in mq.describe_subject("orders").partitions] == list(subject.route.partitions)


def test_an_operator_sets_the_route_by_hand(mq: Connection) -> None:
    """M2."""
    chosen = mq.broker_groups()[-1].name
    made = mq.create_subject("by-hand", 3, broker_groups=[chosen])
    assert homes(made) == [chosen] * 3
    assert mq.create_subject("by-hand", 3) == made
    with pytest.raises(NotFound, match="no broker group 'nowhere'"):
        mq.create_subject("other", 1, broker_groups=["nowhere"])


@pytest.mark.parametrize("state", ["read-only", "unavailable"])
def test_strict_sends_wait_in_their_order_until_the_broker_group_is_back(line: Connection, state: str) -> None:
    """P9."""
    (home,) = homes(line.subject("line"))
    line.set_broker_group(home, state)
    with line.producer(settings=PATIENT) as producer:
        waiting = [producer.send("line", b"%d" % number, key="k") for number in range(5)]
        waits_because(waiting[0], f"'{home}' is {state}")
        line.set_broker_group(home, "available")
        assert [one.result(WAIT_S).offset for one in waiting] == list(range(5))


def test_a_best_effort_send_that_has_no_way_round_says_what_is_in_the_way(mq: Connection) -> None:
    """P9."""
    home = mq.broker_groups()[0].name
    mq.create_subject("loose", 2, strategy="best-effort", broker_groups=[home])
    mq.set_broker_group(home, "read-only")
    producer = mq.producer(settings=PATIENT)
    with pytest.raises(SendFailed, match="read-only"):
        producer.send("loose", b"x", key="k").result(WAIT_S)
    producer.close()


def test_what_is_read_only_is_consumed(line: Connection) -> None:
    """P9."""
    send(line, "line", "k:0", "k:1")
    (home,) = homes(line.subject("line"))
    line.set_broker_group(home, "read-only")
    seen = Seen()
    with line.consumer("line", "g", seen, settings=quick()):
        seen.wait_for(2)
        eventually(lambda: committed(line) == 2, "both are committed")


def test_a_state_is_kept_when_it_is_opened_again(bed: Bed) -> None:
    """P9."""
    mq = bed.open()
    first = mq.broker_groups()[0].name
    mq.set_broker_group(first, "read-only")
    states = {one.name: one.state for one in bed.reopen().broker_groups()}
    assert states[first] == "read-only"
