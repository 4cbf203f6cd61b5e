"""A node that is measured: what is asked of it, how long it takes, what is appended.

It stands between a server and its node, so that a node which nobody measures pays nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from inturn.model.clock import Clock
from inturn.model.commands import Answer, Append, Appended, Command, Commit, Release, Reply
from inturn.model.errors import InturnError
from inturn.ops.histogram import Histogram
from inturn.wire.session import ServedNode


class Measures:
    """What was counted since the start. Any thread may read it."""

    def __init__(self) -> None:
        self.append_s = Histogram()
        self.commit_s = Histogram()
        self.commands: Counter[type[Command]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()  # appends, by subject and error
        self.appended_messages: Counter[str] = Counter()  # by subject
        self.appended_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def appended(self, command: Append, answer: Answer | InturnError, took_s: float) -> None:
        """A batch that is there already counts again: it was answered twice."""
        self.append_s.add(took_s)
        with self._lock:
            if isinstance(answer, Appended):
                self.appended_messages[command.subject] += command.batch.count
                self.appended_bytes[command.subject] += len(command.batch.payload)
            else:
                self.refused[command.subject, type(answer).__name__] += 1


class MeasuredNode:
    """See `ServedNode`. Remote commands come from one thread, the server's."""

    def __init__(self, node: ServedNode, clock: Clock, measures: Measures) -> None:
        self._node = node
        self._monotonic = clock.monotonic
        self._measures = measures

    def submit(self, command: Command, reply: Reply) -> None:
        self._node.submit(command, reply)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        kind = type(command)
        self._measures.commands[kind] += 1
        if kind is Append:
            reply = _TimedAppend(command, reply, self._measures, self._monotonic)  # type: ignore[arg-type]
        elif kind is Commit or kind is Release:
            began_s = self._monotonic()
            self._node.submit_remote(command, reply)  # they are answered at once
            self._measures.commit_s.add(self._monotonic() - began_s)
            return
        self._node.submit_remote(command, reply)

    def hung_up(self, session: object) -> None:
        self._node.hung_up(session)


class _TimedAppend:
    """The reply to an append, which is called when that is durable."""

    __slots__ = ("_began_s", "_command", "_measures", "_monotonic", "_reply", "session")

    def __init__(self, command: Append, reply: Reply, measures: Measures, monotonic: Callable[[], float]) -> None:
        self.session = getattr(reply, "session", None)
        self._command = command
        self._reply = reply
        self._measures = measures
        self._monotonic = monotonic
        self._began_s = monotonic()

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(answer)  # first: somebody waits for it
        self._measures.appended(self._command, answer, self._monotonic() - self._began_s)
