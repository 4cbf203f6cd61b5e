from __future__ import annotations

from inturn.model.time import Timers


def test_what_is_due_runs_in_the_order_of_its_time() -> None:
    timers, ran = Timers(), []
    for at_s in (3.0, 1.0, 2.0, 4.0):
        timers.at(at_s, lambda at_s=at_s: ran.append(at_s))  # type: ignore[misc]
    timers.run_due(3.0)
    assert ran == [1.0, 2.0, 3.0]
    assert timers.next_due_s() == 4.0


def test_what_is_due_at_the_same_time_runs_in_the_order_it_was_asked_for() -> None:
    timers, ran = Timers(), []
    for number in range(10):
        timers.at(1.0, lambda number=number: ran.append(number))  # type: ignore[misc]
    timers.run_due(1.0)
    assert ran == list(range(10))


def test_a_cancelled_timer_does_not_run() -> None:
    timers, ran = Timers(), []
    timer = timers.at(1.0, lambda: ran.append("no"))
    timers.at(2.0, lambda: ran.append("yes"))
    timer.cancel()
    assert timers.next_due_s() == 2.0
    timers.run_due(5.0)
    assert ran == ["yes"]


def test_a_timer_runs_once() -> None:
    timers, ran = Timers(), []
    timers.at(1.0, lambda: ran.append(1))
    timers.run_due(1.0)
    timers.run_due(1.0)
    assert ran == [1]
    assert timers.next_due_s() is None


def test_an_action_may_ask_for_another_that_is_due_at_once() -> None:
    timers, ran = Timers(), []

    def first() -> None:
        timers.at(1.0, lambda: ran.append("second"))

    timers.at(1.0, first)
    timers.run_due(1.0)
    assert ran == ["second"]


def test_the_owner_is_woken_only_for_an_earlier_one() -> None:
    woken: list[int] = []
    timers = Timers(lambda: woken.append(1))
    timers.at(5.0, lambda: None)
    timers.at(6.0, lambda: None)
    assert len(woken) == 1
    timers.at(4.0, lambda: None)
    assert len(woken) == 2


def test_an_action_that_fails_does_not_hold_up_the_others() -> None:
    timers, ran = Timers(), []

    def fail() -> None:
        raise ZeroDivisionError

    timers.at(1.0, fail)
    timers.at(1.0, lambda: ran.append("ran"))
    for _ in range(2):
        try:
            timers.run_due(1.0)
        except ZeroDivisionError:
            continue
    assert ran == ["ran"]
