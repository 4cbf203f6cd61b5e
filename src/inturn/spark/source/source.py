"""The data source `inturn`: what Spark calls to plan and to read, in batches and in streams.

Each method runs where Spark wants it: planning in a Python process beside the driver (one for the whole life of a
stream), `read` in the workers of the executors, with a copy of the reader. So readers keep no connection: every process
has its own, see `connections`.
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
from inturn.spark.ordered.lease_holder import HeldPlace, Holding
from inturn.spark.ordered.task import connected
from inturn.spark.source.filters import Wanted, pushed
from inturn.spark.source.offsets import (
    Bound,
    ByPartition,
    Extent,
    admitted,
    extents_of,
    kept_within,
    offsets_json,
    parse_offsets,
    resolve,
)
from inturn.spark.source.options import ReadOptions, parse_options
from inturn.spark.source.ordered import OUTCOMES, OrderedBatchReader, OrderedStreamReader, StreamMember
from inturn.spark.source.rows import COLUMNS, OffsetRange, check_columns, cut, read_rows
from inturn.transport.address import is_address

# In the offsets of a stream, beside the subject's own (which has no space in its name): partition → epoch in which it
# is read again from where the group stands, though it ends where it did. Else Spark would see nothing new.
AGAIN = "read again"
Offsets = dict[str, dict[str, int]]
_log = get_logger("inturn.spark")


class InturnDataSource(DataSource):
    """`spark.read.format("inturn")` and `spark.readStream.format("inturn")`; see `inturn.spark.source.options`."""

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
        if "password" in self.options:
            _log.warning(
                "spark.credentials_unused", option="password", why="servers ask for a token, not for a password"
            )
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
        return connected(self._options.target, "the driver", self._options.credentials)

    def _ranges(
        self, start: ByPartition, end: ByPartition, done: Mapping[int, bytes] | None = None
    ) -> list[OffsetRange]:
        """The work of a query or of a micro-batch, but for what is done, cut as the options want it. Only where
        something may be wanted."""
        wanted = self._wanted
        ranges = []
        for partition in wanted.partitions_of(self._connection().subject(self._options.subject)):
            if partition not in end:
                continue
            first = max(start.get(partition, 0), wanted.first)
            until = min(end[partition], wanted.until)
            if first < until:
                ranges.append(OffsetRange(partition, first, until, (done or {}).get(partition, b"")))
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
        node = connected(options.target, "a task", options.credentials).node
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


@dataclass(frozen=True, slots=True)
class _Planned:
    """Rows up to `until` are with Spark, under this epoch."""

    epoch: int
    until: int


class StreamReader(_Reading, StreamMember, DataSourceStreamReader):
    """A micro-batch is what is between two sets of offsets; the same offsets give the same rows again.

    With a group the query is a member of it: it reads the partitions whose leases it holds, from where the group
    stands, and commits what the sink has. What Spark's checkpoint says is only where micro-batches end.
    """

    def __init__(self, options: ReadOptions, columns: StructType) -> None:
        _Reading.__init__(self, options, columns)
        StreamMember.__init__(self, options)
        self._planned: dict[int, _Planned] = {}

    # The group

    def _held(self) -> Holding | None:
        options = self._options
        if options.group is None:
            return None
        if self._holding is None:
            start = "last" if options.start("latest").kind == "latest" else "first"
            self._planned = {}
            self._holding = Holding(
                self._connection(), options.subject, options.group, order=self._order(options.group), start=start
            )
            self._holding.start()
            self._holding.wait_at_start(is_bounded=self._target is not None)
        return self._holding

    def _order(self, group: str) -> Order:
        """What the other members keep to, unless the query says it; rows are in the order of their partition."""
        if self._options.order is not None:
            return self._options.order
        try:
            order = Order(self._connection().group(self._options.subject, group).describe().order or Order.KEY)
        except NotFound:
            return Order.KEY
        if order is Order.NONE:
            raise GroupConflict(
                group,
                "its members use order='none' and handle again what fails, rows have no handler; use another group",
            )
        return order

    def _check_parked(self, places: dict[int, HeldPlace]) -> dict[int, HeldPlace]:
        """The same. GroupConflict, and all is handed back, where keys are parked: nothing may go past them."""
        parked = sorted((key, index) for index, one in places.items() for key in one.parked)
        if parked:
            self._hand_back()
            (key, index), group = parked[0], self._options.group
            raise GroupConflict(
                str(group),
                f"{len(parked)} of its keys are parked, the first is {key!r} in partition {index}; rows would go past "
                "them. Resume or skip them first (`inturn key list`), or use the option handler",
            )
        return places

    def _done_below(self, offsets: ByPartition) -> None:
        """All messages below these offsets are dealt with by the sink. Spark says so after each micro-batch."""
        done = {index: one for index, one in self._planned.items() if offsets.get(index) == one.until}
        if not done or self._holding is None:
            return
        self._planned = {index: one for index, one in self._planned.items() if index not in done}
        try:
            self._holding.commit(
                {index: one.until for index, one in done.items()}, {index: one.epoch for index, one in done.items()}
            )
        except StaleEpoch as error:  # it is somebody else's by now, who reads these again
            _log.warning(
                "spark.commit_refused", subject=self._options.subject, group=self._options.group, why=str(error)
            )

    def _plan(self, holding: Holding, until: ByPartition) -> dict[int, HeldPlace]:
        """Where the rows of a micro-batch begin that ends there; what others have done meanwhile is left out."""
        if not until:
            return {}
        held = self._check_parked(holding.wait_for_work(until))
        places = {index: one for index, one in held.items() if one.offset < until[index]}
        self._planned |= {index: _Planned(one.epoch, until[index]) for index, one in places.items()}
        holding.keep_for_now({index: one.epoch for index, one in places.items()})
        return places

    # What Spark calls

    def initialOffset(self) -> Offsets:
        options, node = self._options, self._connection().node
        bound = options.start("latest")
        if self._held() is not None:
            bound = Bound("committed")  # now there is a group: it has begun where it was to begin
        extents = extents_of(node, options.subject)
        start = resolve(node, options.subject, extents, options.starting_option, bound, options.group)
        start = kept_within(options.subject, extents, start, options.fail_on_data_loss)
        return offsets_json(options.subject, start)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Where the next micro-batch ends. If there is nothing new, this waits for it for a moment."""
        subject = self._options.subject
        begin = parse_offsets(subject, start)
        self._done_below(begin)
        first, end = self._extent(begin)
        if first == end and self._target is None:
            self._wait(begin | (self._latest or {}))
            first, end = self._extent(begin)
        if isinstance(limit, ReadMaxRows):
            end = admitted(first, end, limit.max_rows)
        offsets = offsets_json(subject, end)
        back = {index for index, offset in end.items() if first[index] < offset == begin.get(index)}
        again = start.get(AGAIN, {}) | self._epochs(back)
        if again:
            offsets[AGAIN] = again
        if offsets == start and self._target is not None:
            self._end_with(index for index, target in self._target.items() if end.get(index, 0) < target)
        return offsets

    def _epochs(self, partitions: set[int]) -> dict[str, int]:
        places = self._held_places() if partitions else {}
        return {str(index): one.epoch for index, one in places.items() if index in partitions}

    def _held_places(self) -> dict[int, HeldPlace]:
        """Those that may be read."""
        holding = self._held()
        held = {} if holding is None else holding.places()
        return self._check_parked({index: one for index, one in held.items() if not one.is_wanted_back})

    def _extent(self, begin: ByPartition) -> tuple[ByPartition, ByPartition]:
        """Where the next micro-batch begins, and how far it may go: as far as there is something, or as was to be read
        now. In partitions that others hold there is nothing to do."""
        extents = extents_of(self._connection().node, self._options.subject)
        self._check_beyond(extents, begin)
        self._latest = {partition: extent.end for partition, extent in extents.items()}
        end = begin | (self._latest if self._target is None else self._target)
        first = {index: begin.get(index, 0) for index in end}
        if self._options.group is not None:
            places = self._held_places()
            end = {index: offset if index in places else first[index] for index, offset in end.items()}
            first |= {index: one.offset for index, one in places.items() if index in end}
        return first, {index: max(offset, first[index]) for index, offset in end.items()}

    def _check_beyond(self, extents: dict[int, Extent], begin: ByPartition) -> None:
        """A log that ends before what was read of it already is another one."""
        ahead = {one: offset for one, offset in begin.items() if one not in extents or offset > extents[one].end}
        if ahead:
            kept_within(self._options.subject, extents, ahead, self._options.fail_on_data_loss)

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[OffsetRange]:
        subject = self._options.subject
        begin, until = parse_offsets(subject, start), parse_offsets(subject, end)
        done: dict[int, bytes] = {}
        holding = self._held()
        if holding is not None:
            before, again = start.get(AGAIN, {}), end.get(AGAIN, {})
            asked = {index for index, offset in until.items() if offset != begin.get(index, 0)}
            asked |= {int(index) for index, epoch in again.items() if epoch != before.get(index)}
            places = self._plan(holding, {index: until[index] for index in asked})
            begin = {index: places[index].offset if index in places else offset for index, offset in until.items()}
            done = {index: one.done_below(until[index]) for index, one in places.items()}
        extents = extents_of(self._connection().node, subject)
        wanted = {one: offset for one, offset in begin.items() if offset < until.get(one, 0)}
        # A partition that is new has no beginning yet; whatever there is of it is all of it.
        begin |= kept_within(subject, extents, wanted, self._options.fail_on_data_loss)
        return self._ranges(begin, until, done)

    def commit(self, end: Offsets) -> None:
        self._done_below(parse_offsets(self._options.subject, end))
