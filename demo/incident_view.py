"""The pictures of the last act: the lag, the handled messages of every consumer and task, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from demo.incident import IncidentLook, IncidentPartition
from demo.incident_verdict import IncidentActResult
from demo.orders import ONLINE, TASK_CONCURRENCY, TASK_COUNT
from demo.view import (
    BAD,
    BAR_COLUMNS,
    COLOURS,
    EVENT_ROWS,
    FAINT,
    GOOD,
    QUIET,
    WAITING,
    View,
    bar,
    coloured,
    figure,
    handled_by_row,
    handled_text,
    holder_text,
    messages_row,
    never_row,
    panel,
    share_row,
    table_of,
    verdict_panel,
)
from inturn.cli.screen import counted

SPARK = WAITING
DRAIN = "drain"


class IncidentView(View[IncidentLook]):
    last_event_rows = EVENT_ROWS

    def _figures(self, look: IncidentLook) -> Sequence[Text]:
        eta = "" if look.eta_s is None else f", {look.eta_s:,.0f} s to go"
        return (
            Text(f"{look.phase:<14}", f"bold {SPARK}"),
            figure("late", look.lag, ""),
            figure("in", round(look.sent_per_s), "/s"),
            figure("out", round(look.done_per_s), f"/s{eta}"),
        )

    def _panels(self, look: IncidentLook) -> Sequence[RenderableType]:
        return self._partitions(look), self._workers(look)

    def _partitions(self, look: IncidentLook) -> RenderableType:
        bar_columns = self._columns(BAR_COLUMNS + 14)
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
        return panel(table, "partitions of order.book, as the server reports them")

    def _workers(self, look: IncidentLook) -> RenderableType:
        bar_columns = self._columns(BAR_COLUMNS + 14)
        table = table_of(("", 16, "left"), ("", bar_columns, "left"), ("", 18, "right"))
        names = [*ONLINE, *(f"task {index}" for index in range(TASK_COUNT))]
        most = max(look.handled_by.values(), default=0)
        for name in names:
            count = look.handled_by.get(name, 0)
            colour = COLOURS.get(name, SPARK)
            title = Text(name if name in ONLINE else f"Spark {name}", f"bold {colour}" if count else FAINT)
            handled = handled_text(count) if count else Text()
            table.add_row(title, bar(count, count, most, bar_columns, colour), handled)
        return panel(table, "handled messages, from the traces")


def incident_verdict(result: IncidentActResult) -> RenderableType:
    return verdict_panel(
        result,
        "order kept through the incident, and proved",
        messages_row(result),
        ("the lag", _lag(result)),
        ("the drain", _drain(result)),
        ("hand-overs", _hand_overs(result)),
        never_row(result),
        share_row("customers", result.customers_in_order, result.customers, "got notification 1, 2, 3 … in order"),
        handled_by_row(result.handled_by),
        ("audit", _audit(result)),
    )


def _lag(result: IncidentActResult) -> Text:
    eta = "" if result.online_eta_s is None else f": {result.online_eta_s:.0f} s more for them alone"
    return coloured(
        f"{result.lag_max:,} at its worst; {' and '.join(ONLINE)} managed {result.online_per_s:,.0f}/s{eta}"
    )


def _drain(result: IncidentActResult) -> Text:
    if result.drain is None:
        return Text("did not run", BAD)
    return Text(
        f"{result.drain.done:,} in {result.drain.work_s:.1f} s, {result.drain.done_per_s:,.0f}/s, "
        f"{counted(result.drain.rounds, 'round')} × {TASK_COUNT} tasks × {TASK_CONCURRENCY} handlers"
    )


def _hand_overs(result: IncidentActResult) -> Text:
    if result.drain is None:
        return Text("none", BAD)
    return coloured(
        f"to Spark: no handler ran for {result.drain.hand_over_pause_s:.2f} s; back to {' and '.join(ONLINE)}: for "
        f"{result.drain.hand_back_pause_s:.2f} s"
    )


def _audit(result: IncidentActResult) -> Text:
    if result.audit is None:
        return Text("no audit", BAD)
    word, colour = ("order kept", GOOD) if result.audit.ok else ("order broken", BAD)
    agreed = "the order checker agrees" if result.is_agreed else "the order checker does not agree"
    return Text.assemble(
        (word, f"bold {colour}"),
        f": {result.audit.started:,} starts, {result.audit.commits:,} commits, {result.audit.lease_grants} leases, "
        f"in {result.audit.elapsed_s:.1f} s; ",
        (agreed, GOOD if result.is_agreed else BAD),
    )


def _holder(one: IncidentPartition) -> Text:
    if one.owner == DRAIN:
        return Text.assemble(("● ", SPARK), ("the drain", f"bold {SPARK}"))
    return holder_text(one.owner)
