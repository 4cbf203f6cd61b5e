"""`inturn demo`: what inturn does, to be looked at, in four acts, each with a verdict.

First the main job, a crash and a hand-over, in the order of partitions; then the same messages in the order of keys,
many at once, with a key that is parked and resumed; then a server and consumers that are real processes, one of which
is killed; last an incident: a backlog that Spark works off, an audit of it all, and a page that shows it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec
import typer
from rich.text import Text

from demo.act import Act
from demo.board import Board
from demo.events import Events
from demo.incident_board import IncidentBoard
from demo.incident_sale import FULL_INCIDENT, QUICK_INCIDENT, IncidentScale
from demo.incident_story import IncidentStory, missing_for_spark
from demo.incident_verdict import IncidentActResult, judge_incident
from demo.incident_view import IncidentView, incident_verdict_panel
from demo.key_board import KeyBoard
from demo.key_story import KeyStory
from demo.key_verdict import KeyActResult, judge_by_key
from demo.key_view import KeyView, key_verdict_panel
from demo.orders import FULL, QUICK, SUBJECT, Scale
from demo.picture import WIDTH, coloured
from demo.report import report_data, write_report
from demo.served_board import ServedBoard
from demo.served_story import ServedStory
from demo.served_verdict import ServedActResult, judge_served
from demo.served_view import ServedView, served_verdict_panel
from demo.story import Story
from demo.verdict import DemoResult, judge
from demo.view import View, verdict_panel
from demo.watch import ActBoard, ActView, LookT, watch
from inturn.cli import logs
from inturn.cli.screen import Screen
from inturn.testing.history import SendAcknowledged

CLOSING = (
    "Shared work, a crash, a newcomer: still every order saw its steps in turn, and only what the dead consumer had "
    "not committed came twice. By key, as many at once as you like, and one bad message held back its own order only. "
    "And it is the same with a server, processes, and kill -9{incident}.\n"
    "Next: the 20 lines in README.md, or `inturn --help`."
)
INCIDENT = ", and when Spark works off what was too much"


def demo(json_output: bool, quick: bool) -> None:
    """Run it in a temporary folder. Exit code 1 if the order was not kept."""
    screen = Screen(json_output)
    # On purpose: handlers fail, and a producer is fenced. Both are told as events.
    logs.mute("consumer.handler_failed", subject=SUBJECT)
    logs.mute("producer.send_failed", subject=SUBJECT)
    with tempfile.TemporaryDirectory(prefix="inturn-demo-") as folder:
        scales = (QUICK, QUICK_INCIDENT) if quick else (FULL, FULL_INCIDENT)
        result = _Demo(screen, *scales, Path(folder)).play()
    if screen.is_json:
        screen.json(result)
    elif result.ok:
        closing = CLOSING.format(incident="" if result.incident is None else INCIDENT)
        screen.out.print(closing, style="grey70", width=min(WIDTH, screen.out.width))
    if not result.ok:
        raise typer.Exit(1)


class _Demo:
    def __init__(self, screen: Screen, scale: Scale, incident: IncidentScale, folder: Path) -> None:
        self._screen = screen
        self._scale = scale
        self._incident = incident
        self._folder = folder
        self._started_at_s = time.monotonic()

    def play(self) -> DemoResult:
        board = Board(self._scale.lease.life_s, Events(self._started_at_s))
        result = self._play_first(board)
        if not result.is_complete:
            return result
        by_key = self._play_second(board)
        result = result.with_second_act(by_key, self._elapsed_s)
        if not result.ok:
            return result
        result = result.with_third_act(self._play_third(), self._elapsed_s)
        if not result.ok:
            return result
        missing = missing_for_spark()
        if missing is not None:
            if not self._screen.is_json:
                self._screen.out.print(Text(f"the last act is left out: {missing}"), soft_wrap=True)
            return result.without_last_act(missing)
        return result.with_last_act(self._play_last(), self._elapsed_s)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at_s

    def _play_first(self, board: Board) -> DemoResult:
        story = Story(self._scale, self._folder, board)
        self._watch(story, board, View(self._columns))
        result = judge(story, board, self._scale, self._elapsed_s)
        if not self._screen.is_json:
            self._screen.out.print(verdict_panel(result))
            self._print_violations(result.violations)
        return result

    def _play_second(self, before: Board) -> KeyActResult:
        """The folder is opened anew: what the first act has stored is there."""
        begun_s = self._elapsed_s
        acknowledged = [one for one in before.recorder.snapshot() if isinstance(one, SendAcknowledged)]
        board = KeyBoard(self._scale.poisoned_order, Events(self._started_at_s))
        story = KeyStory(self._scale, self._folder, board, acknowledged)
        self._watch(story, board, KeyView(before.rate_max, self._columns))
        result = judge_by_key(story, board, self._scale, before.rate_max, self._elapsed_s - begun_s)
        if not self._screen.is_json:
            self._screen.out.print(key_verdict_panel(result))
            self._print_violations(result.violations)
        return result

    def _play_third(self) -> ServedActResult:
        """A folder of its own: a server has it open."""
        begun_s = self._elapsed_s
        folder = self._folder / "served"
        folder.mkdir()
        board = ServedBoard(self._scale.served, Events(self._started_at_s))
        story = ServedStory(self._scale.served, folder, board)
        self._watch(story, board, ServedView(self._columns))
        result = judge_served(story, board, self._scale.served, self._elapsed_s - begun_s)
        if not self._screen.is_json:
            self._screen.out.print(served_verdict_panel(result))
            self._print_violations(result.violations)
        return result

    def _play_last(self) -> IncidentActResult:
        begun_s = self._elapsed_s
        folder = self._folder / "incident"
        folder.mkdir()
        board = IncidentBoard(self._incident, Events(self._started_at_s), folder / "traces")
        story = IncidentStory(self._incident, folder, board)
        self._watch(story, board, IncidentView(self._columns))
        result = judge_incident(story, board, self._elapsed_s - begun_s)
        if result.is_complete:
            result = self._report(story, board, result)
        if not self._screen.is_json:
            self._screen.out.print(incident_verdict_panel(result))
            self._print_violations(result.violations)
            if result.report is not None:
                self._screen.out.print(Text(f"drawn in {result.report}"), soft_wrap=True)
        return result

    def _report(self, story: IncidentStory, board: IncidentBoard, result: IncidentActResult) -> IncidentActResult:
        """A folder that cannot be written to is no reason to fail."""
        try:
            path = write_report(Path.cwd(), report_data(story, board, result))
        except OSError as error:
            self._screen.warn(f"the report is not written: {error}")
            return result
        return msgspec.structs.replace(result, report=str(path))

    @property
    def _columns(self) -> int:
        return self._screen.out.width

    def _watch(self, act: Act, board: ActBoard[LookT], view: ActView[LookT]) -> None:
        act.start()
        try:
            watch(self._screen, act, board, view)
        finally:
            act.stop()

    def _print_violations(self, violations: list[str]) -> None:
        for violation in violations:
            self._screen.out.print(coloured(violation), soft_wrap=True)
