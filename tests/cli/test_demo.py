"""The demo, as a user starts it: a real process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import pytest

from inturn.cli import demo_act
from inturn.cli.demo_key_board import KeyBoard
from inturn.cli.demo_key_story import KeyStory
from inturn.cli.demo_orders import (
    ATTEMPTS_MAX,
    CONCURRENCY,
    KEY_GROUP,
    LATER_STEPS,
    OPEN_COUNT,
    PARTITION_COUNT,
    QUICK,
    STEPS,
    SUBJECT,
    Ledger,
    key_of,
    life_cycles,
)
from inturn.consumer.lot import HeldLot
from tests.cli.conftest import Cli

TIME_S_MAX = 20.0
DEMO = [sys.executable, "-c", "from inturn.cli.main import app; app()", "demo", "--quick"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    started_s = time.monotonic()
    ran = subprocess.run([*DEMO, "--json"], capture_output=True, text=True, timeout=60, check=False)
    took_s = time.monotonic() - started_s
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""  # what fails on purpose is not warned of
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
    # besides successes: the failed attempts, and what ran when the consumer died, at most one per partition
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
        assert one["took_s"] >= QUICK.lease.life_s / 3  # its lease had to end first


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
    assert poisoned["waiting"] == 4  # packed, shipped, delivered, and what was sent while it was parked
    assert poisoned["steps"] == [*STEPS, *LATER_STEPS]
    assert poisoned["is_in_order"] is True
    assert by_key["still_held_back"] == []


def test_newer_messages_of_the_key_come_while_it_is_parked_and_while_it_is_resumed(result: dict[str, Any]) -> None:
    events = result["by_key"]["events"]
    told = ("is parked", "sent while it is parked", "the bug is fixed", "sent while it is resumed", "lot is empty")
    places = [next(place for place, event in enumerate(events) if words in event) for words in told]
    assert places == sorted(places)


@pytest.fixture(scope="module")
def lines() -> str:
    environment = {**os.environ, "COLUMNS": "120"}
    ran = subprocess.run(DEMO, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    return ran.stdout


def test_a_pipe_gets_lines_and_the_verdict(lines: str) -> None:
    assert "\x1b" not in lines
    assert " died: no commit, no release" in lines
    assert "✔ order kept" in lines
    assert "inturn --help" in lines


def test_a_pipe_gets_the_list_of_held_back_keys_and_the_verdict_by_key(lines: str) -> None:
    key = key_of(QUICK.poisoned_order)
    listed = next(line for line in lines.splitlines() if line.split()[:1] == [key] and " parked " in line)
    assert "ValueError: no exchange rate for XAU" in listed
    assert listed.split()[-1] == "4"
    assert f"{key} is parked (failed {ATTEMPTS_MAX} times)" in lines
    assert f"inturn key resume {SUBJECT} {key} --group {KEY_GROUP}" in lines
    assert "✔ order by key kept" in lines
    assert " → ".join([*STEPS, *LATER_STEPS]) in lines


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


def test_a_demo_that_does_not_end_in_time_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_act, "LIMIT_S", 0.5)
    ran = cli("demo", "--quick", "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert ran.json["is_complete"] is False
    assert ran.json["messages_handled"] < QUICK.messages
    assert ran.json["by_key"] is None


def test_newer_messages_that_overtake_a_parked_key_make_the_demo_fail(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldLot, "takes_to_tail", property(lambda lot: False))
    ran = cli("demo", "--quick", "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert ran.json["violations"] == []  # the first act is not concerned
    by_key = ran.json["by_key"]
    assert by_key["ok"] is False
    assert by_key["is_complete"] is True
    assert by_key["skipped"] > 0
    assert by_key["poisoned"]["is_in_order"] is False


def test_a_second_act_that_does_not_end_in_time_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyBoard, "is_begun", property(lambda board: False))
    begin = demo_act.Act.__init__

    def begin_with_little_time(act: demo_act.Act) -> None:
        begin(act)
        if isinstance(act, KeyStory):
            act._until_s = time.monotonic() + 0.5

    monkeypatch.setattr(demo_act.Act, "__init__", begin_with_little_time)
    ran = cli("demo", "--quick")
    assert ran.code == 1
    assert "✔ order kept" in ran.out
    assert "✘ order broken, or not everything done" in ran.out
    assert "inturn --help" not in ran.out


def test_a_consumer_that_stops_by_itself_ends_the_demo_at_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def committed(board: KeyBoard, *_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(KeyBoard, "committed", committed)
    ran = cli("demo", "--quick", "--json")
    assert ran.code == 1
    assert ran.out == ""
    assert "broken on purpose" in ran.err
