"""scale: the cost of a message with 1 to 1 024 partitions, and with a backlog of 10 thousand to 10 million.

A server process and a client process, flush "always". A setting is a subject with a number of partitions and a backlog
of messages (100 bytes, to the partitions in turns). In a round the client sends a fixed number of messages, pipelined,
until all are acknowledged; then the client joins the group, handles as many messages, in order by partition with an
empty handler, and leaves: the backlog is as before. The settings take turns.

The cost is the processor time of server and client together, per message: sending, and handling. The cost of a group
that joins and leaves without a message is measured, too, and subtracted: a cost per partition, not per message.
"steady" has no batching: 500 messages a second to a running consumer; server, producer and consumer are processes; the
long polls and heartbeats of all partitions count, too. The figures are medians of the rounds; beside the figures the
smallest setting of the same axis.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.child import Child
from benchmarks.filling import fill
from benchmarks.pair import Pair
from benchmarks.report import BenchReport, BenchRow, Beside, median, percentile
from inturn.client import connect

AIM_TIMES = 1.3
PARTITION_COUNTS, QUICK_PARTITION_COUNTS = (1, 32, 1024), (1, 32)
BACKLOGS, QUICK_BACKLOGS = (10_000, 1_000_000, 10_000_000), (10_000, 50_000)
BACKLOG_PARTITIONS = 4
COUNT, QUICK_COUNT = 204_800, 51_200  # the same number per partition, for 1 024 partitions or 32
ROUNDS, QUICK_ROUNDS = 5, 1
KEYS = 1000
RATE = 500
STEADY_S, QUICK_STEADY_S = 3.0, 1.0


@dataclass(slots=True)
class Setting:
    """Costs are µs of processor time per message, a value per round; rates are by the clock, with joining."""

    partitions: int
    backlog: int
    count: int
    costs_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    joins_ms: list[float] = field(default_factory=list)
    p99s_ms: list[float] = field(default_factory=list)

    @property
    def subject(self) -> str:
        return f"bench-{self.partitions}-{self.backlog}"

    @property
    def steady_subject(self) -> str:
        """Empty at first: the consumer starts at the first message."""
        return f"steady-{self.partitions}"

    def measure(self, server: Child, client: Child) -> None:
        for kind in ("produce", "consume"):
            taken_s, took_s = _taken_s(server, client, kind, self.subject, self.count)
            if kind == "consume":
                join_s, _ = _taken_s(server, client, kind, self.subject, 0)
                self.joins_ms.append(1000 * join_s)
                taken_s -= join_s
            self.costs_us[kind].append(1e6 * taken_s / self.count)
            self.per_s[kind].append(self.count / took_s)

    def measure_steady(self, server: Child, address: str, rounds: int, seconds: float) -> None:
        """The first round waits until the consumer holds all leases."""
        with Pair(address, self.steady_subject) as pair:
            for _ in range(rounds + 1):
                before_s = float(server.ask("time")) + pair.processor_s()
                sent = pair.send(RATE, seconds)
                taken_s = float(server.ask("time")) + pair.processor_s() - before_s
                self.costs_us["steady"].append(1e6 * taken_s / sent.count)
                self.per_s["steady"].append(sent.per_s)
                self.p99s_ms.append(percentile(sent.latencies_ms, 0.99))

    def forget_first(self) -> None:
        """The first round creates files and loads lazy imports."""
        for values in (*self.costs_us.values(), *self.per_s.values(), self.joins_ms, self.p99s_ms):
            del values[:1]


def run(quick: bool) -> BenchReport:
    count, rounds = (QUICK_COUNT, QUICK_ROUNDS) if quick else (COUNT, ROUNDS)
    by_partitions = [Setting(one, 0, count) for one in (QUICK_PARTITION_COUNTS if quick else PARTITION_COUNTS)]
    by_backlog = [Setting(BACKLOG_PARTITIONS, one, count) for one in (QUICK_BACKLOGS if quick else BACKLOGS)]
    settings = [*by_partitions, *by_backlog]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-bench-")))
        server = stack.enter_context(Child("measured_child", folder, "no"))
        address = server.hear()
        client = stack.enter_context(Child("scale_child", address))
        client.hear()
        with connect(address, wait_s=10.0) as mq:
            for one in by_partitions:
                mq.create_subject(one.subject, partitions=one.partitions)
                mq.create_subject(one.steady_subject, partitions=one.partitions)
            for one in by_backlog:
                fill(mq, one.subject, one.backlog, BACKLOG_PARTITIONS, KEYS)
        for number in range(rounds + 1):
            for one in settings if number % 2 else reversed(settings):
                one.measure(server, client)
        for one in by_partitions:
            one.measure_steady(server, address, rounds, QUICK_STEADY_S if quick else STEADY_S)
    for one in settings:
        one.forget_first()
    rows = [
        _row(kind, axis, one, on_axis)
        for axis, on_axis in (("partitions", by_partitions), ("backlog", by_backlog))
        for kind in on_axis[0].costs_us
        for one in on_axis
    ]
    worst = max(rows, key=lambda row: row.ratio)
    return BenchReport("scale", worst.figure, worst.unit, worst.beside, worst.ratio, rows)


def _taken_s(server: Child, client: Child, kind: str, subject: str, count: int) -> tuple[float, float]:
    """Processor time of both, and time by the clock."""
    before_s = float(server.ask("time"))
    taken_s, took_s = map(float, client.ask(kind, subject, count).split())
    return taken_s + float(server.ask("time")) - before_s, took_s


def _row(kind: str, axis: str, setting: Setting, settings: list[Setting]) -> BenchRow:
    figure = median(setting.costs_us[kind])
    least = min(settings, key=lambda one: median(one.costs_us[kind]))
    bound = median(least.costs_us[kind])
    size = setting.partitions if axis == "partitions" else setting.backlog
    named = f"{size:,} partition{'s' * (size > 1)}" if axis == "partitions" else f"a backlog of {size:,}"
    beside = [Beside(f"the least of this axis: {least.partitions if axis == 'partitions' else least.backlog:,}", bound)]
    more = {axis: size, "per_s": median(setting.per_s[kind])}
    if kind == "consume":
        more["join_ms"] = median(setting.joins_ms)
    if kind == "steady":
        more["p99_ms"] = median(setting.p99s_ms)
    ratio = figure / bound
    unit = "µs of processor time per message"
    return BenchRow(f"{kind}, {named}", figure, unit, beside, ratio, f"≤ {AIM_TIMES:g} ×", ratio <= AIM_TIMES, more)
