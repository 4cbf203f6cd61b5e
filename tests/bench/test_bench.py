"""`inturn bench`: the shape of what it says. The figures themselves are for people, on quiet machines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from inturn.cli.bench import BENCHES


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from inturn.cli.main import app; app()", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_a_benchmark_tells_its_figure_what_stands_beside_it_and_the_machine(name: str) -> None:
    ran = bench(name, "--quick", "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["bench"] == name
    assert report["figure"] > 0
    assert report["unit"]
    assert report["beside"]
    assert all(one["what"] and one["figure"] > 0 for one in report["beside"])
    assert report["ratio"] == pytest.approx(report["figure"] / report["beside"][0]["figure"])
    assert report["rows"]
    for row in report["rows"]:
        assert row["what"]
        assert row["figure"] > 0
        assert row["ratio"] > 0
        assert row["aim"]
        assert all(one["what"] and one["figure"] > 0 for one in row["beside"])
    assert {"cpus", "python", "system"} <= report["machine"].keys()


def test_an_unknown_benchmark_is_refused_and_told_which_there_are() -> None:
    ran = bench("nothing", "--quick", "--json")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "nothing" in ran.stderr
    assert all(name in ran.stderr for name in BENCHES)
    assert "Traceback" not in ran.stderr
