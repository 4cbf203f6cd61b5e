from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import inturn.testing
from inturn.consumer.partition_lease import Stage
from inturn.testing.history import History
from simulator.faults import FAULTS
from simulator.seeded_bugs import BUGS
from simulator.soak import COVERED_COUNT, REQUIRED_COVERAGE, SeedOutcome, SoakTotals, main


def test_good_histories_are_counted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--processes", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 histories: ok" in out
    assert "event.LeaseGranted" in out
    assert "virtual hours" in out


def test_one_seed_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "7"]) == 0
    assert "1 histories: ok" in capsys.readouterr().out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--first", "10", "--processes", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["histories"] == 2
    assert told["messages"] > 500
    assert told["failures"] == told["missing"] == []
    assert set(REQUIRED_COVERAGE) <= set(told["coverage"])


def test_a_failing_history_is_told_saved_and_can_be_replayed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with BUGS["failed_message_counts_as_done"].injected():
        assert main(["--seeds", "1", "--first", "3", "--processes", "1", "--save", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "seed 3: FAILED; again with: python -m simulator.soak --seed 3" in out
    assert "1 histories: 1 FAILED (seeds 3)" in out
    assert "skipped" in out
    assert len(History.load(tmp_path / "history-3.jsonl")) > 500


def test_the_module_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simulator.soak", "--seed", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_nothing_is_begun_after_the_time_is_over() -> None:
    assert main(["--minutes", "0", "--processes", "1"]) == 1  # no history ran, so the result is not ok


def test_a_thousand_histories_must_cover_everything() -> None:
    totals = SoakTotals()
    everything = Counter(REQUIRED_COVERAGE)
    for seed in range(COVERED_COUNT - 1):
        totals.add(SeedOutcome(seed, [], coverage=Counter()))
    assert totals.ok  # too few histories to decide
    totals.add(SeedOutcome(COVERED_COUNT, [], coverage=Counter()))
    assert totals.missing == list(REQUIRED_COVERAGE)
    assert not totals.ok
    totals.add(SeedOutcome(COVERED_COUNT + 1, [], coverage=everything))
    assert totals.ok


def test_all_faults_and_stages_are_required() -> None:
    assert {f"fault.{name}" for name in FAULTS} <= set(REQUIRED_COVERAGE)
    stages = {part for name in REQUIRED_COVERAGE if name.startswith("stage.") for part in name[6:].split(" → ")}
    assert stages == {"none", *(stage.value for stage in Stage)}


def test_the_published_names_are_there() -> None:
    for name in inturn.testing.__all__:
        assert name == "Event" or getattr(inturn.testing, name).__name__ == name
    assert set(inturn.testing.__all__) <= set(dir(inturn.testing))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = inturn.testing.nonsense  # type: ignore[attr-defined]


def test_the_checker_does_not_load_the_simulation() -> None:
    code = "import sys; from inturn.testing import check; sys.exit('simulator.simulation' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
