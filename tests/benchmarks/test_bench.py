"""`inturn bench`: the shape of the output. The figures are for people, on quiet machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import key_order, lane_overhead, trace_overhead
from benchmarks.catalog import BENCHES
from benchmarks.catalog import bench as run_named
from benchmarks.key_order import Plan
from benchmarks.key_order_plot import PNG_BYTES_MAX
from benchmarks.replay import longest_lane_first, static_hash
from inturn.model.errors import InvalidInput
from tests.contract.bed import in_one_of

APP = "from inturn.cli.main import app; app()"
COMMAND = "import typer; from inturn.cli.checkout import run_bench; typer.run(run_bench)"
# An import finder that hides matplotlib, as if matplotlib were not installed.
WITHOUT_MATPLOTLIB = (
    "import importlib.util as util; find = util.find_spec;"
    "util.find_spec = lambda name, *more: None if name == 'matplotlib' else find(name, *more);"
)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=250)


def bench(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return run_python(before + COMMAND, *arguments)


def report_of(*arguments: str) -> dict[str, Any]:
    return read(bench(*arguments, "--quick", "--json"))


def read(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert isinstance(report, dict)
    return report


def check_shape(report: dict[str, Any]) -> None:
    assert report["figure"] > 0
    assert report["unit"]
    assert report["beside"]
    assert all(one["what"] and one["figure"] > 0 for one in report["beside"])
    assert report["ratio"] == pytest.approx(report["figure"] / report["beside"][0]["figure"])
    assert report["rows"]
    for row in report["rows"]:
        assert row["what"]
        assert row["figure"] > 0
        assert row["ratio"] == pytest.approx(row["figure"] / row["beside"][0]["figure"])
        assert row["aim"]
        assert all(one["what"] and one["figure"] > 0 for one in row["beside"])
    assert {"cpus", "python", "system"} <= report["machine"].keys()


@pytest.mark.parametrize("name", ["append", "send", "consume-partition"])
def test_a_benchmark_tells_its_figure_what_stands_beside_it_and_the_machine(name: str) -> None:
    report = read(run_python(APP, "bench", name, "--quick", "--json"))
    assert report["bench"] == name
    check_shape(report)


def test_key_order_has_a_row_for_each_number_of_keys_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "key-order.png"
    report = report_of("key-order", "--plot", str(picture))
    check_shape(report)
    assert [row["more"]["keys"] for row in report["rows"]] == list(key_order.QUICK_KEY_COUNTS)
    assert all(len(row["beside"]) == 3 for row in report["rows"])
    assert len({row["beside"][2]["figure"] for row in report["rows"]}) == 1, "by partition it is measured once"
    assert report["ratio"] == max(row["ratio"] for row in report["rows"])
    one_key = report["rows"][0]
    assert one_key["figure"] >= one_key["more"]["bound_s"], "nobody sleeps less than was asked for"
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert 600 <= width <= 2000
    assert 300 <= height <= 1500
    assert 5000 < len(data) <= PNG_BYTES_MAX


@pytest.mark.parametrize("option", ["--zipf", "--async"])
def test_key_order_has_variants(option: str) -> None:
    report = report_of("key-order", option)
    assert report["bench"] == f"key-order {option}"
    check_shape(report)
    assert len(report["rows"]) == 1


def test_trace_overhead_measures_threads_and_tasks_with_few_keys_and_with_one_per_message() -> None:
    report = report_of("trace-overhead")
    check_shape(report)
    few, many = trace_overhead.KEYS, trace_overhead.QUICK_COUNT
    assert [(row["what"].split(",")[0], row["more"]["keys"]) for row in report["rows"]] == [
        ("threads", few),
        ("async", few),
        ("threads", many),
        ("async", many),
    ]
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(1 + row["more"]["share"])
        assert row["is_met"] == (row["more"]["share"] < trace_overhead.AIM_SHARE)


def test_process_workers_measures_long_and_short_handlers_beside_a_bare_pool() -> None:
    report = report_of("process-workers")
    check_shape(report)
    assert [row["what"].split(", ")[1] for row in report["rows"]] == ["2 ms each", "50 µs each"]
    for row in report["rows"]:
        assert [one["what"].split()[1] for one in row["beside"]] == ["bare", "same"]
        assert row["more"]["times_threads"] == pytest.approx(row["figure"] / row["beside"][1]["figure"])


def test_lane_overhead_measures_threads_and_tasks_for_each_number_of_keys() -> None:
    report = report_of("lane-overhead")
    check_shape(report)
    counts = list(lane_overhead.QUICK_KEY_COUNTS)
    assert [row["more"]["keys"] for row in report["rows"]] == counts * 2
    assert [row["what"].split(",")[0] for row in report["rows"]] == ["threads", "threads", "async", "async"]
    for row in report["rows"]:
        share = row["more"]["share_of_100_keys"]
        fast = row["figure"] >= lane_overhead.AIM_PER_S
        assert row["is_met"] == (fast and (row["more"]["keys"] != counts[-1] or share >= lane_overhead.AIM_SHARE))
    assert report["ratio"] == min(row["ratio"] for row in report["rows"])


def test_stuck_key_repeats_only_what_ran_and_loses_nothing() -> None:
    report = report_of("stuck-key")
    check_shape(report)
    (row,) = report["rows"]
    running, lowest = (one["figure"] for one in row["beside"])
    assert (row["figure"], running) == (1, 1)
    assert lowest == 1000 - 50 - 10, "all above the stuck one but those of its key"
    assert row["more"] == {"ended_before": 990, "lost": 0, "overtook": 0, "lag": 0}
    assert row["is_met"]


def test_all_runs_every_variant() -> None:
    assert {"key-order", "key-order --zipf", "key-order --async", "lane-overhead", "stuck-key"} <= BENCHES.keys()
    from importlib import import_module

    for module, function in BENCHES.values():
        assert callable(getattr(import_module(f"benchmarks.{module}"), function))


@pytest.mark.parametrize(
    ("name", "plot", "told"),
    [
        ("append --zipf", None, ["'append --zipf'", *BENCHES]),
        ("key-order --zipf --async", None, ["'key-order --zipf --async'"]),
        ("append", "x.png", ["--plot draws key-order"]),
        ("key-order --zipf", "x.png", ["--plot draws key-order"]),
        ("key-order", "x.svg", [".png"]),
        ("key-order", "no/such/folder/x.png", ["no/such/folder"]),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(
    name: str, plot: str | None, told: list[str]
) -> None:
    with pytest.raises(InvalidInput) as refused:
        run_named(name, True, True, None if plot is None else Path(plot))
    assert all(words in str(refused.value) for words in told)


def test_an_unknown_benchmark_is_refused_and_told_which_there_are() -> None:
    ran = bench("nothing", "--quick", "--json", "--zipf")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "nothing --zipf" in ran.stderr
    assert all(name in ran.stderr for name in BENCHES)
    assert "Traceback" not in ran.stderr


def test_without_matplotlib_it_tells_what_to_install() -> None:
    ran = bench("key-order", "--quick", "--json", "--plot", "x.png", before=WITHOUT_MATPLOTLIB)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "pip install 'inturn[plot]'" in ran.stderr


def test_the_bare_models_keep_to_their_bounds() -> None:
    lanes = [[0.01] * 8, [0.01] * 2, [0.01] * 2, [0.01] * 2, [0.01] * 2]

    def keep_to_them() -> None:
        two_s, one_s = longest_lane_first(lanes, 2), static_hash([[0.01] * 16, []])
        assert one_s >= 0.16, "all in one queue"
        assert 0.08 <= two_s < one_s, "two workers: the long lane beside the four short ones"

    in_one_of(5, keep_to_them)  # the bound: the sleeps of two workers, and little more


def test_a_plan_knows_its_lanes_queues_and_bound() -> None:
    plan = Plan([0, 1, 0, 2], [0.1, 0.2, 0.3, 0.1])
    assert plan.lanes == [[0.1, 0.3], [0.2], [0.1]]
    assert sorted(sleep_s for queue in plan.hashed for sleep_s in queue) == [0.1, 0.1, 0.2, 0.3]
    assert plan.bound_s == pytest.approx(0.4)
