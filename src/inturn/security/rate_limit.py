"""Rate limits: a meter with a budget that refills at a rate, and the meters of a principal."""

from __future__ import annotations

from collections.abc import Callable

BURST_S = 1.0  # the budget is the rate of this time


class RateMeter:
    """A budget that refills at a rate. `take` may exceed the budget; then `wait_s` returns the time until the debt is
    paid. The meter refuses nothing.

    Not thread-safe.
    """

    __slots__ = ("_at_s", "_burst", "_left", "_now_s", "_per_s")

    def __init__(self, per_s: float, now_s: Callable[[], float], burst_s: float = BURST_S) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s * burst_s)
        self._left = self._burst
        self._now_s = now_s
        self._at_s = now_s()

    def take(self, count: float) -> None:
        self._fill()
        self._left -= count

    def try_take(self, count: float = 1.0) -> bool:
        """Take the count only if the budget has it."""
        self._fill()
        if self._left < count:
            return False
        self._left -= count
        return True

    def wait_s(self) -> float:
        """The time until the debt is paid; 0 without a debt."""
        if self._left >= 0:  # most of the time, without reading the clock
            return 0.0
        self._fill()
        return max(0.0, -self._left / self._per_s)

    @property
    def is_full(self) -> bool:
        """Whether the whole budget is available."""
        self._fill()
        return self._left >= self._burst

    def _fill(self) -> None:
        now_s = self._now_s()
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class PrincipalMeter:
    """The commands and bytes of a principal, on all of the principal's streams together. Implements
    `inturn.transport.server_session.Metered`."""

    __slots__ = ("_bytes", "_commands", "_received", "bytes_per_s")

    def __init__(self, commands_per_s: float | None, bytes_per_s: float | None, now_s: Callable[[], float]) -> None:
        self.bytes_per_s = bytes_per_s
        self._commands = None if commands_per_s is None else RateMeter(commands_per_s, now_s)
        self._bytes = None if bytes_per_s is None else RateMeter(bytes_per_s, now_s)
        self._received = None if bytes_per_s is None else RateMeter(bytes_per_s, now_s)  # received only

    def take_command(self) -> None:
        if self._commands is not None:
            self._commands.take(1)

    def take_received(self, size_bytes: int) -> None:
        if self._bytes is not None and self._received is not None:
            self._bytes.take(size_bytes)
            self._received.take(size_bytes)

    def take_answer(self, size_bytes: int) -> None:
        if self._bytes is not None:
            self._bytes.take(size_bytes)

    @property
    def is_full(self) -> bool:
        return all(one is None or one.is_full for one in (self._commands, self._bytes))

    def wait_s(self) -> float:
        return max(_wait_s(self._commands), _wait_s(self._bytes))

    def deaf_s(self) -> float:
        return max(_wait_s(self._commands), _wait_s(self._received))


def _wait_s(meter: RateMeter | None) -> float:
    return 0.0 if meter is None else meter.wait_s()
