"""Checks before the backlog of a group is taken over. No check needs a running Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inturn.client import Connection
from inturn.model.errors import GroupConflict, InvalidInput, NotFound
from inturn.model.settings import GroupMode, Order, one_of
from inturn.protocol.commands import GroupDescription
from inturn.spark.shipping import is_local
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def check_target(spark: SparkSession, target: str) -> None:
    """Raise `InvalidInput` for a folder if the tasks run on other machines: executors do not see the folder."""
    check_master(spark.sparkContext.master or "", target)


def check_master(master: str, target: str) -> None:
    """As `check_target`, before the session exists."""
    if not is_address(target) and not is_local(master):
        raise InvalidInput(
            f"{target!r} is a folder of this machine, which executors of {master} do not see; "
            "serve it (`inturn serve`), and give the server's address"
        )


def describe_existing(connection: Connection, subject: str, group: str) -> GroupDescription:
    """Describe the group to take over. NotFound lists the existing groups. GroupConflict: the group is not exclusive,
    or a drain has taken it over already."""
    try:
        described = connection.group(subject, group).describe()
    except NotFound:
        known = sorted(one.group for one in connection.groups() if one.subject == subject)
        there = f"it has {', '.join(known)}" if known else "it has no group: no consumer has joined yet"
        raise NotFound("group", group, f"on subject {subject!r}; {there}") from None
    if described.mode != GroupMode.EXCLUSIVE:
        raise GroupConflict(group, f"it is a {described.mode} group: there are no partitions to take over")
    if described.taken_over_by is not None:
        by = described.taken_over_by
        raise GroupConflict(group, f"{by} has taken it over already; wait until it hands back, or stop it")
    return described


def order_of(described: GroupDescription, asked: Order | None) -> Order:
    """The order of the group's members. A group without members has no order of its own and gets `asked`. Any other
    `asked` raises `InvalidInput`: tasks and consumers with different orders would overtake each other."""
    if described.order is None:
        return asked if asked is not None else Order.KEY
    if asked is not None and asked.value != described.order:
        raise InvalidInput(
            f"order={asked.value!r}: the members of group {described.group!r} use {described.order!r}; "
            "leave it out, or use the same"
        )
    return one_of(Order, "order", described.order)


def tags_of(described: GroupDescription, asked: str | None) -> str | None:
    """The tag expression of the group's members, as `order_of`: tasks must not handle messages that the group's
    consumers filter out."""
    if described.tags is None:
        return asked
    if asked is not None and asked != described.tags:
        raise InvalidInput(
            f"tags={asked!r}: the members of group {described.group!r} use {described.tags or '*'!r}; "
            "leave them out, or use the same"
        )
    return described.tags or None
