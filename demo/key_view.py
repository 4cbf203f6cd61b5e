"""The pictures of the second act: how many handlers run at once, which key is held back, and the verdict."""

from __future__ import annotations

from collections import deque

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from demo.key_board import KeyLook, Share
from demo.key_list import list_rows
from demo.key_verdict import KeyActResult
from demo.orders import CONCURRENCY, KEY_GROUP, LATER_STEPS, PARTITION_COUNT, STEPS, SUBJECT
from demo.picture import (
    BAD,
    BAR_COLUMNS,
    EVENT_ROWS,
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

BUSY, BEFORE = "#61afef", "grey50"


class KeyView:
    """Remembers a little of what it has shown: rates come from that."""

    def __init__(self, first_act_rate: float, columns: int = WIDTH) -> None:
        self._first_act_rate = first_act_rate
        self._missing = max(0, WIDTH - columns)  # in a narrower terminal bars and texts are shorter
        self._samples: deque[KeyLook] = deque()

    def frame(self, look: KeyLook) -> RenderableType:
        """Always as many rows, so that nothing jumps."""
        self._sample(look)
        events = event_panel(look.events, EVENT_ROWS, self._missing)
        return Group(self._head(look), self._partitions(look), self._crowd(look), self._keys(look), events)

    def last_frame(self, look: KeyLook) -> RenderableType:
        """Without what the verdict says too: both together fit a small terminal."""
        return event_panel(look.events, EVENT_ROWS + 4, self._missing)

    def line(self, look: KeyLook) -> str:
        """For a pipe."""
        self._sample(look)
        parts = [f"handled {look.handled:,} of {look.stored:,}"]
        if look.flood is None:
            rate = f"{self._rate(look):,.0f}/s (first act {self._first_act_rate:,.0f}/s)"
            parts += [f"{look.running} handlers at once", rate]
        parts += [f"{key} {state}, {behind} behind" for key, _, state, *_, behind in list_rows(look.keys)]
        return "  ".join(parts)

    def _sample(self, look: KeyLook) -> None:
        self._samples.append(look)
        while len(self._samples) > 1 and look.at_s - self._samples[1].at_s > RATE_WINDOW_S:
            self._samples.popleft()

    def _rate(self, look: KeyLook, partition: int | None = None) -> float:
        first = self._samples[0]
        if first is look or first.at_s < look.begun_at_s:  # from the first handler on
            since_s, before = look.begun_at_s, 0
        else:
            since_s, before = first.at_s, _handled(first, partition)
        passed_s = look.at_s - since_s
        return 0.0 if passed_s < 0.2 else (_handled(look, partition) - before) / passed_s

    def _head(self, look: KeyLook) -> RenderableType:
        head = Table.grid(padding=(0, 1 if self._missing else 3, 0, 0))
        head.add_row(
            Text.assemble(("  inturn demo", "bold"), (f"  {look.at_s:4.1f} s", QUIET)),
            Text('order="key"', f"bold {BUSY}"),
            figure("handled", look.handled, "" if self._missing else f"of {look.stored:,}"),
            figure("rate", round(self._rate(look)), "/s"),
        )
        return head

    def _partitions(self, look: KeyLook) -> RenderableType:
        columns = max(24, BAR_COLUMNS + 18 - self._missing)
        table = table_of(
            ("#", 1, "right"),
            ("handled ━  waiting ─", columns, "left"),
            ("lag", 6, "right"),
            ("rate", 7, "right"),
            ("last handled", 20, "left"),
        )
        for index, one in enumerate(look.partitions):
            rate = f"{self._rate(look, index):,.0f}/s"
            shown = bar(one.handled, one.stored, one.stored, columns, BUSY)
            table.add_row(str(index), shown, f"{one.stored - one.handled:,}", rate, _last(one))
        return panel(table, "partitions, the same as before")

    def _crowd(self, look: KeyLook) -> RenderableType:
        columns = max(16, CONCURRENCY - self._missing)
        table = table_of(("", 9, "left"), ("", 17, "left"), ("", columns, "left"), ("", 2, "right"), ("", 9, "right"))
        flood = look.flood
        running = look.running if flood is None else round(flood.running_mean)
        rate = self._rate(look) if flood is None else flood.rate
        table.add_row(
            Text("first act", QUIET),
            Text('order="partition"', QUIET),
            _handlers(PARTITION_COUNT, columns, BEFORE),
            str(PARTITION_COUNT),
            f"{self._first_act_rate:,.0f}/s",
        )
        table.add_row(
            Text("now" if flood is None else "now, mean"),
            Text('order="key"', f"bold {BUSY}"),
            _handlers(running, columns, BUSY),
            Text(str(running), "bold"),
            Text(f"{rate:,.0f}/s", "bold"),
        )
        return panel(table, "handlers running at once")

    def _keys(self, look: KeyLook) -> RenderableType:
        table = table_of(
            ("key", 10, "left"),
            ("#", 1, "right"),
            ("state", 8, "left"),
            ("head", 6, "right"),
            ("attempts", 8, "right"),
            ("last error", max(20, 38 - self._missing), "left"),
            ("behind", 6, "right"),
        )
        for key, partition, state, *rest in list_rows(look.keys)[:1]:
            table.add_row(coloured(key), partition, Text(state, WAITING), *rest)
        if not look.keys:
            table.add_row(Text("none", QUIET))
        return panel(table, f"keys held back: inturn key list {SUBJECT} --group {KEY_GROUP}")


def key_verdict_panel(result: KeyActResult) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, width=12)
    table.add_column()
    sent, handled = result.messages_sent, result.messages_handled
    repeated = f", {result.duplicates} of them repeated" if result.duplicates else ""
    table.add_row("messages", Text(f"{sent:,} in {PARTITION_COUNT} partitions, {handled:,} handled{repeated}"))
    table.add_row("never", never(result))
    is_good = result.orders_in_order == result.orders
    table.add_row(
        "orders",
        Text.assemble(
            (f"{result.orders_in_order:,} of {result.orders:,}", GOOD if is_good else BAD), " saw their steps in turn"
        ),
    )
    at_once = f"{result.running_mean:.0f} handlers on average, {result.running_max} at most"
    times = f" ({result.rate / result.first_act_rate:.1f} ×)" if result.first_act_rate else ""
    table.add_row("at once", f"{at_once}; one per partition, {PARTITION_COUNT}, in the first act")
    table.add_row("rate", f"{result.rate:,.0f}/s; {result.first_act_rate:,.0f}/s in the first act at its best{times}")
    table.add_row("poisoned", _poisoned(result))
    title, colour = title_of(result.ok, "order by key kept", result.elapsed_s)
    return panel(table, title, colour)


def _handlers(count: int, columns: int, colour: str) -> Text:
    """One block for each, as long as there is room for CONCURRENCY of them."""
    return Text("▪" * min(columns, round(columns * count / CONCURRENCY)), colour)


def _handled(look: KeyLook, partition: int | None) -> int:
    return look.handled if partition is None else look.partitions[partition].handled


def _last(one: Share) -> Text:
    if one.last is None:
        return Text("–", QUIET)
    return Text.assemble((f"order {one.last.order:>4} ", ""), (one.last.step, QUIET))


def _poisoned(result: KeyActResult) -> Text:
    poisoned = result.poisoned
    if poisoned is None:
        return Text("nothing was parked", BAD)
    text = coloured(
        f"{poisoned.key} parked after {poisoned.attempts} attempts with {poisoned.waiting} behind; resumed: "
    )
    text.append("\n")
    for place, (step, due) in enumerate(zip(poisoned.steps, (*STEPS, *LATER_STEPS), strict=False)):
        text.append(" → " if place else "", QUIET)
        text.append(step, GOOD if step == due else BAD)
    if result.still_held_back:
        text.append(f"\nstill held back: {', '.join(result.still_held_back)}", BAD)
    return text
