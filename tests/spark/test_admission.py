"""Checks before a group is taken over; without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

import inturn
from inturn.errors import GroupConflict, InvalidInput
from inturn.model.settings import Order
from inturn.protocol.commands import GroupDescription
from inturn.spark.ordered.admission import describe_existing, order_of, tags_of
from tests.contract.bed import eventually


def wait_until_done(consumer: inturn.Consumer) -> None:
    """Wait until one message was handled."""
    eventually(lambda: consumer.statistics().ok_count, "something was handled")


def test_a_group_whose_partitions_belong_to_nobody_is_not_taken_over(tmp_path: Path) -> None:
    """C12, S3."""
    with inturn.connect(tmp_path, flush="os") as mq:
        mq.create_subject("orders", partitions=1)
        with mq.producer() as producer:
            producer.send_sync("orders", b"x")
        for mode, offsets in (("shared", None), ("broadcast", tmp_path / "own")):
            with mq.consumer("orders", mode, lambda message, _: None, mode=mode, offsets=offsets) as consumer:
                wait_until_done(consumer)
            with pytest.raises(GroupConflict, match=f"a {mode} group: there are no partitions to take over"):
                describe_existing(mq, "orders", mode)


def test_a_drain_keeps_the_order_that_was_decided(tmp_path: Path) -> None:
    """C12, S3."""
    with inturn.connect(tmp_path, flush="os") as mq:
        mq.create_subject("orders", partitions=1)
        with mq.producer() as producer:
            producer.send_sync("orders", b"x")
        with mq.consumer("orders", "g", lambda message, _: None, order="key") as consumer:
            wait_until_done(consumer)
            assert order_of(describe_existing(mq, "orders", "g"), None) is Order.KEY
            mq.group("orders", "g").set_order("partition")
            assert order_of(describe_existing(mq, "orders", "g"), None) is Order.PARTITION


@pytest.mark.parametrize(
    ("agreed", "asked", "used"),
    [(None, None, None), (None, "a", "a"), ("", None, None), ("a || b", None, "a || b"), ("a", "a", "a")],
)
def test_tasks_want_the_tags_that_the_members_want(agreed: str | None, asked: str | None, used: str | None) -> None:
    """B7, S3"""
    assert tags_of(GroupDescription("orders", "g", (), (), tags=agreed), asked) == used


@pytest.mark.parametrize(("agreed", "asked"), [("", "a"), ("a", "b")])
def test_other_tags_than_those_of_the_members_are_refused(agreed: str, asked: str) -> None:
    """B7, S3"""
    with pytest.raises(InvalidInput, match="the members of group 'g' use"):
        tags_of(GroupDescription("orders", "g", (), (), tags=agreed), asked)
