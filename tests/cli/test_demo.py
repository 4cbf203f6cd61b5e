"""The demo as a user starts the demo: as a separate process."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from demo import act as demo_act
from demo import incident as demo_incident
from demo.act import Events
from demo.children import ChildFailed
from demo.demo import HEADINGS
from demo.incident_verdict import IncidentActResult
from demo.incident_view import incident_verdict
from demo.keys import KeyAct, KeyBoard
from demo.orders import (
    ATTEMPTS_MAX,
    CONCURRENCY,
    FIRST_CONSUMERS,
    KEY_GROUP,
    LATER_STEPS,
    ONLINE,
    OPEN_COUNT,
    PARTITION_COUNT,
    QUICK,
    QUICK_INCIDENT,
    SERVED_GROUP,
    STEPS,
    SUBJECT,
    Ledger,
    key_of,
    life_cycles,
)
from demo.process import HandlerRecord
from demo.report import REPORT, ReportData, page
from demo.served import ServedAct, ServedBoard
from inturn.consumer.parking import ParkingLot
from inturn.testing.checker import ViolationKind, check
from inturn.testing.history import HandlerEnd, HandlerStart
from tests.cli.conftest import Cli
from tests.contract.bed import eventually

TIME_S_MAX = 400.0  # the demo takes about 30 s; the rest is for a busy machine
DEMO = [sys.executable, "-c", "from inturn.cli.main import app; app()", "demo", "--quick"]


pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the demo is started and writes the page."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    started_s = time.monotonic()
    ran = subprocess.run([*DEMO, "--json"], capture_output=True, text=True, timeout=450, check=False, cwd=folder)
    took_s = time.monotonic() - started_s
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""  # failures on purpose cause no warnings
    assert took_s < TIME_S_MAX
    assert ran.stdout.count("\n") == 1
    decoded: dict[str, Any] = json.loads(ran.stdout)
    return decoded


def test_the_order_is_kept(result: dict[str, Any]) -> None:
    assert result["ok"] is True
    assert result["violations"] == []
    for name in ("out_of_order", "overlapping", "lost", "skipped", "other_violations"):
        assert result[name] == 0


def test_everything_sent_is_handled(result: dict[str, Any]) -> None:
    assert result["orders"] == result["orders_in_order"] == QUICK.orders
    assert result["messages_sent"] == result["messages_handled"] == QUICK.messages
    assert sum(result["handled_by"].values()) == result["messages_handled"] + result["duplicates"]
    # Besides successes: failed attempts, and the attempts that ran when the consumer died, at most a single attempt per
    # partition.
    at_death = result["handler_calls"] - result["messages_handled"] - result["duplicates"] - result["retries"]
    assert 0 <= at_death <= 4


def test_failed_attempts_are_repeated_in_place(result: dict[str, Any]) -> None:
    assert result["retries"] >= 4
    assert any("at attempt 2 (suspended)" in event for event in result["events"])
    assert any("at attempt 2 (exception" in event for event in result["events"])


def test_the_partitions_of_the_dead_consumer_are_taken_over(result: dict[str, Any]) -> None:
    after_crash = [one for one in result["hand_overs"] if one["is_after_crash"]]
    assert after_crash
    for one in after_crash:
        assert one["before"] == result["died"] != one["after"]
        assert one["epoch"] > 1
        assert one["took_s"] >= QUICK.lease.life_s / 3  # the lease of the dead consumer had to end first


def test_who_joins_later_gets_a_partition_without_repeats(result: dict[str, Any]) -> None:
    joined = [one for one in result["hand_overs"] if one["after"] == result["joined"]]
    assert joined
    assert all(one["repeated"] == 0 and not one["is_after_crash"] for one in joined)


def test_by_key_the_order_is_kept_and_everything_is_handled(result: dict[str, Any]) -> None:
    by_key = result["by_key"]
    assert by_key["ok"] is True
    assert by_key["violations"] == []
    for name in ("out_of_order", "overlapping", "lost", "skipped", "other_violations"):
        assert by_key[name] == 0
    assert by_key["orders"] == by_key["orders_in_order"] == QUICK.orders
    assert by_key["messages_sent"] == by_key["messages_handled"] == QUICK.messages + len(LATER_STEPS)


def test_by_key_more_handlers_run_at_once_than_there_are_partitions(result: dict[str, Any]) -> None:
    by_key = result["by_key"]
    assert PARTITION_COUNT < by_key["running_mean"] <= by_key["running_max"] <= CONCURRENCY
    assert by_key["rate"] > by_key["first_act_rate"] > 0


def test_the_poisoned_key_is_parked_and_resumed_in_its_order(result: dict[str, Any]) -> None:
    by_key = result["by_key"]
    poisoned = by_key["poisoned"]
    assert poisoned["key"] == key_of(QUICK.poisoned_order)
    assert poisoned["attempts"] == by_key["failed_attempts"] == ATTEMPTS_MAX
    assert poisoned["error"] == "ValueError: no exchange rate for XAU"
    # Packed, shipped, delivered, and the message that was sent while the key was parked.
    assert poisoned["waiting"] == 4
    assert poisoned["steps"] == [*STEPS, *LATER_STEPS]
    assert poisoned["is_in_order"] is True
    assert by_key["still_held_back"] == []


def test_newer_messages_of_the_key_come_while_it_is_parked_and_while_it_is_resumed(result: dict[str, Any]) -> None:
    events = result["by_key"]["events"]
    told = ("is parked", "sent while it is parked", "the bug is fixed", "sent while it is resumed", "lot is empty")
    places = [next(place for place, event in enumerate(events) if words in event) for words in told]
    assert places == sorted(places)


def test_across_processes_the_order_is_kept_and_everything_is_handled(result: dict[str, Any]) -> None:
    served = result["served"]
    assert served["ok"] is True
    assert served["violations"] == []
    for name in ("out_of_order", "overlapping", "lost", "skipped", "other_violations"):
        assert served[name] == 0
    assert served["orders"] == served["orders_in_order"] == QUICK.served.orders
    assert served["messages_sent"] == served["messages_handled"] == QUICK.served.messages
    assert sum(served["handled_by"].values()) == served["messages_handled"] + served["duplicates"]
    assert all(served["handled_by"].values())


def test_the_partitions_of_the_killed_process_go_on_in_others(result: dict[str, Any]) -> None:
    served = result["served"]
    assert served["killed"] in FIRST_CONSUMERS
    assert served["take_overs"]
    for one in served["take_overs"]:
        assert one["after"] != served["killed"]
        assert one["epoch"] > 1
        assert one["took_s"] >= QUICK.served.lease_s / 3  # the lease of the dead consumer had to end first


def test_no_process_of_the_demo_is_left(result: dict[str, Any]) -> None:
    pids = result["served"]["pids"]
    assert set(pids) == {"server", *FIRST_CONSUMERS}
    assert not any(_is_alive(pid) for pid in pids.values())


def test_in_the_incident_the_order_is_kept_and_proved(result: dict[str, Any]) -> None:
    incident = result["incident"]
    assert incident["ok"] is True
    assert incident["violations"] == []
    for name in ("out_of_order", "overlapping", "lost", "skipped", "other_violations", "duplicates"):
        assert incident[name] == 0
    assert incident["customers"] == incident["customers_in_order"] > 100
    assert incident["messages_sent"] == incident["messages_handled"] > QUICK_INCIDENT.rush
    audit = incident["audit"]
    assert audit["ok"] is True
    assert audit["text"].startswith("order kept: ")
    assert audit["started"] == audit["finished"] == incident["messages_handled"]
    assert (audit["violation_count"], audit["unproven"], audit["unseen_epochs"]) == (0, 0, 0)
    assert incident["is_agreed"] is True


def test_spark_takes_the_backlog_over_and_hands_back(result: dict[str, Any]) -> None:
    incident, drain = result["incident"], result["incident"]["drain"]
    by = incident["handled_by"]
    assert sum(by.values()) == incident["messages_handled"]
    assert set(by) >= {*ONLINE, "task 0", "task 1"}
    assert drain["ended"] == "end"
    assert sum(one["handled"] for one in drain["tasks"]) == sum(by[who] for who in by if who not in ONLINE)
    assert {one["pid"] for one in drain["tasks"]}.isdisjoint(incident["pids"].values())
    assert incident["handled_online_after"] > 0
    assert min(incident["lag_max"], incident["lag_at_drain"]) > QUICK_INCIDENT.rush / 4
    assert incident["online_per_s"] > 0
    assert not any(_is_alive(pid) for pid in incident["pids"].values())


@pytest.fixture
def report(result: dict[str, Any], folder: Path) -> str:
    path = Path(result["incident"]["report"])
    assert path == folder / REPORT
    return path.read_text(encoding="utf-8")


class _Tags(HTMLParser):
    """Collects open tags, tags that were never closed, and end tags without a start."""

    VOID = frozenset({"meta", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.references: list[str] = []
        self._attributes: dict[str, str | None] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._attributes = dict(attributes)
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self._attributes, data))
        else:
            self.texts.append(data)


def _parsed(page: str) -> _Tags:
    tags = _Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == tags.wrong == []
    return tags


def _embedded(page: str) -> ReportData:
    (data,) = [text for attributes, text in _parsed(page).scripts if attributes.get("id") == "data"]
    return msgspec.json.decode(data, type=ReportData)


def test_the_page_needs_nothing_from_elsewhere(report: str) -> None:
    assert report.startswith("<!doctype html>")
    assert not re.search(r"https?://|@import|url\(", report)
    assert _parsed(report).references == []


def test_the_page_shows_what_the_verdict_says(report: str, result: dict[str, Any]) -> None:
    data, incident = _embedded(report), result["incident"]
    # The page was drawn before the report had a path.
    assert msgspec.to_builtins(data.result) == {**incident, "report": None}
    assert data.ok is True
    handled_by = {who: round(sum(rates) * data.part_s) for who, rates in zip(data.who, data.per_s, strict=True)}
    assert handled_by == incident["handled_by"]
    assert data.lag[-1] == (data.until_s, 0)
    assert 0.9 * incident["lag_max"] < max(lag for _, lag in data.lag) <= incident["lag_max"]
    times_s = [time_s for mark in data.marks for time_s in (mark.from_s, mark.until_s)]
    assert [mark.name for mark in data.marks] == ["hand-over", "Spark", "hand-back"]
    assert times_s[0] > 0
    assert times_s == sorted(times_s)
    assert times_s[-1] < data.until_s
    text = " ".join(_parsed(report).texts)
    assert incident["audit"]["text"] in text
    assert f"{incident['messages_handled']:,}" in text


def test_the_page_shows_that_a_key_never_overlaps_though_several_handle_it(report: str) -> None:
    data = _embedded(report)
    assert len(data.lanes) == 5
    for lane in data.lanes:
        assert lane.overlaps == 0
        assert all(end_s <= start_s for (_, _, end_s), (_, start_s, _) in itertools.pairwise(lane.runs))
    tasks, online = set(range(len(ONLINE), len(data.who))), set(range(len(ONLINE)))
    who = {who for who, _, _ in data.lanes[0].runs}
    assert who & tasks
    assert who & online


def test_text_in_the_page_cannot_become_part_of_it(report: str) -> None:
    data, evil = _embedded(report), "</script><script>alert('x')</script><!-- & \u2028"
    lanes = [msgspec.structs.replace(lane, key=evil) for lane in data.lanes]
    result = msgspec.structs.replace(data.result, events=[evil])
    changed = page(msgspec.structs.replace(data, subject=evil, lanes=lanes, result=result))
    tags = _parsed(changed)
    assert len(tags.scripts) == len(_parsed(report).scripts) == 2
    assert any(evil in text for text in tags.texts)
    assert _embedded(changed).subject == evil


def test_an_incident_that_went_wrong_looks_so(report: str) -> None:
    data = _embedded(report)
    result = msgspec.structs.replace(data.result, ok=False, is_agreed=False, audit=None, drain=None)
    text = " ".join(_parsed(page(msgspec.structs.replace(data, ok=False, result=result))).texts)
    assert "✘ Order broken" in text
    assert "does not agree" in text
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(incident_verdict(result))
    assert "✘ order broken" in console.export_text()


def test_a_terminal_gets_the_drain_and_the_audit(result: dict[str, Any]) -> None:
    incident = msgspec.convert(result["incident"], IncidentActResult)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(incident_verdict(incident))
    text = console.export_text()
    assert "✔ order kept through the incident, and proved" in text
    assert f"{incident.audit and incident.audit.started:,} starts" in text
    assert "the order checker agrees" in " ".join(text.replace("│", " ").split())
    assert any("late" in event and "drain on Spark" in event for event in incident.events)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether the process is dead but not reaped. Process 1 of a container may never reap a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output where Spark is not installed."""
    folder = tmp_path_factory.mktemp("without-spark")
    (folder / "pyspark.py").write_text("raise ModuleNotFoundError('no pyspark here', name='pyspark')\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": path}
    ran = subprocess.run(DEMO, capture_output=True, text=True, timeout=450, check=False, env=environment, cwd=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    return ran.stdout


def test_a_pipe_gets_lines_and_the_verdict(lines: str) -> None:
    assert "\x1b" not in lines
    assert " died: no commit, no release" in lines
    assert "✔ order kept" in lines
    assert "inturn --help" in lines


def test_a_pipe_gets_a_heading_for_each_act_and_no_line_per_second(lines: str) -> None:
    assert [line for line in lines.splitlines() if line.startswith("act ")] == list(HEADINGS[:3])
    timed = [line for line in lines.splitlines() if re.match(r" *\d+\.\d s  ", line)]
    assert 15 < len(timed) < 60
    assert not any(re.match(r" *\d+\.\d s  (sent|handled) \d", line) for line in timed)


def test_a_pipe_gets_the_list_of_held_back_keys_and_the_verdict_by_key(lines: str) -> None:
    key = key_of(QUICK.poisoned_order)
    listed = next(line for line in lines.splitlines() if line.split()[:1] == [key] and " parked " in line)
    assert "ValueError: no exchange rate for XAU" in listed
    assert listed.split()[-1] == "4"
    assert f"{key} is parked (failed {ATTEMPTS_MAX} times)" in lines
    assert f"inturn key resume {SUBJECT} {key} --group {KEY_GROUP}" in lines
    assert "✔ order by key kept" in lines
    assert " → ".join([*STEPS, *LATER_STEPS]) in lines


def test_a_pipe_gets_the_kill_and_the_verdict_across_processes(lines: str) -> None:
    assert "inturn serve listens at inturn://127.0.0.1:" in lines
    assert re.search(r"kill -9 \d+: (ada|ben|cleo) is gone with partitions", lines)
    assert re.search(r"goes on with partition \d at offset [\d,]+, epoch \d+: \d\.\d\d s after the kill", lines)
    assert "✔ order kept across processes" in lines


def test_without_spark_the_last_act_is_left_out_in_one_line(lines: str) -> None:
    left_out = [line for line in lines.splitlines() if "pip install 'inturn[spark]'" in line]
    assert len(left_out) == 1
    assert left_out[0].startswith("the last act is left out: ")
    assert "big sale" not in lines
    assert "inturn --help" in lines  # the demo succeeds without the last act


def test_life_cycles_interleave_orders_and_keep_each_in_order() -> None:
    steps = list(life_cycles(range(100), random.Random(1)))
    assert len(steps) == 100 * len(STEPS)
    for order in range(100):
        assert tuple(step for of, step in steps if of == order) == STEPS
    assert len({order for order, _ in steps[:OPEN_COUNT]}) > OPEN_COUNT // 4


def test_the_ledger_finds_a_step_that_came_too_early() -> None:
    ledger = Ledger()
    for step in STEPS:
        ledger.note(1, step)
    ledger.note(1, "paid")  # repeated after a crash
    for step in ("created", "packed", "paid", "shipped", "delivered"):
        ledger.note(2, step)
    ledger.note(3, "created")
    assert ledger.complete_count == 1
    assert ledger.too_early == [(2, "packed")]


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a demo that stops before the last act: start no JVM in this process."""
    monkeypatch.setattr(demo_incident, "missing_for_spark", lambda: "no Spark in this test")


@pytest.mark.usefixtures("without_spark")
def test_a_demo_that_does_not_end_in_time_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_act, "LIMIT_S", 0.5)
    ran = cli("demo", "--quick", "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert ran.json["is_complete"] is False
    assert ran.json["messages_handled"] < QUICK.messages
    assert ran.json["by_key"] is None
    assert ran.json["served"] is None
    assert ran.json["incident"] is None


@pytest.mark.usefixtures("without_spark")
def test_newer_messages_that_overtake_a_parked_key_make_the_demo_fail(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParkingLot, "takes_to_tail", property(lambda lot: False))
    ran = cli("demo", "--quick", "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert ran.json["violations"] == []  # the first act is not affected
    by_key = ran.json["by_key"]
    assert by_key["ok"] is False
    assert by_key["is_complete"] is True
    assert by_key["skipped"] > 0
    assert by_key["poisoned"]["is_in_order"] is False


@pytest.mark.usefixtures("without_spark")
def test_a_second_act_that_does_not_end_in_time_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyBoard, "is_begun", property(lambda board: False))
    begin = demo_act.Act.__init__

    def begin_with_little_time(act: demo_act.Act, folder: Path) -> None:
        begin(act, folder)
        if isinstance(act, KeyAct):
            act._until_s = time.monotonic() + 0.5

    monkeypatch.setattr(demo_act.Act, "__init__", begin_with_little_time)
    ran = cli("demo", "--quick")
    assert ran.code == 1
    assert "✔ order kept" in ran.out
    assert "✘ order broken, or not everything done" in ran.out
    assert "inturn --help" not in ran.out


@pytest.mark.usefixtures("without_spark")
def test_a_consumer_that_stops_by_itself_ends_the_demo_at_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def committed(board: KeyBoard, *_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(KeyBoard, "committed", committed)
    ran = cli("demo", "--quick", "--json")
    assert ran.code == 1
    assert ran.out == ""
    assert "broken on purpose" in ran.err


# The third act alone. The program prints the ids of all processes, and runs until a signal stops the program.
THIRD_ACT = """
import sys, time
from dataclasses import replace
from pathlib import Path
from demo.act import Events
from demo.orders import QUICK
from demo.served import ServedAct, ServedBoard
scale = replace(QUICK.served, sending_s=600.0)
board = ServedBoard(scale, Events(time.monotonic()), Path(sys.argv[1]))
act = ServedAct(scale, Path(sys.argv[1]), board)
act.start()
try:
    while board.look().done == 0:
        time.sleep(0.05)
    print(board.server_pid, *(one.pid for one in board.processes.values()), flush=True)
    time.sleep(60)
finally:
    act.stop()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_demo_ends_its_processes(number: signal.Signals, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-c", THIRD_ACT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert demo.stdout is not None
    pids = [int(pid) for pid in demo.stdout.readline().split()]
    assert len(pids) == 4
    assert all(_is_alive(pid) for pid in pids)
    demo.send_signal(number)
    demo.communicate(timeout=60)
    eventually(lambda: not any(_is_alive(pid) for pid in pids), "all have ended", 60.0)


def test_a_process_that_dies_by_itself_ends_the_act_and_the_others(tmp_path: Path) -> None:
    board = ServedBoard(QUICK.served, Events(time.monotonic()), tmp_path)
    act = ServedAct(QUICK.served, tmp_path, board)
    act.start()
    eventually(lambda: len(board.processes) == len(FIRST_CONSUMERS), "they are there", 60.0)
    os.kill(board.processes["ben"].pid, signal.SIGKILL)
    eventually(lambda: act.is_over, "it is over", 60.0)
    with pytest.raises(ChildFailed, match="process ben of the demo ended with code -9"):
        act.stop()
    assert not any(_is_alive(one.pid) for one in board.processes.values())


def test_handlers_that_overlap_in_two_processes_are_found(tmp_path: Path) -> None:
    board = ServedBoard(QUICK.served, Events(time.monotonic()), tmp_path)
    where = (SUBJECT, SERVED_GROUP, 0)

    def write(name: str, offset: int, started_ns: int, ended_ns: int) -> None:
        start = HandlerStart(*where, offset, b"order-1", f"{name}-1", 1, None)
        end = HandlerEnd(*where, offset, b"order-1", f"{name}-1", 1, None, "success")
        with board.records(name).open("ab") as file:
            for record in (HandlerRecord(started_ns, start), HandlerRecord(ended_ns, end)):
                file.write(msgspec.json.encode(record) + b"\n")
            file.write(b'{"at_ns": 9')  # the line that the process was writing when it was killed
        board.joined(name, 1)

    write("ada", 0, 100, 300)
    write("ben", 1, 200, 400)
    board.read()
    verdict = check(board.history(), order="key", complete=False)
    assert verdict.kinds() == {ViolationKind.OVERLAP, ViolationKind.SKIPPED}
    assert board.look().done == 2
