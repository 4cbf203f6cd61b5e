"""The options that several commands share, and the modules they need at start-up: few, so that help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from inturn.cli.complete import complete_group, complete_subject
from inturn.cli.target import checked_server, chosen

DEFAULT_DATA = "./data"

# A command takes both, and uses `data` only: it is the address if that was given. `server` is eager, so that it is
# known by then.
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        envvar="INTURN_DATA",
        metavar="PATH",
        help="The folder that connect() is called with, or the address of a server.",
        callback=chosen,
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="INTURN_SERVER",
        metavar="ADDRESS",
        help="A server instead of a folder, such as inturn://127.0.0.1:7420.",
        show_default=False,
        callback=checked_server,
        is_eager=True,
    ),
]
# Of commands that need the files themselves.
Folder = Annotated[
    str, typer.Option("--data", "-d", envvar="INTURN_DATA", metavar="PATH", help="The folder; not an address.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine output: JSON on stdout and nothing else there.")]
Subject = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT", help="The name of a subject.", show_default=False, autocompletion=complete_subject
    ),
]
Group = Annotated[
    str,
    typer.Option(
        "--group",
        "-g",
        metavar="GROUP",
        help="The name of a group.",
        show_default=False,
        autocompletion=complete_group,
    ),
]


def examples(*lines: str) -> str:
    """An epilog for a command's help: each example on a line of its own."""
    return "\n".join(("[bold]Examples[/bold]", *(f"  [cyan]$ {line}[/cyan]" for line in lines)))
