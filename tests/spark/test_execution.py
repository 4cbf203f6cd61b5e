"""Tasks, run in this process: what becomes of their slices, whatever happens to their claims."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inturn import ConsumerSettings, LeaseSettings
from inturn.model.commands import Claim, Granted
from inturn.model.request import ask
from inturn.model.settings import Order
from inturn.model.slot import ALL_SLOTS, SlotSet
from inturn.spark.connections import disconnect
from inturn.spark.execution import TaskOutcome, TaskPlan, run_task
from inturn.spark.holding import Holding
from inturn.spark.slices import Slice
from tests.spark.judged import GROUP, SUBJECT, Judged, judging
from tests.spark.noting import Noting, wait_until

LEASE = LeaseSettings(life_s=2.0, renew_s=0.3, margin_s=0.2)
LOW, HIGH = SlotSet.of(range(512)), SlotSet.of(range(512, 1024))


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    with judging(tmp_path, 1, lease=LEASE) as opened:
        opened.make_group()
        yield opened
        disconnect(opened.address)


@pytest.fixture
def holding(judged: Judged) -> Iterator[Holding]:
    settings = ConsumerSettings(heartbeat_s=0.2)
    with Holding(judged.mq, SUBJECT, GROUP, takes_over=True, settings=settings) as held:
        held.wait_for({0}, 20.0)
        yield held


def planned(judged: Judged, holding: Holding, slots: SlotSet = ALL_SLOTS, **options: Any) -> TaskPlan:
    until = options.pop("until", None)
    if until is None:
        until = judged.mq.describe_subject(SUBJECT).partitions[0].end_offset
    chosen = {"patience_s": 0.5, "round_s": 20.0, **options}
    settings = ConsumerSettings(concurrency=4, commit_interval_s=0.05, backoff_max_s=0.05)
    where = (judged.address, SUBJECT, GROUP, holding.owner)
    return TaskPlan(*where, holding.epochs(), (Slice(0, slots, until),), Order.KEY, settings, **chosen)


def test_a_task_handles_its_slice_and_tells_what_it_did(judged: Judged, holding: Holding) -> None:
    judged.send(100)
    outcome = run_task(planned(judged, holding, round=3, index=1), Noting(judged.folder, failures={b"k1": 1}))
    assert (outcome.round, outcome.task, outcome.pid) == (3, 1, os.getpid())
    assert (outcome.handled, outcome.failed, outcome.waiting, outcome.error) == (100, 10, 0, "")
    assert outcome.is_through
    assert not outcome.is_held_up
    assert judged.lag == 0
    judged.judge()


def test_nothing_at_or_above_its_end_is_handled(judged: Judged, holding: Holding) -> None:
    judged.send(100)
    assert run_task(planned(judged, holding, until=37), Noting(judged.folder)).handled == 37
    assert sorted(offset for _, offset in judged.noted.handled()) == list(range(37))


def test_a_task_that_is_run_again_finds_done_what_was_done(judged: Judged, holding: Holding) -> None:
    judged.send(100)
    plan = planned(judged, holding)
    assert run_task(plan, Noting(judged.folder)).handled == 100
    again = run_task(plan, Noting(judged.folder))
    assert (again.handled, again.is_through) == (0, True)
    assert judged.judge().duplicates == 0


def test_slices_of_one_partition_do_not_touch_each_others_keys(judged: Judged, holding: Holding) -> None:
    judged.send(200, keys=50)
    found = [run_task(planned(judged, holding, slots), Noting(judged.folder)) for slots in (LOW, HIGH)]
    assert sum(one.handled for one in found) == 200
    assert all(one.handled for one in found)
    assert judged.judge().duplicates == 0


def test_a_key_that_fails_ends_the_task_when_nothing_else_is_left(judged: Judged, holding: Holding) -> None:
    judged.send(50)
    outcome = run_task(planned(judged, holding), Noting(judged.folder, handling_s=0.02, failures={b"k1": -1}))
    assert (outcome.handled, outcome.is_through, outcome.is_held_up) == (45, False, True)
    assert outcome.waiting == 5
    assert outcome.seconds < 15


def test_a_round_that_is_over_ends_a_task_between_two_messages(judged: Judged, holding: Holding) -> None:
    judged.send(400)
    outcome = run_task(planned(judged, holding, round_s=1.0), Noting(judged.folder, handling_s=0.05))
    assert not outcome.is_through
    assert not outcome.is_held_up
    assert 0 < outcome.handled < 400
    assert outcome.handled == len(judged.noted.handled()) == 400 - judged.lag  # all of it is committed


def test_a_claim_that_somebody_silent_has_is_waited_for(judged: Judged, holding: Holding) -> None:
    """As a task whose process was killed leaves it. Longer than its patience, which is for messages that fail."""
    judged.send(50)
    plan = planned(judged, holding, patience_s=0.2)
    epoch = plan.epochs[0]
    command = Claim(SUBJECT, GROUP, 0, plan.owner, epoch, "killed", 1, ALL_SLOTS.to_bytes(), 0.0)
    ask(judged.mq.node, command, Granted)
    began_s = time.monotonic()
    outcome = run_task(plan, Noting(judged.folder))
    assert (outcome.handled, outcome.is_through) == (50, True)
    assert time.monotonic() - began_s > 0.8 * LEASE.life_s


def test_a_lease_that_is_over_is_not_waited_for(judged: Judged, holding: Holding) -> None:
    judged.send(50)
    plan = planned(judged, holding, round_s=60.0)
    holding.stop()
    began_s = time.monotonic()
    outcome = run_task(plan, Noting(judged.folder))
    assert time.monotonic() - began_s < 20
    assert (outcome.handled, outcome.is_through, outcome.is_held_up) == (0, False, False)
    assert judged.lag == 50


def test_a_task_is_called_back_when_the_lease_is_wanted(judged: Judged, holding: Holding) -> None:
    judged.send(600)
    found: list[TaskOutcome] = []
    plan = planned(judged, holding, round_s=60.0)
    task = threading.Thread(target=lambda: found.append(run_task(plan, Noting(judged.folder, handling_s=0.05))))
    task.start()
    wait_until(lambda: len(judged.noted.handled()) > 10, "it is at work")
    assert holding.stop(20.0)
    task.join(20.0)
    (outcome,) = found
    assert 10 < outcome.handled < 600
    assert outcome.handled == 600 - judged.lag == len(judged.noted.handled())
    with judged.online(Noting(judged.folder)):
        wait_until(lambda: judged.lag == 0, "an online consumer does the rest")
    assert judged.judge().duplicates == 0


def test_what_is_wrong_is_told_in_the_outcome(judged: Judged, holding: Holding) -> None:
    judged.send(5)
    plan = planned(judged, holding)
    missing = run_task(plan, "no_such_module:handle")
    assert (missing.error_kind, missing.is_final, missing.handled) == ("InvalidInput", True, 0)
    assert "there is no module 'no_such_module'" in missing.error


def test_a_server_that_is_not_there_may_be_there_later(judged: Judged, holding: Holding) -> None:
    judged.send(5)
    plan = planned(judged, holding)
    where = {name: getattr(plan, name) for name in ("subject", "group", "owner", "epochs", "slices")}
    outcome = run_task(TaskPlan("inturn://127.0.0.1:9", **where), Noting(judged.folder))
    assert (outcome.error_kind, outcome.is_final) == ("ConnectionLost", False)
    assert "a task on host" in outcome.error
