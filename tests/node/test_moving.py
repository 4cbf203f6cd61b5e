"""B6: failed messages move only to the retry and dead-letter subjects of the same group."""

from __future__ import annotations

from array import array

import pytest

from inturn.model.batch import encode
from inturn.model.errors import AlreadyExists, InvalidInput, InvalidName, NotFound, StaleEpoch
from inturn.model.message import Outgoing
from inturn.model.settings import Keyless, Limits
from inturn.model.subject import Subject
from inturn.protocol.commands import (
    Acquire,
    CreateSubject,
    Done,
    Granted,
    Heartbeat,
    Move,
    OpenDeadLetters,
    OpenRetry,
    Pulled,
    Read,
)
from tests.node.machine import Machine

BATCH = encode([Outgoing(b"x")], array("H", [1]))


def move(epoch: int, to_subject: str, to_partition: int = 0, subject: str = "orders") -> Move:
    return Move(subject, "billing", 0, "a", epoch, to_subject, to_partition, BATCH)


def stored(machine: Machine, subject: str) -> int:
    answer = machine.ask(Read(subject, 0, 0, 1 << 20))
    assert isinstance(answer, Pulled)
    return answer.end_offset


def test_dead_letters_have_one_partition_and_are_made_once(machine: Machine) -> None:
    made = machine.ask(OpenDeadLetters("orders", "billing"))
    assert isinstance(made, Subject)
    assert (made.name, made.partition_count) == ("%dead%billing%orders", 1)
    assert machine.ask(OpenDeadLetters("orders", "billing")) == made
    machine.restart()
    assert machine.ask(OpenDeadLetters("orders", "billing")) == made


def test_dead_letters_may_be_as_large_as_what_they_come_from(machine: Machine) -> None:
    machine.ask(CreateSubject("large", 1, "slots", "strict", Limits(key_bytes=4096)))
    made = machine.ask(OpenDeadLetters("large", "billing"))
    assert isinstance(made, Subject)
    assert made.limits == Limits(key_bytes=4096)


@pytest.mark.parametrize(("subject", "group", "error"), [("no", "billing", NotFound), ("orders", "%", InvalidName)])
def test_dead_letters_of_nothing_are_refused(
    machine: Machine, subject: str, group: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        machine.ask(OpenDeadLetters(subject, group))


def test_messages_move_under_the_lease(machine: Machine) -> None:
    machine.ask(OpenDeadLetters("orders", "billing"))
    machine.join()
    epoch = machine.acquire("a").epoch
    assert isinstance(machine.ask(move(epoch, "%dead%billing%orders")), Done)
    with pytest.raises(StaleEpoch):
        machine.ask(move(epoch + 1, "%dead%billing%orders"))
    with pytest.raises(NotFound):
        machine.ask(move(epoch, "%dead%billing%orders", 1))
    assert stored(machine, "%dead%billing%orders") == 1


def test_messages_move_nowhere_else(machine: Machine) -> None:
    for group in ("billing", "shipping"):
        machine.ask(OpenDeadLetters("orders", group))
    machine.join()
    epoch = machine.acquire("a").epoch
    for target in ("orders", "%dead%shipping%orders", "%dead%billing%other", "%dead%billing", "", "\udc80"):
        with pytest.raises(InvalidInput):
            machine.ask(move(epoch, target))
    with pytest.raises(NotFound):
        machine.ask(move(epoch, "%retry%billing%orders"))
    assert stored(machine, "%dead%shipping%orders") == stored(machine, "orders") == 0


def test_from_a_retry_subject_they_move_on_to_the_subjects_of_the_origin(machine: Machine) -> None:
    machine.ask(OpenRetry("orders", "billing", 2))
    retry = "%retry%billing%orders"
    dead = machine.ask(OpenDeadLetters(retry, "billing"))
    assert isinstance(dead, Subject)
    assert dead.name == "%dead%billing%orders"
    machine.ask(Heartbeat(retry, "billing", "a", "partition", "first"))
    granted = machine.ask(Acquire(retry, "billing", 0, "a", 1))
    assert isinstance(granted, Granted)
    for target in (retry, dead.name):
        assert isinstance(machine.ask(move(granted.epoch, target, subject=retry)), Done)
    with pytest.raises(InvalidInput):
        machine.ask(move(granted.epoch, f"%dead%billing%{retry}", subject=retry))


def test_whether_messages_without_a_key_wait_for_each_other_belongs_to_a_subject(machine: Machine) -> None:
    made = machine.ask(CreateSubject("lane", 1, "slots", "strict", Limits(), "one-lane"))
    assert isinstance(made, Subject)
    assert made.keyless is Keyless.ONE_LANE
    machine.restart()
    assert machine.ask(CreateSubject("lane", 1, "slots", "strict", Limits(), "one-lane")) == made
    with pytest.raises(AlreadyExists, match="keyless"):
        machine.ask(CreateSubject("lane", 1, "slots", "strict", Limits()))


@pytest.mark.parametrize(
    "bad", [("x", "strict", "independent"), ("slots", "x", "independent"), ("slots", "strict", "x")]
)
def test_settings_that_are_not_there_are_refused(machine: Machine, bad: tuple[str, str, str]) -> None:
    routing, strategy, keyless = bad
    with pytest.raises(InvalidInput, match="use "):
        machine.ask(CreateSubject("new", 1, routing, strategy, Limits(), keyless))
