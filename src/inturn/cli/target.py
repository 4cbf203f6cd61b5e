"""What a command works on: a folder, or a server."""

from __future__ import annotations

import typer

from inturn.transport.address import is_address as is_address  # `inturn doctor` takes it from here

_RANKS = {"COMMANDLINE": 2, "ENVIRONMENT": 1}  # what is typed now comes before what was exported once


def chosen(context: typer.Context, data: str) -> str:
    """The folder or address that was meant, of --data and --server and their environment variables."""
    server = context.params.get("server")
    if server is None:
        return data
    ranks = {name: _rank(context, name) for name in ("data", "server")}
    if ranks["data"] == ranks["server"]:
        names = "--data and --server" if ranks["data"] == 2 else "INTURN_DATA and INTURN_SERVER"
        raise typer.BadParameter(f"{names} are both given, {data!r} and {server!r}: leave one of them out")
    return data if ranks["data"] > ranks["server"] else str(server)


def checked_server(server: str | None) -> str | None:
    if server is not None and not is_address(server):
        raise typer.BadParameter(f"{server!r} is no address: give inturn://host:port, or a folder with --data")
    return server


def _rank(context: typer.Context, name: str) -> int:
    source = context.get_parameter_source(name)
    return 0 if source is None else _RANKS.get(source.name, 0)
