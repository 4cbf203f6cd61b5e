"""What has to be so before the backlog of a group is taken over. Needs no Spark."""

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
    """A folder is there for the tasks only if they run on this machine."""
    check_master(spark.sparkContext.master or "", target)


def check_master(master: str, target: str) -> None:
    """The same, before there is a session."""
    if not is_address(target) and not is_local(master):
        raise InvalidInput(
            f"{target!r} is a folder of this machine, which executors of {master} do not see; "
            "serve it (`inturn serve`), and give the server's address"
        )


def describe_existing(connection: Connection, subject: str, group: str) -> GroupDescription:
    """The group, if it is there, its partitions can be taken over, and nobody drains it: NotFound names those that
    there are."""
    try:
        described = connection.group(subject, group).describe()
    except NotFound:
        known = sorted(one.group for one in connection.groups() if one.subject == subject)
        there = f"it has {', '.join(known)}" if known else "it has none: nobody has consumed it yet"
        raise NotFound("group", group, f"on subject {subject!r}; {there}") from None
    if described.mode != GroupMode.EXCLUSIVE:
        raise GroupConflict(group, f"it is a {described.mode} group: there are no partitions to take over")
    if described.taken_over_by is not None:
        by = described.taken_over_by
        raise GroupConflict(group, f"{by} has taken it over already; wait until it hands back, or stop it")
    return described


def order_of(described: GroupDescription, asked: Order | None) -> Order:
    """The group's own. One that has no members tells nothing, and it is what is asked for: tasks and consumers that
    keep to different orders would overtake each other."""
    if described.order is None:
        return asked if asked is not None else Order.KEY
    if asked is not None and asked.value != described.order:
        raise InvalidInput(
            f"order={asked.value!r}: the members of group {described.group!r} use {described.order!r}; "
            "leave it out, or use the same"
        )
    return one_of(Order, "order", described.order)


def tags_of(described: GroupDescription, asked: str | None) -> str | None:
    """The expression of the group's members, as `order_of`: tasks must not handle what its consumers pass by."""
    if described.tags is None:
        return asked
    if asked is not None and asked != described.tags:
        raise InvalidInput(
            f"tags={asked!r}: the members of group {described.group!r} use {described.tags or '*'!r}; "
            "leave them out, or use the same"
        )
    return described.tags or None
