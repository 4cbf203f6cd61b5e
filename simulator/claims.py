"""The claims in the answers of the node: the slots of every claimant, and claims that must not be granted."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TypeAlias

from inturn.model.routing import SlotSet
from inturn.protocol.commands import Claim, Granted
from simulator.world import World

_Place: TypeAlias = tuple[str, str, int]  # subject, group, partition


@dataclass(slots=True)
class _Seen:
    epoch: int
    ask: int
    slots: SlotSet
    renewed_s: float  # not before, as far as can be seen from outside
    number: int = 0  # of the last commit
    is_forgotten: bool = False  # the node was restarted since


class ClaimWatch:
    """Finds claims that should not have been granted."""

    def __init__(self, world: World, coverage: Counter[str], life_s: float) -> None:
        self._world = world
        self._coverage = coverage
        self._life_s = life_s
        self._claims: dict[_Place, dict[str, _Seen]] = defaultdict(dict)

    def node_crashed(self) -> None:
        for claims in self._claims.values():
            for seen in claims.values():
                seen.is_forgotten = True

    def granted(self, command: Claim, answer: Granted, holder: tuple[str, int] | None) -> list[str]:
        """The problems of a grant. `holder` is the owner of the lease, with the epoch."""
        place = command.subject, command.group, command.partition
        seen = self._claims[place].get(command.member)
        if seen is not None and (seen.epoch, seen.ask, seen.is_forgotten) == (answer.epoch, command.ask, False):
            seen.renewed_s = self._world.now_s
            self._coverage["claim.granted again for the same ask"] += 1
            return []
        self._coverage["claim.granted"] += 1
        if seen is not None and seen.epoch == answer.epoch:
            why = "a restart" if seen.is_forgotten else "it was lost"
            self._coverage[f"claim.granted again after {why}"] += 1
        about = f"partition {command.partition} by {command.member}, epoch {answer.epoch}"
        problems = []
        if holder != (command.owner, answer.epoch):
            problems.append(f"claimed though the lease is not held: {about}; held by {holder}")
        slots = SlotSet.from_bytes(command.slots)
        problems += self._take(place, command.member, answer.epoch, slots, about)
        self._claims[place][command.member] = _Seen(answer.epoch, command.ask, slots, self._world.now_s)
        return problems

    def _take(self, place: _Place, claimant: str, epoch: int, slots: SlotSet, about: str) -> list[str]:
        """Other claimants lose these slots."""
        problems = []
        claims = self._claims[place]
        for other, seen in list(claims.items()):
            if other == claimant or not seen.slots.overlaps(slots):
                continue
            del claims[other]
            if seen.epoch == epoch:
                self._coverage[f"claim.lost{' after a restart' if seen.is_forgotten else ''}"] += 1
                silent_s = self._world.now_s - seen.renewed_s
                if silent_s < self._life_s - 1e-6:
                    problems.append(f"claimed too early: {about}; {other} has renewed its claim {silent_s:.3f} s ago")
        return problems

    def given_back(self, subject: str, group: str, partition: int | None, claimant: str) -> None:
        """All claims of the claimant if `partition` is None."""
        for place, claims in self._claims.items():
            if place[:2] == (subject, group) and partition in (None, place[2]) and claimant in claims:
                self._coverage["claim.given back"] += 1
                del claims[claimant]

    def is_held(self, place: _Place, claimant: str, epoch: int, ask: int | None) -> bool:
        seen = self._claims[place].get(claimant)
        return seen is not None and not seen.is_forgotten and seen.epoch == epoch and ask in (None, seen.ask)

    def renewed(self, place: _Place, claimant: str) -> None:
        """The holder has renewed the claim."""
        self._claims[place][claimant].renewed_s = self._world.now_s

    def committed(self, place: _Place, claimant: str, number: int, *, is_stored: bool) -> list[str]:
        """The problems of a commit. Late copies are accepted, without an effect."""
        seen = self._claims[place][claimant]
        if number > seen.number:
            self._coverage["claim.progress added"] += 1
            seen.number = number
            return []
        self._coverage["claim.late copy of a commit"] += 1
        about = f"partition {place[2]}, {claimant}: commit {number} after {seen.number}"
        return [f"stored though it came late: {about}"] if is_stored else []
