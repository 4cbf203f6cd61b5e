"""Traces as DataFrames. Files are decoded column by column, a chunk at once: no row passes through Python by itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from inturn.consumer.trace import (
    ALONE,
    EVENTS,
    OF_KEY,
    RUNS,
    SUFFIX,
    TraceChunk,
    TraceRun,
    chunks,
    events_of,
    runs_of,
)
from inturn.model.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

TracePaths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# One row per call of a handler and message. `lane_kind`: 0 a message on its own, 1 a key, 2 the whole partition.
RUN_SCHEMA = (
    "subject string, group string, partition int, offset bigint, lane_kind int, key_hash bigint, owner string, "
    "epoch bigint, attempt int, result int, start_ns bigint, end_ns bigint, seq bigint"
)
_PLACES = "array<struct<partition: int, offset: bigint>>"
# What happened beside the runs: see `TraceEvent`. `by_node`: as the node decided it, not as a consumer heard of it.
EVENT_SCHEMA = (
    "subject string, group string, owner string, seq bigint, kind string, at_ns bigint, until_ns bigint, "
    "partition int, epoch bigint, offset bigint, key_hash bigint, why string, finished array<bigint>, "
    f"parked {_PLACES}, unparked {_PLACES}, is_claim boolean, by_node boolean"
)
_BATCH_ROWS = 1 << 14  # a batch for Spark has at least so many rows, if there are
_CHUNK_ROWS_MAX = 1 << 32  # of one chunk, far more than there can be: `seq` is number of the chunk, number in it


@dataclass(frozen=True, slots=True)
class Traces:
    """What consumers recorded: `RUN_SCHEMA` and `EVENT_SCHEMA`."""

    runs: DataFrame
    events: DataFrame


def read_traces(spark: SparkSession, paths: TracePaths) -> Traces:
    """The trace files in these folders, or these files; anything that Spark can read a file from."""
    every = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    names = [os.fspath(path) for path in every]
    if not names:
        raise InvalidInput("no trace folder; give the one that consumers were told with ConsumerSettings(trace=…)")
    for name in names:
        if "://" not in name and not os.path.exists(name):
            raise NotFound("trace folder", name, "give the one of ConsumerSettings(trace=…)")
    files = (
        spark.read.format("binaryFile")
        .option("pathGlobFilter", f"*{SUFFIX}")
        .option("recursiveFileLookup", "true")
        .load(names)
        .select("path", "content")
    )
    return Traces(files.mapInArrow(_run_batches, RUN_SCHEMA), files.mapInArrow(_event_batches, EVENT_SCHEMA))


def _contents(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, memoryview]]:
    for batch in batches:
        for path, content in zip(batch.column(0), batch.column(1), strict=True):
            yield path.as_py(), memoryview(content.as_buffer())


def _chunks_of(path: str, content: memoryview, kind: int) -> Iterator[TraceChunk]:
    try:
        yield from chunks(content, (kind,))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


def _run_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A chunk may have a few rows only; Spark is sent larger batches, because each one costs time of its own."""
    small: list[pa.RecordBatch] = []
    count = 0
    for path, content in _contents(batches):
        for chunk in _chunks_of(path, content, RUNS):
            batch = _run_batch(chunk)
            small.append(batch)
            count += batch.num_rows
            if count >= _BATCH_ROWS:
                yield from _merged(small)
                small, count = [], 0
    yield from _merged(small)


def _merged(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    import pyarrow as pa

    return pa.Table.from_batches(batches).combine_chunks().to_batches() if batches else []


def _run_batch(chunk: TraceChunk) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    head, runs = chunk.head, runs_of(chunk)
    run_counts = [len(run.offsets) for run in runs]
    count = sum(run_counts)
    firsts = [0, *accumulate(run_counts)][: len(runs)]  # of the messages of all runs
    starts_ns, ends_ns = _times(runs, run_counts, firsts, head.anchor_ns)

    parts = [(*part[:2], first + part[2]) for run, first in zip(runs, firsts, strict=True) for part in run.parts]
    partitions, epochs, part_firsts = np.array(parts, np.int64).reshape(-1, 3).T
    part_counts = np.diff(part_firsts, append=count)
    attempts, results = np.ones(count, np.int32), np.zeros(count, np.int32)
    for run, first in zip(runs, firsts, strict=True):
        for at, attempt, result in run.odd:
            attempts[first + at], results[first + at] = attempt, result
    hashes, has_hash = _message_hashes(runs, count)
    return pa.RecordBatch.from_pydict(
        {
            "subject": _same(head.subject, count),
            "group": _same(head.group, count),
            "partition": pa.array(np.repeat(partitions.astype(np.int32), part_counts)),
            "offset": pa.array(_flat((run.offsets for run in runs), np.int64, count)),
            "lane_kind": pa.array(np.where(has_hash, OF_KEY, head.lone_kind).astype(np.int32)),
            "key_hash": pa.array(hashes, mask=~has_hash),
            "owner": _same(head.owner, count),
            "epoch": pa.array(np.repeat(epochs, part_counts)),
            "attempt": pa.array(attempts),
            "result": pa.array(results),
            "start_ns": pa.array(starts_ns),
            "end_ns": pa.array(ends_ns),
            "seq": pa.array(np.arange(count, dtype=np.int64) + head.number * _CHUNK_ROWS_MAX),
        }
    )


def _flat(lists: Iterable[Sequence[Any]], kind: Any, count: int = -1) -> Any:
    import numpy as np

    return np.fromiter(chain.from_iterable(lists), kind, count)


def _times(
    runs: Sequence[TraceRun], run_counts: Sequence[int], firsts: Sequence[int], anchor_ns: int
) -> tuple[Any, Any]:
    """A message starts at the last mark before it, which is the end of the one before."""
    import numpy as np

    # The start of a run is its mark of nothing; so the marks of all runs are one sequence.
    bases = np.repeat(np.array(firsts, np.int64), [1 + len(run.marks) for run in runs])
    marks = _flat(((0, *run.marks) for run in runs), np.int64) + bases
    marks_ns = _wall_ns(_flat(((run.start_s, *run.marks_s) for run in runs), np.float64), anchor_ns)
    count = sum(run_counts)
    starts_ns = marks_ns[np.searchsorted(marks, np.arange(count), "right") - 1]
    ends_ns = np.append(starts_ns[1:], 0)
    run_ends_s = np.array([run.marks_s[-1] if run.marks_s else run.start_s for run in runs])
    ends_ns[np.array(firsts, np.int64) + np.array(run_counts, np.int64) - 1] = _wall_ns(run_ends_s, anchor_ns)
    return starts_ns, ends_ns


def _message_hashes(runs: Sequence[TraceRun], count: int) -> tuple[Any, Any]:
    """And which messages have one."""
    import numpy as np

    if not any(run.hashes for run in runs):
        return np.zeros(count, np.int64), np.zeros(count, bool)
    every = list(chain.from_iterable(run.hashes for run in runs))
    has_hash = np.ones(len(every), bool)
    if None in every:
        has_hash = np.array([one is not None for one in every])
        every = [0 if one is None else one for one in every]
    hashes = np.array(every, np.uint64).view(np.int64)
    if any(run.counts for run in runs):
        counts = _flat((run.counts or repeat(1, len(run.hashes)) for run in runs), np.int64)  # type: ignore[misc]
        hashes, has_hash = np.repeat(hashes, counts), np.repeat(has_hash, counts)
    return hashes, has_hash


def _wall_ns(seconds: Any, anchor_ns: int) -> Any:
    import numpy as np

    return np.rint(seconds * 1e9).astype(np.int64) + anchor_ns


def _same(text: str, count: int) -> pa.Array[Any]:
    import pyarrow as pa

    return pa.repeat(pa.scalar(text, pa.string()), count)


def _event_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyroaring import BitMap64

    place = pa.list_(pa.struct([("partition", pa.int32()), ("offset", pa.int64())]))
    schema = pa.schema(
        [
            *((name, pa.string()) for name in ("subject", "group", "owner")),
            ("seq", pa.int64()),
            ("kind", pa.string()),
            *((name, pa.int64()) for name in ("at_ns", "until_ns")),
            ("partition", pa.int32()),
            *((name, pa.int64()) for name in ("epoch", "offset", "key_hash")),
            ("why", pa.string()),
            ("finished", pa.list_(pa.int64())),
            ("parked", place),
            ("unparked", place),
            ("is_claim", pa.bool_()),
            ("by_node", pa.bool_()),
        ]
    )
    for path, content in _contents(batches):
        for chunk in _chunks_of(path, content, EVENTS):
            head = chunk.head
            rows = [
                {
                    "subject": head.subject,
                    "group": head.group,
                    "owner": head.owner,
                    "seq": head.number * _CHUNK_ROWS_MAX + number,
                    "kind": event.kind,
                    "at_ns": event.at_ns,
                    "until_ns": event.until_ns,
                    "partition": event.partition,
                    "epoch": event.epoch,
                    "offset": event.offset,
                    "key_hash": event.key_hash,
                    "why": event.why,
                    "finished": list(BitMap64.deserialize(event.finished)) if event.finished else [],
                    "parked": [{"partition": partition, "offset": offset} for partition, offset in event.parked],
                    "unparked": [{"partition": partition, "offset": offset} for partition, offset in event.unparked],
                    "is_claim": event.is_claim,
                    "by_node": False,
                }
                for number, event in enumerate(events_of(chunk))
            ]
            yield pa.RecordBatch.from_pylist(rows, schema)


__all__ = ["ALONE", "EVENT_SCHEMA", "RUN_SCHEMA", "TracePaths", "Traces", "read_traces"]
