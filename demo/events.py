"""What is told while the demo runs: one line each, with the time since it began."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float
    text: str
    details: tuple[str, ...] = ()  # lines below it, for where no picture shows the same


class Events:
    """Of one act. From any thread."""

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._told: list[Event] = []

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._started_at_s

    def say(self, text: str, details: Sequence[str] = ()) -> None:
        self._told.append(Event(self.now_s, text, tuple(details)))

    def so_far(self) -> tuple[Event, ...]:
        return tuple(self._told)
