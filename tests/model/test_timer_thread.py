from __future__ import annotations

import threading

from inturn.model.time import SystemClock, TimerThread


class ClosesWhenCleared(threading.Event):
    """Closes the thread at the worst moment: right before the thread clears the wake-up event."""

    def __init__(self, thread: TimerThread) -> None:
        super().__init__()
        self._thread = thread

    def clear(self) -> None:
        self._thread._is_closed = True
        self.set()
        super().clear()


def test_closing_is_never_missed() -> None:
    thread = TimerThread(SystemClock())
    woken = thread._earlier
    thread._earlier = ClosesWhenCleared(thread)
    woken.set()
    thread._thread.join(20)
    assert not thread._thread.is_alive()


def test_a_timer_that_is_due_earlier_wakes_the_thread() -> None:
    clock = SystemClock()
    thread = TimerThread(clock)
    first, second = threading.Event(), threading.Event()
    thread.timers.at(clock.monotonic() + 60, second.set)
    thread.timers.at(clock.monotonic() + 0.01, first.set)
    assert first.wait(20)
    assert not second.is_set()
    thread.close()


def test_an_action_that_fails_does_not_stop_the_others() -> None:
    clock = SystemClock()
    thread = TimerThread(clock)
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("seeded")

    thread.timers.at(clock.monotonic(), fail)
    thread.timers.at(clock.monotonic() + 0.01, done.set)
    assert done.wait(20)
    thread.close()
