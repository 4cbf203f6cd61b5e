from __future__ import annotations

import pytest

from inturn.model.errors import InvalidInput
from inturn.model.time import Clock
from inturn.testing.clock import FakeClock


def test_time_stands_still_until_it_is_advanced() -> None:
    clock = FakeClock(monotonic_s=10.0, wall_ms=5_000)
    as_clock: Clock = clock
    assert (as_clock.monotonic(), as_clock.time_ms()) == (10.0, 5_000)
    clock.advance(2.5)
    assert (as_clock.monotonic(), as_clock.time_ms()) == (12.5, 7_500)


def test_many_small_steps_add_up_exactly() -> None:
    clock = FakeClock()
    for _ in range(1000):
        clock.advance(0.001)
    assert clock.monotonic() == 1.0


def test_a_jump_of_the_wall_clock_does_not_touch_the_monotonic_one() -> None:
    clock = FakeClock(monotonic_s=3.0, wall_ms=10_000)
    clock.jump_wall(-4)
    assert (clock.monotonic(), clock.time_ms()) == (3.0, 6_000)
    clock.set_wall_ms(99_000)
    clock.advance(1)
    assert (clock.monotonic(), clock.time_ms()) == (4.0, 100_000)


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_monotonic_time_never_goes_back(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="does not go back"):
        FakeClock().advance(seconds)
