"""The world of a history: virtual time with a heap of events and a seed for all chance, and the clients."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.link import SimLink

_WALL_START_MS = 1_700_000_000_000
EVENTS_MAX = 300_000  # a usual history has some thousands


class TimeStandsStill(Exception):
    """Too many events: most likely an event repeats without end at the same moment."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        super().__init__(f"{EVENTS_MAX} events by {now_s:.3f} s: an event repeats without end")


class World:
    """The clock and the chance of all parts of a history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.wall_jump_ms = 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._happened = 0

    def monotonic(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return _WALL_START_MS + int(self.now_s * 1000) + self.wall_jump_ms

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._count), action))

    def run(self, until_s: float) -> None:
        """Run the events up to this time. Raises TimeStandsStill."""
        events = self._events
        while events and events[0][0] <= until_s:
            at_s, _, action = heapq.heappop(events)
            self.now_s = max(self.now_s, at_s)
            self._happened += 1
            if self._happened > EVENTS_MAX:
                raise TimeStandsStill(self.now_s)
            action()
        self.now_s = until_s

    def spread(self, low_s: float, high_s: float) -> float:
        return self.rng.uniform(low_s, high_s)

    def happens(self, chance: float) -> bool:
        return self.rng.random() < chance


class SimClient:
    """A client of the node: can die, freeze, and be cut off from the network."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.link: SimLink | None = None  # where there are streams
        self.sent_until_s = 0.0
        self.answered_until_s = 0.0
        self.answers_late_s = 0.0
        self._is_dead = False
        self._is_cut = False
        self.is_frozen = False
        self._missed: list[Callable[[], None]] = []

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    @is_dead.setter
    def is_dead(self, is_dead: bool) -> None:
        if is_dead and not self._is_dead and self.link is not None:
            self.link.died()
        self._is_dead = is_dead

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    @is_cut.setter
    def is_cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        if self.link is not None:
            self.link.block(to_node=is_cut, to_client=is_cut)

    def hang_up(self) -> None:
        if self.link is not None:
            self.link.close()

    def freeze(self, for_s: float) -> None:
        self.is_frozen = True
        self.world.after(for_s, self.thaw)

    def thaw(self) -> None:
        """Run the actions that were due meanwhile, late, in their order."""
        self.is_frozen = False
        missed, self._missed = self._missed, []
        for action in missed:
            self.do(action)

    def do(self, action: Callable[[], None]) -> None:
        if self.is_frozen:
            self._missed.append(action)
        elif not self._is_dead:
            action()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.after(delay_s, lambda: self.do(action))
