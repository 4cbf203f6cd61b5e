"""The pictures of the last act: how the lag grows, who works it off, and the verdict."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from demo.incident_board import IncidentLook, IncidentPartition
from demo.incident_sale import ONLINE, TASK_CONCURRENCY, TASK_COUNT
from demo.incident_verdict import IncidentActResult
from demo.picture import (
    BAD,
    BAR_COLUMNS,
    COLOURS,
    EVENT_ROWS,
    FAINT,
    GOOD,
    QUIET,
    WAITING,
    WIDTH,
    bar,
    coloured,
    event_panel,
    figure,
    never,
    panel,
    table_of,
    title_of,
)
from inturn.cli.screen import counted

SPARK = WAITING
DRAIN = "drain"


class IncidentView:
    def __init__(self, columns: int = WIDTH) -> None:
        self._missing = max(0, WIDTH - columns)  # in a narrower terminal bars and events are shorter

    def frame(self, look: IncidentLook) -> RenderableType:
        """Always as many rows, so that nothing jumps."""
        events = event_panel(look.events, EVENT_ROWS, self._missing)
        return Group(self._head(look), self._partitions(look), self._workers(look), events)

    def last_frame(self, look: IncidentLook) -> RenderableType:
        """Without what the verdict says too: both together fit a small terminal."""
        return event_panel(look.events, EVENT_ROWS, self._missing)

    def line(self, look: IncidentLook) -> str:
        """For a pipe."""
        return f"{look.phase}: lag {look.lag:,}, in {look.sent_per_s:,.0f}/s, out {look.done_per_s:,.0f}/s{_eta(look)}"

    def _head(self, look: IncidentLook) -> RenderableType:
        head = Table.grid(padding=(0, 1 if self._missing else 3, 0, 0))
        head.add_row(
            Text.assemble(("  inturn demo", "bold"), (f"  {look.at_s:4.1f} s", QUIET)),
            Text(f"{look.phase:<14}", f"bold {SPARK}"),
            figure("late", look.lag, ""),
            figure("in", round(look.sent_per_s), "/s"),
            figure("out", round(look.done_per_s), f"/s{_eta(look)}"),
        )
        return head

    def _partitions(self, look: IncidentLook) -> RenderableType:
        bar_columns = max(6, BAR_COLUMNS + 14 - self._missing)
        table = table_of(
            ("#", 1, "right"),
            ("held by", 16, "left"),
            ("epoch", 5, "right"),
            ("handled ━  waiting ─", bar_columns, "left"),
            ("late", 7, "right"),
        )
        widest = max((one.end for one in look.partitions), default=0)
        for index, one in enumerate(look.partitions):
            colour = SPARK if one.owner == DRAIN else COLOURS.get(one.owner or "", QUIET)
            shown = bar(one.done, one.end, widest, bar_columns, colour)
            table.add_row(str(index), _holder(one), str(one.epoch), shown, f"{one.lag:,}")
        return panel(table, "partitions of order.book, as the server tells")

    def _workers(self, look: IncidentLook) -> RenderableType:
        bar_columns = max(6, BAR_COLUMNS + 14 - self._missing)
        table = table_of(("", 16, "left"), ("", bar_columns, "left"), ("", 18, "right"))
        names = [*ONLINE, *(f"task {index}" for index in range(TASK_COUNT))]
        most = max(look.handled_by.values(), default=0)
        for name in names:
            count = look.handled_by.get(name, 0)
            colour = COLOURS.get(name, SPARK)
            title = Text(name if name in ONLINE else f"Spark {name}", f"bold {colour}" if count else FAINT)
            handled = Text.assemble((f"{count:,}", "bold"), (" handled", QUIET)) if count else Text()
            table.add_row(title, bar(count, count, most, bar_columns, colour), handled)
        return panel(table, "who handled how many, from their traces")


def incident_verdict_panel(result: IncidentActResult) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, width=12)
    table.add_column()
    table.add_row("messages", Text(f"{result.messages_sent:,} sent, {result.messages_handled:,} handled"))
    table.add_row("the lag", _lag(result))
    table.add_row("the drain", _drain(result))
    table.add_row("hand-overs", _hand_overs(result))
    table.add_row("never", never(result))
    is_good = result.customers_in_order == result.customers
    counts = f"{result.customers_in_order:,} of {result.customers:,}"
    table.add_row("customers", Text.assemble((counts, GOOD if is_good else BAD), " were told 1, 2, 3 … in their order"))
    by = "   ".join(f"{name} {count:,}" for name, count in result.handled_by.items())
    table.add_row("handled by", coloured(by))
    table.add_row("audit", _audit(result))
    title, colour = title_of(result.ok, "order kept through the incident, and proved", result.elapsed_s)
    return panel(table, title, colour)


def _lag(result: IncidentActResult) -> Text:
    eta = "" if result.online_eta_s is None else f": {result.online_eta_s:.0f} s more for them alone"
    return coloured(
        f"{result.lag_max:,} at its worst; {' and '.join(ONLINE)} managed {result.online_per_s:,.0f}/s{eta}"
    )


def _drain(result: IncidentActResult) -> Text:
    if result.drain is None:
        return Text("did not come about", BAD)
    return Text(
        f"{result.drain.done:,} in {result.drain.work_s:.1f} s, {result.drain.done_per_s:,.0f}/s, "
        f"{counted(result.drain.rounds, 'round')} × {TASK_COUNT} tasks × {TASK_CONCURRENCY} handlers"
    )


def _hand_overs(result: IncidentActResult) -> Text:
    if result.drain is None:
        return Text("none", BAD)
    return coloured(
        f"to Spark: nobody worked for {result.drain.hand_over_pause_s:.2f} s; back to {' and '.join(ONLINE)}: for "
        f"{result.drain.hand_back_pause_s:.2f} s"
    )


def _audit(result: IncidentActResult) -> Text:
    if result.audit is None:
        return Text("there was none", BAD)
    word, colour = ("order kept", GOOD) if result.audit.ok else ("order broken", BAD)
    agreed = "the order checker agrees" if result.is_agreed else "the order checker does not agree"
    return Text.assemble(
        (word, f"bold {colour}"),
        f": {result.audit.started:,} starts, {result.audit.commits:,} commits, {result.audit.lease_grants} leases, "
        f"in {result.audit.elapsed_s:.1f} s; ",
        (agreed, GOOD if result.is_agreed else BAD),
    )


def _eta(look: IncidentLook) -> str:
    return "" if look.eta_s is None else f", {look.eta_s:,.0f} s to go"


def _holder(one: IncidentPartition) -> Text:
    if one.owner is None:
        return Text("○ nobody", QUIET)
    if one.owner == DRAIN:
        return Text.assemble(("● ", SPARK), ("the drain", f"bold {SPARK}"))
    colour = COLOURS.get(one.owner, QUIET)
    return Text.assemble(("● ", colour), (one.owner, f"bold {colour}"))
