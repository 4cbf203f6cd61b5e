"""The verdict on the last act: the audit on Spark, and the order checker over the same traces, read without Spark.

Traces are timed by the monotonic clock that all processes of a machine share: their times are compared exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from demo.act import ActResult, checked_fields, short_name
from demo.orders import INCIDENT_GROUP, INCIDENT_SUBJECT, ONLINE, ONLINE_CONCURRENCY, TASK_CONCURRENCY, Inbox
from inturn.consumer.trace import RESULTS, RUNS, SUCCESS, SUFFIX, TraceRun, chunks, runs_of
from inturn.model.message import Message
from inturn.testing.checker import check
from inturn.testing.history import Event, HandlerEnd, HandlerResult, HandlerStart, History

if TYPE_CHECKING:
    from demo.incident import IncidentAct, IncidentBoard

_TASK = re.compile(r"-r(\d+)-t(\d+)(?:-|$)")


@dataclass(frozen=True, slots=True)
class Handled:
    """One call of a handler."""

    owner: str
    partition: int
    offset: int
    epoch: int
    attempt: int
    result: str
    start_s: float
    end_s: float

    @property
    def who(self) -> str:
        return who_of(self.owner)


def who_of(owner: str) -> str:
    """ "ada-…" → "ada"; a task of a drain, "drain-…-r2-t1-…" → "task 1"."""
    found = _TASK.search(owner)
    return short_name(owner) if found is None else f"task {found[2]}"


def is_task(who: str) -> bool:
    return who.startswith("task ")


class HandledCounts:
    """The number of messages that each consumer has handled so far. Decodes new chunks only: may be read often."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[str] = Counter()
        self._seen: dict[Path, int] = {}  # the number of the last chunk

    def read(self) -> Counter[str]:
        for path in self._folder.glob(f"*{SUFFIX}"):
            for chunk in chunks(path.read_bytes(), (RUNS,)):
                if chunk.head.number > self._seen.get(path, 0):
                    self._seen[path] = chunk.head.number
                    self._counts[who_of(chunk.head.owner)] += sum(len(run.offsets) for run in runs_of(chunk))
        return self._counts.copy()


def read_handled(folder: Path) -> list[Handled]:
    """All calls of handlers in the traces, sorted by their start."""
    found = [
        one
        for path in sorted(folder.glob(f"*{SUFFIX}"))
        for chunk in chunks(path.read_bytes(), (RUNS,))
        for run in runs_of(chunk)
        for one in _handled(chunk.head.owner, run)
    ]
    return sorted(found, key=lambda one: one.start_s)


def _handled(owner: str, run: TraceRun) -> Iterable[Handled]:
    ends_s = run.ends
    starts_s = [run.start_s, *ends_s[:-1]]
    odd = {at: (attempt, RESULTS[result]) for at, attempt, result in run.odd}
    part_ends = [*(first for _, _, first in run.parts[1:]), len(ends_s)]
    for (partition, epoch, first), stop in zip(run.parts, part_ends, strict=True):
        for at in range(first, stop):
            how = odd.get(at, (1, RESULTS[SUCCESS]))
            yield Handled(owner, partition, run.offsets[at], epoch, *how, starts_s[at], ends_s[at])


def history_of(
    handled: Iterable[Handled], stored: Mapping[tuple[int, int], Message], sent: Iterable[Event], group: str
) -> History:
    """The history for the order checker. A trace has hashes of keys: keys and message ids come from the log."""
    events: list[tuple[float, int, Event]] = [(-1.0, 0, event) for event in sent]
    for number, one in enumerate(handled):
        message = stored[one.partition, one.offset]
        where = message.subject, group, one.partition, one.offset, message.key, one.owner, one.epoch
        result = cast(HandlerResult, one.result)
        events.append((one.start_s, 2 * number, HandlerStart(*where, message.message_id, one.attempt)))
        events.append((one.end_s, 2 * number + 1, HandlerEnd(*where, message.message_id, result)))
    # At equal times the earlier start comes first: a worker starts a message when it has ended the one before.
    return History(event for _, _, event in sorted(events, key=lambda one: one[:2]))


class TaskResult(msgspec.Struct, frozen=True):
    round: int
    task: int
    pid: int
    handled: int
    failed: int
    waiting: int  # started and not finished at the end of the round
    seconds: float


class DrainResult(msgspec.Struct, frozen=True):
    """The report of the drain, and the pauses around the drain from the traces."""

    ended: str
    done: int
    done_per_s: float
    rounds: int
    take_over_s: float  # until the drain held all leases
    work_s: float
    hand_back_s: float
    hand_over_pause_s: float  # from the last handler of an online consumer to the first handler of a task
    hand_back_pause_s: float  # from the last handler of a task to the first of an online consumer
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


class IncidentActResult(ActResult, frozen=True, kw_only=True):
    """The last act: `incident` in the output of `inturn demo --json`."""

    subject: str
    group: str
    pids: dict[str, int]  # of the server and the online consumers
    online_concurrency: int
    task_concurrency: int
    lag_max: int  # stored and not handled, from acknowledgements and traces
    lag_at_drain: int  # stored and not committed, as the server reported when the drain began
    online_per_s: float  # rate of the online consumers before the drain
    online_eta_s: float | None  # time that the online consumers would have needed for `lag_at_drain`
    drain: DrainResult | None
    audit: AuditResult | None
    is_agreed: bool  # order checker and audit give the same verdict and the same counts
    customers: int
    customers_in_order: int
    handled_by: dict[str, int]
    handled_online_after: int  # by the online consumers, after the hand-back
    report: str | None = None  # path of the page


def judge_incident(act: IncidentAct, board: IncidentBoard, elapsed_s: float) -> IncidentActResult:
    """Call only after the act is over. The act is good only if the audit and the order checker both say so."""
    handled = [one for one in act.handled if (one.partition, one.offset) in act.stored]
    history = history_of(handled, act.stored, board.sent_events(), INCIDENT_GROUP)
    stored = {(INCIDENT_SUBJECT, *place): one.message_id for place, one in act.stored.items()}
    verdict = check(
        history,
        subject=INCIDENT_SUBJECT,
        group=INCIDENT_GROUP,
        order="key",
        complete=act.is_complete,
        stored=stored if act.is_complete else None,
    )
    audit, inbox, drain, after = _audit(act), _inbox(act, handled), _drain(act, handled), _online_after(handled)
    is_agreed = audit is not None and (audit.ok, audit.started, audit.finished, audit.duplicates) == (
        *(verdict.ok, verdict.started, verdict.finished, verdict.duplicates),
    )
    is_all = verdict.sent == verdict.finished - verdict.duplicates == len(stored) and inbox.in_order == inbox.customers
    is_drained = drain is not None and drain.ended == "end" and drain.done > 0 and after > 0
    audit_ok = audit is not None and audit.ok and not audit.unseen_epochs and not audit.unproven
    ok = audit_ok and is_agreed and is_all and is_drained
    fields = checked_fields(act, board, verdict, ok=ok, elapsed_s=elapsed_s)
    if act.audit is not None:
        fields["violations"] += map(str, act.audit.violations)
    return IncidentActResult(
        **fields,
        subject=INCIDENT_SUBJECT,
        group=INCIDENT_GROUP,
        pids=board.pids,
        online_concurrency=ONLINE_CONCURRENCY,
        task_concurrency=TASK_CONCURRENCY,
        lag_max=lag_max(act, board),
        lag_at_drain=act.lag_at_drain,
        online_per_s=round(act.online_per_s, 1),
        online_eta_s=round(act.lag_at_drain / act.online_per_s, 1) if act.online_per_s > 0 else None,
        drain=drain,
        audit=audit,
        is_agreed=is_agreed,
        customers=inbox.customers,
        customers_in_order=inbox.in_order,
        handled_by=dict(sorted(Counter(one.who for one in handled).items())),
        handled_online_after=after,
    )


def lag_max(act: IncidentAct, board: IncidentBoard) -> int:
    """The largest lag, from the acknowledgements and the ends of handlers."""
    steps = [(at_s, 1) for at_s, _ in board.sent] + [(one.end_s, -1) for one in act.handled]
    lag = highest = 0
    for _, step in sorted(steps):
        lag += step
        highest = max(highest, lag)
    return highest


def _drain(act: IncidentAct, handled: list[Handled]) -> DrainResult | None:
    report = act.drain
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


def _audit(act: IncidentAct) -> AuditResult | None:
    verdict = act.audit
    if verdict is None:
        return None
    total = verdict.total
    return AuditResult(
        ok=verdict.ok,
        text=str(verdict).partition("\n")[0],
        elapsed_s=round(act.audit_s, 2),
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


def _inbox(act: IncidentAct, handled: list[Handled]) -> Inbox:
    inbox = Inbox()
    for one in sorted(handled, key=lambda one: one.end_s):
        message_id = act.stored[one.partition, one.offset].message_id
        if one.result == "success" and message_id is not None:
            inbox.note(message_id)
    return inbox


def _online_after(handled: list[Handled]) -> int:
    last_s = max((one.end_s for one in handled if is_task(one.who)), default=float("inf"))
    return sum(one.who in ONLINE and one.start_s > last_s for one in handled)
