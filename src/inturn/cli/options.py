"""Options that several commands share: the folder or server of a command, and names for the shell to complete.

The imports are few: `--help` stays quick.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.transport.address import is_address

if TYPE_CHECKING:
    from inturn.client import Connection

_RANKS = {"COMMANDLINE": 2, "ENVIRONMENT": 1}  # the command line wins over the environment


def chosen(context: typer.Context, data: str) -> str:
    """The folder or address of the command, from --data, --server and their environment variables."""
    server = context.params.get("server")
    if server is None:
        return data
    ranks = {name: _rank(context, name) for name in ("data", "server")}
    if ranks["data"] == ranks["server"]:
        names = "--data and --server" if ranks["data"] == 2 else "INTURN_DATA and INTURN_SERVER"
        raise typer.BadParameter(f"{names} are both given, {data!r} and {server!r}: omit --data or --server")
    return data if ranks["data"] > ranks["server"] else str(server)


def checked_server(server: str | None) -> str | None:
    if server is not None and not is_address(server):
        raise typer.BadParameter(f"{server!r} is no address: give inturn://host:port, or a folder with --data")
    return server


def _rank(context: typer.Context, name: str) -> int:
    source = context.get_parameter_source(name)
    return 0 if source is None else _RANKS.get(source.name, 0)


PATIENCE_S = 1.0


def complete_subject(context: typer.Context, incomplete: str) -> list[str]:
    return _names(context, incomplete, lambda connection: [one.name for one in connection.subjects()])


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    """The groups of the subject on the command line, or all groups."""
    subject = context.params.get("subject")
    return _names(
        context,
        incomplete,
        lambda connection: [one.group for one in connection.groups() if subject in (None, one.subject)],
    )


def _names(context: typer.Context, incomplete: str, look: Callable[[Connection], list[str]]) -> list[str]:
    """Fetch names in a thread that is abandoned after PATIENCE_S: the process ends right after."""
    from inturn.cli import logs
    from inturn.cli.session import opened

    logs.silence()
    found: list[str] = []

    def fetch() -> None:
        try:
            with opened(chosen(context, context.params.get("data") or "")) as connection:
                found.extend(look(connection))
        except BaseException:  # any error: the shell needs names, or no output
            return

    thread = threading.Thread(target=fetch, name="inturn-complete", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return sorted({name for name in list(found) if name.startswith(incomplete)})


DEFAULT_DATA = "./data"

# A command has both parameters and uses `data` only: `data` is the address if --server was given. `server` is eager:
# parsed before `data`.
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        envvar="INTURN_DATA",
        metavar="PATH",
        help="The folder of connect(), or the address of a server.",
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
# For commands that need the files.
Folder = Annotated[
    str, typer.Option("--data", "-d", envvar="INTURN_DATA", metavar="PATH", help="The folder; not an address.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON output for programs: stdout has JSON only.")]
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
    """The epilog of a command's help: one example per line."""
    return "\n".join(("[bold]Examples[/bold]", *(f"  [cyan]$ {line}[/cyan]" for line in lines)))
