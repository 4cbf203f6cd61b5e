"""What the order checker found in an act, by the words that the verdict of the demo uses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from inturn.testing.checker import Verdict, ViolationKind


class HasViolations(Protocol):
    """The result of either act."""

    @property
    def out_of_order(self) -> int: ...

    @property
    def overlapping(self) -> int: ...

    @property
    def lost(self) -> int: ...

    @property
    def skipped(self) -> int: ...

    @property
    def other_violations(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ViolationCounts:
    out_of_order: int
    overlapping: int
    lost: int  # messages; the others count violations
    skipped: int
    other_violations: int


def count_violations(verdict: Verdict) -> ViolationCounts:
    kinds = Counter(violation.kind for violation in verdict.violations)
    named = (ViolationKind.OUT_OF_ORDER, ViolationKind.OVERLAP, ViolationKind.LOST, ViolationKind.SKIPPED)
    return ViolationCounts(
        out_of_order=kinds[ViolationKind.OUT_OF_ORDER],
        overlapping=kinds[ViolationKind.OVERLAP],
        lost=sum(len(one.offsets) for one in verdict.violations if one.kind is ViolationKind.LOST),
        skipped=kinds[ViolationKind.SKIPPED],
        other_violations=sum(count for kind, count in kinds.items() if kind not in named),
    )
