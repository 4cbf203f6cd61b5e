"""`inturn top`: all groups, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, examples
from inturn.cli.screen import Screen, counted, error_fields, plain
from inturn.cli.session import command, opened
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

if TYPE_CHECKING:
    from inturn.cli.top_view import GroupRow, TopBoard


class Keyboard:
    """Pressed keys, without Enter. No keys where stdin is no terminal, or the system has no termios."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._former: list[object] = []

    def __enter__(self) -> Self:
        try:
            import termios
            import tty
        except ImportError:  # Windows
            return self
        if sys.stdin.isatty():
            self._fd = sys.stdin.fileno()
            self._former = list(termios.tcgetattr(self._fd))
            tty.setcbreak(self._fd)  # Ctrl-C still interrupts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._former:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._former)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> str:
        """The keys pressed within this time, at once; empty if no key is pressed."""
        if self._fd is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._fd, 64)
        if not pressed:
            self._fd = None  # the terminal is gone
        return pressed.decode(errors="replace")


EXAMPLES = examples("inturn top", "inturn top --server inturn://queue.example:7420", "inturn top --once --json")
PATIENCE_S = 1.0  # an operator wants to see that the server is gone


def top(
    data: Data = DEFAULT_DATA,
    server: Server = None,
    once: Annotated[bool, typer.Option("--once", help="Print once. Default without a terminal.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two updates.")] = 1.0,
    json_output: Json = False,
) -> None:
    """Show all groups, live: input rate, done rate, lag, time until the lag is gone, and the key that blocks.

    The largest lag comes first. Rates are of the last ten seconds. End with q or Ctrl-C. With --json every update is an
    object; the object has "error" in place of "groups" while the server is unreachable. Groups that the access rules
    hide are counted only.
    """
    with command(json_output) as screen, opened(data) as connection:
        from inturn.cli.top_view import TopBoard

        board = TopBoard()
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
    """Every visible group with the rate of appends to its subject."""

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


def _print(screen: Screen, board: TopBoard, look: _Look) -> None:
    rows = board.rows(look.groups, time.monotonic())
    if screen.is_json:
        _print_object(screen, groups=[row.fields() for row in rows], refused_count=look.refused_count)
        return
    if look.note:
        screen.note(look.note)
    elif not rows:
        screen.note("no groups yet; the first consumer of a group creates the group")
    if not rows:
        return
    from inturn.cli.top_view import frame

    screen.out.print(frame(rows, time.monotonic(), screen.out.width))


def _print_object(screen: Screen, **fields: object) -> None:
    screen.json({"at_ms": int(time.time() * 1000), **fields})
    screen.flush()


def _print_lines(screen: Screen, node: Node, board: TopBoard, interval_s: float) -> None:
    while True:
        try:
            _print(screen, board, _look(node))
        except InturnError as error:
            if not error.retriable:
                raise
            _print_object(screen, error=error_fields(error))
        time.sleep(interval_s)


def _watch(screen: Screen, node: Node, board: TopBoard, interval_s: float) -> None:
    from rich.live import Live

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
                note = f"[red]{plain(str(error))}[/red]"  # the last rows stay on the screen
            live.update(frame(rows, time.monotonic(), console.width, console.height, note), refresh=True)
            if "q" in keyboard.wait(interval_s).lower():
                return
