"""The picture of `inturn top`: a table that fits the terminal, whatever its size."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from inturn.cli.key_text import blocking_text
from inturn.cli.screen import age_text, counted, plain, rate_text
from inturn.cli.top_board import GroupRow, sparkline

WIDE_COLUMNS = 100  # from here on there is room for everything
MIDDLE_COLUMNS = 80
NARROW_COLUMNS = 56  # below this there is only room for the lag
SPARK_COLUMNS = 12
NAME_COLUMNS_MIN = 4
_FLEXIBLE = frozenset(("subject", "group"))  # cut if they must be; numbers never are
_LEFT = _FLEXIBLE | {"gone in", "last minute"}
_FRAME_ROWS = 4  # title, headings, what is not shown, and the cursor
_TREND = {"none": "[green]–[/green]", "growing": "[red]▲ growing[/red]", "steady": "[dim]= steady[/dim]"}


def frame(
    rows: Sequence[GroupRow], now_s: float, columns: int, lines: int | None = None, note: str = ""
) -> RenderableType:
    """Not more than so many lines, if given: those with the smallest lag are left out. `note` is said in the title."""
    shown = rows if lines is None else rows[: max(1, lines - _FRAME_ROWS)]
    parts: list[RenderableType] = [_title(rows, note), _table(shown, now_s, columns)]
    if len(shown) < len(rows):
        parts.append(_line(f"[dim]… and {counted(len(rows) - len(shown), 'group')} with less lag[/dim]"))
    # In lines of their own: a key that is cut tells nothing.
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
    """What each gets of the room: the short ones what they want, the others equal parts of the rest."""
    found = {}
    for count, (name, width) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        found[name] = max(NAME_COLUMNS_MIN, min(width, room // (len(wanted) - count)))
        room -= found[name]
    return found


def _cells(row: GroupRow, now_s: float, columns: int) -> dict[str, str]:
    """By heading, what the terminal has room for."""
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
    """The key first: what is cut is at the end."""
    where = f"{plain(row.group)} on {plain(row.subject)}"
    return _line(f"[dim]blocking:[/dim] {blocking_text(row.blocking)}[dim], {where}[/dim]")


def _line(markup: str) -> Text:
    """One that is cut, not folded."""
    text = Text.from_markup(markup, overflow="ellipsis")
    text.no_wrap = True
    return text
