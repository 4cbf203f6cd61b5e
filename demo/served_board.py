"""What is known in the third act: what the server tells of leases, and what each process wrote down."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from demo.board import short
from demo.consumer import Record
from demo.events import Event, Events
from demo.orders import PARTITION_COUNT, ServedScale
from inturn.producer.send_batch import Stored
from inturn.protocol.commands import GroupPartition
from inturn.testing.history import ConsumerCrashed, HandlerStart, History, SendAcknowledged
from inturn.testing.history import Event as HistoryEvent

NS = 1_000_000_000


@dataclass(slots=True)
class ServedPartition:
    expected: int = 0
    stored: int = 0
    done: int = 0  # messages, each counted once
    owner: str | None = None
    epoch: int = 0
    lease_left_s: float | None = None
    begun_by: str | None = None
    last: str | None = None  # message id


@dataclass(slots=True)
class Process:
    name: str
    pid: int
    handled: int = 0
    killed_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The first handler that ran in another process after the kill."""

    partition: int
    after: str
    epoch: int
    offset: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ServedLook:
    """A copy of the board at one moment."""

    at_s: float
    server_pid: int | None
    address: str
    partitions: tuple[ServedPartition, ...]
    processes: tuple[Process, ...]
    events: tuple[Event, ...]

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.partitions)

    @property
    def done(self) -> int:
        return sum(one.done for one in self.partitions)


class _Tail:
    """The lines that a process has written since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._decode = msgspec.json.Decoder(Record).decode

    def read(self) -> list[Record]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read()
        except FileNotFoundError:  # not there yet
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        return [self._decode(line) for line in whole.splitlines()]


@dataclass(slots=True)
class ServedBoard:
    """Written by the story, read by the view."""

    scale: ServedScale
    events: Events
    address: str = ""
    server_pid: int | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    take_overs: list[TakeOver] = field(default_factory=list)
    partitions: list[ServedPartition] = field(
        default_factory=lambda: [ServedPartition() for _ in range(PARTITION_COUNT)]
    )
    killed: str | None = None
    _killed_at_ns: int = 0
    _tails: dict[str, _Tail] = field(default_factory=dict)
    _recorded: list[tuple[int, HistoryEvent]] = field(default_factory=list)
    _done: set[tuple[int, int]] = field(default_factory=set)
    _orphaned: set[int] = field(default_factory=set)  # partitions of the killed process that nobody went on with
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> ServedLook:
        with self._lock:
            return ServedLook(
                self.events.now_s,
                self.server_pid,
                self.address,
                tuple(replace(one) for one in self.partitions),
                tuple(replace(one) for one in self.processes.values()),
                self.events.so_far(),
            )

    @property
    def is_taken_over(self) -> bool:
        return self.killed is not None and not self._orphaned

    def history(self) -> History:
        """Of all processes, in the order of their common clock."""
        with self._lock:
            return History(event for _, event in sorted(self._recorded, key=lambda one: one[0]))

    # Told by the story

    def expect(self, counts: Sequence[int]) -> None:
        with self._lock:
            for partition, count in zip(self.partitions, counts, strict=True):
                partition.expected = count

    def joined(self, name: str, pid: int, records: Path) -> None:
        with self._lock:
            self.processes[name] = Process(name, pid)
            self._tails[name] = _Tail(records)

    def sent(self, stored: Stored, key: str, message_id: str) -> None:
        event = SendAcknowledged(stored.subject, stored.partition, stored.offset, key.encode(), message_id)
        with self._lock:
            self._recorded.append((time.monotonic_ns(), event))
            partition = self.partitions[stored.partition]
            partition.stored = max(partition.stored, stored.offset + 1)

    def described(self, partitions: Sequence[GroupPartition]) -> None:
        """What the server says of the leases."""
        with self._lock:
            for known, one in zip(self.partitions, partitions, strict=True):
                known.owner = None if one.owner is None else short(one.owner)
                known.epoch, known.lease_left_s = one.epoch, one.remaining_s

    def died(self, name: str, held: Sequence[int], at_ns: int) -> None:
        """`at_ns` is when the signal was sent; by now the process is gone, and what it wrote is all there will be."""
        self.read()
        with self._lock:
            members = {
                event.consumer
                for _, event in self._recorded
                if isinstance(event, HandlerStart) and short(event.consumer) == name
            }
            dead_at_ns = time.monotonic_ns()
            self._recorded.extend((dead_at_ns, ConsumerCrashed(member)) for member in members)
            self.killed, self._killed_at_ns, self._orphaned = name, at_ns, set(held)
            process = self.processes[name]
            process.killed_at_s = self.events.now_s
            self.events.say(
                f"kill -9 {process.pid}: {name} is gone with partitions {', '.join(map(str, held))}; "
                f"its leases end within {self.scale.lease_s:.1f} s"
            )

    def read(self) -> None:
        """What the processes wrote since the last time."""
        with self._lock:
            for name, tail in self._tails.items():
                for record in tail.read():
                    self._recorded.append((record.at_ns, record.event))
                    if isinstance(record.event, HandlerStart):
                        self._started(name, record.event, record.at_ns)
                    elif record.event.result == "success":
                        self._handled(name, record.event.partition, record.event.offset, record.event.message_id)

    def _started(self, name: str, event: HandlerStart, at_ns: int) -> None:
        self.partitions[event.partition].begun_by = name
        if event.partition not in self._orphaned or name == self.killed:
            return
        self._orphaned.discard(event.partition)
        took_s = (at_ns - self._killed_at_ns) / NS
        self.take_overs.append(TakeOver(event.partition, name, event.epoch, event.offset, took_s))
        self.events.say(
            f"{name} goes on with partition {event.partition} at offset {event.offset:,}, epoch {event.epoch}: "
            f"{took_s:.2f} s after the kill"
        )

    def _handled(self, name: str, partition: int, offset: int, message_id: str | None) -> None:
        self.processes[name].handled += 1
        known = self.partitions[partition]
        known.last = message_id
        if (partition, offset) not in self._done:
            self._done.add((partition, offset))
            known.done += 1
            known.stored = max(known.stored, offset + 1)  # a handler may be quicker than the acknowledgement

    def owned(self) -> Counter[str]:
        with self._lock:
            return Counter(one.owner for one in self.partitions if one.owner is not None)
