"""Histories of several processes: every process writes a file, and the files are merged by their stamps.

An event is one line, written with one call before the event has an effect outside of the process: a start before the
body of the handler, an end before the consumer gets the result, a grant before the answer. Written events survive
kill -9, and an event that was not written had no effect on other processes. Stamps are of the monotonic clock that all
processes of a machine share.

Two facts cannot be recorded by the process itself:

- A process can stand still (SIGSTOP, no processor) between the last check of its lease and the first line of the
  handler. No code in a process can prevent this case; the guarantee names the exception: a handler that was running
  when the lease was lost. If the pause was longer than the margin of the lease, the start is stamped with the time of
  the check, and counted. The margin covers shorter pauses.
- A server that is killed after a decision is durable and before the decision is recorded leaves the decision out. Later
  events show the gap: a lease ends without a recorded grant, or a lease is granted without a recorded end of the lease
  before. A kill may hide one decision; the decision is added at the death of the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from inturn.model.time import SystemClock
from inturn.testing.history import (
    ConsumerCrashed,
    Event,
    HandlerStart,
    History,
    LeaseEnded,
    LeaseGranted,
    ProcessRestarted,
)
from inturn.testing.recorder import Recorder

_encoder = msgspec.json.Encoder()


class StampedEvent(msgspec.Struct, frozen=True):
    """`let_go_at_s`: time of the last check of the lease before this start; 0 if not known."""

    event: Event
    let_go_at_s: float = 0.0


_decoder = msgspec.json.Decoder(StampedEvent)


class FileRecorder(Recorder):
    """Writes events to a file, one line and one call per event, and keeps none in memory."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(SystemClock())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def let_go(self, event: HandlerStart, let_go_at_s: float) -> None:
        """A start, with the time of the last check of the lease."""
        with self._lock:
            at_s = self._clock.monotonic()
            self._write(StampedEvent(msgspec.structs.replace(event, at_s=at_s), let_go_at_s))

    def _add(self, event: Event) -> None:
        self._write(StampedEvent(event))

    def _write(self, line: StampedEvent) -> None:
        os.write(self._file, _encoder.encode(line) + b"\n")


def read_lines(path: str | Path) -> list[StampedEvent]:
    """All whole lines; a kill may have cut the last line. Raises `msgspec.DecodeError` for a damaged line."""
    whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    return [_decoder.decode(line) for line in whole.split(b"\n") if line]


@dataclass(frozen=True, slots=True)
class Merged:
    """`late_starts` were stamped with the last check of their lease; `hidden` are decisions that a killed server had
    not recorded."""

    history: History
    late_starts: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Death:
    """The process that wrote this file was seen dead then, and had been killed."""

    path: Path
    at_s: float


def merge(
    clients: Iterable[Path], servers: Iterable[Path], deaths: Iterable[Death] = (), *, margin_s: float = 0.0
) -> Merged:
    """The merged history of all files. `margin_s` is the margin of the leases."""
    died_at_s = {death.path: death.at_s for death in deaths}
    stamped: list[tuple[float, Event]] = []
    late_starts = 0
    for path in clients:
        lines = read_lines(path)
        for line in lines:
            at_s = line.event.at_s
            if line.let_go_at_s and at_s - line.let_go_at_s > margin_s:
                at_s = line.let_go_at_s
                late_starts += 1
            stamped.append((at_s, line.event))
        if path in died_at_s:
            stamped += [(died_at_s[path], ConsumerCrashed(name, at_s=died_at_s[path])) for name in _consumers(lines)]
    server_deaths_s = []
    for path in servers:
        stamped += [(line.event.at_s, line.event) for line in read_lines(path)]
        if path in died_at_s:
            server_deaths_s.append(died_at_s[path])
            stamped.append((died_at_s[path], ProcessRestarted(at_s=died_at_s[path])))
    stamped.sort(key=lambda one: one[0])
    events, hidden = _reveal(stamped, server_deaths_s)
    return Merged(History(events), late_starts, hidden)


def _consumers(lines: Sequence[StampedEvent]) -> list[str]:
    return sorted({line.event.consumer for line in lines if isinstance(line.event, HandlerStart)})


_Place: TypeAlias = tuple[str, str, int]


def _reveal(stamped: Sequence[tuple[float, Event]], deaths_s: Sequence[float]) -> tuple[list[Event], int]:
    """Add the decisions that were durable, but not recorded."""
    unused = sorted(deaths_s)
    held: dict[_Place, LeaseGranted] = {}
    told: set[tuple[_Place, int]] = set()
    added: list[tuple[float, Event]] = []
    for at_s, event in stamped:
        if not isinstance(event, LeaseGranted | LeaseEnded):
            continue
        place = (event.subject, event.group, event.partition)
        before = held.get(place)
        is_granted = isinstance(event, LeaseGranted)
        if (before is not None) if is_granted else ((place, event.epoch) not in told):
            since_s = before.at_s if before is not None else float("-inf")
            death_s = next((one for one in reversed(unused) if since_s <= one <= at_s), None)
            if death_s is not None:
                unused.remove(death_s)
                if before is not None:
                    added.append((death_s, _ended(before, death_s)))
                if not is_granted:
                    what = (event.subject, event.group, event.partition, event.owner, event.epoch)
                    added.append((death_s, LeaseGranted(*what, at_s=death_s)))
        if is_granted:
            assert isinstance(event, LeaseGranted)
            held[place] = event
            told.add((place, event.epoch))
        elif before is not None and before.epoch <= event.epoch:
            del held[place]
    every = sorted([*stamped, *added], key=lambda one: one[0])  # stable: added events come after the death
    return [event for _, event in every], len(deaths_s) - len(unused)


def _ended(granted: LeaseGranted, at_s: float) -> LeaseEnded:
    what = (granted.subject, granted.group, granted.partition, granted.owner, granted.epoch)
    return LeaseEnded(*what, "gone", at_s=at_s)
