"""What the pictures of both acts are made of: colours, panels, bars, and the events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.events import Event
from demo.story import FIRST_CONSUMERS, LATE_CONSUMER
from demo.violations import HasViolations

WIDTH = 98
BAR_COLUMNS = 24
EVENT_ROWS = 8
RATE_WINDOW_S = 1.5
QUIET, FAINT, BAD, GOOD, WAITING = "grey58", "grey30", "#e06c75", "#98c379", "#d19a66"
COLOURS = dict(zip((*FIRST_CONSUMERS, LATE_CONSUMER), ("#61afef", "#c678dd", "#56b6c2", "#e5c07b"), strict=True))


def coloured(text: str) -> Text:
    """Names of consumers in their colours, and keys."""
    shown = Text(text)
    for name, colour in COLOURS.items():
        shown.highlight_regex(rf"\b{name}\b", f"bold {colour}")
    shown.highlight_regex(r"\border-\d+\b", f"bold {WAITING}")
    return shown


def figure(name: str, value: int, unit: str) -> Text:
    return Text.assemble((f"{name} ", QUIET), (f"{value:>6,}", "bold"), (f" {unit}" if unit else "", QUIET))


def table_of(*columns: tuple[str, int, JustifyMethod]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
    for heading, width, justify in columns:
        table.add_column(heading, width=width, justify=justify, no_wrap=True)
    table.show_header = any(heading for heading, _, _ in columns)
    return table


def panel(content: RenderableType, title: str | Text, border: str = FAINT) -> Panel:
    shown = Text(title, QUIET) if isinstance(title, str) else title
    return Panel(content, title=shown, title_align="left", box=ROUNDED, border_style=border, width=WIDTH)


def bar(done: int, waiting_up_to: int, expected: int, columns: int, colour: str) -> Text:
    expected = max(expected, 1)
    done, up_to = (min(columns, round(columns * count / expected)) for count in (done, waiting_up_to))
    return Text.assemble(("━" * done, colour), ("─" * (up_to - done), "grey62"), ("┈" * (columns - up_to), FAINT))


def event_panel(events: Sequence[Event], rows: int, missing: int) -> RenderableType:
    """The last of them; in a terminal that is narrower by `missing` they are cut."""
    table = table_of(("", 6, "right"), ("", 86 - missing, "left"))
    shown = events[-rows:]
    for event in shown:
        table.add_row(Text(f"{event.at_s:.1f} s", QUIET), coloured(event.text))
    for _ in range(rows - len(shown)):
        table.add_row("", "")
    return panel(table, "what happened")


def title_of(ok: bool, kept: str, elapsed_s: float) -> tuple[Text, str]:
    """The title of a verdict, and its colour."""
    colour = GOOD if ok else BAD
    title = f"✔ {kept}, {elapsed_s:.1f} s" if ok else "✘ order broken, or not everything done"
    return Text(title, f"bold {colour}"), colour


def never(result: HasViolations) -> Text:
    text = Text()
    counts = {
        "out of order": result.out_of_order,
        "overlapping": result.overlapping,
        "lost": result.lost,
        "skipped": result.skipped,
        "other violations": result.other_violations,
    }
    for name, count in counts.items():
        text.append(f"{name} ", QUIET)
        text.append(f"{count}   ", f"bold {BAD if count else GOOD}")
    return text
