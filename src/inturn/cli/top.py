"""`inturn top`: all groups, live."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, examples
from inturn.cli.screen import Screen, counted, error_fields, plain
from inturn.cli.session import command, opened
from inturn.cli.top_board import Board, GroupRow
from inturn.model.errors import AccessDenied, InturnError, NotFound
from inturn.protocol.commands import (
    DescribeGroup,
    DescribeSubject,
    GroupDescription,
    GroupList,
    ListGroups,
    Node,
    SubjectDescription,
)
from inturn.protocol.request import ask

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
    object for each look; it has "error" in place of "groups" while the server cannot be reached. Groups that no rule
    lets one see are counted only.
    """
    with command(json_output) as screen, opened(data) as connection:
        board = Board()
        if once or not (screen.is_json or screen.out.is_terminal):
            _print(screen, board, _look(connection.node))
            return
        with contextlib.suppress(KeyboardInterrupt):
            if screen.is_json:
                _print_lines(screen, connection.node, board, interval_s)
            else:
                _watch(screen, connection.node, board, interval_s)


@dataclass(slots=True)
class _Look:
    """Every group with what is appended to its subject per second, but for those that one may not ask for."""

    groups: list[tuple[GroupDescription, float]] = field(default_factory=list)
    refused_count: int = 0

    @property
    def note(self) -> str:
        if not self.refused_count:
            return ""
        return (
            f"[yellow]{counted(self.refused_count, 'group')} not shown: no rule allows to describe the subject[/yellow]"
        )


def _look(node: Node) -> _Look:
    appended_per_s: dict[str, float] = {}
    look = _Look()
    for name in ask(node, ListGroups(), GroupList, PATIENCE_S).groups:
        try:
            if name.subject not in appended_per_s:
                subject = ask(node, DescribeSubject(name.subject), SubjectDescription, PATIENCE_S)
                appended_per_s[name.subject] = sum(one.appended_per_s for one in subject.partitions)
            group = ask(node, DescribeGroup(name.subject, name.group), GroupDescription, PATIENCE_S)
            look.groups.append((group, appended_per_s[name.subject]))
        except NotFound:  # gone since
            pass
        except AccessDenied:
            look.refused_count += 1
    return look


def _print(screen: Screen, board: Board, look: _Look) -> None:
    rows = board.rows(look.groups, time.monotonic())
    if screen.is_json:
        _print_object(screen, groups=[row.fields() for row in rows], refused_count=look.refused_count)
        return
    if look.note:
        screen.note(look.note)
    elif not rows:
        screen.note("no groups yet; a group is made when its first consumer starts")
    if not rows:
        return
    from inturn.cli.top_view import frame

    screen.out.print(frame(rows, time.monotonic(), screen.out.width))


def _print_object(screen: Screen, **fields: object) -> None:
    screen.json({"at_ms": int(time.time() * 1000), **fields})
    screen.flush()


def _print_lines(screen: Screen, node: Node, board: Board, interval_s: float) -> None:
    while True:
        try:
            _print(screen, board, _look(node))
        except InturnError as error:
            if not error.retriable:
                raise
            _print_object(screen, error=error_fields(error))
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
                look = _look(node)
                rows = board.rows(look.groups, time.monotonic())
                note = f"{note}  {look.note}" if look.note else note
            except InturnError as error:
                if not error.retriable:
                    raise
                note = f"[red]{plain(str(error))}[/red]"  # what was seen last stays
            live.update(frame(rows, time.monotonic(), console.width, console.height, note), refresh=True)
            if "q" in keyboard.wait(interval_s).lower():
                return
