"""`inturn bench` and `inturn demo`: their code is part of a checkout and not installed with the package."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from inturn.cli.options import Json, examples
from inturn.model.errors import InvalidInput


def from_checkout(module: str, target: str) -> Any:
    """Import a module of a checkout. Raises InvalidInput with the make target where the module is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (package, module):
            raise
        raise InvalidInput(
            f"the package {package!r} is part of the repository and not installed with inturn; clone the repository, "
            f"and run `{target}` there"
        ) from None


BENCH_EXAMPLES = examples(
    "inturn bench all",
    "inturn bench all --quick --json",
    "inturn bench key-order --plot key-order.png",
)
DEMO_EXAMPLES = examples("inturn demo", "inturn demo --quick --json")
Quick = Annotated[bool, typer.Option("--quick", help="Less work: check that the command runs.")]


def run_demo(json_output: Json = False, quick: Quick = False) -> None:
    """Show order under load, a hand-over, a crash, a server with kill -9, and a drain on Spark. Needs no folder."""
    from inturn.cli.session import command

    with command(json_output):
        from_checkout("demo.demo", "make demo").demo(json_output=json_output, quick=quick)


def run_bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a benchmark, or 'all'.", show_default=False)],
    json_output: Json = False,
    quick: Quick = False,
    zipf: Annotated[bool, typer.Option("--zipf", help="key-order: a few keys have most of the messages.")] = False,
    is_async: Annotated[bool, typer.Option("--async", help="key-order: an `async def` handler.")] = False,
    handler_ms: Annotated[
        int, typer.Option("--handler-ms", metavar="MS", help="spark-drain: duration of a handler; 0 or 5.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", help="key-order: also draw a PNG at this path.", show_default=False)
    ] = None,
) -> None:
    """Run a benchmark: print its figure beside the bound or the peer of the same run."""
    from inturn.cli.session import command

    with command(json_output):
        variant = " --zipf" * zipf + " --async" * is_async
        variant += f" --handler-ms {handler_ms}" if handler_ms else ""
        catalog = from_checkout("benchmarks.catalog", "make bench")
        catalog.bench(name + variant, json_output, quick, plot)
