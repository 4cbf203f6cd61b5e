"""Run commands: in this process through typer's runner, or as a separate process."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import structlog
from typer.testing import CliRunner

from inturn.cli.main import app


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        """The error of a failed command with --json. Stdout must be empty."""
        assert self.code == 1
        assert self.out == ""
        return json.loads(self.err)["error"]


@dataclass(frozen=True, slots=True)
class Served:
    """A running server. `ready` is the first line of the output."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    def end(self, number: int = signal.SIGTERM) -> Ran:
        """Send a signal, wait for the end, and return the output after the ready line."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return Ran(self.process.returncode, out.decode(), err.decode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)


class Cli:
    """`cli("subject", "list")` runs a command on the folder of the test."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Ran:
        environment = {"INTURN_DATA": str(self.data), "COLUMNS": "200"}
        result = CliRunner().invoke(app, list(arguments), input=stdin, env=environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    def serve(self, *arguments: str) -> Served:
        """`inturn serve` on the folder of the test, on any port."""
        process = self.process("serve", "--port", "0", "--json", *arguments)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1].decode()
        return Served(process, json.loads(line))

    def process(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "from inturn.cli.main import app; app()", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "INTURN_DATA": str(self.data)},
        )


_made: list[Path] = []  # the folder that `orders` copies


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "data")


@pytest.fixture
def orders(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A folder with the subject orders: 3 partitions, 30 messages of 5 keys. A copy of the first such folder."""
    if not _made:
        first = Cli(tmp_path_factory.mktemp("orders") / "data")
        assert first("subject", "create", "orders", "--partitions", "3").code == 0
        lines = "".join(json.dumps({"customer": {"id": f"c{n % 5}"}, "n": n}) + "\n" for n in range(30))
        assert first("produce", "orders", "--key-field", "customer.id", stdin=lines).code == 0
        _made.append(first.data)
    shutil.copytree(_made[0], cli.data)
    return cli


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands configure logging. Restore the configuration for the other tests of the process."""
    library = logging.getLogger("inturn")
    handlers, propagate, level = library.handlers, library.propagate, library.level
    yield
    library.handlers, library.propagate = handlers, propagate
    library.setLevel(level)
    structlog.reset_defaults()
