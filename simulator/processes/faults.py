"""The faults of a fault run: the action on a process or stream, its duration, and its repair."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from simulator.processes.cluster import Cluster, Place, Role
from simulator.processes.proxy import HEALTHY, Behaviour, Proxy

KILLS = ("kill consumer", "kill producer", "kill server")
FREEZES = ("freeze consumer for long", "freeze consumer shortly", "freeze producer", "freeze server")
STREAM_FAULTS = (
    "reset streams",
    "close streams",
    "half-open, client stays",
    "half-open, server stays",
    "delay",
    "split",
    "duplicate frames",
    "hold to server",
    "hold from server",
    "drop to server",
    "drop from server",
    "garble",
)
CLOCK_JUMPS = ("clock of consumer jumps", "clock of producer jumps", "clock of server jumps")
RESTARTS = ("restart server gently",)
GROWTHS = ("grow subject",)  # no fault, but must hold through all faults
DOWN_S_MAX = 1.0  # until a restart


@dataclass(frozen=True, slots=True)
class FaultCounts:
    """How many of each family a run has; within a family all kinds come in turns."""

    kills: int = 14
    freezes: int = 6
    stream_faults: int = 8
    clock_jumps: int = 4
    restarts: int = 1
    growths: int = 2

    def families(self) -> list[tuple[int, Sequence[str]]]:
        return [
            (self.kills, KILLS),
            (self.freezes, FREEZES),
            (self.stream_faults, STREAM_FAULTS),
            (self.clock_jumps, CLOCK_JUMPS),
            (self.restarts, RESTARTS),
            (self.growths, GROWTHS),
        ]


def plan(faults: FaultCounts | Sequence[str], rng: random.Random) -> list[str]:
    """The faults of a run, in their order: the named faults, or a number of every family."""
    if not isinstance(faults, FaultCounts):
        return list(faults)
    chosen: list[str] = []
    for count, kinds in faults.families():
        turns: list[str] = []
        while len(turns) < count:
            turns += rng.sample(kinds, len(kinds))
        chosen += turns[:count]
    rng.shuffle(chosen)
    return chosen


@dataclass(frozen=True, slots=True)
class Mending:
    """A repair that is due at a time: no fault lasts for ever."""

    after_s: float
    act: Callable[[], None]


class Injector:
    """Injects one fault after the other into a cluster."""

    def __init__(self, cluster: Cluster, rng: random.Random, lease_life_s: float, grow: Callable[[], None]) -> None:
        self._grow = grow
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self._cluster = cluster
        self._random = rng
        self._life_s = lease_life_s
        self._troubled: set[str] = set()  # places with a fault on their streams

    def inject(self, fault: str) -> Mending | None:
        """None: no target now; try the fault again later."""
        if fault in STREAM_FAULTS:
            return self._on_stream(fault)
        if fault in GROWTHS:
            self._note(fault, "all")
            self._grow()
            return Mending(0.0, lambda: None)
        role = next(role for role in _ROLES if role in fault)
        place = self._pick(role)
        if place is None:
            return None
        self._note(fault, place.name)
        if fault in KILLS:
            self._cluster.kill(place)
            return Mending(self._random.random() * DOWN_S_MAX, lambda: self._start(place))
        if fault in FREEZES:
            self._cluster.freeze(place)
            return Mending(self._frozen_s(fault), lambda: self._cluster.thaw(place))
        if fault in CLOCK_JUMPS:
            self._cluster.jump_clock(place)
            return Mending(0.0, lambda: None)
        self._cluster.end(place, wait_s=20.0)
        return Mending(self._random.random() * DOWN_S_MAX, lambda: self._start(place))

    def _start(self, place: Place) -> None:
        if place.process is None:
            self._cluster.start(place)

    def _pick(self, role: Role) -> Place | None:
        places = [one for one in self._cluster.of(role) if one.has_begun]
        return self._random.choice(places) if places else None

    def _frozen_s(self, fault: str) -> float:
        if fault == "freeze consumer for long":
            return self._life_s * (1.3 + 1.2 * self._random.random())
        return self._life_s * (0.1 + 0.6 * self._random.random())

    def _on_stream(self, fault: str) -> Mending | None:
        # One fault at a time: a repair must not end a different fault too early.
        places = [
            place
            for place in self._cluster.places
            if place.proxy is not None and place.proxy.stream_count and place.name not in self._troubled
        ]
        if not places:
            return None
        place = self._random.choice(places)
        proxy = place.proxy
        assert proxy is not None
        self._troubled.add(place.name)
        self._note(fault, place.name)
        match fault:
            case "reset streams" | "close streams":
                proxy.cut(reset=fault == "reset streams")
            case "half-open, client stays" | "half-open, server stays":
                proxy.half_open(client_stays=fault == "half-open, client stays")
            case _:
                proxy.set(*self._behaviour(fault))
        # Bytes held for longer than the life of a lease are out of date on arrival.
        shortest_s = self._life_s if fault.startswith("hold") else self._life_s / 2
        return Mending(shortest_s * (1.2 + 1.5 * self._random.random()), lambda: self._mend(place, proxy))

    def _mend(self, place: Place, proxy: Proxy) -> None:
        self._troubled.discard(place.name)
        proxy.set()

    def _behaviour(self, fault: str) -> tuple[Behaviour, Behaviour]:
        match fault:
            case "delay":
                slow = Behaviour(delay_s=0.3 * self._random.random())
                return slow, slow
            case "split":
                cut = Behaviour(piece_bytes=self._random.randint(1, 20))
                return cut, cut
            case "duplicate frames":
                twice = Behaviour(duplicate_share=0.5)
                return twice, twice
            case "hold to server":
                return Behaviour(is_held=True), HEALTHY
            case "hold from server":
                return HEALTHY, Behaviour(is_held=True)
            case "drop to server":
                return Behaviour(is_dropped=True), HEALTHY
            case "drop from server":
                return HEALTHY, Behaviour(is_dropped=True)
        garbled = Behaviour(garble_share=0.1)
        return garbled, garbled

    def _note(self, fault: str, name: str) -> None:
        self.counts[fault] += 1
        self.log.append(f"{fault}: {name}")


_ROLES: tuple[Role, ...] = ("server", "consumer", "producer")


def family_count(counts: Counter[str], kinds: Iterable[str]) -> int:
    return sum(counts[kind] for kind in kinds)


def heal(proxies: Iterable[Proxy]) -> None:
    for proxy in proxies:
        proxy.set()
