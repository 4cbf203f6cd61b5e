"""The pictures of the first act: the owners of partitions, the consumers, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from demo.crash import CrashActResult, CrashConsumer, CrashLook, CrashPartition
from demo.orders import STEPS
from demo.view import (
    BAD,
    BAR_COLUMNS,
    COLOURS,
    FAINT,
    QUIET,
    WAITING,
    WIDTH,
    Rates,
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


class CrashView(View[CrashLook]):
    def __init__(self, columns: int = WIDTH) -> None:
        super().__init__(columns)
        self._rates = Rates()

    def frame(self, look: CrashLook) -> RenderableType:
        self._rates.sample(look.at_s, [one.done for one in look.partitions])
        return super().frame(look)

    def last_frame(self, look: CrashLook) -> RenderableType:
        self._rates.sample(look.at_s, [one.done for one in look.partitions])
        return Group(self._partitions(look), super().last_frame(look))

    def _figures(self, look: CrashLook) -> Sequence[Text]:
        expected = sum(one.expected for one in look.partitions)
        return (
            figure("sent", look.stored, "" if self._missing else f"of {expected:,}"),
            figure("handled", look.done, ""),
            figure("lag", look.stored - look.done, ""),
            figure("rate", round(self._rates.rate()), "/s"),
        )

    def _panels(self, look: CrashLook) -> Sequence[RenderableType]:
        return self._partitions(look), _consumers(look)

    def _partitions(self, look: CrashLook) -> RenderableType:
        bar_columns = self._columns(BAR_COLUMNS)
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
                f"{self._rates.rate(index):,.0f}/s",
                _last(one),
            )
        return panel(table, "partitions")


def crash_verdict(result: CrashActResult) -> RenderableType:
    return verdict_panel(
        result,
        "order kept",
        messages_row(result, " after the crash"),
        never_row(result),
        share_row("orders", result.orders_in_order, result.orders, f"saw {' → '.join(STEPS)}"),
        handled_by_row(result.handled_by),
        ("hand-overs", _hand_overs(result)),
        ("retries", f"{result.retries} failed attempts, each repeated in place; no message overtook them"),
    )


def _owner(one: CrashPartition, look: CrashLook) -> Text:
    died_at_s = next((found.died_at_s for found in look.consumers if found.name == one.owner), None)
    if died_at_s is None:
        return holder_text(one.owner)
    return holder_text(one.owner, f"  ends in {max(0.0, look.life_s - (look.at_s - died_at_s)):.1f} s")


def _last(one: CrashPartition) -> Text:
    if one.last is None:
        return Text("–", QUIET)
    if one.trouble is not None:
        return Text(f"order {one.last.order:>4} waits", WAITING)
    return step_text(one.last.order, one.last.step)


def _consumers(look: CrashLook) -> RenderableType:
    table = table_of(("", 6, "left"), ("", 22, "left"), ("", 14, "right"), ("", 22, "right"))
    for name in COLOURS:
        one = next((found for found in look.consumers if found.name == name), None)
        table.add_row(*_consumer_row(name, one, look))
    return panel(table, "consumers")


def _consumer_row(name: str, one: CrashConsumer | None, look: CrashLook) -> tuple[Text, Text, Text, Text]:
    if one is None:
        return Text(name, FAINT), Text("not there yet", FAINT), Text(), Text()
    state = owned_text([index for index, found in enumerate(look.partitions) if found.owner == name])
    colour = f"bold {COLOURS[name]}"
    if one.died_at_s is not None:
        state, colour = Text(f"died at {one.died_at_s:.1f} s", BAD), f"strike {BAD}"
    retries = Text(f"{one.retries} repeated in place", QUIET) if one.retries else Text()
    return Text.assemble((name, colour)), state, handled_text(one.handled), retries


def _hand_overs(result: CrashActResult) -> Text:
    crash = [one.took_s for one in result.hand_overs if one.is_after_crash]
    calm = [one.took_s for one in result.hand_overs if not one.is_after_crash]
    parts = []
    if crash:
        parts.append(f"{len(crash)} after {result.died} died (within {max(crash):.1f} s)")
    if calm:
        parts.append(f"{len(calm)} when {result.joined} joined (within {max(calm) * 1000:.0f} ms)")
    return coloured("; ".join(parts) or "none")
