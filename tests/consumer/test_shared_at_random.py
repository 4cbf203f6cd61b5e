"""C12: shared consumers and a node, with a faulty network, crashes on both sides, and handlers that fail or hang.

The network loses, repeats and delays. Acknowledged messages are not delivered again, and at the end every message is
handled.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from inturn.consumer.decoder import decode_fetch
from inturn.consumer.outcome import Next, Outcome
from inturn.consumer.run import Run
from inturn.consumer.shared_core import SharedCore
from inturn.model.errors import InturnError
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings, RetryDelays, Strategy
from inturn.protocol.commands import (
    Acknowledge,
    Acknowledged,
    Answer,
    Command,
    DescribeGroup,
    Fetch,
    Fetched,
    GroupDescription,
    OpenDeadLetters,
    OpenRetry,
)
from tests.node.machine import LEASE, Machine

SETTINGS = {"concurrency": 3, "visibility_s": 6.0, "answer_timeout_s": 2.0, "pull_wait_s": 3.0, "heartbeat_s": 2.0}
RETRY = RetryDelays((1.0,), 0)
RAISED = Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, RuntimeError("no"))
SUSPENDED = Outcome(Next.REPEAT, ResultKind.FAILED, 2.0)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = Machine()
        self.machine.node.close()
        self.machine.restart()
        self.names = itertools.count(1)
        self.numbers = itertools.count()
        self.on_their_way: list[tuple[float, int, Callable[[], None]]] = []
        self.is_healed = False
        self.stored = 0
        self.handled: set[int] = set()
        self.moved: set[int] = set()
        self.acknowledged: set[int] = set()
        self.said: set[tuple[str, int]] = set()
        self.hanging: list[tuple[SharedCore, Run]] = []
        self.cores: list[SharedCore] = []
        for _ in range(3):
            self.join()
        self.machine.ask(OpenRetry("orders", "crew", 1))
        self.machine.ask(OpenDeadLetters("orders", "crew"))

    @property
    def now_s(self) -> float:
        return self.machine.clock.monotonic()

    def join(self) -> None:
        strategy = self.random.choice(list(Strategy))
        settings = ConsumerSettings(strategy=strategy, retry=RETRY, **SETTINGS)  # type: ignore[arg-type]
        self.cores.append(SharedCore("orders", "crew", f"member-{next(self.names)}", "first", settings, LEASE))

    def chance(self, probability: float) -> bool:
        return not self.is_healed and self.random.random() < probability

    # The network

    def later(self, action: Callable[[], None]) -> None:
        delay_s = 0.0 if self.is_healed else self.random.choice([0.0, 0.01, 0.5, 3.0])
        heapq.heappush(self.on_their_way, (self.now_s + delay_s, next(self.numbers), action))

    def send(self, core: SharedCore, command: Command) -> None:
        for _ in range(2 if self.chance(0.1) else 1):
            if not self.chance(0.1):
                self.later(lambda: self.machine.node.submit(command, lambda answer: self.reply(core, command, answer)))

    def reply(self, core: SharedCore, command: Command, answer: Answer | InturnError) -> None:
        if isinstance(answer, Fetched):
            given = {one.offset for one in answer.deliveries}
            assert not given & self.acknowledged, "it was acknowledged"
        if isinstance(answer, Acknowledged) and isinstance(command, Acknowledge) and self.is_first(command):
            refused = {offset for _, offset in answer.refused}
            done = {one.offset for part in command.receipts for one in part.done} - refused
            assert done <= self.handled | self.moved
            self.acknowledged |= done
        if not self.chance(0.1):
            self.later(lambda: self.arrive(core, command, answer))

    def is_first(self, command: Acknowledge) -> bool:
        """Answers to late copies are dropped."""
        is_first = (command.member, command.number) not in self.said
        self.said.add((command.member, command.number))
        return is_first

    def arrive(self, core: SharedCore, command: Command, answer: Answer | InturnError) -> None:
        if isinstance(answer, Fetched) and isinstance(command, Fetch):
            core.answered(command, decode_fetch(answer, "orders", command.partition), self.now_s)
        else:
            core.answered(command, answer, self.now_s)

    # Events

    def step(self) -> None:
        self.machine.clock.advance(self.random.choice([0.01, 0.1, 0.5, 1.5]))
        self.machine.run()
        while self.on_their_way and self.on_their_way[0][0] <= self.now_s:
            heapq.heappop(self.on_their_way)[2]()
        if self.chance(0.1):
            count = self.random.randint(1, 8)
            self.machine.append(count)
            self.stored += count
        if self.chance(0.01):
            self.machine.restart()  # held commands are never answered
        if self.chance(0.02):
            self.cores.pop(self.random.randrange(len(self.cores)))  # killed
            self.join()
        if self.chance(0.02):
            self.random.choice(self.cores).stop(self.now_s)
            self.join()
        for core in list(self.cores):
            self.turn(core)

    def turn(self, core: SharedCore) -> None:
        for one in [one for one in self.hanging if one[0] is core and (self.is_healed or self.chance(0.2))]:
            self.hanging.remove(one)
            self.work(core, one[1])
        run = core.take(self.now_s)
        if run is not None:
            if self.chance(0.1):
                self.hanging.append((core, run))
            else:
                self.work(core, run)
        for command in core.poll(self.now_s):
            self.send(core, command)
        if core.is_stopped:
            self.cores.remove(core)
        assert core.error is None

    def work(self, core: SharedCore, run: Run) -> None:
        for given in run.calls(lambda: self.now_s):
            if self.chance(0.1):
                outcome = self.random.choice([RAISED, SUSPENDED])
                if outcome is RAISED and core._settings.strategy is Strategy.BEST_EFFORT:
                    self.moved.add(given[0].offset)
                run.settle(outcome)
            else:
                self.handled.add(given[0].offset)
        core.finish(run, self.now_s)

    def lag(self) -> int:
        found = self.machine.ask(DescribeGroup("orders", "crew"))
        assert isinstance(found, GroupDescription)
        return found.lag


@pytest.mark.parametrize("seed", range(15))
def test_nothing_is_lost_and_nothing_acknowledged_comes_again(seed: int) -> None:
    world = World(seed)
    for _ in range(250):
        world.step()
    world.is_healed = True
    for _ in range(400):
        world.step()
        if world.lag() == 0 and len(world.acknowledged) >= world.stored:
            break
    assert world.lag() == 0
    assert world.handled | world.moved == set(range(world.stored))
    assert all(core.waiting_count >= 0 for core in world.cores)
