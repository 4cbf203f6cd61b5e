"""Processes that the demo starts: each ends with the demo, however that ends.

Their stdin is a pipe from here. When it is closed, by us or because we are gone, they end by themselves; who does not
is killed, by its id.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from inturn.model.errors import InturnError

GRACE_S = 5.0
# Taken now: Spark starts in a thread and sets variables, and a process that is started at that moment without an
# environment of its own reads one that is being moved ("Bad address").
_ENVIRONMENT = dict(os.environ)


class ChildFailed(InturnError):
    def __init__(self, name: str, code: int, said: str) -> None:
        self.name, self.code = name, code
        super().__init__(f"process {name} of the demo ended with code {code}: {said or 'it said nothing'}")


class Children:
    """`folder` gets what they say on stderr. On leaving the block they are asked to end; after an error, killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *arguments: str) -> int:
        """The process id."""
        with self._stderr(name).open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_ENVIRONMENT,
                start_new_session=True,  # a Ctrl-C in the terminal is for us, not for them
            )
        self._running[name] = process
        return process.pid

    def tell(self, name: str, line: str) -> None:
        stdin = self._running[name].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, and `check` will say so
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    def said(self, name: str) -> bytes | None:
        """Its next line on stdout, if there is one."""
        stdout = self._running[name].stdout
        assert stdout is not None
        if not select.select([stdout], [], [], 0)[0]:
            return None
        return stdout.readline()

    def first_line(self, name: str, wait: Callable[[Callable[[], bool]], None]) -> bytes:
        """What it says first; `wait` is how the act waits for something."""
        said: list[bytes] = []

        def has_spoken() -> bool:
            self.check()
            line = self.said(name)
            said.extend([line] if line else [])
            return bool(said)

        wait(has_spoken)
        return said[0]

    def check(self) -> None:
        """Raises ChildFailed if one has ended that was not asked to."""
        for name, process in self._running.items():
            if process.poll() is not None:
                said = self._stderr(name).read_text(errors="replace").strip()
                raise ChildFailed(name, process.returncode, said[-500:])

    def kill(self, name: str) -> None:
        """kill -9. Returns when it is dead."""
        _end(self._running.pop(name))

    def stop(self, *names: str) -> None:
        """Ask them to end, and wait until they have."""
        for name in names:
            stdin = self._running[name].stdin
            assert stdin is not None
            with contextlib.suppress(OSError):
                stdin.close()
        for name in names:
            process = self._running.pop(name)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            _end(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop(*reversed(self._running))
        for name in list(self._running):
            self.kill(name)

    def _stderr(self, name: str) -> Path:
        return self._folder / f"{name}.stderr"


def end_with_parent(end: Callable[[], None]) -> None:
    """In a child: call this when the parent closes the pipe, or is gone."""

    def wait() -> None:
        sys.stdin.buffer.read()
        end()

    threading.Thread(target=wait, name="inturn-parent", daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # by its id, and only if nobody else can have that by now
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
