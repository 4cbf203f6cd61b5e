"""The section "Serve it" of README.md, copied as written: three shells, and kill -9."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import inturn
from inturn.protocol.commands import GroupName

README = Path(__file__).parent.parent.parent / "README.md"
KILL = "kill -9 %1"
LINE = re.compile(r"(ann|bob) job-(\d+) (\d+)(?!\d)")  # threads may end a line inside a line of a different thread


def _blocks() -> list[str]:
    section = README.read_text(encoding="utf-8").partition("## Serve it\n")[2].partition("\n## ")[0]
    assert KILL in section
    return re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


class Terminal:
    """A shell in the folder of the test. The output goes to a file."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.port = port
        self._said = folder / f"{name}.txt"
        programs = folder / "bin"
        with self._said.open("wb") as said:
            self._shell = subprocess.Popen(
                ["bash", "-m"],  # with job control, as in a terminal
                cwd=folder,
                env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def type(self, text: str) -> None:
        """Only the port of the text is changed, because other tests use the same port."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(text.replace("7420", str(self.port)).encode())
        self._shell.stdin.flush()

    @property
    def said(self) -> str:
        return self._said.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End all jobs of the shell, too, by job id."""
        self.type("\nkill -9 $(jobs -p) 2>/dev/null\nexit\n")
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(60)


def free_port() -> int:
    """A port outside the range that the system assigns: no other process can get the port before the server listens."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[list[Terminal]]:
    port = free_port()
    programs = tmp_path / "bin"
    programs.mkdir()
    command = "-c 'from inturn.cli.main import app; app(prog_name=\"inturn\")'"
    for name, start in (("python", ""), ("inturn", command)):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
        (programs / name).chmod(0o755)
    opened = [Terminal(tmp_path, name, port) for name in ("first", "second", "third")]
    yield opened
    for terminal in opened:
        terminal.close()


def _member_count(mq: inturn.Connection) -> int:
    is_there = GroupName("jobs", "workers") in mq.groups()
    return len(mq.group("jobs", "workers").describe().members) if is_there else 0


def _wait(terminal: Terminal, condition: Callable[[str], object], wait_s: float = 80.0) -> str:
    """Wait until the output of the terminal matches. Return the output."""
    until_s = time.monotonic() + wait_s
    while not condition(said := terminal.said):
        assert time.monotonic() < until_s, f"it did not happen; it said {said[-2000:]}"
        time.sleep(0.05)
    return said


def _bobs(said: str) -> set[str]:
    return {found[2] for found in LINE.finditer(said) if found[1] == "bob"}


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
def test_the_section_on_serving_works_as_it_is_written(terminals: list[Terminal]) -> None:
    first, second, third = terminals
    serve, workers, look = _blocks()
    assert look.rstrip().endswith("\ninturn top")
    # in the background, so that the shell can end the server
    first.type(f"{serve.rstrip()} --port {first.port} &\n")
    _wait(first, lambda said: "serving ./data at" in said)
    second.type(workers)
    _wait(second, lambda said: "subject jobs" in said)
    with inturn.connect(f"inturn://127.0.0.1:{first.port}") as mq:
        _wait(second, lambda _: _member_count(mq) == 2)
    third.type(look.rstrip() + " --once\n")
    _wait(third, lambda said: "5,000 messages to jobs" in said and "group workers on jobs" in said)
    _wait(second, lambda said: {found[1] for found in LINE.finditer(said)} == {"ann", "bob"})

    second.type(f"{KILL}; echo killed\n")
    before = _wait(second, lambda said: "killed\n" in said).partition("killed\n")[0]
    anns = {found[2] for found in LINE.finditer(before) if found[1] == "ann"}
    said = _wait(second, lambda said: anns <= _bobs(said.partition("killed\n")[2]))
    numbers: dict[str, int] = {}
    for _, job, number in (found.groups() for found in LINE.finditer(said)):
        reached = numbers.get(job, 0)
        expected = reached + 20 if reached else int(job) or 20
        assert int(number) <= expected, f"job {job} went from {reached} to {number}"
        numbers[job] = max(reached, int(number))

    first.type("kill -TERM %1; wait %1; echo ended with $?\n")
    said = _wait(first, lambda said: "ended with" in said)
    assert "ended with 0" in said
    assert "stopping: waiting up to 5 s for 4 leases" in said
