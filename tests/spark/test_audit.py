"""S5: the audit on Spark. It agrees with the order checker, and judges what consumers really recorded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

from inturn import Consumer, ConsumerSettings, Context, LeaseSettings, Message, connect
from inturn.client import Connection
from inturn.consumer.claimant import ClaimedPart, ClaimingNode
from inturn.consumer.options import Scope
from inturn.model.errors import InvalidInput, NotFound
from inturn.model.routing import ALL_SLOTS
from inturn.model.settings import Order
from inturn.model.time import SystemClock
from inturn.spark import audit
from inturn.spark.audit.fast_path import looked_at, place_number
from inturn.spark.audit.leases import Place, Terms
from inturn.spark.audit.traces import EVENT_SCHEMA, RUN_SCHEMA, Traces, read_traces
from inturn.spark.audit.verdict import AuditVerdict, OrderBroken
from inturn.testing.checker import check
from inturn.testing.history import Event, HandlerStart, History, SendAcknowledged
from inturn.testing.verdict import Verdict, ViolationKind
from simulator import aftermath as sim_aftermath
from simulator import simulation
from simulator.seeded_bugs import BUGS
from simulator.traces import TraceRows, trace_rows, unwanted_of
from tests.spark.waiting import wait_until

CONDEMNED_MIN = 47  # of 49 that the checker condemned when they were chosen
STORED_SCHEMA = "subject string, partition int, offset bigint, key binary, message_id string"
HEALTHY_SEEDS = range(12)
# Histories that the order checker condemns, and that take less than a second. Bugs that it does not condemn are found
# by other means (the log, streams that stand still, the parking lot's own checks): no trace of consumption shows them.
# Left out for their time, several seconds each: kept_messages_count_as_done, parked_messages_are_not_written,
# rows_at_hand_leave_the_lot_when_it_is_parked_again, skip_drops_whatever_is_first, skipped_message_is_not_over,
# what_is_over_of_a_lot_is_read_again.
CONDEMNED_AT = {
    "acknowledges_before_sync": 0,
    "attempts_are_not_handed_over": 7,
    "attempts_are_stored_once": 7,
    "begun_lane_is_taken_back": 0,
    "buffer_survives_the_lease": 14,
    "commit_goes_back": 1,
    "commit_is_not_fenced_anywhere": 6,
    "commits_what_was_pulled": 29,
    "deadline_counts_from_the_answer": 7,
    "deadline_is_not_checked_before_a_start": 69,
    "dropped_partition_goes_on": 2,
    "epoch_is_not_checked": 53,
    "epoch_is_not_raised": 1,
    "epoch_lives_in_memory": 0,
    "exception_is_a_success": 1,
    "failed_message_counts_as_done": 2,
    "failed_sync_counts_as_done": 10,
    "finished_set_is_ignored": 0,
    "finished_set_is_not_committed": 6,
    "highest_finished_is_committed": 0,
    "key_is_free_before_its_last_message": 12,
    "lane_is_ready_while_it_runs": 1,
    "last_partition_belongs_to_nobody": 0,
    "late_copy_of_a_commit_is_stored": 53,
    "lease_ends_by_the_wall_clock": 33,
    "lease_is_over_after_a_restart": 37,
    "live_lease_is_granted": 4,
    "lost_offsets_are_used_again": 14,
    "lost_stream_ends_the_leases": 30,
    "newer_messages_do_not_wait_for_a_resumed_key": 15,
    "newer_messages_of_a_parked_key_run": 12,
    "numbers_come_round_too_soon": 9,
    "old_ask_is_granted_again": 277,
    "one_message_of_a_commit_is_parked": 12,
    "parked_keys_are_not_handed_over": 14,
    "partial_batch_stays": 4,
    "producer_id_is_given_twice": 0,
    "readers_see_unsynced": 4,
    "recovered_tail_is_not_synced": 69,
    "recovery_cuts_a_good_batch": 3,
    "release_forgets_the_progress": 1,
    "remote_lease_counts_as_local": 37,
    "repeat_does_not_wait_for_the_commit": 29,
    "rest_of_a_lane_is_dropped": 1,
    "rows_are_removed_when_they_are_read": 10,
    "sealed_segment_is_not_synced": 0,
    "session_answers_the_newest_request": 29,
    "silent_member_keeps_its_share": 3,
    "suspended_lane_goes_on_with_the_next_pull": 145,
    "suspended_message_is_overtaken": 0,
    "torn_payload_is_kept": 107,
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class Case:
    """A history, as the checker judged it."""

    verdict: Verdict
    rows: TraceRows
    log: list[tuple[Any, ...]]


def _simulated(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Case:
    told: dict[str, Any] = {}

    def watched(history: History, **options: Any) -> Verdict:
        told.update(options)
        return check(history, **options)

    monkeypatch.setattr(sim_aftermath, "check", watched)
    if name in BUGS:
        with BUGS[name].injected():
            report = simulation.simulate(seed)
    else:
        report = simulation.simulate(seed)
    return _case(f"{name}/{seed}", report.history, report.verdict, told["order"], told["stored"])


def _case(name: str, history: History, verdict: Verdict, order: str, stored: Mapping[Any, str | None] | None) -> Case:
    keys: dict[tuple[int, int], bytes | None] = {}
    for event in history:
        if isinstance(event, SendAcknowledged | HandlerStart):
            keys.setdefault((event.partition, event.offset), event.key)
    unwanted = unwanted_of(history)
    wanted = ((place[1:], message_id) for place, message_id in (stored or {}).items() if place[1:] not in unwanted)
    log = [(name, *place, keys.get(place), message_id) for place, message_id in wanted]
    return Case(verdict, trace_rows(history, order=order, subject=name), log)


def _audited(spark: SparkSession, cases: Mapping[str, Case], **options: Any) -> AuditVerdict:
    """All in one audit: each history is a subject of its own."""

    def frame(rows: list[tuple[Any, ...]], schema: str) -> DataFrame:
        return spark.createDataFrame(rows, schema)

    every = list(cases.values())
    traces = Traces(
        frame([row for case in every for row in case.rows.runs], RUN_SCHEMA),
        frame([row for case in every for row in case.rows.events], EVENT_SCHEMA),
    )
    sent = frame([row for case in every for row in case.rows.sent], STORED_SCHEMA)
    log = frame([row for case in every for row in case.log], STORED_SCHEMA)
    return audit(spark, traces, sent=sent, log=log, complete=True, clock_skew_s=0.0, **options)


@pytest.mark.timeout(400)
def test_the_audit_agrees_with_the_checker_on_seeded_bugs_and_healthy_histories(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {f"healthy/{seed}": _simulated("healthy", seed, monkeypatch) for seed in HEALTHY_SEEDS}
    cases |= {f"{bug}/{seed}": _simulated(bug, seed, monkeypatch) for bug, seed in CONDEMNED_AT.items()}
    not_found = [name for name, case in cases.items() if case.verdict.ok and not name.startswith("healthy")]
    condemned = len(CONDEMNED_AT) - len(not_found)
    assert condemned >= CONDEMNED_MIN, f"these seeds show nothing any more, look for others: {not_found}"
    verdict = _audited(spark, cases)
    found = {group.subject: group for group in verdict.groups}
    assert set(found) == set(cases)
    wrong = {
        name: (sorted(case.verdict.kinds()), dict(found[name].broken))
        for name, case in cases.items()
        if case.verdict.ok != found[name].ok
    }
    assert wrong == {}
    for name, case in cases.items():
        if case.verdict.ok:
            group = found[name]
            assert (group.started, group.finished, group.duplicates, group.commits, group.lease_grants) == (
                case.verdict.started,
                case.verdict.finished,
                case.verdict.duplicates,
                case.verdict.commits,
                case.verdict.lease_grants,
            )
    assert not verdict.ok
    assert len(verdict.violations) == min(100, verdict.violation_count)
    with pytest.raises(OrderBroken, match="order broken"):
        verdict.raise_if_bad()


def test_the_bugs_exist() -> None:
    assert set(CONDEMNED_AT) <= set(BUGS)


# What consumers recorded


def _consumed(folder: Path, traces: Path, count: int = 300) -> None:
    """Two members one after the other, and a message that fails once."""
    with connect(folder) as mq:
        mq.create_subject("orders", partitions=2)
        with mq.producer() as producer:
            for number in range(count):
                producer.send("orders", b"%d" % number, key=b"key-%d" % (number % 11) if number % 13 else None)
        _handle(mq, traces, count // 2)
        _handle(mq, traces, count)


def _handle(mq: Connection, traces: Path, until: int) -> None:
    is_over = threading.Event()

    def handler(message: Message, context: Context) -> None:
        if message.body == b"100" and traces not in _failed:
            _failed.add(traces)
            raise RuntimeError("the first try")
        done.add(message.body)
        if len(done) >= until:
            is_over.set()

    settings = ConsumerSettings(trace=str(traces), commit_interval_s=0.02)
    done = _done.setdefault(str(traces), set())
    with mq.consumer("orders", "billing", handler, order=Order.KEY, settings=settings):
        assert is_over.wait(30)


_done: dict[str, set[bytes]] = {}
_failed: set[Path] = set()


@pytest.mark.slow
def test_a_real_trace_is_judged_with_its_log_and_every_way_to_break_it_is_seen(
    spark: SparkSession, tmp_path: Path
) -> None:
    _consumed(tmp_path / "data", tmp_path / "traces")
    log = _log(spark, tmp_path / "data")
    verdict = audit(spark, tmp_path / "traces", log=log, complete=True)
    assert verdict.ok, str(verdict)
    (group,) = verdict.groups
    assert (group.subject, group.group, group.finished, group.unproven) == ("orders", "billing", 300, 0)
    assert group.started == 301
    assert group.lease_grants == 4
    assert str(verdict).startswith("order kept: 301 started, 300 finished")

    traces = read_traces(spark, tmp_path / "traces")
    runs = [row.asDict() for row in traces.runs.collect()]
    assert all(row["start_ns"] <= row["end_ns"] for row in runs)
    broken = _broken(runs)
    frames = [
        spark.createDataFrame([tuple({**row, "subject": name}.values()) for row in rows], RUN_SCHEMA)
        for name, rows in broken.items()
    ]
    every = frames[0]
    for frame in frames[1:]:
        every = every.union(frame)
    events = traces.events.drop("subject").crossJoin(
        spark.createDataFrame([(name,) for name in broken], "subject string")
    )
    logs = log.crossJoin(spark.createDataFrame([(name,) for name in broken], "subject string"))
    verdict = audit(
        spark, Traces(every, events.select(*traces.events.columns)), log=logs, complete=True, violations_max=1000
    )
    kinds = {group.subject: set(group.broken) for group in verdict.groups}
    assert ViolationKind.OUT_OF_ORDER in kinds["swapped"]
    assert ViolationKind.OVERLAP in kinds["overlapping"]
    assert {ViolationKind.LOST, ViolationKind.PREMATURE_COMMIT, ViolationKind.SKIPPED} <= kinds["missing"]
    assert ViolationKind.REPEATED in kinds["repeated"]
    assert ViolationKind.STALE_START in kinds["stale"]
    assert kinds["as it was"] == set()
    overlap = next(one for one in verdict.violations if one.kind is ViolationKind.OVERLAP)
    assert len(overlap.evidence) == 2
    assert overlap.evidence[0].end_ns > overlap.evidence[1].start_ns  # type: ignore[operator]


def _log(spark: SparkSession, folder: Path) -> DataFrame:
    with connect(folder) as mq:
        reader = mq.reader("orders")
        stored = [(one.partition, one.offset, one.key) for index in (0, 1) for one in _all(reader, index)]
    return spark.createDataFrame(stored, "partition int, offset bigint, key binary")


def _all(reader: Any, index: int) -> Iterator[Message]:
    while messages := reader.read(index):
        yield from messages


def _broken(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The same trace, changed in one place."""
    lanes: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted(runs, key=lambda row: (row["start_ns"], row["seq"])):
        if row["key_hash"] is not None:
            lanes.setdefault((row["partition"], row["key_hash"], row["epoch"]), []).append(row)
    one, other = max(lanes.values(), key=len)[:2]
    last_epoch = max(row["epoch"] for row in runs)
    early = min((row for row in runs if row["epoch"] < last_epoch), key=lambda row: row["start_ns"])
    late_ns = max(row["end_ns"] for row in runs) + 10**9

    def changed(row: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
        return [{**some, **values} if some is row else some for some in runs]

    swapped = [
        {**row, "offset": other["offset"] if row is one else one["offset"] if row is other else row["offset"]}
        for row in runs
    ]
    late = {"start_ns": late_ns, "end_ns": late_ns + 1}
    return {
        "as it was": runs,
        "swapped": swapped,
        "overlapping": changed(one, end_ns=other["start_ns"] + 1),
        "missing": [row for row in runs if row is not one],
        "repeated": [*runs, {**early, **late, "epoch": last_epoch}],
        "stale": [*runs, {**early, **late}],
    }


@pytest.mark.slow
def test_what_a_killed_consumer_did_not_write_any_more_is_unproven_and_no_violation(
    spark: SparkSession, tmp_path: Path
) -> None:
    _consumed(tmp_path / "data", tmp_path / "traces")
    traces = read_traces(spark, tmp_path / "traces")
    runs = [row.asDict() for row in traces.runs.collect()]
    first_owner = min(runs, key=lambda row: row["start_ns"])["owner"]
    lost = max((row for row in runs if row["owner"] == first_owner), key=lambda row: row["start_ns"])
    kept = spark.createDataFrame([tuple(row.values()) for row in runs if row is not lost], RUN_SCHEMA)
    cut = traces.events.where(f"not (owner = '{first_owner}' and kind = 'closed')")
    log = _log(spark, tmp_path / "data")
    verdict = audit(spark, Traces(kept, cut), log=log)
    assert verdict.ok, str(verdict)
    assert verdict.total("unproven") == 1
    verdict = audit(spark, Traces(kept, traces.events), log=log)
    assert {ViolationKind.LOST, ViolationKind.PREMATURE_COMMIT} <= verdict.kinds()
    assert verdict.total("unproven") == 0


@pytest.mark.slow
def test_a_task_that_repeats_what_a_killed_one_did_in_the_same_epoch_is_in_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    lease = LeaseSettings(life_s=1.0, renew_s=0.2, margin_s=0.2)
    settings = ConsumerSettings(trace=str(tmp_path / "traces"), commit_interval_s=0.02, heartbeat_s=0.2)
    never_commits = replace(settings, commit_interval_s=60.0)
    seen: list[list[int]] = [[], [], []]

    def task(keeper: Consumer, number: int) -> Consumer:
        def handler(message: Message, context: Context) -> None:
            time.sleep(0.002)  # so that runs are short, and the trace is up to date
            seen[number].append(message.offset)

        parts = {index: ClaimedPart(keeper.name, held.epoch, ALL_SLOTS) for index, held in keeper.leases().items()}
        node, duty = ClaimingNode(mq.node, mq.subject("orders"), parts), Scope(until={0: 60})
        chosen = settings if number else never_commits
        how: dict[str, Any] = {"order": "key", "settings": chosen, "lease": lease, "duty": duty}
        return Consumer(node, SystemClock(), "orders", "billing", handler, **how)

    with connect(tmp_path / "data", lease=lease) as mq:
        mq.create_subject("orders", partitions=1)
        with mq.producer() as producer:
            for number in range(60):
                producer.send("orders", b"x", key=b"key-%d" % (number % 5))
        keeps = Scope(keeps_only=True, takes_over=True)
        with mq.consumer(
            "orders", "billing", lambda message, context: None, order="key", settings=settings, duty=keeps
        ) as keeper:
            wait_until(keeper.leases, "the keeper has the lease")
            first = task(keeper, 0)
            first.start()
            wait_until(lambda: len(seen[0]) > 20, "the first task has handled some")
            first.kill()
            first.wait(10)
            second = task(keeper, 1)
            second.start()
            wait_until(lambda: len(seen[1]) > 30, "the second has handled some")
            second.stop()
            third = task(keeper, 2)
            third.start()
            wait_until(lambda: len(set().union(*map(set, seen))) == 60 and 59 in seen[2], "the third has handled all")
            third.stop()
    assert len(set(seen[0]) & set(seen[1])) > 10, "most of the first was not committed"
    traces = read_traces(spark, tmp_path / "traces")
    claimed = traces.events.where("kind = 'claimed'").collect()
    assert len({row["owner"] for row in claimed}) == 3
    assert len({row["epoch"] for row in claimed}) == 1
    verdict = audit(spark, traces)
    assert verdict.ok, str(verdict)
    assert verdict.total("duplicates") > 5
    cut = traces.events.where(f"owner != '{keeper.name}' or kind not in ('ended', 'closed')")
    assert audit(spark, Traces(traces.runs, cut)).ok, "a claim that was given back has not ended the lease"
    verdict = audit(spark, Traces(traces.runs, traces.events.where("kind != 'claimed'")))
    assert ViolationKind.OUT_OF_ORDER in verdict.kinds(), "without the claims it would not be"


# Messages that need no closer look


def _event(
    owner: str, kind: str, at_ns: int, until_ns: int, epoch: int, offset: int = -1, **more: Any
) -> tuple[Any, ...]:
    sets: tuple[list[int], ...] = (more.get("finished", []), [], [])
    about = owner, at_ns, kind, at_ns, until_ns, 0, epoch, offset
    return "orders", "billing", *about, None, more.get("why", ""), *sets, more.get("is_claim", False), False


def _ran(owner: str, epoch: int, offset: int, start_ns: int, end_ns: int) -> tuple[Any, ...]:
    return "orders", "billing", 0, offset, 1, 7, owner, epoch, 1, 0, start_ns, end_ns, start_ns


HANDED_OVER = [
    _event("ada", "opened", 0, 0, 0, why="key"),
    _event("ada", "granted", 0, 1, 1, 0),
    _event("ada", "committed", 30, 31, 1, 1),
    _event("ada", "ended", 35, 35, 1, why="released"),
    _event("drain", "opened", 33, 33, 0, why="key"),
    _event("drain", "granted", 34, 40, 2, 1),
    _event("task", "opened", 41, 41, 0, why="key"),
    _event("task", "claimed", 41, 42, 2, 1),
    _event("task", "committed", 70, 71, 2, 1, finished=[1], is_claim=True),
    _event("task", "closed", 72, 72, 0),
    _event("drain", "ended", 80, 80, 2, why="released"),
    _event("drain", "closed", 81, 81, 0),
    _event("ada", "granted", 36, 82, 3, 3),
    _event("ada", "committed", 96, 97, 3, 4),
    _event("ada", "closed", 99, 99, 0),
]
RUNS_HANDED_OVER = [_ran("ada", 1, 0, 10, 20), _ran("task", 2, 1, 50, 60), _ran("task", 2, 2, 60, 65)]


@pytest.mark.parametrize(
    ("last_runs", "odd", "kinds"),
    [
        ([_ran("ada", 3, 3, 90, 95)], 0, set()),
        ([_ran("ada", 3, 3, 90, 98)], 4, {ViolationKind.PREMATURE_COMMIT}),  # its commit came before its end
        ([_ran("ada", 3, 3, 64, 95)], 4, {ViolationKind.SKIPPED, ViolationKind.STALE_START}),
        ([_ran("task", 2, 3, 90, 95)], 4, {ViolationKind.STALE_START, ViolationKind.PREMATURE_COMMIT}),
    ],
)
def test_messages_that_a_later_lease_counts_as_finished_need_no_closer_look(
    spark: SparkSession, last_runs: list[tuple[Any, ...]], odd: int, kinds: set[ViolationKind]
) -> None:
    """A task of a drain names what it finished, and the lease after the drain passes it."""
    runs = spark.createDataFrame([*RUNS_HANDED_OVER, *last_runs], RUN_SCHEMA)
    events = spark.createDataFrame(HANDED_OVER, EVENT_SCHEMA)
    judged = looked_at(runs.withColumn("term_ns", lit(0)), {}, Terms(events, None, 0), complete=False)
    assert judged.where("is_odd").count() == odd
    verdict = audit(spark, Traces(runs, events), clock_skew_s=0.0)
    assert verdict.kinds() == kinds
    assert verdict.total("started") == 4


def test_places_have_the_same_number_on_the_driver_and_on_spark(spark: SparkSession) -> None:
    places = [Place("orders", "billing", 0), Place("bücher", "", 1 << 20), Place("orders", "billing", -1)]
    rows = spark.createDataFrame(places, "subject string, group string, partition int")
    assert [row[0] for row in rows.select(place_number()).collect()] == [place.number for place in places]


@pytest.mark.timeout(400)
def test_a_group_with_tags_is_judged_by_what_it_wants(spark: SparkSession, tmp_path: Path) -> None:
    """B7, S5: what it passes by is neither lost nor skipped, and must not have been handled."""
    folder, traces = tmp_path / "data", tmp_path / "traces"
    with connect(folder, flush="os") as mq:
        mq.create_subject("orders", partitions=1)
        with mq.producer() as producer:
            for number in range(60):
                producer.send("orders", b"x", key=b"k%d" % (number % 5), tags=("paid",) if number % 3 else ("late",))
        settings = ConsumerSettings(trace=str(traces), commit_interval_s=0.02, tags="paid")
        with mq.consumer("orders", "billing", lambda message, context: None, order=Order.KEY, settings=settings):
            wait_until(lambda: bool(mq.groups()) and mq.group("orders", "billing").describe().lag == 0, "done")
    verdict = audit(spark, traces, log=folder, subject="orders", tags="paid", complete=True)
    assert verdict.ok, str(verdict)
    assert verdict.groups[0].finished == 40
    others = audit(spark, traces, log=folder, subject="orders", tags="late", complete=True)
    assert ViolationKind.UNEXPECTED in others.kinds()
    untold = spark.createDataFrame([(0, 1, b"k")], "partition int, offset bigint, key binary")
    with pytest.raises(InvalidInput, match="has no column tags"):
        audit(spark, traces, log=untold, tags="paid")


def test_wrong_use_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="trace folder"):
        audit(spark, tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="no trace folder"):
        audit(spark, [])
    with pytest.raises(InvalidInput, match="order='lane'"):
        audit(spark, tmp_path, order="lane")
    with pytest.raises(InvalidInput, match="clock_skew_s"):
        audit(spark, tmp_path, clock_skew_s=-1)
    with pytest.raises(InvalidInput, match="needs the subject"):
        audit(spark, tmp_path, log=tmp_path)
    with pytest.raises(InvalidInput, match="has no column key"):
        audit(spark, tmp_path, log=spark.createDataFrame([(0, 1)], "partition int, offset bigint"))


def test_an_empty_folder_is_no_proof(spark: SparkSession, tmp_path: Path) -> None:
    verdict = audit(spark, tmp_path)
    assert verdict.ok
    assert verdict.groups == ()
    assert str(verdict).startswith("order kept: 0 started")


def test_a_history_becomes_rows_by_the_place_of_its_events() -> None:
    events: list[Event] = [
        SendAcknowledged("orders", 0, 5, b"k", "m"),
        HandlerStart("orders", "billing", 0, 5, b"k", "me", 1),
    ]
    rows = trace_rows(History(events), order="key")
    assert rows.sent == [("orders", 0, 5, b"k", "m")]
    (run,) = rows.runs
    assert (run[3], run[9], run[10], run[11]) == (5, None, 1000, None)
