"""The audit: proves from traces, on Spark, that the order was kept. For any number of rows.

    verdict = audit(spark, "./traces", log=spark.read.format("inturn")…)
    verdict.raise_if_bad()

The audit judges by the rules of the order checker (`inturn.testing.check`), but not one event after the other:

1. One job brings the events beside the runs to the driver: leases, claims, commits (`leases`).
2. One query finds the messages that are plainly in order, nearly all, by a few numbers of each (`fast_path`).
3. The rest is judged in full, with two shuffles: by message, to compare all that is known of each
   (`message_rules`); then by lane, to compare each message with those before it, and each run with the run
   before (`lane_rules`). Only counts and the first violations come back to the driver.

Times of one consumer are of one clock and are compared exactly. Times of two consumers are compared with `clock_skew_s`
between them: times that lie closer together are taken as in order. Epochs, not times, decide which lease came later.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from inturn.consumer.trace import ALONE, OF_KEY, OF_PARTITION
from inturn.model.errors import InvalidInput
from inturn.model.message import TagFilter, tag_filter, tags_text
from inturn.model.violation import ViolationKind
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings
from inturn.spark.audit.evidence import (
    CLAIM,
    GROUP,
    MESSAGE,
    NEVER,
    PLACE,
    RARE,
    RUN_FIELDS,
    STORED,
    Rules,
    is_true,
    list_or_none,
    number_of,
    struct_of,
)
from inturn.spark.audit.fast_path import looked_at, place_number
from inturn.spark.audit.lane_rules import COUNTS, judge_lanes
from inturn.spark.audit.leases import GroupName, Terms
from inturn.spark.audit.message_rules import judge_messages
from inturn.spark.audit.traces import TracePaths, Traces, read_traces
from inturn.spark.audit.verdict import AuditVerdict, FoundViolation, GroupAudit, violation_of
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
    by_group: Mapping[GroupName, int]
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
        for rows, what in ((log, "log"), (sent, "sent")):
            _check_columns(rows, what)
        self.terms = Terms(events, order, skew_ns)
        self.order = order
        self.rules = Rules(complete, skew_ns, log is not None, sent is not None)
        self.runs = self._with_terms(self.terms.since_reset(runs, "start_ns"))
        self.stored = {name: self._stored(rows) for name, rows in (("log", log), ("sent", sent)) if rows is not None}
        self.odd: DataFrame | None = None  # messages that need a closer look; None: all of them

    def run(self, violations_max: int) -> AuditVerdict:
        numbers = looked_at(self.runs, self.stored, self.terms, complete=self.rules.complete).persist()
        try:
            plain = self._plain(numbers)
            found = self.terms.violations()
            groups = self._count(self._judged(self.rules) if plain.has_odd else None, found, plain.by_group)
            if plain.has_odd and violations_max and any(group.broken for group in groups):
                found += self._first_violations(violations_max)
        finally:
            numbers.unpersist()
        shown = sorted(found, key=FoundViolation.rank)[:violations_max]
        return AuditVerdict(tuple(groups), tuple(one.violation for one in shown))

    def _judged(self, rules: Rules) -> DataFrame:
        return judge_lanes(judge_messages(self._messages(), rules), rules, self.terms)

    def _first_violations(self, count: int) -> list[FoundViolation]:
        """The rules once more, with the evidence: few audits find a violation."""
        every = self._judged(replace(self.rules, tells=True)).select(*PLACE, F.explode("violations").alias("one"))
        first = every.select(*PLACE, "one.*").orderBy("at_ns", *PLACE, "kind", "offset").limit(count)
        return [violation_of(row) for row in first.collect()]

    # Messages that need no closer look

    def _plain(self, numbers: DataFrame) -> _PlainCounts:
        """Count the plain messages, and restrict the full rules to the others; not at all if most are others."""
        is_odd = F.col("is_odd")
        found = (
            numbers.groupBy("place")
            .agg(
                F.count("*").alias("count"),
                F.sum(is_odd.cast("int")).alias("odd"),
                F.sum(F.col("is_torn").cast("int")).alias("torn"),
                F.sum(F.when(~is_odd, F.col("run_count"))).alias("run"),
            )
            .collect()
        )
        groups = {place.number: place.group_name for place in self.terms.places}
        every, odd = (sum(row[name] for row in found) for name in ("count", "odd"))
        is_unclear = any(row["torn"] or (row["run"] and row["place"] not in groups) for row in found)
        if is_unclear or odd * 2 > every:
            return _PlainCounts({}, True)
        by_group: Counter[GroupName] = Counter()
        for row in found:
            if row["run"]:
                by_group[groups[row["place"]]] += row["run"]
        if odd:
            chosen = numbers.where("is_odd").select("place", "offset")
            self.odd = F.broadcast(chosen) if odd <= BROADCAST_MAX else chosen
        return _PlainCounts(by_group, odd > 0)

    def _odd_only(self, rows: DataFrame) -> DataFrame:
        if self.odd is None:
            return rows
        return rows.withColumn("place", place_number()).join(self.odd, ["place", "offset"], "left_semi").drop("place")

    # All that is known of a message

    def _with_terms(self, runs: DataFrame) -> DataFrame:
        """Runs, with the lane that they belong to, and the time since when their claim was in force."""
        lane_kind, term = F.col("lane_kind"), F.lit(0).cast("long")
        if self.order == "partition":
            lane_kind = F.lit(OF_PARTITION)
        elif self.order == "key":
            lane_kind = F.when(F.col("key_hash").isNotNull(), OF_KEY).otherwise(ALONE)
        if self.terms.claimed:
            names = [*PLACE, "epoch", "owner"]
            same = functools.reduce(lambda one, other: one & other, (F.col(f"r.{x}") == F.col(f"t.{x}") for x in names))
            in_term = (F.col("term_ns") <= F.col("start_ns")) & (F.col("start_ns") < F.col("next_term_ns"))
            terms = F.broadcast(self.terms.term_table.alias("t"))
            columns = [F.col(f"r.{name}") for name in runs.columns]
            runs = runs.alias("r").join(terms, same & in_term, "left").select(*columns, "term_ns")
            term = F.coalesce("term_ns", F.lit(0))
        return runs.withColumn("lane_kind", lane_kind).withColumn("term_ns", term)

    def _judged_runs(self) -> DataFrame:
        """Runs, with what the leases say about each."""
        leases = self.terms.lease_table.select(*PLACE, "epoch", "granted_ns", "next_granted_ns")
        places = leases.select(*PLACE).distinct().withColumn("has_grants", F.lit(True))
        joined = self.runs.join(F.broadcast(leases), [*PLACE, "epoch"], "left")
        joined = joined.join(F.broadcast(places), [*PLACE], "left")
        start, granted, after = (F.col(name) for name in ("start_ns", "granted_ns", "next_granted_ns"))
        skew = self.rules.skew_ns
        is_outside = granted.isNull() | (granted > start + skew) | is_true(after + skew < start)
        more = (
            (F.col("has_grants").isNotNull() & is_outside).alias("stale"),
            is_true(F.coalesce(F.col("end_ns"), F.lit(NEVER)) > after).alias("left_over"),
            *("key_hash", "lane_kind", "term_ns"),
        )
        return joined.select(*MESSAGE, F.struct(*RUN_FIELDS, *more).alias("run"))

    def _stored(self, rows: DataFrame) -> DataFrame:
        """Messages of the log, or acknowledged messages, once for every group."""
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
        groups = F.broadcast(self.terms.group_table)
        return chosen.join(groups, names) if names else chosen.crossJoin(groups)

    def _messages(self) -> DataFrame:
        """All that is known of each message, in one row."""
        told = [self._judged_runs(), *self._rare()]
        for name, stored in self.stored.items():
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
        rows = self._with_steps(rows).join(F.broadcast(self.terms.floor_table), [*PLACE], "left")
        rows = rows.withColumn("floor", F.coalesce("floor", F.lit(0)))
        resumed = self.terms.resumed_table
        if resumed is None:
            return rows.withColumn("resumed", F.lit(None).cast("array<bigint>"))
        rows = rows.withColumn("key_hash", F.get("runs", F.lit(0))["key_hash"])
        return rows.join(F.broadcast(resumed), [*PLACE, "key_hash"], "left")

    def _with_steps(self, rows: DataFrame) -> DataFrame:
        """Messages, with the claim that was the first to pass their offset."""
        names = [*PLACE, "bucket"]
        steps = self.terms.step_table.select(*names, "from", "to", struct_of(CLAIM).alias("step"))
        rows = rows.withColumn("bucket", F.shiftright("offset", self.terms.bucket_bits))
        columns = [F.col(f"r.{name}") for name in rows.columns]
        same = functools.reduce(lambda one, other: one & other, (F.col(f"r.{x}") == F.col(f"s.{x}") for x in names))
        in_step = (F.col("from") <= F.col("offset")) & (F.col("offset") < F.col("to"))
        return rows.alias("r").join(F.broadcast(steps.alias("s")), same & in_step, "left").select(*columns, "step")

    def _rare(self) -> list[DataFrame]:
        """Claims by name, given up messages, and the parking lot: each a struct with one field that is not null."""

        def rare(name: str, value: Column) -> Column:
            fields = [
                value.alias(one) if one == name else F.lit(None).cast(kind).alias(one) for one, kind in RARE.items()
            ]
            return F.struct(*fields).alias("rare")

        terms, claims = self.terms, self.terms.listed_claims()
        parts = []
        if terms.lists["finished"]:
            parts.append(claims.select(*PLACE, F.explode("finished").alias("offset"), rare("claims", F.col("claim"))))
        if terms.has_given_up:
            at = F.struct("at_ns", (F.col("kind") == "skipped").alias("by_name"))
            parts.append(terms.of_kind("skipped", "moved").select(*MESSAGE, rare("given_up", at)))
        for name, target in (("parked", "parks"), ("unparked", "unparks")):
            if terms.lists[name]:
                lot = claims.select(*GROUP, F.explode(name).alias("place"), rare(target, F.col("claim")))
                parts.append(lot.select(*GROUP, "place.partition", "place.offset", "rare"))
        return parts

    def _rare_of(self, name: str, is_there: bool) -> Column:
        nothing = F.array().cast(f"array<{RARE[name]}>")
        if not is_there:
            return nothing.alias(name)
        some = F.sort_array(F.filter(F.col("rare")[name], lambda one: one.isNotNull()))
        return F.when(F.size("rare") > 0, some).otherwise(nothing).alias(name)

    # The verdict

    def _count(
        self, judged: DataFrame | None, found: list[FoundViolation], plain: Mapping[GroupName, int]
    ) -> list[GroupAudit]:
        kinds = list(ViolationKind)
        counted = []
        if judged is not None:
            sums = (F.sum(name).alias(name) for name in COUNTS)
            by_kind = (F.sum(number_of(kind)).alias(kind.name) for kind in kinds)
            counted = judged.groupBy(*GROUP).agg(*sums, *by_kind).collect()
        rows = {(row["subject"], row["group"]): row for row in counted}
        broken: dict[GroupName, Counter[ViolationKind]] = {
            name: Counter({kind: row[kind.name] for kind in kinds if row[kind.name]}) for name, row in rows.items()
        }
        for one in found:
            broken.setdefault((one.violation.subject, one.violation.group), Counter())[one.violation.kind] += 1
        commits, leases = self.terms.commit_counts(), self.terms.leases.values()
        granted = Counter(lease.place.group_name for lease in leases)
        unseen: Counter[GroupName] = Counter()
        for lease in leases:
            unseen[lease.place.group_name] += lease.unseen
        audits = []
        for name in sorted(rows.keys() | plain.keys() | broken.keys() | commits.keys() | granted.keys()):
            sums_of = {one: rows[name][one] if name in rows else 0 for one in COUNTS}
            audits.append(
                GroupAudit(
                    name[0],
                    name[1],
                    started=sums_of["started"] + plain.get(name, 0),
                    finished=sums_of["finished"] + plain.get(name, 0),
                    duplicates=sums_of["duplicates"],
                    commits=commits[name],
                    lease_grants=granted[name],
                    overlaps_after_lease_loss=sums_of["overlaps"],
                    parked=sums_of["parked"],
                    skipped=sums_of["skipped"],
                    unproven=sums_of["unproven"],
                    unseen_epochs=unseen[name],
                    broken=dict(broken.get(name, {})),
                )
            )
        return audits


def _check_columns(rows: DataFrame | None, what: str) -> None:
    missing = set() if rows is None else {"partition", "offset", "key"} - set(rows.columns)
    if missing:
        raise InvalidInput(
            f"audit({what}=…) has no column {', '.join(sorted(missing))}; it needs partition, offset, key"
        )
