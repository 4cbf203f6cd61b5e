"""The traces of the last act, read without Spark: who handled which message when.

All processes of a machine share the monotonic clock that traces are counted on, so their times are compared exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from demo.board import short
from inturn.consumer.trace import RESULTS, RUNS, SUCCESS, SUFFIX, TraceRun, chunks, runs_of
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
    """ "ada-…" → "ada"; a task of a drain, "drain-…-r2-t1-…" → "task 1"."""
    found = _TASK.search(owner)
    return short(owner) if found is None else f"task {found[2]}"


def is_task(who: str) -> bool:
    return who.startswith("task ")


class HandledCounts:
    """How many messages each has handled so far. Only what is new is decoded, so it may be asked often."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[str] = Counter()
        self._seen: dict[Path, int] = {}  # the number of the last chunk

    def read(self) -> Counter[str]:
        for path in self._folder.glob(f"*{SUFFIX}"):
            for chunk in chunks(path.read_bytes(), (RUNS,)):
                if chunk.head.number > self._seen.get(path, 0):
                    self._seen[path] = chunk.head.number
                    self._counts[who_of(chunk.head.owner)] += sum(len(run.offsets) for run in runs_of(chunk))
        return self._counts.copy()


def read_handled(folder: Path) -> list[Handled]:
    """All of it, in the order of the starts."""
    found = [
        one
        for path in sorted(folder.glob(f"*{SUFFIX}"))
        for chunk in chunks(path.read_bytes(), (RUNS,))
        for run in runs_of(chunk)
        for one in _handled(chunk.head.owner, run)
    ]
    return sorted(found, key=lambda one: one.start_s)


def _handled(owner: str, run: TraceRun) -> Iterable[Handled]:
    ends_s = run.ends
    starts_s = [run.start_s, *ends_s[:-1]]
    odd = {at: (attempt, RESULTS[result]) for at, attempt, result in run.odd}
    part_ends = [*(first for _, _, first in run.parts[1:]), len(ends_s)]
    for (partition, epoch, first), stop in zip(run.parts, part_ends, strict=True):
        for at in range(first, stop):
            how = odd.get(at, (1, RESULTS[SUCCESS]))
            yield Handled(owner, partition, run.offsets[at], epoch, *how, starts_s[at], ends_s[at])


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
