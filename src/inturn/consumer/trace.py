"""A trace: files in which a consumer records its work, for an audit.

During a run the worker notes the messages per lane, and marks how many were over at which time, with at least
`RESOLUTION_S` between two marks. So longer messages have exact times, and quick messages share a time: a recorded end
is never later than the real end. After the run the notes become columns: one pass for the offsets, one hash per lane,
and msgpack, which encodes a list of numbers at about 3 ns per number. A trace is cheap enough to be left on.

A file is a sequence of chunks with checksums: a chunk that was cut by a kill ends the readable part, and is never
misread. Before a commit is sent, the work that the commit reports is written (handed to the operating system, not
synced), except for runs that have not ended yet. A trace without the mark of a clean end was cut.

Times are nanoseconds of the wall clock, counted on the monotonic clock from one reading of both clocks per consumer:
within a trace, times never go back.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from pyroaring import BitMap64
from xxhash import xxh3_64_intdigest, xxh64_intdigest

from inturn.consumer.outcome import Next, Outcome
from inturn.model.errors import InvalidInput, StaleEpoch
from inturn.model.logs import get_logger
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import KeyAction, Keyless, Order
from inturn.protocol.commands import (
    Acquire,
    Assignment,
    Command,
    Commit,
    Committed,
    Done,
    Granted,
    KeyRequest,
    Move,
    Progress,
    Release,
    Renew,
    Renewed,
)

if TYPE_CHECKING:
    from inturn.consumer.core import ConsumerCore
    from inturn.consumer.lane import Lane
    from inturn.consumer.partition_state import PartitionState
    from inturn.model.time import Clock

SUFFIX = ".trace"
HASH_SEED = 42  # as Spark's xxhash64()
FILE_BYTES = 64 << 20
MAGIC = b"ITRC"
VERSION = 1
HEAD = struct.Struct("<4sBBHIIQ")  # magic, version, kind of chunk, zero, bytes of the head, of the body, checksum
RUNS, EVENTS = 1, 2  # kinds of chunks
PENDING_MAX = 1 << 16  # messages noted and not written
RESOLUTION_S = 20e-6
LONG_COUNT = 64  # runs with as many messages or more are encoded separately

ALONE, OF_KEY, OF_PARTITION = (
    0,
    1,
    2,
)  # kinds of lanes: a single message, a key, all messages without a key or all messages
SUCCESS, MOVED, FAILED, EXCEPTION, ROLLBACK, CRASHED = range(6)  # results
RESULTS = ("success", "moved", "failed", "exception", "rollback", "crashed")

_log = get_logger("inturn.consumer")
_encoder = msgspec.msgpack.Encoder()
Place: TypeAlias = tuple[int, int]  # partition, offset


class TraceHead(msgspec.Struct, frozen=True):
    """The fields that all records of a chunk have in common."""

    subject: str
    group: str
    owner: str
    number: int  # counts the chunks of a trace
    anchor_ns: int = 0  # at 0 s of the monotonic clock
    lone_kind: int = ALONE  # the kind of lanes without a key hash


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event beside the runs. The fields depend on `kind`:

    opened, closed   the trace; `why` is the order of the group
    granted          a lease, with the progress at that time: all offsets below `offset`, and `finished`
    claimed          slots of a partition under the lease of another member
    ended            a lease, because the lease was released, or found lost
    committed        stored by the node: `finished` has the new offsets since the last commit of this epoch
    skipped, moved   a message that was skipped by request, or is stored in another subject
    resumed          a key whose attempts count from the beginning
    """

    kind: str
    at_ns: int  # when the command was sent, if there was a command
    until_ns: int  # when the answer came
    partition: int = -1
    epoch: int = 0
    offset: int = -1
    key_hash: int | None = None
    why: str = ""
    finished: bytes = b""
    parked: tuple[Place, ...] = ()
    unparked: tuple[Place, ...] = ()
    is_claim: bool = False


def key_hash(key: bytes) -> int:
    """As Spark's `xxhash64(key)`: signed."""
    unsigned = xxh64_intdigest(key, HASH_SEED)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


class TraceRun(msgspec.Struct, frozen=True, array_like=True):
    """The work of a run. `counts` and `hashes` are per lane; no counts: one message per lane; no hashes: no keys."""

    start_s: float
    parts: list[tuple[int, int, int]]  # partition, epoch, index of the first message
    marks: list[int]  # the number of messages that were over
    marks_s: list[float]  # at these times
    offsets: list[int]
    hashes: list[int | None]
    counts: list[int]
    odd: list[tuple[int, int, int]]  # number of the message, attempt, result; all other messages: attempt 1, success

    @property
    def ends(self) -> list[float]:
        """The end times of the messages, in order; an end is the start of the next message."""
        stops = [*self.marks, len(self.offsets) + 1]
        ends = [self.start_s] * (stops[0] - 1)
        for number, at_s in enumerate(self.marks_s):
            ends += [at_s] * (stops[number + 1] - stops[number])
        return ends


class Notes:
    """The notes of a run. The worker writes without a lock; no other thread reads before the run is over."""

    __slots__ = (
        "attempts",
        "due_s",
        "first",
        "handled",
        "is_keyed",
        "long",
        "marks",
        "marks_s",
        "parts",
        "results",
        "start_s",
    )

    def __init__(self, is_keyed: bool) -> None:
        self.is_keyed = is_keyed
        self.start_s = 0.0
        self.due_s = 0.0  # the earliest time of the next mark
        self.marks: list[int] = []
        self.marks_s: list[float] = []
        self.handled: list[Message] = []  # before the current lane
        self.long: list[tuple[int, int]] = []  # lanes with several messages: index in `handled`, and count
        self.parts: list[tuple[int, int, int]] = []
        self.attempts: dict[int, int] = {}
        self.results: dict[int, int] = {}
        self.first = 0  # index in the current lane: the first message that was passed to the handler

    def part(self, state: PartitionState) -> None:
        """The following lanes belong to this partition."""
        self.parts.append((state.index, state.lease.epoch, len(self.handled)))

    def mark(self, lane: Lane, now_s: float) -> None:
        """All messages passed to the handler so far are over."""
        self.marks.append(len(self.handled) + lane.at - self.first)
        self.marks_s.append(now_s)
        self.due_s = now_s + RESOLUTION_S

    def leave(self, lane: Lane) -> None:
        """Take over the messages of the lane since `first`. Called before another thread may get the lane."""
        count = lane.at - self.first
        if count > 1 and not lane.is_straight:
            self.long.append((len(self.handled), count))
        self.handled += lane.messages[self.first : lane.at]

    def attempt(self, lane: Lane, count: int, attempt: int) -> None:
        """Set the attempt of the next messages."""
        if attempt > 1:
            number = len(self.handled) + lane.at - self.first
            self.attempts.update(dict.fromkeys(range(number, number + count), attempt))

    def settled(self, lane: Lane, count: int, outcome: Outcome, now_s: float) -> None:
        """Set the result of the last messages."""
        result = _result(outcome)
        if result != SUCCESS or now_s > self.due_s:
            self.mark(lane, now_s)
        if result != SUCCESS:
            stop = len(self.handled) + lane.at - self.first
            self.results.update(dict.fromkeys(range(stop - count, stop), result))

    def encode(self) -> msgspec.Raw:
        """Encode the notes, in as few steps per message as possible."""
        handled, attempts, results = self.handled, self.attempts, self.results
        counts: list[int] = []
        heads = handled
        if self.long:
            counts = self._counts()
            heads = [handled[first] for first in accumulate(counts[:-1], initial=0)]
        hashes = _hashes(heads) if self.is_keyed else []
        offsets = [message.offset for message in handled]
        odd = [(at, attempts.get(at, 1), results.get(at, SUCCESS)) for at in sorted(attempts.keys() | results.keys())]
        run = TraceRun(self.start_s, self.parts, self.marks, self.marks_s, offsets, hashes, counts, odd)
        return msgspec.Raw(_encoder.encode(run))

    def _counts(self) -> list[int]:
        """The number of messages of all lanes."""
        counts: list[int] = []
        at = 0
        for first, count in self.long:
            if first > at:
                counts += repeat(1, first - at)
            counts.append(count)
            at = first + count
        counts += repeat(1, len(self.handled) - at)
        return counts


def _hashes(messages: list[Message]) -> list[int | None]:
    hash_of, seed = xxh64_intdigest, HASH_SEED
    try:
        return [hash_of(message.key, seed) for message in messages]  # type: ignore[arg-type]
    except TypeError:  # some messages have no key
        keys = [message.key for message in messages]
        return [None if key is None else hash_of(key, seed) for key in keys]


def _result(outcome: Outcome) -> int:
    match outcome.next:
        case Next.DONE | Next.PASS | Next.KEEP:
            return SUCCESS
        case Next.ROLLBACK:
            return ROLLBACK
    return FAILED if outcome.kind is ResultKind.FAILED else EXCEPTION


class Trace:
    """One writer per consumer. Any thread may call `add` and `flush`.

    A failing disk must not stop the work: the trace ends there, unclean, and the log reports the failure.
    """

    def __init__(
        self,
        folder: Path,
        subject: str,
        group: str,
        owner: str,
        order: Order,
        clock: Clock,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._folder = folder
        self._names = (subject, group, owner)
        self._order = order
        self._monotonic = clock.monotonic
        self._anchor_ns = time.time_ns() - round(clock.monotonic() * 1e9)
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._is_keyed = order is Order.KEY
        self._lone_kind = OF_PARTITION if order is Order.PARTITION else ALONE
        self._noted: deque[Notes | msgspec.Raw] = deque()
        self._noted_count = 0
        self._events: list[TraceEvent] = []
        self._asked: dict[tuple[type, int | None], tuple[Command, float]] = {}
        self._claimed: dict[tuple[int, int], BitMap64] = {}  # by partition and epoch: reported as finished before
        self._file: int | None = None
        self._file_number = self._written_bytes = self._chunk_number = 0
        self._is_over = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"trace folder {str(folder)!r} cannot be created: {error.strerror}") from None
        self._event("opened", clock.monotonic(), why=order.value)

    def notes(self) -> Notes:
        return Notes(self._is_keyed)

    def add(self, notes: Notes) -> None:
        """The run is over. Called by the worker: a long run is encoded at once, short runs are encoded together when
        they are written."""
        count = len(notes.handled)
        if count:
            self._noted.append(notes.encode() if count >= LONG_COUNT else notes)
            self._noted_count += count
            if self._noted_count > PENDING_MAX:
                self.flush()

    def flush(self) -> None:
        """Hand all notes and events to the operating system."""
        with self._lock:
            noted = [self._noted.popleft() for _ in range(len(self._noted))]
            events, self._events = self._events, []
            self._noted_count = 0
            if self._is_over:
                return
            if noted:
                self._write(RUNS, _encoder.encode([one.encode() if isinstance(one, Notes) else one for one in noted]))
            if events:
                self._write(EVENTS, _encoder.encode(events))

    def end(self, *, is_clean: bool) -> None:
        """No records follow. `is_clean`: the work of the consumer is recorded completely."""
        if is_clean:
            self._event("closed", self._monotonic())
        self.flush()
        with self._lock:
            self._is_over = True
            if self._file is not None:
                os.close(self._file)
                self._file = None

    # Commands and answers

    def asks(self, commands: Sequence[Command]) -> None:
        """Called before the commands are sent. The work that a commit reports is written first.

        The recorded time is now, not the time of the core: the core collected the progress after its own time.
        """
        told = [command for command in commands if isinstance(command, Commit | Release)]
        if told:
            self.flush()
            now_s = self._monotonic()
            for command in told:
                partition = command.progress.partition if isinstance(command, Release) else None
                self._asked[type(command), partition] = command, now_s

    def _asked_at_s(self, core: ConsumerCore, command: Command) -> float | None:
        """The time when the command was sent; None: the core does not wait for the answer any more."""
        at_s = core.sent_at_s(command)
        if at_s is not None and isinstance(command, Commit | Release):
            partition = command.progress.partition if isinstance(command, Release) else None
            asked = self._asked.pop((type(command), partition), None)
            return asked[1] if asked is not None and asked[0] is command else at_s
        return at_s

    def answered(self, core: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
        """Called before the core gets the answer."""
        asked_at_s = self._asked_at_s(core, command)
        if isinstance(answer, Assignment) and self._is_keyed:
            self._lone_kind = ALONE if answer.subject.keyless is Keyless.INDEPENDENT else OF_PARTITION
        if isinstance(command, Move):
            self._moved(core, command, answer, now_s)
        if asked_at_s is None:
            return
        match answer:
            case Granted() if isinstance(command, Acquire) or answer.is_claim:
                self._granted(getattr(command, "partition", -1), answer, asked_at_s, now_s)
            case Committed() if isinstance(command, Commit):
                for progress in command.progress:
                    if progress.partition in answer.partitions:
                        self._committed(core, progress, asked_at_s, now_s)
                    elif progress.partition not in answer.unreached:
                        self._ended(progress.partition, progress.epoch, "lost", now_s)
            case Done() if isinstance(command, Release):
                self._committed(core, command.progress, asked_at_s, now_s)
                state = core.partitions.get(command.partition)
                is_claim = state is not None and state.lease.is_claim
                self._ended(command.partition, command.progress.epoch, "released", now_s, is_claim=is_claim)
            case Renewed() if isinstance(command, Renew):
                for index, epoch in command.held:
                    if index not in answer.partitions and index not in answer.unreached:
                        self._ended(index, epoch, "lost", now_s)
            case StaleEpoch():
                state = core.partitions.get(getattr(command, "partition", -1))
                if state is not None and state.lease.epoch and not isinstance(command, Acquire):
                    self._ended(state.index, state.lease.epoch, "lost", now_s)

    def acted(self, state: PartitionState, request: KeyRequest) -> None:
        """A key request is in effect from now on."""
        now_s = self._monotonic()
        about = {"partition": state.index, "epoch": state.lease.epoch, "key_hash": key_hash(request.key)}
        if request.kind == KeyAction.SKIP and request.offset is not None:
            self._event("skipped", now_s, offset=request.offset, **about)
        elif request.kind == KeyAction.RESUME:
            self._event("resumed", now_s, **about)

    def _granted(self, partition: int, answer: Granted, asked_at_s: float, now_s: float) -> None:
        if answer.finished:
            self._claimed[partition, answer.epoch] = BitMap64.deserialize(answer.finished)
        self._event(
            "claimed" if answer.is_claim else "granted",
            asked_at_s,
            now_s,
            partition=partition,
            epoch=answer.epoch,
            offset=answer.offset,
            finished=answer.finished,
        )

    def _committed(self, core: ConsumerCore, progress: Progress, asked_at_s: float, now_s: float) -> None:
        state = core.partitions.get(progress.partition)
        finished = b""
        if progress.finished:
            place = progress.partition, progress.epoch
            every = BitMap64.deserialize(progress.finished)
            new = every - self._claimed.get(place, BitMap64())
            self._claimed[place] = every
            finished = new.serialize() if new else b""
        self._event(
            "committed",
            asked_at_s,
            now_s,
            partition=progress.partition,
            epoch=progress.epoch,
            offset=progress.offset,
            finished=finished,
            parked=tuple((one.partition, one.offset) for lot in progress.lots for one in lot.added),
            unparked=tuple(place for lot in progress.lots for place in lot.removed),
            is_claim=state is not None and state.lease.is_claim,
        )

    def _ended(self, partition: int, epoch: int, why: str, now_s: float, *, is_claim: bool = False) -> None:
        self._claimed.pop((partition, epoch), None)
        self._event("ended", now_s, partition=partition, epoch=epoch, why=why, is_claim=is_claim)

    def _moved(self, core: ConsumerCore, command: Move, answer: object, now_s: float) -> None:
        state = core.partitions.get(command.partition)
        if isinstance(answer, Done) and state is not None and state.progress.move_batch is command.batch:
            for message in [one for move in state.progress.moves_in_flight for one in move.messages]:
                self._event("moved", now_s, partition=state.index, epoch=state.lease.epoch, offset=message.offset)

    def _event(self, kind: str, at_s: float, until_s: float | None = None, **fields: Any) -> None:
        at_ns = self._anchor_ns + round(at_s * 1e9)
        until_ns = at_ns if until_s is None else self._anchor_ns + round(until_s * 1e9)
        self._events.append(TraceEvent(kind, at_ns, until_ns, **fields))

    # Files

    def _write(self, kind: int, body: bytes) -> None:
        self._chunk_number += 1
        head = _encoder.encode(TraceHead(*self._names, self._chunk_number, self._anchor_ns, self._lone_kind))
        content = head + body
        chunk = HEAD.pack(MAGIC, VERSION, kind, 0, len(head), len(body), xxh3_64_intdigest(content)) + content
        try:
            self._rotate(len(chunk))
            assert self._file is not None
            if os.write(self._file, chunk) != len(chunk):
                raise OSError("the disk is full")
            self._written_bytes += len(chunk)
        except OSError as error:
            self._is_over = True
            _log.error("consumer.trace_ended", folder=str(self._folder), consumer=self._names[2], error=str(error))

    def _rotate(self, more_bytes: int) -> None:
        if self._file is not None and self._written_bytes + more_bytes > self._file_bytes:
            os.close(self._file)
            self._file = None
        if self._file is None:
            self._file_number += 1
            self._written_bytes = 0
            path = self._folder / f"{self._names[2]}-{self._file_number:06}{SUFFIX}"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)


# Reading


class TraceChunk(msgspec.Struct, frozen=True):
    kind: int
    head: TraceHead
    body: memoryview


_head_decoder = msgspec.msgpack.Decoder(TraceHead)
_runs_decoder = msgspec.msgpack.Decoder(list[TraceRun])
_events_decoder = msgspec.msgpack.Decoder(list[TraceEvent])


def chunks(content: bytes | memoryview, kinds: Sequence[int] = (RUNS, EVENTS)) -> Iterator[TraceChunk]:
    """The complete chunks of a file, up to the first incomplete chunk, where the writer was cut.

    Raises InvalidInput if the content is no trace.
    """
    view = memoryview(content)
    at = 0
    while at + HEAD.size <= len(view):
        magic, version, kind, _, head_bytes, body_bytes, checksum = HEAD.unpack_from(view, at)
        if magic != MAGIC or version > VERSION:
            if at == 0:
                raise InvalidInput("not a trace of inturn, or a trace of a newer version")
            return
        start, stop = at + HEAD.size, at + HEAD.size + head_bytes + body_bytes
        if stop > len(view) or xxh3_64_intdigest(view[start:stop]) != checksum:
            return
        if kind in kinds:
            head = _head_decoder.decode(view[start : start + head_bytes])
            yield TraceChunk(kind, head, view[start + head_bytes : stop])
        at = stop


def runs_of(chunk: TraceChunk) -> list[TraceRun]:
    return _runs_decoder.decode(chunk.body)


def events_of(chunk: TraceChunk) -> list[TraceEvent]:
    return _events_decoder.decode(chunk.body)
