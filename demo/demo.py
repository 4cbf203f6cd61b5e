"""`inturn demo`: plays the four acts one after the other and shows the verdict on each act.

Spark starts in the background with the first act (in a quick demo: before the last act) and is used in the last act.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec
import typer
from rich.console import RenderableType
from rich.text import Text

from demo.act import Act, ActResult, Board, Events
from demo.crash import CrashAct, CrashActResult, CrashBoard, judge_crash
from demo.crash_view import CrashView, crash_verdict
from demo.incident import IncidentAct, IncidentBoard, SparkStart
from demo.incident_verdict import IncidentActResult, judge_incident
from demo.incident_view import IncidentView, incident_verdict
from demo.keys import KeyAct, KeyActResult, KeyBoard, judge_keys
from demo.keys_view import KeyView, keys_verdict
from demo.orders import FULL, FULL_INCIDENT, QUICK, QUICK_INCIDENT, SUBJECT, IncidentScale, Scale
from demo.report import report_data, write_report
from demo.served import ServedAct, ServedActResult, ServedBoard, judge_served
from demo.served_view import ServedView, served_verdict
from demo.view import WIDTH, LookT, View, coloured, watch
from inturn.cli import logs
from inturn.cli.screen import Screen
from inturn.testing.history import SendAcknowledged

HEADINGS = (
    "act 1 of 4: order by partition, a crash, and a new consumer",
    "act 2 of 4: order by key, and a poisoned key",
    "act 3 of 4: a server, processes, and kill -9",
    "act 4 of 4: a backlog, a drain on Spark, and an audit",
)
CLOSING = (
    "Shared work, a crash, a new consumer: still every order saw its steps in turn, and only messages that the dead "
    "consumer had not committed came twice. By key, as many handlers at once as you like, and a bad message held back "
    "its own order only. The same holds with a server, processes, and kill -9{incident}.\n"
    "Next: the 20 lines in README.md, or `inturn --help`."
)
INCIDENT = ", and when Spark works off a backlog"


class DemoResult(CrashActResult, frozen=True, kw_only=True):
    """The output of `inturn demo --json`: the first act, and in separate fields the other acts.

    `ok`, `is_complete` and `elapsed_s` are of all acts.
    """

    by_key: KeyActResult | None = None  # None: the second act was not reached
    served: ServedActResult | None = None  # None: the third act was not reached
    incident: IncidentActResult | None = None  # None: the last act was not reached, or left out
    left_out: str | None = None  # why the last act was left out, and what to install

    def with_act(self, name: str, act: ActResult, elapsed_s: float) -> DemoResult:
        return msgspec.structs.replace(
            self,
            ok=self.ok and act.ok,
            is_complete=self.is_complete and act.is_complete,
            elapsed_s=round(elapsed_s, 2),
            **{name: act},
        )


def demo(json_output: bool, quick: bool) -> None:
    """Play the demo in a temporary folder. Exit code 1 if the order was not kept."""
    screen = Screen(json_output)
    # Handlers fail and a producer is fenced on purpose. The acts report both as events.
    logs.mute("consumer.handler_failed", subject=SUBJECT)
    logs.mute("producer.send_failed", subject=SUBJECT)
    scales = (QUICK, QUICK_INCIDENT) if quick else (FULL, FULL_INCIDENT)
    spark = SparkStart()
    # A quick demo has acts of one second: a JVM or a process that starts beside such an act would starve the act.
    starts_ahead = not quick
    if starts_ahead:
        spark.start()
    try:
        with tempfile.TemporaryDirectory(prefix="inturn-demo-") as folder:
            result = _Demo(screen, *scales, Path(folder), spark, starts_ahead=starts_ahead).play()
        if screen.is_json:
            screen.json(result)
        elif result.ok:
            closing = CLOSING.format(incident="" if result.incident is None else INCIDENT)
            screen.out.print(closing, style="grey70", width=min(WIDTH, screen.out.width))
    finally:
        spark.stop()
    if not result.ok:
        raise typer.Exit(1)


class _Demo:
    def __init__(
        self,
        screen: Screen,
        scale: Scale,
        incident: IncidentScale,
        folder: Path,
        spark: SparkStart,
        *,
        starts_ahead: bool,
    ) -> None:
        """`starts_ahead`: start the processes of the next act at a quiet moment of an act."""
        self._screen = screen
        self._scale = scale
        self._folder = folder
        self._spark = spark
        self._starts_ahead = starts_ahead
        self._started_at_s = time.monotonic()
        served, last = folder / "served", folder / "incident"  # folders of their own: servers open them
        self._served_board = ServedBoard(scale.served, self._events(), served)
        self._served = ServedAct(scale.served, served, self._served_board)
        self._incident_board = IncidentBoard(incident, self._events(), last / "traces")
        self._incident = IncidentAct(incident, last, self._incident_board, spark)

    def play(self) -> DemoResult:
        try:
            return self._play()
        finally:
            self._served.discard()
            self._incident.discard()

    def _play(self) -> DemoResult:
        board = CrashBoard(self._scale.lease.life_s, self._events())
        result = DemoResult(**msgspec.structs.asdict(self._play_crash(board)))
        if not result.is_complete:
            return result
        result = result.with_act("by_key", self._play_keys(board), self._elapsed_s)
        if not result.ok:
            return result
        result = result.with_act("served", self._play_served(), self._elapsed_s)
        if not result.ok:
            return result
        self._spark.start()
        missing = self._spark.wait_checked()
        if missing is not None:
            if not self._screen.is_json:
                self._screen.out.print(Text(f"the last act is left out: {missing}"), soft_wrap=True)
            return msgspec.structs.replace(result, left_out=missing)
        return result.with_act("incident", self._play_incident(), self._elapsed_s)

    def _play_crash(self, board: CrashBoard) -> CrashActResult:
        act = CrashAct(self._scale, self._folder, board)
        self._watch(0, act, board, CrashView(self._columns))
        result = judge_crash(act, board, self._scale, self._elapsed_s)
        self._show(result, crash_verdict(result))
        return result

    def _play_keys(self, before: CrashBoard) -> KeyActResult:
        """The folder is opened again: the messages of the first act are in the log."""
        begun_s = self._elapsed_s
        acknowledged = [one for one in before.recorder.snapshot() if isinstance(one, SendAcknowledged)]
        board = KeyBoard(self._scale.poisoned_order, self._events())
        act = KeyAct(self._scale, self._folder, board, acknowledged)
        if self._starts_ahead:
            act.on_quiet = self._served.prepare
        self._watch(1, act, board, KeyView(before.rate_max, self._columns))
        result = judge_keys(act, board, self._scale, before.rate_max, self._elapsed_s - begun_s)
        self._show(result, keys_verdict(result))
        return result

    def _play_served(self) -> ServedActResult:
        begun_s, board, act = self._elapsed_s, self._served_board, self._served
        if self._starts_ahead and self._spark.is_possible:
            act.on_quiet = self._incident.prepare
        self._watch(2, act, board, ServedView(self._columns))
        result = judge_served(act, board, self._scale.served, self._elapsed_s - begun_s)
        self._show(result, served_verdict(result))
        return result

    def _play_incident(self) -> IncidentActResult:
        begun_s, board, act = self._elapsed_s, self._incident_board, self._incident
        self._watch(3, act, board, IncidentView(self._columns))
        result = judge_incident(act, board, self._elapsed_s - begun_s)
        if result.is_complete:
            result = self._report(act, board, result)
        self._show(result, incident_verdict(result))
        if result.report is not None and not self._screen.is_json:
            self._screen.out.print(Text(f"drawn in {result.report}"), soft_wrap=True)
        return result

    def _report(self, act: IncidentAct, board: IncidentBoard, result: IncidentActResult) -> IncidentActResult:
        """Write the page. A folder without write permission does not fail the demo."""
        try:
            path = write_report(Path.cwd(), report_data(act, board, result))
        except OSError as error:
            self._screen.warn(f"the report is not written: {error}")
            return result
        return msgspec.structs.replace(result, report=str(path))

    def _events(self) -> Events:
        return Events(self._started_at_s)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at_s

    @property
    def _columns(self) -> int:
        return self._screen.out.width

    def _watch(self, number: int, act: Act, board: Board, view: View[LookT]) -> None:
        if not self._screen.is_json:
            self._screen.out.print(Text(HEADINGS[number], "bold"))
        act.start()
        try:
            watch(self._screen, act, board, view)
        finally:
            act.stop()

    def _show(self, result: ActResult, verdict: RenderableType) -> None:
        if self._screen.is_json:
            return
        self._screen.out.print(verdict)
        for violation in result.violations:
            self._screen.out.print(coloured(violation), soft_wrap=True)
