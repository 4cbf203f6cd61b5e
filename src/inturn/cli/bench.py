"""`inturn bench`: run a benchmark of a checkout and print its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inturn.cli.checkout import from_checkout
from inturn.cli.options import Json, examples

EXAMPLES = examples(
    "inturn bench all",
    "inturn bench all --quick --json",
    "inturn bench key-order --plot key-order.png",
)


def run_bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one, or 'all'.", show_default=False)],
    json_output: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Do less work: to see that it runs.")] = False,
    zipf: Annotated[bool, typer.Option("--zipf", help="key-order: a few keys have most of the messages.")] = False,
    is_async: Annotated[bool, typer.Option("--async", help="key-order: a handler that is `async def`.")] = False,
    handler_ms: Annotated[
        int, typer.Option("--handler-ms", metavar="MS", help="spark-drain: how long a handler takes; 0 or 5.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", help="key-order: draw it to this PNG, too.", show_default=False)
    ] = None,
) -> None:
    """Measure, and print the figure beside the bound or the peer it is held against."""
    from inturn.cli.session import command

    with command(json_output):
        variant = " --zipf" * zipf + " --async" * is_async
        variant += f" --handler-ms {handler_ms}" if handler_ms else ""
        catalog = from_checkout("benchmarks.catalog", "make bench")
        catalog.bench(name + variant, json_output, quick, plot)
