"""Histories of real processes with real faults, one after the other, until the time is over.

    python -m simulator.processes.soak --minutes 10

Fails (exit code 1) if a run breaks the contract, loses a message, or does not come to rest. The files of a failed run
are kept, and the output names their folder.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from simulator.processes.faults import FaultCounts
from simulator.processes.run import ProcessReport, ProcessSettings, run_processes, told_faults

ORDERS: tuple[Literal["key", "partition"], ...] = ("key", "partition")
FLUSHES = ("always", "os")
SHOWN_PROBLEMS = 10
DEFAULT_MINUTES = 1.0


@dataclass(slots=True)
class ProcessTotals:
    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    acknowledged: int = 0
    handled: int = 0
    duplicates: int = 0
    overlaps: int = 0
    late_starts: int = 0
    failures: list[ProcessReport] = field(default_factory=list)

    def add(self, report: ProcessReport) -> None:
        self.runs += 1
        self.faults.update(report.faults)
        self.starts += report.starts
        self.acknowledged += report.verdict.sent
        self.handled += report.verdict.finished
        self.duplicates += report.verdict.duplicates
        self.overlaps += report.verdict.overlaps_after_lease_loss
        self.late_starts += report.late_starts
        if not report.ok:
            self.failures.append(report)

    @property
    def ok(self) -> bool:
        return self.runs > 0 and not self.failures

    @property
    def duplicate_share(self) -> float:
        return self.duplicates / max(1, self.handled)


def settings_of(seed: int, folder: Path | None = None) -> ProcessSettings:
    """The settings of the run with this seed."""
    rng = random.Random(seed)
    faults = FaultCounts(
        kills=rng.randint(5, 30),
        freezes=rng.randint(2, 12),
        stream_faults=rng.randint(4, 16),
        clock_jumps=rng.randint(0, 6),
        restarts=rng.randint(0, 2),
    )
    return ProcessSettings(
        seed=seed,
        order=ORDERS[seed % 2],
        faults=faults,
        gap_s=rng.choice((0.1, 0.25, 0.5)),
        partitions=rng.randint(1, 8),
        keys=rng.choice((3, 24, 200)),
        consumers=rng.randint(2, 4),
        producers=rng.randint(1, 3),
        flush=rng.choice(FLUSHES),
        folder=folder,
    )


# Telling


@contextlib.contextmanager
def _meter(console: Console, seconds: float) -> Iterator[Callable[[ProcessTotals, str], None]]:
    """A bar in a terminal; else a line per run."""
    started_s = time.monotonic()

    def told(totals: ProcessTotals, now: str) -> str:
        failed = f", {len(totals.failures)} FAILED" if totals.failures else ""
        return f"{totals.runs} runs, {totals.faults.total()} faults{failed}  {now}"

    if not console.is_terminal:
        lines = {0}

        def print_line(totals: ProcessTotals, now: str) -> None:
            if totals.runs not in lines:
                lines.add(totals.runs)
                console.print(f"{time.monotonic() - started_s:.0f} s: {told(totals, '')}", soft_wrap=True)

        yield print_line
        return
    columns = (
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda totals, now: bar.update(
            task, completed=time.monotonic() - started_s, description=told(totals, now)
        )


def _tell(console: Console, totals: ProcessTotals, first_seed: int, took_s: float) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("fault")
    table.add_column("times", justify="right")
    for name, count in told_faults(totals.faults):
        table.add_row(name, str(count))
    console.print(table)
    console.print(
        f"\n{totals.runs} runs from seed {first_seed} in {took_s:.0f} s: {totals.starts} processes started, "
        f"{totals.faults.total()} faults, {totals.acknowledged} messages acknowledged, {totals.handled} handled, "
        f"{totals.duplicates} of them again ({totals.duplicate_share:.1%}), "
        f"{totals.overlaps} overlaps after a lease was lost, {totals.late_starts} starts in a process that stood still",
        soft_wrap=True,
    )
    for report in totals.failures:
        console.print(f"\nseed {report.seed}: FAILED; all its files are in {report.folder}", soft_wrap=True)
        for problem in report.problems[:SHOWN_PROBLEMS]:
            console.print(problem, soft_wrap=True, markup=False)
    console.print("ok" if totals.ok else "FAILED")


def _as_json(totals: ProcessTotals, first_seed: int, took_s: float) -> str:
    return json.dumps(
        {
            "ok": totals.ok,
            "first_seed": first_seed,
            "runs": totals.runs,
            "seconds": round(took_s, 1),
            "faults": dict(told_faults(totals.faults)),
            "starts": totals.starts,
            "acknowledged": totals.acknowledged,
            "handled": totals.handled,
            "duplicates": totals.duplicates,
            "duplicate_share": round(totals.duplicate_share, 5),
            "overlaps_after_lease_loss": totals.overlaps,
            "late_starts": totals.late_starts,
            "failures": [report.as_json() for report in totals.failures],
        },
        ensure_ascii=False,
    )


# The command


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulator.processes.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help=f"start no run after this time ({DEFAULT_MINUTES:g})")
    parser.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--runs", type=int, help="how many runs at the most")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first run; the next run has the next seed (default 0)"
    )
    parser.add_argument("--save", metavar="DIR", type=Path, help="folder for the files of runs")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args(argv)
    if arguments.hours is not None:
        arguments.minutes = 60 * arguments.hours + (arguments.minutes or 0.0)
    if arguments.minutes is None:
        arguments.minutes = DEFAULT_MINUTES if arguments.runs is None else float("inf")
    if arguments.save is not None:
        arguments.save.mkdir(parents=True, exist_ok=True)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    started_s = time.monotonic()
    seconds = 60 * arguments.minutes
    totals = ProcessTotals()
    try:
        with _meter(Console(stderr=True), seconds) as meter:
            for seed in itertools.islice(itertools.count(arguments.seed), arguments.runs):
                if time.monotonic() - started_s >= seconds:
                    break
                settings = settings_of(seed, arguments.save)
                totals.add(run_processes(settings, lambda fault: meter(totals, fault)))
                meter(totals, "")
    except KeyboardInterrupt:
        print("interrupted; so far:", file=sys.stderr)
    took_s = time.monotonic() - started_s
    if arguments.json:
        print(_as_json(totals, arguments.seed, took_s))
    else:
        _tell(Console(highlight=False), totals, arguments.seed, took_s)
    return 0 if totals.ok else 1


if __name__ == "__main__":
    sys.exit(main())
