"""A server, consumers and producers as real processes that can be killed, frozen and started again."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from inturn.model.settings import LeaseSettings
from simulator.processes.child import ConsumerSpec, ProducerSpec, ServerSpec
from simulator.processes.history import Death
from simulator.processes.proxy import Proxies, Proxy

Role: TypeAlias = Literal["server", "consumer", "producer"]
SUBJECT, GROUP = "faults", "workers"
# Outside of the range for clients: a client could take the port while the server is down.
_PORTS = (20_000, 32_000)


@dataclass(slots=True)
class Place:
    """A role that runs in one process after the other. `proxy` is between the process and the server."""

    name: str
    role: Role
    proxy: Proxy | None = None
    process: subprocess.Popen[bytes] | None = None
    events: Path = field(default_factory=Path)
    started: int = 0
    is_frozen: bool = False

    @property
    def has_begun(self) -> bool:
        """The process runs, has opened its file and handles signals."""
        return self.process is not None and not self.is_frozen and self.events.exists()

    @property
    def has_written(self) -> bool:
        return self.has_begun and self.events.stat().st_size > 0


class Cluster:
    """Keeps all files in one folder: the server's folder, and per process a file of events and a file of output."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        order: str,
        lease: LeaseSettings,
        flush: str,
        counts: Mapping[Role, int],
        keys: int,
        proxies: Proxies,
        bugs: Mapping[Role, str],
    ) -> None:
        self.folder = folder
        self.deaths: list[Death] = []
        self.problems: list[str] = []
        self.port = free_port(random.Random(seed))
        self.events: dict[Role, list[Path]] = {"server": [], "consumer": [], "producer": []}
        self._order, self._lease, self._flush, self._keys, self._bugs = order, lease, flush, keys, bugs
        self._seeds = random.Random(seed)
        self.server = Place("server", "server")
        self.places = [self.server]
        for role in ("consumer", "producer"):
            for number in range(counts[role]):
                # The first consumer and producer connect directly: most work is done in spite of a bad network.
                proxy = proxies.add(self.port, self._seeds.getrandbits(32)) if number else None
                self.places.append(Place(f"{role}-{number}", role, proxy))

    @property
    def address(self) -> str:
        return f"inturn://127.0.0.1:{self.port}"

    def of(self, role: Role) -> list[Place]:
        return [place for place in self.places if place.role == role]

    def start(self, place: Place) -> None:
        place.started += 1
        place.is_frozen = False
        place.events = self.folder / f"{place.name}.{place.started}.events"
        self.events[place.role].append(place.events)
        command = [sys.executable, "-m", f"simulator.processes.{place.role}", self._spec(place)]
        with (self.folder / f"{place.name}.{place.started}.log").open("wb") as said:
            place.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def kill(self, place: Place) -> None:
        """kill -9; returns when the process is dead."""
        process = place.process
        assert process is not None
        process.kill()
        process.wait()
        self.deaths.append(Death(place.events, time.monotonic()))
        place.process, place.is_frozen = None, False

    def freeze(self, place: Place) -> None:
        assert place.process is not None
        place.process.send_signal(signal.SIGSTOP)
        place.is_frozen = True

    def thaw(self, place: Place) -> None:
        if place.process is not None and place.is_frozen:
            place.process.send_signal(signal.SIGCONT)
        place.is_frozen = False

    def jump_clock(self, place: Place) -> None:
        assert place.process is not None
        place.process.send_signal(signal.SIGUSR1)

    def end(self, place: Place, wait_s: float) -> None:
        """SIGTERM. A process that does not end in time, or with an error, is a problem."""
        if place.process is None:
            return
        self.thaw(place)
        place.process.terminate()
        try:
            code = place.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{place.name} did not end within {wait_s:g} s of SIGTERM")
            self.kill(place)
            return
        place.process = None
        if code != 0:
            self.problems.append(f"{place.name} ended with code {code}; see {place.events.stem}.log")

    def look(self) -> None:
        """A process that ended by itself is a problem."""
        for place in self.places:
            if place.process is not None and (code := place.process.poll()) is not None:
                self.problems.append(f"{place.name} ended by itself, code {code}; see {place.events.stem}.log")
                self.deaths.append(Death(place.events, time.monotonic()))
                place.process, place.is_frozen = None, False

    def close(self) -> None:
        for place in self.places:
            if place.process is not None:
                place.process.kill()
                place.process.wait()
                place.process = None

    def _spec(self, place: Place) -> str:
        seed = self._seeds.getrandbits(32)
        bug = self._bugs.get(place.role)
        events = str(place.events)
        if place.role == "server":
            server = ServerSpec(
                events=events,
                seed=seed,
                folder=str(self.folder / "server"),
                port=self.port,
                flush=self._flush,
                lease=self._lease,
                bug=bug,
            )
            return msgspec.json.encode(server).decode()
        address = self.address if place.proxy is None else f"inturn://127.0.0.1:{place.proxy.port}"
        name = f"{place.name}.{place.started}"
        client: ConsumerSpec | ProducerSpec
        if place.role == "consumer":
            client = ConsumerSpec(
                events=events,
                seed=seed,
                address=address,
                subject=SUBJECT,
                name=name,
                bug=bug,
                group=GROUP,
                order=self._order,
            )
        else:
            # Every second producer has a name, and takes the name over from its killed predecessor.
            writer = place.name if place.name.endswith(("1", "3", "5", "7", "9")) else None
            client = ProducerSpec(
                events=events,
                seed=seed,
                address=address,
                subject=SUBJECT,
                name=name,
                bug=bug,
                keys=self._keys,
                writer=writer,
            )
        return msgspec.json.encode(client).decode()


def free_port(rng: random.Random) -> int:
    """A port without a listener, outside of the range for clients."""
    for _ in itertools.repeat(None, 1000):
        port = rng.randrange(*_PORTS) + os.getpid() % 100
        with contextlib.closing(socket.socket()) as trial, contextlib.suppress(OSError):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {_PORTS[0]} to {_PORTS[1]} is free")
