"""The data source `inturn`: the classes that Spark calls to plan and to read, for batch queries and streams.

Spark plans in a Python process beside the driver (for a stream, one process for the whole life of the query). `read`
runs in the workers of the executors, with a pickled copy of the reader. So readers store no connection: see
`connected`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from inturn.client import Connection
from inturn.model.errors import GroupConflict, InvalidInput, NotFound, StaleEpoch
from inturn.model.logs import get_logger
from inturn.model.settings import Order
from inturn.spark.ordered.lease_holder import LeaseHolder, LeasePosition
from inturn.spark.ordered.task import connected
from inturn.spark.source.filters import RowFilter, push_down
from inturn.spark.source.offsets import (
    Bound,
    ByPartition,
    Extent,
    batch_end,
    extents_of,
    offsets_json,
    parse_offsets,
    resolve,
    within_extents,
)
from inturn.spark.source.options import ReadOptions, parse_options
from inturn.spark.source.ordered import OUTCOMES, OrderedBatchReader, OrderedStreamReader, StreamMember
from inturn.spark.source.rows import COLUMNS, OffsetRange, check_columns, cut, read_rows
from inturn.transport.address import is_address

# An entry in the offsets of a stream, beside the entry of the subject (subject names have no space): partition → epoch
# in which the partition is read again from the committed offset, up to the same end. Without this entry Spark would see
# no change in the offsets and plan no micro-batch.
AGAIN = "read again"
Offsets = dict[str, dict[str, int]]
_log = get_logger("inturn.spark")


class InturnDataSource(DataSource):
    """`spark.read.format("inturn")` and `spark.readStream.format("inturn")`; see `inturn.spark.source.options`."""

    @classmethod
    def name(cls) -> str:
        return "inturn"

    def schema(self) -> StructType:
        options = parse_options(self.options)  # so that load() reports wrong options
        return COLUMNS if options.handler is None else OUTCOMES

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options(is_streaming=False)
        return BatchReader(options, schema) if options.handler is None else OrderedBatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._options(is_streaming=True)
        return StreamReader(options, schema) if options.handler is None else OrderedStreamReader(options)

    def _options(self, *, is_streaming: bool) -> ReadOptions:
        if "password" in self.options:
            _log.warning("spark.credentials_unused", option="password", why="servers accept a token, not a password")
        return parse_options(self.options, is_streaming=is_streaming)

    def __repr__(self) -> str:
        return f"InturnDataSource({', '.join(sorted(self.options))})"


class _RowReader:
    """The shared part of both row readers. Pickled with options and columns, without a connection."""

    def __init__(self, options: ReadOptions, columns: StructType) -> None:
        check_columns(columns)
        self._options = options
        self._columns = columns
        self._row_filter = RowFilter(slots=options.slots)
        self._driver_host = socket.gethostname()

    def _connection(self) -> Connection:
        return connected(self._options.target, "the driver", self._options.credentials)

    def _ranges(
        self, start: ByPartition, end: ByPartition, done: Mapping[int, bytes] | None = None
    ) -> list[OffsetRange]:
        """The ranges of a query or micro-batch, without finished offsets, divided as the options require. Partitions
        without matching rows are left out."""
        row_filter = self._row_filter
        ranges = []
        for partition in row_filter.partitions_of(self._connection().subject(self._options.subject)):
            if partition not in end:
                continue
            first = max(start.get(partition, 0), row_filter.first)
            until = min(end[partition], row_filter.until)
            if first < until:
                ranges.append(OffsetRange(partition, first, until, (done or {}).get(partition, b"")))
        return cut(ranges, self._options.min_partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a range; runs in a task."""
        if not isinstance(partition, OffsetRange):  # Spark passes a partition of its own for an empty plan
            return iter(())
        options = self._options
        if socket.gethostname() != self._driver_host and not is_address(options.target):
            raise InvalidInput(
                f"folder {options.target!r}: the driver's host is {self._driver_host!r}, this task is on "
                f"{socket.gethostname()!r}; folders are for local masters, use `inturn serve` and the option server"
            )
        node = connected(options.target, "a task", options.credentials).node
        return read_rows(node, options.subject, partition, self._row_filter, self._columns, options.fail_on_data_loss)


class BatchReader(_RowReader, DataSourceReader):
    """A batch query plans its offsets once and reads exactly the planned offsets."""

    @property
    def pushFilters(self) -> Callable[[list[Filter]], list[Filter]]:
        """Without `spark.sql.python.filterPushdown.enabled` Spark rejects a reader that overrides this method. The
        returned object looks like the method of the base class, so Spark accepts the reader and filters itself."""
        return _PushFilters(self)

    def _push(self, filters: list[Filter]) -> list[Filter]:
        self._row_filter, rest = push_down(self._row_filter, filters, self._options.subject)
        return rest

    def partitions(self) -> Sequence[OffsetRange]:
        options, node = self._options, self._connection().node
        extents = extents_of(node, options.subject)
        starting = options.start("earliest")
        start = resolve(node, options.subject, extents, options.starting_option, starting, options.group)
        end = resolve(node, options.subject, extents, options.ending_option, options.ending, options.group)
        start = within_extents(options.subject, extents, start, options.fail_on_data_loss)
        end = within_extents(options.subject, extents, end, options.fail_on_data_loss)
        return self._ranges(start, end)


class _PushFilters:
    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._reader._push(filters)


@dataclass(frozen=True, slots=True)
class _PlannedRange:
    """Spark has the rows up to `until`, planned under this epoch."""

    epoch: int
    until: int


class StreamReader(_RowReader, StreamMember, DataSourceStreamReader):
    """A micro-batch is the range between two sets of offsets; the same offsets give the same rows again.

    With a group the query is a member of the group: the query reads the partitions with held leases, from the committed
    offsets, and commits the rows that the sink has written. Spark's checkpoint only determines where micro-batches end.
    """

    def __init__(self, options: ReadOptions, columns: StructType) -> None:
        _RowReader.__init__(self, options, columns)
        StreamMember.__init__(self, options)
        self._planned: dict[int, _PlannedRange] = {}

    # The group

    def _held(self) -> LeaseHolder | None:
        options = self._options
        if options.group is None:
            return None
        if self._holder is None:
            start = "last" if options.start("latest").kind == "latest" else "first"
            self._planned = {}
            self._holder = LeaseHolder(
                self._connection(), options.subject, options.group, order=self._order(options.group), start=start
            )
            self._holder.start()
            self._holder.wait_at_start(is_bounded=self._target is not None)
        return self._holder

    def _order(self, group: str) -> Order:
        """The order option of the query, or the order of the other members. Rows are always in partition order."""
        if self._options.order is not None:
            return self._options.order
        try:
            order = Order(self._connection().group(self._options.subject, group).describe().order or Order.KEY)
        except NotFound:
            return Order.KEY
        if order is Order.NONE:
            raise GroupConflict(
                group,
                "its members use order='none' and retry failed messages, rows have no handler; use another group",
            )
        return order

    def _check_parked(self, positions: dict[int, LeasePosition]) -> dict[int, LeasePosition]:
        """Return the positions. If keys are parked, hand back and raise GroupConflict: rows must not overtake parked
        keys."""
        parked = sorted((key, index) for index, one in positions.items() for key in one.parked)
        if parked:
            self._hand_back()
            (key, index), group = parked[0], self._options.group
            raise GroupConflict(
                str(group),
                f"{len(parked)} of its keys are parked, the first is {key!r} in partition {index}; rows would overtake "
                "them. Resume or skip them first (`inturn key list`), or use the option handler",
            )
        return positions

    def _done_below(self, offsets: ByPartition) -> None:
        """Commit: the sink has written all messages below these offsets. Spark reports this after every micro-batch."""
        done = {index: one for index, one in self._planned.items() if offsets.get(index) == one.until}
        if not done or self._holder is None:
            return
        self._planned = {index: one for index, one in self._planned.items() if index not in done}
        try:
            self._holder.commit(
                {index: one.until for index, one in done.items()}, {index: one.epoch for index, one in done.items()}
            )
        except StaleEpoch as error:  # a different member has the lease now and reads the rows again
            _log.warning(
                "spark.commit_refused", subject=self._options.subject, group=self._options.group, why=str(error)
            )

    def _plan(self, holder: LeaseHolder, until: ByPartition) -> dict[int, LeasePosition]:
        """The start positions of a micro-batch with these ends. Messages that other members have finished are left
        out."""
        if not until:
            return {}
        held = self._check_parked(holder.wait_for_work(until))
        positions = {index: one for index, one in held.items() if one.offset < until[index]}
        self._planned |= {index: _PlannedRange(one.epoch, until[index]) for index, one in positions.items()}
        holder.claim({index: one.epoch for index, one in positions.items()})
        return positions

    # Methods that Spark calls

    def initialOffset(self) -> Offsets:
        options, node = self._options, self._connection().node
        bound = options.start("latest")
        if self._held() is not None:
            bound = Bound("committed")  # the group exists now and was created at the chosen start
        extents = extents_of(node, options.subject)
        start = resolve(node, options.subject, extents, options.starting_option, bound, options.group)
        start = within_extents(options.subject, extents, start, options.fail_on_data_loss)
        return offsets_json(options.subject, start)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """The end of the next micro-batch. Without new messages, wait for a message up to `IDLE_WAIT_S`."""
        subject = self._options.subject
        begin = parse_offsets(subject, start)
        self._done_below(begin)
        first, end = self._extent(begin)
        if first == end and self._target is None:
            self._wait(begin | (self._latest or {}))
            first, end = self._extent(begin)
        if isinstance(limit, ReadMaxRows):
            end = batch_end(first, end, limit.max_rows)
        offsets = offsets_json(subject, end)
        back = {index for index, offset in end.items() if first[index] < offset == begin.get(index)}
        again = start.get(AGAIN, {}) | self._epochs(back)
        if again:
            offsets[AGAIN] = again
        if offsets == start and self._target is not None:
            self._end_with(index for index, target in self._target.items() if end.get(index, 0) < target)
        return offsets

    def _epochs(self, partitions: set[int]) -> dict[str, int]:
        positions = self._held_positions() if partitions else {}
        return {str(index): one.epoch for index, one in positions.items() if index in partitions}

    def _held_positions(self) -> dict[int, LeasePosition]:
        """The positions that may be read: held leases that are not wanted back."""
        holder = self._held()
        held = {} if holder is None else holder.positions()
        return self._check_parked({index: one for index, one in held.items() if not one.is_wanted_back})

    def _extent(self, begin: ByPartition) -> tuple[ByPartition, ByPartition]:
        """Start and maximum end of the next micro-batch. The end is the end of the log, or the target of AvailableNow.
        The range of a partition that a different member holds is empty."""
        extents = extents_of(self._connection().node, self._options.subject)
        self._check_beyond(extents, begin)
        self._latest = {partition: extent.end for partition, extent in extents.items()}
        end = begin | (self._latest if self._target is None else self._target)
        first = {index: begin.get(index, 0) for index in end}
        if self._options.group is not None:
            positions = self._held_positions()
            end = {index: offset if index in positions else first[index] for index, offset in end.items()}
            first |= {index: one.offset for index, one in positions.items() if index in end}
        return first, {index: max(offset, first[index]) for index, offset in end.items()}

    def _check_beyond(self, extents: dict[int, Extent], begin: ByPartition) -> None:
        """A log that ends below the offsets already read was replaced: report data loss."""
        ahead = {one: offset for one, offset in begin.items() if one not in extents or offset > extents[one].end}
        if ahead:
            within_extents(self._options.subject, extents, ahead, self._options.fail_on_data_loss)

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[OffsetRange]:
        subject = self._options.subject
        begin, until = parse_offsets(subject, start), parse_offsets(subject, end)
        done: dict[int, bytes] = {}
        holder = self._held()
        if holder is not None:
            before, again = start.get(AGAIN, {}), end.get(AGAIN, {})
            asked = {index for index, offset in until.items() if offset != begin.get(index, 0)}
            asked |= {int(index) for index, epoch in again.items() if epoch != before.get(index)}
            positions = self._plan(holder, {index: until[index] for index in asked})
            begin = {
                index: positions[index].offset if index in positions else offset for index, offset in until.items()
            }
            done = {index: one.done_below(until[index]) for index, one in positions.items()}
        extents = extents_of(self._connection().node, subject)
        nonempty = {one: offset for one, offset in begin.items() if offset < until.get(one, 0)}
        # A new partition has no start offset yet: read all of its messages.
        begin |= within_extents(subject, extents, nonempty, self._options.fail_on_data_loss)
        return self._ranges(begin, until, done)

    def commit(self, end: Offsets) -> None:
        self._done_below(parse_offsets(self._options.subject, end))
