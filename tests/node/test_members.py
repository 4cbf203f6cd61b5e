"""Members of a node: the membership check, and assignments across a restart."""

from __future__ import annotations

import dataclasses

import pytest

from inturn.model.errors import GroupConflict, InvalidInput
from inturn.model.routing import Route, even_ranges
from inturn.protocol.commands import Assignment, DescribeGroup, GroupDescription, Heartbeat, Leave, Renew
from tests.node.machine import LEASE, Machine, Waiting


def beat(machine: Machine, member: str, assignment: str = "sticky") -> Assignment:
    answer = machine.ask(Heartbeat("orders", "billing", member, "key", "first", assignment=assignment))
    assert isinstance(answer, Assignment)
    return answer


def held_beat(machine: Machine, member: str, generation: int) -> Waiting:
    return machine.submit(Heartbeat("orders", "billing", member, "key", "first", generation, 60.0))


def described(machine: Machine) -> GroupDescription:
    answer = machine.ask(DescribeGroup("orders", "billing"))
    assert isinstance(answer, GroupDescription)
    return answer


def narrow(machine: Machine) -> None:
    """The subject now has a single partition, as if the route had been changed."""
    subject = machine.node.catalog.subjects["orders"]
    route = Route("orders", 2, subject.route.partitions[:1], even_ranges(1))
    machine.node.catalog.subjects["orders"] = dataclasses.replace(subject, route=route)


def test_a_heartbeat_is_answered_with_route_assignment_strategy_and_for_how_long(machine: Machine) -> None:
    """M6."""
    answer = beat(machine, "a")
    assert answer.partitions == (0, 1)
    assert answer.subject.route.version == 1
    assert answer.subject.strategy == "strict"
    assert (answer.order, answer.assignment) == ("key", "sticky")
    assert answer.authorised_s == LEASE.life_s


def test_members_that_ask_for_different_assignments_are_refused(machine: Machine) -> None:
    """M8."""
    beat(machine, "a", "average")
    with pytest.raises(GroupConflict, match="assignment"):
        beat(machine, "b", "circle")
    with pytest.raises(InvalidInput, match="assignment"):
        beat(machine, "b", "fair")
    assert described(machine).members == ("a",)
    assert (described(machine).order, described(machine).assignment) == ("key", "average")


# The membership check


def test_a_route_that_changed_is_noticed_within_a_third_of_a_life(machine: Machine) -> None:
    """M7."""
    first = beat(machine, "a")
    machine.wait(1.0)
    waiting = held_beat(machine, "a", first.generation)
    narrow(machine)
    machine.wait(LEASE.life_s / 3 - 1.01)
    assert waiting.answer is None
    machine.wait(0.02)
    assert isinstance(waiting.answer, Assignment)
    assert waiting.answer.partitions == (0,)
    assert waiting.answer.generation > first.generation


def test_a_watch_that_finds_nothing_new_wakes_nobody(machine: Machine) -> None:
    """M7."""
    first = beat(machine, "a")
    machine.wait(2.0)
    waiting = held_beat(machine, "a", first.generation)
    machine.wait(LEASE.life_s / 3 - 1.99)
    assert waiting.answer is None
    machine.wait(2.0)
    assert isinstance(waiting.answer, Assignment), "its time is over"
    assert waiting.answer.generation == first.generation


def test_a_silent_member_is_dropped_when_its_time_is_over_and_not_before(machine: Machine) -> None:
    """M7."""
    beat(machine, "a")
    machine.wait(1.0)
    beat(machine, "b")
    for _ in range(8):
        machine.wait(1.0)
        beat(machine, "b")
    assert described(machine).members == ("a", "b")
    machine.wait(1.0)
    assert described(machine).members == ("b",)
    assert beat(machine, "b").partitions == (0, 1)


def test_nothing_is_watched_while_nobody_is_there(machine: Machine) -> None:
    beat(machine, "a")
    machine.ask(Leave("orders", "billing", "a"))
    machine.wait(LEASE.life_s)
    made = machine.timers.made
    machine.wait(10 * LEASE.life_s)
    assert machine.timers.made == made


def test_a_stream_is_kept_for_members_that_there_are_and_for_nobody_who_was_refused(machine: Machine) -> None:
    """Otherwise a stream of refused heartbeats, every heartbeat with a new name, would fill the memory."""
    machine.node.submit_remote(Heartbeat("orders", "billing", "a", "key", "first"), lambda _: None)
    refused = (("nothing", "billing", "key"), ("orders", "a b", "key"), ("orders", "billing", "none"))
    for subject, group, order in refused:
        machine.node.submit_remote(Heartbeat(subject, group, "b", order, "first"), lambda _: None)
    assert list(machine.node.members._sessions) == [Leave("orders", "billing", "a")]
    machine.ask(Leave("orders", "billing", "a"))
    assert not machine.node.members._sessions


# After a restart


def test_after_a_restart_members_keep_the_partitions_whose_leases_they_hold(machine: Machine) -> None:
    """M8."""
    for member in ("b", "a"):
        beat(machine, member)
    had = {member: beat(machine, member).partitions for member in ("a", "b")}
    assert had == {"a": (1,), "b": (0,)}, "not what an assignment from nothing would be"
    epochs = {index: machine.acquire(member, partition=index).epoch for member, (index,) in had.items()}
    machine.restart()
    assert beat(machine, "a").partitions == (1,), "the other has its lease still"
    assert beat(machine, "b").partitions == (0,)
    assert [one.owner for one in described(machine).partitions] == ["b", "a"]
    assert [one.epoch for one in described(machine).partitions] == [epochs[0], epochs[1]]


def test_a_member_that_does_not_come_back_loses_its_share_with_its_lease(machine: Machine) -> None:
    """M8."""
    for member in ("b", "a"):
        beat(machine, member)
    machine.acquire("a", partition=1)
    epoch = machine.acquire("b", partition=0).epoch
    machine.restart()
    first = beat(machine, "b")
    assert first.partitions == (0,)
    assert described(machine).members == ("b",)
    for _ in range(3):
        waiting = held_beat(machine, "b", first.generation)
        machine.wait(LEASE.life_s / 3 + 0.001)
        machine.ask(Renew("orders", "billing", "b", ((0, epoch),)))
    assert isinstance(waiting.answer, Assignment)
    assert waiting.answer.partitions == (0, 1)
    assert machine.acquire("b", ask=2, partition=1).epoch == 2


def test_members_that_died_with_the_node_are_not_waited_for() -> None:
    machine = Machine(local=True)
    beat(machine, "a")
    machine.acquire("a")
    machine.restart()
    assert beat(machine, "b").partitions == (0, 1)
    machine.close()


def test_members_are_described(machine: Machine) -> None:
    beat(machine, "b")
    machine.wait(1.5)
    beat(machine, "a")
    machine.acquire("b", partition=0)
    (one, other) = described(machine).member_details
    assert (one.name, one.assigned, one.held) == ("a", (1,), ())
    assert (other.name, other.assigned, other.held) == ("b", (0,), (0,))
    assert one.since_ms - other.since_ms == 1500
