"""Pictures of the acts: the base class `View`, the parts of its panels, and `watch` to show a running act.

A terminal of 100 × 30 is large enough. A pipe gets the events as lines; with `--json` there is no output before the
result.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from rich.box import ROUNDED
from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.act import Act, ActLook, ActResult, Board, Event
from demo.orders import FIRST_CONSUMERS, LATE_CONSUMER
from inturn.cli.screen import Screen

WIDTH = 98
BAR_COLUMNS = 24
EVENT_ROWS = 8
RATE_WINDOW_S = 1.5
DRAW_S = 0.125
QUIET, FAINT, BAD, GOOD, WAITING, BUSY = "grey58", "grey30", "#e06c75", "#98c379", "#d19a66", "#61afef"
COLOURS = dict(zip((*FIRST_CONSUMERS, LATE_CONSUMER), (BUSY, "#c678dd", "#56b6c2", "#e5c07b"), strict=True))

LookT = TypeVar("LookT", bound=ActLook)


class View(ABC, Generic[LookT]):
    """The live picture of an act. In a narrower terminal bars and events are shorter."""

    last_event_rows = EVENT_ROWS + 1

    def __init__(self, columns: int = WIDTH) -> None:
        self._missing = max(0, WIDTH - columns)

    def frame(self, look: LookT) -> RenderableType:
        """A picture while the act runs. All frames have the same number of rows."""
        head = Table.grid(padding=(0, 1 if self._missing else 3, 0, 0))
        title = Text.assemble(("  inturn demo", "bold"), (f"  {look.at_s:4.1f} s", QUIET))
        head.add_row(title, *self._figures(look))
        return Group(head, *self._panels(look), event_panel(look.events, EVENT_ROWS, self._missing))

    def last_frame(self, look: LookT) -> RenderableType:
        """The picture that stays on the screen. Leaves out facts of the verdict: both fit a small terminal."""
        return event_panel(look.events, self.last_event_rows, self._missing)

    @abstractmethod
    def _figures(self, look: LookT) -> Sequence[Text]: ...

    @abstractmethod
    def _panels(self, look: LookT) -> Sequence[RenderableType]: ...

    def _columns(self, columns: int, least: int = 6) -> int:
        return max(least, columns - self._missing)


class Rates:
    """Messages per second over the last RATE_WINDOW_S, by partition, from samples of counts."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def sample(self, at_s: float, counts: Sequence[int]) -> None:
        self._samples.append((at_s, tuple(counts)))
        while len(self._samples) > 1 and at_s - self._samples[1][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def rate(self, partition: int | None = None, begun_at_s: float | None = None) -> float:
        """The rate of one partition or of all. `begun_at_s`: no message was handled before."""
        (since_s, first), (at_s, last) = self._samples[0], self._samples[-1]
        before = sum(first) if partition is None else first[partition]
        if begun_at_s is not None and (len(self._samples) == 1 or since_s < begun_at_s):
            since_s, before = begun_at_s, 0
        count = (sum(last) if partition is None else last[partition]) - before
        return 0.0 if at_s - since_s < 0.2 else count / (at_s - since_s)


# While the act runs


def watch(screen: Screen, act: Act, board: Board, view: View[LookT]) -> None:
    """Show the act until the act is over."""
    if screen.is_json:
        while not act.is_over:
            time.sleep(DRAW_S)
    elif screen.out.is_terminal:
        _watch_live(screen, act, board, view)
    else:
        _watch_lines(act, board)


def _watch_live(screen: Screen, act: Act, board: Board, view: View[LookT]) -> None:
    from rich.live import Live

    def look() -> LookT:
        return board.look()  # type: ignore[return-value]

    with Live(view.frame(look()), console=screen.out, auto_refresh=False) as live:
        while not act.is_over:
            time.sleep(DRAW_S)
            live.update(view.frame(look()), refresh=True)
        live.update(view.last_frame(look()), refresh=True)


def _watch_lines(act: Act, board: Board) -> None:
    """For a pipe or a log: a line per event."""
    printed = 0
    while True:
        is_over = act.is_over  # before the events are read: the last events are printed, too
        events = board.events.so_far()
        for event in events[printed:]:
            _line(f"{event.at_s:5.1f} s  {event.text}")
            for detail in event.details:
                _line(f"         {detail}")
        printed = len(events)
        if is_over:
            return
        time.sleep(DRAW_S)


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# Parts of pictures


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


def holder_text(name: str | None, dead: str | None = None) -> Text:
    """The owner of a partition. `dead`: the owner is dead, with this remark."""
    if name is None:
        return Text("○ no owner", QUIET)
    if dead is not None:
        return Text.assemble(("✝ ", BAD), (name, f"strike {BAD}"), (dead, QUIET))
    colour = COLOURS.get(name, QUIET)
    return Text.assemble(("● ", colour), (name, f"bold {colour}"))


def owned_text(partitions: Sequence[int]) -> Text:
    noun = "partition" if len(partitions) == 1 else "partitions"
    return Text(f"{noun} {', '.join(map(str, partitions))}") if partitions else Text("no partition", QUIET)


def handled_text(count: int) -> Text:
    return Text.assemble((f"{count:,}", "bold"), (" handled", QUIET))


def step_text(order: object, step: str) -> Text:
    return Text.assemble((f"order {order:>4} ", ""), (step, QUIET))


def event_panel(events: Sequence[Event], rows: int, missing: int) -> RenderableType:
    """The last events. In a terminal that is narrower by `missing` columns the events are cut."""
    table = table_of(("", 6, "right"), ("", 86 - missing, "left"))
    shown = events[-rows:]
    for event in shown:
        table.add_row(Text(f"{event.at_s:.1f} s", QUIET), coloured(event.text))
    for _ in range(rows - len(shown)):
        table.add_row("", "")
    return panel(table, "what happened")


# Verdicts


def verdict_panel(result: ActResult, kept: str, *rows: tuple[str, str | Text]) -> RenderableType:
    """`kept` is the title if the act is good."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, width=12)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    colour = GOOD if result.ok else BAD
    title = f"✔ {kept}, {result.elapsed_s:.1f} s" if result.ok else "✘ order broken, or not everything done"
    return panel(table, Text(title, f"bold {colour}"), colour)


def messages_row(result: ActResult, after: str = "") -> tuple[str, Text]:
    repeated = f", {result.duplicates} of them repeated{after}" if result.duplicates else ""
    return "messages", Text(f"{result.messages_sent:,} sent, {result.messages_handled:,} handled{repeated}")


def never_row(result: ActResult) -> tuple[str, Text]:
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
    return "never", text


def share_row(name: str, good: int, count: int, fact: str) -> tuple[str, Text]:
    """So many of all: green if all are good."""
    return name, Text.assemble((f"{good:,} of {count:,}", GOOD if good == count else BAD), f" {fact}")


def handled_by_row(handled_by: dict[str, int]) -> tuple[str, Text]:
    return "handled by", coloured("   ".join(f"{name} {count:,}" for name, count in handled_by.items()))
