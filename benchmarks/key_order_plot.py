"""The picture of `key-order`: time against the number of keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks.key_order import BARE, PARTITION, STATIC, THREADS
from benchmarks.report import BenchReport, Beside
from inturn.model.errors import InvalidInput

PNG_BYTES_MAX = 100_000
INK, FAINT = "#24292f", "#d0d7de"


def check_plot(path: Path) -> None:
    """Check that the plot can be drawn, before the minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("--plot needs the extra: pip install 'inturn[plot]'")
    if path.suffix.lower() != ".png":
        raise InvalidInput(f"--plot {str(path)!r}: the name must end in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidInput(f"--plot {str(path)!r}: there is no folder {str(path.parent)!r} to write this file to")


def draw(report: BenchReport, path: Path) -> None:
    """Dark ink on an opaque white card: readable on light and dark pages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    keys = [row.more["keys"] for row in report.rows]
    beside = {one.what: [_figure(row.beside, one.what) for row in report.rows] for one in report.beside}
    figure = Figure(figsize=(8, 4.5), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(keys, beside[PARTITION], ":", color="#8c959f", linewidth=2, label="order by partition")
    axes.plot(keys, beside[STATIC], "s--", color="#d55e00", linewidth=1.8, markersize=5, label="static: hash(key) % 16")
    axes.plot(keys, [row.figure for row in report.rows], "o-", color="#0072b2", linewidth=2.6, markersize=8,
              label="inturn, order by key")  # fmt: skip
    axes.plot(
        keys, beside[BARE], "x-", color=INK, linewidth=1, markersize=6, label="bound: bare threads, longest first"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(keys, [f"{int(count):,}".replace(",", " ") for count in keys])
    axes.xaxis.set_minor_locator(NullLocator())
    lowest, highest = axes.get_ylim()
    ticks = [tick for power in (0.01, 0.1, 1, 10) for tick in (power, 2 * power, 5 * power)]
    axes.set_yticks([tick for tick in ticks if lowest <= tick <= highest])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.set_xlabel("number of keys", color=INK)
    axes.set_ylabel("first start to last end", color=INK)
    axes.set_title(f"Sleeps of 0–5 ms, 1 partition, {THREADS} threads", color=INK, loc="left", fontsize=12)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.tick_params(colors=INK)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(INK)
    axes.legend(frameon=False, labelcolor=INK, fontsize=10)
    figure.savefig(path, metadata={"Software": None})


def _figure(beside: list[Beside], what: str) -> float:
    return next(one.figure for one in beside if one.what == what)
