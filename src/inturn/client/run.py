"""Consumers in the foreground: until a signal, an error, a timeout or `shutdown`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from inturn.consumer.consumer import Consumer
from inturn.model.time import Clock

LOOK_S = 0.2


class Foreground:
    """Runs consumers for `Connection.run`. `stop` may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stop_asked = threading.Event()
        self._is_signalled = False

    def run(self, consumers: Sequence[Consumer], timeout_s: float | None) -> None:
        """Start the consumers; stop them at SIGINT, SIGTERM, `stop`, an error of a consumer, or the timeout."""
        restore = self._listen_to_signals()
        try:
            for consumer in consumers:
                consumer.start()
            self._wait(consumers, timeout_s)
        finally:
            restore()
            for consumer in consumers:
                consumer.stop()
            self._stop_asked.clear()
            self._is_signalled = False
        for consumer in consumers:
            if consumer.error is not None:
                raise consumer.error

    def stop(self) -> None:
        """From any thread. If nothing runs, the next run ends at once."""
        self._stop_asked.set()

    def _wait(self, consumers: Sequence[Consumer], timeout_s: float | None) -> None:
        until_s = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while (
            not self._is_signalled
            and not self._stop_asked.is_set()
            and all(consumer.error is None for consumer in consumers)
        ):
            left_s = LOOK_S if until_s is None else min(LOOK_S, until_s - self._clock.monotonic())
            if left_s <= 0:
                return
            self._stop_asked.wait(left_s)

    def _listen_to_signals(self) -> Callable[[], None]:
        """Only in the main thread. Returns a function that restores the former handlers."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def stop(number: int, frame: FrameType | None) -> None:
            # No event: the interrupted thread may hold the lock of the event.
            self._is_signalled = True

        former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in former.items():
                signal.signal(number, handler)

        return restore
