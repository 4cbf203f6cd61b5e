"""S3: drains on a Spark session with real consumers: take-over, rounds and hand-back keep the order."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from inturn import ConsumerSettings, FlowControl, Flush, LeaseSettings, LogSettings, RetryDelays
from inturn.model.errors import GroupConflict, InvalidInput, NotFound
from inturn.model.routing import ALL_SLOTS, slot_of
from inturn.protocol.commands import Claim, Granted
from inturn.protocol.request import ask
from inturn.spark.ordered.admission import check_master
from inturn.spark.ordered.drain import Drain, DrainFailed, DrainSettings
from inturn.spark.ordered.drain_report import DrainProgress, DrainReport
from inturn.spark.ordered.task import TaskOutcome, TaskPlan, disconnect
from simulator.processes.history import Death
from tests.spark.judged import GROUP, SUBJECT, Judged, judging
from tests.spark.noting import EVENTS, AsyncNoting, BatchNoting, Noting, is_alive
from tests.spark.waiting import wait_until

SHORT_LEASE = LeaseSettings(life_s=3.0, renew_s=0.5, margin_s=0.2)
QUICK = {"commit_interval_s": 0.05, "backoff_max_s": 0.05, "suspend_s": 0.05}


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    with judging(tmp_path) as opened:
        yield opened
        disconnect(opened.address)


@dataclass
class Running:
    """A drain in a thread; `over` waits for the end and raises the drain's error."""

    drain: Drain
    looks: list[DrainProgress] = field(default_factory=list)
    report: DrainReport | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.report = self.drain.run(self.looks.append)
        except BaseException as error:
            self.error = error

    def over(self, timeout_s: float = 100.0) -> DrainReport:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the drain did not end: {self.looks[-1:]}"
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


def drained(spark: SparkSession, judged: Judged, handler: Any, **options: Any) -> DrainReport:
    return make(spark, judged, handler, **options).run()


def make(spark: SparkSession, judged: Judged, handler: Any, *, order: str | None = None, **options: Any) -> Drain:
    """Create a drain. Options of `DrainSettings` go to the drain, other options to the consumers in the tasks."""
    own = [one.name for one in fields(DrainSettings) if one.name in options]
    chosen = {"patience_s": 1.0, **{name: options.pop(name) for name in own}}
    consumer = ConsumerSettings(**{"concurrency": 8, **QUICK, **options})
    settings = DrainSettings(**chosen)
    return Drain(spark, judged.address, SUBJECT, GROUP, handler, order=order, consumer=consumer, settings=settings)


def by_hand(judged: Judged) -> int:
    return len(judged.noted.handled())


# Taking over and handing back


def test_a_backlog_is_taken_over_from_online_consumers_and_the_group_handed_back(
    spark: SparkSession, judged: Judged
) -> None:
    slow = Noting(judged.folder, handling_s=0.05)
    with judged.online(slow) as one, judged.online(slow) as other:
        wait_until(lambda: one.leases() and other.leases(), "both are at work")
        judged.send(400)
        looks: list[DrainProgress] = []
        report = make(spark, judged, Noting(judged.folder)).run(looks.append)
        assert (report.ended, report.lag, report.order) == ("end", 0, "key")
        assert {look.phase for look in looks} >= {"taking over", "working", "over"}
        wait_until(lambda: one.leases() and other.leases(), "both have their partitions again")
        judged.send(40, first=400)
        wait_until(lambda: judged.lag == 0, "the online consumers go on")
    assert set(judged.noted.handled().values()) == {1}
    assert by_hand(judged) == 440
    names = {one.consumer.rpartition("-")[0] for one in judged.noted.starts}
    assert "online" in names
    assert any(name.startswith(f"drain-{SUBJECT}") for name in names)
    assert judged.judge().duplicates == 0


def test_a_subject_that_grows_before_and_while_it_is_drained_is_drained_in_order(
    spark: SparkSession, judged: Judged
) -> None:
    """M5, S3: older messages of a key are in the parent partition; the child opens when the parent is finished."""
    judged.make_group()
    judged.send(200, keys=40)
    judged.mq.grow_subject(SUBJECT, 4)
    judged.send(200, keys=40, first=200)
    running = Running(make(spark, judged, Noting(judged.folder, handling_s=0.01), max_lag=0))
    wait_until(lambda: by_hand(judged) > 20, "it is at work")
    judged.mq.grow_subject(SUBJECT, 7)
    judged.send(200, keys=40, first=400)
    report = running.over()
    assert (report.ended, report.lag) == ("lag", 0)
    assert set(judged.noted.handled().values()) == {1}
    assert by_hand(judged) == 600
    assert {one.partition for one in judged.noted.starts} == set(range(7))
    judged.judge()


def test_a_drain_needs_nobody_else(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(100)
    report = drained(spark, judged, Noting(judged.folder))
    assert (report.ended, report.done, report.lag, report.failures) == ("end", 100, 0, 0)
    assert report.per_s > 0
    again = drained(spark, judged, Noting(judged.folder))
    assert (again.ended, again.done, again.rounds) == ("end", 0, 0)
    judged.judge()


def test_a_folder_is_drained_as_a_server_is(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(60)
    settings = DrainSettings(patience_s=1.0)
    report = Drain(spark, str(judged.path), SUBJECT, GROUP, Noting(judged.folder), settings=settings).run()
    disconnect(str(judged.path))
    assert (report.ended, report.done) == ("end", 60)


# Order


def test_order_by_partition_is_kept(spark: SparkSession, judged: Judged) -> None:
    judged.make_group("partition")
    judged.send(120)
    report = drained(spark, judged, Noting(judged.folder), order="partition", tasks=4)
    assert (report.ended, report.order, report.done) == ("end", "partition", 120)
    assert len(report.outcomes) == 2  # one task for each partition
    judged.judge("partition")


def test_one_partition_is_shared_by_several_tasks_and_each_key_is_in_one(spark: SparkSession, tmp_path: Path) -> None:
    with judging(tmp_path, 1) as judged:
        judged.make_group()
        judged.send(400, keys=100)
        report = drained(spark, judged, Noting(judged.folder), tasks=4)
        disconnect(judged.address)
        assert (report.ended, report.done) == ("end", 400)
        assert [one.task for one in report.outcomes] == [0, 1, 2, 3]
        assert all(one.handled > 0 for one in report.outcomes)
        assert {len(tasks) for tasks in judged.noted.tasks_by_key().values()} == {1}
        judged.judge()


@pytest.mark.parametrize("keyless", ["independent", "one-lane"])
def test_messages_without_a_key_are_all_handled(spark: SparkSession, tmp_path: Path, keyless: str) -> None:
    with judging(tmp_path, 1, keyless=keyless) as judged:
        judged.make_group()
        judged.send(150, keyless=True)
        judged.send(50, first=150)
        report = drained(spark, judged, Noting(judged.folder), tasks=3)
        disconnect(judged.address)
        assert (report.ended, report.done) == ("end", 200)
        assert set(judged.noted.handled().values()) == {1}
        if keyless == "one-lane":
            assert len(report.outcomes) == 1
            offsets = [one.offset for one in judged.noted.starts if one.key is None]
            assert offsets == sorted(offsets)
        else:
            assert len(report.outcomes) == 3
        judged.judge()


# Keys without progress


def test_a_failing_key_is_held_and_the_rest_goes_on(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(100)
    report = drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}))
    assert (report.ended, report.done, report.lag) == ("held keys", 90, 10)
    (held,) = report.held_keys
    assert (held.key, held.state, held.waiting) == (b"k3", "failing", 9)
    assert held.attempts > 1
    assert report.failures == held.attempts
    mended = drained(spark, judged, Noting(judged.folder))
    assert (mended.ended, mended.done, mended.held_keys) == ("end", 10, ())
    judged.judge()


def test_a_blocked_key_waits_until_it_is_resumed(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(50)
    report = drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}), max_attempts=2)
    assert (report.ended, report.lag) == ("held keys", 5)
    assert [(one.key, one.state, one.attempts) for one in report.held_keys] == [(b"k3", "blocked", 2)]
    still = drained(spark, judged, Noting(judged.folder), max_attempts=2)
    assert (still.ended, still.done) == ("held keys", 0)
    judged.mq.group(SUBJECT, GROUP).resume("k3", wait_s=0)
    mended = drained(spark, judged, Noting(judged.folder), max_attempts=2)
    assert (mended.ended, mended.done, mended.held_keys) == ("end", 5, ())
    handled = [one.offset for one in judged.noted.ends if one.key == b"k3" and one.result == "success"]
    assert handled == sorted(handled)


def test_best_effort_tries_again_later_and_lets_the_rest_on(spark: SparkSession, judged: Judged) -> None:
    how: dict[str, Any] = {"strategy": "best-effort", "retry": RetryDelays(levels_s=(0.3,), first_level=0)}
    judged.make_group(**how)
    judged.send(60)
    handler = Noting(judged.folder, failures={b"k3": 1})
    report = drained(spark, judged, handler, **how)
    assert (report.ended, report.lag) == ("end", 0)
    tried = sum(one.result == "success" and one.key == b"k3" for one in judged.noted.ends)
    assert report.retrying == 6 - tried
    with judged.online(handler, **how):
        wait_until(lambda: sum(one.result == "success" for one in judged.noted.ends) == 60, "the retries are done")
    failed = [one for one in judged.noted.ends if one.result == "exception"]
    assert {one.key for one in failed} == {b"k3"}
    assert len(failed) == 6


def test_messages_that_are_given_up_become_dead_letters(spark: SparkSession, judged: Judged) -> None:
    how: dict[str, Any] = {"max_attempts": 2, "on_exhausted": "dead-letter"}
    judged.make_group(**how)
    judged.send(50)
    report = drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}), **how)
    assert (report.ended, report.lag) == ("end", 0)
    letters = judged.mq.group(SUBJECT, GROUP).dead_letters().list()
    assert [one.message.key for one in letters] == [b"k3"] * 5
    assert [int(one.message.body) for one in letters] == [3, 13, 23, 33, 43]


def test_a_parked_key_waits_in_its_lot_and_is_resumed_in_order(spark: SparkSession, judged: Judged) -> None:
    how: dict[str, Any] = {"max_attempts": 1, "on_exhausted": "park"}
    judged.make_group(**how)
    judged.send(50)
    report = drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}), **how)
    assert (report.ended, report.lag) == ("end", 0)
    assert [(one.key, one.state) for one in report.held_keys] == [(b"k3", "parked")]
    judged.mq.group(SUBJECT, GROUP).resume("k3", wait_s=0)
    judged.send(50, first=50)
    mended = drained(spark, judged, Noting(judged.folder), **how)
    assert (mended.ended, mended.lag, mended.held_keys) == ("end", 0, ())
    done = [int(one.message_id or "") for one in judged.noted.ends if one.key == b"k3" and one.result == "success"]
    assert done == list(range(3, 100, 10))


def test_a_lot_is_resumed_where_no_message_waits(spark: SparkSession, judged: Judged) -> None:
    how: dict[str, Any] = {"max_attempts": 1, "on_exhausted": "park"}
    judged.make_group(**how)
    judged.send(50)
    drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}), **how)
    judged.mq.group(SUBJECT, GROUP).resume("k3", wait_s=0)
    mended = drained(spark, judged, Noting(judged.folder), **how)
    assert (mended.ended, mended.rounds, mended.held_keys) == ("end", 1, ())
    done = [int(one.message_id or "") for one in judged.noted.ends if one.key == b"k3" and one.result == "success"]
    assert done == list(range(3, 50, 10))


def test_a_lot_whose_message_fails_again_is_a_held_key(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(50)
    drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}), max_attempts=1, on_exhausted="park")
    judged.mq.group(SUBJECT, GROUP).resume("k3", wait_s=0)
    report = drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}))
    assert (report.ended, report.done, report.lag) == ("held keys", 0, 0)
    assert report.rounds <= 2
    assert [(one.key, one.state) for one in report.held_keys] == [(b"k3", "resuming")]


def test_what_somebody_asks_of_a_key_is_done_while_another_partition_is_worked_on(
    spark: SparkSession, judged: Judged
) -> None:
    judged.make_group()
    judged.send(400, key="busy")
    by_slot = judged.mq.subject(SUBJECT).route.by_slot
    idle = next(key for key in map(str, range(99)) if by_slot[slot_of(key.encode())] != by_slot[slot_of(b"busy")])
    running = Running(make(spark, judged, Noting(judged.folder, handling_s=0.05), round_s=1.0))
    wait_until(lambda: judged.noted.starts, "it is at work")
    judged.mq.group(SUBJECT, GROUP).park(idle, wait_s=18.0)
    assert by_hand(judged) < 400
    running.drain.interrupt()
    report = running.over()
    assert [(one.key, one.state) for one in report.held_keys] == [(idle.encode(), "parked")]


# Limits, and logs that cannot be read


def test_a_limit_ends_a_drain_and_is_named_with_its_key(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    for first in range(0, 1500, 50):
        judged.send(50, first=first)
    handler = Noting(judged.folder, failures={b"k3": -1})
    report = drained(spark, judged, handler, flow=FlowControl(span=100), pull_bytes=1024)
    (limit,) = report.limits
    assert (report.ended, limit.limit, limit.size, limit.key) == ("limit", "span", 100, "k3")
    assert report.lag > 150
    others = [one for one in judged.mq.group(SUBJECT, GROUP).describe().partitions if one.partition != limit.partition]
    assert [one.lag for one in others] == [0], "the other partition goes on"
    assert [one.key for one in report.held_keys] == [b"k3"]
    judged.judge(complete=False)


def test_a_key_that_keeps_a_round_from_beginning_later_is_a_limit(
    spark: SparkSession, judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes at most SPAN_MAX offsets of a partition, from the first unfinished message."""
    monkeypatch.setattr(sys.modules["inturn.spark.ordered.rounds"], "SPAN_MAX", 60)
    judged.make_group()
    judged.send(400)
    report = drained(spark, judged, Noting(judged.folder, failures={b"k3": -1}))
    (limit,) = report.limits
    assert (report.ended, limit.limit, limit.size, limit.key) == ("limit", "span", 60, "k3")
    assert report.rounds > 3
    mended = drained(spark, judged, Noting(judged.folder))
    assert (mended.ended, mended.lag, mended.limits) == ("end", 0, ())
    judged.judge()


def test_a_damaged_log_is_told_and_the_others_go_on(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    for first in range(0, 400, 40):
        judged.send(40, first=first)
    judged.damage(1)
    report = drained(spark, judged, Noting(judged.folder))
    assert (report.ended, report.held_keys) == ("damaged", ())
    (text,) = report.damage
    assert "damaged at offset" in text
    assert "inturn doctor" in text
    healthy, damaged = judged.mq.group(SUBJECT, GROUP).describe().partitions
    assert (healthy.lag, damaged.lag) == (0, report.lag)
    assert 0 < report.lag < 200


# Handlers


def test_async_handlers_run_in_tasks(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(100)
    report = drained(spark, judged, AsyncNoting(judged.folder, handling_s=0.01, failures={b"k1": 1}))
    assert (report.ended, report.done, report.failures) == ("end", 100, 10)
    judged.judge()


def test_handlers_of_batches_get_lists(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(100)
    report = drained(spark, judged, BatchNoting(judged.folder), batch=5)
    assert (report.ended, report.done) == ("end", 100)
    assert set(judged.noted.handled().values()) == {1}


def test_a_handler_is_found_by_its_name(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(20)
    report = drained(spark, judged, "tests.spark.noting:ignore")
    assert (report.ended, report.done) == ("end", 20)


def test_a_handler_that_tasks_cannot_import_ends_the_drain(
    spark: SparkSession, judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged.make_group()
    judged.send(20)
    (tmp_path / "only_here.py").write_text("def handle(message, context):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DrainFailed, match=r"task 0 on .*: handler 'only_here:handle': there is no module 'only_here'"):
        drained(spark, judged, "only_here:handle")
    assert judged.mq.group(SUBJECT, GROUP).describe().members == ()
    assert judged.lag == 20


# Ends


def test_with_a_lag_to_reach_a_drain_goes_on_while_messages_come(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(200)
    is_enough = threading.Event()

    def produce() -> None:
        number = 200
        while not is_enough.is_set():
            judged.send(5, first=number)
            number += 5
            time.sleep(0.02)

    producing = threading.Thread(target=produce)
    producing.start()
    running = Running(make(spark, judged, Noting(judged.folder), max_lag=0))
    try:
        wait_until(lambda: by_hand(judged) > 260, "it does more than there was at the start")
    finally:
        is_enough.set()
        producing.join()
    report = running.over()
    assert (report.ended, report.lag) == ("lag", 0)
    assert report.done > 260
    judged.judge()


def test_an_interrupted_drain_hands_back_and_nothing_is_repeated(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(1500)
    running = Running(make(spark, judged, Noting(judged.folder, handling_s=0.03)))
    wait_until(lambda: by_hand(judged) > 50, "it is at work")
    running.drain.interrupt()
    report = running.over()
    assert report.ended == "interrupted"
    assert 50 < report.done < 1500
    assert report.lag == 1500 - report.done
    assert report.done == by_hand(judged)
    assert judged.mq.group(SUBJECT, GROUP).describe().members == ()
    with judged.online(Noting(judged.folder)):
        wait_until(lambda: judged.lag == 0, "an online consumer does the rest")
    assert set(judged.noted.handled().values()) == {1}
    assert judged.judge().duplicates == 0


def test_a_second_interruption_kills_the_tasks(spark: SparkSession, tmp_path: Path) -> None:
    with judging(tmp_path, lease=SHORT_LEASE) as judged:
        judged.make_group()
        judged.send(50)
        handler = Noting(judged.folder, waits=True)
        running = Running(make(spark, judged, handler))
        wait_until(lambda: len(judged.noted.files()) == 2, "both tasks run handlers, which do not end")
        running.drain.interrupt()
        wait_until(lambda: running.looks[-1].phase == "handing back", "the tasks are called back")
        running.drain.interrupt()
        report = running.over()
        disconnect(judged.address)
        assert (report.ended, report.done, report.lag) == ("interrupted", 0, 50)
        deaths = [Death(path, time.monotonic()) for path in judged.noted.files()]
        assert not any(is_alive(int(death.path.name.removesuffix(EVENTS))) for death in deaths)
        handler.open()
        with judged.online(handler):
            wait_until(lambda: judged.lag == 0, "an online consumer does all of it")
        assert judged.judge(deaths=deaths).duplicates == 0


def test_handing_back_is_not_waited_for_when_it_is_interrupted_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent claimant, as a task on a dead machine, still has a claim."""
    with judging(tmp_path, 1, lease=LeaseSettings(life_s=60.0, renew_s=1.0, margin_s=0.5)) as judged:
        judged.make_group()
        judged.send(20)
        drain = make(spark, judged, Noting(judged.folder))

        def claim_and_go(spark: SparkSession, plans: list[TaskPlan], handler: object) -> list[TaskOutcome]:
            plan = plans[0]
            whose = (plan.owner, plan.epochs[0], "gone", 1, ALL_SLOTS.to_bytes())
            ask(judged.mq.node, Claim(SUBJECT, GROUP, 0, *whose), Granted)
            drain.interrupt()
            return []

        monkeypatch.setattr(sys.modules["inturn.spark.ordered.rounds"], "run_job", claim_and_go)
        running = Running(drain)
        wait_until(
            lambda: [look.phase for look in running.looks[-3:]] == ["handing back"] * 3, "it waits for the claim"
        )
        drain.interrupt()
        report = running.over(40.0)
        disconnect(judged.address)
        assert (report.ended, report.is_handed_back) == ("interrupted", False)
        assert judged.mq.group(SUBJECT, GROUP).describe().partitions[0].owner is not None


def test_an_interruption_while_taking_over_takes_nothing(spark: SparkSession, judged: Judged) -> None:
    stuck = Noting(judged.folder, waits=True)
    with judged.online(stuck) as online:
        judged.send(20)
        wait_until(lambda: judged.noted.starts, "a handler runs, and does not end")
        running = Running(make(spark, judged, Noting(judged.folder)))
        wait_until(lambda: any(look.phase == "taking over" for look in running.looks), "it asks for the partitions")
        running.drain.interrupt()
        report = running.over()
        assert (report.ended, report.done, report.rounds, report.work_s) == ("interrupted", 0, 0, 0.0)
        stuck.open()
        wait_until(lambda: judged.lag == 0, "the online consumer goes on")
        assert online.leases()
    assert judged.judge().duplicates == 0


def test_consumers_that_do_not_hand_over_in_time_are_named(spark: SparkSession, judged: Judged) -> None:
    stuck = Noting(judged.folder, waits=True)
    with judged.online(stuck):
        judged.send(20)
        wait_until(lambda: judged.noted.starts, "a handler runs, and does not end")
        with pytest.raises(Exception, match=r"online-\w+"):
            drained(spark, judged, Noting(judged.folder), take_over_s=1.0)
        stuck.open()
        wait_until(lambda: judged.lag == 0, "the online consumer goes on")
    judged.judge()


# Refused input


def test_a_group_has_one_drain_at_a_time(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(50)
    handler = Noting(judged.folder, waits=True)
    first = Running(make(spark, judged, handler))
    wait_until(lambda: judged.noted.starts, "the first is at work")
    with pytest.raises(
        GroupConflict, match=rf"drain-{SUBJECT}-\w+ has taken it over already; wait until it hands back"
    ):
        drained(spark, judged, handler)
    handler.open()
    assert first.over().done == 50
    assert judged.judge().duplicates == 0


def test_an_unknown_group_is_told_with_those_that_there_are(spark: SparkSession, judged: Judged) -> None:
    with pytest.raises(NotFound, match="it has no group: no consumer has joined yet"):
        drained(spark, judged, Noting(judged.folder))
    judged.make_group()
    drain = Drain(spark, judged.address, SUBJECT, "biling", Noting(judged.folder))
    with pytest.raises(NotFound, match=r"group 'biling'.*on subject 'orders'; it has billing"):
        drain.run()
    with pytest.raises(NotFound, match="subject 'order'"):
        Drain(spark, judged.address, "order", GROUP, Noting(judged.folder)).run()


def test_another_order_than_that_of_the_members_is_refused(spark: SparkSession, judged: Judged) -> None:
    with judged.online(Noting(judged.folder)) as online:
        wait_until(online.leases, "it is a member")
        with pytest.raises(InvalidInput, match="order='partition': the members of group 'billing' use 'key'; leave it"):
            drained(spark, judged, Noting(judged.folder), order="partition")
        assert online.leases()


def test_a_folder_is_refused_where_executors_do_not_see_it() -> None:
    with pytest.raises(
        InvalidInput, match=r"'./data' is a folder of this machine, which executors of spark://host:7077"
    ):
        check_master("spark://host:7077", "./data")
    check_master("spark://host:7077", "inturn://host:7420")
    check_master("local[2]", "./data")


@pytest.mark.parametrize(
    "wrong", [{"tasks": 0}, {"round_s": 0}, {"patience_s": -1}, {"max_lag": -1}, {"take_over_s": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=rf"DrainSettings\.{next(iter(wrong))} is {next(iter(wrong.values()))}"):
        DrainSettings(**wrong)


# The server, and the log


def test_a_server_that_comes_back_is_waited_for(spark: SparkSession, tmp_path: Path) -> None:
    with judging(tmp_path, lease=SHORT_LEASE) as judged:
        judged.make_group()
        judged.send(400)
        running = Running(make(spark, judged, Noting(judged.folder, handling_s=0.03)))
        wait_until(lambda: by_hand(judged) > 40, "it is at work")
        judged.stop_server()
        time.sleep(1.0)
        judged.start_server()
        report = running.over()
        disconnect(judged.address)
        assert (report.ended, report.lag) == ("end", 0)
        assert by_hand(judged) == 400
        judged.judge()


def test_a_drain_without_its_server_fails_and_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    with judging(tmp_path, lease=SHORT_LEASE) as judged:
        judged.make_group()
        judged.send(600)
        running = Running(make(spark, judged, Noting(judged.folder, handling_s=0.03)))
        wait_until(lambda: by_hand(judged) > 40, "it is at work")
        judged.stop_server()
        with pytest.raises(DrainFailed, match="committed messages stay finished, all others are still stored"):
            running.over()
        disconnect(judged.address)
        judged.start_server()
        with judged.online(Noting(judged.folder)):
            wait_until(lambda: judged.lag == 0, "an online consumer does the rest")
        assert by_hand(judged) == 600
        judged.judge()


def test_offsets_that_are_gone_by_retention_are_counted_and_told(spark: SparkSession, tmp_path: Path) -> None:
    log = LogSettings(flush=Flush.OS, segment_bytes=4096, retention_bytes=16384, checkpoint_interval_s=0.01)
    with judging(tmp_path, 1, log=log) as judged:
        judged.make_group()
        handler = Noting(judged.folder, waits=True)
        for first in range(0, 2000, 20):  # many small batches: segments end with batches
            judged.send(20, keys=200, first=first)
        few = FlowControl(buffered_count=50)
        running = Running(make(spark, judged, handler, tasks=2, flow=few, pull_bytes=1024))
        wait_until(lambda: judged.noted.starts, "it is at work")
        removed = judged.service._opened._engine.apply_retention()
        assert removed > 0
        start = judged.mq.describe_subject(SUBJECT).partitions[0].start_offset
        handler.open()
        report = running.over()
        disconnect(judged.address)
        handled = {offset for _, offset in judged.noted.handled()}
        assert (report.ended, report.lag) == ("end", 0)
        assert set(range(start, 2000)) <= handled
        # A task may have handled a message before a different task finds it missing.
        assert report.missing >= 2000 - len(handled) > 0


def test_tasks_and_consumers_are_counted_alike(spark: SparkSession, judged: Judged) -> None:
    """The counts of the report equal the recorded handler calls."""
    judged.make_group()
    judged.send(80)
    report = drained(spark, judged, Noting(judged.folder, failures={b"k2": 2}), round_s=20.0)
    starts = Counter((one.partition, one.offset) for one in judged.noted.starts)
    assert sum(one.handled for one in report.outcomes) == report.done == 80
    assert report.failures == 16 == sum(starts.values()) - 80


def test_a_key_that_fails_slowly_does_not_keep_a_drain_from_ending(spark: SparkSession, judged: Judged) -> None:
    judged.make_group()
    judged.send(20)
    report = drained(spark, judged, Noting(judged.folder, handling_s=0.3, failures={b"k3": -1}), round_s=60.0)
    assert (report.ended, report.lag) == ("held keys", 2)
    assert report.work_s < 40
