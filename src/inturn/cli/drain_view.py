"""The output of `inturn drain`: live in a terminal, as lines elsewhere, and a report at the end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from inturn.cli.message_text import blocking_fields, blocking_text
from inturn.cli.screen import Screen, counted, plain, rate_text, size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from inturn.protocol.commands import KeyDescription
    from inturn.spark.ordered.drain_report import DrainProgress, DrainReport
    from inturn.spark.ordered.plan import HotKey
    from inturn.spark.ordered.task import LimitReached

LINE_S = 5.0  # between two lines, where there is no terminal
BAR_COLUMNS = 32
TASKS_SHOWN = 12
KEYS_SHOWN = 5


class DrainView:
    """Shows the progress of a drain. For people only: no output with --json."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._live: Live | None = None
        self._said_at_s = float("-inf")
        self._said_phase = ""

    def show(self, look: DrainProgress) -> None:
        if self._screen.is_json or look.phase == "over":
            return
        if self._live is not None:
            self._live.update(frame(look), refresh=True)
            return
        now_s = time.monotonic()
        if look.phase != self._said_phase or now_s - self._said_at_s >= LINE_S:
            self._said_at_s, self._said_phase = now_s, look.phase
            self._screen.note(line(look))

    def __enter__(self) -> Self:
        if not self._screen.is_json and self._screen.err.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._screen.err, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def line(look: DrainProgress) -> str:
    """The progress in one line."""
    if look.phase != "working":
        return phase_text(look)
    held = f", held: {', '.join(map(blocking_text, look.held_keys[:KEYS_SHOWN]))}" if look.held_keys else ""
    return f"{phase_text(look)}: {_progress_text(look)}{held}"


def frame(look: DrainProgress) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text.from_markup(f"[bold]{phase_text(look)}[/bold]")]
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_row(
        ProgressBar(total=max(look.total, 1), completed=min(look.done, look.total), width=BAR_COLUMNS),
        Text.from_markup(_progress_text(look)),
    )
    parts.append(bar)
    if look.tasks:
        parts.append(_tasks(look))
    if look.hot_keys:
        parts.append(Text.from_markup(f"[dim]hottest keys[/dim]  {hot_text(look.hot_keys)}"))
    parts += [Text.from_markup(f"[dim]held[/dim]  {blocking_text(key)}") for key in look.held_keys[:KEYS_SHOWN]]
    return Group(*parts)


def phase_text(look: DrainProgress) -> str:
    if look.phase == "taking over":
        return f"taking over {look.held} of {counted(look.partitions, 'partition')}"
    return f"working, round {look.round}" if look.phase == "working" else look.phase


def hot_text(keys: tuple[HotKey, ...]) -> str:
    return "  ".join(f"[bold]{plain(one.key)}[/bold] {one.share:.0%}" for one in keys)


def time_text(seconds: float) -> str:
    """3.21 → "3.2 s", 102 → "1 min 42 s", 7500 → "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def _progress_text(look: DrainProgress) -> str:
    eta = "" if look.eta_s is None or not look.remaining else f", about {time_text(look.eta_s)}"
    return f"{look.done:,} of {look.total:,}  {rate_text(look.per_s)}/s  {look.remaining:,} left{eta}"


def _tasks(look: DrainProgress) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("task", "partition", "slots", "done"):
        table.add_column(heading, justify="right")
    for one in look.tasks[:TASKS_SHOWN]:
        table.add_row(task_name(one.claimant), str(one.partition), str(one.slot_count), f"{one.done:,}")
    if len(look.tasks) > TASKS_SHOWN:
        table.add_row("…", "", "", f"and {len(look.tasks) - TASKS_SHOWN} more")
    return table


def task_name(claimant: str) -> str:
    """ "drain-orders-1a2b-r2-t3-4c5d" → "3"."""
    for part in reversed(claimant.split("-")):
        if part.startswith("t") and part[1:].isdecimal():
            return part[1:]
    return plain(claimant)


# The end


def print_report(screen: Screen, report: DrainReport) -> None:
    if screen.is_json:
        screen.json(report_fields(report))
        return
    for text in report_lines(report):
        screen.out.print(text, highlight=False, soft_wrap=True)


def report_lines(report: DrainReport) -> list[str]:
    """The finished messages, the rate, and the messages left with the reason."""
    what = f"{plain(report.subject)} for group {plain(report.group)}"
    tasks = len({one.task for one in report.outcomes})
    rate = f": {rate_text(report.per_s)}/s by {counted(tasks, 'task')}" if report.done and tasks else ""
    lines = [
        f"{_ENDED[report.ended]} [bold]{counted(report.done, 'message')}[/bold] of {what} "
        f"in {time_text(report.work_s)}{rate}",
        f"[dim]hand-over {time_text(report.take_over_s)}, {counted(report.rounds, 'round')}, "
        f"hand-back {time_text(report.hand_back_s)}, order by {report.order}[/dim]",
    ]
    if report.failures:
        lines.append(f"{counted(report.failures, 'handler call')} failed")
    if report.failed_rounds:
        lines.append(f"[yellow]{counted(report.failed_rounds, 'round')} failed and had to be repeated[/yellow]")
    if report.missing:
        lines.append(
            f"[yellow]{counted(report.missing, 'message')} were deleted by retention before a handler ran[/yellow]"
        )
    if report.retrying:
        lines.append(f"{counted(report.retrying, 'message')} failed and wait for a retry in the consumers of the group")
    if not report.is_handed_back:
        lines.append(
            "[yellow]not handed back: the consumers of the group continue when the leases have ended, one lease life "
            "after the last heartbeat of a task[/yellow]"
        )
    lines.append(_left_text(report))
    lines += [f"  [red]{plain(text)}[/red]" for text in report.damage]
    lines += [_limit_text(report, limit) for limit in report.limits]
    lines += [_held_text(report, key) for key in report.held_keys]
    return lines


_ENDED = {
    "end": "[green]drained[/green]",
    "lag": "[green]drained[/green]",
    "held keys": "[yellow]drained but for held keys:[/yellow]",
    "limit": "[yellow]drained up to a limit:[/yellow]",
    "damaged": "[red]drained but for a damaged log:[/red]",
    "interrupted": "[yellow]interrupted after[/yellow]",
}


def _left_text(report: DrainReport) -> str:
    if not report.lag:
        return "[green]no message is left[/green]"
    why = {
        "end": "stored after the drain began; the consumers of the group handle them",
        "lag": "at most --max-lag; the consumers of the group handle them",
        "held keys": "behind keys that fail or are blocked",
        "limit": "behind keys that fail or are blocked, or too far beyond such keys",
        "damaged": "in a log that cannot be read, or behind keys that fail or are blocked; see `inturn doctor`",
        "interrupted": "handed back to the group's consumers",
    }[report.ended]
    return f"{counted(report.lag, 'message')} left: {why}"


def _limit_text(report: DrainReport, one: LimitReached) -> str:
    key = "a message without a key" if one.key is None else f"key [bold]{plain(one.key)}[/bold]"
    how_far = (
        f"up to {one.size:,} offsets beyond" if one.limit == "span" else f"until {size_text(one.size)} wait behind"
    )
    text = f"  partition {one.partition} was read {how_far} {key} at offset {one.offset}, and no further"
    if one.key is None:
        return text
    import shlex

    step = f"inturn key park {plain(report.subject)} {plain(shlex.quote(one.key))} --group {plain(report.group)}"
    return f"{text}: [cyan]{step}[/cyan], then drain again"


def _held_text(report: DrainReport, key: KeyDescription) -> str:
    where = f"{plain(report.subject)} {_shell(key)} --group {plain(report.group)}"
    steps = {
        "parked": f"inturn key resume {where}",
        "blocked": f"inturn key resume {where}, or skip",
    }
    step = steps.get(key.state, f"inturn key show {where}")
    return f"  {blocking_text(key)}: [cyan]{step}[/cyan]"


def _shell(key: KeyDescription) -> str:
    import shlex

    return plain(shlex.quote((key.key or b"").decode(errors="backslashreplace")))


def report_fields(report: DrainReport) -> dict[str, object]:
    """The report as JSON fields."""
    return {
        "subject": report.subject,
        "group": report.group,
        "order": report.order,
        "ended": report.ended,
        "done": report.done,
        "done_per_s": report.per_s,
        "lag": report.lag,
        "failures": report.failures,
        "missing": report.missing,
        "retrying": report.retrying,
        "rounds": report.rounds,
        "failed_rounds": report.failed_rounds,
        "take_over_s": report.take_over_s,
        "work_s": report.work_s,
        "hand_back_s": report.hand_back_s,
        "limits": [
            {
                "partition": one.partition,
                "limit": one.limit,
                "size": one.size,
                "offset": one.offset,
                "key": one.key,
            }
            for one in report.limits
        ],
        "damage": list(report.damage),
        "is_handed_back": report.is_handed_back,
        "held_keys": [blocking_fields(one) for one in report.held_keys],
        "hot_keys": [{"key": one.key, "share": one.share} for one in report.hot_keys],
        "tasks": [
            {
                "round": one.round,
                "task": one.task,
                "host": one.host,
                "pid": one.pid,
                "handled": one.handled,
                "failed": one.failed,
                "waiting": one.waiting,
                "seconds": one.seconds,
            }
            for one in report.outcomes
        ],
    }
