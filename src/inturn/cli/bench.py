"""`inturn bench`: run a benchmark and print what it says."""

from __future__ import annotations

import importlib
import sys

from rich.console import Console
from rich.table import Table

from inturn.bench.report import BenchReport
from inturn.model.errors import InvalidInput

BENCHES = {"append": "append", "send": "send", "consume-partition": "consume_partition"}


def bench(name: str, json_output: bool, quick: bool) -> None:
    """Run one, or "all"."""
    if name != "all" and name not in BENCHES:
        raise InvalidInput(f"no benchmark {name!r}; use one of {', '.join(BENCHES)}, or all")
    for one in BENCHES if name == "all" else (name,):
        module = importlib.import_module(f"inturn.bench.{BENCHES[one]}")
        if not json_output and sys.stderr.isatty():
            Console(stderr=True).print(f"[dim]{one} …[/]")
        report: BenchReport = module.run(quick)
        if json_output:
            print(report.to_json().decode(), flush=True)
        else:
            _show(report)


def _show(report: BenchReport) -> None:
    table = Table(title=f"bench {report.bench}", title_justify="left", caption=_machine(report))
    for heading in ("what", "figure", "beside it, in the same run", "ratio", "aim"):
        table.add_column(heading, justify="right" if heading in ("figure", "ratio") else "left")
    for row in report.rows:
        beside = "\n".join(f"{one.what}: {one.figure:,.4g}" for one in row.beside)
        figure = f"{row.figure:,.0f} {row.unit}" if row.figure >= 100 else f"{row.figure:.3f} {row.unit}"
        aim = f"[green]{row.aim} ✓[/]" if row.is_met else f"[red]{row.aim} ✗[/]"
        more = "".join(f"\n[dim]{name} {value:.3f}[/]" for name, value in row.more.items())
        table.add_row(row.what, figure + more, beside, f"{row.ratio:.2f}", aim)
    Console().print(table)


def _machine(report: BenchReport) -> str:
    return ", ".join(f"{name} {value}" for name, value in report.machine.items())
