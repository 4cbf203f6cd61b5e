"""The rules of an audit about a lane: every message after those before it, every run after the one before.

A row is a run, or a message that never ran. Windows over the lane add the columns that the rules compare with:

behind          of the earlier messages, the one that was finished last: done_ns, done_by, earlier (its offset)
last            the run before, of the same epoch and term
open            the latest end of all runs before, of the same epoch and term; `open_row` is that run
left            runs that went on after their lease was lost: epoch, end_ns
newer_term_ns   the highest term of the runs before, of the same epoch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from inturn.consumer.trace import EXCEPTION, FAILED, ROLLBACK
from inturn.model.violation import ViolationKind
from inturn.spark.audit.evidence import (
    LANE,
    NEVER,
    PLACE,
    RUN_FIELDS,
    Rules,
    is_true,
    nulls,
    run_evidence,
    skew_between,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from inturn.spark.audit.leases import Terms

COUNTS = ("started", "finished", "duplicates", "overlaps", "parked", "skipped", "unproven")
_BEFORE = Window.unboundedPreceding, -1
_LEFT = "array<struct<epoch: bigint, end_ns: bigint>>"


def judge_lanes(messages: DataFrame, rules: Rules, terms: Terms) -> DataFrame:
    """One row per run, or per message that never ran: `COUNTS`, and all violations found there."""
    rows = _runs_in_order(messages, rules, terms)
    is_first = F.coalesce(F.col("number") == 0, F.lit(True))  # of the rows of its message
    of_message = F.when(is_first, F.col("violations")).otherwise(F.slice("violations", 1, 0))
    has_run = F.col("run").isNotNull()
    counts = {
        "started": F.when(has_run, 1).otherwise(0),
        "finished": F.when(is_first, F.col("finish_count")).otherwise(0),
        "duplicates": F.when(is_first, F.greatest(F.col("finish_count") - 1, F.lit(0))).otherwise(0),
        "overlaps": F.when(has_run, F.size(_overlapping())).otherwise(0),
        "parked": (is_first & F.col("waits_in_lot")).cast("int"),
        "skipped": (is_first & F.col("is_skipped")).cast("int"),
        "unproven": (is_first & is_true(F.col("unproven"))).cast("int"),
    }
    found = F.array_compact(F.array(*_violations(rules)))
    return rows.select(
        *PLACE, *(counts[name].alias(name) for name in COUNTS), F.concat(of_message, found).alias("violations")
    )


def _runs_in_order(messages: DataFrame, rules: Rules, terms: Terms) -> DataFrame:
    """Every run, with the columns of the windows."""
    run = F.col("run")
    by_offset = Window.partitionBy(*LANE).orderBy("offset").rowsBetween(*_BEFORE)
    behind = F.max(F.struct("done_ns", "done_by", F.col("offset").alias("earlier"))).over(by_offset)
    rows = (
        messages.repartition(*LANE)
        .withColumn("behind", behind)
        .select("*", F.posexplode_outer("runs").alias("number", "run"))
        .drop("runs")
        .withColumns({name: run[name] for name in ("epoch", "term_ns", "start_ns", "seq")})
    )
    told = RUN_FIELDS if rules.tells else ("offset", "result")
    row = F.struct(*(run[name].alias(name) for name in told), F.col("given_up_ns"))
    end_ns = F.when(run.isNotNull(), F.coalesce(run["end_ns"], F.lit(NEVER)))
    in_term = Window.partitionBy(*LANE, "epoch", "term_ns").orderBy("start_ns", "seq")
    before = in_term.rowsBetween(*_BEFORE)
    rows = rows.withColumn("last", F.lag(row).over(in_term)).withColumn("open", F.max(end_ns).over(before))
    rows = rows.withColumn("open_row", F.max_by(row, end_ns).over(before) if rules.tells else F.lit(None))
    left: Column = F.array().cast(_LEFT)
    if terms.has_hand_overs:
        in_lane = Window.partitionBy(*LANE).orderBy("start_ns", "seq").rowsBetween(*_BEFORE)
        one = F.struct(run["epoch"].alias("epoch"), run["end_ns"].alias("end_ns"))
        left = F.collect_list(F.when(run["left_over"], one)).over(in_lane)
    newer_term: Column = F.lit(None).cast("long")
    if terms.claimed:
        in_epoch = Window.partitionBy(*LANE, "epoch").orderBy("start_ns", "seq").rowsBetween(*_BEFORE)
        newer_term = F.max("term_ns").over(in_epoch)
    return rows.withColumn("left", left).withColumn("newer_term_ns", newer_term)


def _violations(rules: Rules) -> list[Column]:
    run, last = F.col("run"), _last()
    evidence, start_ns = run_evidence(run), run["start_ns"]
    is_skipped = _is_skipped(rules)
    pairs = {
        ViolationKind.OUT_OF_ORDER: (_is_out_of_order(), run_evidence(last)),
        ViolationKind.OVERLAP: (F.col("open") > start_ns, run_evidence(F.col("open_row"))),
    }
    return [
        rules.found(ViolationKind.STALE_START, _has_lost_claim(), F.array(evidence), start_ns),
        *(
            rules.found(kind, F.col("lane_kind").isNotNull() & is_broken, F.array(other, evidence), start_ns)
            for kind, (is_broken, other) in pairs.items()
        ),
        rules.found(ViolationKind.SKIPPED, is_skipped, F.array(_behind_evidence(), evidence), start_ns),
        rules.found(ViolationKind.SKIPPED, ~is_skipped & _went_on(), F.array(run_evidence(last), evidence), start_ns),
    ]


def _last() -> Column:
    return F.when(F.col("run").isNotNull(), F.col("last"))


def _last_failed() -> Column:
    return _last()["result"].isin(FAILED, EXCEPTION, ROLLBACK)


def _has_lost_claim() -> Column:
    """A member that claims slots again has taken them over: the member of the older term starts no more."""
    return (F.col("term_ns") > 0) & (F.col("newer_term_ns") > F.col("term_ns"))


def _is_out_of_order() -> Column:
    """Not after the run before, unless that was rolled back, or was a failed attempt of the same message."""
    run, last = F.col("run"), _last()
    may_repeat = (last["result"] == ROLLBACK) | ((last["offset"] == run["offset"]) & _last_failed())
    return last.isNotNull() & (run["offset"] <= last["offset"]) & ~is_true(may_repeat)


def _is_skipped(rules: Rules) -> Column:
    """Started before an earlier message of the lane was finished."""
    run, behind = F.col("run"), F.col("behind")
    skew = skew_between(behind["done_by"] != run["owner"], rules.skew_ns)
    is_early = run["start_ns"] + skew < behind["done_ns"]
    return run.isNotNull() & behind["done_ns"].isNotNull() & is_early


def _went_on() -> Column:
    """The run before failed, its message was not given up, and the lane went on with a later one."""
    run, last = F.col("run"), _last()
    is_later = last.isNotNull() & (last["offset"] < run["offset"])
    return is_later & is_true(_last_failed()) & ~is_true(last["given_up_ns"] <= run["start_ns"])


def _behind_evidence() -> Column:
    behind = F.col("behind")
    return F.struct(
        F.lit("unfinished").alias("what"),
        F.col("partition"),
        behind["earlier"].alias("offset"),
        *nulls("epoch bigint, owner string, attempt int, result int, start_ns bigint"),
        F.when(behind["done_ns"] < NEVER, behind["done_ns"]).alias("end_ns"),
    )


def _overlapping() -> Column:
    """Runs of an older epoch that went on after their lease was lost, and were not over when the run started."""
    run = F.col("run")
    return F.filter(
        "left",
        lambda one: (one["epoch"] < run["epoch"]) & (F.coalesce(one["end_ns"], F.lit(NEVER)) > run["start_ns"]),
    )
