"""A trace: what a consumer recorded of its work, in files, for an audit.

While a worker goes through a run it notes the time at which each message ended, which is the time at which the next
one started, and per lane the key and the offsets. Nothing is computed there; keys are hashed and columns are made when
the notes are encoded, a commit's worth at once. That is what makes it cheap enough to be left on.

A file is a sequence of chunks, each with a checksum: a chunk that was cut by a kill is the end of what is readable, and
is never taken for something else. Before a commit is sent, what it tells of is written (handed to the operating system,
not synced), but for runs that have not ended yet. A trace that ends without the mark of a clean end was cut.

Times are nanoseconds of the wall clock, counted on the monotonic clock from one look at both per consumer: within a
trace they never go back.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from pyroaring import BitMap64
from xxhash import xxh3_64_intdigest, xxh64_intdigest

from inturn.consumer.outcome import Next, Outcome
from inturn.model.commands import (
    Acquire,
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
from inturn.model.errors import InvalidInput, StaleEpoch
from inturn.model.logs import get_logger
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import KeyAction, Order

if TYPE_CHECKING:
    from inturn.consumer.core import ConsumerCore
    from inturn.consumer.held import HeldPartition
    from inturn.consumer.lane import Lane, LaneKey
    from inturn.model.clock import Clock

SUFFIX = ".trace"
HASH_SEED = 42  # as Spark's xxhash64()
FILE_BYTES = 64 << 20
MAGIC = b"ITRC"
VERSION = 1
HEAD = struct.Struct("<4sBBHIIQ")  # magic, version, kind of chunk, nothing, bytes of the head, of the body, checksum
RUNS, EVENTS = 1, 2  # kinds of chunks
PENDING_MAX = 1 << 16  # messages noted and not encoded: so many at once are quick to encode

ALONE, OF_KEY, OF_PARTITION = 0, 1, 2  # kinds of lanes: a message on its own, a key, all without a key or all at all
SUCCESS, MOVED, FAILED, EXCEPTION, ROLLBACK, CRASHED = range(6)  # results
RESULTS = ("success", "moved", "failed", "exception", "rollback", "crashed")

_log = get_logger("inturn.consumer")
_encoder = msgspec.msgpack.Encoder()
Place: TypeAlias = tuple[int, int]  # partition, offset


class TraceHead(msgspec.Struct, frozen=True):
    """What all of a chunk has in common; how many there are of what, in a chunk of runs."""

    subject: str
    group: str
    owner: str
    number: int  # counts the chunks of a trace
    anchor_ns: int = 0  # at 0 s of the monotonic clock
    runs: int = 0
    parts: int = 0
    lanes: int = 0
    messages: int = 0
    odd: int = 0


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened beside the runs. `kind` says what the rest means:

    opened, closed   the trace; `why` is the order of the group
    granted          a lease, with what is done by then: all below `offset`, and `finished`
    claimed          slots of a partition under somebody else's lease
    ended            a lease, because it was released, or found lost
    committed        taken by the node: `finished` is what is new since the last one of this epoch
    skipped, moved   a message that was given up by name, or is safe in another subject
    resumed          a key whose attempts count anew
    """

    kind: str
    at_ns: int  # when it was asked for, where it was
    until_ns: int  # when it was answered
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


class Notes:
    """What one run did. Its worker writes without a lock; nobody else looks before the run is over."""

    __slots__ = ("attempts", "began_at", "counts", "ends", "keys", "offsets", "parts", "results", "start_s")

    def __init__(self) -> None:
        self.start_s = 0.0
        self.ends: list[float] = []  # of the messages, one after the other; each is the start of the next
        self.offsets: list[int] = []
        self.keys: list[LaneKey] = []  # of the lanes
        self.counts: list[int] = []  # messages of each lane
        self.parts: list[tuple[int, int, int]] = []  # partition, epoch, the first of its lanes
        self.attempts: dict[int, int] = {}  # by the number of the message; those that are not there: 1
        self.results: dict[int, int] = {}  # those that are not there: success
        self.began_at = 0  # in its lane: the first message that it was given out

    def part(self, held: HeldPartition) -> None:
        """The lanes from here on are of this partition."""
        self.parts.append((held.index, held.epoch, len(self.keys)))

    def leave(self, lane: Lane) -> None:
        """Before anybody else may have the lane: what was given out since `began_at` is over, one way or another."""
        first, stop = self.began_at, lane.at
        if stop == first + 1:
            self.keys.append(lane.key)
            self.counts.append(1)
            self.offsets.append(lane.messages[first].offset)
        elif stop > first:
            self.keys.append(lane.key)
            self.counts.append(stop - first)
            self.offsets += [one.offset for one in lane.messages[first:stop]]

    def attempt(self, given: Sequence[Message], attempt: int) -> None:
        if attempt > 1:
            first = len(self.ends)
            self.attempts.update(dict.fromkeys(range(first, first + len(given)), attempt))

    def settled(self, given: Sequence[Message], outcome: Outcome, asked_at_s: float, now_s: float) -> None:
        result = _result(outcome)
        if result != SUCCESS:
            first = len(self.ends)
            self.results.update(dict.fromkeys(range(first, first + len(given)), result))
        self.ends += [asked_at_s] * (len(given) - 1)
        self.ends.append(now_s)


def _result(outcome: Outcome) -> int:
    match outcome.next:
        case Next.DONE | Next.PASS | Next.KEEP:
            return SUCCESS
        case Next.ROLLBACK:
            return ROLLBACK
    return FAILED if outcome.kind is ResultKind.FAILED else EXCEPTION


class Trace:
    """One writer per consumer. `add` and `flush` may be called from any thread.

    A disk that fails must not stop the work: the trace ends there, unclean, and the log says so.
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
        self._noted: deque[Notes] = deque()
        self._noted_count = 0
        self._events: list[TraceEvent] = []
        self._claimed: dict[tuple[int, int], BitMap64] = {}  # by partition and epoch: told as finished before
        self._file: int | None = None
        self._file_number = self._written_bytes = self._chunk_number = 0
        self._is_over = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"trace folder {str(folder)!r} cannot be made: {error.strerror}") from None
        self._event("opened", clock.monotonic(), why=order.value)

    def notes(self) -> Notes:
        return Notes()

    def add(self, notes: Notes) -> None:
        """The run is over."""
        self._noted.append(notes)
        self._noted_count += len(notes.ends)
        if self._noted_count > PENDING_MAX:
            self.flush()

    def flush(self) -> None:
        """Hand all that was noted to the operating system."""
        with self._lock:
            noted = [self._noted.popleft() for _ in range(len(self._noted))]
            events, self._events = self._events, []
            self._noted_count = 0
            if self._is_over:
                return
            if any(notes.ends for notes in noted):
                self._write(RUNS, *_encode_runs(noted))
            if events:
                self._write(EVENTS, (), _encoder.encode(events))

    def end(self, *, is_clean: bool) -> None:
        """Nothing comes any more; `is_clean`: and nothing of the consumer's work is missing."""
        if is_clean:
            self._event("closed", self._monotonic())
        self.flush()
        with self._lock:
            self._is_over = True
            if self._file is not None:
                os.close(self._file)
                self._file = None

    # What the consumer hears from the node

    def answered(self, core: ConsumerCore, command: Command, answer: object, now_s: float) -> None:
        """Before the core is told of it."""
        asked_at_s = core.asked_at_s(command)
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
                    else:
                        self._ended(progress.partition, progress.epoch, "lost", now_s)
            case Done() if isinstance(command, Release):
                self._committed(core, command.progress, asked_at_s, now_s)
                self._ended(command.progress.partition, command.progress.epoch, "released", now_s)
            case Renewed() if isinstance(command, Renew):
                for index, epoch in command.held:
                    if index not in answer.partitions:
                        self._ended(index, epoch, "lost", now_s)
            case StaleEpoch():
                held = core.held.get(getattr(command, "partition", -1))
                if held is not None and held.epoch and not isinstance(command, Acquire):
                    self._ended(held.index, held.epoch, "lost", now_s)

    def acted(self, held: HeldPartition, request: KeyRequest) -> None:
        """What somebody asked for counts from here on."""
        now_s = self._monotonic()
        about = {"partition": held.index, "epoch": held.epoch, "key_hash": key_hash(request.key)}
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
        held = core.held.get(progress.partition)
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
            is_claim=held is not None and held.is_claim,
        )

    def _ended(self, partition: int, epoch: int, why: str, now_s: float) -> None:
        self._claimed.pop((partition, epoch), None)
        self._event("ended", now_s, partition=partition, epoch=epoch, why=why)

    def _moved(self, core: ConsumerCore, command: Move, answer: object, now_s: float) -> None:
        held = core.held.get(command.partition)
        if isinstance(answer, Done) and held is not None and held.moving_batch is command.batch:
            for message in [one for moving in held.moving_now for one in moving.messages]:
                self._event("moved", now_s, partition=held.index, epoch=held.epoch, offset=message.offset)

    def _event(self, kind: str, at_s: float, until_s: float | None = None, **fields: Any) -> None:
        at_ns = self._anchor_ns + round(at_s * 1e9)
        until_ns = at_ns if until_s is None else self._anchor_ns + round(until_s * 1e9)
        self._events.append(TraceEvent(kind, at_ns, until_ns, **fields))

    # Files

    def _write(self, kind: int, counts: Sequence[int], body: bytes) -> None:
        self._chunk_number += 1
        head = _encoder.encode(TraceHead(*self._names, self._chunk_number, self._anchor_ns, *counts))
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


def _encode_runs(noted: Sequence[Notes]) -> tuple[Sequence[int], bytes]:
    noted = [notes for notes in noted if notes.ends]
    keys: list[LaneKey] = []
    counts, ends, offsets = array("I"), array("d"), array("q")
    starts, run_counts = array("d"), array("I")
    partitions, epochs, part_lanes = array("q"), array("q"), array("I")
    odd_at, odd_attempts, odd_results = array("I"), array("I"), array("I")
    for notes in noted:
        base = len(ends)
        if notes.attempts or notes.results:
            for at in sorted(notes.attempts.keys() | notes.results.keys()):
                odd_at.append(base + at)
                odd_attempts.append(notes.attempts.get(at, 1))
                odd_results.append(notes.results.get(at, SUCCESS))
        starts.append(notes.start_s)
        run_counts.append(len(notes.ends))
        firsts = [first for _, _, first in notes.parts]
        for (partition, epoch, first), stop in zip(notes.parts, [*firsts[1:], len(notes.keys)], strict=True):
            partitions.append(partition)
            epochs.append(epoch)
            part_lanes.append(stop - first)
        keys += notes.keys
        counts.fromlist(notes.counts)
        ends.fromlist(notes.ends)
        offsets.fromlist(notes.offsets)
    kinds, hashes = _encode_keys(keys)
    columns = (starts, run_counts, partitions, epochs, part_lanes, kinds, hashes, counts, offsets, ends)
    body = b"".join([column.tobytes() for column in (*columns, odd_at, odd_attempts, odd_results)])
    return (len(starts), len(partitions), len(keys), len(ends), len(odd_at)), body


def _encode_keys(keys: list[LaneKey]) -> tuple[array[int], array[int]]:
    hash_of, seed = xxh64_intdigest, HASH_SEED
    try:
        return array("B", [OF_KEY]) * len(keys), array("Q", [hash_of(key, seed) for key in keys])  # type: ignore[arg-type]
    except TypeError:  # not all of them are keys
        kinds = array("B", [_lane_kind(key) for key in keys])
        return kinds, array("Q", [hash_of(key, seed) if isinstance(key, bytes) else 0 for key in keys])


def _lane_kind(key: LaneKey) -> int:
    return OF_KEY if isinstance(key, bytes) else OF_PARTITION if key is None else ALONE


# Reading


class TraceChunk(msgspec.Struct, frozen=True):
    kind: int
    head: TraceHead
    body: memoryview


_head_decoder = msgspec.msgpack.Decoder(TraceHead)
_events_decoder = msgspec.msgpack.Decoder(list[TraceEvent])


def chunks(content: bytes | memoryview, kinds: Sequence[int] = (RUNS, EVENTS)) -> Iterator[TraceChunk]:
    """The chunks of a file that are whole, up to the first that is not: that is where its writer was cut.

    Raises InvalidInput for what is no trace.
    """
    view = memoryview(content)
    at = 0
    while at + HEAD.size <= len(view):
        magic, version, kind, _, head_bytes, body_bytes, checksum = HEAD.unpack_from(view, at)
        if magic != MAGIC or version > VERSION:
            if at == 0:
                raise InvalidInput("not a trace of inturn, or of a newer version of it")
            return
        start, stop = at + HEAD.size, at + HEAD.size + head_bytes + body_bytes
        if stop > len(view) or xxh3_64_intdigest(view[start:stop]) != checksum:
            return
        if kind in kinds:
            head = _head_decoder.decode(view[start : start + head_bytes])
            yield TraceChunk(kind, head, view[start + head_bytes : stop])
        at = stop


def events_of(chunk: TraceChunk) -> list[TraceEvent]:
    return _events_decoder.decode(chunk.body)


class RunColumns(msgspec.Struct, frozen=True):
    """The columns of a chunk of runs as they are stored, by name; the slices that each of them takes of the body."""

    starts: memoryview
    run_counts: memoryview
    partitions: memoryview
    epochs: memoryview
    part_lanes: memoryview
    lane_kinds: memoryview
    hashes: memoryview
    lane_counts: memoryview
    offsets: memoryview
    ends: memoryview
    odd_at: memoryview
    odd_attempts: memoryview
    odd_results: memoryview


def columns_of(chunk: TraceChunk) -> RunColumns:
    """Little-endian, in this order: f8 u4, i8 i8 u4, u1 i8 u4, i8 f8, u4 u4 u4."""
    head = chunk.head
    sizes = [
        *(8 * head.runs, 4 * head.runs),
        *(8 * head.parts, 8 * head.parts, 4 * head.parts),
        *(head.lanes, 8 * head.lanes, 4 * head.lanes),
        *(8 * head.messages, 8 * head.messages),
        *(4 * head.odd, 4 * head.odd, 4 * head.odd),
    ]
    stops = list(accumulate(sizes))
    return RunColumns(*[chunk.body[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)])
