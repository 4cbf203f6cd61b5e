from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inturn.broker.rates import WINDOW_S, Rates
from inturn.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_steady_rate_is_told(clock: FakeClock) -> None:
    rates = Rates[str](clock)
    rates.start("a", 1000)
    for step in range(1, 301):
        clock.advance(0.1)
        rates.reached("a", 1000 + 5 * step)
        if step > 10:
            assert rates.per_s("a") == pytest.approx(50, rel=0.06)


def test_what_is_there_at_the_start_does_not_count(clock: FakeClock) -> None:
    rates = Rates[str](clock)
    rates.start("a", 1000)
    assert rates.per_s("a") == 0
    rates.reached("b", 5)
    assert rates.per_s("b") == 0
    assert rates.per_s("unknown") == 0


def test_the_first_moments_are_not_exaggerated(clock: FakeClock) -> None:
    rates = Rates[str](clock)
    rates.start("a", 0)
    clock.advance(0.01)
    rates.reached("a", 7)
    assert rates.per_s("a") == 7


def test_what_stands_still_is_forgotten_after_the_window(clock: FakeClock) -> None:
    rates = Rates[str](clock)
    rates.start("a", 0)
    clock.advance(5.0)
    rates.reached("a", 100)
    clock.advance(WINDOW_S - 0.1)
    assert rates.per_s("a") > 9
    clock.advance(0.1)
    assert rates.per_s("a") == 0
    clock.advance(1e9)
    assert rates.per_s("a") == 0
    rates.reached("a", 101)
    assert 0 < rates.per_s("a") < 1


def test_a_total_that_goes_back_counts_nothing(clock: FakeClock) -> None:
    rates = Rates[str](clock)
    rates.start("a", 10)
    rates.reached("a", 5)
    rates.reached("a", 10)
    assert rates.per_s("a") == 0
    rates.start("a", 0)  # a reset
    rates.reached("a", 4)
    assert rates.per_s("a") == 4


@given(steps=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 50)), max_size=60))
def test_it_never_tells_more_than_was_counted_within_the_window(steps: list[tuple[float, int]]) -> None:
    clock = FakeClock()
    rates = Rates[str](clock)
    rates.start("a", 0)
    total, counted = 0, []
    for advance_s, count in steps:
        clock.advance(advance_s)
        total += count
        rates.reached("a", total)
        counted.append((clock.monotonic(), count))
        now_s = clock.monotonic()
        recent = sum(some for at_s, some in counted if at_s > now_s - WINDOW_S)
        assert 0 <= rates.per_s("a") <= recent
        surely = sum(some for at_s, some in counted if at_s > now_s - WINDOW_S + 1)
        assert rates.per_s("a") >= surely / WINDOW_S - 1e-9
