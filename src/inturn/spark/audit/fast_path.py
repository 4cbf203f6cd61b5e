"""Messages that need no closer look, nearly all: found by a few numbers of each, so that an audit is quick.

A message is plain if it ran once, successfully, under a lease that was in force; if every claim that it is finished
came after its run, as a commit of the same epoch, or with the lease of a later epoch; and if the log, if there is one,
holds the same. A lane is plain if its messages are, and each started after the one before had ended. A plain lane can
break no rule of the audit. A message in doubt is not plain, and is judged in full. Two shuffles, by message and by
lane, of rows that are only long integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from inturn.consumer.trace import ALONE, OF_KEY, OF_PARTITION, SUCCESS
from inturn.spark.audit.evidence import MESSAGE, NEVER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from inturn.spark.audit.leases import Terms


def place_number() -> Column:
    """A number for a partition of a group. Places that share a number are taken as one, and are never plain."""
    return F.xxhash64("subject", "group", "partition")


def lane_number(kind: Column, key_hash: Column) -> Column:
    of_lane = F.when(kind == OF_KEY, key_hash).when(kind == ALONE, F.col("offset"))
    return F.xxhash64("subject", "group", "partition", kind, F.coalesce(of_lane, F.lit(0)))


def looked_at(runs: DataFrame, stored: Mapping[str, DataFrame], terms: Terms, *, complete: bool) -> DataFrame:
    """Every message: place, offset, run_count, is_torn, is_odd. An odd message, or its lane, needs a closer look.

    runs     with the columns `lane_kind` and `term_ns`
    stored   log, sent: the stored messages, as `stored_rows` returns them
    """
    parts = [_runs(runs, terms), *(_stored(rows, name) for name, rows in stored.items())]
    if terms.lists["finished"]:
        parts.append(_claims(terms))
    parts += _told(terms)
    every = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)
    ends = terms.end_table if stored and not complete else None
    return _lanes(_messages(every, stored, ends))


def _runs(runs: DataFrame, terms: Terms) -> DataFrame:
    """Runs, and whether each is plain by itself."""
    narrow = runs.select(
        place_number().alias("place"),
        lane_number(F.col("lane_kind"), F.col("key_hash")).alias("lane"),
        *("offset", "key_hash", "start_ns"),
        F.coalesce("end_ns", F.lit(NEVER)).alias("end_ns"),
        *("seq", "epoch", "term_ns", "result"),
        F.shiftright("offset", terms.bucket_bits).alias("bucket"),
    ).alias("run")
    leases = terms.lease_table.select("place", "epoch", "granted_ns", "next_granted_ns").alias("lease")
    steps = terms.step_table.select(
        *("place", "bucket", "from", "to", "by_grant", "at_ns", "until_ns"), F.col("epoch").alias("step_epoch")
    ).alias("step")
    same_lease = (F.col("run.place") == F.col("lease.place")) & (F.col("run.epoch") == F.col("lease.epoch"))
    in_bucket = (F.col("run.place") == F.col("step.place")) & (F.col("run.bucket") == F.col("step.bucket"))
    in_step = in_bucket & (F.col("from") <= F.col("offset")) & (F.col("offset") < F.col("to"))
    rows = narrow.join(F.broadcast(leases), same_lease, "left").join(F.broadcast(steps), in_step, "left")
    start, end, epoch = F.col("start_ns"), F.col("end_ns"), F.col("run.epoch")
    is_whole = (F.col("result") == SUCCESS) & (start <= end) & (end < NEVER)
    next_ns = F.coalesce("next_granted_ns", F.lit(NEVER))
    in_force = (F.col("granted_ns") - terms.skew_ns <= start) & (start - terms.skew_ns <= next_ns)
    by_commit = (F.col("step_epoch") == epoch) & (end <= F.col("at_ns"))
    by_grant = (F.col("step_epoch") > epoch) & (end <= F.col("until_ns"))
    in_time = F.col("step_epoch").isNull() | F.when(F.col("by_grant"), by_grant).otherwise(by_commit)
    return rows.select(
        *("run.place", "lane", "offset", "key_hash", "start_ns", "end_ns", "seq", "run.epoch", "term_ns"),
        F.coalesce(is_whole & in_force & in_time, F.lit(False)).alias("is_plain"),
        F.lit(1).alias("is_run"),
    )


def _stored(rows: DataFrame, name: str) -> DataFrame:
    by_key = lane_number(F.lit(OF_KEY), F.col("stored.key_hash"))
    return rows.select(
        place_number().alias("place"),
        F.when(F.col("order") == "partition", lane_number(F.lit(OF_PARTITION), F.lit(0)))
        .when(F.col("stored.key_hash").isNotNull(), by_key)
        .alias("lane"),
        "offset",
        F.col("stored.key_hash").alias("stored_hash"),
        F.xxhash64("stored.message_id").alias("id_hash"),
        F.lit(1).alias(f"is_{name}"),
    )


def _claims(terms: Terms) -> DataFrame:
    """Claims that list a message as finished. Those of grants have columns of their own."""
    rows = terms.listing_claims().select(
        place_number().alias("place"), F.explode("finished").alias("offset"), "epoch", "at_ns", "until_ns", "by_grant"
    )
    by_grant = F.col("by_grant")
    return rows.select(
        *("place", "offset"),
        F.when(~by_grant, F.col("epoch")).alias("claim_epoch"),
        F.when(~by_grant, F.col("at_ns")).alias("claim_ns"),
        F.when(by_grant, F.col("epoch")).alias("grant_epoch"),
        F.when(by_grant, F.col("until_ns")).alias("grant_ns"),
        F.lit(1).alias("is_claimed"),
    )


def _told(terms: Terms) -> list[DataFrame]:
    """Messages that were skipped, moved, parked or taken out of the parking lot: never plain."""
    parts = [terms.of_kind("skipped", "moved").select(*MESSAGE)] if terms.has_given_up else []
    for name in ("parked", "unparked"):
        if terms.lists[name]:
            lot = terms.listing_claims().select("subject", "group", F.explode(name).alias("in_lot"))
            parts.append(lot.select("subject", "group", "in_lot.partition", "in_lot.offset"))
    return [part.select(place_number().alias("place"), "offset", F.lit(1).alias("is_told")) for part in parts]


def _messages(every: DataFrame, stored: Mapping[str, DataFrame], ends: DataFrame | None) -> DataFrame:
    """One row per message. `ends`: place, committed: the highest offset that a claim reached."""
    names = set(every.columns)

    def total(name: str) -> Column:
        return (F.coalesce(F.sum(name), F.lit(0)) if name in names else F.lit(0)).alias(name)

    edges = [name for name in ("lane", "key_hash", "stored_hash", "id_hash", "claim_epoch") if name in names]
    lowest = [name for name in ("claim_ns", "grant_epoch", "grant_ns") if name in names]
    rows = every.groupBy("place", "offset").agg(
        *(F.min(name).alias(name) for name in ("start_ns", "seq", "epoch", "term_ns", "is_plain", *lowest)),
        F.max("end_ns").alias("end_ns"),
        *(F.min(name).alias(f"{name}_min") for name in edges),
        *(F.max(name).alias(f"{name}_max") for name in edges),
        *map(total, ("is_run", "is_log", "is_sent", "is_told", "is_claimed")),
    )
    there = F.col("is_run") + F.col("is_log") + F.col("is_sent") + F.col("is_told")
    rows = rows.where(there > 0)
    is_plain = (F.col("is_run") == 1) & F.col("is_plain") & (F.col("is_told") == 0)
    for name in edges:
        is_plain &= F.col(f"{name}_min").isNull() | (F.col(f"{name}_min") == F.col(f"{name}_max"))
    if "claim_ns" in names:
        end, epoch = F.col("end_ns"), F.col("epoch")
        by_commit = (F.col("claim_epoch_min") == epoch) & (F.col("claim_ns") >= end)
        by_grant = (F.col("grant_epoch") > epoch) & (F.col("grant_ns") >= end)
        is_plain &= (F.col("claim_ns").isNull() | by_commit) & (F.col("grant_ns").isNull() | by_grant)
    for source in stored:
        is_plain &= F.col(f"is_{source}") == 1
    if stored:
        is_plain &= F.col("key_hash_min").isNull() | F.col("key_hash_min").eqNullSafe(F.col("stored_hash_min"))
    is_odd = ~F.coalesce(is_plain, F.lit(False))
    if ends is not None:  # a message that is stored, and not due yet
        rows = rows.join(F.broadcast(ends), ["place"], "left")
        is_new = (there == 1) & (F.col("is_run") == 0) & (F.col("is_told") == 0) & (F.col("is_claimed") == 0)
        is_odd &= ~(is_new & (F.col("offset") >= F.coalesce("committed", F.lit(0))))
    return rows.select(
        "place",
        "offset",
        F.coalesce("lane_min", F.xxhash64("place", "offset")).alias("lane"),
        (F.col("lane_min") != F.col("lane_max")).alias("is_torn"),
        *("start_ns", "seq", "epoch", "term_ns"),
        F.coalesce("end_ns", F.lit(NEVER)).alias("end_ns"),
        F.col("is_run").alias("run_count"),
        is_odd.alias("is_odd"),
    )


def _lanes(messages: DataFrame) -> DataFrame:
    by_offset = Window.partitionBy("lane").orderBy("offset")
    names = ("place", "start_ns", "seq", "end_ns", "epoch", "term_ns")
    rows = messages.withColumns({f"{name}_before": F.lag(name).over(by_offset) for name in names})
    start, seq = F.col("start_ns"), F.col("seq")
    in_order = (start >= F.col("end_ns_before")) & (
        (start > F.col("start_ns_before")) | ((start == F.col("start_ns_before")) & (seq > F.col("seq_before")))
    )
    same_epoch = (F.col("epoch") == F.col("epoch_before")) & (F.col("term_ns") >= F.col("term_ns_before"))
    in_order &= (F.col("place") == F.col("place_before")) & ((F.col("epoch") > F.col("epoch_before")) | same_epoch)
    follows = F.col("place_before").isNull() | start.isNull() | F.coalesce(in_order, F.lit(False))
    is_odd = F.col("is_odd") | ~follows
    whole_lane = Window.partitionBy("lane")
    return rows.withColumn("is_odd", is_odd).select(
        "place",
        "offset",
        "run_count",
        F.coalesce("is_torn", F.lit(False)).alias("is_torn"),
        F.max("is_odd").over(whole_lane).alias("is_odd"),
    )
