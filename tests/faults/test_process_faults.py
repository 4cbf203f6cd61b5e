"""Separate processes that are killed, frozen, cut off and misled; and seeded bugs that the runs must find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.processes.faults import FaultCounts
from simulator.processes.run import ProcessReport, ProcessSettings, run_processes
from simulator.processes.soak import main

# The faults of every run. The third run is for `make soak`: order and flush repeat values of the first two runs.
COUNTS = FaultCounts(kills=18, freezes=7, stream_faults=8, clock_jumps=3, restarts=1)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("seed", "order", "flush"),
    [(1, "key", "always"), (2, "partition", "os"), pytest.param(3, "key", "os", marks=pytest.mark.slow)],
    ids=str,
)
def test_order_is_kept_and_nothing_is_lost_whatever_happens_to_the_processes(
    tmp_path: Path, seed: int, order: str, flush: str
) -> None:
    settings = ProcessSettings(seed=seed, order=order, flush=flush, faults=COUNTS, folder=tmp_path)  # type: ignore[arg-type]
    report = run_processes(settings)
    report.raise_if_bad()
    assert (report.kills, report.freezes, report.stream_faults) == (18, 7, 8)
    assert report.faults["kill server"] == 6
    assert report.verdict.sent > 200
    assert report.verdict.lease_grants > 4
    assert list(tmp_path.iterdir()) == []  # a good run leaves no files


LONG_FREEZES = ("freeze consumer for long",) * 4
# The machine decides when exactly a fault hits: if a run does not show the bug, the next run does.
SEEDS = (5, 6, 7, 8, 9, 10)


def _findings(tmp_path: Path, sign: str, role: str, bug: str, *faults: str, **options: object) -> list[str]:
    """The findings of the first run with the given text in a finding."""
    for seed in SEEDS:
        settings = ProcessSettings(seed=seed, faults=faults, bugs={role: bug}, folder=tmp_path, quiet_s=10.0, **options)  # type: ignore[arg-type, dict-item]
        report = run_processes(settings)
        found = [problem for problem in report.problems if problem.startswith(sign)]
        if found:
            _is_kept(report)
            return found
    return []


def _is_kept(report: ProcessReport) -> None:
    assert not report.ok
    assert report.folder is not None
    assert (Path(report.folder) / "history.jsonl").exists()
    with pytest.raises(AssertionError, match="all its files are in"):
        report.raise_if_bad()


@pytest.mark.timeout(500)
def test_a_consumer_that_ignores_the_end_of_its_lease_is_found(tmp_path: Path) -> None:
    bugs = "deadline_is_not_checked_before_a_start+dropped_partition_goes_on"
    assert _findings(tmp_path, "STALE START", "consumer", bugs, *LONG_FREEZES, gap_s=0.6)


@pytest.mark.timeout(500)
def test_a_server_that_accepts_stale_commits_is_found(tmp_path: Path) -> None:
    bugs = "commit_is_not_checked_by_the_broker+commit_goes_back"
    holds = ("hold to server",) * 12
    assert _findings(tmp_path, "STALE COMMIT", "server", bugs, *holds, consumers=4, producers=1, partitions=8)


@pytest.mark.timeout(500)
def test_a_server_that_counts_epochs_in_memory_is_found(tmp_path: Path) -> None:
    faults = ("kill server", "kill consumer", "kill consumer")
    assert _findings(tmp_path, "EPOCH NOT RAISED", "server", "epoch_lives_in_memory", *faults, gap_s=1.0)


@pytest.mark.timeout(500)
def test_a_consumer_that_commits_what_it_has_only_pulled_is_found(tmp_path: Path) -> None:
    kills = ("kill consumer",) * 2
    assert _findings(tmp_path, "PREMATURE COMMIT", "consumer", "commits_what_was_pulled", *kills)


@pytest.mark.timeout(500)
def test_a_log_that_stores_what_is_sent_again_is_found(tmp_path: Path) -> None:
    faults = ("drop from server", "duplicate frames", "reset streams", "kill server") * 2
    assert _findings(tmp_path, "STORED", "server", "duplicates_are_stored", *faults, consumers=2)


@pytest.mark.timeout(300)
def test_the_command_runs_one_history_and_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "1", "--seed", "4", "--save", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert told["runs"] == 1
    assert told["faults"]["kill server"] >= 1
    assert told["failures"] == []
