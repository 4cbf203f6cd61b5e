"""Gates of partitions that were born of growth, where the log of a parent holds what no producer of ours sends."""

from __future__ import annotations

from array import array

import pytest

from inturn.model.batch import encode
from inturn.model.commands import (
    Acquire,
    Append,
    Commit,
    Committed,
    DescribeGroup,
    Granted,
    GroupDescription,
    GrowSubject,
    Progress,
)
from inturn.model.errors import GateClosed
from inturn.model.message import Outgoing
from tests.node.machine import Machine


@pytest.mark.parametrize("slot", [1024, 5000, 65_535])
def test_a_message_whose_slot_is_none_holds_children_back_until_it_is_finished_and_not_for_good(
    machine: Machine, slot: int
) -> None:
    """M5: whose it would be nobody can tell, so it comes before all of them."""
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
