"""A producer with a fixed rate and a consumer of its messages, both processes: the time of messages."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.child import Child
from benchmarks.noting_child import calls_since
from inturn.model.errors import InturnError

WARM_S = 0.5
STALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A round: the time of every message, the messages per second, and the total."""

    latencies_ms: list[float]
    per_s: float
    count: int


class Pair:
    """Both processes are ready at the start of the `with` block, and end with the block."""

    def __init__(self, address: str, subject: str) -> None:
        self._address = address
        self._subject = subject
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            consumer = undo.enter_context(Child("noting_child", self._address, self._subject, "group", "consumer"))
            producer = undo.enter_context(Child("pacing_child", self._address, self._subject))
            consumer.hear()
            producer.hear()
            self._consumer, self._producer = consumer, producer
            self._stack = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def send(self, rate: int, seconds: float) -> Sent:
        """A round, without its first moments; ends when all messages are handled."""
        self._consumer.ask("forget")
        self._producer.ask("start", rate)
        time.sleep(WARM_S)
        since_ns = time.monotonic_ns()
        time.sleep(seconds)
        count, took_s = self._producer.ask("stop").split()
        self._wait_for(int(count))
        calls = [call for call in calls_since(self._consumer, since_ns) if call.sent_ns >= since_ns]
        return Sent([(call.began_ns - call.sent_ns) / 1e6 for call in calls], int(count) / float(took_s), int(count))

    def processor_s(self) -> float:
        """What both have taken so far."""
        return float(self._producer.ask("time")) + float(self._consumer.ask("time"))

    def _wait_for(self, count: int) -> None:
        until_s = time.monotonic() + STALL_S
        while (seen := int(self._consumer.ask("count"))) != count:
            if time.monotonic() > until_s:
                raise InturnError(f"{seen} of {count} messages were handled after {STALL_S:.0f} s: no progress")
            time.sleep(0.02)
