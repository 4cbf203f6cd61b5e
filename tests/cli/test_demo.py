"""The demo, as a user starts it: a real process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from typing import Any

import pytest

from inturn.cli import demo_story
from inturn.cli.demo_orders import OPEN_COUNT, QUICK, STEPS, Ledger, life_cycles
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


def test_a_pipe_gets_lines_and_the_verdict() -> None:
    ran = subprocess.run(DEMO, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\x1b" not in ran.stdout
    assert " died: no commit, no release" in ran.stdout
    assert "order kept" in ran.stdout
    assert "inturn --help" in ran.stdout


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
    monkeypatch.setattr(demo_story, "LIMIT_S", 0.5)
    ran = cli("demo", "--quick", "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert ran.json["is_complete"] is False
    assert ran.json["messages_handled"] < QUICK.messages
