"""Something at the other end of the network: it can die, freeze, and be cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.world import World

if TYPE_CHECKING:
    from simulator.link import SimLink


class SimClient:
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
        """Everything that should have happened meanwhile happens now, late, in its order."""
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
