"""B7: pulls with tags: the read and the filtered messages, and the work under the node's lock."""

from __future__ import annotations

from array import array

import pytest
from pyroaring import BitMap64

from inturn.broker import pull_filters as filtering
from inturn.broker.pull_filters import FILTERED_BYTES
from inturn.model.batch import StoredBatch, encode
from inturn.model.errors import GroupConflict, InvalidInput
from inturn.model.message import Outgoing, TagFilter
from inturn.protocol.commands import Append, Heartbeat, Pull, Pulled, Read
from tests.node.machine import Machine, Waiting


def append(machine: Machine, *tags: str, body: bytes = b"x") -> None:
    messages = [Outgoing(body, tags=(tag,) if tag else ()) for tag in tags]
    machine.ask(Append("orders", 0, encode(messages, array("H", [1] * len(tags)))))


def pull(machine: Machine, epoch: int, offset: int = 0, wait_s: float = 0.0, tags: str = "y") -> Waiting:
    return machine.submit(Pull("orders", "billing", 0, "a", epoch, offset, 1 << 20, wait_s, tags))


def answer(waiting: Waiting) -> Pulled:
    assert isinstance(waiting.answer, Pulled)
    return waiting.answer


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    made.ask(Heartbeat("orders", "billing", "a", "key", "first", tags="y"))
    return made


def test_what_is_left_out_is_told_by_its_offsets(machine: Machine) -> None:
    """B7: batches without a wanted message are not sent."""
    append(machine, "x", "x")
    append(machine, "x", "y", "")
    append(machine, "y")
    pulled = answer(pull(machine, machine.acquire().epoch))
    assert [batch.header.base_offset for batch in pulled.batches] == [2, 5]
    assert list(BitMap64.deserialize(pulled.unwanted)) == [0, 1, 2, 4]
    assert (pulled.next_offset, pulled.end_offset) == (6, 6)
    assert type(pulled) is Pulled, "what goes over a wire is what every client knows"


def test_a_pull_that_waits_is_answered_when_something_comes_wanted_or_not(machine: Machine) -> None:
    """B7: so the offset advances."""
    epoch = machine.acquire().epoch
    waiting = pull(machine, epoch, wait_s=5.0)
    assert waiting.answer is None
    append(machine, "x")
    machine.run()
    pulled = answer(waiting)
    assert pulled.batches == ()
    assert pulled.next_offset == 1


def test_a_long_stretch_is_gone_through_in_steps(machine: Machine) -> None:
    """B7: even if a client asks for very much at once."""
    for _ in range(5):
        append(machine, "x", body=b"x" * (FILTERED_BYTES // 2))
    epoch = machine.acquire().epoch
    offset = steps = 0
    while offset < 5:
        pulled = answer(pull(machine, epoch, offset))
        assert pulled.batches == ()
        assert pulled.next_offset > offset
        offset, steps = pulled.next_offset, steps + 1
    assert steps >= 3


def test_nothing_is_filtered_under_the_lock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """B7: neither at once nor after a long poll."""
    seen: list[bool] = []

    def watched(batch: StoredBatch, tags: TagFilter) -> tuple[StoredBatch | None, range]:
        seen.append(machine.node.lock._is_owned())  # type: ignore[attr-defined]
        return None, range(0)

    monkeypatch.setattr(filtering, "tagged", watched)
    append(machine, "x")
    epoch = machine.acquire().epoch
    pull(machine, epoch)
    waiting = pull(machine, epoch, 1, wait_s=5.0)
    append(machine, "x")
    machine.run()
    answer(waiting)
    assert seen == [False, False]


def test_a_wrong_expression_is_refused_and_all_means_all(machine: Machine) -> None:
    """B7: from any kind of member."""
    append(machine, "x", "y")
    epoch = machine.acquire().epoch
    assert isinstance(pull(machine, epoch, tags="y ||").answer, InvalidInput)
    everything = answer(pull(machine, epoch, tags="*"))
    assert type(everything) is Pulled
    assert everything.unwanted == b""
    with pytest.raises(InvalidInput, match="tags"):
        machine.ask(Heartbeat("orders", "billing", "b", "key", "first", tags="a || * || b"))
    with pytest.raises(GroupConflict, match=r"its members use tags='y', this one asks for '\*'"):
        machine.ask(Heartbeat("orders", "billing", "b", "key", "first"))


def test_a_read_without_a_group_may_have_tags(machine: Machine) -> None:
    """B7"""
    append(machine, "x", "y")
    read = machine.ask(Read("orders", 0, 0, 1000, tags="y"))
    assert isinstance(read, Pulled)
    assert list(BitMap64.deserialize(read.unwanted)) == [0]
