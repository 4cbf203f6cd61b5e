"""The pictures of the second act: the handlers that run at once, the key that is held back, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from demo.keys import KeyActResult, KeyLook, key_rows
from demo.orders import CONCURRENCY, KEY_GROUP, LATER_STEPS, PARTITION_COUNT, STEPS, SUBJECT
from demo.view import (
    BAD,
    BAR_COLUMNS,
    BUSY,
    EVENT_ROWS,
    GOOD,
    QUIET,
    WAITING,
    WIDTH,
    Rates,
    View,
    bar,
    coloured,
    figure,
    never_row,
    panel,
    share_row,
    step_text,
    table_of,
    verdict_panel,
)

BEFORE = "grey50"


class KeyView(View[KeyLook]):
    last_event_rows = EVENT_ROWS + 4

    def __init__(self, first_act_rate: float, columns: int = WIDTH) -> None:
        super().__init__(columns)
        self._first_act_rate = first_act_rate
        self._rates = Rates()

    def frame(self, look: KeyLook) -> RenderableType:
        self._rates.sample(look.at_s, [one.handled for one in look.partitions])
        return super().frame(look)

    def _figures(self, look: KeyLook) -> Sequence[Text]:
        return (
            Text('order="key"', f"bold {BUSY}"),
            figure("handled", look.handled, "" if self._missing else f"of {look.stored:,}"),
            figure("rate", round(self._rates.rate(None, look.begun_at_s)), "/s"),
        )

    def _panels(self, look: KeyLook) -> Sequence[RenderableType]:
        return self._partitions(look), self._crowd(look), self._keys(look)

    def _partitions(self, look: KeyLook) -> RenderableType:
        columns = self._columns(BAR_COLUMNS + 18, 24)
        table = table_of(
            ("#", 1, "right"),
            ("handled ━  waiting ─", columns, "left"),
            ("lag", 6, "right"),
            ("rate", 7, "right"),
            ("last handled", 20, "left"),
        )
        for index, one in enumerate(look.partitions):
            rate = f"{self._rates.rate(index, look.begun_at_s):,.0f}/s"
            shown = bar(one.handled, one.stored, one.stored, columns, BUSY)
            last = Text("–", QUIET) if one.last is None else step_text(one.last.order, one.last.step)
            table.add_row(str(index), shown, f"{one.stored - one.handled:,}", rate, last)
        return panel(table, "partitions, the same as before")

    def _crowd(self, look: KeyLook) -> RenderableType:
        columns = self._columns(CONCURRENCY, 16)
        table = table_of(("", 9, "left"), ("", 17, "left"), ("", columns, "left"), ("", 2, "right"), ("", 9, "right"))
        flood = look.flood
        running = look.running if flood is None else round(flood.running_mean)
        rate = self._rates.rate(None, look.begun_at_s) if flood is None else flood.rate
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
            ("last error", self._columns(38, 20), "left"),
            ("behind", 6, "right"),
        )
        for key, partition, state, *rest in key_rows(look.keys)[:1]:
            table.add_row(coloured(key), partition, Text(state, WAITING), *rest)
        if not look.keys:
            table.add_row(Text("none", QUIET))
        return panel(table, f"keys held back: inturn key list {SUBJECT} --group {KEY_GROUP}")


def keys_verdict(result: KeyActResult) -> RenderableType:
    sent, handled = result.messages_sent, result.messages_handled
    repeated = f", {result.duplicates} of them repeated" if result.duplicates else ""
    at_once = f"{result.running_mean:.0f} handlers on average, {result.running_max} at most"
    times = f" ({result.rate / result.first_act_rate:.1f} ×)" if result.first_act_rate else ""
    return verdict_panel(
        result,
        "order by key kept",
        ("messages", f"{sent:,} in {PARTITION_COUNT} partitions, {handled:,} handled{repeated}"),
        never_row(result),
        share_row("orders", result.orders_in_order, result.orders, "saw their steps in turn"),
        ("at once", f"{at_once}; one per partition, {PARTITION_COUNT}, in the first act"),
        ("rate", f"{result.rate:,.0f}/s; {result.first_act_rate:,.0f}/s in the first act at its best{times}"),
        ("poisoned", _poisoned(result)),
    )


def _handlers(count: int, columns: int, colour: str) -> Text:
    """A block per handler, scaled down if CONCURRENCY blocks do not fit."""
    return Text("▪" * min(columns, round(columns * count / CONCURRENCY)), colour)


def _poisoned(result: KeyActResult) -> Text:
    poisoned = result.poisoned
    if poisoned is None:
        return Text("no key was parked", BAD)
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
