"""A node without threads: in-memory database, simulated disk, and a clock that the test moves."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

from inturn.log.embedded import EmbeddedEngine
from inturn.model.batch import encode
from inturn.model.errors import InturnError
from inturn.model.message import Outgoing
from inturn.model.settings import LeaseSettings, Limits, LogSettings
from inturn.model.time import SystemClock, Timer, Timers
from inturn.node.node import InProcessNode
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Append,
    Appended,
    Command,
    CreateSubject,
    Granted,
    Heartbeat,
    Pull,
    Reply,
)
from inturn.store.database import Database
from inturn.testing.clock import FakeClock
from inturn.testing.recorder import Recorder
from simulator.disk import SimDisk

LEASE = LeaseSettings(life_s=10.0, renew_s=2.0, margin_s=0.5)


class CountingTimers(Timers):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def at(self, at_s: float, action: Callable[[], None]) -> Timer:
        self.made += 1
        return super().at(at_s, action)


class Waiting:
    """A submitted command, and all answers."""

    def __init__(self) -> None:
        self.answers: list[Answer | InturnError] = []

    @property
    def answer(self) -> Answer | InturnError | None:
        assert len(self.answers) <= 1, "answered twice"
        return self.answers[0] if self.answers else None


class Machine:
    def __init__(self, local: bool = False) -> None:
        self.clock = FakeClock()
        self.disk = SimDisk(random.Random(1))
        self.database = Database.open(None)
        self.recorder = Recorder(SystemClock())
        self.local = local
        self._sequence = 0
        self.start()
        self.ask(CreateSubject("orders", 2, "slots", "strict", Limits()))

    def start(self) -> None:
        self.timers = CountingTimers()
        settings = LogSettings(reserve_bytes=1)
        self.engine = EmbeddedEngine(
            "log", settings, self.timers, clock=self.clock, disk=self.disk, submit=lambda job: job()
        )
        self.node = InProcessNode(
            self.database, self.engine, self.clock, self.timers, LEASE, self.recorder, local=self.local
        )

    def restart(self) -> None:
        """As after a crash of the process: nothing was closed, and the state is in the database and on the disk."""
        self.start()

    def close(self) -> None:
        self.node.close()
        self.database.close()

    def submit(self, command: Command) -> Waiting:
        waiting = Waiting()
        reply: Reply = waiting.answers.append
        self.node.submit(command, reply)
        return waiting

    def ask(self, command: Command) -> Answer:
        """The answer, which must come at once. Due timers may run. An error is raised."""
        waiting = self.submit(command)
        self.run()
        answer = waiting.answer
        assert answer is not None, f"{command} is held back"
        if isinstance(answer, InturnError):
            raise answer
        return answer

    def run(self) -> None:
        self.timers.run_due(self.clock.monotonic())

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.run()

    def append(self, count: int = 1, partition: int = 0) -> int:
        batch = encode([Outgoing(b"x")] * count, array("H", [1] * count))
        answer = self.ask(Append("orders", partition, batch))
        assert isinstance(answer, Appended)
        return answer.base_offset

    def join(self, member: str = "a", group: str = "billing") -> Answer:
        return self.ask(Heartbeat("orders", group, member, "key", "first"))

    def acquire(self, member: str = "a", ask: int = 1, partition: int = 0, group: str = "billing") -> Granted:
        answer = self.ask(Acquire("orders", group, partition, member, ask))
        assert isinstance(answer, Granted)
        return answer

    def pull(self, member: str, epoch: int, offset: int = 0, wait_s: float = 0.0, partition: int = 0) -> Waiting:
        return self.submit(Pull("orders", "billing", partition, member, epoch, offset, 1 << 20, wait_s))
