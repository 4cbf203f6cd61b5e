"""How the last act ended: the audit's verdict on Spark, and the order checker's over the same traces."""

from __future__ import annotations

from collections import Counter

import msgspec

from demo.incident_board import IncidentBoard
from demo.incident_sale import INCIDENT_GROUP, INCIDENT_SUBJECT, ONLINE, ONLINE_CONCURRENCY, TASK_CONCURRENCY, Inbox
from demo.incident_story import IncidentStory
from demo.incident_trace import Handled, history_of, is_task
from demo.violations import count_violations
from inturn.testing.checker import check


class TaskResult(msgspec.Struct, frozen=True):
    round: int
    task: int
    pid: int
    handled: int
    failed: int
    waiting: int  # begun and not finished when the round was over
    seconds: float


class DrainResult(msgspec.Struct, frozen=True):
    """What the drain said of itself, and what the traces show around it."""

    ended: str
    done: int
    done_per_s: float
    rounds: int
    take_over_s: float  # until it held all leases
    work_s: float
    hand_back_s: float
    hand_over_pause_s: float  # from the last handler of an online consumer to the first one of a task
    hand_back_pause_s: float  # and the other way round
    tasks: list[TaskResult]


class AuditResult(msgspec.Struct, frozen=True):
    ok: bool
    text: str
    elapsed_s: float
    started: int
    finished: int
    duplicates: int
    commits: int
    lease_grants: int
    overlaps_after_lease_loss: int
    unproven: int
    unseen_epochs: int
    violation_count: int


class IncidentActResult(msgspec.Struct, frozen=True):
    """The last act, in `incident` of what `inturn demo --json` prints."""

    ok: bool
    is_complete: bool
    elapsed_s: float
    subject: str
    group: str
    pids: dict[str, int]  # of the server and the online consumers
    online_concurrency: int
    task_concurrency: int
    lag_max: int  # stored and not handled, as the acknowledgements and traces show
    lag_at_drain: int  # stored and not committed, as the server told when the drain began
    online_per_s: float  # what the online consumers managed before the drain
    online_eta_s: float | None  # and how long they would have needed
    drain: DrainResult | None
    audit: AuditResult | None
    is_agreed: bool  # the order checker says the same as the audit, and counts the same
    customers: int
    customers_in_order: int
    messages_sent: int
    messages_handled: int
    handler_calls: int
    handled_by: dict[str, int]
    handled_online_after: int  # by the online consumers, after the hand-back
    duplicates: int
    out_of_order: int
    overlapping: int
    lost: int
    skipped: int
    other_violations: int
    violations: list[str]
    events: list[str]
    report: str | None = None  # where the page is


def judge_incident(story: IncidentStory, board: IncidentBoard, elapsed_s: float) -> IncidentActResult:
    """Only after the act is over."""
    handled = [one for one in story.handled if (one.partition, one.offset) in story.stored]
    history = history_of(handled, story.stored, board.sent_events(), INCIDENT_GROUP)
    stored = {(INCIDENT_SUBJECT, *place): one.message_id for place, one in story.stored.items()}
    verdict = check(
        history,
        subject=INCIDENT_SUBJECT,
        group=INCIDENT_GROUP,
        order="key",
        complete=story.is_complete,
        stored=stored if story.is_complete else None,
    )
    counts, audit, inbox = count_violations(verdict), _audit(story), _inbox(story, handled)
    drain = _drain(story, handled)
    after = _online_after(handled)
    is_agreed = audit is not None and (audit.ok, audit.started, audit.finished, audit.duplicates) == (
        *(verdict.ok, verdict.started, verdict.finished, verdict.duplicates),
    )
    is_all = verdict.sent == verdict.finished - verdict.duplicates == len(stored) and inbox.in_order == inbox.customers
    is_told = drain is not None and drain.ended == "end" and drain.done > 0 and after > 0
    audit_ok = audit is not None and audit.ok and not audit.unseen_epochs and not audit.unproven
    return IncidentActResult(
        ok=story.is_complete and verdict.ok and audit_ok and is_agreed and is_all and is_told,
        is_complete=story.is_complete,
        elapsed_s=round(elapsed_s, 2),
        subject=INCIDENT_SUBJECT,
        group=INCIDENT_GROUP,
        pids=board.pids,
        online_concurrency=ONLINE_CONCURRENCY,
        task_concurrency=TASK_CONCURRENCY,
        lag_max=lag_max(story, board),
        lag_at_drain=story.lag_then,
        online_per_s=round(story.online_per_s, 1),
        online_eta_s=round(story.lag_then / story.online_per_s, 1) if story.online_per_s > 0 else None,
        drain=drain,
        audit=audit,
        is_agreed=is_agreed,
        customers=inbox.customers,
        customers_in_order=inbox.in_order,
        messages_sent=verdict.sent,
        messages_handled=verdict.finished - verdict.duplicates,
        handler_calls=verdict.started,
        handled_by=dict(sorted(Counter(one.who for one in handled).items())),
        handled_online_after=after,
        duplicates=verdict.duplicates,
        out_of_order=counts.out_of_order,
        overlapping=counts.overlapping,
        lost=counts.lost,
        skipped=counts.skipped,
        other_violations=counts.other_violations,
        violations=[
            *(str(violation) for violation in verdict.violations),
            *(() if story.audit is None else map(str, story.audit.violations)),
        ],
        events=[f"{one.at_s:.1f} s: {one.text}" for one in board.events.so_far()],
    )


def lag_max(story: IncidentStory, board: IncidentBoard) -> int:
    """As the acknowledgements and the ends of handlers show it."""
    steps = [(at_s, 1) for at_s, _ in board.sent] + [(one.end_s, -1) for one in story.handled]
    lag = highest = 0
    for _, step in sorted(steps):
        lag += step
        highest = max(highest, lag)
    return highest


def _drain(story: IncidentStory, handled: list[Handled]) -> DrainResult | None:
    report = story.drain
    if report is None:
        return None
    tasks = [one for one in handled if is_task(one.who)]
    first_s = min((one.start_s for one in tasks), default=0.0)
    last_s = max((one.end_s for one in tasks), default=0.0)
    online = [one for one in handled if not is_task(one.who)]
    before_s = max((one.end_s for one in online if one.start_s < first_s), default=first_s)
    after_s = min((one.start_s for one in online if one.start_s > first_s), default=last_s)
    return DrainResult(
        ended=report.ended,
        done=report.done,
        done_per_s=round(report.per_s, 1),
        rounds=report.rounds,
        take_over_s=round(report.take_over_s, 3),
        work_s=round(report.work_s, 3),
        hand_back_s=round(report.hand_back_s, 3),
        hand_over_pause_s=round(first_s - before_s, 3),
        hand_back_pause_s=round(after_s - last_s, 3),
        tasks=[
            TaskResult(one.round, one.task, one.pid, one.handled, one.failed, one.waiting, round(one.seconds, 3))
            for one in sorted(report.outcomes, key=lambda one: (one.round, one.task))
        ],
    )


def _audit(story: IncidentStory) -> AuditResult | None:
    verdict = story.audit
    if verdict is None:
        return None
    total = verdict.total
    return AuditResult(
        ok=verdict.ok,
        text=str(verdict).partition("\n")[0],
        elapsed_s=round(story.audit_s, 2),
        started=total("started"),
        finished=total("finished"),
        duplicates=total("duplicates"),
        commits=total("commits"),
        lease_grants=total("lease_grants"),
        overlaps_after_lease_loss=total("overlaps_after_lease_loss"),
        unproven=total("unproven"),
        unseen_epochs=total("unseen_epochs"),
        violation_count=verdict.violation_count,
    )


def _inbox(story: IncidentStory, handled: list[Handled]) -> Inbox:
    inbox = Inbox()
    for one in sorted(handled, key=lambda one: one.end_s):
        message_id = story.stored[one.partition, one.offset].message_id
        if one.result == "success" and message_id is not None:
            inbox.note(message_id)
    return inbox


def _online_after(handled: list[Handled]) -> int:
    last_s = max((one.end_s for one in handled if is_task(one.who)), default=float("inf"))
    return sum(one.who in ONLINE and one.start_s > last_s for one in handled)
