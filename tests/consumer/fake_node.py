"""A consumer core in the hands of the test: the test sees every command, and chooses every answer and the time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from inturn.consumer.context import Context
from inturn.consumer.core import ConsumerCore
from inturn.consumer.decoder import decode_pull
from inturn.consumer.outcome import Outcome
from inturn.consumer.partition_lease import NEVER
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.consumer.scheduler import CHUNK_MAX, CHUNK_S
from inturn.model.batch import BatchHeader, StoredBatch, encode, parse_header, partition_seed, payload_checksum
from inturn.model.message import Message, Outgoing
from inturn.model.routing import Partition, Route, even_ranges
from inturn.model.settings import ConsumerSettings, KeyAction, Keyless, LeaseSettings, LotState, Order
from inturn.model.subject import Subject
from inturn.protocol.commands import (
    Acquire,
    Assignment,
    Command,
    Commit,
    Committed,
    Done,
    Failure,
    Granted,
    Heartbeat,
    KeyRequest,
    Leave,
    Lot,
    LotContent,
    Move,
    ParkedMessage,
    Progress,
    Pull,
    Pulled,
    ReadLot,
    Release,
    Renew,
    Renewed,
)

LEASE = LeaseSettings(life_s=10.0, renew_s=2.0, margin_s=1.0)
PARTITIONS = 3
SUBJECT = Subject(
    "orders",
    Route("orders", 1, tuple(Partition("local", f"p{n}") for n in range(PARTITIONS)), even_ranges(PARTITIONS)),
)


def stored_batch(base_offset: int, messages: Sequence[Outgoing]) -> StoredBatch:
    packed = encode(messages, array("H", [1] * len(messages)))
    seed = partition_seed("p")
    header = parse_header(packed.header(base_offset, 0, 0, seed), 0, seed)
    assert header is not None
    return StoredBatch(header, memoryview(packed.payload))


def batch_of(base_offset: int, count: int, *, body: bytes = b"x") -> StoredBatch:
    """Messages without a key."""
    return stored_batch(base_offset, [Outgoing(body + b"%d" % (base_offset + n)) for n in range(count)])


def damaged(batch: StoredBatch) -> StoredBatch:
    payload = bytearray(batch.payload)
    payload[-1] ^= 1
    return msgspec.structs.replace(batch, payload=bytes(payload))


def undecodable(base_offset: int, count: int) -> StoredBatch:
    """The checksum is right, but this program cannot decode the batch: for example, a newer program wrote the batch."""
    payload = bytes(2 * count) + b"\xc1 not msgpack"
    header = BatchHeader(0, len(payload), count, 1, base_offset, 0, 0, 0, 0, 0, payload_checksum(payload))
    return StoredBatch(header, memoryview(payload))


@dataclass(slots=True)
class StoredLot:
    state: LotState
    reason: str = ""
    rows: dict[tuple[int, int], ParkedMessage] = field(default_factory=dict)  # in order

    @property
    def offsets(self) -> list[int]:
        return [offset for _, offset in self.rows]


@dataclass(slots=True)
class StoredPartition:
    """The stored state of a partition for a group."""

    epoch: int = 0
    offset: int = 0
    number: int = 0
    finished: bytes = b""
    failures: dict[int, Failure] = field(default_factory=dict)
    lots: dict[bytes, StoredLot] = field(default_factory=dict)
    freed: list[bytes] = field(default_factory=list)
    position: int = 0

    def apply(self, progress: Progress) -> bool:
        """Return False if the epoch is over. A late copy changes nothing."""
        if progress.epoch != self.epoch:
            return False
        if progress.number <= self.number:
            return True
        assert progress.offset >= self.offset, "offsets never go back"
        self.offset, self.finished, self.number = progress.offset, progress.finished, progress.number
        self.failures |= {one.offset: one for one in progress.failed}
        for offset in progress.settled:
            self.failures.pop(offset, None)
        for change in progress.lots:
            lot = self.lots.setdefault(change.key, StoredLot(LotState.PARKED))
            lot.state, lot.reason = LotState(change.state), change.reason or lot.reason
            for one in change.added:
                if (one.partition, one.offset) not in lot.rows:
                    self.position += 1
                    lot.rows[one.partition, one.offset] = msgspec.structs.replace(one, position=self.position)
            for place in change.removed:
                lot.rows.pop(place, None)
            if lot.state is LotState.FREE:
                assert not lot.rows, "a node refuses to free a lot that is not empty"
                del self.lots[change.key]
                self.freed.append(change.key)
        return True


class FakeNode:
    """The durable state, so that a second consumer can continue."""

    def __init__(self) -> None:
        self.partitions = {index: StoredPartition() for index in range(PARTITIONS)}
        self.logs: dict[int, list[StoredBatch]] = {index: [] for index in range(PARTITIONS)}
        self.requests: list[KeyRequest] = []  # not yet acted upon
        self.request_mark = 0
        self.moves: list[Move] = []
        self.lot_rows_max = 1000  # how many rows of a lot are read at once

    def request(self, kind: KeyAction, key: bytes, offset: int | None = None, partition: int = 0) -> int:
        self.request_mark += 1
        request = KeyRequest(self.request_mark, partition, key, kind.value, offset, "ops", "because")
        self.requests.append(request)
        return request.id

    def store(self, progress: Progress) -> bool:
        stored = self.partitions[progress.partition].apply(progress)
        if stored:
            self.requests = [one for one in self.requests if one.id not in progress.requests]
        return stored

    def grant(self, index: int) -> Granted:
        one = self.partitions[index]
        one.epoch += 1
        one.number = 0
        return Granted(
            one.epoch,
            one.offset,
            LEASE.life_s,
            one.finished,
            tuple(one.failures.values()),
            tuple(Lot(key, lot.state.value) for key, lot in one.lots.items()),
            tuple(request for request in self.requests if request.partition == index),
            self.request_mark,
        )

    def read_lot(self, command: ReadLot) -> LotContent:
        lot = self.partitions[command.partition].lots.get(command.key)
        rows = [one for one in lot.rows.values() if one.position > command.after] if lot is not None else []
        return LotContent(tuple(rows[: self.lot_rows_max]), len(rows) <= self.lot_rows_max)


class Job:
    """A run in the hands of the test, driven as by a worker."""

    def __init__(self, bench: Bench, run: Run, count: int) -> None:
        self._bench = bench
        self.run = run
        self._calls = run.calls(bench.monotonic, count)
        self._is_begun = False

    def next_batch(self) -> list[Message] | None:
        """The messages of the next call of the handler.

        The call before succeeded, unless `settle` gave a different outcome.
        """
        self._is_begun = True
        given = next(self._calls, None)
        for message in given or ():
            self._bench.watch(message)
        return given

    def next(self) -> Message | None:
        given = self.next_batch()
        return None if given is None else given[0]

    def settle(self, outcome: Outcome) -> bool:
        return self.run.settle(outcome)

    @property
    def context(self) -> Context:
        return self.run.context

    def over(self) -> None:
        """The handler returns, and no further message is started."""
        self.run.until_s = NEVER
        if self._is_begun:
            assert next(self._calls, None) is None

    def end(self) -> None:
        self.over()
        self._bench.core.finish(self.run, self._bench.now_s)


Decide = Callable[[Message, Context], Outcome | None]


class Bench:
    """A consumer that talks to `node`. Epochs rise with every grant."""

    def __init__(
        self,
        assigned: Sequence[int] = (0,),
        lease: LeaseSettings = LEASE,
        *,
        order: Order = Order.PARTITION,
        node: FakeNode | None = None,
        member: str = "m1",
        now_s: float = 1000.0,
        keyless: Keyless = Keyless.INDEPENDENT,
        retries_of: str | None = None,
        **settings: object,
    ) -> None:
        self.settings = ConsumerSettings(**settings)  # type: ignore[arg-type]
        self.core = ConsumerCore(
            "orders", "billing", member, order, "first", self.settings, lease, retries_of=retries_of
        )
        self.node = FakeNode() if node is None else node
        self.now_s = now_s
        self.assigned = tuple(assigned)
        self.generation = 1
        self.keyless = keyless
        self.chunk = CHUNK_MAX  # how many messages a worker takes at once, as if handlers were quick enough
        self.watch: Callable[[Message], None] = lambda message: None  # called with every message that goes to a handler
        self._beat_at_s = now_s
        self._jobs: list[Job] = []  # without a reference, a job would be closed
        self.pending: list[Command] = []
        self.seen: list[Command] = []

    @property
    def logs(self) -> dict[int, list[StoredBatch]]:
        return self.node.logs

    @property
    def state(self) -> PartitionState:
        return self.core.partitions[0]

    def committed(self, partition: int = 0) -> int:
        return self.node.partitions[partition].offset

    def monotonic(self) -> float:
        return self.now_s

    # The node

    def poll(self) -> list[Command]:
        """New commands, which wait in `pending` for answers."""
        commands = self.core.poll(self.now_s)
        if any(isinstance(command, Heartbeat) for command in commands):
            self._beat_at_s = self.now_s
        self.pending += commands
        self.seen += commands
        return commands

    def take_command(self, kind: type[Command], partition: int | None = None) -> Command:
        """The oldest command of the kind that waits for an answer."""
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

    def sent(self, kind: type[Command]) -> list[Command]:
        return [one for one in self.seen if isinstance(one, kind)]

    def answer(self, command: Command, answer: object) -> None:
        if isinstance(answer, Pulled) and isinstance(command, Pull):
            answer = decode_pull(answer, self.core.subject, command.partition)
        self.core.answered(command, answer, self.now_s)

    def good_answer(self, command: Command) -> object | None:
        """The answer of an honest node. None: the node holds the command back."""
        node = self.node
        match command:
            case Heartbeat():
                is_due = self.now_s >= self._beat_at_s + command.wait_s
                if command.generation == self.generation and not is_due:
                    return None
                subject = Subject(SUBJECT.name, SUBJECT.route, keyless=self.keyless)
                return Assignment(self.generation, self.assigned, subject, LEASE.life_s, tuple(node.requests))
            case Acquire():
                return node.grant(command.partition)
            case Renew():
                alive = [index for index, epoch in command.held if node.partitions[index].epoch == epoch]
                return Renewed(tuple(alive))
            case Pull():
                batches = tuple(b for b in self.logs[command.partition] if b.header.next_offset > command.offset)
                end_offset = self.end(command.partition)
                return Pulled(batches, batches[-1].header.next_offset, end_offset) if batches else None
            case Commit():
                return Committed(tuple(one.partition for one in command.progress if node.store(one)))
            case Release():
                assert node.store(command.progress)
                return Done()
            case Move():
                node.moves.append(command)
                return Done()
            case ReadLot():
                return node.read_lot(command)
            case Leave():
                return Done()
        raise AssertionError(command)

    def end(self, partition: int = 0) -> int:
        return max((batch.header.next_offset for batch in self.logs[partition]), default=0)

    def store(self, partition: int, count: int) -> None:
        """Messages without a key."""
        self.logs[partition].append(batch_of(self.end(partition), count))

    def store_keys(self, keys: str, partition: int = 0, body: bytes = b"x") -> None:
        """Store a message for every letter, with the letter as key. A dash stands for a message without a key."""
        messages = [Outgoing(body, None if key == "-" else key.encode()) for key in keys]
        self.logs[partition].append(stored_batch(self.end(partition), messages))

    def assign(self, *partitions: int) -> None:
        self.generation += 1
        self.assigned = partitions

    def request(self, kind: KeyAction, key: bytes, offset: int | None = None, partition: int = 0) -> int:
        """An operator makes a key request. The consumer learns of the request with the next heartbeat."""
        self.generation += 1
        return self.node.request(kind, key, offset, partition)

    def answer_all(self, *but: type[Command]) -> bool:
        """Answer the waiting commands except for the given kinds. Return whether any command was answered."""
        answered = False
        for command in [one for one in self.pending if not isinstance(one, but)]:
            answer = self.good_answer(command)
            if answer is not None:
                self.pending.remove(command)
                self.answer(command, answer)
                answered = True
        return answered

    def settle(self, *but: type[Command]) -> None:
        """Poll and answer until no command is left at this moment. Do not answer the given kinds."""
        for _ in range(100):
            self.poll()
            if not self.answer_all(*but) and not self.poll():
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

    def successor(self, member: str = "m2", **settings: object) -> Bench:
        """A second consumer of the same group that takes over the durable state. The first consumer is dead."""
        return Bench(
            self.assigned,
            LEASE,
            order=self.core._order,
            node=self.node,
            member=member,
            now_s=self.now_s,
            keyless=self.keyless,
            retries_of=None,
            **settings,
        )

    # The workers

    def take(self, count: int = 1) -> Job | None:
        """Work for a worker, or None."""
        self.core.scheduler._handling_s = CHUNK_S / self.chunk
        run = self.core.take(self.now_s)
        if run is None:
            return None
        self._jobs.append(Job(self, run, count))
        return self._jobs[-1]

    def job(self, count: int = 1) -> Job:
        job = self.take(count)
        assert job is not None, "nothing is ready"
        return job

    def jobs(self) -> Iterator[Job]:
        while (job := self.take()) is not None:
            yield job

    def work(self, decide: Decide = lambda message, context: None) -> list[tuple[int, int]]:
        """Let workers do all work that is ready at this moment. Return (offset, attempt) of every call, in order."""
        calls = []
        for job in self.jobs():
            while (message := job.next()) is not None:
                calls.append((message.offset, job.context.attempt))
                outcome = decide(message, job.context)
                if outcome is not None:
                    job.settle(outcome)
            job.end()
        return calls

    def handle_all(self) -> list[int]:
        return [offset for offset, _ in self.work()]


def failing(outcome: Outcome, *offsets: int) -> Decide:
    """The given messages end with the outcome, all other messages succeed."""
    return lambda message, context: outcome if message.offset in offsets else None
