"""S2: tasks, run in this process: the outcome of slices, also with lost or delayed claims."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inturn import ConsumerSettings, FlowControl, LeaseSettings
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.routing import ALL_SLOTS, SlotSet
from inturn.model.settings import Order
from inturn.protocol.commands import Claim, Granted
from inturn.protocol.request import ask
from inturn.spark.ordered.lease_holder import LeaseHolder
from inturn.spark.ordered.plan import Slice
from inturn.spark.ordered.task import LimitReached, TaskOutcome, TaskPlan, disconnect, run_task
from tests.spark.judged import GROUP, SUBJECT, Judged, judging
from tests.spark.noting import Noting
from tests.spark.waiting import wait_until

LEASE = LeaseSettings(life_s=2.0, renew_s=0.3, margin_s=0.2)
LOW, HIGH = SlotSet.of(range(512)), SlotSet.of(range(512, 1024))


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    with judging(tmp_path, 1, lease=LEASE) as opened:
        opened.make_group()
        yield opened
        disconnect(opened.address)


@pytest.fixture
def holder(judged: Judged) -> Iterator[LeaseHolder]:
    settings = ConsumerSettings(heartbeat_s=0.2)
    with LeaseHolder(judged.mq, SUBJECT, GROUP, takes_over=True, settings=settings) as held:
        held.wait_for({0}, 40.0)
        yield held


def planned(judged: Judged, holder: LeaseHolder, slots: SlotSet = ALL_SLOTS, **options: Any) -> TaskPlan:
    until = options.pop("until", None)
    if until is None:
        until = judged.mq.describe_subject(SUBJECT).partitions[0].end_offset
    order = options.pop("order", Order.KEY)
    own = {name: options.pop(name) for name in ("flow", "pull_bytes") if name in options}
    chosen = {"patience_s": 0.5, "round_s": 40.0, **options}
    settings = ConsumerSettings(concurrency=4, commit_interval_s=0.05, backoff_max_s=0.05, **own)
    where = (judged.address, SUBJECT, GROUP, holder.owner)
    return TaskPlan(*where, holder.epochs(), (Slice(0, slots, until),), order, settings, **chosen)


def test_a_task_handles_its_slice_and_tells_what_it_did(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(100)
    outcome = run_task(planned(judged, holder, round=3, index=1), Noting(judged.folder, failures={b"k1": 1}))
    assert (outcome.round, outcome.task, outcome.pid) == (3, 1, os.getpid())
    assert (outcome.handled, outcome.failed, outcome.waiting, outcome.error) == (100, 10, 0, "")
    assert outcome.is_through
    assert not outcome.is_held_up
    assert judged.lag == 0
    judged.judge()


def test_nothing_at_or_above_its_end_is_handled(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(100)
    assert run_task(planned(judged, holder, until=37), Noting(judged.folder)).handled == 37
    assert sorted(offset for _, offset in judged.noted.handled()) == list(range(37))


def test_a_task_that_is_run_again_finds_done_what_was_done(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(100)
    plan = planned(judged, holder)
    assert run_task(plan, Noting(judged.folder)).handled == 100
    again = run_task(plan, Noting(judged.folder))
    assert (again.handled, again.is_through) == (0, True)
    assert judged.judge().duplicates == 0


def test_slices_of_one_partition_do_not_touch_each_others_keys(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(200, keys=50)
    found = [run_task(planned(judged, holder, slots), Noting(judged.folder)) for slots in (LOW, HIGH)]
    assert sum(one.handled for one in found) == 200
    assert all(one.handled for one in found)
    assert judged.judge().duplicates == 0


def test_a_key_that_fails_ends_the_task_when_nothing_else_is_left(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(50)
    outcome = run_task(planned(judged, holder), Noting(judged.folder, handling_s=0.02, failures={b"k1": -1}))
    assert (outcome.handled, outcome.is_through, outcome.is_held_up) == (45, False, True)
    assert outcome.waiting == 5
    assert outcome.seconds < 30


def test_a_round_that_is_over_ends_a_task_between_two_messages(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(400)
    outcome = run_task(planned(judged, holder, round_s=2.0), Noting(judged.folder, handling_s=0.05))
    assert not outcome.is_through
    assert not outcome.is_held_up
    assert 0 < outcome.handled < 400
    assert outcome.handled == len(judged.noted.handled()) == 400 - judged.lag  # all calls are committed


def test_a_claim_that_somebody_silent_has_is_waited_for(judged: Judged, holder: LeaseHolder) -> None:
    """A killed task leaves such a claim. The wait exceeds `patience_s`, because the patience is for failing messages
    only."""
    judged.send(50)
    plan = planned(judged, holder, patience_s=0.2)
    epoch = plan.epochs[0]
    command = Claim(SUBJECT, GROUP, 0, plan.owner, epoch, "killed", 1, ALL_SLOTS.to_bytes(), 0.0)
    ask(judged.mq.node, command, Granted)
    began_s = time.monotonic()
    outcome = run_task(plan, Noting(judged.folder))
    assert (outcome.handled, outcome.is_through) == (50, True)
    assert time.monotonic() - began_s > 0.8 * LEASE.life_s


def test_a_lease_that_is_over_is_not_waited_for(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(50)
    plan = planned(judged, holder, round_s=60.0)
    holder.stop()
    began_s = time.monotonic()
    outcome = run_task(plan, Noting(judged.folder))
    assert time.monotonic() - began_s < 40
    assert (outcome.handled, outcome.is_through, outcome.is_held_up) == (0, False, False)
    assert judged.lag == 50


def test_a_task_is_called_back_when_the_lease_is_wanted(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(600)
    found: list[TaskOutcome] = []
    plan = planned(judged, holder, round_s=60.0)
    task = threading.Thread(target=lambda: found.append(run_task(plan, Noting(judged.folder, handling_s=0.05))))
    task.start()
    wait_until(lambda: len(judged.noted.handled()) > 10, "it is at work")
    assert holder.stop(40.0)
    task.join(40.0)
    (outcome,) = found
    assert 10 < outcome.handled < 600
    assert outcome.handled == 600 - judged.lag == len(judged.noted.handled())
    with judged.online(Noting(judged.folder)):
        wait_until(lambda: judged.lag == 0, "an online consumer does the rest")
    assert judged.judge().duplicates == 0


def test_what_is_wrong_is_told_in_the_outcome(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(5)
    plan = planned(judged, holder)
    missing = run_task(plan, "no_such_module:handle")
    assert (missing.error_kind, missing.is_final, missing.handled) == ("InvalidInput", True, 0)
    assert "there is no module 'no_such_module'" in missing.error


def test_a_server_that_is_not_there_may_be_there_later(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(5)
    plan = planned(judged, holder)
    where = {name: getattr(plan, name) for name in ("subject", "group", "owner", "epochs", "slices")}
    outcome = run_task(TaskPlan("inturn://127.0.0.1:9", **where), Noting(judged.folder))
    assert (outcome.error_kind, outcome.is_final) == ("ConnectionLost", False)
    assert "a task on host" in outcome.error


# Limits


def fail_at_first(message: Message, context: Context) -> None:
    if message.offset == 0:
        raise ValueError("this one never")


def test_a_key_that_fails_keeps_no_other_from_being_done_however_far(judged: Judged, holder: LeaseHolder) -> None:
    count = FlowControl().span + 20_000
    judged.send(count, keys=1000)
    outcome = run_task(planned(judged, holder, round_s=60.0, patience_s=1.0), fail_at_first)
    behind = count // 1000
    assert (outcome.is_held_up, outcome.limits) == (True, ())
    assert (outcome.handled, outcome.waiting, judged.lag) == (count - behind, behind, behind)


def test_a_span_that_was_asked_for_is_kept_and_named_with_the_key(judged: Judged, holder: LeaseHolder) -> None:
    for first in range(0, 5000, 100):
        judged.send(100, keys=100, first=first)  # many small batches
    plan = planned(judged, holder, flow=FlowControl(span=1000), pull_bytes=1024)
    outcome = run_task(plan, fail_at_first)
    assert outcome.limits == (LimitReached(0, "span", 1000, 0, "k0"),)
    assert not outcome.is_held_up
    assert not outcome.is_through
    assert 900 < outcome.handled < 2000


def test_too_much_behind_a_key_is_a_limit_too(judged: Judged, holder: LeaseHolder) -> None:
    judged.send(2)
    for first in range(100, 1100, 100):
        judged.send(100, key="k0", first=first)  # of 3 bytes each
    judged.send(10, first=2000)
    plan = planned(judged, holder, flow=FlowControl(buffered_bytes=200), pull_bytes=1024)
    outcome = run_task(plan, fail_at_first)
    assert outcome.limits == (LimitReached(0, "buffered_bytes", 800, 0, "k0"),)
    assert outcome.handled == 1
    assert 200 < outcome.waiting < 1000


def test_in_order_by_partition_all_of_it_waits_behind_one_message(tmp_path: Path) -> None:
    with judging(tmp_path, 1, lease=LEASE) as judged:
        judged.make_group("partition")
        for first in range(0, 1000, 100):
            judged.send(100, first=first)
        settings = ConsumerSettings(heartbeat_s=0.2)
        with LeaseHolder(
            judged.mq, SUBJECT, GROUP, order=Order.PARTITION, takes_over=True, settings=settings
        ) as holder:
            holder.wait_for({0}, 40.0)
            flow = FlowControl(buffered_bytes=100)
            plan = planned(judged, holder, order=Order.PARTITION, flow=flow, pull_bytes=1024)
            outcome = run_task(plan, fail_at_first)
        disconnect(judged.address)
        assert (outcome.handled, outcome.limits, outcome.is_held_up) == (0, (), True)


# Key requests and parking lots without waiting messages


def parking(judged: Judged, *keys: str) -> None:
    """Handle all stored messages, but park the messages of these keys."""
    failures = {key.encode(): -1 for key in keys}
    handler = Noting(judged.folder, failures=failures)
    with judged.online(handler, max_attempts=1, on_exhausted="park"):
        wait_until(lambda: judged.lag == 0, "all are handled or parked")


def test_a_lot_is_resumed_though_no_message_waits(judged: Judged, holder: LeaseHolder) -> None:
    holder.stop()
    judged.send(40)
    parking(judged, "k3")
    judged.mq.group(SUBJECT, GROUP).resume("k3", wait_s=0)
    settings = ConsumerSettings(heartbeat_s=0.2)
    with LeaseHolder(judged.mq, SUBJECT, GROUP, takes_over=True, settings=settings) as again:
        again.wait_for({0}, 40.0)
        outcome = run_task(planned(judged, again), Noting(judged.folder))
    assert (outcome.handled, outcome.is_through) == (4, True)
    assert judged.mq.group(SUBJECT, GROUP).keys() == []


def test_a_lot_whose_message_fails_again_is_not_through_but_held_up(judged: Judged, holder: LeaseHolder) -> None:
    holder.stop()
    judged.send(40)
    parking(judged, "k3")
    judged.mq.group(SUBJECT, GROUP).resume("k3", wait_s=0)
    settings = ConsumerSettings(heartbeat_s=0.2)
    with LeaseHolder(judged.mq, SUBJECT, GROUP, takes_over=True, settings=settings) as again:
        again.wait_for({0}, 40.0)
        outcome = run_task(planned(judged, again), Noting(judged.folder, failures={b"k3": -1}))
    assert (outcome.handled, outcome.is_through, outcome.is_held_up) == (0, False, True)
    (key,) = judged.mq.group(SUBJECT, GROUP).keys()
    assert (key.state, key.requests) == ("resuming", ())


# Damage


def test_damage_in_the_log_is_told_apart(judged: Judged, holder: LeaseHolder) -> None:
    for first in range(0, 500, 100):
        judged.send(100, first=first)
    judged.damage()
    outcome = run_task(planned(judged, holder), Noting(judged.folder))
    (text,) = outcome.damage
    assert "damaged at offset" in text
    assert "inturn doctor" in text
    assert outcome.error == text
    assert 0 < outcome.handled < 500
    assert not outcome.is_through
