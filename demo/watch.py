"""Looking at an act while it is played: a live picture on a terminal, lines elsewhere, nothing for programs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from demo.act import Act
from demo.events import Event
from inturn.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

DRAW_S = 0.125
LINE_S = 1.0


class ActLook(Protocol):
    """A board at one moment."""

    @property
    def at_s(self) -> float: ...

    @property
    def events(self) -> tuple[Event, ...]: ...


LookT = TypeVar("LookT", bound=ActLook)
LookT_co = TypeVar("LookT_co", bound=ActLook, covariant=True)
LookT_contra = TypeVar("LookT_contra", bound=ActLook, contravariant=True)


class ActBoard(Protocol[LookT_co]):
    def look(self) -> LookT_co: ...


class ActView(Protocol[LookT_contra]):
    def frame(self, look: LookT_contra) -> RenderableType: ...

    def last_frame(self, look: LookT_contra) -> RenderableType:
        """What stays on the screen."""
        ...

    def line(self, look: LookT_contra) -> str:
        """How far it is, where there is no picture."""
        ...


def watch(screen: Screen, act: Act, board: ActBoard[LookT], view: ActView[LookT]) -> None:
    """Until the act is over."""
    if screen.is_json:
        _sleep(act)
    elif screen.out.is_terminal:
        _watch_live(screen, act, board, view)
    else:
        _watch_lines(act, board, view)


def _sleep(act: Act) -> None:
    while not act.is_over:
        time.sleep(DRAW_S)


def _watch_live(screen: Screen, act: Act, board: ActBoard[LookT], view: ActView[LookT]) -> None:
    from rich.live import Live

    with Live(view.frame(board.look()), console=screen.out, auto_refresh=False) as live:
        while not act.is_over:
            time.sleep(DRAW_S)
            live.update(view.frame(board.look()), refresh=True)
        live.update(view.last_frame(board.look()), refresh=True)


def _watch_lines(act: Act, board: ActBoard[LookT], view: ActView[LookT]) -> None:
    """For a pipe or a log: events as they come, and a line every second."""
    told, next_line_s = 0, board.look().at_s + LINE_S
    while True:
        is_over = act.is_over  # before the look: what comes last is told too
        look = board.look()
        for event in look.events[told:]:
            _line(f"{event.at_s:5.1f} s  {event.text}")
            for detail in event.details:
                _line(f"         {detail}")
        told = len(look.events)
        if look.at_s >= next_line_s or is_over:
            _line(f"{look.at_s:5.1f} s  {view.line(look)}")
            next_line_s = look.at_s + LINE_S
        if is_over:
            return
        time.sleep(DRAW_S)


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
