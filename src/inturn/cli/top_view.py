"""The groups of `inturn top`: their state, and their lag during the last minute, as a table that fits the terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from inturn.cli.message_text import blocking_fields, blocking_text
from inturn.cli.screen import age_text, counted, plain, rate_text

if TYPE_CHECKING:
    from inturn.protocol.commands import GroupDescription, KeyDescription

HISTORY_S = 60.0
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group on a subject."""

    subject: str
    group: str
    members: int
    partitions: int
    appended_per_s: float
    done_per_s: float
    lag: int
    blocking: KeyDescription | None  # of all partitions: the key with most messages behind it
    lags: tuple[tuple[float, int], ...]  # (when, how much), the newest last

    @property
    def trend(self) -> str:
        """The trend of the lag: "none" without lag, else "shrinking", "growing" or "steady"."""
        if self.lag == 0:
            return "none"
        if self.done_per_s == self.appended_per_s:
            return "steady"
        return "shrinking" if self.done_per_s > self.appended_per_s else "growing"

    @property
    def eta_s(self) -> float | None:
        """Time until the lag is gone at these rates; None if the lag does not shrink."""
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


class TopBoard:
    """Remembers the lag of every group for a minute."""

    def __init__(self) -> None:
        self._lags: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def rows(self, found: Iterable[tuple[GroupDescription, float]], now_s: float) -> list[GroupRow]:
        """Rows from groups and the rate of appends to their subjects. The largest lag comes first."""
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
    """The last minute from left to right. A column is the largest lag of its time; a full block is the maximum."""
    heights: list[int | None] = [None] * columns
    for at_s, lag in lags:
        column = columns - 1 - int((now_s - at_s) / HISTORY_S * columns)
        if 0 <= column < columns:
            heights[column] = max(lag, heights[column] or 0)
    for column in range(1, columns):
        if heights[column] is None:  # no sample in this column: repeat the last
            heights[column] = heights[column - 1]
    top = max((height for height in heights if height is not None), default=0)
    last = len(_BARS) - 1
    return "".join(" " if one is None else _BARS[-(-one * last // top) if top else 0] for one in heights)


WIDE_COLUMNS = 100  # wide enough for all columns
MIDDLE_COLUMNS = 80
NARROW_COLUMNS = 56  # narrower: the lag only
SPARK_COLUMNS = 12
NAME_COLUMNS_MIN = 4
_FLEXIBLE = frozenset(("subject", "group"))  # cut if necessary; numbers never are
_LEFT = _FLEXIBLE | {"gone in", "last minute"}
_FRAME_ROWS = 4  # title, headings, the remark on hidden groups, and the cursor
_TREND = {"none": "[green]–[/green]", "growing": "[red]▲ growing[/red]", "steady": "[dim]= steady[/dim]"}


def frame(
    rows: Sequence[GroupRow], now_s: float, columns: int, lines: int | None = None, note: str = ""
) -> RenderableType:
    """At most `lines` lines, if given: groups with the smallest lag are left out. `note` goes to the title."""
    shown = rows if lines is None else rows[: max(1, lines - _FRAME_ROWS)]
    parts: list[RenderableType] = [_title(rows, note), _table(shown, now_s, columns)]
    if len(shown) < len(rows):
        parts.append(_line(f"[dim]… and {counted(len(rows) - len(shown), 'group')} with less lag[/dim]"))
    # Keys get lines of their own and are not cut.
    room = len(shown) if lines is None else max(0, lines - _FRAME_ROWS - len(shown))
    parts += [_blocking_line(row) for row in shown if row.blocking is not None][:room]
    return Group(*parts)


def _title(rows: Sequence[GroupRow], note: str) -> Text:
    lag = sum(row.lag for row in rows)
    done_per_s = sum(row.done_per_s for row in rows)
    text = (
        f"[bold]inturn top[/bold]  {counted(len(rows), 'group')}  [dim]lag[/dim] [bold]{lag:,}[/bold]  "
        f"[dim]done/s[/dim] {rate_text(done_per_s)}"
    )
    return _line(f"{text}  {note}" if note else text)


def _table(rows: Sequence[GroupRow], now_s: float, columns: int) -> Table:
    padding = 2 if columns >= MIDDLE_COLUMNS else 1
    content = [_cells(row, now_s, columns) for row in rows]
    headings = list(content[0]) if content else []
    widths = {
        heading: max(len(heading), *(Text.from_markup(cells[heading]).cell_len for cells in content))
        for heading in headings
    }
    flexible = [heading for heading in headings if heading in _FLEXIBLE]
    fixed = sum(widths[heading] for heading in headings if heading not in _FLEXIBLE)
    room = columns - fixed - padding * (len(headings) - 1)
    widths.update(_fitted({heading: widths[heading] for heading in flexible}, room))
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0), header_style="dim")
    for heading in headings:
        justify: JustifyMethod = "left" if heading in _LEFT else "right"
        table.add_column(heading, width=widths[heading], justify=justify, no_wrap=True, overflow="ellipsis")
    for cells in content:
        table.add_row(*cells.values())
    return table


def _fitted(wanted: dict[str, int], room: int) -> dict[str, int]:
    """The columns of every name: short names get their width, long names equal parts of the rest."""
    found = {}
    for count, (name, width) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        found[name] = max(NAME_COLUMNS_MIN, min(width, room // (len(wanted) - count)))
        room -= found[name]
    return found


def _cells(row: GroupRow, now_s: float, columns: int) -> dict[str, str]:
    """The cells that fit the terminal, by heading."""
    cells = {"subject": plain(row.subject), "group": plain(row.group)}
    if columns >= MIDDLE_COLUMNS:
        cells["members"] = "[red]0[/red]" if row.members == 0 and row.lag else str(row.members)
        cells["partitions"] = str(row.partitions)
    if columns >= NARROW_COLUMNS:
        cells["in/s"] = rate_text(row.appended_per_s)
        cells["done/s"] = rate_text(row.done_per_s)
    cells["lag"] = _lag_text(row)
    cells["gone in"] = _gone_text(row)
    if columns >= WIDE_COLUMNS:
        cells["last minute"] = f"[cyan]{sparkline(row.lags, now_s, SPARK_COLUMNS)}[/cyan]"
    return cells


def _lag_text(row: GroupRow) -> str:
    return f"[yellow]{row.lag:,}[/yellow]" if row.lag else "[green]0[/green]"


def _gone_text(row: GroupRow) -> str:
    if row.eta_s is None:
        return _TREND[row.trend]
    return f"[green]▼ {age_text(row.eta_s)}[/green]"


def _blocking_line(row: GroupRow) -> Text:
    """The key comes first: only the end may be cut."""
    where = f"{plain(row.group)} on {plain(row.subject)}"
    return _line(f"[dim]blocking:[/dim] {blocking_text(row.blocking)}[dim], {where}[/dim]")


def _line(markup: str) -> Text:
    """A line that is cut, not folded."""
    text = Text.from_markup(markup, overflow="ellipsis")
    text.no_wrap = True
    return text
