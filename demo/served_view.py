"""The pictures of the third act: which process holds which partitions, the kill, and the verdict."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from demo.orders import STEPS
from demo.picture import (
    BAD,
    BAR_COLUMNS,
    COLOURS,
    EVENT_ROWS,
    FAINT,
    GOOD,
    QUIET,
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
from demo.served_board import Process, ServedLook, ServedPartition
from demo.served_verdict import ServedActResult
from demo.story import FIRST_CONSUMERS


class ServedView:
    def __init__(self, columns: int = WIDTH) -> None:
        self._missing = max(0, WIDTH - columns)  # in a narrower terminal bars and events are shorter

    def frame(self, look: ServedLook) -> RenderableType:
        """Always as many rows, so that nothing jumps."""
        events = event_panel(look.events, EVENT_ROWS, self._missing)
        return Group(self._head(look), self._partitions(look), _processes(look), events)

    def last_frame(self, look: ServedLook) -> RenderableType:
        """Without what the verdict says too: both together fit a small terminal."""
        return event_panel(look.events, EVENT_ROWS + 1, self._missing)

    def line(self, look: ServedLook) -> str:
        """For a pipe."""
        partitions = "  ".join(
            f"[{index}] {one.owner or '–'} epoch {one.epoch}" for index, one in enumerate(look.partitions)
        )
        return f"sent {look.stored:,}  handled {look.done:,}  {partitions}"

    def _head(self, look: ServedLook) -> RenderableType:
        expected = sum(one.expected for one in look.partitions)
        head = Table.grid(padding=(0, 1 if self._missing else 3, 0, 0))
        head.add_row(
            Text.assemble(("  inturn demo", "bold"), (f"  {look.at_s:4.1f} s", QUIET)),
            Text("real processes", "bold #61afef"),
            figure("sent", look.stored, "" if self._missing else f"of {expected:,}"),
            figure("handled", look.done, ""),
            figure("lag", look.stored - look.done, ""),
        )
        return head

    def _partitions(self, look: ServedLook) -> RenderableType:
        bar_columns = max(6, BAR_COLUMNS - self._missing)
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
        return panel(table, "partitions, as the server tells")


def served_verdict_panel(result: ServedActResult) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, width=12)
    table.add_column()
    repeated = f", {result.duplicates} of them repeated after the kill" if result.duplicates else ""
    table.add_row("messages", Text(f"{result.messages_sent:,} sent, {result.messages_handled:,} handled{repeated}"))
    table.add_row("never", never(result))
    is_good = result.orders_in_order == result.orders
    table.add_row(
        "orders",
        Text.assemble(
            (f"{result.orders_in_order:,} of {result.orders:,}", GOOD if is_good else BAD),
            f" saw {' → '.join(STEPS)}",
        ),
    )
    table.add_row("handled by", coloured("   ".join(f"{name} {count:,}" for name, count in result.handled_by.items())))
    table.add_row("the kill", _take_overs(result))
    title, colour = title_of(result.ok, "order kept across processes", result.elapsed_s)
    return panel(table, title, colour)


def _take_overs(result: ServedActResult) -> Text:
    if not result.take_overs:
        return Text("nobody took over", BAD)
    names = sorted({one.after for one in result.take_overs})
    slowest_s = max(one.took_s for one in result.take_overs)
    what = "the partition" if len(result.take_overs) == 1 else f"{len(result.take_overs)} partitions"
    return coloured(
        f"{' and '.join(names)} went on with {what} of {result.killed} within {slowest_s:.2f} s "
        f"(a lease lives {result.lease_s:g} s)"
    )


def _holder(one: ServedPartition, look: ServedLook) -> Text:
    if one.owner is None:
        return Text("○ nobody", QUIET)
    is_killed = any(found.name == one.owner and found.killed_at_s is not None for found in look.processes)
    if not is_killed:
        return Text.assemble(("● ", COLOURS[one.owner]), (one.owner, f"bold {COLOURS[one.owner]}"))
    left = "" if one.lease_left_s is None else f"  lease ends in {one.lease_left_s:.1f} s"
    return Text.assemble(("✝ ", BAD), (one.owner, f"strike {BAD}"), (left, QUIET))


def _last(one: ServedPartition) -> Text:
    if one.last is None:
        return Text("–", QUIET)
    order, _, step = one.last.partition("/")
    return Text.assemble((f"order {order:>4} ", ""), (step, QUIET))


def _processes(look: ServedLook) -> RenderableType:
    table = table_of(("", 14, "left"), ("", 12, "left"), ("", 30, "left"), ("", 16, "right"))
    server = "–" if look.server_pid is None else f"pid {look.server_pid}"
    table.add_row(Text("inturn serve", "bold"), Text(server, QUIET), Text(look.address), Text())
    for name in FIRST_CONSUMERS:
        process = next((one for one in look.processes if one.name == name), None)
        table.add_row(*_process_row(name, process, look))
    return panel(table, "processes")


def _process_row(name: str, one: Process | None, look: ServedLook) -> tuple[Text, Text, Text, Text]:
    if one is None:
        return Text(name, FAINT), Text("not started", FAINT), Text(), Text()
    owned = [str(index) for index, found in enumerate(look.partitions) if found.owner == name]
    noun = "partition" if len(owned) == 1 else "partitions"
    state, colour = (
        Text(f"{noun} {', '.join(owned)}") if owned else Text("no partition", QUIET),
        f"bold {COLOURS[name]}",
    )
    if one.killed_at_s is not None:
        state, colour = Text(f"kill -9 at {one.killed_at_s:.1f} s", BAD), f"strike {BAD}"
    handled = Text.assemble((f"{one.handled:,}", "bold"), (" handled", QUIET))
    return Text.assemble((name, colour)), Text(f"pid {one.pid}", QUIET), state, handled
