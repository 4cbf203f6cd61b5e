"""The third act: a server and three consumers as processes. kill -9 ends a consumer."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from demo.act import ActLook, ActResult, Events, SendWindow, checked_fields, short_name, stored_ids
from demo.children import SERVER, ProcessAct, ProcessBoard
from demo.orders import (
    FIRST_CONSUMERS,
    PARTITION_COUNT,
    SERVED_GROUP,
    SUBJECT,
    Ledger,
    ServedScale,
    expected_counts,
    life_cycles,
    order_message,
)
from demo.process import HandlerRecord
from inturn.client import Connection
from inturn.producer.send_batch import Stored
from inturn.protocol.commands import GroupDescription
from inturn.testing.checker import check
from inturn.testing.history import ConsumerCrashed, HandlerEnd, HandlerStart, History, SendAcknowledged
from inturn.testing.history import Event as HistoryEvent

KILL_AT = 0.35  # of all messages handled
NS = 1_000_000_000


@dataclass(slots=True)
class ServedPartition:
    expected: int = 0
    stored: int = 0
    done: int = 0  # messages, repeated messages counted once
    owner: str | None = None
    epoch: int = 0
    lease_left_s: float | None = None
    begun_by: str | None = None
    last: str | None = None  # message id


@dataclass(slots=True)
class ConsumerProcess:
    name: str
    pid: int
    handled: int = 0
    killed_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The first handler of the partition that ran in a different process after the kill."""

    partition: int
    after: str
    epoch: int
    offset: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ServedLook(ActLook):
    server_pid: int | None
    address: str
    partitions: tuple[ServedPartition, ...]
    processes: tuple[ConsumerProcess, ...]

    @property
    def stored(self) -> int:
        return sum(one.stored for one in self.partitions)

    @property
    def done(self) -> int:
        return sum(one.done for one in self.partitions)


class _Tail:
    """The records that a process has appended to its file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._decode = msgspec.json.Decoder(HandlerRecord).decode

    def read(self) -> list[HandlerRecord]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read()
        except FileNotFoundError:  # not created yet
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        return [self._decode(line) for line in whole.splitlines()]


class ServedBoard(ProcessBoard):
    """The records of the processes are files in `folder`, named NAME.jsonl."""

    def __init__(self, scale: ServedScale, events: Events, folder: Path) -> None:
        super().__init__(events)
        self.scale = scale
        self.processes: dict[str, ConsumerProcess] = {}
        self.take_overs: list[TakeOver] = []
        self.partitions = [ServedPartition() for _ in range(PARTITION_COUNT)]
        self.killed: str | None = None
        self.lag = scale.messages  # as the server reports it
        self._folder = folder
        self._killed_at_ns = 0
        self._tails: dict[str, _Tail] = {}
        self._recorded: list[tuple[int, HistoryEvent]] = []
        self._done: set[tuple[int, int]] = set()
        self._orphaned: set[int] = set()  # partitions of the killed process, until a different process goes on

    def look(self) -> ServedLook:
        with self._lock:
            return ServedLook(
                self.events.now_s,
                self.events.so_far(),
                self.server_pid,
                self.address,
                tuple(replace(one) for one in self.partitions),
                tuple(replace(one) for one in self.processes.values()),
            )

    @property
    def is_taken_over(self) -> bool:
        return self.killed is not None and not self._orphaned

    def history(self) -> History:
        """The records of all processes, sorted by their common clock."""
        with self._lock:
            return History(event for _, event in sorted(self._recorded, key=lambda one: one[0]))

    def records(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    # Calls of the act

    def expect(self, counts: Sequence[int]) -> None:
        with self._lock:
            for partition, count in zip(self.partitions, counts, strict=True):
                partition.expected = count

    def joined(self, name: str, pid: int) -> None:
        with self._lock:
            self.processes[name] = ConsumerProcess(name, pid)
            self._tails[name] = _Tail(self.records(name))

    def sent(self, stored: Stored, key: str, message_id: str) -> None:
        event = SendAcknowledged(stored.subject, stored.partition, stored.offset, key.encode(), message_id)
        with self._lock:
            self._recorded.append((time.monotonic_ns(), event))
            partition = self.partitions[stored.partition]
            partition.stored = max(partition.stored, stored.offset + 1)

    def described(self, group: GroupDescription) -> None:
        with self._lock:
            for known, one in zip(self.partitions, group.partitions, strict=True):
                known.owner = None if one.owner is None else short_name(one.owner)
                known.epoch, known.lease_left_s = one.epoch, one.remaining_s
            self.lag = sum(one.lag for one in group.partitions)

    def died(self, name: str, held: Sequence[int], at_ns: int) -> None:
        """Call when the process is gone: its file is complete. `at_ns` is when the signal was sent."""
        self.read()
        with self._lock:
            members = {
                event.consumer
                for _, event in self._recorded
                if isinstance(event, HandlerStart) and short_name(event.consumer) == name
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
        """Read the new records of all processes."""
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


class ServedAct(ProcessAct):
    """`stored` is the log at the end of the act."""

    subject, group, partition_count = SUBJECT, SERVED_GROUP, PARTITION_COUNT
    consumers = FIRST_CONSUMERS
    look_s = 0.05

    def __init__(self, scale: ServedScale, folder: Path, board: ServedBoard) -> None:
        super().__init__(folder, board, scale.lease_s)
        self.stored: dict[tuple[str, int, int], str | None] = {}
        self._scale = scale
        self._board = board

    def _consumer_arguments(self, name: str) -> Sequence[str]:
        scale = self._scale
        return ("consumer", name, str(self._board.records(name)), str(scale.handling_s), str(scale.lease_s / 5))

    def _tell(self, connection: Connection) -> None:
        board = self._board
        board.events.say(f"inturn serve listens at {board.address}, process {board.server_pid}")
        board.expect(expected_counts(connection.create_subject(SUBJECT, PARTITION_COUNT), self._scale.orders))
        self._admit()
        self._await(connection, self._is_shared)
        board.events.say(f"{', '.join(FIRST_CONSUMERS)}, each a process, share the {PARTITION_COUNT} partitions")
        till = self._start_till("till", lambda: self._send(connection))
        try:
            self._await(connection, lambda: self._is_done(KILL_AT) and self._is_shared())
            self._kill()
            self.on_quiet()
            self._await(connection, lambda: board.is_taken_over)
            self._await(connection, lambda: not till.is_alive() and self._is_done(1.0) and board.lag == 0)
        finally:
            self._stop.set()  # no producer sends when the connection is closed
            till.join()
        self._children.stop(*(name for name in FIRST_CONSUMERS if name != board.killed))
        board.read()
        self.stored = stored_ids(connection, SUBJECT)

    def _finish(self) -> None:
        self._board.events.say("everything is handled: the consumers stop, then the server; no process is left behind")

    def _kill(self) -> None:
        """Kill the consumer with most partitions."""
        victim = self._board.owned().most_common(1)[0][0]
        held = [index for index, one in enumerate(self._board.look().partitions) if one.owner == victim]
        at_ns = time.monotonic_ns()
        self._children.kill(victim)
        self._board.died(victim, held, at_ns)

    def _look(self, connection: Connection) -> None:
        self._board.read()
        super()._look(connection)

    def _is_done(self, share: float) -> bool:
        return self._board.look().done >= share * self._scale.messages

    def _send(self, connection: Connection) -> None:
        """Send all orders: pipelined, and paced so that the act can be watched."""
        steps = list(life_cycles(range(self._scale.orders), random.Random(7)))
        producer = connection.producer()
        window = SendWindow(self._board.sent)
        started_at_s = time.monotonic()
        for count, (order, step) in enumerate(steps):
            body, key, message_id = order_message(order, step)
            window.add(producer.send(SUBJECT, body, key=key, message_id=message_id), key, message_id)
            window.settle()
            due_s = started_at_s + self._scale.sending_s * count / len(steps)
            if count % 8 == 0 and self._stop.wait(max(0.0, due_s - time.monotonic())):
                return
        window.settle(0)


class TakeOverResult(msgspec.Struct, frozen=True):
    partition: int
    after: str
    epoch: int
    offset: int
    took_s: float  # from the kill to the first handler in the other process


class ServedActResult(ActResult, frozen=True, kw_only=True):
    """The third act: `served` in the output of `inturn demo --json`."""

    group: str
    address: str
    pids: dict[str, int]  # of the server and the consumers
    lease_s: float
    killed: str | None
    take_overs: list[TakeOverResult]
    orders: int
    orders_in_order: int
    handled_by: dict[str, int]


def judge_served(act: ServedAct, board: ServedBoard, scale: ServedScale, elapsed_s: float) -> ServedActResult:
    """Call only after the act is over."""
    history = board.history()
    stored = act.stored if act.is_complete else None
    verdict = check(history, subject=SUBJECT, group=SERVED_GROUP, order="key", stored=stored)
    in_order = _ledger(history).complete_count
    is_all = verdict.sent == scale.messages and in_order == scale.orders
    look = board.look()
    pids = {} if look.server_pid is None else {SERVER: look.server_pid}
    return ServedActResult(
        **checked_fields(act, board, verdict, ok=is_all and bool(board.take_overs), elapsed_s=elapsed_s),
        group=SERVED_GROUP,
        address=look.address,
        pids={**pids, **{one.name: one.pid for one in look.processes}},
        lease_s=scale.lease_s,
        killed=board.killed,
        take_overs=[
            TakeOverResult(one.partition, one.after, one.epoch, one.offset, round(one.took_s, 3))
            for one in board.take_overs
        ],
        orders=scale.orders,
        orders_in_order=in_order,
        handled_by={one.name: one.handled for one in look.processes},
    )


def _ledger(history: History) -> Ledger:
    """The steps as all processes together finished them. A message id is ORDER/STEP."""
    ledger = Ledger()
    for event in history:
        if isinstance(event, HandlerEnd) and event.result == "success" and event.message_id is not None:
            order, _, step = event.message_id.partition("/")
            ledger.note(int(order), step)
    return ledger
