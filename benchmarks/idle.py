"""idle: the cost of 1 000 idle consumers for a server: memory, processor time, and delay of other clients.

The consumers live in four processes with a connection per consumer: groups of 4 on subjects with 4 partitions. A
consumer holds one lease and long-polls one partition. Memory is the memory of the server when all leases are held;
processor time is the time of the server over 10 seconds without messages. Beside the figures, before, with and after
the consumers: a producer and a consumer on a different subject, 1 000 messages a second, flush "always"; the median of
the p99 of the rounds. The clients share the machine with the server: their work counts, too.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import Child
from benchmarks.pair import Pair
from benchmarks.report import BenchReport, BenchRow, Beside, median, percentile
from inturn.client import Connection, connect
from inturn.model.errors import InturnError

CONSUMERS, QUICK_CONSUMERS = 1000, 40
GROUP_SIZE = 4
PROCESSES = 4
RATE = 1000
PARTITIONS = 4
SETTLED_S = 120.0  # until all leases are held
AIM_MB, AIM_PERCENT, AIM_TIMES = 150.0, 10.0, 1.5
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Length:
    consumers: int
    rounds: int
    round_s: float
    quiet_s: float


FULL, QUICK = Length(CONSUMERS, 5, 3.0, 10.0), Length(QUICK_CONSUMERS, 1, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Quiet:
    """The server without messages."""

    memory_mb: float
    percent: float  # of a core
    clients_percent: float
    took_s: float  # until all leases were held


def run(quick: bool) -> BenchReport:
    length = QUICK if quick else FULL
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-bench-")))
        server = stack.enter_context(Child("measured_child", folder, "no"))
        address = server.hear()
        with connect(address, wait_s=10.0) as mq:
            subjects = _create(mq, length.consumers)
        pair = stack.enter_context(Pair(address, "bench"))
        without_ms = _p99s_ms(pair, length)
        alone_mb = int(server.ask("memory")) / MB
        with ExitStack() as idle:
            began_s = time.monotonic()
            children = [
                idle.enter_context(Child("idle_child", address, length.consumers // PROCESSES, *subjects))
                for _ in range(PROCESSES)
            ]
            _settle(children, length.consumers)
            quiet = _quiet(server, children, length.quiet_s, time.monotonic() - began_s)
            with_ms = _p99s_ms(pair, length)
        without_ms += _p99s_ms(pair, length)
    rows = [_p99_row(length, with_ms, without_ms), _memory_row(length, quiet, alone_mb), _processor_row(length, quiet)]
    first = rows[0]
    return BenchReport("idle", first.figure, first.unit, first.beside, first.ratio, rows)


def _create(mq: Connection, consumers: int) -> list[str]:
    mq.create_subject("bench", partitions=PARTITIONS)
    size = min(GROUP_SIZE, consumers)
    subjects = [f"idle-{number}" for number in range(consumers // size)]
    for subject in subjects:
        mq.create_subject(subject, partitions=size)
    return subjects


def _settle(children: list[Child], consumers: int) -> None:
    """Wait until every consumer has its partition: as many leases as consumers, twice in a row."""
    for child in children:
        child.hear()
    until_s = time.monotonic() + SETTLED_S
    seen = 0
    while seen < 2:
        held = sum(int(child.ask("held")) for child in children)
        seen = seen + 1 if held == consumers else 0
        if time.monotonic() > until_s:
            raise InturnError(
                f"{held} of {consumers} leases are held after {SETTLED_S:.0f} s: the consumers do not settle"
            )
        time.sleep(0.5)


def _quiet(server: Child, children: list[Child], seconds: float, took_s: float) -> Quiet:
    asked = [server, *children]
    before_s, began_s = [float(child.ask("time")) for child in asked], time.monotonic()
    time.sleep(seconds)
    taken_s = [float(child.ask("time")) - before for child, before in zip(asked, before_s, strict=True)]
    passed_s = time.monotonic() - began_s
    memory_mb = int(server.ask("memory")) / MB
    return Quiet(memory_mb, 100 * taken_s[0] / passed_s, 100 * sum(taken_s[1:]) / passed_s, took_s)


def _p99s_ms(pair: Pair, length: Length) -> list[float]:
    """Of each round."""
    return [percentile(pair.send(RATE, length.round_s).latencies_ms, 0.99) for _ in range(length.rounds)]


def _p99_row(length: Length, with_ms: list[float], without_ms: list[float]) -> BenchRow:
    figure, bound = median(with_ms), median(without_ms)
    ratio = figure / bound
    what = f"{RATE:,} messages/s beside {length.consumers:,} idle consumers, p99"
    beside = [Beside("the same without them", bound)]
    more = {"least_ms": min(with_ms), "most_ms": max(with_ms), "without_most_ms": max(without_ms)}
    return BenchRow(what, figure, "ms", beside, ratio, f"< {AIM_TIMES:g} ×", ratio < AIM_TIMES, more)


def _memory_row(length: Length, quiet: Quiet, alone_mb: float) -> BenchRow:
    figure = quiet.memory_mb
    beside = [Beside("before they came", alone_mb)]
    what = f"memory of the server, {length.consumers:,} idle consumers"
    more = {"each_kb": 1000 * (figure - alone_mb) / length.consumers, "until_settled_s": quiet.took_s}
    return BenchRow(what, figure, "MB", beside, figure / alone_mb, f"< {AIM_MB:g} MB", figure < AIM_MB, more)


def _processor_row(length: Length, quiet: Quiet) -> BenchRow:
    figure = quiet.percent
    beside = [Beside("a tenth of a core", AIM_PERCENT)]
    what = f"processor time of the server, {length.consumers:,} idle consumers"
    more = {"clients_percent": quiet.clients_percent, "seconds": length.quiet_s}
    return BenchRow(what, figure, "% of a core", beside, figure / AIM_PERCENT, "< 1 ×", figure < AIM_PERCENT, more)
