"""`inturn demo`: what inturn does, to be looked at. The main job, a crash and a hand-over, and a verdict."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import typer

from inturn.cli import logs
from inturn.cli.demo_board import Board, Look
from inturn.cli.demo_orders import FULL, QUICK, SUBJECT, Scale
from inturn.cli.demo_story import Interrupted, Story
from inturn.cli.demo_verdict import DemoResult, judge
from inturn.cli.demo_view import View, coloured, verdict_panel
from inturn.cli.screen import Screen

DRAW_S = 0.125
LINE_S = 1.0
CLOSING = (
    "Shared work, a crash, a newcomer: still every order saw its steps in turn, and only what the dead\n"
    "consumer had not committed came twice. Next: the 20 lines in README.md, or `inturn --help`."
)


def demo(json_output: bool, quick: bool) -> None:
    """Run it in a temporary folder. Exit code 1 if the order was not kept."""
    screen = Screen(json_output)
    scale = QUICK if quick else FULL
    # On purpose: handlers fail, and a producer is fenced. Both are told as events.
    logs.mute("consumer.handler_failed", subject=SUBJECT)
    logs.mute("producer.send_failed", subject=SUBJECT)
    result = _play(scale, _watcher(screen))
    if screen.is_json:
        screen.json(result)
    else:
        _print_verdict(screen, result)
    if not result.ok:
        raise typer.Exit(1)


def _play(scale: Scale, watch: Callable[[Story, Board], None]) -> DemoResult:
    started_at_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="inturn-demo-") as folder:
        board = Board(scale.lease.life_s)
        story = Story(scale, Path(folder), board)
        story.start()
        try:
            watch(story, board)
        finally:
            story.stop()
        if story.error is not None and not isinstance(story.error, Interrupted):
            raise story.error
        return judge(story, board, scale, time.monotonic() - started_at_s)


def _watcher(screen: Screen) -> Callable[[Story, Board], None]:
    if screen.is_json:
        return lambda story, board: _sleep_until_over(story)
    if screen.out.is_terminal:
        return lambda story, board: _watch_live(screen, story, board)
    return lambda story, board: _watch_lines(story, board)


def _sleep_until_over(story: Story) -> None:
    while not story.is_over:
        time.sleep(DRAW_S)


def _watch_live(screen: Screen, story: Story, board: Board) -> None:
    from rich.live import Live

    view = View(screen.out.width)
    with Live(view.frame(board.look()), console=screen.out, auto_refresh=False) as live:
        while not story.is_over:
            time.sleep(DRAW_S)
            live.update(view.frame(board.look()), refresh=True)
        live.update(view.last_frame(board.look()), refresh=True)


def _watch_lines(story: Story, board: Board) -> None:
    """For a pipe or a log: events as they come, and a line every second."""
    told, next_line_s = 0, LINE_S
    while True:
        is_over = story.is_over  # before the look: what comes last is told too
        look = board.look()
        for event in look.events[told:]:
            _line(f"{event.at_s:5.1f} s  {event.text}")
        told = len(look.events)
        if look.at_s >= next_line_s or is_over:
            _line(_progress(look))
            next_line_s = look.at_s + LINE_S
        if is_over:
            return
        time.sleep(DRAW_S)


def _progress(look: Look) -> str:
    partitions = "  ".join(
        f"[{index}] {one.owner or '–'} epoch {one.epoch} at {one.done:,}" for index, one in enumerate(look.partitions)
    )
    return f"{look.at_s:5.1f} s  sent {look.stored:,}  handled {look.done:,}  {partitions}"


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _print_verdict(screen: Screen, result: DemoResult) -> None:
    screen.out.print(verdict_panel(result))
    for violation in result.violations:
        screen.out.print(coloured(violation), soft_wrap=True)
    if result.ok:
        screen.out.print(CLOSING, style="grey70")
