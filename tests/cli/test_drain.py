"""S3: `inturn drain`."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import inturn
from inturn.cli.drain_estimate import Backlog, LongLane
from inturn.cli.drain_view import DrainView, frame, report_fields, report_lines, task_name, time_text
from inturn.cli.screen import Screen
from inturn.protocol.commands import ClaimDescription, KeyDescription
from inturn.spark.ordered.drain_report import DrainProgress, DrainReport
from inturn.spark.ordered.plan import HotKey
from inturn.spark.ordered.task import LimitReached, TaskOutcome
from tests.cli.conftest import Cli
from tests.contract.bed import eventually, has_joined

SHOP = """
import os, time

HERE = os.path.dirname(os.path.abspath(__file__))
SLOW_S = float(os.environ.get("SLOW_S", "0"))

def bill(message, context):
    time.sleep(SLOW_S)
    if message.key == b"c4" and os.environ.get("BROKEN"):
        raise ValueError("no such account")
    with open(os.path.join(HERE, f"{os.getpid()}.billed"), "a") as file:
        file.write(f"{message.partition}/{message.offset} {message.key.decode()}\\n")

nothing = 5
"""


@pytest.fixture
def billing(orders: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """30 messages of 5 keys wait for the group billing; the handler is shop:bill, in the current folder."""
    with inturn.connect(orders.data) as mq:
        with mq.consumer("orders", "billing", lambda message, context: None, order="key", start="first"):
            eventually(lambda: has_joined(mq, "orders", "billing"), "there is the group")
        mq.group("orders", "billing").reset("first")
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "shop.py").write_text(SHOP)
    (shop / "broken_shop.py").write_text("raise RuntimeError('closed on mondays')\n")
    monkeypatch.chdir(shop)
    before = list(sys.path)
    yield orders
    sys.path[:] = before
    for name in ("shop", "broken_shop"):
        sys.modules.pop(name, None)


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(importlib.import_module("inturn.spark.session"), "session", refuse)


def _drain(cli: Cli, *options: str) -> list[str]:
    return ["drain", "orders", "--group", "billing", "--data", str(cli.data), *options]


def _described(cli: Cli) -> Any:
    (found,) = cli("group", "describe", "billing", "--json").json["subjects"]
    return found


# Mistakes are reported before Spark is started


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ("shop", "name it as module:function, for example shop:notify"),
        ("shops:bill", "there is no module 'shops' (looked from "),
        ("shop:billed", "shop has no 'billed'"),
        ("shop:nothing", "is 5, which cannot be called with (message, context)"),
        ("broken_shop:bill", "importing broken_shop failed with RuntimeError: closed on mondays"),
    ],
)
@pytest.mark.usefixtures("no_spark")
def test_a_handler_that_cannot_be_had_is_told(billing: Cli, handler: str, why: str) -> None:
    error = billing(*_drain(billing, "--handler", handler, "--json")).error
    assert error["type"] == "InvalidInput"
    assert why in error["message"]


@pytest.mark.usefixtures("no_spark")
def test_unknown_names_are_told_with_those_that_there_are(billing: Cli) -> None:
    handler = ["--handler", "shop:bill", "--json"]
    error = billing("drain", "orders", "--group", "biling", *handler).error
    assert (error["type"], error["name"]) == ("NotFound", "biling")
    assert "on subject 'orders'; it has billing" in error["message"]
    assert "subject 'order'" in billing("drain", "order", "--group", "billing", *handler).error["message"]
    assert "no folder" in billing(*_drain(billing, *handler, "--data", "nowhere")).error["message"]


@pytest.mark.usefixtures("no_spark")
def test_a_folder_and_a_cluster_do_not_go_together(billing: Cli) -> None:
    error = billing(*_drain(billing, "--handler", "shop:bill", "--master", "spark://host:7077", "--json")).error
    assert "is a folder of this machine, which executors of spark://host:7077 do not see" in error["message"]
    assert "inturn serve" in error["message"]


@pytest.mark.usefixtures("no_spark")
def test_another_order_than_that_of_the_members_is_told(billing: Cli) -> None:
    with (
        inturn.connect(billing.data) as mq,
        mq.consumer("orders", "billing", lambda message, context: time.sleep(0.1), order="key") as online,
    ):
        eventually(online.leases, "it works")
        wrong = ["--order", "partition", "--json"]
        for options in (["--handler", "shop:bill", *wrong], ["--dry-run", *wrong]):
            assert "the members of group 'billing' use 'key'" in billing(*_drain(billing, *options)).error["message"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "--handler is missing"),
        (["--handler", "shop:bill", "--on-exhausted", "park"], "--on-exhausted needs --max-attempts"),
        (["--handler", "shop:bill", "--handler-ms", "5"], "--handler-ms is for --dry-run"),
        (["--handler", "shop:bill", "--tasks", "0"], "Invalid value for '--tasks'"),
        (["--handler", "shop:bill", "--order", "sideways"], "sideways"),
    ],
)
@pytest.mark.usefixtures("no_spark")
def test_wrong_usage_is_told(billing: Cli, options: list[str], why: str) -> None:
    ran = billing(*_drain(billing, *options))
    assert ran.code == 2
    assert why in " ".join(ran.err.replace("│", " ").split())


def test_help_tells_what_a_drain_does(cli: Cli) -> None:
    ran = cli("drain", "--help")
    assert ran.code == 0
    assert "$ inturn drain orders --group billing --handler shop:bill" in ran.out


# Dry run


@pytest.mark.usefixtures("no_spark")
def test_a_dry_run_estimates_and_touches_nothing(billing: Cli, tmp_path: Path) -> None:
    before = billing("group", "describe", "billing", "--json").json
    found = billing(*_drain(billing, "--dry-run", "--master", "local[2]", "--concurrency", "10", "--json")).json
    assert (found["messages"], found["sampled"], found["keys_seen"]) == (30, 30, 5)
    assert (found["tasks"], found["concurrency"], found["is_estimate"]) == (2, 10, True)
    assert [one["handler_ms"] for one in found["estimates"]] == [0, 1, 5, 20]
    assert found["estimates"][3] == {"handler_ms": 20, "seconds": pytest.approx(6 * 0.02), "bound": "lane"}
    assert [one["messages"] for one in found["longest"]] == [6] * 5
    assert {one["name"] for one in found["longest"]} == {"c0", "c1", "c2", "c3", "c4"}
    assert billing("group", "describe", "billing", "--json").json == before
    assert list((tmp_path / "shop").glob("*.billed")) == []


@pytest.mark.usefixtures("no_spark")
def test_a_dry_run_says_that_it_is_an_estimate_and_what_bounds_it(billing: Cli) -> None:
    ran = billing(*_drain(billing, "--dry-run", "--handler-ms", "100", "--tasks", "2"))
    assert ran.code == 0
    assert "30 messages of orders for group billing to do" in ran.out
    assert "now: 0 members, no progress" in ran.out
    assert "an estimate from 30 sampled messages" in ran.out
    assert "c0: messages of a lane run in sequence" in ran.out
    assert "0.6 s" in ran.out


@pytest.mark.usefixtures("no_spark")
def test_a_dry_run_by_partition_is_bound_by_the_longest_partition(billing: Cli) -> None:
    longest = max(one["lag"] for one in _described(billing)["partitions"])
    found = billing(*_drain(billing, "--dry-run", "--order", "partition", "--handler-ms", "20", "--json")).json
    assert found["longest"][0]["messages"] == longest
    assert found["estimates"] == [{"handler_ms": 20, "seconds": pytest.approx(longest * 0.02), "bound": "lane"}]


def test_a_dry_run_of_nothing_says_so(billing: Cli) -> None:
    assert billing("consume", "orders", "--group", "billing", "--order", "key").code == 0
    assert billing(*_drain(billing, "--dry-run")).out == "0 messages of orders for group billing to do\n"


def test_estimates_are_bound_by_what_is_slowest() -> None:
    lanes = (LongLane("hot", 0, 1000, 0.01),)
    backlog = Backlog(100_000, 5000, 800, 3, 50.0, 20.0, lanes)
    assert backlog.online_s == 2000
    reading = backlog.estimate(0.0, 2, 64)
    assert (reading.bound, round(reading.seconds, 6)) == ("reading", 1.0)
    handlers = backlog.estimate(20.0, 2, 8)
    assert (handlers.bound, round(handlers.seconds, 6)) == ("handlers", 125.0)
    lane = backlog.estimate(20.0, 2, 64)
    assert (lane.bound, round(lane.seconds, 6)) == ("lane", 20.0)


# Output


HELD = KeyDescription(b"c-7", 1, "failing", 5, 3, "boom", 0, 12)
LOOK = DrainProgress(
    "working",
    12.0,
    round=2,
    done=250,
    total=1000,
    lag=750,
    per_s=50.0,
    held=4,
    partitions=4,
    tasks=(ClaimDescription(1, "drain-orders-1a2b3c4d-r2-t3-5e6f7a8b", 512, 1234),),
    hot_keys=(HotKey("c-1", 0.25),),
    held_keys=(HELD,),
)


def _drawn(what: Any, columns: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=columns, force_terminal=False).print(what)
    return out.getvalue()


def test_a_look_shows_progress_tasks_and_keys() -> None:
    drawn = _drawn(frame(LOOK))
    assert "working, round 2" in drawn
    assert "250 of 1,000  50/s  750 left, about 15 s" in drawn
    assert "c-1 25%" in drawn
    assert "c-7 failing, 3 attempts, 12 waiting" in drawn
    assert [line.split() for line in drawn.splitlines() if "1,234" in line] == [["3", "1", "512", "1,234"]]


def test_lines_say_the_same_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("inturn.cli.drain_view.time.monotonic", lambda: now_s[0])
    with DrainView(Screen(is_json=False)) as view:
        view.show(DrainProgress("taking over", 0.1, held=3, partitions=4))
        for now_s[0] in (0.0, 1.0, 2.0, 5.5):
            view.show(LOOK)
    told = capsys.readouterr()
    assert told.out == ""
    working = "working, round 2: 250 of 1,000  50/s  750 left, about 15 s, held: c-7 failing, 3 attempts, 12 waiting"
    assert told.err.splitlines() == ["taking over 3 of 4 partitions", working, working]
    with DrainView(Screen(is_json=True)) as view:
        view.show(LOOK)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_live_view() -> None:
    screen = Screen(is_json=False)
    drawn = io.StringIO()
    screen.__dict__["err"] = Console(file=drawn, width=100, force_terminal=True)
    with DrainView(screen) as view:
        view.show(LOOK)
    assert "working, round 2" in drawn.getvalue()
    assert "750 left" in drawn.getvalue()


def _report(**options: Any) -> DrainReport:
    outcomes = (TaskOutcome(1, 0, "host", 7, handled=60), TaskOutcome(1, 1, "host", 8, handled=40))
    fields: dict[str, Any] = {
        "ended": "end",
        "done": 100,
        "rounds": 1,
        "failed_rounds": 0,
        "failures": 0,
        "lag": 0,
        **options,
    }
    fields.update(take_over_s=0.4, work_s=10.0, hand_back_s=0.2)
    return DrainReport("orders", "billing", "key", **fields, outcomes=outcomes)


def test_the_end_says_what_was_done_and_how_fast() -> None:
    assert _drawn("\n".join(report_lines(_report()))).splitlines() == [
        "drained 100 messages of orders for group billing in 10 s: 10/s by 2 tasks",
        "hand-over 0.4 s, 1 round, hand-back 0.2 s, order by key",
        "no message is left",
    ]


def test_the_end_says_what_is_left_and_what_to_do() -> None:
    blocked = KeyDescription(b"a b", 0, "blocked", 2, 5, "boom", 0, 3)
    report = _report(
        ended="held keys", lag=17, failures=8, failed_rounds=1, missing=4, retrying=2, held_keys=(HELD, blocked)
    )
    assert _drawn("\n".join(report_lines(report)), 200).splitlines() == [
        "drained but for held keys: 100 messages of orders for group billing in 10 s: 10/s by 2 tasks",
        "hand-over 0.4 s, 1 round, hand-back 0.2 s, order by key",
        "8 handler calls failed",
        "1 round failed and had to be repeated",
        "4 messages were deleted by retention before a handler ran",
        "2 messages failed and wait for a retry in the consumers of the group",
        "17 messages left: behind keys that fail or are blocked",
        "  c-7 failing, 3 attempts, 12 waiting: inturn key show orders c-7 --group billing",
        "  a b blocked, 5 attempts, 3 waiting: inturn key resume orders 'a b' --group billing, or skip",
    ]
    fields = report_fields(report)
    assert json.loads(json.dumps(fields))["held_keys"][0]["key"] == "c-7"
    assert (fields["missing"], fields["lag"], fields["done_per_s"]) == (4, 17, 10.0)


def test_the_end_names_a_limit_with_its_key_and_the_next_step() -> None:
    limits = (LimitReached(0, "span", 4_000_000, 12, "a b"), LimitReached(1, "buffered_bytes", 64 << 20, 5, None))
    report = _report(ended="limit", lag=17, limits=limits)
    lines = _drawn("\n".join(report_lines(report)), 200).splitlines()
    assert lines[0].startswith("drained up to a limit: 100 messages of orders for group billing in 10 s")
    assert lines[2:] == [
        "17 messages left: behind keys that fail or are blocked, or too far beyond such keys",
        "  partition 0 was read up to 4,000,000 offsets beyond key a b at offset 12, and no further: "
        "inturn key park orders 'a b' --group billing, then drain again",
        "  partition 1 was read until 67.1 MB wait behind a message without a key at offset 5, and no further",
    ]
    fields = json.loads(json.dumps(report_fields(report)))
    assert fields["limits"][0] == {"partition": 0, "limit": "span", "size": 4_000_000, "offset": 12, "key": "a b"}


def test_the_end_names_damage_and_a_group_that_was_not_handed_back() -> None:
    report = _report(ended="damaged", lag=17, damage=("orders/0: damaged at offset 3; run `inturn doctor`",))
    lines = _drawn("\n".join(report_lines(report)), 200).splitlines()
    assert lines[0].startswith("drained but for a damaged log: 100 messages")
    assert lines[-1] == "  orders/0: damaged at offset 3; run `inturn doctor`"
    assert report_fields(report)["damage"] == ["orders/0: damaged at offset 3; run `inturn doctor`"]
    left = _report(ended="interrupted", lag=17, is_handed_back=False)
    assert "not handed back: the consumers of the group continue when the leases have ended" in "\n".join(
        report_lines(left)
    )
    assert report_fields(left)["is_handed_back"] is False


@pytest.mark.parametrize("ended", ["limit", "damaged"])
@pytest.mark.usefixtures("no_spark")
def test_what_could_not_be_done_is_told_to_scripts(billing: Cli, monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    monkeypatch.setattr("inturn.cli.drain._drain", lambda *_: _report(ended=ended, lag=3))
    ran = billing(*_drain(billing, "--handler", "shop:bill", "--json"))
    assert (ran.code, ran.json["ended"]) == (1, ended)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 s"), (3.21, "3.2 s"), (59.4, "59 s"), (102, "1 min 42 s"), (7500, "2 h 5 min")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_a_task_is_named_by_its_number() -> None:
    assert task_name("drain-orders-t9-1a2b-r2-t3-4c5d6e7f") == "3"
    assert task_name("somebody") == "somebody"


# With Spark, in a separate process


def _start(cli: Cli, *options: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from inturn.cli.main import app; app()"]
    options = ("--handler", "shop:bill", "--master", "local[2]", *options)
    return subprocess.Popen(
        [*command, *_drain(cli, *options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def _billed() -> list[str]:
    return [line for path in Path().glob("*.billed") for line in path.read_text().splitlines()]


def test_a_backlog_is_drained(billing: Cli) -> None:
    process = _start(billing, "--json")
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err.decode()
    report = json.loads(out)
    assert (report["ended"], report["done"], report["lag"], report["order"]) == ("end", 30, 0, "key")
    assert sum(one["handled"] for one in report["tasks"]) == 30
    assert len(_billed()) == len(set(_billed())) == 30


def test_people_are_told_how_it_goes_and_which_keys_are_held(billing: Cli) -> None:
    process = _start(billing, "--max-attempts", "2", BROKEN="yes")
    out, err = (text.decode() for text in process.communicate(timeout=250))
    assert process.returncode == 0, err
    assert out.startswith("drained but for held keys: 24 messages of orders for group billing in ")
    assert "6 messages left: behind keys that fail or are blocked" in out
    assert "c4 blocked, 2 attempts, 5 waiting: inturn key resume orders c4 --group billing, or skip" in out
    assert "starting Spark (local[2])" in err
    assert "working, round 1: " in err
    assert "ValueError: no such account" in err
    assert "╭" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_hands_the_group_back(billing: Cli, number: signal.Signals) -> None:
    lines = "".join(json.dumps({"customer": {"id": f"c{n % 5}"}}) + "\n" for n in range(600))
    assert billing("produce", "orders", "--key-field", "customer.id", stdin=lines).code == 0
    process = _start(billing, "--json", SLOW_S="0.05")
    until_s = time.monotonic() + 200
    while len(_billed()) < 20:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: Java and the workers get the signal, too
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    report = json.loads(out)
    assert report["ended"] == "interrupted"
    assert report["done"] == len(_billed()) == len(set(_billed()))
    assert 20 <= report["done"] < 630
    assert report["lag"] == 630 - report["done"]
    assert _described(billing)["members"] == []
