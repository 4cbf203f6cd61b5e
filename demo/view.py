"""The pictures of the first act: a frame of the live view, and the verdict. 100 × 30 is enough."""

from __future__ import annotations

from collections import deque

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from demo.board import ConsumerLook, Look, PartitionLook
from demo.orders import STEPS
from demo.picture import (
    BAD,
    BAR_COLUMNS,
    COLOURS,
    EVENT_ROWS,
    FAINT,
    GOOD,
    QUIET,
    RATE_WINDOW_S,
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
from demo.verdict import DemoResult


class View:
    """Remembers a little of what it has shown: rates come from that."""

    def __init__(self, columns: int = WIDTH) -> None:
        self._missing = max(0, WIDTH - columns)  # in a narrower terminal bars and events are shorter
        self._samples: deque[Look] = deque()

    def frame(self, look: Look) -> RenderableType:
        """Always as many rows, so that nothing jumps."""
        self._sample(look)
        events = event_panel(look.events, EVENT_ROWS, self._missing)
        return Group(self._head(look), self._partitions(look), _consumers(look), events)

    def last_frame(self, look: Look) -> RenderableType:
        """Without what the verdict says too: both together fit a small terminal."""
        self._sample(look)
        return Group(self._partitions(look), event_panel(look.events, EVENT_ROWS + 1, self._missing))

    def line(self, look: Look) -> str:
        """For a pipe."""
        partitions = "  ".join(
            f"[{index}] {one.owner or '–'} epoch {one.epoch} at {one.done:,}"
            for index, one in enumerate(look.partitions)
        )
        return f"sent {look.stored:,}  handled {look.done:,}  {partitions}"

    def _sample(self, look: Look) -> None:
        self._samples.append(look)
        while len(self._samples) > 1 and look.at_s - self._samples[1].at_s > RATE_WINDOW_S:
            self._samples.popleft()

    def _rate(self, look: Look, partition: int) -> float:
        first = self._samples[0]
        passed_s = look.at_s - first.at_s
        return (
            0.0 if passed_s < 0.2 else (look.partitions[partition].done - first.partitions[partition].done) / passed_s
        )

    def _head(self, look: Look) -> RenderableType:
        expected = sum(one.expected for one in look.partitions)
        head = Table.grid(padding=(0, 1 if self._missing else 3, 0, 0))
        head.add_row(
            Text.assemble(("  inturn demo", "bold"), (f"  {look.at_s:4.1f} s", QUIET)),
            figure("sent", look.stored, "" if self._missing else f"of {expected:,}"),
            figure("handled", look.done, ""),
            figure("lag", look.stored - look.done, ""),
            figure("rate", round(sum(self._rate(look, one) for one in range(len(look.partitions)))), "/s"),
        )
        return head

    def _partitions(self, look: Look) -> RenderableType:
        bar_columns = max(6, BAR_COLUMNS - self._missing)
        table = table_of(
            ("#", 1, "right"),
            ("owner", 20, "left"),
            ("epoch", 5, "right"),
            ("handled ━  waiting ─", bar_columns, "left"),
            ("lag", 6, "right"),
            ("rate", 6, "right"),
            ("last handled", 20, "left"),
        )
        for index, one in enumerate(look.partitions):
            table.add_row(
                str(index),
                _owner(one, look),
                str(one.epoch),
                bar(one.done, one.stored, one.expected, bar_columns, COLOURS.get(one.begun_by or "", QUIET)),
                f"{one.stored - one.done:,}",
                f"{self._rate(look, index):,.0f}/s",
                _last(one),
            )
        return panel(table, "partitions")


def verdict_panel(result: DemoResult) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, width=12)
    table.add_column()
    repeated = f", {result.duplicates} of them repeated after the crash" if result.duplicates else ""
    table.add_row("messages", Text(f"{result.messages_sent:,} sent, {result.messages_handled:,} handled{repeated}"))
    table.add_row("never", never(result))
    steps = " → ".join(STEPS)
    is_good = result.orders_in_order == result.orders
    table.add_row(
        "orders",
        Text.assemble((f"{result.orders_in_order:,} of {result.orders:,}", GOOD if is_good else BAD), f" saw {steps}"),
    )
    table.add_row("handled by", coloured("   ".join(f"{name} {count:,}" for name, count in result.handled_by.items())))
    table.add_row("hand-overs", _hand_overs(result))
    table.add_row("retries", f"{result.retries} failed attempts, each repeated in place; nothing overtook them")
    title, colour = title_of(result.ok, "order kept", result.elapsed_s)
    return panel(table, title, colour)


def _owner(one: PartitionLook, look: Look) -> Text:
    if one.owner is None:
        return Text("○ nobody", QUIET)
    died_at_s = next((found.died_at_s for found in look.consumers if found.name == one.owner), None)
    if died_at_s is None:
        return Text.assemble(("● ", COLOURS[one.owner]), (one.owner, f"bold {COLOURS[one.owner]}"))
    left_s = max(0.0, look.life_s - (look.at_s - died_at_s))
    return Text.assemble(("✝ ", BAD), (one.owner, f"strike {BAD}"), (f"  ends in {left_s:.1f} s", QUIET))


def _last(one: PartitionLook) -> Text:
    if one.last is None:
        return Text("–", QUIET)
    if one.trouble is not None:
        return Text(f"order {one.last.order:>4} waits", WAITING)
    return Text.assemble((f"order {one.last.order:>4} ", ""), (one.last.step, QUIET))


def _consumers(look: Look) -> RenderableType:
    table = table_of(("", 6, "left"), ("", 22, "left"), ("", 14, "right"), ("", 22, "right"))
    for name in COLOURS:
        one = next((found for found in look.consumers if found.name == name), None)
        table.add_row(*_consumer_row(name, one, look))
    return panel(table, "consumers")


def _consumer_row(name: str, one: ConsumerLook | None, look: Look) -> tuple[Text, Text, Text, Text]:
    if one is None:
        return Text(name, FAINT), Text("not there yet", FAINT), Text(), Text()
    owned = [str(index) for index, found in enumerate(look.partitions) if found.owner == name]
    noun = "partition" if len(owned) == 1 else "partitions"
    state = Text(f"{noun} {', '.join(owned)}") if owned else Text("no partition", QUIET)
    colour = f"bold {COLOURS[name]}"
    if one.died_at_s is not None:
        state, colour = Text(f"died at {one.died_at_s:.1f} s", BAD), f"strike {BAD}"
    retries = Text(f"{one.retries} repeated in place", QUIET) if one.retries else Text()
    return (
        Text.assemble((name, colour)),
        state,
        Text.assemble((f"{one.handled:,}", "bold"), (" handled", QUIET)),
        retries,
    )


def _hand_overs(result: DemoResult) -> Text:
    crash = [one.took_s for one in result.hand_overs if one.is_after_crash]
    calm = [one.took_s for one in result.hand_overs if not one.is_after_crash]
    parts = []
    if crash:
        parts.append(f"{len(crash)} after {result.died} died (within {max(crash):.1f} s)")
    if calm:
        parts.append(f"{len(calm)} when {result.joined} joined (within {max(calm) * 1000:.0f} ms)")
    return coloured("; ".join(parts) or "none")
