"""Growth under simulation: a subject that grows once or twice, at moments when that is hard."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from inturn.model.errors import InturnError
from inturn.model.subject import Subject
from inturn.protocol.commands import Answer, GrowSubject
from simulator.faults import FAULTS, LEASE_LIFE_S, OF_STREAMS

if TYPE_CHECKING:
    from simulator.simulation import Simulation

SHARE = 0.3
_AGAIN_S = 0.3


class SimGrowth:
    """Asks until it is done, whatever happens to the node."""

    def __init__(self, sim: Simulation, rng: random.Random, until_s: float) -> None:
        self._sim = sim
        self._rng = rng
        at_s = rng.uniform(0.5, until_s)
        self._plan(at_s)
        if rng.random() < 0.6:
            # Often right after the first, when nothing has come to the children yet.
            self._plan(at_s + (rng.uniform(0.0, 0.3) if rng.random() < 0.5 else rng.uniform(0.0, until_s - at_s)))

    def _plan(self, at_s: float) -> None:
        self._sim.world.after(at_s, partial(self._trouble, self._rng.choice((1, 2, 4))))

    def _trouble(self, more: int) -> None:
        """What makes it hard comes shortly before."""
        sim, rng = self._sim, self._rng
        if rng.random() < 0.5:
            self._lose_answers(rng.uniform(0.1, 0.5))
        if rng.random() < 0.4:
            for consumer in sim.consumers:
                consumer.is_sluggish = True
            sim.world.after(rng.uniform(0.5, 2 * LEASE_LIFE_S), self._quicken)
        sim.world.after(rng.uniform(0.0, 0.2), partial(self._grow, sim.subject.partition_count + more))

    def _lose_answers(self, for_s: float) -> None:
        sim = self._sim
        if sim.has_streams:
            FAULTS[self._rng.choice([name for name in FAULTS if name in OF_STREAMS])](sim)
            return
        sim.network.answer_loss = 0.6
        sim.network.repeat = 0.2
        sim.world.after(for_s, partial(setattr, sim.network, "answer_loss", 0.0))
        sim.world.after(for_s, partial(setattr, sim.network, "repeat", 0.0))

    def _quicken(self) -> None:
        for consumer in self._sim.consumers:
            consumer.is_sluggish = False

    def _grow(self, partitions: int) -> None:
        sim = self._sim
        if sim.subject.partition_count < partitions:
            sim.node.submit(GrowSubject(sim.subject.name, partitions), self._has_grown)
            sim.world.after(_AGAIN_S, partial(self._grow, partitions))

    def _has_grown(self, answer: Answer | InturnError) -> None:
        sim = self._sim
        if isinstance(answer, Subject) and answer.partition_count > sim.subject.partition_count:
            sim.subject = answer
            sim.coverage["growth.again" if answer.route.version > 2 else "growth.first"] += 1


def growth_chance(seed: int) -> random.Random | None:
    """What the growth of this history decides by; None if it has none."""
    rng = random.Random(f"growth {seed}")
    return rng if rng.random() < SHARE else None
