"""The options that several commands share, and the modules they need at start-up: few, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DATA = Path("./data")

Data = Annotated[
    Path,
    typer.Option(
        "--data", "-d", envvar="INTURN_DATA", metavar="PATH", help="The folder that connect() is called with."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine output: JSON on stdout and nothing else there.")]
Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="The name of a subject.", show_default=False)]
Group = Annotated[str, typer.Option("--group", "-g", metavar="GROUP", help="The name of a group.", show_default=False)]


def examples(*lines: str) -> str:
    """An epilog for a command's help: each example on a line of its own."""
    return "\n".join(("[bold]Examples[/bold]", *(f"  [cyan]$ {line}[/cyan]" for line in lines)))
