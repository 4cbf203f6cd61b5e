"""What is sent in a simulated history: bursts of messages, until there were enough."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from inturn.testing.history import SendAcknowledged
from simulator.settings import WANTED

if TYPE_CHECKING:
    from simulator.simulation import Simulation

MESSAGES = 500
SPARE_MESSAGES = 30  # for those that are on their way, and may fail yet


class SimTraffic:
    def __init__(self, sim: Simulation, keys: list[bytes], tags: random.Random | None) -> None:
        self._sim = sim
        self._keys = keys
        self._tags = tags
        self._is_dull = False  # next to nothing of what is sent now is wanted
        self.messages_left = MESSAGES
        sim.world.after(0.1, self._produce)

    def send_what_failed(self) -> None:
        """Messages that were refused are made up for: every history has so many that were acknowledged."""
        acknowledged = sum(isinstance(event, SendAcknowledged) for event in self._sim.recorder.history)
        if not self.messages_left:
            self._sim.world.after(0.0, self._produce)
        self.messages_left = max(self.messages_left, MESSAGES - acknowledged + SPARE_MESSAGES)

    def _produce(self) -> None:
        """Bursts of messages from any producer; one that ended is replaced."""
        world = self._sim.world
        self._sim.replace_ended_producers()
        producer = self._sim.pick_producer()
        for _ in range(world.rng.choice((1, 2, 10))):
            if self.messages_left and producer.send(world.rng.choice(self._keys), self._choose_tags()):
                self.messages_left -= 1
        if self.messages_left:
            world.after(world.spread(0.0, 0.08), self._produce)

    def _choose_tags(self) -> tuple[str, ...]:
        """Stretches of messages that nobody wants, and some that have another tag as well."""
        if self._tags is None:
            return ()
        if self._tags.random() < 0.05:
            self._is_dull = not self._is_dull
        wanted = self._tags.random() < (0.02 if self._is_dull else 0.6)
        return self._tags.choice(((WANTED,), (WANTED, "other"))) if wanted else self._tags.choice(((), ("other",)))
