"""A consumer core in the test's hands: it sees every command and chooses every answer and the time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from inturn.consumer.core import ConsumerCore
from inturn.consumer.run import Run
from inturn.model.batch import BatchHeader, StoredBatch, encode, parse_header, partition_seed
from inturn.model.commands import (
    Acquire,
    Assignment,
    Command,
    Commit,
    Committed,
    Done,
    Granted,
    Heartbeat,
    Leave,
    Pull,
    Pulled,
    Release,
    Renew,
    Renewed,
)
from inturn.model.message import Outgoing
from inturn.model.route import Partition, Route
from inturn.model.settings import ConsumerSettings, LeaseSettings, Order
from inturn.model.slot import even_ranges
from inturn.model.subject import Subject

LEASE = LeaseSettings(life_s=10.0, renew_s=2.0, margin_s=1.0)
PARTITIONS = 3
SUBJECT = Subject(
    "orders",
    Route("orders", 1, tuple(Partition("local", f"p{n}") for n in range(PARTITIONS)), even_ranges(PARTITIONS)),
)


def batch_of(base_offset: int, count: int, *, body: bytes = b"x") -> StoredBatch:
    packed = encode([Outgoing(body + b"%d" % (base_offset + n)) for n in range(count)], array("H", [1] * count))
    seed = partition_seed("p")
    header = parse_header(packed.header(base_offset, 0, 0, seed), 0, seed)
    assert header is not None
    return StoredBatch(header, packed.payload)


def damaged(batch: StoredBatch) -> StoredBatch:
    payload = bytearray(batch.payload)
    payload[-1] ^= 1
    return msgspec.structs.replace(batch, payload=bytes(payload))


def undecodable(base_offset: int, count: int) -> StoredBatch:
    """The checksum is right, but this program cannot read it: written by a newer one, say."""
    from inturn.model.batch import payload_checksum

    payload = bytes(2 * count) + b"\xc1 not msgpack"
    header = BatchHeader(0, len(payload), count, 1, base_offset, 0, 0, 0, 0, 0, payload_checksum(payload))
    return StoredBatch(header, payload)


class Bench:
    """`logs` is what the node holds, `committed` what it was told; epochs rise with every grant."""

    def __init__(self, assigned: Sequence[int] = (0,), lease: LeaseSettings = LEASE, **settings: object) -> None:
        chosen = ConsumerSettings(**settings)  # type: ignore[arg-type]
        self.core = ConsumerCore("orders", "billing", "m1", Order.PARTITION, "first", chosen, lease)
        self.now_s = 1000.0
        self.assigned = tuple(assigned)
        self.generation = 1
        self.logs: dict[int, list[StoredBatch]] = {index: [] for index in range(PARTITIONS)}
        self.committed: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        self.epochs: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        self.pending: list[Command] = []
        self.seen: list[Command] = []

    def poll(self) -> list[Command]:
        """New commands; they wait in `pending` for their answers."""
        commands = self.core.poll(self.now_s)
        self.pending += commands
        self.seen += commands
        return commands

    def take_command(self, kind: type[Command], partition: int | None = None) -> Command:
        """The oldest of its kind that waits for an answer."""
        for command in self.pending:
            if isinstance(command, kind) and (partition is None or getattr(command, "partition", None) == partition):
                self.pending.remove(command)
                return command
        raise AssertionError(f"no {kind.__name__} waits; there are {self.pending}")

    def has(self, kind: type[Command], partition: int | None = None) -> bool:
        return any(
            isinstance(one, kind) and (partition is None or getattr(one, "partition", None) == partition)
            for one in self.pending
        )

    def answer(self, command: Command, answer: object) -> None:
        self.core.answered(command, answer, self.now_s)

    def good_answer(self, command: Command) -> object | None:
        """What an honest node would say; None: it holds the command back."""
        match command:
            case Heartbeat():
                if command.generation == self.generation:
                    return None
                return Assignment(self.generation, self.assigned, SUBJECT, LEASE.life_s)
            case Acquire():
                self.epochs[command.partition] += 1
                return Granted(self.epochs[command.partition], self.committed[command.partition], LEASE.life_s)
            case Renew():
                return Renewed(tuple(index for index, _ in command.held))
            case Pull():
                batches = tuple(b for b in self.logs[command.partition] if b.header.next_offset > command.offset)
                end_offset = self.end(command.partition)
                return Pulled(batches, batches[-1].header.next_offset, end_offset) if batches else None
            case Commit():
                for one in command.progress:
                    self.committed[one.partition] = one.offset
                return Committed(tuple(one.partition for one in command.progress))
            case Release():
                self.committed[command.partition] = command.offset
                return Done()
            case Leave():
                return Done()
        raise AssertionError(command)

    def end(self, partition: int) -> int:
        return max((batch.header.next_offset for batch in self.logs[partition]), default=0)

    def store(self, partition: int, count: int) -> None:
        self.logs[partition].append(batch_of(self.end(partition), count))

    def assign(self, *partitions: int) -> None:
        self.generation += 1
        self.assigned = partitions

    def settle(self) -> None:
        """Poll and answer, until there is nothing more to say at this moment."""
        for _ in range(100):
            self.poll()
            answered = False
            for command in list(self.pending):
                answer = self.good_answer(command)
                if answer is not None:
                    self.pending.remove(command)
                    self.answer(command, answer)
                    answered = True
            if not answered and not self.poll():
                return
        raise AssertionError("it never comes to rest")

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def live(self, seconds: float, step_s: float = 0.5) -> None:
        """Let time pass while the node answers."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + step_s)
            self.settle()

    def take(self) -> Run:
        run = self.core.take(self.now_s)
        assert run is not None
        run.open()
        return run

    def handle(self, run: Run, count: int | None = None) -> list[int]:
        """Handle so many messages of a run successfully, or all; returns their offsets."""
        offsets: list[int] = []
        message = run.next(self.now_s)
        while message is not None:
            offsets.append(message.offset)
            if len(offsets) == count:
                run.until_s = self.now_s  # no more after this one
            message = run.next(self.now_s)
        return offsets

    def handle_all(self) -> list[int]:
        run = self.take()
        offsets = self.handle(run)
        self.core.finish(run, self.now_s)
        return offsets
