"""The target of commands: a folder, a folder that a different process has open, or a server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from inturn.cli.main import app
from tests.cli.conftest import Cli, Ran
from tests.contract.bed import eventually

HOLDER = """
import sys, inturn
with inturn.connect(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
"""
WHERE = {"PYTHONPATH": os.pathsep.join(sys.path)}  # children run the code of this process and inherit no other variable
COMMANDS = [
    ["subject", "create", "more"],
    ["subject", "list"],
    ["subject", "describe", "orders"],
    ["consume", "orders"],
    ["consume", "orders", "--group", "billing"],
    ["group", "list"],
    ["group", "describe", "billing"],
    ["group", "reset", "billing", "--subject", "orders", "--to", "first", "--yes"],
    ["key", "list", "orders", "--group", "billing"],
    ["dead-letter", "list", "orders", "--group", "billing"],
    ["top", "--once"],
]


def _run(*arguments: str, **environment: str) -> Ran:
    result = CliRunner().invoke(app, list(arguments), env={"INTURN_DATA": None, "COLUMNS": "200", **environment})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(params=["free folder", "open folder", "server"])
def target(request: pytest.FixtureRequest, orders: Cli) -> Iterator[str]:
    """The folder of `orders` (free, or open in a second process), or the address of a server with the folder."""
    if request.param == "free folder":
        yield str(orders.data)
    elif request.param == "server":
        with orders.serve() as served:
            yield served.address
    else:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(orders.data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        yield str(orders.data)
        holder.communicate()
        assert holder.returncode == 0


def test_every_command_works_on_it(target: str) -> None:
    for command in COMMANDS:
        ran = _run(*command, "--data", target, "--json")
        assert (ran.code, ran.err) == (0, ""), command
    assert len(_run("consume", "orders", "--data", target, "--json").json_lines) == 30


def test_produce_counts_its_own_messages_only(target: str, orders: Cli) -> None:
    environment = {"INTURN_DATA": target}
    process = subprocess.Popen(
        [sys.executable, "-c", "from inturn.cli.main import app; app()", "produce", "orders", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**WHERE, **environment},
    )
    assert process.stdin is not None
    process.stdin.write(b"a\nb\n")
    process.stdin.flush()

    def are_stored() -> bool:
        assert process.poll() is None, "it has ended"
        return len(_run("consume", "orders", "--json", INTURN_DATA=target).json_lines) == 32

    eventually(are_stored, "both are stored", 60.0)
    for _ in range(3):
        assert CliRunner().invoke(app, ["produce", "orders", "--key", "x"], input="y\n", env=environment).exit_code == 0
    out, _ = process.communicate(b"c\n", timeout=60)
    assert Ran(0, out.decode(), "").json["sent"] == 3


def test_a_server_that_is_not_there_is_told_in_one_line() -> None:
    with socket.socket() as nobody:  # bound, but without a listener
        nobody.bind(("127.0.0.1", 0))
        address = f"inturn://127.0.0.1:{nobody.getsockname()[1]}"
        for command in COMMANDS:
            start_s = time.monotonic()
            ran = _run(*command, "--server", address)
            assert time.monotonic() - start_s < 20
            assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
            assert f"no server at {address}: Connection refused; start a server with `inturn serve`" in ran.err
        error = _run("subject", "list", "--server", address, "--json").error
        assert (error["type"], error["address"]) == ("ConnectionLost", address)


def test_what_is_typed_comes_before_what_is_exported(orders: Cli) -> None:
    folder = str(orders.data)
    nowhere = "inturn://127.0.0.1:1"
    assert _run("subject", "list", "--data", folder, INTURN_SERVER=nowhere).code == 0
    assert "no server" in _run("subject", "list", "--server", nowhere, INTURN_DATA=folder).err
    assert "no server" in _run("subject", "list", INTURN_SERVER=nowhere).err


def test_a_folder_and_a_server_together_are_wrong_usage(orders: Cli) -> None:
    folder, address = str(orders.data), "inturn://127.0.0.1:1"
    ran = _run("subject", "list", "--data", folder, "--server", address)
    assert (ran.code, "are both given" in ran.err) == (2, True)
    ran = _run("subject", "list", INTURN_DATA=folder, INTURN_SERVER=address)
    assert (ran.code, "INTURN_DATA and INTURN_SERVER are both given" in ran.err) == (2, True)


def test_what_is_no_address_is_refused(orders: Cli) -> None:
    assert _run("subject", "list", "--server", str(orders.data)).code == 2
    error = _run("subject", "list", "--data", "http://127.0.0.1:7420", "--json").error
    assert "is no address of a server; give inturn://host:port" in error["message"]


def test_the_flush_of_a_server_is_its_own(orders: Cli) -> None:
    with orders.serve() as served:
        error = _run("produce", "orders", "--flush", "os", "--server", served.address, "--json").error
        assert "give them to `inturn serve`" in error["message"]


def _completed(words: str, **environment: str) -> list[str]:
    """The completions that the shell gets for the last word."""
    asked = {"_INTURN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ran = subprocess.run(
        [sys.executable, "-c", "from inturn.cli.main import app; app(prog_name='inturn')"],
        env={**WHERE, **asked, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.stderr == ""
    return ran.stdout.split()


def test_names_are_completed_from_the_target(target: str) -> None:
    assert _run("consume", "orders", "--group", "billing", "--data", target).code == 0
    for words, name in (
        ("inturn consume or", "orders"),
        ("inturn subject describe ", "orders"),
        ("inturn key list orders --group b", "billing"),
        ("inturn group describe ", "billing"),
        ("inturn consume orders --group ", "billing"),
    ):
        assert _completed(words, INTURN_DATA=target) == [name], words
    assert _completed("inturn consume x", INTURN_DATA=target) == []


def test_nothing_is_completed_from_what_is_not_there(cli: Cli) -> None:
    assert _completed("inturn consume o", INTURN_DATA=str(cli.data)) == []
    assert _completed("inturn consume o", INTURN_SERVER="inturn://127.0.0.1:1") == []
    assert not cli.data.exists()
