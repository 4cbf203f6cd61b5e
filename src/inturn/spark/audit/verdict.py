"""What an audit says: counts of each group, and each violation with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inturn.consumer.trace import RESULTS
from inturn.model.errors import InturnError
from inturn.model.violation import ViolationKind

_STR_VIOLATIONS_MAX = 20
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


@dataclass(frozen=True, slots=True)
class FoundViolation:
    """A violation, and when it happened."""

    at_ns: int
    violation: AuditViolation

    def rank(self) -> tuple[Any, ...]:
        """The order of violations in a verdict: by time, then by place."""
        one = self.violation
        offset = -1 if one.offset is None else one.offset
        return self.at_ns, one.subject, one.group, one.partition, one.kind.value, offset


def violation(
    kind: ViolationKind,
    subject: str,
    group: str,
    partition: int,
    offset: int | None,
    evidence: tuple[AuditEvidence, ...],
) -> AuditViolation:
    return AuditViolation(kind, subject, group, partition, offset, _MESSAGES[kind], evidence)


def violation_of(row: Any) -> FoundViolation:
    """From a row of Spark, with the columns of a place, kind, offset, at_ns and evidence."""
    evidence = tuple(
        AuditEvidence(**{**item.asDict(), "result": None if item["result"] is None else RESULTS[item["result"]]})
        for item in row["evidence"]
    )
    place = row["subject"], row["group"], row["partition"], row["offset"]
    return FoundViolation(row["at_ns"], violation(ViolationKind(row["kind"]), *place, evidence))


def _seconds(at_ns: int | None) -> str:
    return "?" if at_ns is None else f"{at_ns / 1e9:.6f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
