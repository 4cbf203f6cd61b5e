"""The audit: proves from traces, on Spark, that the order was kept. For any number of rows.

    verdict = audit(spark, "./traces", log=spark.read.format("inturn")…)
    verdict.raise_if_bad()

It judges by the rules of the order checker (`inturn.testing.check`), but not one event after the other. What is plainly
in order, which is nearly all, shows in a few numbers of each message (`fast_path`). Then two shuffles:
by message, to compare all that is known of each (runs, commits that cover it, the parking lot, the log); then by lane,
to compare each message with those before it, and each run with the one before. Leases, and how far commits came, are
small and are sent to all. Only counts and the first violations come back to the driver.

Times of one consumer are of one clock and are compared exactly. Times of two are compared with `clock_skew_s` between
them: what lies closer together is taken as in order. Epochs, not times, say who came after whom.

What is small is in `leases`, what a violation is told with in `evidence`. The rules about
messages and lanes are here together, because they share their columns and are read best beside each other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from inturn.consumer.trace import ALONE, EXCEPTION, FAILED, MOVED, OF_KEY, OF_PARTITION, ROLLBACK, SUCCESS
from inturn.model.errors import InvalidInput
from inturn.model.message import TagFilter, tag_filter, tags_text
from inturn.model.violation import ViolationKind
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings
from inturn.spark.audit.evidence import (
    CLAIM,
    GROUP,
    LANE,
    MESSAGE,
    NEVER,
    PLACE,
    RARE,
    RUN_FIELDS,
    STORED,
    attempts_lost,
    claim_evidence,
    does_not_pass_through,
    list_or_none,
    log_hash,
    nulls,
    number_of,
    place_evidence,
    run_evidence,
    skew_between,
    struct_of,
)
from inturn.spark.audit.fast_path import Leases, Steps, judged, looked_at, place_number
from inturn.spark.audit.leases import BUCKET, Terms
from inturn.spark.audit.traces import TracePaths, Traces, read_traces
from inturn.spark.audit.verdict import AuditVerdict, GroupAudit, violation_of
from inturn.spark.source.options import credential_options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

VIOLATIONS_MAX = 100
CLOCK_SKEW_S = 0.05
BROADCAST_MAX = 200_000


def audit(
    spark: SparkSession,
    traces: TracePaths | Traces,
    *,
    log: DataFrame | str | os.PathLike[str] | None = None,
    sent: DataFrame | None = None,
    subject: str | None = None,
    group: str | None = None,
    order: str | None = None,
    tags: str | None = None,
    complete: bool = False,
    clock_skew_s: float = CLOCK_SKEW_S,
    violations_max: int = VIOLATIONS_MAX,
    token: str | None = None,
    tls: TlsSettings | None = None,
) -> AuditVerdict:
    """Judge traces; `subject` and `group` restrict it to these. All members of a group must have recorded.

    log            what is stored: partition, offset, key, and where there are several also subject; message_id if it is
                   to be compared with that of `sent`. Or a folder, or an address, together with `subject`. With it,
                   nothing that is stored can be left out unnoticed.
    sent           what producers were told is stored, with the same columns.
    order          "partition" or "key": a lane is that, whatever the consumers said. For messages that never ran.
    tags           the expression of the group, if it has one: other messages of `log` and `sent`, which need the column
                   tags then, must not have been handled.
    complete       all work was done when the traces ended: whatever is stored has to be finished.
    clock_skew_s   how far the clocks of two consumers may be apart.
    token, tls     as `connect` takes them, if `log` is the address of a server.
    """
    if order not in (None, "partition", "key"):
        raise InvalidInput(f"audit(order={order!r}): use 'partition' or 'key', or leave it out")
    if not clock_skew_s >= 0:
        raise InvalidInput(f"audit(clock_skew_s={clock_skew_s!r}): it must be 0 or more")
    if isinstance(log, str | os.PathLike):
        log = _log_at(spark, os.fspath(log), subject, Credentials(token, tls))
    wanted_tags = tag_filter(tags_text(tags))
    if wanted_tags is not None:
        log, sent = _tagged(log, "log", wanted_tags), _tagged(sent, "sent", wanted_tags)
    rows = traces if isinstance(traces, Traces) else read_traces(spark, traces)
    for name, wanted in (("subject", subject), ("group", group)):
        if wanted is not None:
            rows = Traces(rows.runs.where(F.col(name) == wanted), rows.events.where(F.col(name) == wanted))
    events = rows.events.persist()
    try:
        return _Audit(rows.runs, events, log, sent, order, complete, round(clock_skew_s * 1e9)).run(violations_max)
    finally:
        events.unpersist()


def _log_at(spark: SparkSession, target: str, subject: str | None, credentials: Credentials) -> DataFrame:
    if subject is None:
        raise InvalidInput(f"audit(log={target!r}) needs the subject, too: audit(…, subject=…)")
    reader = spark.read.format("inturn").option("subject", subject).options(**credential_options(credentials))
    return reader.load(target).select("partition", "offset", "key", "tags")


def _tagged(rows: DataFrame | None, what: str, tags: TagFilter) -> DataFrame | None:
    if rows is not None and "tags" not in rows.columns:
        raise InvalidInput(f"audit({what}=…, tags=…) has no column tags; it has {', '.join(rows.columns)}")
    wanted = F.array(*(F.lit(tag) for tag in sorted(tags.wanted)))
    return None if rows is None else rows.where(F.arrays_overlap("tags", wanted))


@dataclass(frozen=True, slots=True)
class _PlainCounts:
    by_group: Mapping[tuple[str, str], int]
    has_odd: bool


class _Audit:
    def __init__(
        self,
        runs: DataFrame,
        events: DataFrame,
        log: DataFrame | None,
        sent: DataFrame | None,
        order: str | None,
        complete: bool,
        skew_ns: int,
    ) -> None:
        self.terms = Terms(events, order, skew_ns)
        self.order, self.complete, self.skew_ns = order, complete, skew_ns
        self.has_log, self.has_sent = log is not None, sent is not None
        self.tells = False
        runs = self.terms.since_reset(runs, "start_ns")
        self.told_runs = self._with_terms(runs)
        self.runs = self._judged_runs(self.told_runs)
        self.log = self._stored(log, "log")
        self.sent = self._stored(sent, "sent")
        self.odd: DataFrame | None = None  # messages that need a closer look; None: all of them

    def run(self, violations_max: int) -> AuditVerdict:
        small = functools.reduce(lambda one, other: one.unionByName(other), self.terms.violations()).localCheckpoint()
        numbers = self._looked_at().persist()
        try:
            return self._judge(self._plain(numbers), small, violations_max)
        finally:
            numbers.unpersist()

    def _judge(self, plain: _PlainCounts, small: DataFrame, violations_max: int) -> AuditVerdict:
        messages = self._lanes(self._messages()) if plain.has_odd else None
        counts = self._count(messages, small, plain.by_group)
        shown: list[Any] = []
        if messages is None and any(group.broken for group in counts):
            shown = small.orderBy("at_ns", *PLACE, "kind", "offset").limit(violations_max).collect()
            return AuditVerdict(tuple(counts), tuple(map(violation_of, shown)))
        if any(group.broken for group in counts) and violations_max:
            self.tells = True
            every = self._lanes(self._messages()).select(*PLACE, F.explode("violations").alias("one"))
            every = every.select(*PLACE, "one.*").unionByName(small)
            shown = every.orderBy("at_ns", *PLACE, "kind", "offset").limit(violations_max).collect()
        return AuditVerdict(tuple(counts), tuple(map(violation_of, shown)))

    # What needs no closer look

    def _looked_at(self) -> DataFrame:
        """Every message, by a few numbers: see `inturn.spark.audit.fast_path`."""
        place = place_number().alias("place")
        leases = self.terms.leases.select(place, "epoch", "granted_ns", F.coalesce("next_granted_ns", F.lit(NEVER)))
        granted = {(row[0], row[1]): (row[2], row[3]) for row in leases.collect()}
        steps = Steps(self._steps_by_place())
        runs = looked_at(self.told_runs, Leases(granted, self.skew_ns), steps)
        stored = {name: rows for name, rows in (("log", self.log), ("sent", self.sent)) if rows is not None}
        claims = odd = ends = None
        if self.terms.has_rare:
            claims = self.terms.claims.where(F.size("finished") > 0).select(
                place, F.explode("finished").alias("offset"), "epoch", "at_ns", "by_grant"
            )
            lots = [
                self.terms.commits.select(*GROUP, F.explode(name).alias("in_lot")).select(
                    *GROUP, "in_lot.partition", "in_lot.offset"
                )
                for name in ("parked", "unparked")
            ]
            told = self.terms.of_kind("skipped", "moved").select(*MESSAGE)
            odd = told.unionByName(lots[0]).unionByName(lots[1]).select(place, "offset")
        if stored and not self.complete:
            known = list(steps.ends().items())
            ends = self.terms.leases.sparkSession.createDataFrame(known, "place bigint, offset bigint")
        return judged(runs, stored, claims, odd, complete=self.complete, ends=ends)

    def _steps_by_place(self) -> dict[int, Any]:
        """As `_steps`, but here: one array per place, of what `Steps` says."""
        import numpy as np

        claims = (
            self.terms.claims.where(~F.col("is_claim"))
            .join(F.broadcast(self.terms.floors), [*PLACE], "left")
            .select(
                place_number().alias("place"),
                *("offset", "epoch", "at_ns", "until_ns"),
                F.col("by_grant").cast("long").alias("by_grant"),
                F.coalesce("floor", F.lit(0)).alias("floor"),
            )
            .toArrow()
        )
        names = ("place", "until_ns", "offset", "epoch", "at_ns", "by_grant", "floor")
        rows = np.stack([claims.column(name).to_numpy() for name in names]) if claims.num_rows else np.empty((7, 0))
        found = {}
        for place in np.unique(rows[0]):
            _, until_ns, offset, epoch, at_ns, by_grant, floor = rows[:, rows[0] == place]
            order = np.lexsort((offset, until_ns))
            offset = offset[order]
            reached = np.maximum(np.maximum.accumulate(np.concatenate([floor[:1], offset[:-1]])), floor[0])
            steps = np.stack([reached, offset, epoch[order], at_ns[order], by_grant[order]])
            found[int(place)] = steps[:, offset > reached]
        return {place: steps for place, steps in found.items() if steps.shape[1]}

    def _plain(self, numbers: DataFrame) -> _PlainCounts:
        """Counts the plain ones, and restricts what follows to the others; to none, if that is easier."""
        odd_count, torn_count = F.sum(F.col("is_odd").cast("int")), F.sum(F.col("is_torn").cast("int"))
        counts = F.count("*").alias("count"), odd_count.alias("odd"), torn_count.alias("torn")
        rows = numbers.groupBy("place").agg(*counts, F.sum(F.when(~F.col("is_odd"), F.col("run_count"))).alias("run"))
        found = rows.collect()
        groups: dict[int, tuple[str, str]] = {
            row["place"]: (row["subject"], row["group"])
            for row in self.terms.events.select(*GROUP, place_number().alias("place")).distinct().collect()
        }
        every, odd = (sum(row[name] for row in found) for name in ("count", "odd"))
        is_unclear = any(row["torn"] or (row["run"] and row["place"] not in groups) for row in found)
        if is_unclear or odd * 2 > every:
            return _PlainCounts({}, True)
        by_group: dict[tuple[str, str], int] = {}
        for row in found:
            if row["run"]:
                name = groups[row["place"]]
                by_group[name] = by_group.get(name, 0) + row["run"]
        if odd:
            chosen = numbers.where("is_odd").select("place", "offset")
            self.odd = F.broadcast(chosen) if odd <= BROADCAST_MAX else chosen
        return _PlainCounts(by_group, odd > 0)

    def _odd_only(self, rows: DataFrame) -> DataFrame:
        if self.odd is None:
            return rows
        return rows.withColumn("place", place_number()).join(self.odd, ["place", "offset"], "left_semi").drop("place")

    # What is known of each message

    def _with_terms(self, runs: DataFrame) -> DataFrame:
        """Runs, with the lane that they count to, and since when their claim was in force."""
        lane_kind, term = F.col("lane_kind"), F.lit(0).cast("long")
        if self.order == "partition":
            lane_kind = F.lit(OF_PARTITION)
        elif self.order == "key":
            lane_kind = F.when(F.col("key_hash").isNotNull(), OF_KEY).otherwise(ALONE)
        if self.terms.has_claims:
            claims = self.terms.of_kind("claimed").groupBy(*PLACE, "epoch", "owner")
            times = claims.agg(F.collect_list("until_ns").alias("claimed_ns"))
            runs = runs.join(F.broadcast(times), [*PLACE, "epoch", "owner"], "left")
            before_start = F.filter("claimed_ns", lambda at: at <= F.col("start_ns"))
            term = F.coalesce(F.array_max(before_start), F.lit(0))
        return runs.withColumn("lane_kind", lane_kind).withColumn("term_ns", term)

    def _judged_runs(self, runs: DataFrame) -> DataFrame:
        """Runs, with what the leases say about each."""
        leases = self.terms.leases.select(*PLACE, "epoch", F.col("granted_ns"), "next_granted_ns")
        partitions = self.terms.leases.select(*PLACE).distinct().withColumn("has_grants", F.lit(True))
        joined = runs.join(F.broadcast(leases), [*PLACE, "epoch"], "left").join(
            F.broadcast(partitions), [*PLACE], "left"
        )
        start, skew = F.col("start_ns"), self.skew_ns
        is_stale = F.col("has_grants").isNotNull() & (
            F.col("granted_ns").isNull()
            | (F.col("granted_ns") > start + skew)
            | F.coalesce(F.col("next_granted_ns") + skew < start, F.lit(False))
        )
        is_left_over = F.coalesce(F.col("end_ns"), F.lit(NEVER)) > F.col("next_granted_ns")
        more = (
            is_stale.alias("stale"),
            F.coalesce(is_left_over, F.lit(False)).alias("left_over"),
            *("key_hash", "lane_kind", "term_ns"),
        )
        return joined.select(*MESSAGE, F.struct(*RUN_FIELDS, *more).alias("run"))

    def _stored(self, rows: DataFrame | None, what: str) -> DataFrame | None:
        """Messages of the log, or those that were acknowledged, once for every group."""
        if rows is None:
            return None
        missing = {"partition", "offset", "key"} - set(rows.columns)
        if missing:
            raise InvalidInput(
                f"audit({what}=…) has no column {', '.join(sorted(missing))}; it needs partition, offset, key"
            )
        message_id = F.col("message_id") if "message_id" in rows.columns else F.lit(None).cast("string")
        names = ["subject"] if "subject" in rows.columns else []
        chosen = rows.select(
            *names,
            F.col("partition").cast("int").alias("partition"),
            F.col("offset").cast("long").alias("offset"),
            F.struct(
                F.when(F.col("key").isNotNull(), F.xxhash64(F.col("key").cast("binary"))).alias("key_hash"),
                message_id.alias("message_id"),
            ).alias("stored"),
        )
        groups = F.broadcast(self.terms.groups)
        return chosen.join(groups, names) if names else chosen.crossJoin(groups)

    def _messages(self) -> DataFrame:
        """All that is known of each message, in one row."""
        told = [self.runs.select(*MESSAGE, "run"), *self._rare()]
        for name, stored in (("log", self.log), ("sent", self.sent)):
            if stored is not None:
                told.append(stored.select(*MESSAGE, F.col("stored").alias(name), "order"))
        told = [self._odd_only(rows) for rows in told]
        every = functools.reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), told)
        lists: dict[str, Column] = {
            name: F.collect_list(name) for name in ("run", "rare", "log", "sent") if name in every.columns
        }
        if "order" in every.columns:
            lists["order"] = F.max("order")
        grouped = every.groupBy(*MESSAGE).agg(*(column.alias(name) for name, column in lists.items()))
        rows = grouped.select(
            *MESSAGE,
            F.sort_array("run").alias("runs"),
            (F.when(F.size("rare") > 0, F.col("rare")) if "rare" in lists else F.lit(None)).alias("rare"),
            *(self._rare_of(name, "rare" in lists) for name in RARE),
            *(list_or_none(name, name in lists, STORED).alias(f"{name}s") for name in ("log", "sent")),
            (F.col("order") if "order" in lists else F.lit(None).cast("string")).alias("order"),
        )
        rows = rows.where((F.size("runs") + F.size("logs") + F.size("sents") + F.size("parks")) > 0)
        rows = rows.withColumn("bucket", F.floor(F.col("offset") / BUCKET)).join(
            F.broadcast(self.terms.steps), [*PLACE, "bucket"], "left"
        )
        rows = rows.join(F.broadcast(self.terms.floors), [*PLACE], "left").withColumn(
            "floor", F.coalesce("floor", F.lit(0))
        )
        if not self.terms.has_resumes:
            return self._judge_messages(rows.withColumn("resumed", F.lit(None).cast("array<bigint>")))
        resumed = (
            self.terms.of_kind("resumed").groupBy(*PLACE, "key_hash").agg(F.collect_list("at_ns").alias("resumed"))
        )
        rows = rows.withColumn("key_hash", F.get("runs", F.lit(0))["key_hash"])
        return self._judge_messages(rows.join(F.broadcast(resumed), [*PLACE, "key_hash"], "left"))

    def _rare(self) -> list[DataFrame]:
        """What is told of few messages, each as a struct with one field that is not null."""

        def rare(name: str, value: Column) -> Column:
            fields = [
                value.alias(one) if one == name else F.lit(None).cast(kind).alias(one) for one, kind in RARE.items()
            ]
            return F.struct(*fields).alias("rare")

        claimed = self.terms.claims.where(F.size("finished") > 0).select(
            *PLACE, F.explode("finished").alias("offset"), rare("claims", struct_of(CLAIM))
        )
        given_up = self.terms.of_kind("skipped", "moved").select(
            *MESSAGE, rare("given_up", F.struct("at_ns", (F.col("kind") == "skipped").alias("by_name")))
        )
        lots = [
            self.terms.commits.where(F.size(name) > 0)
            .select(*GROUP, F.explode(name).alias("place"), rare(target, struct_of(CLAIM)))
            .select(*GROUP, "place.partition", "place.offset", "rare")
            for name, target in (("parked", "parks"), ("unparked", "unparks"))
        ]
        return [claimed, given_up, *lots] if self.terms.has_rare else []

    def _rare_of(self, name: str, is_there: bool) -> Column:
        if not is_there:
            return F.array().cast(f"array<{RARE[name]}>").alias(name)
        some = F.sort_array(F.filter(F.col("rare")[name], lambda one: one.isNotNull()))
        return F.when(F.size("rare") > 0, some).otherwise(F.array().cast(f"array<{RARE[name]}>")).alias(name)

    def _judge_messages(self, rows: DataFrame) -> DataFrame:
        skew = self.skew_ns
        step = F.get(
            F.filter("steps", lambda one: (one["from"] <= F.col("offset")) & (F.col("offset") < one["to"])), F.lit(0)
        )["claim"]
        rows = rows.withColumn("step", step).withColumn("first", F.get("runs", F.lit(0)))
        # Nearly all messages ran once, and a commit of the same epoch came later: nothing more is to be asked of them.
        rows = rows.withColumn("is_odd", ~F.coalesce(self._is_plain(), F.lit(False)))

        def odd(column: Column) -> Column:
            return F.when(F.col("is_odd"), column)

        rows = rows.select(
            "*",
            odd(F.filter("runs", lambda run: run["result"].isin(SUCCESS, MOVED))).alias("finishes"),
            odd(F.array_min(F.filter(F.concat("claims", F.array("step")), lambda one: one.isNotNull()))).alias("said"),
            odd(F.array_min(F.col("given_up.at_ns"))).alias("given_up_ns"),
            odd(F.get(F.filter("parks", does_not_pass_through), F.lit(0))).alias("park"),
            odd(F.get("unparks", F.lit(0))).alias("unpark"),
        )
        is_parked = F.col("park").isNotNull() & (
            F.col("said").isNull() | (F.col("said.until_ns") >= F.col("park.until_ns"))
        )
        rows = rows.withColumn("is_parked", odd(is_parked))
        # Whoever puts a message into the lot does not know what an older epoch did with it, and runs it again.
        after_park = F.filter(
            "finishes",
            lambda run: (run["epoch"] >= F.col("park.epoch")) | (run["end_ns"] > F.col("park.until_ns")),
        )
        rows = rows.withColumn("counted", odd(F.when(F.col("is_parked"), after_park).otherwise(F.col("finishes"))))
        done = F.when(F.col("is_parked"), F.col("unpark")).otherwise(
            F.array_min(F.filter(F.array("said", "unpark"), lambda one: one.isNotNull()))
        )
        rows = rows.withColumn("done", odd(done))
        known = F.exists(
            "counted",
            lambda run: F.when(F.col("done.by_grant"), run["epoch"] < F.col("done.epoch")).otherwise(
                (run["end_ns"] <= F.col("done.at_ns") + skew_between(run["owner"] != F.col("done.owner"), skew))
                & (
                    (run["epoch"] == F.col("done.epoch"))
                    | (run["owner"] == F.col("done.owner"))
                    | (run["end_ns"] <= F.col("done.granted_ns") + skew)
                )
            ),
        ) | F.coalesce(F.col("given_up_ns") <= F.col("done.until_ns"), F.lit(False))
        due = F.col("offset") >= F.col("floor")
        is_claimed = F.col("done").isNotNull() & due
        never = F.col("is_never")
        rows = (
            rows.withColumn("is_claimed", odd(is_claimed))
            .withColumn("is_never", odd((F.size("finishes") == 0) & F.col("given_up_ns").isNull()))
            .withColumn("is_premature", odd(F.col("is_claimed") & ~known))
            .withColumn("unproven", F.col("is_premature") & F.col("done.cut") & never)
        )
        premature, is_claimed = F.col("is_premature"), F.col("is_claimed")
        repeated = F.filter(
            "runs",
            lambda run: (
                ~run["stale"]
                & (run["start_ns"] > F.col("done.until_ns") + skew_between(run["owner"] != F.col("done.owner"), skew))
            ),
        )
        stays = F.col("is_parked") & F.col("unpark").isNull()
        is_stored = (F.size("logs") + F.size("sents")) > 0
        must_be_done = F.lit(True) if self.complete else F.col("said").isNotNull()
        lost = is_stored & due & never & ~stays & ~F.col("unproven") & must_be_done
        by_claim = claim_evidence(F.col("done"))
        stale = F.filter("runs", lambda run: run["stale"])
        attempts = attempts_lost()
        found = [
            self._found(ViolationKind.STALE_START, F.size(stale) > 0, F.transform(stale, run_evidence)),
            self._found(
                ViolationKind.REPEATED,
                is_claimed & (F.size(repeated) > 0),
                F.concat(F.array(by_claim), F.transform(repeated, run_evidence)),
            ),
            self._found(
                ViolationKind.PREMATURE_COMMIT,
                premature & ~F.col("unproven"),
                F.concat(F.array(by_claim), F.transform("runs", run_evidence)),
            ),
            self._found(ViolationKind.LOST, lost, F.array(by_claim)),
            self._found(ViolationKind.ATTEMPT_LOST, F.size(attempts) > 0, F.transform(attempts, run_evidence)),
        ]
        found += self._identity()
        by_log = F.when(F.col("order") == "partition", OF_PARTITION).otherwise(
            F.when(log_hash().isNotNull(), OF_KEY).otherwise(ALONE)
        )
        lane_kind = F.coalesce(
            F.get("runs", F.lit(0))["lane_kind"], F.when(F.col("order").isNotNull(), by_log), F.lit(ALONE)
        )
        rows = rows.withColumn("lane_kind", lane_kind)
        hashed = F.coalesce(log_hash(), F.get("runs", F.lit(0))["key_hash"])
        lane = F.when(F.col("lane_kind") == OF_KEY, hashed).when(F.col("lane_kind") == ALONE, F.col("offset"))
        done_ns = F.least(
            F.array_min(F.col("finishes.end_ns")),
            F.col("given_up_ns"),
            F.when(F.col("unproven"), F.col("done.until_ns")),
        )
        done_by = F.array_min(F.transform("finishes", lambda run: F.struct(run["end_ns"], run["owner"])))["owner"]
        done_ns = odd(F.coalesce(done_ns, F.lit(NEVER)))
        no_violations = F.slice(F.array(self._found(ViolationKind.LOST, F.lit(True), F.array(by_claim))), 1, 0)
        return rows.select(
            *MESSAGE,
            "lane_kind",
            F.coalesce(lane, F.lit(0)).alias("lane"),
            "runs",
            "given_up_ns",
            F.when(due, F.coalesce(done_ns, F.col("first.end_ns"))).alias("done_ns"),
            F.when(F.col("is_odd"), done_by).otherwise(F.col("first.owner")).alias("done_by"),
            F.when(F.col("is_odd"), F.size("finishes")).otherwise(1).alias("finish_count"),
            F.coalesce(stays & never, F.lit(False)).alias("waits_in_lot"),
            F.coalesce(odd(F.exists("given_up", lambda one: one["by_name"])), F.lit(False)).alias("is_skipped"),
            "unproven",
            F.when(F.col("is_odd"), F.array_compact(F.array(*found))).otherwise(no_violations).alias("violations"),
        )

    def _identity(self) -> list[Column]:
        """What is stored there, what was acknowledged, and what ran: the same?"""
        found = []
        first_log, first_sent = F.get("logs", F.lit(0)), F.get("sents", F.lit(0))
        if self.has_sent:
            found.append(
                self._found(
                    ViolationKind.UNEXPECTED,
                    F.size(F.array_distinct("sents")) > 1,
                    F.array(place_evidence("acknowledged")),
                )
            )
        if self.has_sent and self.has_log:
            other = F.coalesce(first_log["message_id"] != first_sent["message_id"], F.lit(False))
            gone = (F.size("sents") > 0) & ((F.size("logs") == 0) | other)
            found.append(
                self._found(ViolationKind.LOST, gone, F.array(place_evidence("acknowledged, but not in the log")))
            )
        if self.has_log or self.has_sent:
            known = F.coalesce(first_sent, first_log) if self.has_sent else first_log
            differs = F.filter(
                "runs",
                lambda run: run["key_hash"].isNotNull() & ~run["key_hash"].eqNullSafe(known["key_hash"]),
            )
            is_other = known.isNotNull() & (F.size(differs) > 0)
            found.append(self._found(ViolationKind.UNEXPECTED, is_other, F.transform(differs, run_evidence)))
        if self.has_log and self.complete:
            nowhere = (F.size("runs") > 0) & ((F.size("logs") + F.size("sents")) == 0)
            found.append(self._found(ViolationKind.UNEXPECTED, nowhere, F.transform("runs", run_evidence)))
        return found

    def _is_plain(self) -> Column:
        """Ran once and was finished, as whoever committed it knew; and nothing else is told of it."""
        first, step = F.col("first"), F.col("step")
        in_time = ~step["by_grant"] & (first["epoch"] == step["epoch"]) & (first["end_ns"] <= step["at_ns"])
        plain = (F.size("runs") == 1) & (first["result"] == SUCCESS) & ~first["stale"] & F.col("rare").isNull()
        plain &= step.isNull() | in_time
        for name, is_given in (("logs", self.has_log), ("sents", self.has_sent)):
            if is_given:
                same = F.get(name, F.lit(0))["key_hash"].eqNullSafe(first["key_hash"]) | first["key_hash"].isNull()
                plain &= (F.size(name) == 1) & same
        if self.has_log and self.has_sent:
            plain &= F.get("logs", F.lit(0)).eqNullSafe(F.get("sents", F.lit(0)))
        return plain

    def _found(self, kind: ViolationKind, is_broken: Column, evidence: Column, at_ns: Column | None = None) -> Column:
        """Evidence is put together only when it is asked for: the second time, if anything was found."""
        one = F.struct(F.lit(kind.value).alias("kind"))
        if self.tells:
            told = F.slice(evidence, 1, 4)
            at = F.array_max(told["start_ns"]) if at_ns is None else at_ns
            at = F.coalesce(at, F.lit(0)).alias("at_ns")
            one = F.struct(F.lit(kind.value).alias("kind"), F.col("offset").alias("offset"), at, told.alias("evidence"))
        return F.when(F.coalesce(is_broken, F.lit(False)), one)

    # What the lanes say

    def _lanes(self, messages: DataFrame) -> DataFrame:
        """One row per run, or per message that never ran, with all violations found there."""
        skew = self.skew_ns
        by_offset = Window.partitionBy(*LANE).orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
        unfinished = F.max(F.struct("done_ns", "done_by", F.col("offset").alias("earlier"))).over(by_offset)
        of_lane = (
            messages.repartition(*LANE)
            .withColumn("behind", unfinished)
            .withColumn("run_count", F.size("runs"))
            .select("*", F.posexplode_outer("runs").alias("number", "run"))
            .drop("runs")
        )
        run = F.col("run")
        has_run = run.isNotNull()
        told = RUN_FIELDS if self.tells else ("offset", "result")
        row = F.struct(*(run[name].alias(name) for name in told), F.col("given_up_ns"))
        in_epoch = Window.partitionBy(*LANE, "epoch", "term_ns").orderBy("start_ns", "seq")
        before = in_epoch.rowsBetween(Window.unboundedPreceding, -1)
        end_ns = F.when(has_run, F.coalesce(run["end_ns"], F.lit(NEVER)))
        rows = of_lane.withColumns({name: run[name] for name in ("epoch", "term_ns", "start_ns", "seq")})
        rows = rows.withColumn("last", F.lag(row).over(in_epoch)).withColumn("open", F.max(end_ns).over(before))
        opened = F.max_by(row, end_ns).over(before) if self.tells else F.lit(None)
        rows = rows.withColumn("open_row", opened)
        if self.terms.has_hand_overs:
            in_lane = Window.partitionBy(*LANE).orderBy("start_ns", "seq").rowsBetween(Window.unboundedPreceding, -1)
            left_over = F.when(run["left_over"], F.struct(run["epoch"].alias("epoch"), run["end_ns"].alias("end_ns")))
            rows = rows.withColumn("left", F.collect_list(left_over).over(in_lane))
        else:
            rows = rows.withColumn("left", F.array().cast("array<struct<epoch: bigint, end_ns: bigint>>"))
        newer_term = F.lit(None).cast("long")
        if self.terms.has_claims:  # whoever claims what another had claimed has taken it over: that one starts no more
            terms = Window.partitionBy(*LANE, "epoch").orderBy("start_ns", "seq")
            newer_term = F.max("term_ns").over(terms.rowsBetween(Window.unboundedPreceding, -1))
        rows = rows.withColumn("newer_term_ns", newer_term)
        lost_claim = (F.col("term_ns") > 0) & (F.col("newer_term_ns") > F.col("term_ns"))
        last, evidence = F.when(has_run, F.col("last")), run_evidence(run)
        failed = last["result"].isin(FAILED, EXCEPTION, ROLLBACK)
        may_repeat = (last["result"] == ROLLBACK) | ((last["offset"] == run["offset"]) & failed)
        out_of_order = last.isNotNull() & (run["offset"] <= last["offset"]) & ~F.coalesce(may_repeat, F.lit(False))
        overlaps = F.col("open") > run["start_ns"]
        behind = F.col("behind")
        skipped = (
            has_run
            & behind["done_ns"].isNotNull()
            & (run["start_ns"] + skew_between(behind["done_by"] != run["owner"], skew) < behind["done_ns"])
        )
        went_on = (
            last.isNotNull()
            & (last["offset"] < run["offset"])
            & F.coalesce(failed, F.lit(False))
            & ~F.coalesce(last["given_up_ns"] <= run["start_ns"], F.lit(False))
        )
        unfinished_evidence = F.struct(
            F.lit("unfinished").alias("what"),
            F.col("partition"),
            behind["earlier"].alias("offset"),
            *nulls("epoch bigint, owner string, attempt int, result int, start_ns bigint"),
            F.when(behind["done_ns"] < NEVER, behind["done_ns"]).alias("end_ns"),
        )
        judged = F.col("lane_kind").isNotNull()
        found = F.array_compact(
            F.array(
                self._found(ViolationKind.STALE_START, lost_claim, F.array(evidence), run["start_ns"]),
                self._found(
                    ViolationKind.OUT_OF_ORDER,
                    judged & out_of_order,
                    F.array(run_evidence(last), evidence),
                    run["start_ns"],
                ),
                self._found(
                    ViolationKind.OVERLAP,
                    judged & overlaps,
                    F.array(run_evidence(F.col("open_row")), evidence),
                    run["start_ns"],
                ),
                self._found(ViolationKind.SKIPPED, skipped, F.array(unfinished_evidence, evidence), run["start_ns"]),
                self._found(
                    ViolationKind.SKIPPED, ~skipped & went_on, F.array(run_evidence(last), evidence), run["start_ns"]
                ),
            )
        )
        is_first = F.coalesce(F.col("number") == 0, F.lit(True))
        of_message = F.when(is_first, F.col("violations")).otherwise(F.slice("violations", 1, 0))
        overlapping = F.filter(
            "left",
            lambda one: (one["epoch"] < run["epoch"]) & (F.coalesce(one["end_ns"], F.lit(NEVER)) > run["start_ns"]),
        )
        return rows.select(
            *PLACE,
            F.when(has_run, 1).otherwise(0).alias("started"),
            F.when(is_first, F.col("finish_count")).otherwise(0).alias("finished"),
            F.when(is_first, F.greatest(F.col("finish_count") - 1, F.lit(0))).otherwise(0).alias("duplicates"),
            F.when(has_run, F.size(overlapping)).otherwise(0).alias("overlaps"),
            (is_first & F.col("waits_in_lot")).cast("int").alias("parked"),
            (is_first & F.col("is_skipped")).cast("int").alias("skipped"),
            (is_first & F.coalesce("unproven", F.lit(False))).cast("int").alias("unproven"),
            F.concat(of_message, found).alias("violations"),
        )

    def _count(
        self, messages: DataFrame | None, small: DataFrame, plain: Mapping[tuple[str, str], int]
    ) -> list[GroupAudit]:
        kinds = list(ViolationKind)
        sums = ("started", "finished", "duplicates", "overlaps", "parked", "skipped", "unproven")
        by_kind = [F.sum(number_of(kind)).alias(kind.name) for kind in kinds]
        counted = []
        if messages is not None:
            counted = messages.groupBy(*GROUP).agg(*(F.sum(name).alias(name) for name in sums), *by_kind).collect()
        of_leases = small.groupBy(*GROUP, "kind").count().collect()
        commits = self.terms.of_kind("committed").groupBy(*GROUP).count().collect()
        grants = (
            self.terms.leases.groupBy(*GROUP)
            .agg(
                F.count("*").alias("granted"),
                F.sum(F.coalesce(F.col("epoch") - F.col("lag_epoch") - 1, F.lit(0))).alias("unseen"),
            )
            .collect()
        )
        rows = {(row["subject"], row["group"]): row for row in counted}
        broken: dict[tuple[str, str], dict[ViolationKind, int]] = {
            name: {kind: row[kind.name] for kind in kinds if row[kind.name]} for name, row in rows.items()
        }
        for row in of_leases:
            of_group = broken.setdefault((row["subject"], row["group"]), {})
            kind = ViolationKind(row["kind"])
            of_group[kind] = of_group.get(kind, 0) + row["count"]
        commit_counts = {(row["subject"], row["group"]): row["count"] for row in commits}
        grant_counts = {(row["subject"], row["group"]): row for row in grants}
        every = sorted(rows.keys() | plain.keys() | broken.keys() | commit_counts.keys() | grant_counts.keys())
        audits = []
        for name in every:
            sums_of = {one: rows[name][one] if name in rows else 0 for one in sums}
            granted = grant_counts.get(name)
            audits.append(
                GroupAudit(
                    name[0],
                    name[1],
                    started=sums_of["started"] + plain.get(name, 0),
                    finished=sums_of["finished"] + plain.get(name, 0),
                    duplicates=sums_of["duplicates"],
                    commits=commit_counts.get(name, 0),
                    lease_grants=0 if granted is None else granted["granted"],
                    overlaps_after_lease_loss=sums_of["overlaps"],
                    parked=sums_of["parked"],
                    skipped=sums_of["skipped"],
                    unproven=sums_of["unproven"],
                    unseen_epochs=0 if granted is None else granted["unseen"],
                    broken=broken.get(name, {}),
                )
            )
        return audits
