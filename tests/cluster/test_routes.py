"""M1, M2: the broker groups of a subject's partitions."""

from __future__ import annotations

import pytest

from inturn import Connection, Subject, slot_of
from inturn.errors import AlreadyExists, BrokerGroupClosed, InvalidInput, NotFound
from tests.contract.bed import GroupedBed, eventually


def homes(subject: Subject) -> list[str]:
    return [one.broker_group for one in subject.route.partitions]


def test_a_new_subject_is_over_two_broker_groups_by_itself(mq: Connection) -> None:
    assert homes(mq.create_subject("orders", 4)) == ["east", "west", "east", "west"]
    assert [(one.name, one.partition_count) for one in mq.broker_groups()] == [("east", 2), ("west", 2)]
    described = mq.describe_subject("orders").partitions
    assert [one.partition.broker_group for one in described] == ["east", "west", "east", "west"]
    assert len({one.partition.name for one in described}) == 4


def test_where_only_one_broker_group_is_available_it_is_in_that_one_and_stays_there(mq: Connection) -> None:
    mq.set_broker_group("east", "read-only")
    assert homes(mq.create_subject("orders", 2)) == ["west", "west"]
    mq.set_broker_group("east", "available")
    assert homes(mq.create_subject("orders", 2)) == ["west", "west"]
    assert homes(mq.create_subject("others", 2)) == ["east", "west"]


def test_where_none_is_available_a_subject_cannot_be_made(mq: Connection) -> None:
    for name in ("east", "west"):
        mq.set_broker_group(name, "unavailable")
    with pytest.raises(BrokerGroupClosed, match="broker-group set east available"):
        mq.create_subject("orders", 2)


def test_the_two_with_the_fewest_partitions_are_chosen(cluster: GroupedBed, mq: Connection) -> None:
    mq.create_subject("orders", 4)
    cluster.start_broker("north")
    eventually(lambda: len(mq.broker_groups()) == 3, "the third broker is heard")
    assert homes(mq.create_subject("others", 2)) == ["north", "east"]
    assert homes(mq.subject("orders")) == ["east", "west", "east", "west"]


def test_an_operator_sets_the_route_by_hand(mq: Connection) -> None:
    assert homes(mq.create_subject("a", 2, broker_groups=["west"])) == ["west", "west"]
    assert homes(mq.create_subject("b", 3, broker_groups=["west", "east", "east"])) == ["west", "east", "east"]
    assert homes(mq.create_subject("a", 2)) == ["west", "west"]  # the route is fixed from now on
    with pytest.raises(AlreadyExists, match="broker groups west, west \\(not east, east\\)"):
        mq.create_subject("a", 2, broker_groups=["east"])
    with pytest.raises(NotFound, match="no broker group 'south'; there are: east, west"):
        mq.create_subject("c", 2, broker_groups=["south"])
    with pytest.raises(InvalidInput, match="2 broker groups for 1 partitions"):
        mq.create_subject("c", 1, broker_groups=["east", "west"])


def test_children_are_in_the_broker_group_of_their_parents(mq: Connection) -> None:
    """M5: the broker with the log of the parent knows when the child opens."""
    mq.create_subject("orders", 2)
    grown = mq.grow_subject("orders", 5)
    assert homes(grown) == ["east", "west", "east", "west", "east"]
    for one in grown.route.descents:
        assert homes(grown)[one.child] == homes(grown)[one.parent]
    assert mq.grow_subject("orders", 5) == grown
    with mq.producer() as producer:
        stored = [producer.send_sync("orders", b"x", key=f"k{number}") for number in range(40)]
    assert {one.partition for one in stored} == set(range(5))
    assert all(one.partition == grown.route.by_slot[slot_of(b"k%d" % number)] for number, one in enumerate(stored))


def test_a_node_without_a_cluster_has_one_broker_group(tmp_path: object) -> None:
    import inturn

    with inturn.connect(str(tmp_path)) as node:
        assert [(one.name, one.state) for one in node.broker_groups()] == [("local", "available")]
        with pytest.raises(NotFound, match="there are: local"):
            node.create_subject("orders", 2, broker_groups=["east"])
        assert homes(node.create_subject("orders", 2, broker_groups=["local"])) == ["local", "local"]
