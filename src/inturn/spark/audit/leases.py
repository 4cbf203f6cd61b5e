"""What is small in an audit: leases, claims, and how far commits came. It is computed once, and sent to all."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from inturn.model.violation import ViolationKind
from inturn.spark.audit.evidence import CLAIM, GROUP, PLACE, event_evidence, struct_of, violations_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BUCKET = 1024  # offsets


class Terms:
    """`events` are those since the last reset of each place; a reset begins anew."""

    def __init__(self, events: DataFrame, order: str | None, skew_ns: int) -> None:
        self.events, self.order, self.skew_ns = events, order, skew_ns
        self.resets = (
            self.of_kind("reset")
            .groupBy(*PLACE)
            .agg(F.max("at_ns").alias("reset_ns"), F.max_by("offset", "at_ns").alias("reset_offset"))
        )
        sets = F.size("finished") + F.size("parked") + F.size("unparked") > 0
        there = events.agg(
            *(F.max(F.col("kind") == kind).alias(kind) for kind in ("reset", "claimed", "resumed")),
            F.max(sets | F.col("kind").isin("skipped", "moved")).alias("rare"),
        ).collect()[0]
        self.has_resets, self.has_claims, self.has_resumes, self.has_rare = map(bool, there)
        self.events = self.since_reset(events, "at_ns")
        # Each of these is small, computed once, and cut from how it came about, which would be planned again and again.
        self.cut = self._cut_owners().localCheckpoint()
        self.leases = self._leases().localCheckpoint()
        self.floors = self._floors().localCheckpoint()
        self.commits = self._commits().localCheckpoint()
        self.claims = self._claims()
        self.groups = self._groups().localCheckpoint()
        self.has_hand_overs = bool(self.leases.where("next_granted_ns is not null").take(1))

    @functools.cached_property
    def steps(self) -> DataFrame:
        return self._steps().localCheckpoint()

    def of_kind(self, *kinds: str) -> DataFrame:
        return self.events.where(F.col("kind").isin(*kinds))

    def since_reset(self, rows: DataFrame, at: str) -> DataFrame:
        """A reset begins anew: what was before it is not judged."""
        if not self.has_resets:
            return rows
        return (
            rows.join(F.broadcast(self.resets), [*PLACE], "left")
            .where(F.col("reset_ns").isNull() | (F.col(at) >= F.col("reset_ns")))
            .drop("reset_ns", "reset_offset")
        )

    def _cut_owners(self) -> DataFrame:
        """Those whose trace has no end: they were killed, or still run."""
        marks = self.of_kind("opened", "closed").groupBy(*GROUP, "owner")
        return (
            marks.agg(F.max(F.col("kind") == "closed").alias("is_closed"))
            .where(~F.col("is_closed"))
            .select(*GROUP, "owner", F.lit(True).alias("cut"))
        )

    def _leases(self) -> DataFrame:
        """By epoch: when it was granted, when the first higher one was, when it was over for certain."""
        granted = (
            self.of_kind("granted")
            .groupBy(*PLACE, "epoch")
            .agg(
                F.min("until_ns").alias("granted_ns"),
                F.collect_set("owner").alias("owners"),
                F.max("by_node").alias("by_node"),
            )
        )
        # A claim that is given back ends nothing for the others under the same lease.
        certain = F.col("by_node") | ((F.col("why") == "released") & ~F.col("is_claim"))
        ended = self.of_kind("ended").where(certain).groupBy(*PLACE, "epoch").agg(F.max("at_ns").alias("ended_ns"))
        higher = Window.partitionBy(*PLACE).orderBy(F.desc("epoch")).rowsBetween(Window.unboundedPreceding, -1)
        lower = Window.partitionBy(*PLACE).orderBy("epoch")
        leases = granted.join(ended, [*PLACE, "epoch"], "left").withColumn(
            "next_granted_ns", F.min("granted_ns").over(higher)
        )
        # Cut is what any of those was that worked in it: its owner, or somebody under the lease.
        workers = self.of_kind("granted", "claimed").select(*PLACE, "epoch", "owner").distinct()
        cut = workers.join(self.cut, [*GROUP, "owner"]).groupBy(*PLACE, "epoch").agg(F.max("cut").alias("cut"))
        with_cut = leases.join(cut, [*PLACE, "epoch"], "left")
        before = F.coalesce(F.lag("cut").over(lower), F.lit(False))
        return with_cut.withColumn("cut_before", before).withColumn("lag_epoch", F.lag("epoch").over(lower))

    def _floors(self) -> DataFrame:
        """Where the group began, as far as the trace shows."""
        first = self.of_kind("granted").where("offset >= 0").groupBy(*PLACE)
        floors = first.agg(F.min_by("offset", F.struct("epoch", "until_ns")).alias("floor"))
        if not self.has_resets:
            return floors
        reset = self.resets.select(*PLACE, F.col("reset_offset").alias("floor"))
        return reset.unionByName(floors.join(reset, [*PLACE], "left_anti"))

    def _groups(self) -> DataFrame:
        """Those that left a trace, and the order that their members said to keep."""
        told = F.max(F.when(F.col("kind") == "opened", F.col("why")))
        order = F.coalesce(told, F.lit("key")) if self.order is None else F.lit(self.order)
        return self.events.groupBy(*GROUP).agg(order.alias("order"))

    def _commits(self) -> DataFrame:
        return (
            self.of_kind("committed")
            .join(
                self.leases.select(*PLACE, "epoch", "granted_ns", "owners", "next_granted_ns", "ended_ns"),
                [*PLACE, "epoch"],
                "left",
            )
            .join(self.cut, [*GROUP, "owner"], "left")
            .withColumn("cut", F.coalesce("cut", F.lit(False)))
            .withColumn("was_granted", F.col("granted_ns").isNotNull())
            .withColumn("granted_ns", F.coalesce("granted_ns", "at_ns"))
            .withColumn("by_grant", F.lit(False))
        )

    def _claims(self) -> DataFrame:
        """Who said that something is done, and what that can rest upon: commits, and what came with a lease."""
        said = (*PLACE, "offset", "finished", "until_ns", "at_ns", "epoch", "owner")
        commits = self.commits.select(*said, "granted_ns", "by_grant", "cut", "is_claim")
        grants = (
            self.of_kind("granted")
            .where("offset >= 0")
            .join(self.leases.select(*PLACE, "epoch", "cut_before"), [*PLACE, "epoch"])
            .select(
                *said,
                F.col("until_ns").alias("granted_ns"),
                F.lit(True).alias("by_grant"),
                F.col("cut_before").alias("cut"),
                F.lit(False).alias("is_claim"),
            )
        )
        return commits.unionByName(grants)

    def _steps(self) -> DataFrame:
        """Which claim was the first to pass an offset, in buckets: (place, bucket) → the steps that touch it."""
        before = Window.partitionBy(*PLACE).orderBy("until_ns", "offset").rowsBetween(Window.unboundedPreceding, -1)
        floor = F.coalesce("floor", F.lit(0))
        steps = (
            self.claims.where(~F.col("is_claim"))
            .join(F.broadcast(self.floors), [*PLACE], "left")
            .withColumn("from", F.coalesce(F.max("offset").over(before), floor))
            .withColumn("from", F.greatest("from", floor))
            .where(F.col("offset") > F.col("from"))
        )
        claim = F.struct("from", F.col("offset").alias("to"), struct_of(CLAIM).alias("claim"))
        buckets = F.sequence(F.floor(F.col("from") / BUCKET), F.floor((F.col("offset") - 1) / BUCKET))
        return (
            steps.select(*PLACE, claim.alias("step"), F.explode(buckets).alias("bucket"))
            .groupBy(*PLACE, "bucket")
            .agg(F.collect_list("step").alias("steps"))
        )

    def violations(self) -> list[DataFrame]:
        grants = self.of_kind("granted")
        by_time = Window.partitionBy(*PLACE).orderBy("until_ns", "seq")
        before = by_time.rowsBetween(Window.unboundedPreceding, -1)
        event = event_evidence
        last = F.struct("epoch", "until_ns", event("kind"), "owner")
        raised = (
            grants.withColumn("highest", F.max(last).over(before))
            .where(F.col("epoch") <= F.col("highest.epoch"))
            .where(
                (F.col("epoch") == F.col("highest.epoch"))
                | (F.col("until_ns") > F.col("highest.until_ns") + self.skew_ns)
                | F.col("by_node")
            )
        )
        not_raised = violations_of(
            raised,
            ViolationKind.EPOCH_NOT_RAISED,
            F.lit(None),
            F.col("until_ns"),
            F.array(F.col("highest.evidence"), event("kind")),
        )
        previous = F.lag(F.struct("epoch", "owner", event("kind"))).over(by_time)
        ends = (
            self.of_kind("ended")
            .where("by_node")
            .select(
                *PLACE,
                F.col("epoch").alias("ended_epoch"),
                F.col("owner").alias("ended_owner"),
                F.col("at_ns").alias("ended_at"),
            )
        )
        held = (
            grants.where("by_node")
            .withColumn("previous", previous)
            .where(F.col("previous").isNotNull())
            .alias("g")
            .join(
                ends.alias("e"),
                (F.col("g.subject") == F.col("e.subject"))
                & (F.col("g.group") == F.col("e.group"))
                & (F.col("g.partition") == F.col("e.partition"))
                & (F.col("previous.epoch") == F.col("ended_epoch"))
                & (F.col("previous.owner") == F.col("ended_owner"))
                & (F.col("ended_at") <= F.col("g.until_ns")),
                "left_anti",
            )
        )
        two_owners = violations_of(
            held,
            ViolationKind.TWO_OWNERS,
            F.lit(None),
            F.col("until_ns"),
            F.array(F.col("previous.evidence"), event("kind")),
        )
        commits, skew = self.commits, self.skew_ns
        has_grants = self.leases.select(*PLACE).distinct().withColumn("has_grants", F.lit(True))
        is_stale = (
            ~F.col("was_granted")
            | (F.col("granted_ns") > F.col("until_ns") + skew)
            | (F.col("next_granted_ns") + skew < F.col("at_ns"))
            | (F.col("ended_ns") + skew < F.col("at_ns"))
            | (~F.col("is_claim") & ~F.array_contains("owners", F.col("owner")))
        )
        stale = commits.join(F.broadcast(has_grants), [*PLACE], "left").where(is_stale)
        stale_commits = violations_of(
            stale, ViolationKind.STALE_COMMIT, F.col("offset"), F.col("until_ns"), F.array(event("kind"))
        )
        return [not_raised, two_owners, stale_commits]
