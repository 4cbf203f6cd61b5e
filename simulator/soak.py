"""Many simulated histories, in several processes, and their coverage.

    python -m simulator.soak --seeds 1000

Fails (exit code 1) if a history breaks the contract, or if a thousand or more histories miss an entry of
`REQUIRED_COVERAGE`. Replay a history that failed with `--seed`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from simulator.disk import SimCrash
from simulator.faults import FAULTS
from simulator.simulation import Report, simulate

# This number of histories must reach all coverage. The rarest entry comes about ten times in as many histories.
COVERED_COUNT = 1000
REQUIRED_COVERAGE: tuple[str, ...] = (
    *(f"fault.{name}" for name in FAULTS),
    *(
        f"stage.{change}"
        for change in (
            "none → asking",
            "asking → none",
            "asking → active",
            "active → draining",
            "active → lost",
            "draining → releasing",
            "draining → lost",
            "releasing → none",
            "releasing → lost",
            "lost → none",
        )
    ),
    *(
        f"error.{name}"
        for name in (
            "ConnectionLost",
            "DiskFull",
            "GateClosed",
            "LeaseHeld",
            "LogStopped",
            "OutOfSequence",
            "ProducerFenced",
            "RouteChanged",
            "ServerStopping",
            "StaleEpoch",
        )
    ),
    *(f"event.LeaseEnded {why}" for why in ("released", "expired", "gone")),
    *(f"event.{name}" for name in ("ClaimEnded", "ClaimGranted", "ConsumerCrashed", "ProcessRestarted")),
    *(
        f"claim.{what}"
        for what in (
            "given back",
            "granted",
            "granted again after a restart",
            "granted again after it was lost",
            "granted again for the same ask",
            "keeps a lease from being released",
            "late copy of a commit",
            "lost",
            "lost after a restart",
            "progress added",
            "refused, somebody has it",
            "until inside a batch",
        )
    ),
    *(
        f"drain.{what}"
        for what in (
            "all cut off",
            "beside others",
            "claimant crashed",
            "claimant frozen",
            "handed back",
            "handed back amid a round",
            "keeper crashed amid a round",
            "keeper left",
            "keeper lost a lease",
            "keeper vanished",
            "refused, another has taken over",
            "round",
            "round given up",
            "round over",
            "takes over",
            "task begun twice",
            "tasks live on without their keeper",
        )
    ),
    *(f"exhausted.{what}" for what in ("block", "dead-letter", "park")),
    *(f"flow.paused by {what}" for what in ("count", "span")),
    *(f"hand-over.{what}" for what in ("finished set", "failed message", "blocked message")),
    *(f"hand-over.{what}" for what in ("parked key", "resuming key")),
    *(f"growth.{when}" for when in ("first", "again")),
    *(f"handler.{kind}" for kind in ("success", "failed", "exception", "invalid")),
    *(f"lane.straight{how}" for how in ("", ", spread after a failure", ", spread while it runs")),
    *(f"handler.{what}" for what in ("repeated", "of a parked message")),
    *(f"log.{what}" for what in ("segment", "segment after a gap", "torn tail cut", "unsynced lost", "dead letter")),
    *(f"lot.{what}" for what in ("read in several pieces", "tail added while resuming")),
    *(f"network.{what}" for what in ("request lost", "answer lost", "request repeated")),
    *(f"node.{what}" for what in ("crashed", "stopped gently", "stopped too late")),
    *(f"producer.ended by {name}" for name in ("LogStopped", "ProducerFenced")),
    *(f"setting.{name}" for name in ("ack auto", "ack manual", "clients local", "clients remote")),
    *(f"request.{what}" for what in ("park", "park while resuming", "resume", "skip")),
    "run.of several lanes",
    *(f"setting.{name}" for name in ("flush always", "flush os", "order key", "order partition")),
    *(f"setting.network of {what}" for what in ("commands", "streams")),
    *(
        f"stream.{what}"
        for what in (
            "byte flipped",
            "bytes of a client that is gone",
            "cut in the middle of a frame",
            "ended by the node",
            "frame in pieces",
            "frame twice",
            "given up by the client, nonsense",
            "given up by the node, nonsense",
            "given up by the node, silence",
            "given up, nobody answers",
            "not reached",
            "opened",
            "refused",
            "too much unanswered",
        )
    ),
    *(f"verdict.{what}" for what in ("duplicates", "overlaps after lease loss", "skipped")),
)
_SHOWN_PROBLEMS = 5
_SHOWN_FAILURES = 20
_LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """The result of a seed, small enough to return from a worker process."""

    seed: int
    problems: list[str]
    faults: int = 0
    messages: int = 0
    duplicates: int = 0
    virtual_s: float = 0.0
    coverage: Counter[str] = field(default_factory=Counter)
    saved: str | None = None

    @property
    def replay(self) -> str:
        return f"python -m simulator.soak --seed {self.seed}"


@dataclass(slots=True)
class SoakTotals:
    histories: int = 0
    faults: int = 0
    messages: int = 0
    duplicates: int = 0
    virtual_s: float = 0.0
    coverage: Counter[str] = field(default_factory=Counter)
    failures: list[SeedOutcome] = field(default_factory=list)

    def add(self, outcome: SeedOutcome) -> None:
        self.histories += 1
        self.faults += outcome.faults
        self.messages += outcome.messages
        self.duplicates += outcome.duplicates
        self.virtual_s += outcome.virtual_s
        self.coverage.update(outcome.coverage)
        if outcome.problems:
            self.failures.append(outcome)

    @property
    def missing(self) -> list[str]:
        """The required coverage that was not reached. Fewer histories need not reach all coverage."""
        if self.histories < COVERED_COUNT:
            return []
        return [name for name in REQUIRED_COVERAGE if not self.coverage[name]]

    @property
    def ok(self) -> bool:
        return not self.failures and not self.missing


# Running


def run_one(seed: int, save: str | None = None) -> SeedOutcome:
    """Run a seed. A history that fails is saved in the folder `save`, if given."""
    try:
        report = simulate(seed)
    except (Exception, SimCrash) as error:
        return SeedOutcome(seed, [f"the simulation itself ended with {type(error).__name__}: {error}"])
    return _outcome(report, save)


def _outcome(report: Report, save: str | None) -> SeedOutcome:
    saved = None
    if save is not None and not report.ok:
        saved = str(Path(save) / f"history-{report.seed}.jsonl")
        Path(save).mkdir(parents=True, exist_ok=True)
        report.history.save(saved)
    return SeedOutcome(
        report.seed,
        report.problems[:_SHOWN_PROBLEMS],
        len(report.faults),
        report.verdict.sent,
        report.verdict.duplicates,
        report.seconds,
        report.coverage,
        saved,
    )


def run_many(seeds: Iterator[int], processes: int, save: str | None, until_s: float | None) -> Iterator[SeedOutcome]:
    """The outcomes as they come. No seed is started after `until_s` (monotonic)."""
    if processes == 1:
        with _silence():
            for seed in seeds:
                if until_s is not None and time.monotonic() >= until_s:
                    return
                yield run_one(seed, save)
        return
    with ProcessPoolExecutor(processes, initializer=_silence_for_good) as pool:
        waiting: set[Future[SeedOutcome]] = set()
        try:
            while True:
                while len(waiting) < 4 * processes and (until_s is None or time.monotonic() < until_s):
                    begun = [pool.submit(run_one, seed, save) for seed in itertools.islice(seeds, 1)]
                    if not begun:
                        break
                    waiting.update(begun)
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(cancel_futures=True)


def _silence_for_good() -> None:
    """Silence the errors that the product logs because of faults."""
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


# Telling


class _Meter(Protocol):
    def advance(self, totals: SoakTotals) -> None: ...


class _Bar:
    def __init__(self, bar: Progress, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task("histories", total=total, told="")
        self._started_s = time.monotonic()

    def advance(self, totals: SoakTotals) -> None:
        rate = totals.histories / max(time.monotonic() - self._started_s, 1e-6)
        failed = f"  {len(totals.failures)} FAILED" if totals.failures else ""
        self._bar.update(self._task, completed=totals.histories, told=f"{rate:.1f}/s{failed}")


class _Lines:
    """Where stderr is no terminal: a line now and then."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._console = console
        self._total = total
        self._started_s = time.monotonic()
        self._next_s = self._started_s + _LINE_EVERY_S

    def advance(self, totals: SoakTotals) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _LINE_EVERY_S
        rate = totals.histories / (now_s - self._started_s)
        of = left = ""
        if self._total is not None:
            of = f" of {self._total}"
            left = f", {(self._total - totals.histories) / rate:.0f} s left"
        self._console.print(
            f"{totals.histories}{of} histories, {rate:.1f}/s{left}, {len(totals.failures)} failed", soft_wrap=True
        )


@contextlib.contextmanager
def _meter(console: Console, total: int | None) -> Iterator[_Meter]:
    if not console.is_terminal:
        yield _Lines(console, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar, total)


def _tell(console: Console, totals: SoakTotals, took_s: float) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("covered")
    table.add_column("times", justify="right")
    for name in sorted(totals.coverage.keys() | set(REQUIRED_COVERAGE)):
        table.add_row(name, str(totals.coverage[name]))
    console.print(table)
    console.print()
    console.print(
        f"{totals.histories} histories in {took_s:.1f} s, {totals.virtual_s / 3600:.1f} virtual hours, "
        f"{totals.messages} messages, {totals.faults} faults, {totals.duplicates} duplicates",
        soft_wrap=True,
    )
    for failure in totals.failures[:_SHOWN_FAILURES]:
        console.print(f"\nseed {failure.seed}: FAILED; again with: {failure.replay}", soft_wrap=True, markup=False)
        for problem in failure.problems:
            console.print(f"  {problem}", soft_wrap=True, markup=False)
        if failure.saved is not None:
            console.print(f"  history: {failure.saved}", soft_wrap=True, markup=False)
    for name in totals.missing:
        console.print(f"never happened: {name}", soft_wrap=True)
    console.print(f"{totals.histories} histories: {_verdict(totals)}", soft_wrap=True)


def _verdict(totals: SoakTotals) -> str:
    if totals.failures:
        seeds = ", ".join(str(failure.seed) for failure in totals.failures[:_SHOWN_FAILURES])
        return f"{len(totals.failures)} FAILED (seeds {seeds}{', …' if len(totals.failures) > _SHOWN_FAILURES else ''})"
    return f"FAILED to cover {len(totals.missing)} things" if totals.missing else "ok"


def _as_json(totals: SoakTotals, took_s: float) -> str:
    return json.dumps(
        {
            "ok": totals.ok,
            "histories": totals.histories,
            "seconds": round(took_s, 3),
            "virtual_hours": round(totals.virtual_s / 3600, 3),
            "messages": totals.messages,
            "faults": totals.faults,
            "duplicates": totals.duplicates,
            "coverage": {name: totals.coverage[name] for name in sorted(totals.coverage.keys() | {*REQUIRED_COVERAGE})},
            "missing": totals.missing,
            "failures": [
                {"seed": one.seed, "problems": one.problems, "replay": one.replay, "saved": one.saved}
                for one in totals.failures
            ],
        },
        ensure_ascii=False,
    )


# The command


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulator.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=_at_least_one, help="how many histories (default 1000, or no limit)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument(
        "--processes", type=_at_least_one, default=os.cpu_count() or 1, help="default: the number of cores"
    )
    parser.add_argument("--minutes", type=float, help="start no seed after this time")
    parser.add_argument("--save", metavar="DIR", help="keep the histories that fail in this folder")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args(argv)
    if arguments.seed is not None:
        arguments.first, arguments.seeds, arguments.processes = arguments.seed, 1, 1
    elif arguments.seeds is None and arguments.minutes is None:
        arguments.seeds = COVERED_COUNT
    return arguments


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: give 1 or more")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    started_s = time.monotonic()
    until_s = None if arguments.minutes is None else started_s + 60 * arguments.minutes
    seeds = itertools.islice(itertools.count(arguments.first), arguments.seeds)
    totals = SoakTotals()
    try:
        with _meter(Console(stderr=True), arguments.seeds) as meter:
            for outcome in run_many(seeds, arguments.processes, arguments.save, until_s):
                totals.add(outcome)
                meter.advance(totals)
    except KeyboardInterrupt:
        print("interrupted; so far:", file=sys.stderr)
    totals.failures.sort(key=lambda one: one.seed)
    took_s = time.monotonic() - started_s
    if arguments.json:
        print(_as_json(totals, took_s))
    else:
        _tell(Console(highlight=False), totals, took_s)
    return 0 if totals.ok and totals.histories else 1


if __name__ == "__main__":
    sys.exit(main())
