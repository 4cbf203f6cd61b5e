"""`inturn doctor`: check a folder without a change, or a running server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, examples
from inturn.cli.screen import Screen, counted, plain
from inturn.cli.session import check_folder, command, credentials_for
from inturn.model.errors import ConnectionLost, VersionMismatch
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from inturn.server.folder_doctor import Finding

EXAMPLES = examples(
    "inturn doctor --data ./data",
    "inturn doctor --server inturn://queue.example:7420",
    "inturn doctor --json | jq '.findings[] | select(.level != \"ok\")'",
)
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_SIGNS = {"ok": "✓", "warning": "!", "error": "✗"}


def doctor(data: Data = DEFAULT_DATA, server: Server = None, json_output: Json = False) -> None:
    """Check a folder in full, or a running server, and change nothing.

    For a folder: read every checksum and offset of every log, and the store. For a server: check readiness, clock, disk
    and logs, and find groups, keys, leases and members in trouble. Every finding has a next step. Exit code 1 if there
    are errors; warnings are about troubles that end by themselves, or need an operator.
    """
    with command(json_output) as screen:
        findings = _of_server(data) if is_address(data) else _of_folder(screen, data)
        counts = {level: sum(one.level == level for one in findings) for level in _STYLES}
        if screen.is_json:
            screen.json({"ok": counts["error"] == 0, "counts": counts, "findings": [asdict(one) for one in findings]})
        else:
            for one in findings:
                _print_finding(screen, one.level.value, one.check, one.what, one.next_step)
            _print_verdict(screen, counts)
        screen.flush()
    if counts["error"]:
        raise typer.Exit(1)


def _of_folder(screen: Screen, data: str) -> Sequence[Finding]:
    from inturn.cli.progress import Meter
    from inturn.server.folder_doctor import examine, log_bytes

    check_folder(data)
    with Meter(screen, "reading logs", log_bytes(data), counts_messages=False) as meter:
        return examine(data, advance=meter.advance)


def _of_server(address: str) -> Sequence[Finding]:
    """An unreachable server is a finding, too."""
    from inturn.client import Connection
    from inturn.server.folder_doctor import Finding, Level
    from inturn.server.server_doctor import examine_server

    try:
        with Connection(address, credentials=credentials_for(address)) as connection:
            reached = Finding("connect", Level.OK, f"the server at {address} answers")
            return [reached, *examine_server(connection.node)]
    except ConnectionLost as error:
        what = f"the server at {address} cannot be reached: {error.why}"
        next_step = "check that the server runs (systemctl status inturn, or its log), and that the address is right"
        return [Finding("connect", Level.ERROR, what, next_step)]
    except VersionMismatch as error:
        return [Finding("connect", Level.ERROR, str(error), "use an inturn of the server's version")]


def _print_finding(screen: Screen, level: str, check: str, what: str, next_step: str) -> None:
    style = _STYLES[level]
    screen.out.print(f"[{style}]{_SIGNS[level]} {check:<8}[/] {plain(what)}", soft_wrap=True)
    if next_step:
        screen.out.print(f"{'':<10} [dim]→[/dim] {plain(next_step)}", soft_wrap=True)


def _print_verdict(screen: Screen, counts: dict[str, int]) -> None:
    errors, warnings = counts["error"], counts["warning"]
    if errors:
        verdict = f"[bold red]{counted(errors, 'error')}[/], {counted(warnings, 'warning')}"
    elif warnings:
        verdict = f"[green]no errors[/], [yellow]{counted(warnings, 'warning')}[/]"
    else:
        verdict = "[green]all is well[/]"
    screen.out.print(verdict)
