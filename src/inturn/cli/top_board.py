"""What `inturn top` knows of groups: how they are now, and how their lag was during the last minute. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inturn.cli.key_text import blocking_fields

if TYPE_CHECKING:
    from inturn.protocol.commands import GroupDescription, KeyDescription

HISTORY_S = 60.0
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group on one subject."""

    subject: str
    group: str
    members: int
    partitions: int
    appended_per_s: float
    done_per_s: float
    lag: int
    blocking: KeyDescription | None  # of all partitions: most waits behind it
    lags: tuple[tuple[float, int], ...]  # (when, how much), the newest last

    @property
    def trend(self) -> str:
        """Of the lag: "none" if there is no lag, else "shrinking", "growing" or "steady"."""
        if self.lag == 0:
            return "none"
        if self.done_per_s == self.appended_per_s:
            return "steady"
        return "shrinking" if self.done_per_s > self.appended_per_s else "growing"

    @property
    def eta_s(self) -> float | None:
        """When the lag is gone if all goes on like this; None if it does not shrink."""
        return self.lag / (self.done_per_s - self.appended_per_s) if self.trend == "shrinking" else None

    def fields(self) -> dict[str, object]:
        return {
            "subject": self.subject,
            "group": self.group,
            "members": self.members,
            "partition_count": self.partitions,
            "appended_per_s": self.appended_per_s,
            "done_per_s": self.done_per_s,
            "lag": self.lag,
            "trend": self.trend,
            "eta_s": self.eta_s,
            "blocking": blocking_fields(self.blocking),
        }


class Board:
    def __init__(self) -> None:
        self._lags: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def rows(self, found: Iterable[tuple[GroupDescription, float]], now_s: float) -> list[GroupRow]:
        """Given each group with what is appended to its subject per second. The largest lag comes first."""
        rows = [self._row(group, appended_per_s, now_s) for group, appended_per_s in found]
        known = {(row.subject, row.group) for row in rows}
        self._lags = {name: lags for name, lags in self._lags.items() if name in known}
        return sorted(rows, key=lambda row: (-row.lag, row.subject, row.group))

    def _row(self, found: GroupDescription, appended_per_s: float, now_s: float) -> GroupRow:
        lags = self._lags.setdefault((found.subject, found.group), deque())
        lags.append((now_s, found.lag))
        while lags[0][0] <= now_s - HISTORY_S:
            lags.popleft()
        blocking = [one.blocking for one in found.partitions if one.blocking is not None]
        return GroupRow(
            found.subject,
            found.group,
            len(found.members),
            len(found.partitions),
            appended_per_s,
            sum(one.done_per_s for one in found.partitions),
            found.lag,
            max(blocking, key=lambda one: one.waiting, default=None),
            tuple(lags),
        )


def sparkline(lags: Iterable[tuple[float, int]], now_s: float, columns: int) -> str:
    """The last minute from left to right, each column the highest of its time; the highest of all is a full block."""
    heights: list[int | None] = [None] * columns
    for at_s, lag in lags:
        column = columns - 1 - int((now_s - at_s) / HISTORY_S * columns)
        if 0 <= column < columns:
            heights[column] = max(lag, heights[column] or 0)
    for column in range(1, columns):
        if heights[column] is None:  # between two looks nothing is known to have changed
            heights[column] = heights[column - 1]
    top = max((height for height in heights if height is not None), default=0)
    last = len(_BARS) - 1
    return "".join(" " if one is None else _BARS[-(-one * last // top) if top else 0] for one in heights)
