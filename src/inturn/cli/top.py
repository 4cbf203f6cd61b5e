"""`inturn top`: all groups, live."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, examples
from inturn.cli.screen import Screen, error_fields, plain
from inturn.cli.session import command, opened
from inturn.cli.top_board import Board, GroupRow
from inturn.model.commands import (
    DescribeGroup,
    DescribeSubject,
    GroupDescription,
    GroupList,
    ListGroups,
    Node,
    SubjectDescription,
)
from inturn.model.errors import InturnError, NotFound
from inturn.model.request import ask

EXAMPLES = examples("inturn top", "inturn top --server inturn://queue.example:7420", "inturn top --once --json")
PATIENCE_S = 1.0  # whoever looks wants to see that the server is gone, and does not wait for it


def top(
    data: Data = DEFAULT_DATA,
    server: Server = None,
    once: Annotated[bool, typer.Option("--once", help="Look once; so it is without a terminal, too.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    json_output: Json = False,
) -> None:
    """All groups, live: what comes in, what gets done, the lag, when it will be gone, and the key that blocks.

    The largest lag comes first. Rates are of the last ten seconds. End it with q or Ctrl-C. With --json there is one
    object for each look; it has "error" in place of "groups" while the server cannot be reached.
    """
    with command(json_output) as screen, opened(data) as connection:
        board = Board()
        if once or not (screen.is_json or screen.out.is_terminal):
            _print(screen, board.rows(_look(connection.node), time.monotonic()))
            return
        with contextlib.suppress(KeyboardInterrupt):
            if screen.is_json:
                _print_lines(screen, connection.node, board, interval_s)
            else:
                _watch(screen, connection.node, board, interval_s)


def _look(node: Node) -> list[tuple[GroupDescription, float]]:
    """Every group with what is appended to its subject per second."""
    appended_per_s: dict[str, float] = {}
    found = []
    for name in ask(node, ListGroups(), GroupList, PATIENCE_S).groups:
        with contextlib.suppress(NotFound):  # gone since
            if name.subject not in appended_per_s:
                subject = ask(node, DescribeSubject(name.subject), SubjectDescription, PATIENCE_S)
                appended_per_s[name.subject] = sum(one.appended_per_s for one in subject.partitions)
            group = ask(node, DescribeGroup(name.subject, name.group), GroupDescription, PATIENCE_S)
            found.append((group, appended_per_s[name.subject]))
    return found


def _print(screen: Screen, rows: list[GroupRow]) -> None:
    if screen.is_json:
        _print_object(screen, "groups", [row.fields() for row in rows])
        return
    if not rows:
        screen.note("no groups yet; a group is made when its first consumer starts")
        return
    from inturn.cli.top_view import frame

    screen.out.print(frame(rows, time.monotonic(), screen.out.width))


def _print_object(screen: Screen, name: str, value: object) -> None:
    screen.json({"at_ms": int(time.time() * 1000), name: value})
    screen.flush()


def _print_lines(screen: Screen, node: Node, board: Board, interval_s: float) -> None:
    while True:
        try:
            _print(screen, board.rows(_look(node), time.monotonic()))
        except InturnError as error:
            if not error.retriable:
                raise
            _print_object(screen, "error", error_fields(error))
        time.sleep(interval_s)


def _watch(screen: Screen, node: Node, board: Board, interval_s: float) -> None:
    from rich.live import Live

    from inturn.cli.keyboard import Keyboard
    from inturn.cli.top_view import frame

    rows: list[GroupRow] = []
    console = screen.out
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            note = f"[dim]{time.strftime('%H:%M:%S')}  q ends[/dim]"
            try:
                rows = board.rows(_look(node), time.monotonic())
            except InturnError as error:
                if not error.retriable:
                    raise
                note = f"[red]{plain(str(error))}[/red]"  # what was seen last stays
            live.update(frame(rows, time.monotonic(), console.width, console.height, note), refresh=True)
            if "q" in keyboard.wait(interval_s).lower():
                return
