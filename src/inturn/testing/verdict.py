"""The results of the order checker: violations, their evidence, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inturn.model.errors import InturnError
from inturn.model.violation import ViolationKind as ViolationKind
from inturn.testing.history import Event

STR_OFFSETS_MAX = 8
_STR_VIOLATIONS_MAX = 20


@dataclass(frozen=True, slots=True)
class Evidence:
    """An event and its index in the history."""

    index: int
    event: Event

    def __str__(self) -> str:
        return f"#{self.index} {self.event}"


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of order. `group` is None for a fault of the log. `evidence` is in the order of the history."""

    kind: ViolationKind
    message: str
    subject: str
    group: str | None
    partition: int
    offsets: tuple[int, ...]
    evidence: tuple[Evidence, ...]

    def __str__(self) -> str:
        lines = [f"{self.kind.upper()}: {self.message}", *(f"    {item}" for item in self.evidence)]
        return "\n".join(lines)


class OrderViolated(InturnError, AssertionError):
    """Raised by `Verdict.raise_if_bad`; the message is the verdict's text."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(str(verdict))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `check`. The counts are those of the chosen subject and group. Check the counts, too: an empty
    history breaks no order.

    `finished` counts handler runs that ended in "success" or "moved"; `duplicates` counts finished runs of messages
    that the group had finished before. `overlaps_after_lease_loss` counts pairs of runs, also after the loss of a
    claim. `parked` counts messages that wait in a parking lot at the end, `skipped` messages that were skipped by name.
    """

    violations: list[Violation]
    sent: int
    started: int
    finished: int
    duplicates: int
    lease_grants: int
    commits: int
    overlaps_after_lease_loss: int
    parked: int = 0
    skipped: int = 0

    @property
    def ok(self) -> bool:
        return not self.violations

    def raise_if_bad(self) -> None:
        """Raise `OrderViolated` unless the order was kept."""
        if self.violations:
            raise OrderViolated(self)

    def kinds(self) -> set[ViolationKind]:
        return {violation.kind for violation in self.violations}

    def __str__(self) -> str:
        counts = (
            f"{self.sent} sent, {self.started} started, {self.finished} finished "
            f"({_count(self.duplicates, 'duplicate')}), {_count(self.lease_grants, 'lease grant')}, "
            f"{_count(self.commits, 'commit')}, {_count(self.overlaps_after_lease_loss, 'overlap')} after lease loss"
        )
        counts += f", {self.parked} parked" if self.parked else ""
        counts += f", {self.skipped} skipped by name" if self.skipped else ""
        if self.ok:
            return f"order kept: {counts}"
        shown = [str(violation) for violation in self.violations[:_STR_VIOLATIONS_MAX]]
        more = len(self.violations) - len(shown)
        tail = [f"... and {_count(more, 'more violation')}"] if more else []
        return "\n".join([f"order broken, {_count(len(self.violations), 'violation')}: {counts}", *shown, *tail])


def name_offsets(every: Sequence[int]) -> str:
    """The first few offsets, as text."""
    shown = ", ".join(map(str, every[:STR_OFFSETS_MAX]))
    more = f" and {len(every) - STR_OFFSETS_MAX} more" if len(every) > STR_OFFSETS_MAX else ""
    return f"offset{'s' if len(every) != 1 else ''} {shown}{more}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
