"""Child processes of benchmarks, both ends: the parent writes lines to stdin, the child answers every line with a line.

A child ends when its stdin is closed, also by the death of the parent: no child is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from inturn.model.errors import InturnError

STALL_S = 60.0  # a child that is silent for longer does not answer
END_S = 10.0  # for ending in good order


class Child:
    """`python -m benchmarks.MODULE ARGUMENTS`. The end of the `with` block ends the child, by force if necessary."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._name = module
        command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, *words: object) -> None:
        try:
            self._stdin.write(" ".join(map(str, words)).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise InturnError(f"{self._name} is not there any more") from None

    def hear(self) -> str:
        """The next line of the child."""
        stalled = threading.Timer(STALL_S, self._process.kill)  # ends the wait for a line
        stalled.start()
        try:
            line = self._stdout.readline()
        finally:
            stalled.cancel()
        if not line.endswith(b"\n"):
            raise InturnError(f"{self._name} ended, or said nothing for {STALL_S:.0f} s; see what it wrote to stderr")
        return line[:-1].decode()

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.hear()

    def kill(self) -> None:
        """kill -9"""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def say(line: str) -> None:
    print(line, flush=True)


def answer_lines(answer: Callable[[list[str]], str]) -> None:
    """In the child: answer each line, until there are no more. To be called by the main thread."""
    for line in sys.stdin:
        say(answer(line.split()))


def end_with_stdin() -> None:
    """Call first in the child: the child ends soon after its stdin is closed, whatever it is doing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the parent; the parent closes stdin then
    lines_in, lines_out = os.pipe()
    stdin = os.dup(0)
    os.dup2(lines_in, 0)
    os.close(lines_in)

    def pass_on() -> None:
        while data := os.read(stdin, 65536):
            os.write(lines_out, data)
        os.close(lines_out)
        threading.Event().wait(END_S / 2)
        os._exit(1)

    threading.Thread(target=pass_on, name="stdin", daemon=True).start()
