"""A node accepts batches only from producers that were opened, not with invented producer ids."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from inturn.model.batch import Batch, encode
from inturn.model.errors import InvalidInput, NotFound, ProducerFenced
from inturn.model.message import Outgoing
from inturn.model.subject import dead_letter_subject
from inturn.protocol.commands import (
    Acquire,
    Append,
    Appended,
    Granted,
    Move,
    OpenDeadLetters,
    OpenProducer,
    ProducerOpened,
)
from tests.node.machine import Machine

NEVER_OPENED = 10**6


def open_producer(machine: Machine, name: str | None = None) -> ProducerOpened:
    answer = machine.ask(OpenProducer(name))
    assert isinstance(answer, ProducerOpened)
    return answer


def batch(producer_id: int, epoch: int = 0) -> Batch:
    made = encode([Outgoing(b"x")], array("H", [1]), producer_id=producer_id, first_sequence=0)
    return msgspec.structs.replace(made, producer_epoch=epoch)


def append(machine: Machine, producer_id: int, epoch: int = 0) -> int:
    answer = machine.ask(Append("orders", 0, batch(producer_id, epoch)))
    assert isinstance(answer, Appended)
    return answer.base_offset


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_sent_under_an_id_before_it_is_given_out_is_refused(machine: Machine, restarts: bool) -> None:
    """Otherwise the first message of the producer with the id would count as a duplicate, and be lost."""
    newest = open_producer(machine).producer_id
    if restarts:
        machine.restart()
    for early in (newest + 1, NEVER_OPENED):
        with pytest.raises(NotFound, match="open"):
            append(machine, early)
    assert append(machine, newest) == 0
    opened = open_producer(machine)
    assert opened.producer_id == newest + 1
    assert append(machine, opened.producer_id) == 1


@pytest.mark.parametrize("name", [None, "till"])
def test_an_epoch_that_was_not_given_out_is_refused(machine: Machine, name: str | None) -> None:
    """Otherwise the producer would be fenced in that partition for good."""
    opened = open_producer(machine, name)
    for epoch in (opened.epoch + 1, 2**32 - 1):
        with pytest.raises(InvalidInput, match="epoch"):
            append(machine, opened.producer_id, epoch)
    assert append(machine, opened.producer_id, opened.epoch) == 0
    if name is not None:
        assert append(machine, opened.producer_id, open_producer(machine, name).epoch) == 1
        with pytest.raises(ProducerFenced):
            append(machine, opened.producer_id, opened.epoch)


def test_what_is_moved_is_no_producers(machine: Machine) -> None:
    """With a producer id, a move could make a redriven message look like a duplicate."""
    machine.join()
    machine.append()
    granted = machine.ask(Acquire("orders", "billing", 0, "a", 1))
    assert isinstance(granted, Granted)
    machine.ask(OpenDeadLetters("orders", "billing"))
    opened = open_producer(machine)
    target = dead_letter_subject("billing", "orders")
    with pytest.raises(InvalidInput, match="producer"):
        machine.ask(Move("orders", "billing", 0, "a", granted.epoch, target, 0, batch(opened.producer_id)))
    machine.ask(Move("orders", "billing", 0, "a", granted.epoch, target, 0, batch(0)))
