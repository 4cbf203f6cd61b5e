"""The traces of the last act, read without Spark: who handled which message when.

All processes of a machine share the monotonic clock that traces are counted on, so their times are compared exactly.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import cast

from inturn.cli.demo.board import short
from inturn.consumer.trace import RESULTS, RUNS, SUFFIX, TraceChunk, chunks, columns_of
from inturn.model.message import Message
from inturn.testing.history import Event, HandlerEnd, HandlerResult, HandlerStart, History

_TASK = re.compile(r"-r(\d+)-t(\d+)(?:-|$)")


@dataclass(frozen=True, slots=True)
class Handled:
    """One call of a handler."""

    owner: str
    partition: int
    offset: int
    epoch: int
    attempt: int
    result: str
    start_s: float
    end_s: float

    @property
    def who(self) -> str:
        return who_of(self.owner)


def who_of(owner: str) -> str:
    """"ada-…" → "ada"; a task of a drain, "drain-…-r2-t1-…" → "task 1"."""
    found = _TASK.search(owner)
    return short(owner) if found is None else f"task {found[2]}"


def is_task(who: str) -> bool:
    return who.startswith("task ")


def count_handled(folder: Path) -> Counter[str]:
    """So far, by who: only the heads of the chunks are decoded, so it may be asked often."""
    counts: Counter[str] = Counter()
    for path in folder.glob(f"*{SUFFIX}"):
        for chunk in chunks(path.read_bytes(), (RUNS,)):
            counts[who_of(chunk.head.owner)] += chunk.head.messages
    return counts


def read_handled(folder: Path) -> list[Handled]:
    """All of it, in the order of the starts."""
    found = [
        one
        for path in sorted(folder.glob(f"*{SUFFIX}"))
        for chunk in chunks(path.read_bytes(), (RUNS,))
        for one in _handled(chunk)
    ]
    return sorted(found, key=lambda one: one.start_s)


def _handled(chunk: TraceChunk) -> Iterable[Handled]:
    stored = columns_of(chunk)
    lane_counts, part_lanes = _numbers("I", stored.lane_counts), _numbers("I", stored.part_lanes)
    ends, offsets = _decimals(stored.ends), _numbers("q", stored.offsets)
    starts = [0.0, *ends[:-1]]
    place = 0
    for start_s, count in zip(_decimals(stored.starts), _numbers("I", stored.run_counts), strict=True):
        starts[place] = start_s
        place += count
    attempts = dict(zip(_numbers("I", stored.odd_at), _numbers("I", stored.odd_attempts), strict=True))
    results = dict(zip(_numbers("I", stored.odd_at), _numbers("I", stored.odd_results), strict=True))
    partitions = _by_message(_numbers("q", stored.partitions), part_lanes, lane_counts)
    epochs = _by_message(_numbers("q", stored.epochs), part_lanes, lane_counts)
    for at, (partition, epoch) in enumerate(zip(partitions, epochs, strict=True)):
        how = attempts.get(at, 1), RESULTS[results.get(at, 0)]
        yield Handled(chunk.head.owner, partition, offsets[at], epoch, *how, starts[at], ends[at])


def _numbers(code: str, column: memoryview) -> array[int]:
    return array(code, column.tobytes())


def _decimals(column: memoryview) -> array[float]:
    return array("d", column.tobytes())


def _by_message(of_parts: array[int], part_lanes: array[int], lane_counts: array[int]) -> Iterable[int]:
    of_lanes = chain.from_iterable(repeat(value, count) for value, count in zip(of_parts, part_lanes, strict=True))
    return chain.from_iterable(repeat(value, count) for value, count in zip(of_lanes, lane_counts, strict=True))


def history_of(
    handled: Iterable[Handled], stored: Mapping[tuple[int, int], Message], sent: Iterable[Event], group: str
) -> History:
    """For the order checker. A trace has hashes of keys; the keys, and the ids, are those of the log."""
    events: list[tuple[float, int, Event]] = [(-1.0, 0, event) for event in sent]
    for number, one in enumerate(handled):
        message = stored[one.partition, one.offset]
        where = message.subject, group, one.partition, one.offset, message.key, one.owner, one.epoch
        result = cast(HandlerResult, one.result)
        events.append((one.start_s, 2 * number, HandlerStart(*where, message.message_id, one.attempt)))
        events.append((one.end_s, 2 * number + 1, HandlerEnd(*where, message.message_id, result)))
    # Of what has the same time, what began earlier comes first: a worker begins when it has ended the one before.
    return History(event for _, _, event in sorted(events, key=lambda one: one[:2]))
