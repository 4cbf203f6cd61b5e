"""Benchmarks that start processes: the shape of the output. No process is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end, hand_over, idle, metrics_overhead, produce, scale
from benchmarks.bare_client import FRAME, PipelinedClient, dial, round_trip
from benchmarks.child import Child
from benchmarks.hand_over import _worst_pause_ms
from benchmarks.noting_child import Call
from benchmarks.served_child import served
from benchmarks.window import BURST
from inturn.client import connect
from inturn.model.errors import InturnError
from inturn.protocol.codec import pack
from inturn.protocol.commands import Done
from inturn.transport.client import RemoteNode
from tests.benchmarks.test_bench import APP, check_shape, read

MARK = "INTURN_BENCH_TEST"  # children inherit the variable, so the test finds the children
END_S = 60.0


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """No process that was started with the mark outlives the test."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are found in /proc")
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: the path may be too long for a Unix socket
        monkeypatch.setenv("TMPDIR", folder)
        yield mark
        until_s = time.monotonic() + END_S
        while (left := processes(mark)) and time.monotonic() < until_s:
            time.sleep(0.05)
    assert left == []


def processes(mark: str) -> list[int]:
    """All other processes with the mark, by the start environment in /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # the process has just ended, or belongs to a different user
            continue
    return found


def report_of(name: str, mark: str) -> dict[str, Any]:
    command = [sys.executable, "-c", APP, "bench", name, "--quick", "--json"]
    report = read(subprocess.run(command, capture_output=True, text=True, timeout=250))
    assert processes(mark) == [], "they end before the benchmark does"
    assert report["bench"] == name
    check_shape(report)
    return report


def test_wire_measures_one_client_many_and_one_that_pipelines(mark: str) -> None:
    """Every case on an event loop and with threads."""
    report = report_of("wire", mark)
    assert [row["unit"] for row in report["rows"]] == ["ms"] * 2 + ["round trips/s"] * 4
    assert all(row["is_met"] == (row["ratio"] <= 2) for row in report["rows"][:2])
    assert all(row["is_met"] == (row["ratio"] >= 0.5) for row in report["rows"][2:])


def test_metrics_overhead_compares_servers_that_are_measured_and_not(mark: str) -> None:
    report = report_of("metrics-overhead", mark)
    pipelined, synchronous, scrape = report["rows"]
    for row in (pipelined, synchronous):
        assert row["is_met"] == (row["ratio"] < 1 + metrics_overhead.AIM_SHARE)
        assert row["more"]["per_s"] > 0
    assert report["ratio"] == max(pipelined["ratio"], synchronous["ratio"])
    assert scrape["more"]["size_bytes"] > 200 * metrics_overhead.QUICK_GROUP_COUNT


def test_produce_measures_pipelining_and_producers_that_wait(mark: str) -> None:
    report = report_of("produce", mark)
    pipelined, *synchronous = report["rows"]
    assert pipelined["is_met"] == (pipelined["ratio"] >= 0.6 and pipelined["figure"] >= produce.AIM_PER_S)
    assert [row["more"]["partitions"] for row in synchronous] == list(produce.PARTITION_COUNTS)
    assert all(row["is_met"] == (row["ratio"] >= produce.AIM_TIMES) for row in synchronous)


def test_end_to_end_has_a_row_for_each_rate(mark: str) -> None:
    report = report_of("end-to-end", mark)
    assert [row["more"]["rate"] for row in report["rows"]] == list(end_to_end.RATES)
    assert all(row["more"]["p99_ms"] >= row["figure"] for row in report["rows"])
    first = report["rows"][0]
    assert first["is_met"] == (first["figure"] <= 2 and first["more"]["p99_ms"] <= 15)


def test_hand_over_measures_stopping_and_killing(mark: str) -> None:
    report = report_of("hand-over", mark)
    stopped, killed = report["rows"]
    assert stopped["more"]["hand_overs"] == killed["more"]["hand_overs"] == hand_over.PARTITIONS // 2
    life_ms = hand_over.QUICK_LEASE.life_s * 1000
    assert killed["beside"][0]["figure"] == life_ms
    assert killed["figure"] > life_ms / 2, "nobody takes over what is leased"


def test_grow_measures_sends_around_the_switch(mark: str) -> None:
    report = report_of("grow", mark)
    (row,) = report["rows"]
    assert row["more"]["growths"] == 1
    assert 0 < row["more"]["grow_ms"] < 60_000
    assert row["figure"] > 0


def test_idle_measures_what_consumers_with_nothing_to_do_cost_a_server(mark: str) -> None:
    report = report_of("idle", mark)
    p99, memory, processor = report["rows"]
    assert p99["is_met"] == (p99["ratio"] < idle.AIM_TIMES)
    assert memory["is_met"] == (memory["figure"] < idle.AIM_MB)
    assert 20 < memory["beside"][0]["figure"] < 500, "the memory of a process that has loaded all this"
    assert processor["is_met"] == (processor["figure"] < idle.AIM_PERCENT)


def test_scale_has_rows_for_each_number_of_partitions_and_each_backlog(mark: str) -> None:
    report = report_of("scale", mark)
    partitions, backlogs = scale.QUICK_PARTITION_COUNTS, scale.QUICK_BACKLOGS
    wanted = [(kind, "partitions", one) for kind in ("produce", "consume", "steady") for one in partitions]
    wanted += [(kind, "backlog", one) for kind in ("produce", "consume") for one in backlogs]
    rows = report["rows"]
    found = [
        (row["what"].split(",")[0], axis, row["more"][axis]) for row, (_, axis, _) in zip(rows, wanted, strict=True)
    ]
    assert found == wanted
    assert min(row["ratio"] for row in rows) == 1, "each axis has its least"
    assert report["ratio"] == max(row["ratio"] for row in rows)
    assert all(row["is_met"] == (row["ratio"] <= scale.AIM_TIMES) for row in rows)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_children_end_when_the_benchmark_is_ended(mark: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", APP, "bench", "end-to-end", "--json"]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until_s = time.monotonic() + END_S
    while len(processes(mark)) < 5 and time.monotonic() < until_s:  # benchmark, server, echo, consumer and producer
        time.sleep(0.05)
    assert len(processes(mark)) == 5
    ran.send_signal(number)
    ran.communicate(timeout=END_S)
    assert ran.returncode != 0


def test_a_child_that_ends_by_itself_is_told_of(mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(InturnError, match="echo_child ended"),
        Child("echo_child", "sync", "/no/such/folder/file") as child,
    ):
        child.hear()
    assert "FileNotFoundError" in capfd.readouterr().err


def test_a_child_is_killed_when_its_block_raises(mark: str, tmp_path: Path) -> None:
    def fail() -> None:
        with served(tmp_path) as child:
            child.hear()
            os.kill(child.pid, signal.SIGSTOP)  # so that the child does not notice the closed stdin
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert processes(mark) == []


def test_a_served_folder_has_the_lease_that_it_was_given(mark: str, tmp_path: Path) -> None:
    with served(tmp_path, hand_over.QUICK_LEASE) as child, connect(child.hear(), wait_s=60.0) as mq:
        assert isinstance(mq.node, RemoteNode)
        assert mq.node.lease == hand_over.QUICK_LEASE


@pytest.mark.parametrize("kind", ["bytes", "sync"])
def test_the_bare_servers_echo(mark: str, tmp_path: Path, kind: str) -> None:
    with Child("echo_child", kind, tmp_path / "echoed") as child, dial(int(child.hear())) as dialed:
        round_trip(dialed, b"abc")
        round_trip(dialed, b"def")
    if kind == "sync":
        assert (tmp_path / "echoed").read_bytes() == b"abcdef"


def test_the_bare_pipeline_gets_all_its_frames_back(mark: str) -> None:
    async def run(port: int) -> float:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(PipelinedClient, "127.0.0.1", port)
        try:
            return await asyncio.wait_for(client.run_s(20 * BURST), 30)
        finally:
            client.close()

    with Child("echo_child", "bytes") as child:
        assert asyncio.run(run(int(child.hear()))) > 0


def test_an_echo_is_as_long_as_an_answer() -> None:
    assert len(FRAME) == len(pack(1, Done()))


def test_a_pause_is_between_two_calls_of_one_partition() -> None:
    calls = [Call(0, 1, 1_000_000, 2_000_000), Call(1, 1, 9_000_000, 9_000_000), Call(0, 1, 5_000_000, 5_000_000)]
    assert _worst_pause_ms(calls) == 3.0
