"""stuck-key: messages that run again after kill -9 while a message does not end.

A process consumes 10 000 messages of 1 000 keys with 16 threads. The first message of a key never ends; later messages
of the key wait; all other messages end. A second of quiet, kill -9, and a new process where all messages end. The
figure is the number of repeated starts, in any process. Beside the figure: the handlers that ran at the kill, the bound
of the ratio; and the repeats with a commit of only the lowest unfinished offset in the same run: all messages that had
ended above the offset. The aim also requires that no message of the stuck key overtook and that no message was lost:
every message has ended, and the group has committed all.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import BenchReport, BenchRow, Beside
from benchmarks.stuck_key_child import GROUP, SUBJECT, THREADS
from inturn.client import connect
from inturn.model.errors import InturnError
from inturn.model.settings import Flush

BODY = b"x" * 100
STALL_S = 20.0  # without an event for so long no event will come


@dataclass(slots=True)
class HandlerNotes:
    """The notes of a child: offsets, in their order."""

    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    @property
    def running(self) -> set[int]:
        return set(self.begun) - set(self.ended)


def run(quick: bool) -> BenchReport:
    count, keys, quiet_s = (1000, 100, 0.3) if quick else (10_000, 1000, 1.0)
    stuck = keys // 2
    behind = set(range(stuck + keys, count, keys))
    with tempfile.TemporaryDirectory(prefix="inturn-bench-") as temporary:
        folder, first_notes, second_notes = (Path(temporary) / name for name in ("data", "first", "second"))
        with connect(folder, flush=Flush.OS) as mq:
            mq.create_subject(SUBJECT, partitions=1)
            with mq.producer() as producer:
                for number in range(count):
                    producer.send(SUBJECT, BODY, key=b"order-%d" % (number % keys))
        with _child(folder, first_notes, stuck) as child:
            _wait(child, first_notes, set(range(count)) - behind - {stuck})
            time.sleep(quiet_s)
            child.kill()
            child.wait()
        first = _read(first_notes)
        if stuck not in first.running:
            raise InturnError(f"offset {stuck} did not run when its process was killed: there is nothing to measure")
        with _child(folder, second_notes, -1) as child:
            _wait(child, second_notes, set(range(count)) - set(first.ended))
            time.sleep(quiet_s)  # wait for events that must not come
            child.communicate(timeout=60)
            if child.returncode:
                raise InturnError(f"the process that consumed the rest ended with {child.returncode}")
        second = _read(second_notes)
        with connect(folder, flush=Flush.OS) as mq:
            lag = sum(one.lag for one in mq.group(SUBJECT, GROUP).describe().partitions)
    return _report(count, keys, stuck, behind, first, second, lag)


def _report(
    count: int, keys: int, stuck: int, behind: set[int], first: HandlerNotes, second: HandlerNotes, lag: int
) -> BenchReport:
    running = len(first.running)
    begun = [*first.begun, *second.begun]
    duplicates = len(begun) - len(set(begun))
    lost = count - len({*first.ended, *second.ended})
    overtook = len(behind & set(first.begun)) + _out_of_turn(first, keys) + _out_of_turn(second, keys)
    lowest = min(set(range(count)) - set(first.ended))
    repeated = sum(offset > lowest for offset in set(first.ended))
    beside = [Beside("handlers running at the kill", running), Beside("lowest-offset committing", repeated)]
    ratio = duplicates / running
    more: dict[str, float] = {"ended_before": len(first.ended), "lost": lost, "overtook": overtook, "lag": lag}
    is_met = duplicates <= running and not (lost or overtook or lag)
    what = f"{count} messages, {keys} keys, {THREADS} threads, offset {stuck} stuck"
    row = BenchRow(what, duplicates, "duplicates", beside, ratio, "≤ running handlers, none lost", is_met, more)
    return BenchReport("stuck-key", duplicates, "duplicates", beside, ratio, [row])


def _out_of_turn(notes: HandlerNotes, keys: int) -> int:
    last: dict[int, int] = {}
    wrong = 0
    for offset in notes.begun:
        wrong += offset < last.get(offset % keys, -1)
        last[offset % keys] = offset
    return wrong


@contextmanager
def _child(folder: Path, notes: Path, stuck: int) -> Iterator[subprocess.Popen[bytes]]:
    notes.touch()
    command = [sys.executable, "-m", "benchmarks.stuck_key_child", str(folder), str(notes), str(stuck)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _wait(child: subprocess.Popen[bytes], notes: Path, awaited: set[int]) -> None:
    """Wait until all these messages have ended, or no event has come for long: the report names the missing
    messages."""
    size, changed_at_s = -1, time.monotonic()
    while not awaited <= set(_read(notes).ended):
        if child.poll() is not None:
            raise InturnError(f"the process that consumes ended by itself, with {child.returncode}")
        now_s = time.monotonic()
        if (new_size := notes.stat().st_size) != size:
            size, changed_at_s = new_size, now_s
        elif now_s - changed_at_s > STALL_S:
            return
        time.sleep(0.05)


def _read(path: Path) -> HandlerNotes:
    notes = HandlerNotes()
    for line in path.read_bytes().splitlines(keepends=True):
        word, _, offset = line.partition(b" ")
        if offset.endswith(b"\n"):
            (notes.begun if word == b"begin" else notes.ended).append(int(offset))
    return notes
