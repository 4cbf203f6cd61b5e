"""Rows of the data source: the columns, and tasks that read a range of offsets as Arrow batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from inturn.model.batch import StoredBatch, contents, is_intact, slots_of
from inturn.model.errors import ConnectionLost, InturnError, InvalidInput, LogDamaged, ServerStopping
from inturn.model.message import Outgoing
from inturn.model.routing import SLOT_COUNT
from inturn.model.settings import MIB
from inturn.protocol.commands import Answer, Node, Pulled, Read
from inturn.protocol.request import ask
from inturn.spark.ordered.task import unreachable
from inturn.spark.source.filters import RowFilter
from inturn.spark.source.offsets import extents_of, report_data_loss

COLUMNS = StructType(
    [
        StructField("subject", StringType(), nullable=False),
        StructField("partition", IntegerType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("slot", IntegerType(), nullable=False),
        StructField("key", BinaryType(), nullable=True),
        StructField("body", BinaryType(), nullable=False),
        StructField("tags", ArrayType(StringType(), containsNull=False), nullable=False),
        StructField("properties", MapType(StringType(), StringType(), valueContainsNull=False), nullable=False),
        StructField("born_at", TimestampType(), nullable=False),
        StructField("stored_at", TimestampType(), nullable=False),
    ]
)


def check_columns(asked: StructType) -> None:
    """Check a schema given by the user. A schema may omit columns, but not change columns; omitted columns are not
    built."""
    known = {field.name: field for field in COLUMNS}
    for field in asked:
        mine = known.get(field.name)
        if mine is None or mine.dataType.simpleString() != field.dataType.simpleString():
            raise InvalidInput(
                f"schema: there is no column '{field.name} {field.dataType.simpleString()}'; use some of "
                f"{', '.join(f'{one.name} {one.dataType.simpleString()}' for one in COLUMNS)}, or leave the schema out"
            )


def arrow_schema(asked: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects of the first batch, including nullability and names of list items."""
    return to_arrow_schema(asked, timezone="UTC")


READ_BYTES = 1 * MIB  # larger frames cost more waiting time than they save
ROWS_MAX = 65_536  # per Arrow batch: a stored batch may have many tiny or well compressed messages
_BORN_AT_MS_MAX = 9_000_000_000_000_000  # fits into 64 bits as microseconds; senders may write any number

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class OffsetRange(InputPartition):
    """The work of one task: the offsets `start <= offset < until` of a partition, without the offsets in `done`."""

    partition: int
    start: int
    until: int
    done: bytes = b""  # a roaring bitmap, or empty

    @property
    def value(self) -> str:
        """The text that Spark shows for the range."""
        return f"{self.partition}: {self.start}-{self.until}"


def cut(ranges: Sequence[OffsetRange], min_count: int | None) -> list[OffsetRange]:
    """Divide the larger ranges until there are at least `min_count` ranges, as far as the number of offsets allows."""
    total = sum(one.until - one.start for one in ranges)
    if min_count is None or len(ranges) >= min_count or total == 0:
        return list(ranges)
    size = max(1, total // min_count)
    cuts: list[OffsetRange] = []
    for one in ranges:
        length = one.until - one.start
        parts = min(length, max(1, -(-length // size)))
        ends = [one.start + length * part // parts for part in range(parts + 1)]
        cuts += [OffsetRange(one.partition, ends[part], ends[part + 1], one.done) for part in range(parts)]
    return cuts


def read_rows(
    node: Node, subject: str, work: OffsetRange, row_filter: RowFilter, columns: StructType, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of a range that match the filter, in offset order.

    Gaps are skipped. Raises NotFound if offsets of the range were removed and `fail_on_data_loss` is set. Raises
    LogDamaged as a reader does.
    """
    schema = arrow_schema(columns)
    done: Numbers = _offsets_in(work.done)
    for pulled in _pulls(node, subject, work, row_filter, fail_on_data_loss):
        parts = []
        for batch in pulled.batches:
            if batch.header.base_offset >= work.until:
                break
            if not is_intact(batch):
                raise LogDamaged(f"{subject}/{work.partition}", batch.header.base_offset, "a checksum does not fit")
            try:
                part = _batch_rows(batch, work, row_filter, done, schema.names)
            except InvalidInput as error:
                place = f"{subject}/{work.partition}"
                raise LogDamaged(place, batch.header.base_offset, str(error)) from error
            if part is not None:
                parts.append(part)
        yield from arrow_batches(Rows(subject, work.partition, parts), schema)


# Reading


def _pulls(
    node: Node, subject: str, work: OffsetRange, row_filter: RowFilter, fail_on_data_loss: bool
) -> Iterator[Pulled]:
    """All answers with batches of the range. The next read is in flight while the caller processes an answer."""
    slots = row_filter.slots.to_bytes()
    offset = work.start
    pending = _PendingRead(node, Read(subject, work.partition, offset, READ_BYTES, slots=slots))
    while True:
        pulled = pending.answer()
        if not pulled.batches or pulled.batches[0].header.base_offset > offset:
            _check_loss(node, subject, work, offset, fail_on_data_loss)
        if not pulled.batches:
            return
        offset = pulled.next_offset
        if offset < work.until:
            pending = _PendingRead(node, Read(subject, work.partition, offset, READ_BYTES, slots=slots))
        yield pulled
        if offset >= work.until:
            return


class _PendingRead:
    """A submitted read command. `answer` waits for the reply."""

    def __init__(self, node: Node, command: Read) -> None:
        self._node = node
        self._command = command
        self._answer: Answer | InturnError | None = None
        self._answered = threading.Event()
        node.submit(command, self._take)

    def _take(self, answer: Answer | InturnError) -> None:
        self._answer = answer
        self._answered.set()

    def answer(self) -> Pulled:
        self._answered.wait()
        if isinstance(self._answer, Pulled):
            return self._answer
        if isinstance(self._answer, InturnError) and not isinstance(self._answer, ConnectionLost | ServerStopping):
            raise self._answer
        try:
            return ask(self._node, self._command, Pulled)  # retries for a while
        except ConnectionLost as error:
            raise unreachable(error, "a task") from error


def _check_loss(node: Node, subject: str, work: OffsetRange, offset: int, fail_on_data_loss: bool) -> None:
    """No message is stored at this offset: either a gap, or data loss to report."""
    extent = extents_of(node, subject)[work.partition]
    if offset < extent.start:
        report_data_loss(subject, work.partition, offset, extent, fail_on_data_loss)
    elif work.until > extent.end:
        report_data_loss(subject, work.partition, work.until, extent, fail_on_data_loss)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The matching rows of one stored batch. Only lists of values are stored, not the messages: so the memory of a
    batch is reused for the next batch while still in the processor's cache."""

    count: int
    offsets: Numbers
    slots: Numbers
    stored_at_ms: int
    values: dict[str, list[Any]]  # column → values


_VALUES: dict[str, Callable[[Sequence[Outgoing]], list[Any]]] = {
    "key": lambda messages: [message.key for message in messages],
    "body": lambda messages: [message.body for message in messages],
    "tags": lambda messages: [message.tags for message in messages],
    "properties": lambda messages: [message.properties for message in messages],
    "born_at": lambda messages: [message.born_at_ms for message in messages],
}


def _offsets_in(finished: bytes) -> Numbers:
    offsets = BitMap64.deserialize(finished) if finished else ()
    return np.fromiter(offsets, np.int64, len(offsets))


def _batch_rows(
    batch: StoredBatch, work: OffsetRange, row_filter: RowFilter, done: Numbers, names: Sequence[str]
) -> BatchRows | None:
    """The matching rows of an intact batch. None if no row matches; often the slot vector shows this without
    decoding."""
    header = batch.header
    slots: Numbers = np.frombuffer(slots_of(batch), np.uint16)
    if slots.max() >= SLOT_COUNT:
        raise InvalidInput(f"a batch with a slot above {SLOT_COUNT - 1}")
    is_wanted: Numbers = np.frombuffer(row_filter.slots.flags, np.bool_)[slots]
    if not is_wanted.any():
        return None
    offsets: Numbers = np.arange(header.base_offset, header.next_offset, dtype=np.int64)
    is_wanted = is_wanted & (offsets >= work.start) & (offsets < work.until)
    if len(done):
        is_wanted &= ~np.isin(offsets, done)
    places: Numbers = np.flatnonzero(is_wanted)
    messages = contents(batch)
    if len(places) < header.count:
        messages = [messages[place] for place in places.tolist()]
    if row_filter.keys is not None:
        has_key = np.fromiter((message.key in row_filter.keys for message in messages), np.bool_, len(messages))
        places = places[has_key]
        messages = [message for message, is_kept in zip(messages, has_key.tolist(), strict=True) if is_kept]
    if not messages:
        return None
    offsets, slots = offsets[places], slots[places]
    values = {name: _VALUES[name](messages) for name in names if name in _VALUES}
    return BatchRows(len(messages), offsets, slots, header.stored_at_ms, values)


# Columns


class Rows:
    """Messages of one partition as columns. Columns are built on request."""

    def __init__(self, subject: str, partition: int, parts: Sequence[BatchRows]) -> None:
        self._subject = subject
        self._partition = partition
        self._parts = parts
        self.count = sum(part.count for part in parts)

    def column(self, field: pa.Field) -> pa.Array:
        """Build a column; `field` is an Arrow field of `COLUMNS`."""
        name, kind = field.name, field.type
        match name:
            case "subject":
                return pa.repeat(pa.scalar(self._subject, kind), self.count)
            case "partition":
                return pa.repeat(pa.scalar(self._partition, kind), self.count)
            case "offset":
                return pa.array(np.concatenate([part.offsets for part in self._parts]), kind)
            case "slot":
                return pa.array(np.concatenate([part.slots for part in self._parts]).astype(np.int32), kind)
            case "properties":
                return self._properties(kind)
            case "born_at":
                return self._born_at(kind)
            case "stored_at":
                times_ms = np.array([part.stored_at_ms for part in self._parts], np.int64)
                return _times(np.repeat(times_ms, [part.count for part in self._parts]), kind)
        return pa.array(self._values(name), kind)

    def _values(self, name: str) -> list[Any]:
        return list(chain.from_iterable(part.values[name] for part in self._parts))

    def _properties(self, kind: pa.DataType) -> pa.Array:
        properties = self._values("properties")
        ends = np.zeros(self.count + 1, np.int32)
        names: list[str] = []
        values: list[str] = []
        if any(properties):
            np.cumsum(np.fromiter(map(len, properties), np.int32, self.count), out=ends[1:])
            names += chain.from_iterable(properties)
            values += chain.from_iterable(one.values() for one in properties)
        items = (pa.array(one, pa.string()) for one in (names, values))
        return pa.MapArray.from_arrays(pa.array(ends), *items, type=kind)

    def _born_at(self, kind: pa.DataType) -> pa.Array:
        times_ms = self._values("born_at")
        try:
            numbers: Numbers = np.array(times_ms, np.int64)
        except OverflowError:
            numbers = np.array([min(one, _BORN_AT_MS_MAX) for one in times_ms], np.int64)
        return _times(np.clip(numbers, -_BORN_AT_MS_MAX, _BORN_AT_MS_MAX), kind)


def _times(times_ms: Numbers, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(times_ms), [None, pa.py_buffer(times_ms * 1000)])


def arrow_batches(rows: Rows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Arrow batches of at most `ROWS_MAX` rows; no batch if there are no rows."""
    if not rows.count:
        return
    batch = pa.RecordBatch.from_arrays([rows.column(field) for field in schema], schema=schema)
    for start in range(0, rows.count, ROWS_MAX):
        yield batch.slice(start, ROWS_MAX)
