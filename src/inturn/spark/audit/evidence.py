"""The columns of an audit, and expressions that its rules share: of one message, or of the evidence for a violation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from inturn.consumer.trace import EXCEPTION, FAILED, ROLLBACK
from inturn.model.violation import ViolationKind

if TYPE_CHECKING:
    from pyspark.sql import Column

GROUP = ("subject", "group")
PLACE = (*GROUP, "partition")
MESSAGE = (*PLACE, "offset")
LANE = (*PLACE, "lane_kind", "lane")
NEVER = (1 << 63) - 1

RUN_FIELDS = ("start_ns", "seq", "end_ns", "offset", "epoch", "owner", "attempt", "result")
CLAIM = "until_ns bigint, at_ns bigint, epoch bigint, owner string, granted_ns bigint, by_grant boolean, cut boolean"
STORED = "struct<key_hash: bigint, message_id: string>"
_CLAIM_KIND = f"struct<{CLAIM.replace(' ', ': ').replace(',: ', ', ')}>"
RARE = {
    "claims": _CLAIM_KIND,
    "given_up": "struct<at_ns: bigint, by_name: boolean>",
    "parks": _CLAIM_KIND,
    "unparks": _CLAIM_KIND,
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What an audit judges by, see `audit`. `tells`: violations carry their evidence, else only their kind."""

    complete: bool
    skew_ns: int
    has_log: bool
    has_sent: bool
    tells: bool = False

    def found(self, kind: ViolationKind, is_broken: Column, evidence: Column, at_ns: Column | None = None) -> Column:
        """A violation, or null. The first four items of the evidence are kept; the latest of them is its time."""
        one = F.struct(F.lit(kind.value).alias("kind"))
        if self.tells:
            told = F.slice(evidence, 1, 4)
            at = F.array_max(told["start_ns"]) if at_ns is None else at_ns
            at = F.coalesce(at, F.lit(0)).alias("at_ns")
            one = F.struct(F.lit(kind.value).alias("kind"), F.col("offset").alias("offset"), at, told.alias("evidence"))
        return F.when(is_true(is_broken), one)


def is_true(column: Column) -> Column:
    """False where the column is null."""
    return F.coalesce(column, F.lit(False))


def attempts_lost() -> Column:
    """Runs of a message with an attempt below an earlier one, or equal to an attempt that failed in the same epoch."""

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


def number_of(kind: ViolationKind) -> Column:
    return F.size(F.filter("violations", lambda one: one["kind"] == kind.value))


def does_not_pass_through(park: Column) -> Column:
    """A message that one commit both parks and takes out again was never in the parking lot."""
    return ~F.exists("unparks", lambda out: (out["until_ns"] == park["until_ns"]) & (out["owner"] == park["owner"]))


def log_hash() -> Column:
    return F.coalesce(F.get("logs", F.lit(0))["key_hash"], F.get("sents", F.lit(0))["key_hash"])


def list_or_none(name: str, is_there: bool, kind: str) -> Column:
    return F.col(name) if is_there else F.array().cast(f"array<{kind}>")


def skew_between(is_other: Column, skew_ns: int) -> Column:
    return F.when(F.coalesce(is_other, F.lit(True)), skew_ns).otherwise(0)


def struct_of(schema: str) -> Column:
    return F.struct(*(part.split()[0] for part in schema.split(", ")))


def nulls(schema: str) -> list[Column]:
    parts = [part.split() for part in schema.split(", ")]
    return [F.lit(None).cast(kind).alias(name) for name, kind in parts]


def run_evidence(run: Column) -> Column:
    fields = ("offset", "epoch", "owner", "attempt", "result", "start_ns", "end_ns")
    return F.struct(
        F.lit("run").alias("what"), F.col("partition").alias("partition"), *(run[name].alias(name) for name in fields)
    )


def claim_evidence(claim: Column) -> Column:
    return F.struct(
        F.when(claim["by_grant"], F.lit("lease, with what is done")).otherwise(F.lit("commit")).alias("what"),
        F.col("partition").alias("partition"),
        F.col("offset").alias("offset"),
        claim["epoch"].alias("epoch"),
        claim["owner"].alias("owner"),
        *nulls("attempt int, result int"),
        claim["at_ns"].alias("start_ns"),
        claim["until_ns"].alias("end_ns"),
    )


def place_evidence(what: str) -> Column:
    unknown = nulls("epoch bigint, owner string, attempt int, result int, start_ns bigint, end_ns bigint")
    return F.struct(F.lit(what).alias("what"), F.col("partition"), F.col("offset"), *unknown)
