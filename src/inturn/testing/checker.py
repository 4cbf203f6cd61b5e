"""The order checker: judges a history against the contract.

    verdict = check(history, order="key")
    verdict.raise_if_bad()

Per subject and group, a *lane* is what must run one after the other: a partition, or one key of a partition.
The contract: within a lane, messages are started in log order, never overlap, and none is skipped. See `ViolationKind`
for what exactly is checked, and `history.py` for how the named weakenings are written down.

A parked message holds back the later ones of its key, and nothing else. Under order by partition it leaves its lane
when a commit has put it into the lot, and runs in the order of its key instead; still not beside another of its lane.

How: one pass to learn what the log holds, one pass over the events with a few dictionary look-ups each. Per lane it
remembers the run that is open, the last run of each epoch, and how far all is finished; per partition how far all is
finished and committed (`track.py`). These marks only move on (but for a reset), and of the finished set of a commit
only what is new is looked at, so the whole is linear in the length of the history. The rules are in `judges`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from inturn.model.errors import InvalidInput
from inturn.testing.history import (
    ClaimEnded,
    ClaimGranted,
    Committed,
    ConsumerCrashed,
    Event,
    GroupFiltered,
    Grown,
    HandlerEnd,
    HandlerStart,
    KeyResumed,
    KeySkipped,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)
from inturn.testing.judges.case import Case, StoredMessages
from inturn.testing.judges.commits import CommitJudge
from inturn.testing.judges.handlers import HandlerJudge
from inturn.testing.judges.lanes import LaneJudge
from inturn.testing.judges.leases import LeaseJudge
from inturn.testing.judges.losses import LossJudge
from inturn.testing.judges.steering import KeyRequestJudge
from inturn.testing.verdict import Evidence, OrderViolated, Verdict, Violation, ViolationKind

__all__ = ["Evidence", "OrderViolated", "StoredMessages", "Verdict", "Violation", "ViolationKind", "check"]


def check(
    history: Iterable[Event],
    *,
    subject: str | None = None,
    group: str | None = None,
    order: Literal["partition", "key", "none"],
    complete: bool = True,
    stored: StoredMessages | None = None,
) -> Verdict:
    """Judge a history; `subject` and `group` restrict it to these.

    order     what runs one after the other: a partition, or a key of a partition (messages without a key: nothing).
              With "none" there are no lanes: neither order, overlaps, skips nor attempts are judged.
    complete  all work was done when the history ended; only then can a message be lost.
    stored    the final content of the log, (subject, partition, offset) → message id. Without it, a message that
              was handled but never acknowledged is taken as stored: the acknowledgement may have got lost on its way.

    Where an id is None it is not compared. Groups are those that appear in the history, or the one given.
    """
    if order not in ("partition", "key", "none"):
        raise InvalidInput(f"check(order={order!r}): use 'partition', 'key' or 'none'")
    return _Court(Case(list(history), subject, group, order, complete, stored)).verdict()


class _Court:
    """All judges of one case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._lanes = LaneJudge(case)
        self._handlers = HandlerJudge(case, self._lanes)
        self._leases = LeaseJudge(case)
        self._commits = CommitJudge(case)
        self._steering = KeyRequestJudge(case)

    def verdict(self) -> Verdict:
        case = self._case
        case.learn_logs()
        self._go_through()
        if case.complete:
            LossJudge(case).find()
        return Verdict(
            violations=case.violations,
            sent=sum(len(log.acknowledged) for log in case.logs.values()),
            started=self._handlers.started,
            finished=self._handlers.finished,
            duplicates=self._handlers.duplicates,
            lease_grants=self._leases.grants,
            commits=self._commits.commits,
            overlaps_after_lease_loss=self._lanes.leftover_overlaps,
            parked=sum(track.waiting_in_lots() for track in case.wanted_tracks()),
            skipped=sum(len(track.ever_skipped) for track in case.wanted_tracks()),
        )

    def _go_through(self) -> None:
        act: dict[type[Event], Callable[[int, Any], None] | None] = {
            HandlerStart: self._handlers.start,
            HandlerEnd: self._handlers.end,
            Committed: self._commits.commit,
            LeaseGranted: self._leases.grant,
            LeaseEnded: self._leases.end,
            ClaimGranted: self._leases.claim_grant,
            ClaimEnded: self._leases.claim_end,
            OffsetsReset: self._steering.reset,
            GroupFiltered: None,
            KeySkipped: self._steering.skip,
            KeyResumed: self._steering.resume,
            ConsumerCrashed: self._handlers.crash,
            SendAcknowledged: None,
            ProcessRestarted: None,
            Grown: None,
        }
        for index, event in enumerate(self._case.events):
            action = act[type(event)]
            if action is not None:
                action(index, event)
