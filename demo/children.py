"""The parent's side of the child processes: start, talk to, stop and kill children; and acts with child processes.

The stdin of a child is a pipe from the parent: the child ends when the pipe is closed. A child that does not end is
killed by its id.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from demo.act import Act, Board, Events
from demo.process import GRACE_S
from inturn.client import Connection, connect
from inturn.model.errors import InturnError, NotFound
from inturn.protocol.commands import GroupDescription

SERVER = "server"
# Copied at import: Spark starts in a thread and sets variables. A process that is started at the same moment without
# an environment of its own would read memory that is being moved ("Bad address").
_ENVIRONMENT = dict(os.environ)


class ChildFailed(InturnError):
    def __init__(self, name: str, code: int, stderr: str) -> None:
        self.name, self.code = name, code
        super().__init__(f"process {name} of the demo ended with code {code}: {stderr or 'nothing on stderr'}")


class Children:
    """The running child processes. `folder` gets their stderr.

    At the end of the block the children are asked to end; after an error they are killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> int:
        """Start `python -m demo.process` with these arguments. Returns the process id."""
        with self._stderr(name).open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "demo.process", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_ENVIRONMENT,
                start_new_session=True,  # Ctrl-C in the terminal goes to the parent only
            )
        self._running[name] = process
        return process.pid

    def tell(self, name: str, line: str) -> None:
        stdin = self._running[name].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child is dead; `check` raises
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    def first_line(self, name: str, wait: Callable[[Callable[[], bool]], None]) -> bytes:
        """The first line on the child's stdout. `wait` blocks until its argument returns True."""
        stdout = self._running[name].stdout
        assert stdout is not None
        lines: list[bytes] = []

        def is_there() -> bool:
            self.check()
            if select.select([stdout], [], [], 0)[0] and (line := stdout.readline()):
                lines.append(line)
            return bool(lines)

        wait(is_there)
        return lines[0]

    def check(self) -> None:
        """Raises ChildFailed if a child has ended that was not asked to end."""
        for name, process in self._running.items():
            if process.poll() is not None:
                stderr = self._stderr(name).read_text(errors="replace").strip()
                raise ChildFailed(name, process.returncode, stderr[-500:])

    def kill(self, name: str) -> None:
        """kill -9. Returns when the child is dead."""
        _end(self._running.pop(name))

    def stop(self, *names: str) -> None:
        """Ask the children to end, and wait for the end."""
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
        self.kill_all()

    def kill_all(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def _stderr(self, name: str) -> Path:
        return self._folder / f"{name}.stderr"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # sends nothing if the process was waited for: its id may belong to a different process
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


class ProcessBoard(Board):
    """The board of an act with a server: the address, and the owners of partitions as the server reports them."""

    def __init__(self, events: Events) -> None:
        super().__init__(events)
        self.address = ""
        self.server_pid: int | None = None

    @abstractmethod
    def joined(self, name: str, pid: int) -> None:
        """The process of a consumer was started."""

    @abstractmethod
    def described(self, group: GroupDescription) -> None:
        """The server has described the group."""

    @abstractmethod
    def owned(self) -> Counter[str]:
        """The number of partitions of each consumer."""


class ProcessAct(Act):
    """An act with a server and consumers as processes."""

    subject: str
    group: str
    consumers: tuple[str, ...]
    partition_count: int
    look_s: float  # interval between two descriptions of the group

    def __init__(self, folder: Path, board: ProcessBoard, lease_s: float) -> None:
        super().__init__(folder)
        self._processes = board
        self._lease_s = lease_s
        self._children = Children(folder)
        self._is_prepared = False

    def prepare(self) -> None:
        """Start the processes, without a wait: they import their modules while the act before is still played.

        The consumers start at the same time as the server. `_admit` sends the address to the consumers.
        """
        self._is_prepared = True
        self._folder.mkdir(exist_ok=True)
        start, board = self._children.start, self._processes
        board.server_pid = start(SERVER, "server", str(self._folder / "data"), str(self._lease_s))
        for name in self.consumers:
            board.joined(name, start(name, *self._consumer_arguments(name)))

    def discard(self) -> None:
        """Kill the processes of a prepared act that is not played."""
        self._children.kill_all()

    def play(self) -> None:
        with self._children:
            if not self._is_prepared:
                self.prepare()
            line = self._children.first_line(SERVER, self._wait)
            self._processes.address = msgspec.json.decode(line)["address"]
            with connect(self._processes.address, wait_s=GRACE_S) as connection:
                self._tell(connection)
            self._finish()

    @abstractmethod
    def _consumer_arguments(self, name: str) -> Sequence[str]:
        """The command line of a consumer, see `demo.process`."""

    @abstractmethod
    def _tell(self, connection: Connection) -> None:
        """The story, while the server runs."""

    def _finish(self) -> None:
        """The connection is closed; the server still runs."""

    def _admit(self) -> None:
        for name in self.consumers:
            self._children.tell(name, self._processes.address)

    def _await(self, connection: Connection, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self._children.check()
            self._look(connection)
            return condition()

        self._wait(look, self.look_s)

    def _look(self, connection: Connection) -> None:
        with contextlib.suppress(NotFound):  # until the first consumer has joined
            self._processes.described(connection.group(self.subject, self.group).describe())

    def _is_shared(self) -> bool:
        owned = self._processes.owned()
        return len(owned) == len(self.consumers) and sum(owned.values()) == self.partition_count
