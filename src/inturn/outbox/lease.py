"""The lease of an outbox: one scanner at a time. Pure; only durations on one's own monotonic clock are compared.

The lease is there so that scanners do not get into each other's way. That nothing is sent twice or out of order does
not hang on it: whoever takes it opens the named producer of the outbox, which fences the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

from inturn.model.settings import LeaseSettings


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """As it is in the database."""

    name: str  # of the outbox, and so of its producer
    owner: str | None
    epoch: int
    beat: int
    life_ms: int
    marks: dict[str, list[int]]


class LeaseWatch:
    """Of one who would like to have it: it may be taken if it is free, or if this very watcher has seen no renewal for
    a full life of it."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since_s = 0.0

    def may_take(self, row: LeaseRow, now_s: float) -> bool:
        if row.owner is None:
            return True
        if self._seen != (row.epoch, row.beat):
            self._seen = row.epoch, row.beat
            self._since_s = now_s
        return now_s - self._since_s >= row.life_ms / 1000


class Hold:
    """Of the one who has it: until when, counted from before it was asked for."""

    def __init__(self, epoch: int, settings: LeaseSettings, asked_at_s: float) -> None:
        self.epoch = epoch
        self._settings = settings
        self._asked_at_s = asked_at_s

    def renewed(self, asked_at_s: float) -> None:
        self._asked_at_s = asked_at_s

    def is_live(self, now_s: float) -> bool:
        return now_s < self._asked_at_s + self._settings.life_s - self._settings.margin_s

    def is_due(self, now_s: float) -> bool:
        """It should be renewed."""
        return now_s >= self._asked_at_s + self._settings.renew_s
