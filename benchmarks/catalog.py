"""The benchmarks by name: run a benchmark or all, and print the reports."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.report import BenchReport
from inturn.model.errors import InvalidInput

# Name → module and function below `benchmarks`. A variant counts as a benchmark.
BENCHES = {
    "append": ("append", "run"),
    "send": ("send", "run"),
    "consume-partition": ("consume_partition", "run"),
    "key-order": ("key_order", "run"),
    "key-order --zipf": ("key_order", "run_zipf"),
    "key-order --async": ("key_order", "run_async"),
    "lane-overhead": ("lane_overhead", "run"),
    "trace-overhead": ("trace_overhead", "run"),
    "metrics-overhead": ("metrics_overhead", "run"),
    "process-workers": ("process_workers", "run"),
    "stuck-key": ("stuck_key", "run"),
    "wire": ("wire", "run"),
    "produce": ("produce", "run"),
    "end-to-end": ("end_to_end", "run"),
    "hand-over": ("hand_over", "run"),
    "grow": ("grow", "run"),
    "idle": ("idle", "run"),
    "scale": ("scale", "run"),
    "spark-read": ("spark_read", "run"),
    "spark-drain": ("spark_drain", "run"),
    "spark-drain --handler-ms 5": ("spark_drain", "run_slow"),
    "spark-skew": ("spark_drain", "run_skew"),
}
PLOTTED = "key-order"


def bench(name: str, json_output: bool, quick: bool, plot: Path | None = None) -> None:
    """Run a benchmark, or "all"."""
    if name != "all" and name not in BENCHES:
        raise InvalidInput(f"no benchmark {name!r}; use {', '.join(BENCHES)}, or all")
    if plot is not None:
        _check_plot(name, plot)
    for one in BENCHES if name == "all" else (name,):
        module, function = BENCHES[one]
        if not json_output and sys.stderr.isatty():
            from rich.console import Console

            Console(stderr=True).print(f"[dim]{one} …[/]")
        report: BenchReport = getattr(importlib.import_module(f"benchmarks.{module}"), function)(quick)
        if plot is not None and one == PLOTTED:
            from benchmarks.key_order_plot import draw

            draw(report, plot)
        if json_output:
            print(report.to_json().decode(), flush=True)
        else:
            _show(report)


def _check_plot(name: str, plot: Path) -> None:
    from benchmarks.key_order_plot import check_plot

    if name not in (PLOTTED, "all"):
        raise InvalidInput(f"--plot draws {PLOTTED}, not {name}")
    check_plot(plot)


def _show(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bench {report.bench}", title_justify="left", caption=_machine(report))
    for heading in ("what", "figure", "beside it, in the same run", "ratio", "aim"):
        table.add_column(heading, justify="right" if heading in ("figure", "ratio") else "left")
    for row in report.rows:
        beside = "\n".join(f"{one.what}: {_number(one.figure)}" for one in row.beside)
        aim = f"[green]{row.aim} ✓[/]" if row.is_met else f"[red]{row.aim} ✗[/]"
        more = "".join(f"\n[dim]{name} {_number(value)}[/]" for name, value in row.more.items())
        table.add_row(row.what, f"{_number(row.figure)} {row.unit}{more}", beside, f"{row.ratio:.2f}", aim)
    Console().print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3f}"


def _machine(report: BenchReport) -> str:
    return ", ".join(f"{name} {value}" for name, value in report.machine.items())
