"""S5: `inturn audit`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from inturn import ConsumerSettings, Context, Message, connect
from inturn.consumer.trace import EVENTS, HEAD, chunks
from tests.cli.conftest import Cli

COUNT = 40


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    is_over = threading.Event()
    done: list[int] = []

    def handler(message: Message, context: Context) -> None:
        done.append(message.offset)
        if len(done) == COUNT:
            is_over.set()

    with connect(tmp_path / "data") as mq:
        mq.create_subject("orders")
        with mq.producer() as producer:
            for number in range(COUNT):
                producer.send("orders", b"x", key=b"key-%d" % (number % 3))
        settings = ConsumerSettings(trace=str(tmp_path / "traces"))
        with mq.consumer("orders", "billing", handler, order="key", settings=settings):
            assert is_over.wait(30)
    return tmp_path


@pytest.mark.timeout(500)
def test_a_trace_is_proved_with_its_log_and_a_damaged_one_is_not(recorded: Path) -> None:
    shutil.copytree(recorded / "traces", recorded / "damaged")
    (path,) = (recorded / "damaged").glob("*.trace")
    _drop_runs(path)
    log = ("--data", str(recorded / "data"), "--subject", "orders", "--complete", "--master", "local[2]")
    kept, broken = _run_in_one_process(
        ("audit", str(recorded / "traces"), *log), ("audit", str(recorded / "damaged"), *log, "--json")
    )
    assert kept[0] == 0
    assert kept[1].startswith(f"order kept: {COUNT} started, {COUNT} finished")
    assert broken[0] == 1
    told = json.loads(broken[1])
    assert not told["ok"]
    assert told["groups"][0]["broken"]["lost"] == COUNT
    assert told["violations"][0]["subject"] == "orders"


def _run_in_one_process(*commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Exit codes and outputs, in sequence in a separate process: a warm Java is three times as fast."""
    code = (
        "import json, sys; from typer.testing import CliRunner; from inturn.cli.main import app\n"
        "ran = [CliRunner().invoke(app, one) for one in json.loads(sys.argv[1])]\n"
        "print(json.dumps([(one.exit_code, one.stdout) for one in ran]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return [(code, out) for code, out in json.loads(done.stdout)]


def _drop_runs(path: Path) -> None:
    """Keep only the chunks with events, as if no run had been recorded."""
    content, kept, at = path.read_bytes(), b"", 0
    while at < len(content):
        _, _, kind, _, head_bytes, body_bytes, _ = HEAD.unpack_from(content, at)
        stop = at + HEAD.size + head_bytes + body_bytes
        kept += content[at:stop] if kind == EVENTS else b""
        at = stop
    path.write_bytes(kept)
    assert {chunk.kind for chunk in chunks(kept)} == {EVENTS}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing argument"),
        (("./nowhere",), "there is no './nowhere'"),
        ((".", "--data", "./data"), "need --subject"),
        ((".", "--data", "./data", "--server", "inturn://127.0.0.1:1", "--subject", "orders"), "not both"),
    ],
)
def test_wrong_use_is_told_before_spark_starts(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("Spark is started")

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", start)
    found = cli("audit", *arguments)
    assert found.code == 2
    assert complaint in " ".join(found.err.replace("│", " ").split())
