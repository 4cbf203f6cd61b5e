"""The rules of an audit about one message: its runs, the claims that it is finished, the parking lot, the log.

A row has all that is known of a message, as lists: `runs`, `claims`, `given_up`, `parks`, `unparks`, `logs`, `sents`;
`step` is the claim that was the first to pass its offset. Lists of runs and of claims are sorted by time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from inturn.consumer.trace import ALONE, MOVED, OF_KEY, OF_PARTITION, SUCCESS
from inturn.model.violation import ViolationKind
from inturn.spark.audit.evidence import (
    MESSAGE,
    NEVER,
    Rules,
    attempts_lost,
    claim_evidence,
    does_not_pass_through,
    is_true,
    log_hash,
    place_evidence,
    run_evidence,
    skew_between,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def judge_messages(rows: DataFrame, rules: Rules) -> DataFrame:
    """One row per message, with its lane, its violations, and the columns that the rules of lanes need.

    Nearly all messages ran once, and a commit of the same epoch came later. The rest is asked only of odd messages.
    """
    rows = rows.withColumn("first", F.get("runs", F.lit(0)))
    rows = rows.withColumn("is_odd", ~is_true(_is_plain(rules)))
    rows = rows.select("*", *(_odd(column).alias(name) for name, column in _known().items()))
    # A column may use the columns before.
    for name, column in (
        ("is_parked", _is_parked()),
        ("counted", F.when(F.col("is_parked"), _finishes_after_park()).otherwise(F.col("finishes"))),
        ("done", _done()),
        ("is_due", F.col("offset") >= F.col("floor")),
        ("is_claimed", F.col("done").isNotNull() & F.col("is_due")),
        ("is_never", (F.size("finishes") == 0) & F.col("given_up_ns").isNull()),
        ("is_premature", F.col("is_claimed") & ~_was_known(rules)),
        ("unproven", F.col("is_premature") & F.col("done.cut") & F.col("is_never")),
        ("stays", F.col("is_parked") & F.col("unpark").isNull()),
    ):
        rows = rows.withColumn(name, _odd(column))
    rows = rows.withColumn("lane_kind", _lane_kind())
    found = [*_violations(rules), *_identity_violations(rules)]
    none = F.slice(F.array(rules.found(ViolationKind.LOST, F.lit(False), F.array(claim_evidence(F.col("done"))))), 1, 0)
    return rows.select(
        *MESSAGE,
        "lane_kind",
        F.coalesce(_lane(), F.lit(0)).alias("lane"),
        "runs",
        "given_up_ns",
        F.when(F.col("offset") >= F.col("floor"), F.coalesce(_odd(_done_ns()), F.col("first.end_ns"))).alias("done_ns"),
        F.when(F.col("is_odd"), _done_by()).otherwise(F.col("first.owner")).alias("done_by"),
        F.when(F.col("is_odd"), F.size("finishes")).otherwise(1).alias("finish_count"),
        is_true(F.col("stays") & F.col("is_never")).alias("waits_in_lot"),
        is_true(_odd(F.exists("given_up", lambda one: one["by_name"]))).alias("is_skipped"),
        "unproven",
        F.when(F.col("is_odd"), F.array_compact(F.array(*found))).otherwise(none).alias("violations"),
    )


def _odd(column: Column) -> Column:
    return F.when(F.col("is_odd"), column)


def _is_plain(rules: Rules) -> Column:
    """Ran once and was finished, as the member knew that committed it; and no other event names the message."""
    first, step = F.col("first"), F.col("step")
    in_time = ~step["by_grant"] & (first["epoch"] == step["epoch"]) & (first["end_ns"] <= step["at_ns"])
    plain = (F.size("runs") == 1) & (first["result"] == SUCCESS) & ~first["stale"] & F.col("rare").isNull()
    plain &= step.isNull() | in_time
    for name, is_given in (("logs", rules.has_log), ("sents", rules.has_sent)):
        if is_given:
            same = F.get(name, F.lit(0))["key_hash"].eqNullSafe(first["key_hash"]) | first["key_hash"].isNull()
            plain &= (F.size(name) == 1) & same
    if rules.has_log and rules.has_sent:
        plain &= F.get("logs", F.lit(0)).eqNullSafe(F.get("sents", F.lit(0)))
    return plain


def _known() -> dict[str, Column]:
    """Of an odd message: the runs that finished it, the first claim, and its way through the parking lot."""
    return {
        "finishes": F.filter("runs", lambda run: run["result"].isin(SUCCESS, MOVED)),
        "said": _first_of(F.concat("claims", F.array("step"))),
        "given_up_ns": F.array_min(F.col("given_up.at_ns")),
        "park": F.get(F.filter("parks", does_not_pass_through), F.lit(0)),
        "unpark": F.get("unparks", F.lit(0)),
    }


def _first_of(claims: Column) -> Column:
    return F.array_min(F.filter(claims, lambda one: one.isNotNull()))


def _is_parked() -> Column:
    is_before = F.col("said").isNull() | (F.col("said.until_ns") >= F.col("park.until_ns"))
    return F.col("park").isNotNull() & is_before


def _finishes_after_park() -> Column:
    """A member that parks a message does not know its runs of older epochs, and runs the message again."""
    return F.filter(
        "finishes", lambda run: (run["epoch"] >= F.col("park.epoch")) | (run["end_ns"] > F.col("park.until_ns"))
    )


def _done() -> Column:
    """The claim that the message is finished. A parked message is finished when it leaves the parking lot."""
    return F.when(F.col("is_parked"), F.col("unpark")).otherwise(_first_of(F.array("said", "unpark")))


def _was_known(rules: Rules) -> Column:
    """The member that claimed the message as finished could know of a run that finished it, or gave it up before."""
    done = F.col("done")

    def known_to_committer(run: Column) -> Column:
        in_time = run["end_ns"] <= done["at_ns"] + skew_between(run["owner"] != done["owner"], rules.skew_ns)
        is_own = (run["epoch"] == done["epoch"]) | (run["owner"] == done["owner"])
        return in_time & (is_own | (run["end_ns"] <= done["granted_ns"] + rules.skew_ns))

    known = F.exists(
        "counted",
        lambda run: F.when(done["by_grant"], run["epoch"] < done["epoch"]).otherwise(known_to_committer(run)),
    )
    return known | is_true(F.col("given_up_ns") <= done["until_ns"])


def _violations(rules: Rules) -> list[Column]:
    done = F.col("done")
    stale = F.filter("runs", lambda run: run["stale"])
    repeated = F.filter(
        "runs",
        lambda run: (
            ~run["stale"]
            & (run["start_ns"] > done["until_ns"] + skew_between(run["owner"] != done["owner"], rules.skew_ns))
        ),
    )
    is_stored = (F.size("logs") + F.size("sents")) > 0
    must_be_done = F.lit(True) if rules.complete else F.col("said").isNotNull()
    is_lost = is_stored & F.col("is_due") & F.col("is_never") & ~F.col("stays") & ~F.col("unproven") & must_be_done
    lost_attempts = attempts_lost()
    by_claim = F.array(claim_evidence(done))
    return [
        rules.found(ViolationKind.LOST, is_lost, by_claim),
        rules.found(ViolationKind.STALE_START, F.size(stale) > 0, F.transform(stale, run_evidence)),
        rules.found(
            ViolationKind.REPEATED,
            F.col("is_claimed") & (F.size(repeated) > 0),
            F.concat(by_claim, F.transform(repeated, run_evidence)),
        ),
        rules.found(
            ViolationKind.PREMATURE_COMMIT,
            F.col("is_premature") & ~F.col("unproven"),
            F.concat(by_claim, F.transform("runs", run_evidence)),
        ),
        rules.found(ViolationKind.ATTEMPT_LOST, F.size(lost_attempts) > 0, F.transform(lost_attempts, run_evidence)),
    ]


def _identity_violations(rules: Rules) -> list[Column]:
    """The stored message, the acknowledged one, and the one that ran must be the same."""
    found = []
    first_log, first_sent = F.get("logs", F.lit(0)), F.get("sents", F.lit(0))
    if rules.has_sent:
        is_twice = F.size(F.array_distinct("sents")) > 1
        found.append(rules.found(ViolationKind.UNEXPECTED, is_twice, F.array(place_evidence("acknowledged"))))
    if rules.has_sent and rules.has_log:
        other = is_true(first_log["message_id"] != first_sent["message_id"])
        is_gone = (F.size("sents") > 0) & ((F.size("logs") == 0) | other)
        evidence = F.array(place_evidence("acknowledged, but not in the log"))
        found.append(rules.found(ViolationKind.LOST, is_gone, evidence))
    if rules.has_log or rules.has_sent:
        known = F.coalesce(first_sent, first_log) if rules.has_sent else first_log
        differs = F.filter(
            "runs", lambda run: run["key_hash"].isNotNull() & ~run["key_hash"].eqNullSafe(known["key_hash"])
        )
        is_other = known.isNotNull() & (F.size(differs) > 0)
        found.append(rules.found(ViolationKind.UNEXPECTED, is_other, F.transform(differs, run_evidence)))
    if rules.has_log and rules.complete:
        is_nowhere = (F.size("runs") > 0) & ((F.size("logs") + F.size("sents")) == 0)
        found.append(rules.found(ViolationKind.UNEXPECTED, is_nowhere, F.transform("runs", run_evidence)))
    return found


def _lane_kind() -> Column:
    """As the first run recorded it; of a message that never ran, by the order of its group and its key in the log."""
    by_key = F.when(log_hash().isNotNull(), OF_KEY).otherwise(ALONE)
    by_log = F.when(F.col("order") == "partition", OF_PARTITION).otherwise(by_key)
    return F.coalesce(F.col("first.lane_kind"), F.when(F.col("order").isNotNull(), by_log), F.lit(ALONE))


def _lane() -> Column:
    hashed = F.coalesce(log_hash(), F.col("first.key_hash"))
    return F.when(F.col("lane_kind") == OF_KEY, hashed).when(F.col("lane_kind") == ALONE, F.col("offset"))


def _done_ns() -> Column:
    """When the message was finished or given up; `NEVER` if it was not."""
    unproven_ns = F.when(F.col("unproven"), F.col("done.until_ns"))
    first_ns = F.least(F.array_min(F.col("finishes.end_ns")), F.col("given_up_ns"), unproven_ns)
    return F.coalesce(first_ns, F.lit(NEVER))


def _done_by() -> Column:
    return F.array_min(F.transform("finishes", lambda run: F.struct(run["end_ns"], run["owner"])))["owner"]
