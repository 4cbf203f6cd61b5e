"""The pictures of the third act: the partitions of every process, the kill, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from demo.orders import FIRST_CONSUMERS, STEPS
from demo.served import ConsumerProcess, ServedActResult, ServedLook, ServedPartition
from demo.view import (
    BAD,
    BAR_COLUMNS,
    BUSY,
    COLOURS,
    FAINT,
    QUIET,
    View,
    bar,
    coloured,
    figure,
    handled_by_row,
    handled_text,
    holder_text,
    messages_row,
    never_row,
    owned_text,
    panel,
    share_row,
    step_text,
    table_of,
    verdict_panel,
)


class ServedView(View[ServedLook]):
    def _figures(self, look: ServedLook) -> Sequence[Text]:
        expected = sum(one.expected for one in look.partitions)
        return (
            Text("real processes", f"bold {BUSY}"),
            figure("sent", look.stored, "" if self._missing else f"of {expected:,}"),
            figure("handled", look.done, ""),
            figure("lag", look.stored - look.done, ""),
        )

    def _panels(self, look: ServedLook) -> Sequence[RenderableType]:
        return self._partitions(look), _processes(look)

    def _partitions(self, look: ServedLook) -> RenderableType:
        bar_columns = self._columns(BAR_COLUMNS)
        table = table_of(
            ("#", 1, "right"),
            ("held by", 26, "left"),
            ("epoch", 5, "right"),
            ("handled ━  waiting ─", bar_columns, "left"),
            ("lag", 6, "right"),
            ("last handled", 20, "left"),
        )
        for index, one in enumerate(look.partitions):
            table.add_row(
                str(index),
                _holder(one, look),
                str(one.epoch),
                bar(one.done, one.stored, one.expected, bar_columns, COLOURS.get(one.begun_by or "", QUIET)),
                f"{one.stored - one.done:,}",
                _last(one),
            )
        return panel(table, "partitions, as the server reports them")


def served_verdict(result: ServedActResult) -> RenderableType:
    return verdict_panel(
        result,
        "order kept across processes",
        messages_row(result, " after the kill"),
        never_row(result),
        share_row("orders", result.orders_in_order, result.orders, f"saw {' → '.join(STEPS)}"),
        handled_by_row(result.handled_by),
        ("the kill", _take_overs(result)),
    )


def _take_overs(result: ServedActResult) -> Text:
    if not result.take_overs:
        return Text("no process took over", BAD)
    names = sorted({one.after for one in result.take_overs})
    slowest_s = max(one.took_s for one in result.take_overs)
    what = "the partition" if len(result.take_overs) == 1 else f"{len(result.take_overs)} partitions"
    return coloured(
        f"{' and '.join(names)} went on with {what} of {result.killed} within {slowest_s:.2f} s "
        f"(a lease lives {result.lease_s:g} s)"
    )


def _holder(one: ServedPartition, look: ServedLook) -> Text:
    is_killed = any(found.name == one.owner and found.killed_at_s is not None for found in look.processes)
    if not is_killed:
        return holder_text(one.owner)
    return holder_text(one.owner, "" if one.lease_left_s is None else f"  lease ends in {one.lease_left_s:.1f} s")


def _last(one: ServedPartition) -> Text:
    if one.last is None:
        return Text("–", QUIET)
    order, _, step = one.last.partition("/")
    return step_text(order, step)


def _processes(look: ServedLook) -> RenderableType:
    table = table_of(("", 14, "left"), ("", 12, "left"), ("", 30, "left"), ("", 16, "right"))
    server = "–" if look.server_pid is None else f"pid {look.server_pid}"
    table.add_row(Text("inturn serve", "bold"), Text(server, QUIET), Text(look.address), Text())
    for name in FIRST_CONSUMERS:
        process = next((one for one in look.processes if one.name == name), None)
        table.add_row(*_process_row(name, process, look))
    return panel(table, "processes")


def _process_row(name: str, one: ConsumerProcess | None, look: ServedLook) -> tuple[Text, Text, Text, Text]:
    if one is None:
        return Text(name, FAINT), Text("not started", FAINT), Text(), Text()
    state = owned_text([index for index, found in enumerate(look.partitions) if found.owner == name])
    colour = f"bold {COLOURS[name]}"
    if one.killed_at_s is not None:
        state, colour = Text(f"kill -9 at {one.killed_at_s:.1f} s", BAD), f"strike {BAD}"
    return Text.assemble((name, colour)), Text(f"pid {one.pid}", QUIET), state, handled_text(one.handled)
