"""The order checker: checks a history against the contract.

    verdict = check(history, order="key")
    verdict.raise_if_bad()

Per subject and group, a *lane* is a sequence of messages that must run one after the other: a partition, or a key of a
partition. The contract: within a lane, messages are started in log order, never overlap, and no message is skipped.
`ViolationKind` lists the checks, and `history.py` describes how a history records the named weakenings.

A parked message blocks only later messages of its key. Under order by partition, a parked message leaves its lane when
a commit has put the message into the parking lot, and then runs in the order of its key, but never at the same time as
a message of its former lane.

The checker makes two passes: the first collects the content of the logs, the second applies the rules in `judges` with
a few dictionary look-ups per event. Per lane the checker tracks the open run, the last run of every epoch, and the
finished position; per partition the finished and committed positions (`track.py`). Positions only rise (except at a
reset), and of a commit's finished set only new offsets are checked. So the time is linear in the length of the history.
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
from inturn.testing.judges.steering import OperatorActions
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
    """Check a history, optionally only a subject and a group.

    order     the lanes: partitions, or keys of a partition (a message without a key has no lane).
              With "none" there are no lanes: order, overlaps, skips and attempts are not checked.
    complete  all messages were handled when the history ended; only then can a message be lost.
    stored    the final content of the log, (subject, partition, offset) → message id. Without `stored`, a message that
              was handled but never acknowledged counts as stored, because the acknowledgement may have been lost.

    Ids that are None are not compared. The checked groups are the groups in the history, or the given group.
    """
    if order not in ("partition", "key", "none"):
        raise InvalidInput(f"check(order={order!r}): use 'partition', 'key' or 'none'")
    return _Court(Case(list(history), subject, group, order, complete, stored)).verdict()


class _Court:
    """All judges of a case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._lanes = LaneJudge(case)
        self._handlers = HandlerJudge(case, self._lanes)
        self._leases = LeaseJudge(case)
        self._commits = CommitJudge(case)
        self._operator = OperatorActions(case)

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
            OffsetsReset: self._operator.reset,
            GroupFiltered: None,
            KeySkipped: self._operator.skip,
            KeyResumed: self._operator.resume,
            ConsumerCrashed: self._handlers.crash,
            SendAcknowledged: None,
            ProcessRestarted: None,
            Grown: None,
        }
        for index, event in enumerate(self._case.events):
            action = act[type(event)]
            if action is not None:
                action(index, event)
