"""Commands that are held back: answered at once on an event, and after `wait_s` at the latest."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from inturn.model.errors import Closed, InturnError, InvalidInput, LeaseHeld, NotFound, StaleEpoch
from inturn.node.acceptance import Try
from inturn.node.long_polls import LongPolls
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Assignment,
    Command,
    Done,
    FindRequest,
    Granted,
    Heartbeat,
    Leave,
    Progress,
    Pulled,
    Read,
    Release,
    Renew,
    ResetGroup,
)
from tests.node.machine import Machine


def test_a_pull_is_answered_when_something_is_appended(machine: Machine) -> None:
    """B1."""
    machine.join()
    epoch = machine.acquire().epoch
    pull = machine.pull("a", epoch, wait_s=5.0)
    machine.wait(1.0)
    assert pull.answer is None
    machine.append(2)
    assert isinstance(pull.answer, Pulled)
    assert pull.answer.end_offset == 2
    assert [batch.header.count for batch in pull.answer.batches] == [2]


def test_a_pull_is_answered_empty_when_its_time_is_over(machine: Machine) -> None:
    machine.join()
    pull = machine.pull("a", machine.acquire().epoch, wait_s=5.0)
    machine.wait(4.999)
    assert pull.answer is None
    machine.wait(0.001)
    assert isinstance(pull.answer, Pulled)
    assert pull.answer.batches == ()
    machine.append()
    assert len(pull.answers) == 1


def test_a_pull_with_something_to_read_is_not_held_back(machine: Machine) -> None:
    machine.join()
    machine.append()
    assert isinstance(machine.pull("a", machine.acquire().epoch, wait_s=5.0).answer, Pulled)


def test_an_append_to_another_partition_wakes_nobody(machine: Machine) -> None:
    machine.join()
    pull = machine.pull("a", machine.acquire().epoch, wait_s=5.0)
    machine.append(partition=1)
    assert pull.answer is None


def test_a_read_without_a_group_waits_too(machine: Machine) -> None:
    read = machine.submit(Read("orders", 0, 0, 1 << 20, 5.0))
    assert read.answer is None
    machine.append()
    assert isinstance(read.answer, Pulled)


def test_a_pull_hears_at_once_that_its_lease_was_taken_over(machine: Machine) -> None:
    """B4."""
    machine.join()
    old = machine.acquire("a")
    machine.wait(9.0)
    pull = machine.pull("a", old.epoch, wait_s=50.0)
    machine.wait(10.0)
    machine.join("b")
    machine.acquire("b")
    assert isinstance(pull.answer, StaleEpoch)


def test_an_acquire_is_granted_at_once_when_the_lease_is_released(machine: Machine) -> None:
    """C17."""
    machine.join("a")
    first = machine.acquire("a")
    acquire = machine.submit(Acquire("orders", "billing", 0, "b", 1, 5.0))
    assert acquire.answer is None
    machine.ask(Release("orders", "billing", "a", Progress(0, first.epoch, 7, number=1_000)))
    assert isinstance(acquire.answer, Granted)
    assert acquire.answer.epoch > first.epoch
    assert acquire.answer.offset == 7


def test_an_acquire_is_granted_at_the_moment_the_lease_ends(machine: Machine) -> None:
    """B2."""
    machine.join("a")
    machine.acquire("a")
    acquire = machine.submit(Acquire("orders", "billing", 0, "b", 1, 30.0))
    machine.wait(9.999)
    assert acquire.answer is None
    machine.wait(0.001)
    assert isinstance(acquire.answer, Granted)


def test_an_acquire_waits_on_while_the_lease_is_renewed(machine: Machine) -> None:
    """B2."""
    machine.join("a")
    epoch = machine.acquire("a").epoch
    acquire = machine.submit(Acquire("orders", "billing", 0, "b", 1, 30.0))
    for _ in range(5):
        machine.wait(5.0)
        machine.ask(Renew("orders", "billing", "a", ((0, epoch),)))
    assert acquire.answer is None
    machine.wait(5.0)
    assert isinstance(acquire.answer, LeaseHeld)
    assert acquire.answer.owner == "a"


def test_waiting_for_a_lease_does_not_pile_up_timers(machine: Machine) -> None:
    """Three members wait for a lease that is renewed for a long time: every member has a single timer."""
    machine.join("a")
    epoch = machine.acquire("a").epoch
    for member in ("b", "c", "d"):
        machine.submit(Acquire("orders", "billing", 0, member, 1, 60.0))
    before = machine.timers.made
    for _ in range(9):
        machine.wait(5.0)
        machine.ask(Renew("orders", "billing", "a", ((0, epoch),)))
    assert machine.timers.made - before < 100


def test_a_lease_that_ends_goes_to_one_of_those_who_wait(machine: Machine) -> None:
    machine.join("a")
    machine.acquire("a")
    waiting = [machine.submit(Acquire("orders", "billing", 0, member, 1, 30.0)) for member in ("b", "c")]
    machine.wait(10.0)
    answers = [one.answer for one in waiting]
    assert [type(answer) for answer in answers] == [Granted, type(None)]


def test_a_heartbeat_is_answered_at_once_when_the_assignment_changes(machine: Machine) -> None:
    """M7."""
    first = machine.join("a")
    assert isinstance(first, Assignment)
    beat = machine.submit(Heartbeat("orders", "billing", "a", "key", "first", first.generation, 5.0))
    assert beat.answer is None
    machine.join("b")
    assert isinstance(beat.answer, Assignment)
    assert len(beat.answer.partitions) == 1
    assert beat.answer.generation > first.generation


def test_a_heartbeat_is_answered_when_its_time_is_over(machine: Machine) -> None:
    first = machine.join("a")
    assert isinstance(first, Assignment)
    beat = machine.submit(Heartbeat("orders", "billing", "a", "key", "first", first.generation, 3.0))
    machine.wait(2.999)
    assert beat.answer is None
    machine.wait(0.001)
    assert isinstance(beat.answer, Assignment)
    assert beat.answer.generation == first.generation


def test_a_heartbeat_that_is_behind_is_answered_at_once(machine: Machine) -> None:
    machine.join("a")
    beat = machine.submit(Heartbeat("orders", "billing", "a", "key", "first", 0, 5.0))
    assert isinstance(beat.answer, Assignment)


def test_a_silent_member_makes_place_for_the_others(machine: Machine) -> None:
    """M7."""
    machine.join("a")
    machine.wait(5.0)
    joined = machine.join("b")
    assert isinstance(joined, Assignment)
    machine.wait(3.0)
    beat = machine.submit(Heartbeat("orders", "billing", "b", "key", "first", joined.generation, 3.0))
    machine.wait(2.0)
    assert isinstance(beat.answer, Assignment)
    assert beat.answer.partitions == (0, 1)


def test_a_member_whose_heartbeat_is_held_back_is_not_silent(machine: Machine) -> None:
    """B3, M7: the node holds the heartbeat back, so the member's silence does not count."""
    first = machine.join("a")
    assert isinstance(first, Assignment)
    beat = machine.submit(Heartbeat("orders", "billing", "a", "key", "first", first.generation, 30.0))
    for _ in range(30):
        machine.wait(1.0)
        if beat.answer is not None:
            break
    assert isinstance(beat.answer, Assignment)
    assert beat.answer.partitions == (0, 1), f"lost after {machine.clock.monotonic():g} s"


def test_leaving_gives_everything_back_and_wakes_who_waits(machine: Machine) -> None:
    machine.join("a")
    epoch = machine.acquire("a").epoch
    acquire = machine.submit(Acquire("orders", "billing", 0, "b", 1, 5.0))
    assert isinstance(machine.ask(Leave("orders", "billing", "a")), Done)
    assert isinstance(acquire.answer, Granted)
    assert acquire.answer.epoch > epoch


def test_a_lease_is_not_granted_to_a_member_that_left(machine: Machine) -> None:
    machine.join("a")
    epoch = machine.acquire("a").epoch
    machine.join("b")
    machine.submit(Acquire("orders", "billing", 0, "b", 1, 30.0))
    machine.ask(Leave("orders", "billing", "b"))
    machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 0, number=1_000)))
    assert isinstance(machine.acquire("c"), Granted)


def test_what_a_member_left_behind_is_answered_too(machine: Machine) -> None:
    """The protocol: every command is answered exactly once."""
    first = machine.join("a")
    assert isinstance(first, Assignment)
    beat = machine.submit(Heartbeat("orders", "billing", "a", "key", "first", first.generation, 5.0))
    pull = machine.pull("a", machine.acquire("a").epoch, wait_s=5.0)
    machine.ask(Leave("orders", "billing", "a"))
    machine.wait(60.0)
    assert len(pull.answers) == 1
    assert len(beat.answers) == 1


@pytest.mark.parametrize("when", ["woken", "over"])
def test_what_breaks_is_answered_and_takes_nobody_with_it(machine: Machine, when: str) -> None:
    """The protocol: every command is answered exactly once, even when the code fails."""
    broken, good = FindRequest("orders", "billing", 1, 5.0), FindRequest("orders", "billing", 2, 5.0)

    def answer(command: Command, attempt: Try) -> Answer | None:
        if command == broken:
            raise IndexError("of ours")
        return Done()

    polls = LongPolls(threading.RLock(), machine.clock, machine.timers, answer, lambda command: None)
    said: list[tuple[int, Answer | InturnError]] = []
    for command in (broken, good):
        polls.hold(command, partial(_say, said, command.id), "both", command.wait_s)
    if when == "woken":
        polls.wake("both")
    machine.wait(5.0)
    (first, error), (second, done) = said
    assert (first, second, done) == (1, 2, Done())
    assert "FindRequest failed: IndexError('of ours')" in str(error)


def _say(said: list[tuple[int, Answer | InturnError]], number: int, answer: Answer | InturnError) -> None:
    said.append((number, answer))


def test_closing_answers_everything_that_is_held_back(machine: Machine) -> None:
    machine.join("a")
    held = [
        machine.pull("a", machine.acquire("a").epoch, wait_s=5.0),
        machine.submit(Acquire("orders", "billing", 0, "b", 1, 5.0)),
        machine.submit(Read("orders", 1, 0, 1 << 20, 5.0)),
    ]
    machine.node.close()
    assert all(isinstance(one.answer, Closed) for one in held)
    machine.wait(100.0)
    assert all(len(one.answers) == 1 for one in held)
    assert isinstance(machine.submit(Read("orders", 1, 0, 1 << 20)).answer, Closed)


@pytest.mark.parametrize(("subject", "partition"), [("nothing", 0), ("orders", 2), ("orders", -1)])
def test_what_is_not_there_is_not_waited_for(machine: Machine, subject: str, partition: int) -> None:
    machine.join()
    assert isinstance(machine.submit(Read(subject, partition, 0, 1 << 20, 5.0)).answer, NotFound)
    assert isinstance(machine.submit(Acquire(subject, "billing", partition, "a", 1, 5.0)).answer, NotFound)


@pytest.mark.parametrize(("offset", "max_bytes"), [(-1, 100), (0, 0), (0, -1), (0, 1 << 40)])
def test_a_pull_that_makes_no_sense_is_refused(machine: Machine, offset: int, max_bytes: int) -> None:
    assert isinstance(machine.submit(Read("orders", 0, offset, max_bytes, 5.0)).answer, InvalidInput)


def test_a_reset_tells_the_observer_that_an_expired_lease_has_ended(machine: Machine) -> None:
    """C15: otherwise a history with a reset would show two owners of the lease at once."""
    machine.join("a")
    machine.acquire("a")
    machine.wait(30.0)
    machine.ask(ResetGroup("orders", "billing", "first"))
    machine.join("b")
    machine.acquire("b")
    events = [type(event).__name__ for event in machine.recorder.history]
    assert events == ["LeaseGranted", "LeaseEnded", "LeaseGranted"]
