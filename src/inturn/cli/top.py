"""`inturn top`: all groups, live."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, examples
from inturn.cli.screen import Screen, plain
from inturn.cli.session import command, opened
from inturn.cli.top_board import Board, GroupRow
from inturn.model.errors import InturnError, NotFound

if TYPE_CHECKING:
    from inturn.connection import Connection
    from inturn.model.commands import GroupDescription

EXAMPLES = examples("inturn top", "inturn top --server inturn://queue.example:7420", "inturn top --once --json")


def top(
    data: Data = DEFAULT_DATA,
    server: Server = None,
    once: Annotated[bool, typer.Option("--once", help="Look once; so it is without a terminal, too.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    json_output: Json = False,
) -> None:
    """All groups, live: what comes in, what gets done, the lag, when it will be gone, and the key that blocks.

    The largest lag comes first. Rates are of the last ten seconds. End it with q or Ctrl-C. With --json there is one
    object for each look.
    """
    with command(json_output) as screen, opened(data) as connection:
        board = Board()
        if once or not (screen.is_json or screen.out.is_terminal):
            _print(screen, board.rows(_look(connection), time.monotonic()))
            return
        with contextlib.suppress(KeyboardInterrupt):
            if screen.is_json:
                _print_lines(screen, connection, board, interval_s)
            else:
                _watch(screen, connection, board, interval_s)


def _look(connection: Connection) -> list[tuple[GroupDescription, float]]:
    """Every group with what is appended to its subject per second."""
    appended_per_s: dict[str, float] = {}
    found = []
    for name in connection.groups():
        with contextlib.suppress(NotFound):  # gone since
            if name.subject not in appended_per_s:
                partitions = connection.describe_subject(name.subject).partitions
                appended_per_s[name.subject] = sum(one.appended_per_s for one in partitions)
            found.append((connection.describe_group(name.subject, name.group), appended_per_s[name.subject]))
    return found


def _print(screen: Screen, rows: list[GroupRow]) -> None:
    if screen.is_json:
        screen.json({"at_ms": int(time.time() * 1000), "groups": [row.fields() for row in rows]})
        screen.flush()
        return
    if not rows:
        screen.note("no groups yet; a group is made when its first consumer starts")
        return
    from inturn.cli.top_view import frame

    screen.out.print(frame(rows, time.monotonic(), screen.out.width))


def _print_lines(screen: Screen, connection: Connection, board: Board, interval_s: float) -> None:
    while True:
        _print(screen, board.rows(_look(connection), time.monotonic()))
        time.sleep(interval_s)


def _watch(screen: Screen, connection: Connection, board: Board, interval_s: float) -> None:
    from rich.live import Live

    from inturn.cli.keyboard import Keyboard
    from inturn.cli.top_view import frame

    rows: list[GroupRow] = []
    console = screen.out
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            note = f"[dim]{time.strftime('%H:%M:%S')}  q ends[/dim]"
            try:
                rows = board.rows(_look(connection), time.monotonic())
            except InturnError as error:
                if not error.retriable:
                    raise
                note = f"[red]{plain(str(error))}[/red]"  # what was seen last stays
            live.update(frame(rows, time.monotonic(), console.width, console.height, note), refresh=True)
            if "q" in keyboard.wait(interval_s).lower():
                return
