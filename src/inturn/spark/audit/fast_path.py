"""Messages that need no closer look, which are nearly all: found with a few numbers of each, so that an audit is quick.

A message is plain if it ran once, successfully, under a lease that was in force; if whatever says that it is done was
said later in the same epoch; and if the log, if there is one, holds the same. A lane is plain if its messages are, and
each started after the one before had ended. Nothing of a plain lane can break a rule of the audit; what is in doubt
counts as not plain, and is judged in full. One shuffle by message, one by lane, of rows that are only long integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from inturn.consumer.trace import ALONE, OF_KEY, OF_PARTITION, SUCCESS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

_NEVER = (1 << 63) - 1
_LOOKED_AT = (
    "place bigint, lane bigint, offset bigint, key_hash bigint, start_ns bigint, end_ns bigint, seq bigint, "
    "epoch bigint, term_ns bigint, is_plain boolean"
)


def place_number() -> Column:
    """Stands for a partition of a group. Two that have the same number are taken as one, which is never plain."""
    return F.xxhash64("subject", "group", "partition")


def lane_number(kind: Column, key_hash: Column) -> Column:
    of_lane = F.when(kind == OF_KEY, key_hash).when(kind == ALONE, F.col("offset"))
    return F.xxhash64("subject", "group", "partition", kind, F.coalesce(of_lane, F.lit(0)))


@dataclass(frozen=True, slots=True)
class Leases:
    """Of each place and epoch: granted, and when the first higher one was."""

    granted: Mapping[tuple[int, int], tuple[int, int]]
    skew_ns: int

    def are_stale(self, places: Any, epochs: Any, starts_ns: Any) -> Any:
        import numpy as np

        pairs, which = np.unique(np.stack([places, epochs]), axis=1, return_inverse=True)
        known = [self.granted.get((int(place), int(epoch)), (_NEVER, 0)) for place, epoch in pairs.T]
        granted_ns, next_ns = (np.array(column, np.int64)[which.reshape(-1)] for column in zip(*known, strict=True))
        return (granted_ns - self.skew_ns > starts_ns) | (next_ns < starts_ns - self.skew_ns)


@dataclass(frozen=True, slots=True)
class Steps:
    """Of each place, by offset: which commit was the first to pass it; from, to, epoch, asked for at, by a grant."""

    by_place: Mapping[int, Any]

    def are_in_time(self, places: Any, offsets: Any, epochs: Any, ends_ns: Any) -> Any:
        """Not passed, or by a commit of the same epoch that came later."""
        import numpy as np

        in_time = np.ones(len(places), bool)
        for place in np.unique(places):
            steps = self.by_place.get(int(place))
            if steps is None:
                continue
            rows = np.flatnonzero(places == place)
            at = np.searchsorted(steps[0], offsets[rows], "right") - 1
            step = steps[:, np.maximum(at, 0)]
            is_passed = (at >= 0) & (offsets[rows] < step[1])
            is_known = (step[2] == epochs[rows]) & (step[3] >= ends_ns[rows]) & (step[4] == 0)
            in_time[rows] = ~is_passed | is_known
        return in_time

    def ends(self) -> dict[int, int]:
        """How far the commits came."""
        return {place: int(steps[1].max()) for place, steps in self.by_place.items()}


def looked_at(runs: DataFrame, leases: Leases, steps: Steps) -> DataFrame:
    """What is to be known of each run, and whether it is plain by itself."""

    def look(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield _look(batch, leases, steps)

    narrow = runs.select(
        place_number().alias("place"),
        lane_number(F.col("lane_kind"), F.col("key_hash")).alias("lane"),
        *("offset", "key_hash", "start_ns"),
        F.coalesce("end_ns", F.lit(_NEVER)).alias("end_ns"),
        *("seq", "epoch", "term_ns"),
        F.coalesce("result", F.lit(-1)).alias("result"),
    )
    return narrow.mapInArrow(look, _LOOKED_AT)


def _look(batch: pa.RecordBatch, leases: Leases, steps: Steps) -> pa.RecordBatch:
    import pyarrow as pa

    columns = {name: batch.column(name) for name in batch.schema.names}
    place, offset, start, end, epoch, result = (
        columns[name].to_numpy(zero_copy_only=False)
        for name in ("place", "offset", "start_ns", "end_ns", "epoch", "result")
    )
    is_plain = (result == SUCCESS) & (start <= end) & (end < _NEVER)
    is_plain &= ~leases.are_stale(place, epoch, start) & steps.are_in_time(place, offset, epoch, end)
    kept = [columns[part.split()[0]] for part in _LOOKED_AT.split(", ")[:-1]]
    return pa.RecordBatch.from_arrays([*kept, pa.array(is_plain)], [part.split()[0] for part in _LOOKED_AT.split(", ")])


def judged(
    runs: DataFrame,
    stored: Mapping[str, DataFrame],
    claims: DataFrame | None,
    odd: DataFrame | None,
    *,
    complete: bool,
    ends: DataFrame | None,
) -> DataFrame:
    """Every message: place, lane, offset, run_count, is_odd: it, or something else in its lane, needs a closer look.

    runs     as they were looked at
    stored   log, sent: what is stored
    claims   place, offset, epoch, at_ns, by_grant: what says by name that a message is done
    odd      place, offset of messages that something unusual is told of
    ends     place, offset: how far commits came
    """
    zero = F.lit(0)
    parts = [runs.withColumn("is_run", F.lit(1))]
    for name, rows in stored.items():
        parts.append(
            rows.select(
                place_number().alias("place"),
                F.when(F.col("order") == "partition", lane_number(F.lit(OF_PARTITION), zero))
                .when(F.col("stored.key_hash").isNotNull(), lane_number(F.lit(OF_KEY), F.col("stored.key_hash")))
                .alias("lane"),
                "offset",
                F.col("stored.key_hash").alias("stored_hash"),
                F.xxhash64("stored.message_id").alias("id_hash"),
                F.lit(1).alias(f"is_{name}"),
            )
        )
    if claims is not None:
        told = F.col("epoch").alias("claim_epoch"), F.col("at_ns").alias("claim_ns")
        parts.append(claims.select("place", "offset", *told, F.col("by_grant").cast("int").alias("unsure")))
    if odd is not None:
        parts.append(odd.select("place", "offset", F.lit(1).alias("unsure"), F.lit(1).alias("is_told")))
    every = parts[0]
    for part in parts[1:]:
        every = every.unionByName(part, allowMissingColumns=True)
    messages = _messages(every, stored, complete, ends)
    return _lanes(messages)


def _messages(every: DataFrame, stored: Mapping[str, DataFrame], complete: bool, ends: DataFrame | None) -> DataFrame:
    names = set(every.columns)

    def total(name: str) -> Column:
        return (F.coalesce(F.sum(name), F.lit(0)) if name in names else F.lit(0)).alias(name)

    edges = [name for name in ("lane", "key_hash", "stored_hash", "id_hash", "claim_epoch") if name in names]
    rows = every.groupBy("place", "offset").agg(
        *(F.min(name).alias(name) for name in ("start_ns", "seq", "epoch", "term_ns", "is_plain")),
        F.max("end_ns").alias("end_ns"),
        *(F.min(name).alias(f"{name}_min") for name in edges),
        *(F.max(name).alias(f"{name}_max") for name in edges),
        F.min("claim_ns" if "claim_ns" in names else F.lit(None).cast("long")).alias("claim_ns"),
        *map(total, ("is_run", "is_log", "is_sent", "unsure", "is_told")),
    )
    there = F.col("is_run") + F.col("is_log") + F.col("is_sent") + F.col("is_told")
    rows = rows.where(there > 0)
    is_plain = (F.col("is_run") == 1) & F.col("is_plain") & (F.col("unsure") == 0)
    for name in edges:
        is_plain &= F.col(f"{name}_min").isNull() | (F.col(f"{name}_min") == F.col(f"{name}_max"))
    if "claim_epoch" in names:
        in_time = (F.col("claim_epoch_min") == F.col("epoch")) & (F.col("claim_ns") >= F.col("end_ns"))
        is_plain &= F.col("claim_ns").isNull() | in_time
    for source in stored:
        is_plain &= F.col(f"is_{source}") == 1
    if stored:
        is_plain &= F.col("key_hash_min").isNull() | F.col("key_hash_min").eqNullSafe(F.col("stored_hash_min"))
    is_odd = ~F.coalesce(is_plain, F.lit(False))
    end_ns = F.coalesce("end_ns", F.lit(_NEVER))
    if stored and not complete and ends is not None:
        rows = rows.join(F.broadcast(ends.select("place", F.col("offset").alias("committed"))), ["place"], "left")
        is_new = (there == 1) & (F.col("is_run") == 0) & (F.col("unsure") == 0) & F.col("claim_ns").isNull()
        is_odd &= ~(is_new & (F.col("offset") >= F.coalesce("committed", F.lit(0))))
    alone = F.xxhash64("place", "offset")
    return rows.select(
        "place",
        "offset",
        F.coalesce("lane_min", alone).alias("lane"),
        (F.col("lane_min") != F.col("lane_max")).alias("is_torn"),
        *("start_ns", "seq", "epoch", "term_ns"),
        end_ns.alias("end_ns"),
        F.col("is_run").alias("run_count"),
        is_odd.alias("is_odd"),
    )


def _lanes(messages: DataFrame) -> DataFrame:
    by_offset = Window.partitionBy("lane").orderBy("offset")
    before = {name: F.lag(name).over(by_offset) for name in ("place", "start_ns", "seq", "end_ns", "term_ns")}
    rows = messages.withColumns({f"{name}_before": column for name, column in before.items()})
    start, seq = F.col("start_ns"), F.col("seq")
    in_order = (start >= F.col("end_ns_before")) & (
        (start > F.col("start_ns_before")) | ((start == F.col("start_ns_before")) & (seq > F.col("seq_before")))
    )
    in_order &= (F.col("place") == F.col("place_before")) & (F.col("term_ns") >= F.col("term_ns_before"))
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
