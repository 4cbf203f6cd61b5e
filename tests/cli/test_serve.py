"""`inturn serve`, as a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import inturn
from tests.cli.conftest import Cli

LINES = "".join(f"k{number % 5}:{number}\n" for number in range(20))
# A consumer in a separate process. The consumer prints a line when all partitions are held, and ends when the server
# has asked for all partitions back.
CONSUMER = """
import sys, time, inturn
with inturn.connect(sys.argv[1]) as mq:
    with mq.consumer("orders", "billing", lambda message, context: None) as consumer:
        while len(consumer.statistics().partitions) < 4:
            time.sleep(0.01)
        print("ready", flush=True)
        sys.stdin.read()
"""


def _consumer(address: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the consumer reports the lost connection at the end
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_it_says_where_it_listens_and_makes_the_folder(cli: Cli) -> None:
    with cli.serve() as served:
        assert served.ready == {"address": served.address, "folder": str(cli.data), "pid": served.process.pid}
        assert served.address.startswith("inturn://127.0.0.1:")
        assert cli.data.is_dir()
        ended = served.end()
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_people_get_one_line_when_it_is_ready(cli: Cli, tmp_path: Path) -> None:
    process = cli.process("serve", str(tmp_path / "other"), "--port", "0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith(f"serving {tmp_path / 'other'} at inturn://127.0.0.1:")
        assert line.endswith(f", pid {process.pid}\n")
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"", b"stopped\n")
    assert not cli.data.exists()


def test_commands_work_through_the_server(cli: Cli) -> None:
    with cli.serve() as served:
        to = ("--server", served.address)
        assert cli("subject", "create", "orders", *to, "--json").json["name"] == "orders"
        sent = cli("produce", "orders", "--key-separator", ":", *to, "--json", stdin=LINES).json
        assert sent["sent"] == sum(one["sent"] for one in sent["partitions"]) == 20
        assert len(cli("consume", "orders", *to, "--json").json_lines) == 20
        handled = cli("consume", "orders", "--group", "billing", *to, "--json").json_lines
        assert sorted(int(one["body"]) for one in handled) == list(range(20))
        (described,) = cli("group", "describe", "billing", "--data", served.address, "--json").json["subjects"]
        assert (described["subject"], described["lag"]) == ("orders", 0)
        assert served.end().code == 0
    # all messages are in the folder
    assert len(cli("consume", "orders", "--json").json_lines) == 20


def test_the_folder_can_be_used_beside_the_server(cli: Cli) -> None:
    with cli.serve() as served:
        assert cli("subject", "create", "orders").code == 0
        listed = cli("subject", "list", "--server", served.address, "--json").json["subjects"]
        assert [one["name"] for one in listed] == ["orders"]


def test_a_stop_waits_for_consumers_to_give_back_what_they_hold(cli: Cli) -> None:
    cli("subject", "create", "orders")
    process = cli.process("serve", "--port", "0", "--grace-s", "50")
    assert process.stdout is not None
    address = process.stdout.readline().decode().partition(" at ")[2].partition(",")[0]
    consumer = _consumer(address)
    try:
        start_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        took_s = time.monotonic() - start_s
    finally:
        consumer.kill()
        consumer.communicate()
    assert process.returncode == 0
    waiting, stopped = err.decode().splitlines()[-2:]
    assert waiting.startswith("stopping: waiting up to 50 s for 4 leases")
    assert stopped == "stopped"
    assert took_s < 25  # the consumer released all partitions: the server did not wait for the end of the grace


def test_a_second_signal_ends_it_at_once(cli: Cli) -> None:
    cli("subject", "create", "orders")
    with cli.serve("--grace-s", "60") as served:
        consumer = _consumer(served.address)
        os.kill(consumer.pid, signal.SIGSTOP)  # so that the consumer releases no partition
        try:
            served.process.send_signal(signal.SIGTERM)
            time.sleep(1.0)
            assert served.process.poll() is None
            assert served.end().code == 0
        finally:
            consumer.kill()
            consumer.communicate()


def test_a_lease_that_is_not_given_back_is_told(cli: Cli) -> None:
    cli("subject", "create", "orders")
    process = cli.process("serve", "--port", "0", "--grace-s", "0.2", "--lease-s", "7")
    assert process.stdout is not None
    address = process.stdout.readline().decode().partition(" at ")[2].partition(",")[0]
    consumer = _consumer(address)
    os.kill(consumer.pid, signal.SIGSTOP)
    try:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        consumer.kill()
        consumer.communicate()
    assert process.returncode == 0
    assert err.decode().endswith("stopped; held leases live on for 7 s\n")


def test_a_port_in_use_is_told_with_the_next_step(cli: Cli, tmp_path: Path) -> None:
    with cli.serve() as served:
        port = served.address.rpartition(":")[2]
        error = cli("serve", "--json", "--port", port, str(tmp_path / "other")).error
        assert f"port {port} of 127.0.0.1 is in use" in error["message"]
        assert "--port" in error["message"]
        # and the folder is free again
        with inturn.connect(tmp_path / "other") as mq:
            assert mq.subjects() == []


def test_a_folder_in_use_is_told_with_who_has_it(cli: Cli) -> None:
    with cli.serve() as served:
        error = cli("serve", "--json", "--port", "0").error
        assert (error["type"], error["pid"]) == ("FolderInUse", served.process.pid)
        ran = cli("serve", "--port", "0")
        assert (ran.code, ran.err.count("\n")) == (1, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_restarted_finds_its_folder_free_though_others_use_it(
    cli: Cli, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`inturn top --data` and programs on the same machine wait for the server and do not take the folder."""
    monkeypatch.setattr("inturn.server.folder.SERVER_BACK_S", 60.0)  # a process may take long to start
    with cli.serve() as served, inturn.connect(cli.data) as mq:
        mq.create_subject("orders")
        served.end(number)
        with cli.serve() as again:
            assert [one.name for one in mq.subjects()] == ["orders"]
            assert str(again.process.pid) in (cli.data / "inturn.lock").read_text()


def test_a_server_that_does_not_come_back_is_succeeded(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inturn.server.folder.SERVER_BACK_S", 0.2)
    with cli.serve() as served, inturn.connect(cli.data) as mq:
        mq.create_subject("orders")
        served.end()
        assert [one.name for one in mq.subjects()] == ["orders"]
        assert (cli.data / "inturn.lock").read_text() == str(os.getpid())


def test_a_server_waits_for_a_program_that_has_its_folder(cli: Cli) -> None:
    with inturn.connect(cli.data):
        process = cli.process("serve", "--port", "0")
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stderr.readline().decode()
    assert f"process {os.getpid()} has the folder" in said
    assert process.stdout.readline().startswith(b"serving")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_server_that_waits_for_its_folder_can_be_stopped(cli: Cli) -> None:
    with inturn.connect(cli.data):
        process = cli.process("serve", "--port", "0")
        assert process.stderr is not None
        assert b"waiting" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"")


def test_a_server_does_not_wait_for_ever(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inturn.cli.serve.FOLDER_WAIT_S", 0.2)
    with inturn.connect(cli.data):
        ran = cli("serve", "--port", "0")
    assert ran.code == 1
    assert f"is open in process {os.getpid()}; close it there first" in ran.err


def test_an_address_that_others_reach_needs_authentication_or_a_word(cli: Cli) -> None:
    """Without tokens or client certificates, only --insecure serves other machines. The server prints a warning."""
    error = cli("serve", "--host", "0.0.0.0", "--port", "0", "--json").error
    assert error["type"] == "InvalidInput"
    assert "--insecure serves without authentication: all clients that reach the port" in error["message"]
    assert not cli.data.exists()
    with cli.serve("--host", "0.0.0.0", "--insecure") as served:
        ended = served.end()
    assert ended.code == 0
    assert "without authentication (--insecure)" in json.loads(ended.err)["warning"]


def test_settings_that_cannot_be_are_refused(cli: Cli) -> None:
    for arguments in (["--lease-s", "0"], ["--retention-s", "-1"], ["--retention-bytes", "0"]):
        assert cli("serve", "--port", "0", "--json", *arguments).error["type"] == "InvalidInput"
    assert not cli.data.exists()
    for arguments in (["--port", "70000"], ["inturn://127.0.0.1:7420"], ["a", "--data", "b"]):
        assert cli("serve", *arguments).code == 2
