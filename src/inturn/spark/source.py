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
from inturn.model.errors import InvalidInput
from inturn.model.logs import get_logger
from inturn.spark.arrivals import Arrivals
from inturn.spark.connections import connected, disconnect
from inturn.spark.filters import Wanted, pushed
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
        parse_options(self.options)  # so that load() tells what is wrong
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._options(is_streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(self._options(is_streaming=True), schema)

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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrivals": None}

    # The seam for a query that names a group: who holds its leases is to be told from here how far it is.

    def _done_below(self, offsets: ByPartition) -> None:
        """All messages below these offsets are dealt with by the sink. Spark says so after each micro-batch."""

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
        asked = {one: offset for one, offset in begin.items() if offset < until.get(one, 0)}
        # A partition that is new has no beginning yet; whatever there is of it is all of it.
        begin |= kept_within(subject, extents, asked, self._options.fail_on_data_loss)
        return self._ranges(begin, until)

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        self._done_below(parse_offsets(self._options.subject, end))

    def stop(self) -> None:
        self._arrivals = None
        disconnect(self._options.target)
