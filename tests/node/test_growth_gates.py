"""Growth gates of children, where a parent's log contains messages that no producer of inturn sends."""

from __future__ import annotations

from array import array

import pytest
from pyroaring import BitMap64

from inturn.broker import growth_gates as gates
from inturn.model.batch import encode
from inturn.model.errors import GateClosed, LeaseHeld
from inturn.model.message import Outgoing
from inturn.model.routing import SLOT_COUNT
from inturn.protocol.commands import (
    Acquire,
    Append,
    Commit,
    Committed,
    DescribeGroup,
    Granted,
    GroupDescription,
    GrowSubject,
    Leave,
    Progress,
    Release,
    ResetGroup,
)
from tests.node.machine import Machine


@pytest.mark.parametrize("slot", [1024, 5000, 65_535])
def test_a_message_whose_slot_is_none_holds_children_back_until_it_is_finished_and_not_for_good(
    machine: Machine, slot: int
) -> None:
    """M5: the child of the message is unknown, so the message comes before all children."""
    machine.ask(Append("orders", 0, encode([Outgoing(b"x", b"k")], array("H", [slot]))))
    machine.ask(GrowSubject("orders", 4))
    machine.join()
    parent = machine.acquire().epoch
    children = [Acquire("orders", "billing", index, "a", 1) for index in (2, 3)]
    refused = [machine.submit(one).answer for one in children]
    assert [type(one) for one in refused] == [GateClosed, Granted], "partition 3 has partition 1 as its parent"
    described = machine.ask(DescribeGroup("orders", "billing"))
    assert isinstance(described, GroupDescription)
    done = machine.ask(Commit("orders", "billing", "a", (Progress(0, parent, 1, 1),)))
    assert done == Committed((0,))
    assert isinstance(machine.submit(children[0]).answer, Granted)


def test_a_gate_that_takes_long_to_look_at_is_looked_at_on_also_where_an_old_lease_is_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5: a child whose lease changed hands recently waits for the parents, not for the end of an old lease."""
    monkeypatch.setattr(gates, "WALK_BYTES", 1)
    monkeypatch.setattr(gates, "READ_BYTES", 1)
    moves = SLOT_COUNT // 4  # this slot moves to partition 2 with the growth; slot 0 stays
    for slot in (0, *[moves] * 5):
        machine.ask(Append("orders", 0, encode([Outgoing(b"x", b"k")], array("H", [slot]))))
    machine.ask(GrowSubject("orders", 4))
    machine.join()
    parent = machine.acquire()
    machine.ask(Release("orders", "billing", "a", Progress(0, parent.epoch, 6, 1)))
    child = machine.acquire(partition=2)
    other = machine.submit(Acquire("orders", "billing", 2, "b", 1, 1.0))
    machine.wait(1.0)
    assert isinstance(other.answer, LeaseHeld), "it was held back, to be looked at when the lease ends"
    machine.ask(Release("orders", "billing", "a", Progress(2, child.epoch, 0, 1)))
    machine.ask(Leave("orders", "billing", "a"))
    machine.ask(ResetGroup("orders", "billing", "first"))
    machine.join("c")
    parent = machine.acquire("c")
    waits = machine.submit(Acquire("orders", "billing", 2, "c", 1, 5.0))
    finished = BitMap64(range(1, 6)).serialize()
    machine.ask(Commit("orders", "billing", "c", (Progress(0, parent.epoch, 0, 1, finished),)))
    assert waits.answer is None, "the parent's log is long"
    for _ in range(10):
        machine.wait(0.01)
    assert isinstance(waits.answer, Granted)
