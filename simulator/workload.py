"""The workload of a simulated history: messages that are sent, growth of the subject, and an operator of keys."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import TYPE_CHECKING

from inturn.model.errors import InturnError
from inturn.model.settings import KeyAction, LotState
from inturn.model.subject import Subject
from inturn.protocol.commands import Answer, GrowSubject, KeyDescription, KeyList, KeyRequest, ListKeys, SteerKey
from inturn.protocol.request import ask
from inturn.testing.history import SendAcknowledged
from simulator.faults import FAULTS, LEASE_LIFE_S, OF_STREAMS
from simulator.settings import GROUP, SUBJECT, WANTED

if TYPE_CHECKING:
    from simulator.simulation import Simulation

MESSAGES = 500
SPARE_MESSAGES = 30  # for messages on their way that may still fail


class SimTraffic:
    """Sends bursts of messages, until enough are acknowledged."""

    def __init__(self, sim: Simulation, keys: list[bytes], tags: random.Random | None) -> None:
        self._sim = sim
        self._keys = keys
        self._tags = tags
        self._is_dull = False  # nearly all messages are filtered out now
        self.messages_left = MESSAGES
        sim.world.after(0.1, self._produce)

    def send_what_failed(self) -> None:
        """Send messages for those that failed: every history has at least MESSAGES acknowledged messages."""
        acknowledged = sum(isinstance(event, SendAcknowledged) for event in self._sim.recorder.history)
        if not self.messages_left:
            self._sim.world.after(0.0, self._produce)
        self.messages_left = max(self.messages_left, MESSAGES - acknowledged + SPARE_MESSAGES)

    def _produce(self) -> None:
        """Send a burst from any producer; a producer that has ended is replaced."""
        world = self._sim.world
        self._sim.replace_ended_producers()
        producer = self._sim.pick_producer()
        for _ in range(world.rng.choice((1, 2, 10))):
            if self.messages_left and producer.send(world.rng.choice(self._keys), self._choose_tags()):
                self.messages_left -= 1
        if self.messages_left:
            world.after(world.spread(0.0, 0.08), self._produce)

    def _choose_tags(self) -> tuple[str, ...]:
        """Stretches of filtered-out messages, and messages with a second tag."""
        if self._tags is None:
            return ()
        if self._tags.random() < 0.05:
            self._is_dull = not self._is_dull
        wanted = self._tags.random() < (0.02 if self._is_dull else 0.6)
        return self._tags.choice(((WANTED,), (WANTED, "other"))) if wanted else self._tags.choice(((), ("other",)))


SHARE = 0.3
_AGAIN_S = 0.3


class SimGrowth:
    """Grows the subject once or twice, at hard moments. Retries until the node has grown the subject."""

    def __init__(self, sim: Simulation, rng: random.Random, until_s: float) -> None:
        self._sim = sim
        self._rng = rng
        at_s = rng.uniform(0.5, until_s)
        self._plan(at_s)
        if rng.random() < 0.6:
            # Often right after the first growth, when the children have no messages yet.
            self._plan(at_s + (rng.uniform(0.0, 0.3) if rng.random() < 0.5 else rng.uniform(0.0, until_s - at_s)))

    def _plan(self, at_s: float) -> None:
        self._sim.world.after(at_s, partial(self._trouble, self._rng.choice((1, 2, 4))))

    def _trouble(self, more: int) -> None:
        """Troubles come shortly before the growth."""
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
    """The chance of the growth of this history; None without growth."""
    rng = random.Random(f"growth {seed}")
    return rng if rng.random() < SHARE else None


class SimOperator:
    """Resumes or skips keys that are held back, and now and then parks a key that runs."""

    def __init__(self, sim: Simulation, keys: list[bytes]) -> None:
        self._sim = sim
        self._keys = keys
        sim.world.after(0.5, self._steer)

    def troubled_keys(self) -> tuple[KeyDescription, ...]:
        node = self._sim.node
        try:
            return ask(node.node, ListKeys(SUBJECT, GROUP), KeyList).keys if node.is_up else ()
        except InturnError:
            return ()

    def _steer(self) -> None:
        sim, rng = self._sim, self._sim.world.rng
        may_park = sim.is_ordered_by_key and sim.settings.consumer.ack == "auto" and not sim.is_healing
        for one in self.troubled_keys():
            if one.key is None:
                continue
            if sim.is_healing or rng.random() < 0.3:
                self._ask_of_key(KeyAction.RESUME, one.key)
            elif rng.random() < 0.1:
                self._ask_of_key(KeyAction.SKIP, one.key)
            elif may_park and one.state == LotState.RESUMING and rng.random() < 0.3:
                self._park(one.key)
        if may_park and rng.random() < 0.4:
            self._park(rng.choice(self._keys))
        sim.world.after(sim.world.spread(0.1, 1.0), self._steer)

    def _park(self, key: bytes) -> None:
        """Park a key. Sometimes the operator resumes the key at once."""
        self._ask_of_key(KeyAction.PARK, key)
        if self._sim.world.happens(0.3):
            self._ask_of_key(KeyAction.RESUME, key)

    def _ask_of_key(self, action: KeyAction, key: bytes) -> None:
        with contextlib.suppress(InturnError):
            ask(self._sim.node.node, SteerKey(SUBJECT, GROUP, key, action, "simulated", "why not"), KeyRequest)
            self._sim.coverage[f"asked.{action.value}"] += 1
