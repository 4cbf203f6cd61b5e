"""What has happened in a held partition since the last commit that was answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from inturn.model.commands import Failure, LotChange, ParkedMessage
from inturn.model.settings import LotState


@dataclass(slots=True)
class LotNews:
    state: LotState
    reason: str = ""
    added: list[ParkedMessage] = field(default_factory=list)
    removed: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class News:
    failed: dict[int, Failure] = field(default_factory=dict)  # by offset
    settled: list[int] = field(default_factory=list)
    lots: dict[bytes, LotNews] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.failed or self.settled or self.lots or self.requests)

    def lot(self, key: bytes, state: LotState, reason: str = "") -> LotNews:
        news = self.lots.setdefault(key, LotNews(state, reason))
        news.state = state
        news.reason = reason or news.reason
        return news

    def lot_changes(self) -> tuple[LotChange, ...]:
        return tuple(
            LotChange(key, one.state, one.reason, tuple(one.added), tuple(one.removed))
            for key, one in self.lots.items()
        )

    def put_before(self, older: News) -> None:
        """A commit was not answered: what it said has to be said again."""
        newer_failed, newer_lots = self.failed, self.lots
        settled = set(self.settled)
        self.failed = {offset: one for offset, one in older.failed.items() if offset not in settled} | newer_failed
        self.settled = [offset for offset in older.settled if offset not in newer_failed] + self.settled
        self.requests = older.requests + self.requests
        self.lots = older.lots
        for key, newer in newer_lots.items():
            lot = self.lot(key, newer.state, newer.reason)
            lot.added += newer.added
            lot.removed += newer.removed
