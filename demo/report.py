"""The page `demo-report.html` with charts of the last act. One file without links to other files: easy to send.

The text is made here, escaped. The script in `report.html` draws the charts from the JSON in the page, at the width
and in the colours of the browser.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import msgspec

from demo.incident import IncidentAct, IncidentBoard
from demo.incident_verdict import Handled, IncidentActResult, is_task
from demo.orders import ONLINE

REPORT = "demo-report.html"
TEMPLATE = Path(__file__).with_name("report.html")
HOT_KEYS = 5
PARTS = 120  # of the time axis
PART_S_MIN = 0.05


class Mark(msgspec.Struct, frozen=True):
    """A stretch of time with a name."""

    name: str
    from_s: float
    until_s: float


class HotLane(msgspec.Struct, frozen=True):
    key: str
    runs: list[tuple[int, float, float]]  # index in `who`; start and end in seconds
    overlaps: int


class ReportData(msgspec.Struct, frozen=True):
    """The data of the charts. Seconds count from the first message of the sale."""

    ok: bool
    subject: str
    group: str
    made_at: str
    until_s: float
    part_s: float
    who: list[str]
    per_s: list[list[float]]  # by index in `who`, then by part of the time
    lag: list[tuple[float, int]]
    marks: list[Mark]
    lanes: list[HotLane]
    result: IncidentActResult


def report_data(act: IncidentAct, board: IncidentBoard, result: IncidentActResult) -> ReportData:
    """The act must be complete."""
    zero_s = min(at_s for at_s, _ in board.sent)
    until_s = max(one.end_s for one in act.handled) - zero_s
    who = [*ONLINE, *sorted({one.who for one in act.handled} - set(ONLINE))]
    part_s = max(PART_S_MIN, _rounded_up(until_s / PARTS))
    return ReportData(
        ok=result.ok,
        subject=result.subject,
        group=result.group,
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        until_s=round(until_s, 3),
        part_s=part_s,
        who=who,
        per_s=_rates(act.handled, who, zero_s, until_s, part_s),
        lag=_lag(act.handled, [at_s for at_s, _ in board.sent], zero_s, until_s, part_s),
        marks=_marks(act.handled, act.drain_began_s, zero_s),
        lanes=_lanes(act, who, zero_s),
        result=result,
    )


def _rounded_up(seconds: float) -> float:
    return next((step for step in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if step >= seconds), 5.0)


def _rates(
    handled: Iterable[Handled], who: Sequence[str], zero_s: float, until_s: float, part_s: float
) -> list[list[float]]:
    counts: Counter[tuple[str, int]] = Counter((one.who, int((one.end_s - zero_s) / part_s)) for one in handled)
    return [[counts[name, part] / part_s for part in range(int(until_s / part_s) + 1)] for name in who]


def _lag(
    handled: Iterable[Handled], sent_at_s: Iterable[float], zero_s: float, until_s: float, part_s: float
) -> list[tuple[float, int]]:
    steps: Counter[int] = Counter(int((at_s - zero_s) / part_s) for at_s in sent_at_s)
    steps.subtract(int((one.end_s - zero_s) / part_s) for one in handled)
    lag, line = 0, [(0.0, 0)]
    for part in range(int(until_s / part_s) + 1):
        lag += steps[part]
        line.append((round(min(until_s, (part + 1) * part_s), 3), lag))
    return line


def _marks(handled: Sequence[Handled], drain_began_s: float, zero_s: float) -> list[Mark]:
    """The hand-over ends with the first handler in a task, the hand-back with the next online handler."""
    tasks = [one for one in handled if is_task(one.who)]
    first_s, last_s = min(one.start_s for one in tasks), max(one.end_s for one in tasks)
    back_s = min(one.start_s for one in handled if not is_task(one.who) and one.start_s > first_s)
    named = (("hand-over", drain_began_s, first_s), ("Spark", first_s, last_s), ("hand-back", last_s, back_s))
    return [Mark(name, round(start_s - zero_s, 4), round(end_s - zero_s, 4)) for name, start_s, end_s in named]


def _lanes(act: IncidentAct, who: Sequence[str], zero_s: float) -> list[HotLane]:
    by_key: dict[str, list[Handled]] = defaultdict(list)
    for one in act.handled:
        by_key[act.stored[one.partition, one.offset].key_text or ""].append(one)
    hottest = sorted(by_key.items(), key=lambda item: (-len(item[1]), item[0]))[:HOT_KEYS]
    return [
        HotLane(
            key,
            [
                (who.index(one.who), round(one.start_s - zero_s, 6), round(one.end_s - zero_s, 6))
                for one in sorted(runs, key=lambda one: one.start_s)
            ],
            overlaps(runs),
        )
        for key, runs in hottest
    ]


def overlaps(runs: Iterable[Handled]) -> int:
    """The number of runs that started before an earlier run was over."""
    count, until_s = 0, float("-inf")
    for one in sorted(runs, key=lambda one: (one.start_s, one.end_s)):
        count += one.start_s < until_s
        until_s = max(until_s, one.end_s)
    return count


# The page


def write_report(folder: Path, data: ReportData) -> Path:
    path = folder / REPORT
    path.write_text(page(data), encoding="utf-8")
    return path


def page(data: ReportData) -> str:
    # Only "<" can end a script element, or begin a comment in it. The escaped JSON has the same value.
    embedded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    content = {
        "title": _text(f"{data.subject}: the night of the big sale"),
        "verdict": _verdict(data),
        "figures": _figures(data),
        "rounds": _rounds(data.result),
        "audit": _audit(data.result),
        "events": "".join(f"<li>{_text(one)}</li>" for one in data.result.events),
        "made": _text(f"inturn demo, {data.made_at}"),
        "data": embedded,
    }
    before, *pieces = TEMPLATE.read_text(encoding="utf-8").split("{{")
    parts = [before]
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        parts += [content[name], rest]
    return "".join(parts)


def _text(value: object) -> str:
    return escape(str(value))


def _verdict(data: ReportData) -> str:
    kind, sign = ("good", "✔") if data.ok else ("bad", "✘")
    word = "Order kept, and proved" if data.ok else "Order broken, or not everything done"
    audit = (
        "There was no audit." if data.result.audit is None else f"The audit on Spark says: “{data.result.audit.text}”."
    )
    agreed = "The order checker, in memory, " + ("agrees." if data.result.is_agreed else "does not agree.")
    return f'<p class="verdict {kind}"><b>{sign} {_text(word)}.</b> {_text(audit)} {_text(agreed)}</p>'


def _figures(data: ReportData) -> str:
    result = data.result
    took_s = {one.name: one.until_s - one.from_s for one in data.marks}
    shown = [
        ("messages", f"{result.messages_handled:,}", f"of {result.messages_sent:,} handled"),
        ("lag at its worst", f"{result.lag_max:,}", "messages"),
        ("online alone", f"{result.online_per_s:,.0f}/s", _eta(result)),
    ]
    if result.drain is not None:
        by_tasks = sum(one.handled for one in result.drain.tasks)
        pause = f"{result.drain.hand_over_pause_s:.2f} s without a handler at work"
        shown += [
            ("handled by Spark", f"{by_tasks:,}", f"{result.drain.done_per_s:,.0f} messages/s"),
            ("hand-over", f"{took_s['hand-over']:.2f} s", pause),
            ("hand-back", f"{took_s['hand-back']:.2f} s", "no handler at work"),
        ]
    return "".join(
        f'<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd><dd class="unit">{_text(unit)}</dd></div>'
        for name, value, unit in shown
    )


def _eta(result: IncidentActResult) -> str:
    if result.online_eta_s is None:
        return "messages/s"
    return f"{result.online_eta_s:,.0f} s for {result.lag_at_drain:,} messages"


def _rounds(result: IncidentActResult) -> str:
    rows = [] if result.drain is None else result.drain.tasks
    return "".join(
        _row(
            *(one.round, one.task, one.pid, f"{one.handled:,}", one.failed, f"{one.waiting:,}", f"{one.seconds:.2f}"),
            f"{one.handled / one.seconds:,.0f}" if one.seconds else "–",
        )
        for one in rows
    )


def _audit(result: IncidentActResult) -> str:
    audit = result.audit
    if audit is None:
        return ""
    rows: list[tuple[str, int, int | str]] = [
        ("handlers started", audit.started, result.handler_calls),
        ("messages finished", audit.finished, result.messages_handled + result.duplicates),
        ("duplicates", audit.duplicates, result.duplicates),
        ("violations", audit.violation_count, _checker_violations(result)),
        ("commits", audit.commits, "–"),
        ("leases granted", audit.lease_grants, "–"),
        ("overlaps after a lost lease", audit.overlaps_after_lease_loss, "–"),
        ("unproven", audit.unproven, "–"),
        ("leases without a trace", audit.unseen_epochs, "–"),
    ]
    return "".join(_row(name, _number(first), _number(second)) for name, first, second in rows)


def _checker_violations(result: IncidentActResult) -> int:
    return result.out_of_order + result.overlapping + result.lost + result.skipped + result.other_violations


def _number(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _row(*cells: object) -> str:
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"
