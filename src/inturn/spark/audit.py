"""The audit: proves from traces, on Spark, that the order was kept. For any number of rows.

    verdict = audit(spark, "./traces", log=spark.read.format("inturn")…)
    verdict.raise_if_bad()

It judges by the rules of the order checker (`inturn.testing.check`), but not one event after the other. What is plainly
in order, which is nearly all, shows in a few numbers of each message (`inturn.spark.plain`). Then two shuffles:
by message, to compare all that is known of each (runs, commits that cover it, the parking lot, the log); then by lane,
to compare each message with those before it, and each run with the one before. Leases, and how far commits came, are
small and are sent to all. Only counts and the first violations come back to the driver.

Times of one consumer are of one clock and are compared exactly. Times of two are compared with `clock_skew_s` between
them: what lies closer together is taken as in order. Epochs, not times, say who came after whom.

Longer than a usual file, because the rules share their columns and are read best beside each other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from inturn.consumer.trace import ALONE, EXCEPTION, FAILED, MOVED, OF_KEY, OF_PARTITION, RESULTS, ROLLBACK, SUCCESS
from inturn.model.errors import InturnError, InvalidInput
from inturn.model.tags import TagFilter, tag_filter, tags_text
from inturn.model.violation import ViolationKind
from inturn.security.credentials import Credentials
from inturn.security.tls import TlsSettings
from inturn.spark.options import credential_options
from inturn.spark.plain import Leases, Steps, judged, looked_at, place_number
from inturn.spark.traces import TracePaths, Traces, read_traces

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

VIOLATIONS_MAX = 100
CLOCK_SKEW_S = 0.05
_BUCKET = 1024  # offsets
_STR_VIOLATIONS_MAX = 20
_GROUP = ("subject", "group")
_PLACE = (*_GROUP, "partition")
_MESSAGE = (*_PLACE, "offset")
_LANE = (*_PLACE, "lane_kind", "lane")
_NEVER = (1 << 63) - 1
_BROADCAST_MAX = 200_000

_RUN = "start_ns bigint, seq bigint, end_ns bigint, offset bigint, epoch bigint, owner string, attempt int, result int"
_RUN_FIELDS = ("start_ns", "seq", "end_ns", "offset", "epoch", "owner", "attempt", "result")
_CLAIM = "until_ns bigint, at_ns bigint, epoch bigint, owner string, granted_ns bigint, by_grant boolean, cut boolean"
_STORED = "struct<key_hash: bigint, message_id: string>"
_CLAIM_KIND = f"struct<{_CLAIM.replace(' ', ': ').replace(',: ', ', ')}>"
_RARE = {
    "claims": _CLAIM_KIND,
    "given_up": "struct<at_ns: bigint, by_name: boolean>",
    "parks": _CLAIM_KIND,
    "unparks": _CLAIM_KIND,
}
_EVIDENCE = (
    "what string, partition int, offset bigint, epoch bigint, owner string, attempt int, result int, "
    "start_ns bigint, end_ns bigint"
)


@dataclass(frozen=True, slots=True)
class AuditEvidence:
    """A row of the trace: a run, or a commit, or a lease; times are of the wall clock of its consumer."""

    what: str
    partition: int
    offset: int | None
    epoch: int | None
    owner: str | None
    attempt: int | None
    result: str | None
    start_ns: int | None
    end_ns: int | None

    def __str__(self) -> str:
        told = {"offset": self.offset, "epoch": self.epoch, "owner": self.owner, "attempt": self.attempt}
        words = [self.what, *(f"{name} {value}" for name, value in told.items() if value is not None)]
        times = f"{_seconds(self.start_ns)} to {_seconds(self.end_ns)}"
        return ", ".join([*words, times if self.result is None else f"{times}: {self.result}"])


@dataclass(frozen=True, slots=True)
class AuditViolation:
    kind: ViolationKind
    subject: str
    group: str
    partition: int
    offset: int | None
    message: str
    evidence: tuple[AuditEvidence, ...]

    def __str__(self) -> str:
        at = f"subject {self.subject!r}, group {self.group!r}, partition {self.partition}"
        at += "" if self.offset is None else f", offset {self.offset}"
        return "\n".join([f"{self.kind.upper()}: {at}: {self.message}", *(f"    {item}" for item in self.evidence)])


@dataclass(frozen=True, slots=True)
class GroupAudit:
    """What was found of one group on one subject. `broken` counts violations by their kind.

    unproven        committed as done, but the trace of a consumer that was killed does not show it any more
    unseen_epochs   leases that nobody left a trace of: some member did not record, or never got the answer
    """

    subject: str
    group: str
    started: int
    finished: int
    duplicates: int
    commits: int
    lease_grants: int
    overlaps_after_lease_loss: int
    parked: int
    skipped: int
    unproven: int
    unseen_epochs: int
    broken: Mapping[ViolationKind, int]

    @property
    def ok(self) -> bool:
        return not self.broken


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Look at the counts, too: an empty trace breaks no order. `violations` are the first of `violation_count`."""

    groups: tuple[GroupAudit, ...]
    violations: tuple[AuditViolation, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        return all(group.ok for group in self.groups)

    @property
    def violation_count(self) -> int:
        return sum(sum(group.broken.values()) for group in self.groups)

    def kinds(self) -> set[ViolationKind]:
        return {kind for group in self.groups for kind in group.broken}

    def total(self, count: str) -> int:
        """Of all groups: `total("started")`."""
        return sum(getattr(group, count) for group in self.groups)

    def raise_if_bad(self) -> None:
        """Raise `OrderBroken` unless the order was kept."""
        if not self.ok:
            raise OrderBroken(self)

    def __str__(self) -> str:
        total = self.total
        counts = (
            f"{total('started')} started, {total('finished')} finished ({_count(total('duplicates'), 'duplicate')}), "
            f"{_count(total('lease_grants'), 'lease grant')}, {_count(total('commits'), 'commit')}, "
            f"{_count(total('overlaps_after_lease_loss'), 'overlap')} after lease loss"
        )
        for name, words in (
            ("parked", "parked"),
            ("skipped", "skipped by name"),
            ("unproven", "unproven, of consumers that were killed"),
            ("unseen_epochs", "leases without a trace"),
        ):
            counts += f", {total(name)} {words}" if total(name) else ""
        if self.ok:
            return f"order kept: {counts}"
        shown = [str(violation) for violation in self.violations[:_STR_VIOLATIONS_MAX]]
        more = self.violation_count - len(shown)
        tail = [f"... and {_count(more, 'more violation')}"] if more else []
        return "\n".join([f"order broken, {_count(self.violation_count, 'violation')}: {counts}", *shown, *tail])


class OrderBroken(InturnError, AssertionError):
    """Raised by `AuditVerdict.raise_if_bad`; the message is the verdict's text."""

    def __init__(self, verdict: AuditVerdict) -> None:
        self.verdict = verdict
        super().__init__(str(verdict))


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
        self.events, self.order, self.complete, self.skew_ns = events, order, complete, skew_ns
        self.has_log, self.has_sent = log is not None, sent is not None
        self.tells = False
        self.resets = (
            self._of_kind("reset")
            .groupBy(*_PLACE)
            .agg(F.max("at_ns").alias("reset_ns"), F.max_by("offset", "at_ns").alias("reset_offset"))
        )
        sets = F.size("finished") + F.size("parked") + F.size("unparked") > 0
        there = events.agg(
            *(F.max(F.col("kind") == kind).alias(kind) for kind in ("reset", "claimed", "resumed")),
            F.max(sets | F.col("kind").isin("skipped", "moved")).alias("rare"),
        ).collect()[0]
        self.has_resets, self.has_claims, self.has_resumes, self.has_rare = map(bool, there)
        if self.has_resets:
            last = self.resets
            self.events = self._since_reset(events, last, "at_ns")
            runs = self._since_reset(runs, last, "start_ns")
        # Each of these is small, computed once, and cut from how it came about, which would be planned again and again.
        self.cut = self._cut_owners().localCheckpoint()
        self.leases = self._leases().localCheckpoint()
        self.floors = self._floors().localCheckpoint()
        self.commits = self._commits().localCheckpoint()
        self.claims = self._claims()
        self.groups = self._groups().localCheckpoint()
        self.has_hand_overs = bool(self.leases.where("next_granted_ns is not null").take(1))
        self.told_runs = self._with_terms(runs)
        self.runs = self._judged_runs(self.told_runs)
        self.log = self._stored(log, "log")
        self.sent = self._stored(sent, "sent")
        self.odd: DataFrame | None = None  # messages that need a closer look; None: all of them

    @functools.cached_property
    def steps(self) -> DataFrame:
        return self._steps().localCheckpoint()

    def run(self, violations_max: int) -> AuditVerdict:
        small = functools.reduce(lambda one, other: one.unionByName(other), self._lease_violations()).localCheckpoint()
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
            shown = small.orderBy("at_ns", *_PLACE, "kind", "offset").limit(violations_max).collect()
            return AuditVerdict(tuple(counts), tuple(map(_violation_of, shown)))
        if any(group.broken for group in counts) and violations_max:
            self.tells = True
            every = self._lanes(self._messages()).select(*_PLACE, F.explode("violations").alias("one"))
            every = every.select(*_PLACE, "one.*").unionByName(small)
            shown = every.orderBy("at_ns", *_PLACE, "kind", "offset").limit(violations_max).collect()
        return AuditVerdict(tuple(counts), tuple(map(_violation_of, shown)))

    # What needs no closer look

    def _looked_at(self) -> DataFrame:
        """Every message, by a few numbers: see `inturn.spark.plain`."""
        place = place_number().alias("place")
        leases = self.leases.select(place, "epoch", "granted_ns", F.coalesce("next_granted_ns", F.lit(_NEVER)))
        granted = {(row[0], row[1]): (row[2], row[3]) for row in leases.collect()}
        steps = Steps(self._steps_by_place())
        runs = looked_at(self.told_runs, Leases(granted, self.skew_ns), steps)
        stored = {name: rows for name, rows in (("log", self.log), ("sent", self.sent)) if rows is not None}
        claims = odd = ends = None
        if self.has_rare:
            claims = self.claims.where(F.size("finished") > 0).select(
                place, F.explode("finished").alias("offset"), "epoch", "at_ns", "by_grant"
            )
            lots = [
                self.commits.select(*_GROUP, F.explode(name).alias("in_lot")).select(
                    *_GROUP, "in_lot.partition", "in_lot.offset"
                )
                for name in ("parked", "unparked")
            ]
            told = self._of_kind("skipped", "moved").select(*_MESSAGE)
            odd = told.unionByName(lots[0]).unionByName(lots[1]).select(place, "offset")
        if stored and not self.complete:
            known = list(steps.ends().items())
            ends = self.leases.sparkSession.createDataFrame(known, "place bigint, offset bigint")
        return judged(runs, stored, claims, odd, complete=self.complete, ends=ends)

    def _steps_by_place(self) -> dict[int, Any]:
        """As `_steps`, but here: one array per place, of what `Steps` says."""
        import numpy as np

        claims = (
            self.claims.where(~F.col("is_claim"))
            .join(F.broadcast(self.floors), [*_PLACE], "left")
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
            for row in self.events.select(*_GROUP, place_number().alias("place")).distinct().collect()
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
            self.odd = F.broadcast(chosen) if odd <= _BROADCAST_MAX else chosen
        return _PlainCounts(by_group, odd > 0)

    def _odd_only(self, rows: DataFrame) -> DataFrame:
        if self.odd is None:
            return rows
        return rows.withColumn("place", place_number()).join(self.odd, ["place", "offset"], "left_semi").drop("place")

    # What is small: leases and commits

    def _of_kind(self, *kinds: str) -> DataFrame:
        return self.events.where(F.col("kind").isin(*kinds))

    def _since_reset(self, rows: DataFrame, resets: DataFrame, at: str) -> DataFrame:
        """A reset begins anew: what was before it is not judged."""
        return (
            rows.join(F.broadcast(resets), [*_PLACE], "left")
            .where(F.col("reset_ns").isNull() | (F.col(at) >= F.col("reset_ns")))
            .drop("reset_ns", "reset_offset")
        )

    def _cut_owners(self) -> DataFrame:
        """Those whose trace has no end: they were killed, or still run."""
        marks = self._of_kind("opened", "closed").groupBy(*_GROUP, "owner")
        return (
            marks.agg(F.max(F.col("kind") == "closed").alias("is_closed"))
            .where(~F.col("is_closed"))
            .select(*_GROUP, "owner", F.lit(True).alias("cut"))
        )

    def _leases(self) -> DataFrame:
        """By epoch: when it was granted, when the first higher one was, when it was over for certain."""
        granted = (
            self._of_kind("granted")
            .groupBy(*_PLACE, "epoch")
            .agg(
                F.min("until_ns").alias("granted_ns"),
                F.collect_set("owner").alias("owners"),
                F.max("by_node").alias("by_node"),
            )
        )
        # A claim that is given back ends nothing for the others under the same lease.
        certain = F.col("by_node") | ((F.col("why") == "released") & ~F.col("is_claim"))
        ended = self._of_kind("ended").where(certain).groupBy(*_PLACE, "epoch").agg(F.max("at_ns").alias("ended_ns"))
        higher = Window.partitionBy(*_PLACE).orderBy(F.desc("epoch")).rowsBetween(Window.unboundedPreceding, -1)
        lower = Window.partitionBy(*_PLACE).orderBy("epoch")
        leases = granted.join(ended, [*_PLACE, "epoch"], "left").withColumn(
            "next_granted_ns", F.min("granted_ns").over(higher)
        )
        # Cut is what any of those was that worked in it: its owner, or somebody under the lease.
        workers = self._of_kind("granted", "claimed").select(*_PLACE, "epoch", "owner").distinct()
        cut = workers.join(self.cut, [*_GROUP, "owner"]).groupBy(*_PLACE, "epoch").agg(F.max("cut").alias("cut"))
        with_cut = leases.join(cut, [*_PLACE, "epoch"], "left")
        before = F.coalesce(F.lag("cut").over(lower), F.lit(False))
        return with_cut.withColumn("cut_before", before).withColumn("lag_epoch", F.lag("epoch").over(lower))

    def _floors(self) -> DataFrame:
        """Where the group began, as far as the trace shows."""
        first = self._of_kind("granted").where("offset >= 0").groupBy(*_PLACE)
        floors = first.agg(F.min_by("offset", F.struct("epoch", "until_ns")).alias("floor"))
        if not self.has_resets:
            return floors
        reset = self.resets.select(*_PLACE, F.col("reset_offset").alias("floor"))
        return reset.unionByName(floors.join(reset, [*_PLACE], "left_anti"))

    def _groups(self) -> DataFrame:
        """Those that left a trace, and the order that their members said to keep."""
        told = F.max(F.when(F.col("kind") == "opened", F.col("why")))
        order = F.coalesce(told, F.lit("key")) if self.order is None else F.lit(self.order)
        return self.events.groupBy(*_GROUP).agg(order.alias("order"))

    def _commits(self) -> DataFrame:
        return (
            self._of_kind("committed")
            .join(
                self.leases.select(*_PLACE, "epoch", "granted_ns", "owners", "next_granted_ns", "ended_ns"),
                [*_PLACE, "epoch"],
                "left",
            )
            .join(self.cut, [*_GROUP, "owner"], "left")
            .withColumn("cut", F.coalesce("cut", F.lit(False)))
            .withColumn("was_granted", F.col("granted_ns").isNotNull())
            .withColumn("granted_ns", F.coalesce("granted_ns", "at_ns"))
            .withColumn("by_grant", F.lit(False))
        )

    def _claims(self) -> DataFrame:
        """Who said that something is done, and what that can rest upon: commits, and what came with a lease."""
        commits = self.commits.select(
            *_PLACE,
            "offset",
            "finished",
            "until_ns",
            "at_ns",
            "epoch",
            "owner",
            "granted_ns",
            "by_grant",
            "cut",
            "is_claim",
        )
        grants = (
            self._of_kind("granted")
            .where("offset >= 0")
            .join(self.leases.select(*_PLACE, "epoch", "cut_before"), [*_PLACE, "epoch"])
            .select(
                *_PLACE,
                "offset",
                "finished",
                "until_ns",
                "at_ns",
                "epoch",
                "owner",
                F.col("until_ns").alias("granted_ns"),
                F.lit(True).alias("by_grant"),
                F.col("cut_before").alias("cut"),
                F.lit(False).alias("is_claim"),
            )
        )
        return commits.unionByName(grants)

    def _steps(self) -> DataFrame:
        """Which claim was the first to pass an offset, in buckets: (place, bucket) → the steps that touch it."""
        before = Window.partitionBy(*_PLACE).orderBy("until_ns", "offset").rowsBetween(Window.unboundedPreceding, -1)
        floor = F.coalesce("floor", F.lit(0))
        steps = (
            self.claims.where(~F.col("is_claim"))
            .join(F.broadcast(self.floors), [*_PLACE], "left")
            .withColumn("from", F.coalesce(F.max("offset").over(before), floor))
            .withColumn("from", F.greatest("from", floor))
            .where(F.col("offset") > F.col("from"))
        )
        claim = F.struct("from", F.col("offset").alias("to"), _struct_of(_CLAIM).alias("claim"))
        buckets = F.sequence(F.floor(F.col("from") / _BUCKET), F.floor((F.col("offset") - 1) / _BUCKET))
        return (
            steps.select(*_PLACE, claim.alias("step"), F.explode(buckets).alias("bucket"))
            .groupBy(*_PLACE, "bucket")
            .agg(F.collect_list("step").alias("steps"))
        )

    def _lease_violations(self) -> list[DataFrame]:
        grants = self._of_kind("granted")
        by_time = Window.partitionBy(*_PLACE).orderBy("until_ns", "seq")
        before = by_time.rowsBetween(Window.unboundedPreceding, -1)
        event = _event_evidence
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
        not_raised = _violations(
            raised,
            ViolationKind.EPOCH_NOT_RAISED,
            F.lit(None),
            F.col("until_ns"),
            F.array(F.col("highest.evidence"), event("kind")),
        )
        previous = F.lag(F.struct("epoch", "owner", event("kind"))).over(by_time)
        ends = (
            self._of_kind("ended")
            .where("by_node")
            .select(
                *_PLACE,
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
        two_owners = _violations(
            held,
            ViolationKind.TWO_OWNERS,
            F.lit(None),
            F.col("until_ns"),
            F.array(F.col("previous.evidence"), event("kind")),
        )
        commits, skew = self.commits, self.skew_ns
        has_grants = self.leases.select(*_PLACE).distinct().withColumn("has_grants", F.lit(True))
        is_stale = (
            ~F.col("was_granted")
            | (F.col("granted_ns") > F.col("until_ns") + skew)
            | (F.col("next_granted_ns") + skew < F.col("at_ns"))
            | (F.col("ended_ns") + skew < F.col("at_ns"))
            | (~F.col("is_claim") & ~F.array_contains("owners", F.col("owner")))
        )
        stale = commits.join(F.broadcast(has_grants), [*_PLACE], "left").where(is_stale)
        stale_commits = _violations(
            stale, ViolationKind.STALE_COMMIT, F.col("offset"), F.col("until_ns"), F.array(event("kind"))
        )
        return [not_raised, two_owners, stale_commits]

    # What is known of each message

    def _with_terms(self, runs: DataFrame) -> DataFrame:
        """Runs, with the lane that they count to, and since when their claim was in force."""
        lane_kind, term = F.col("lane_kind"), F.lit(0).cast("long")
        if self.order == "partition":
            lane_kind = F.lit(OF_PARTITION)
        elif self.order == "key":
            lane_kind = F.when(F.col("key_hash").isNotNull(), OF_KEY).otherwise(ALONE)
        if self.has_claims:
            claims = self._of_kind("claimed").groupBy(*_PLACE, "epoch", "owner")
            times = claims.agg(F.collect_list("until_ns").alias("claimed_ns"))
            runs = runs.join(F.broadcast(times), [*_PLACE, "epoch", "owner"], "left")
            before_start = F.filter("claimed_ns", lambda at: at <= F.col("start_ns"))
            term = F.coalesce(F.array_max(before_start), F.lit(0))
        return runs.withColumn("lane_kind", lane_kind).withColumn("term_ns", term)

    def _judged_runs(self, runs: DataFrame) -> DataFrame:
        """Runs, with what the leases say about each."""
        leases = self.leases.select(*_PLACE, "epoch", F.col("granted_ns"), "next_granted_ns")
        partitions = self.leases.select(*_PLACE).distinct().withColumn("has_grants", F.lit(True))
        joined = runs.join(F.broadcast(leases), [*_PLACE, "epoch"], "left").join(
            F.broadcast(partitions), [*_PLACE], "left"
        )
        start, skew = F.col("start_ns"), self.skew_ns
        is_stale = F.col("has_grants").isNotNull() & (
            F.col("granted_ns").isNull()
            | (F.col("granted_ns") > start + skew)
            | F.coalesce(F.col("next_granted_ns") + skew < start, F.lit(False))
        )
        is_left_over = F.coalesce(F.col("end_ns"), F.lit(_NEVER)) > F.col("next_granted_ns")
        more = (
            is_stale.alias("stale"),
            F.coalesce(is_left_over, F.lit(False)).alias("left_over"),
            *("key_hash", "lane_kind", "term_ns"),
        )
        return joined.select(*_MESSAGE, F.struct(*_RUN_FIELDS, *more).alias("run"))

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
        groups = F.broadcast(self.groups)
        return chosen.join(groups, names) if names else chosen.crossJoin(groups)

    def _messages(self) -> DataFrame:
        """All that is known of each message, in one row."""
        told = [self.runs.select(*_MESSAGE, "run"), *self._rare()]
        for name, stored in (("log", self.log), ("sent", self.sent)):
            if stored is not None:
                told.append(stored.select(*_MESSAGE, F.col("stored").alias(name), "order"))
        told = [self._odd_only(rows) for rows in told]
        every = functools.reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), told)
        lists: dict[str, Column] = {
            name: F.collect_list(name) for name in ("run", "rare", "log", "sent") if name in every.columns
        }
        if "order" in every.columns:
            lists["order"] = F.max("order")
        grouped = every.groupBy(*_MESSAGE).agg(*(column.alias(name) for name, column in lists.items()))
        rows = grouped.select(
            *_MESSAGE,
            F.sort_array("run").alias("runs"),
            (F.when(F.size("rare") > 0, F.col("rare")) if "rare" in lists else F.lit(None)).alias("rare"),
            *(self._rare_of(name, "rare" in lists) for name in _RARE),
            *(_list_or_none(name, name in lists, _STORED).alias(f"{name}s") for name in ("log", "sent")),
            (F.col("order") if "order" in lists else F.lit(None).cast("string")).alias("order"),
        )
        rows = rows.where((F.size("runs") + F.size("logs") + F.size("sents") + F.size("parks")) > 0)
        rows = rows.withColumn("bucket", F.floor(F.col("offset") / _BUCKET)).join(
            F.broadcast(self.steps), [*_PLACE, "bucket"], "left"
        )
        rows = rows.join(F.broadcast(self.floors), [*_PLACE], "left").withColumn("floor", F.coalesce("floor", F.lit(0)))
        if not self.has_resumes:
            return self._judge_messages(rows.withColumn("resumed", F.lit(None).cast("array<bigint>")))
        resumed = self._of_kind("resumed").groupBy(*_PLACE, "key_hash").agg(F.collect_list("at_ns").alias("resumed"))
        rows = rows.withColumn("key_hash", F.get("runs", F.lit(0))["key_hash"])
        return self._judge_messages(rows.join(F.broadcast(resumed), [*_PLACE, "key_hash"], "left"))

    def _rare(self) -> list[DataFrame]:
        """What is told of few messages, each as a struct with one field that is not null."""

        def rare(name: str, value: Column) -> Column:
            fields = [
                value.alias(one) if one == name else F.lit(None).cast(kind).alias(one) for one, kind in _RARE.items()
            ]
            return F.struct(*fields).alias("rare")

        claimed = self.claims.where(F.size("finished") > 0).select(
            *_PLACE, F.explode("finished").alias("offset"), rare("claims", _struct_of(_CLAIM))
        )
        given_up = self._of_kind("skipped", "moved").select(
            *_MESSAGE, rare("given_up", F.struct("at_ns", (F.col("kind") == "skipped").alias("by_name")))
        )
        lots = [
            self.commits.where(F.size(name) > 0)
            .select(*_GROUP, F.explode(name).alias("place"), rare(target, _struct_of(_CLAIM)))
            .select(*_GROUP, "place.partition", "place.offset", "rare")
            for name, target in (("parked", "parks"), ("unparked", "unparks"))
        ]
        return [claimed, given_up, *lots] if self.has_rare else []

    def _rare_of(self, name: str, is_there: bool) -> Column:
        if not is_there:
            return F.array().cast(f"array<{_RARE[name]}>").alias(name)
        some = F.sort_array(F.filter(F.col("rare")[name], lambda one: one.isNotNull()))
        return F.when(F.size("rare") > 0, some).otherwise(F.array().cast(f"array<{_RARE[name]}>")).alias(name)

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
            odd(F.get(F.filter("parks", _does_not_pass_through), F.lit(0))).alias("park"),
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
                (run["end_ns"] <= F.col("done.at_ns") + _skew(run["owner"] != F.col("done.owner"), skew))
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
                & (run["start_ns"] > F.col("done.until_ns") + _skew(run["owner"] != F.col("done.owner"), skew))
            ),
        )
        stays = F.col("is_parked") & F.col("unpark").isNull()
        is_stored = (F.size("logs") + F.size("sents")) > 0
        must_be_done = F.lit(True) if self.complete else F.col("said").isNotNull()
        lost = is_stored & due & never & ~stays & ~F.col("unproven") & must_be_done
        run_evidence = lambda run: _run_evidence(run)  # noqa: E731
        claim_evidence = _claim_evidence(F.col("done"))
        stale = F.filter("runs", lambda run: run["stale"])
        attempts = _attempts_lost()
        found = [
            self._found(ViolationKind.STALE_START, F.size(stale) > 0, F.transform(stale, run_evidence)),
            self._found(
                ViolationKind.REPEATED,
                is_claimed & (F.size(repeated) > 0),
                F.concat(F.array(claim_evidence), F.transform(repeated, run_evidence)),
            ),
            self._found(
                ViolationKind.PREMATURE_COMMIT,
                premature & ~F.col("unproven"),
                F.concat(F.array(claim_evidence), F.transform("runs", run_evidence)),
            ),
            self._found(ViolationKind.LOST, lost, F.array(claim_evidence)),
            self._found(ViolationKind.ATTEMPT_LOST, F.size(attempts) > 0, F.transform(attempts, run_evidence)),
        ]
        found += self._identity()
        by_log = F.when(F.col("order") == "partition", OF_PARTITION).otherwise(
            F.when(_log_hash().isNotNull(), OF_KEY).otherwise(ALONE)
        )
        lane_kind = F.coalesce(
            F.get("runs", F.lit(0))["lane_kind"], F.when(F.col("order").isNotNull(), by_log), F.lit(ALONE)
        )
        rows = rows.withColumn("lane_kind", lane_kind)
        hashed = F.coalesce(_log_hash(), F.get("runs", F.lit(0))["key_hash"])
        lane = F.when(F.col("lane_kind") == OF_KEY, hashed).when(F.col("lane_kind") == ALONE, F.col("offset"))
        done_ns = F.least(
            F.array_min(F.col("finishes.end_ns")),
            F.col("given_up_ns"),
            F.when(F.col("unproven"), F.col("done.until_ns")),
        )
        done_by = F.array_min(F.transform("finishes", lambda run: F.struct(run["end_ns"], run["owner"])))["owner"]
        done_ns = odd(F.coalesce(done_ns, F.lit(_NEVER)))
        no_violations = F.slice(F.array(self._found(ViolationKind.LOST, F.lit(True), F.array(claim_evidence))), 1, 0)
        return rows.select(
            *_MESSAGE,
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
                    F.array(_place_evidence("acknowledged")),
                )
            )
        if self.has_sent and self.has_log:
            other = F.coalesce(first_log["message_id"] != first_sent["message_id"], F.lit(False))
            gone = (F.size("sents") > 0) & ((F.size("logs") == 0) | other)
            found.append(
                self._found(ViolationKind.LOST, gone, F.array(_place_evidence("acknowledged, but not in the log")))
            )
        if self.has_log or self.has_sent:
            known = F.coalesce(first_sent, first_log) if self.has_sent else first_log
            differs = F.filter(
                "runs",
                lambda run: run["key_hash"].isNotNull() & ~run["key_hash"].eqNullSafe(known["key_hash"]),
            )
            is_other = known.isNotNull() & (F.size(differs) > 0)
            found.append(self._found(ViolationKind.UNEXPECTED, is_other, F.transform(differs, _run_evidence)))
        if self.has_log and self.complete:
            nowhere = (F.size("runs") > 0) & ((F.size("logs") + F.size("sents")) == 0)
            found.append(self._found(ViolationKind.UNEXPECTED, nowhere, F.transform("runs", _run_evidence)))
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
        by_offset = Window.partitionBy(*_LANE).orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
        unfinished = F.max(F.struct("done_ns", "done_by", F.col("offset").alias("earlier"))).over(by_offset)
        of_lane = (
            messages.repartition(*_LANE)
            .withColumn("behind", unfinished)
            .withColumn("run_count", F.size("runs"))
            .select("*", F.posexplode_outer("runs").alias("number", "run"))
            .drop("runs")
        )
        run = F.col("run")
        has_run = run.isNotNull()
        told = _RUN_FIELDS if self.tells else ("offset", "result")
        row = F.struct(*(run[name].alias(name) for name in told), F.col("given_up_ns"))
        in_epoch = Window.partitionBy(*_LANE, "epoch", "term_ns").orderBy("start_ns", "seq")
        before = in_epoch.rowsBetween(Window.unboundedPreceding, -1)
        end_ns = F.when(has_run, F.coalesce(run["end_ns"], F.lit(_NEVER)))
        rows = of_lane.withColumns({name: run[name] for name in ("epoch", "term_ns", "start_ns", "seq")})
        rows = rows.withColumn("last", F.lag(row).over(in_epoch)).withColumn("open", F.max(end_ns).over(before))
        opened = F.max_by(row, end_ns).over(before) if self.tells else F.lit(None)
        rows = rows.withColumn("open_row", opened)
        if self.has_hand_overs:
            in_lane = Window.partitionBy(*_LANE).orderBy("start_ns", "seq").rowsBetween(Window.unboundedPreceding, -1)
            left_over = F.when(run["left_over"], F.struct(run["epoch"].alias("epoch"), run["end_ns"].alias("end_ns")))
            rows = rows.withColumn("left", F.collect_list(left_over).over(in_lane))
        else:
            rows = rows.withColumn("left", F.array().cast("array<struct<epoch: bigint, end_ns: bigint>>"))
        newer_term = F.lit(None).cast("long")
        if (
            self.has_claims
        ):  # whoever claims a lane that another had claimed has taken it over: that one starts nothing more
            terms = Window.partitionBy(*_LANE, "epoch").orderBy("start_ns", "seq")
            newer_term = F.max("term_ns").over(terms.rowsBetween(Window.unboundedPreceding, -1))
        rows = rows.withColumn("newer_term_ns", newer_term)
        lost_claim = (F.col("term_ns") > 0) & (F.col("newer_term_ns") > F.col("term_ns"))
        last, evidence = F.when(has_run, F.col("last")), _run_evidence(run)
        failed = last["result"].isin(FAILED, EXCEPTION, ROLLBACK)
        may_repeat = (last["result"] == ROLLBACK) | ((last["offset"] == run["offset"]) & failed)
        out_of_order = last.isNotNull() & (run["offset"] <= last["offset"]) & ~F.coalesce(may_repeat, F.lit(False))
        overlaps = F.col("open") > run["start_ns"]
        behind = F.col("behind")
        skipped = (
            has_run
            & behind["done_ns"].isNotNull()
            & (run["start_ns"] + _skew(behind["done_by"] != run["owner"], skew) < behind["done_ns"])
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
            *_nulls("epoch bigint, owner string, attempt int, result int, start_ns bigint"),
            F.when(behind["done_ns"] < _NEVER, behind["done_ns"]).alias("end_ns"),
        )
        judged = F.col("lane_kind").isNotNull()
        found = F.array_compact(
            F.array(
                self._found(ViolationKind.STALE_START, lost_claim, F.array(evidence), run["start_ns"]),
                self._found(
                    ViolationKind.OUT_OF_ORDER,
                    judged & out_of_order,
                    F.array(_run_evidence(last), evidence),
                    run["start_ns"],
                ),
                self._found(
                    ViolationKind.OVERLAP,
                    judged & overlaps,
                    F.array(_run_evidence(F.col("open_row")), evidence),
                    run["start_ns"],
                ),
                self._found(ViolationKind.SKIPPED, skipped, F.array(unfinished_evidence, evidence), run["start_ns"]),
                self._found(
                    ViolationKind.SKIPPED, ~skipped & went_on, F.array(_run_evidence(last), evidence), run["start_ns"]
                ),
            )
        )
        is_first = F.coalesce(F.col("number") == 0, F.lit(True))
        of_message = F.when(is_first, F.col("violations")).otherwise(F.slice("violations", 1, 0))
        overlapping = F.filter(
            "left",
            lambda one: (one["epoch"] < run["epoch"]) & (F.coalesce(one["end_ns"], F.lit(_NEVER)) > run["start_ns"]),
        )
        return rows.select(
            *_PLACE,
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
        by_kind = [F.sum(_number_of(kind)).alias(kind.name) for kind in kinds]
        counted = []
        if messages is not None:
            counted = messages.groupBy(*_GROUP).agg(*(F.sum(name).alias(name) for name in sums), *by_kind).collect()
        of_leases = small.groupBy(*_GROUP, "kind").count().collect()
        commits = self._of_kind("committed").groupBy(*_GROUP).count().collect()
        grants = (
            self.leases.groupBy(*_GROUP)
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


# Expressions


def _attempts_lost() -> Column:
    """Runs of a message with an attempt below one before, or with that of a try that had failed in the same epoch."""

    def worse(run: Column, number: Column) -> Column:
        before = F.filter(
            F.slice("runs", 1, number),
            lambda one: (
                ~one["stale"]
                & ~F.coalesce(
                    F.exists("resumed", lambda at: (at > one["start_ns"]) & (at <= run["start_ns"])), F.lit(False)
                )
            ),
        )
        highest = F.array_max(
            F.transform(
                before,
                lambda one: F.struct(
                    one["attempt"].alias("attempt"),
                    one["start_ns"].alias("start_ns"),
                    one["epoch"].alias("epoch"),
                    one["term_ns"].alias("term_ns"),
                    one["result"].alias("result"),
                ),
            )
        )
        is_same = (highest["epoch"] == run["epoch"]) & (highest["term_ns"] == run["term_ns"])
        has_failed = is_same & highest["result"].isin(FAILED, EXCEPTION, ROLLBACK)
        return F.coalesce(
            ~run["stale"]
            & (
                (run["attempt"] < highest["attempt"])
                | ((run["attempt"] == highest["attempt"]) & F.coalesce(has_failed, F.lit(False)))
            ),
            F.lit(False),
        )

    is_several = F.size("runs") > 1
    return F.when(is_several, F.filter("runs", worse)).otherwise(F.slice("runs", 1, 0))


def _number_of(kind: ViolationKind) -> Column:
    return F.size(F.filter("violations", lambda one: one["kind"] == kind.value))


def _does_not_pass_through(park: Column) -> Column:
    """Put into the lot and taken out of it by one commit, a message was never in it."""
    return ~F.exists("unparks", lambda out: (out["until_ns"] == park["until_ns"]) & (out["owner"] == park["owner"]))


def _log_hash() -> Column:
    return F.coalesce(F.get("logs", F.lit(0))["key_hash"], F.get("sents", F.lit(0))["key_hash"])


def _list_or_none(name: str, is_there: bool, kind: str) -> Column:
    return F.col(name) if is_there else F.array().cast(f"array<{kind}>")


def _skew(is_other: Column, skew_ns: int) -> Column:
    return F.when(F.coalesce(is_other, F.lit(True)), skew_ns).otherwise(0)


def _struct_of(schema: str) -> Column:
    return F.struct(*(part.split()[0] for part in schema.split(", ")))


def _nulls(schema: str) -> list[Column]:
    parts = [part.split() for part in schema.split(", ")]
    return [F.lit(None).cast(kind).alias(name) for name, kind in parts]


def _run_evidence(run: Column) -> Column:
    fields = ("offset", "epoch", "owner", "attempt", "result", "start_ns", "end_ns")
    return F.struct(
        F.lit("run").alias("what"), F.col("partition").alias("partition"), *(run[name].alias(name) for name in fields)
    )


def _claim_evidence(claim: Column) -> Column:
    return F.struct(
        F.when(claim["by_grant"], F.lit("lease, with what is done")).otherwise(F.lit("commit")).alias("what"),
        F.col("partition").alias("partition"),
        F.col("offset").alias("offset"),
        claim["epoch"].alias("epoch"),
        claim["owner"].alias("owner"),
        *_nulls("attempt int, result int"),
        claim["at_ns"].alias("start_ns"),
        claim["until_ns"].alias("end_ns"),
    )


def _place_evidence(what: str) -> Column:
    nulls = _nulls("epoch bigint, owner string, attempt int, result int, start_ns bigint, end_ns bigint")
    return F.struct(F.lit(what).alias("what"), F.col("partition"), F.col("offset"), *nulls)


def _event_evidence(what: str) -> Column:
    return F.struct(
        F.col(what).alias("what"),
        F.col("partition").alias("partition"),
        F.when(F.col("offset") >= 0, F.col("offset")).alias("offset"),
        F.col("epoch").alias("epoch"),
        F.col("owner").alias("owner"),
        *_nulls("attempt int, result int"),
        F.col("at_ns").alias("start_ns"),
        F.col("until_ns").alias("end_ns"),
    ).alias("evidence")


def _violations(rows: DataFrame, kind: ViolationKind, offset: Column, at_ns: Column, evidence: Column) -> DataFrame:
    return rows.select(
        *(F.col(name) for name in _PLACE),
        F.lit(kind.value).alias("kind"),
        offset.cast("long").alias("offset"),
        at_ns.alias("at_ns"),
        evidence.alias("evidence"),
    )


_MESSAGES = {
    ViolationKind.LOST: "stored, but never finished, parked or skipped",
    ViolationKind.UNEXPECTED: "what ran, or was acknowledged, is not what is stored there",
    ViolationKind.OUT_OF_ORDER: "started after one that is not before it in its lane",
    ViolationKind.REPEATED: "started although it had been committed as done",
    ViolationKind.OVERLAP: "started while another of its lane was running",
    ViolationKind.STALE_START: "started in an epoch that was over, or never granted",
    ViolationKind.SKIPPED: "started although an earlier one of its lane was not finished",
    ViolationKind.ATTEMPT_LOST: "started with an attempt that was used up",
    ViolationKind.PREMATURE_COMMIT: "committed as done although the committer could not know it finished",
    ViolationKind.STALE_COMMIT: "a commit was taken from somebody who did not hold the lease",
    ViolationKind.TWO_OWNERS: "the lease was granted while the one before had not ended",
    ViolationKind.EPOCH_NOT_RAISED: "the lease was granted with an epoch that is not above all before",
}


def _violation_of(row: Any) -> AuditViolation:
    kind = ViolationKind(row["kind"])
    evidence = tuple(
        AuditEvidence(**{**item.asDict(), "result": None if item["result"] is None else RESULTS[item["result"]]})
        for item in row["evidence"]
    )
    place = row["subject"], row["group"], row["partition"], row["offset"]
    return AuditViolation(kind, *place, _MESSAGES[kind], evidence)


def _seconds(at_ns: int | None) -> str:
    return "?" if at_ns is None else f"{at_ns / 1e9:.6f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
