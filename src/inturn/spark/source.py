"""The data source `inturn`: what Spark calls to plan and to read, in batches and in streams.

Each method runs where Spark wants it: planning in a Python process beside the driver (one for the whole life of a
stream), `read` in the workers of the executors, with a copy of the reader. So readers keep no connection: every process
has its own, see `connections`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from inturn.connection import Connection
from inturn.model.errors import InvalidInput, NotFound, StaleEpoch
from inturn.model.logs import get_logger
from inturn.model.settings import Order
from inturn.spark.arrivals import Arrivals
from inturn.spark.connections import connected, disconnect
from inturn.spark.filters import Wanted, pushed
from inturn.spark.holding import Holding
from inturn.spark.offsets import (
    ByPartition,
    Extent,
    admitted,
    extents_of,
    kept_within,
    offsets_json,
    parse_offsets,
    resolve,
)
from inturn.spark.options import SECRETS, ReadOptions, parse_options
from inturn.spark.ordered import OUTCOMES, OrderedBatchReader, OrderedStreamReader
from inturn.spark.rows import OffsetRange, cut, read_rows
from inturn.spark.schema import COLUMNS, check_columns
from inturn.wire.address import is_address

IDLE_WAIT_S = 1.0  # Spark asks again at once, 65 times a second, when there was nothing
_log = get_logger("inturn.spark")


class InturnDataSource(DataSource):
    """`spark.read.format("inturn")` and `spark.readStream.format("inturn")`; see `inturn.spark.options`."""

    @classmethod
    def name(cls) -> str:
        return "inturn"

    def schema(self) -> StructType:
        options = parse_options(self.options)  # so that load() tells what is wrong
        return COLUMNS if options.handler is None else OUTCOMES

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options(is_streaming=False)
        return BatchReader(options, schema) if options.handler is None else OrderedBatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._options(is_streaming=True)
        return StreamReader(options, schema) if options.handler is None else OrderedStreamReader(options)

    def _options(self, *, is_streaming: bool) -> ReadOptions:
        for name in SECRETS:
            if name in self.options:
                _log.warning("spark.credentials_unused", option=name, why="servers ask for no credentials yet")
        return parse_options(self.options, is_streaming=is_streaming)

    def __repr__(self) -> str:
        return f"InturnDataSource({', '.join(sorted(self.options))})"


class _Reading:
    """What both readers are made of. Pickled: options and columns, no connection."""

    def __init__(self, options: ReadOptions, columns: StructType) -> None:
        check_columns(columns)
        self._options = options
        self._columns = columns
        self._wanted = Wanted(slots=options.slots)
        self._driver_host = socket.gethostname()

    def _connection(self) -> Connection:
        return connected(self._options.target, "the driver")

    def _ranges(self, start: ByPartition, end: ByPartition) -> list[OffsetRange]:
        """The work of a query or of a micro-batch, cut as the options want it. Only where something may be wanted."""
        wanted = self._wanted
        ranges = []
        for partition in wanted.partitions_of(self._connection().subject(self._options.subject)):
            if partition not in end:
                continue
            first = max(start.get(partition, 0), wanted.first)
            until = min(end[partition], wanted.until)
            if first < until:
                ranges.append(OffsetRange(partition, first, until))
        return cut(ranges, self._options.min_partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        if not isinstance(partition, OffsetRange):  # Spark's own, in place of an empty plan
            return iter(())
        options = self._options
        if socket.gethostname() != self._driver_host and not is_address(options.target):
            raise InvalidInput(
                f"folder {options.target!r}: the driver's host is {self._driver_host!r}, this task is on "
                f"{socket.gethostname()!r}; folders are for local masters, use `inturn serve` and the option server"
            )
        node = connected(options.target, "a task").node
        return read_rows(node, options.subject, partition, self._wanted, self._columns, options.fail_on_data_loss)


class BatchReader(_Reading, DataSourceReader):
    """A query plans once which offsets it reads, and reads exactly those."""

    @property
    def pushFilters(self) -> Callable[[list[Filter]], list[Filter]]:
        """Where `spark.sql.python.filterPushdown.enabled` is not set, Spark refuses readers that have this method. This
        one looks like what every reader has: then Spark goes on, and does all filtering itself."""
        return _PushFilters(self)

    def _push(self, filters: list[Filter]) -> list[Filter]:
        self._wanted, rest = pushed(self._wanted, filters, self._options.subject)
        return rest

    def partitions(self) -> Sequence[OffsetRange]:
        options, node = self._options, self._connection().node
        extents = extents_of(node, options.subject)
        starting = options.start("earliest")
        start = resolve(node, options.subject, extents, options.starting_option, starting, options.group)
        end = resolve(node, options.subject, extents, options.ending_option, options.ending, options.group)
        start = kept_within(options.subject, extents, start, options.fail_on_data_loss)
        end = kept_within(options.subject, extents, end, options.fail_on_data_loss)
        return self._ranges(start, end)


class _PushFilters:
    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._reader._push(filters)


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A micro-batch is what is between two sets of offsets; the same offsets give the same rows again."""

    def __init__(self, options: ReadOptions, columns: StructType) -> None:
        super().__init__(options, columns)
        self._target: ByPartition | None = None  # AvailableNow: nothing behind it
        self._latest: ByPartition | None = None
        self._arrivals: Arrivals | None = None
        self._holding: Holding | None = None
        self._planned: dict[int, tuple[int, int]] = {}  # epoch and end of what was planned, by partition

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrivals": None, "_holding": None}

    # With a group: the query is a member, reads what it holds the leases of, and commits what the sink has

    def _held(self) -> Holding | None:
        if self._options.group is None:
            return None
        if self._holding is None:
            options = self._options
            bound = options.start("latest")
            start = "last" if bound.kind == "latest" else "first"
            order = self._connection_order()
            self._holding = Holding(self._connection(), options.subject, self._options.group, order=order, start=start)
            self._holding.start()
            self._holding.wait_at_start(is_bounded=self._target is not None)
        return self._holding

    def _connection_order(self) -> Order:
        """What the other members keep to; rows are in the order of their partition in any case."""
        assert self._options.group is not None
        try:
            told = self._connection().describe_group(self._options.subject, self._options.group).order
        except NotFound:
            told = None
        return Order.PARTITION if told is None else Order(told)

    def _done_below(self, offsets: ByPartition) -> None:
        """All messages below these offsets are dealt with by the sink. Spark says so after each micro-batch."""
        holding = self._held()
        if holding is None:
            return
        epochs = holding.epochs()
        done = {
            index: until
            for index, (epoch, until) in self._planned.items()
            if epochs.get(index) == epoch and until <= offsets.get(index, 0)
        }
        for index in done:
            del self._planned[index]
        try:
            holding.commit(done)
        except StaleEpoch as error:  # it goes to somebody else just now, who reads these again
            _log.warning(
                "spark.commit_refused", subject=self._options.subject, group=self._options.group, why=str(error)
            )

    def _only_held(self, begin: ByPartition, end: ByPartition) -> ByPartition:
        """Partitions that others hold stay where they are."""
        holding = self._held()
        if holding is None:
            return end
        epochs = holding.epochs()
        return {index: offset if index in epochs else begin.get(index, 0) for index, offset in end.items()}

    def _from_group(self, begin: ByPartition, until: ByPartition) -> ByPartition:
        """Where to begin: what the group has done meanwhile is not read again, whatever Spark's checkpoint says."""
        holding = self._held()
        if holding is None:
            return begin
        assert self._options.group is not None
        epochs = holding.epochs()
        described = self._connection().describe_group(self._options.subject, self._options.group)
        committed = {one.partition: one.committed for one in described.partitions}
        found = {}
        for index, offset in until.items():
            if index not in epochs:
                found[index] = offset  # nothing of it
                continue
            found[index] = max(begin.get(index, 0), committed.get(index, 0))
            self._planned[index] = (epochs[index], offset)
        return found

    # What Spark calls

    def initialOffset(self) -> dict[str, dict[str, int]]:
        options, node = self._options, self._connection().node
        extents = extents_of(node, options.subject)
        start = resolve(node, options.subject, extents, options.starting_option, options.start("latest"), options.group)
        start = kept_within(options.subject, extents, start, options.fail_on_data_loss)
        return offsets_json(options.subject, start)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        extents = extents_of(self._connection().node, self._options.subject)
        self._target = {partition: extent.end for partition, extent in extents.items()}

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        """Where the next micro-batch ends. If there is nothing new, this waits for it for a moment."""
        begin = parse_offsets(self._options.subject, start)
        self._done_below(begin)
        end = self._end(begin)
        if end == begin and self._target is None and self._wait(begin):
            end = self._end(begin)
        end = self._only_held(begin, end)
        if end == begin and self._target is not None:
            self._hand_back()  # that was the last call, and `stop` may not come
        if isinstance(limit, ReadMaxRows):
            end = admitted(begin, end, limit.max_rows)
        return offsets_json(self._options.subject, end)

    def _end(self, begin: ByPartition) -> ByPartition:
        """As far as there is something, or as was to be read now; never before the beginning."""
        extents = extents_of(self._connection().node, self._options.subject)
        self._check_beyond(extents, begin)
        self._latest = {partition: extent.end for partition, extent in extents.items()}
        end = self._latest if self._target is None else self._target
        return {partition: max(offset, begin.get(partition, 0)) for partition, offset in (begin | end).items()}

    def _check_beyond(self, extents: dict[int, Extent], begin: ByPartition) -> None:
        """A log that ends before what was read of it already is another one."""
        ahead = {one: offset for one, offset in begin.items() if one not in extents or offset > extents[one].end}
        if ahead:
            kept_within(self._options.subject, extents, ahead, self._options.fail_on_data_loss)

    def _wait(self, offsets: ByPartition) -> bool:
        if self._arrivals is None:
            self._arrivals = Arrivals(self._connection().node, self._options.subject)
        return self._arrivals.wait(offsets, IDLE_WAIT_S)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """For the progress of the query: as `latestOffset` saw it last, whatever was admitted."""
        return None if self._latest is None else offsets_json(self._options.subject, self._latest)

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> Sequence[OffsetRange]:
        subject = self._options.subject
        begin, until = parse_offsets(subject, start), parse_offsets(subject, end)
        extents = extents_of(self._connection().node, subject)
        begin = self._from_group(begin, until)
        asked = {one: offset for one, offset in begin.items() if offset < until.get(one, 0)}
        # A partition that is new has no beginning yet; whatever there is of it is all of it.
        begin |= kept_within(subject, extents, asked, self._options.fail_on_data_loss)
        return self._ranges(begin, until)

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        self._done_below(parse_offsets(self._options.subject, end))

    def _hand_back(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.stop()

    def stop(self) -> None:
        self._arrivals = None
        self._hand_back()
        disconnect(self._options.target)
