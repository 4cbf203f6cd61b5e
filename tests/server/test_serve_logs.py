"""The log of a server, and notifications to systemd."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from datetime import datetime
from pathlib import Path

import pytest

from inturn.cli import logs
from inturn.cli.logs import LogFormat
from inturn.cli.serve import notify
from inturn.model.logs import get_logger
from tests.cli.conftest import Cli


def served(cli: Cli, *arguments: str) -> tuple[str, list[str]]:
    """The stdout of a server, and the lines on stderr, until the server is stopped.

    A client sends nonsense meanwhile.
    """
    process = cli.process("serve", "--port", "0", *arguments)
    try:
        assert process.stdout is not None
        first = process.stdout.readline().decode()
        address = re.search(r"127\.0\.0\.1:(\d+)", first)
        assert address is not None, process.communicate()
        with socket.create_connection(("127.0.0.1", int(address[1])), timeout=30) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            while stream.recv(4096):
                pass
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0
    return first, err.decode().splitlines()


def test_json_is_one_object_per_line_and_nothing_else(cli: Cli) -> None:
    first, lines = served(cli, "--log-format", "json", "--http", "0")
    assert first.startswith(f"serving {cli.data} at inturn://127.0.0.1:")
    assert ", HTTP at http://127.0.0.1:" in first
    told = [json.loads(line) for line in lines]
    assert [one["event"] for one in told] == ["server.ready", "wire.hung_up", "server.stopping", "server.stopped"]
    assert [one["level"] for one in told] == ["info", "warning", "info", "info"]
    assert [one["logger"] for one in told] == ["inturn.server", "inturn.wire", "inturn.server", "inturn.server"]
    ready = told[0]
    assert ready["address"] in first
    assert ready["http"] in first
    age_s = time.time() - datetime.fromisoformat(ready["timestamp"]).timestamp()
    assert -60 < age_s < 60


def test_the_console_has_warnings_and_remarks_for_people(cli: Cli) -> None:
    _, lines = served(cli, "--log-format", "console")
    assert len(lines) == 2
    assert lines[0].startswith("warning: wire.hung_up error=")
    assert lines[1] == "stopped"
    _, lines = served(cli, "--verbose")
    assert [line.split()[1] for line in lines[:2]] == ["server.ready", "wire.hung_up"]


def test_warnings_of_the_server_itself_are_lines_of_the_log_too(cli: Cli) -> None:
    _, lines = served(cli, "--log-format", "json", "--http", "0.0.0.0:0")
    (beware,) = [one for one in map(json.loads, lines) if one["event"] == "server.beware"]
    assert "names all subjects and groups" in beware["why"]


def test_a_traceback_is_a_field_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(is_json=False, log_format=LogFormat.JSON)
    try:
        raise RuntimeError("no")
    except RuntimeError:
        get_logger("inturn.test").exception("test.failed", key=b"\xff", path=Path("x"))
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert "RuntimeError: no" in told["exception"]
    assert list(told)[:4] == ["timestamp", "level", "event", "logger"]


# systemd


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(cli: Cli, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(path)
        told.settimeout(30)
        os.environ["NOTIFY_SOCKET"] = path
        try:
            process = cli.process("serve", "--port", "0", "--json")
        finally:
            del os.environ["NOTIFY_SOCKET"]
        with process:
            ready = told.recv(4096).decode().splitlines()
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            assert ready == ["READY=1", f"STATUS=serving {cli.data} at {address}"]
            process.send_signal(signal.SIGTERM)
            assert told.recv(4096).startswith(b"STOPPING=1\n")
            process.communicate(timeout=60)
    assert process.returncode == 0


def test_nobody_is_told_where_there_is_no_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert notify("READY=1") is False
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert notify("READY=1") is False


def test_names_of_the_kernels_own_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"inturn-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        assert notify("READY=1", "STATUS=x") is True
        assert told.recv(100) == b"READY=1\nSTATUS=x"
