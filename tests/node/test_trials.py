"""C16: trials in the node."""

from __future__ import annotations

import pytest

from inturn.model.errors import InvalidInput, NotFound
from inturn.node.key_commands import KEPT_COUNT_MAX, WAITING_COUNT_MAX
from inturn.protocol.commands import (
    Assignment,
    Done,
    FindTrial,
    Heartbeat,
    Leave,
    ReportTrial,
    Trial,
    TrialState,
    TryMessage,
)
from tests.node.machine import LEASE, Machine

WHERE = ("orders", "billing")


def ask_for(machine: Machine, number: int = 0, member: str = "a", offset: int = 0) -> Trial:
    trial = machine.ask(TryMessage(*WHERE, member, 0, offset, f"t{number}"))
    assert isinstance(trial, Trial)
    return trial


def beat(machine: Machine, member: str = "a") -> Assignment:
    answer = machine.ask(Heartbeat(*WHERE, member, "key", "first"))
    assert isinstance(answer, Assignment)
    return answer


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    made.append(3)
    made.join("a")
    made.join("b")
    return made


def test_only_the_named_member_hears_of_a_trial_and_at_once(machine: Machine) -> None:
    """C16"""
    generation = beat(machine).generation
    waiting = machine.submit(Heartbeat(*WHERE, "a", "key", "first", generation, 3.0))
    assert waiting.answer is None
    trial = ask_for(machine, offset=2)
    machine.run()
    assert isinstance(waiting.answer, Assignment)
    assert waiting.answer.trials == (trial,) == (Trial("t0", 0, 2),)
    assert beat(machine, "b").trials == ()


def test_who_asks_is_answered_when_the_member_reports(machine: Machine) -> None:
    """C16: a report counts once, and only from the named member."""
    trial = ask_for(machine)
    waiting = machine.submit(FindTrial(*WHERE, "t0", 30.0))
    machine.ask(ReportTrial(*WHERE, "b", "t0", "success"))
    assert waiting.answer is None
    assert machine.ask(ReportTrial(*WHERE, "a", "t0", "exception", "ValueError: x", 0.5, "trace")) == Done()
    machine.run()
    assert waiting.answer == TrialState(trial, "a", "exception", "ValueError: x", 0.5, "trace")
    machine.ask(ReportTrial(*WHERE, "a", "t0", "success"))
    assert machine.ask(FindTrial(*WHERE, "t0")) == waiting.answer
    assert beat(machine).trials == ()


def test_asking_again_with_the_same_id_is_the_same_trial(machine: Machine) -> None:
    """C16: an answer may get lost."""
    assert ask_for(machine) == ask_for(machine)
    assert len(beat(machine).trials) == 1


def test_a_trial_that_is_given_up_is_not_told_any_more(machine: Machine) -> None:
    """C16"""
    ask_for(machine)
    assert machine.ask(FindTrial(*WHERE, "t0", 0.0, True)) == TrialState(Trial("t0", 0, 0), "a")
    assert beat(machine).trials == ()
    with pytest.raises(NotFound, match="trial"):
        machine.ask(FindTrial(*WHERE, "t0"))
    assert machine.ask(ReportTrial(*WHERE, "a", "t0", "success")) == Done()


@pytest.mark.parametrize("is_silent", [False, True])
def test_who_asks_hears_of_a_member_that_is_gone(machine: Machine, is_silent: bool) -> None:
    """C16"""
    ask_for(machine)
    waiting = machine.submit(FindTrial(*WHERE, "t0", 60.0))
    if is_silent:
        machine.wait(LEASE.life_s / 2)
        beat(machine, "b")
        machine.wait(LEASE.life_s / 2 + 0.1)
    else:
        machine.ask(Leave(*WHERE, "a"))
    machine.run()
    assert isinstance(waiting.answer, NotFound)
    assert "it left before it reported a result" in str(waiting.answer)


def test_a_restart_forgets_trials_and_says_so(machine: Machine) -> None:
    """C16"""
    ask_for(machine)
    machine.restart()
    machine.join("a")
    with pytest.raises(NotFound, match="the node was started again since"):
        machine.ask(FindTrial(*WHERE, "t0"))


def test_trials_are_bounded(machine: Machine) -> None:
    """C16: the number of waiting trials, the number of kept trials, and the length of reports."""
    for number in range(WAITING_COUNT_MAX):
        ask_for(machine, number)
    with pytest.raises(InvalidInput, match="100 trials wait"):
        ask_for(machine, WAITING_COUNT_MAX)
    for number in range(KEPT_COUNT_MAX + 10):
        ask_for(machine, number)
        machine.ask(ReportTrial(*WHERE, "a", f"t{number}", "success", "e" * 100_000, 0.0, "t" * 100_000))
    with pytest.raises(NotFound):
        machine.ask(FindTrial(*WHERE, "t0"))
    state = machine.ask(FindTrial(*WHERE, f"t{KEPT_COUNT_MAX}"))
    assert isinstance(state, TrialState)
    assert len(state.error) + len(state.traceback) < 20_000
    with pytest.raises(InvalidInput, match="trial id"):
        machine.ask(TryMessage(*WHERE, "a", 0, 0, "x" * 1000))
    ask_for(machine, 5000)
    with pytest.raises(InvalidInput, match="result"):
        machine.ask(ReportTrial(*WHERE, "a", "t5000", "splendid"))
