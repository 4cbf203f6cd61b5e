"""The operator of a simulated history: looks after keys that stand still, and now and then parks one that does not."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from inturn.model.errors import InturnError
from inturn.model.settings import KeyAction, LotState
from inturn.protocol.commands import KeyDescription, KeyList, KeyRequest, ListKeys, SteerKey
from inturn.protocol.request import ask
from simulator.settings import GROUP, SUBJECT

if TYPE_CHECKING:
    from simulator.simulation import Simulation


class SimOperator:
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
        """Sometimes it was a mistake, which is undone at once."""
        self._ask_of_key(KeyAction.PARK, key)
        if self._sim.world.happens(0.3):
            self._ask_of_key(KeyAction.RESUME, key)

    def _ask_of_key(self, action: KeyAction, key: bytes) -> None:
        with contextlib.suppress(InturnError):
            ask(self._sim.node.node, SteerKey(SUBJECT, GROUP, key, action, "simulated", "why not"), KeyRequest)
            self._sim.coverage[f"asked.{action.value}"] += 1
