"""A node that is measured: what is asked of it, and how long it takes.

It stands between a server and its node, so that a node which nobody measures pays nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from inturn.model.clock import Clock
from inturn.model.commands import Answer, Append, Command, Commit, Release, Reply
from inturn.model.errors import InturnError
from inturn.ops.histogram import Histogram
from inturn.wire.codec import KINDS
from inturn.wire.session import ServedNode

# An append costs a server about seven microseconds, and timing it one and a half: so at most a thousand per second.
TIMED_EVERY_S = 0.001


class Measures:
    """What was counted since the start. Any thread may read it."""

    def __init__(self) -> None:
        self.append_s = Histogram()
        self.commit_s = Histogram()
        self.commands: dict[type, int] = {kind: 0 for kind in KINDS.values() if issubclass(kind, Command)}
        self.errors: Counter[str] = Counter()
        self._lock = threading.Lock()

    def failed(self, error: InturnError) -> None:
        """A command was answered with an error. From any thread."""
        with self._lock:
            self.errors[type(error).__name__] += 1


class MeasuredNode:
    """See `ServedNode`. Remote commands come from one thread, the server's."""

    def __init__(self, node: ServedNode, clock: Clock, measures: Measures) -> None:
        self._node = node
        self._monotonic = clock.monotonic
        self._measures = measures
        self._commands = measures.commands
        self._timed_at_s = float("-inf")  # the last append that was

    def submit(self, command: Command, reply: Reply) -> None:
        self._node.submit(command, reply)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        kind = type(command)
        self._commands[kind] += 1
        if kind is Append:
            now_s = self._monotonic()
            if now_s >= self._timed_at_s + TIMED_EVERY_S:
                self._timed_at_s = now_s
                reply = _TimedReply(reply, self._measures.append_s, self._monotonic)
        elif kind is Commit or kind is Release:
            began_s = self._monotonic()
            self._node.submit_remote(command, reply)  # they are answered at once
            self._measures.commit_s.add(self._monotonic() - began_s)
            return
        self._node.submit_remote(command, reply)

    def hung_up(self, session: object) -> None:
        self._node.hung_up(session)


class _TimedReply:
    """The reply to an append, which is called when that is durable."""

    __slots__ = ("_began_s", "_histogram", "_monotonic", "_reply", "session")

    def __init__(self, reply: Reply, histogram: Histogram, monotonic: Callable[[], float]) -> None:
        self.session = getattr(reply, "session", None)
        self._reply = reply
        self._histogram = histogram
        self._monotonic = monotonic
        self._began_s = monotonic()

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(answer)  # first: somebody waits for it
        self._histogram.add(self._monotonic() - self._began_s)
