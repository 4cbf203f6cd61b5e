"""Metrics of a server for Prometheus, collected at each scrape.

`MeasuredNode` stands between the server and the node, and counts commands and times. Without metrics, the server uses
the node directly, at no cost.

Labels are subjects, groups, partitions and fixed names, never keys, members or messages. A metric has at most
SERIES_MAX series, in the order of the label values; series above the limit are counted and left out.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from inturn.model.errors import InturnError
from inturn.model.time import Clock
from inturn.node.statistics import LOG_STATES, NodeFigures, Statistics
from inturn.protocol.codec import KINDS
from inturn.protocol.commands import Answer, Append, Command, Commit, DiskRoom, ReadyPart, Release, Reply
from inturn.protocol.request import WrappedReply
from inturn.transport.server import StreamServer
from inturn.transport.server_session import ServedNode
from inturn.version import VERSION

# From 0.1 ms (a sync of a fast disk) to more than a client waits.
BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """Counts of durations in buckets. Any thread may add; an `add` takes a third of a microsecond."""

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        self._lock = threading.Lock()

    def add(self, took_s: float) -> None:
        place = bisect_left(self._bounds_s, took_s)
        with self._lock:
            self._counts[place] += 1
            self._sum_s += took_s

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets, as in Prometheus, and the sum."""
        with self._lock:
            counts, sum_s = list(self._counts), self._sum_s
        buckets, total = [], 0
        for bound, count in zip((*(f"{one:g}" for one in self._bounds_s), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, sum_s


# An append costs a server about 7 µs, and timing an append 1.5 µs: so at most a thousand appends per second are timed.
TIMED_EVERY_S = 0.001


class Measures:
    """Counts since the start. Any thread may read."""

    def __init__(self) -> None:
        self.append_s = Histogram()
        self.commit_s = Histogram()
        self.commands: dict[type, int] = {kind: 0 for kind in KINDS.values() if issubclass(kind, Command)}
        self.errors: Counter[str] = Counter()
        self._lock = threading.Lock()

    def failed(self, error: InturnError) -> None:
        """A command was answered with an error. From any thread."""
        with self._lock:
            self.errors[type(error).__name__] += 1


class MeasuredNode:
    """See `ServedNode`. Remote commands come from the server's thread only."""

    def __init__(self, node: ServedNode, clock: Clock, measures: Measures) -> None:
        self._node = node
        self._monotonic = clock.monotonic
        self._measures = measures
        self._commands = measures.commands
        self._timed_at_s = float("-inf")  # the last timed append

    def submit(self, command: Command, reply: Reply) -> None:
        self._node.submit(command, reply)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        kind = type(command)
        self._commands[kind] += 1
        if kind is Append:
            now_s = self._monotonic()
            if now_s >= self._timed_at_s + TIMED_EVERY_S:
                self._timed_at_s = now_s
                reply = _TimedReply(reply, self._measures.append_s, self._monotonic)
        elif kind is Commit or kind is Release:
            began_s = self._monotonic()
            self._node.submit_remote(command, reply)  # answered at once
            self._measures.commit_s.add(self._monotonic() - began_s)
            return
        self._node.submit_remote(command, reply)

    def hung_up(self, session: object) -> None:
        self._node.hung_up(session)


class _TimedReply(WrappedReply):
    """The reply to an append, called when the append is durable."""

    __slots__ = ("_began_s", "_histogram", "_monotonic")

    def __init__(self, reply: Reply, histogram: Histogram, monotonic: Callable[[], float]) -> None:
        super().__init__(reply)
        self._histogram = histogram
        self._monotonic = monotonic
        self._began_s = monotonic()

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(answer)  # first: the client waits for the answer
        self._histogram.add(self._monotonic() - self._began_s)


SERIES_MAX = 10_000
KEY_STATES = ("failing", "blocked", "parked", "resuming")
LEASE_CHANGES = ("granted", "released", "expired", "gone")

_Rows: TypeAlias = Iterable[tuple[Sequence[str], float]]


class ServerCollector:
    """A collector for a Prometheus registry. `collect` blocks while the states of all groups are read."""

    def __init__(
        self,
        statistics: Statistics,
        server: StreamServer,
        measures: Measures,
        readiness: Callable[[], tuple[ReadyPart, ...]],
        room: Callable[[], DiskRoom | None],
        clock: Clock,
    ) -> None:
        self._statistics = statistics
        self._server = server
        self._measures = measures
        self._readiness = readiness
        self._room = room
        self._clock = clock
        self._started_at_s = clock.time_ms() / 1000

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not read the node."""
        return []

    def collect(self) -> Iterator[Metric]:
        began_s = self._clock.monotonic()
        page = _Page()
        try:
            figures: NodeFigures | None = self._statistics.take()
        except InturnError:  # readiness reports the part with trouble
            figures = None
        yield from self._of_process(page)
        yield from self._of_server(page)
        yield _histogram(
            "inturn_append_seconds",
            "Time from the arrival of an append until the append is durable. At most a thousand per second are timed.",
            self._measures.append_s,
        )
        yield _histogram(
            "inturn_commit_seconds",
            "Time from the arrival of a commit until the commit is durable.",
            self._measures.commit_s,
        )
        if figures is not None:
            yield from _of_logs(page, figures)
            yield from _of_groups(page, figures)
            yield page.gauge(
                "inturn_held_commands",
                "Waiting long polls, by kind.",
                ["command"],
                (([kind], count) for kind, count in sorted(figures.held.items())),
            )
        yield page.gauge(
            "inturn_series_left_out",
            "Series left out above the limit of a metric.",
            [],
            [((), page.left_out)],
        )
        yield page.gauge(
            "inturn_scrape_seconds", "Duration of the scrape.", [], [((), self._clock.monotonic() - began_s)]
        )

    def _of_process(self, page: _Page) -> Iterator[Metric]:
        yield page.gauge("inturn_info", "Always 1, with the version.", ["version"], [([VERSION], 1)])
        yield page.gauge(
            "inturn_start_time_seconds",
            "Start time of the server, in seconds since 1970.",
            [],
            [((), self._started_at_s)],
        )
        yield page.gauge(
            "inturn_ready",
            "1 if the part is ready: work (accepts new work), logs, state (the store), brokers (of a meta server).",
            ["part"],
            (([part.name], part.is_ready) for part in self._readiness()),
        )
        room = self._room()
        rooms = [] if room is None else [room]
        yield page.gauge(
            "inturn_disk_free_bytes", "Free space on the disk of the logs.", [], (((), one.free_bytes) for one in rooms)
        )
        yield page.gauge(
            "inturn_disk_reserve_bytes",
            "Appends are refused while less is free.",
            [],
            (((), one.reserve_bytes) for one in rooms),
        )

    def _of_server(self, page: _Page) -> Iterator[Metric]:
        load = self._server.load()
        rows = [] if load is None else [load]
        yield page.gauge("inturn_connections", "Connected clients.", [], (((), one.connection_count) for one in rows))
        yield page.gauge(
            "inturn_unanswered_commands",
            "Commands received and not answered yet, including long polls.",
            [],
            (((), one.unanswered_count) for one in rows),
        )
        yield page.gauge(
            "inturn_untaken_answer_bytes",
            "Answers that clients have not read yet.",
            [],
            (((), one.untaken_bytes) for one in rows),
        )
        yield page.gauge(
            "inturn_loop_delay_seconds",
            "How long this scrape waited for the network thread of the server.",
            [],
            (((), one.delay_s) for one in rows),
        )
        yield page.counter(
            "inturn_commands",
            "Commands from clients, by kind.",
            ["command"],
            sorted(([kind.__name__], count) for kind, count in self._measures.commands.items() if count),
        )
        yield page.counter(
            "inturn_errors",
            "Commands answered with an error, by error class.",
            ["error"],
            sorted(([name], count) for name, count in list(self._measures.errors.items())),
        )


class _Page:
    """The metrics of one scrape. Counts the series that are left out."""

    def __init__(self) -> None:
        self.left_out = 0

    def gauge(self, name: str, text: str, labels: Sequence[str], rows: _Rows) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=labels)
        for values, figure in self._within(rows):
            family.add_metric(values, figure)
        return family

    def counter(self, name: str, text: str, labels: Sequence[str], rows: _Rows) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=labels)
        for values, figure in self._within(rows):
            family.add_metric(values, figure)
        return family

    def _within(self, rows: _Rows) -> _Rows:
        for number, row in enumerate(rows):
            if number < SERIES_MAX:
                yield row
            else:
                self.left_out += 1


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, sum_s = histogram.snapshot()
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=sum_s)


def _of_logs(page: _Page, figures: NodeFigures) -> Iterator[Metric]:
    logs = sorted(figures.logs, key=lambda one: (one.subject, one.partition))
    labels = ["subject", "partition"]
    states = [one.state for one in logs]
    yield page.gauge(
        "inturn_logs", "Logs by state.", ["state"], (([state], states.count(state)) for state in LOG_STATES)
    )
    yield page.gauge(
        "inturn_log_trouble",
        "1 for every stopped or damaged log. Healthy logs have no series.",
        [*labels, "state"],
        (([one.subject, str(one.partition), one.state], 1) for one in logs if one.state != "ok"),
    )
    for name, text, attribute in (
        ("inturn_log_start_offset", "Oldest offset of a log.", "start_offset"),
        ("inturn_log_end_offset", "End offset of a log: newest readable offset plus 1.", "end_offset"),
        ("inturn_log_size_bytes", "Size of a log on disk.", "size_bytes"),
    ):
        yield page.gauge(
            name, text, labels, (([one.subject, str(one.partition)], getattr(one, attribute)) for one in logs)
        )
    for name, text, attribute in (
        ("inturn_appended_messages", "Messages stored since the server started.", "appended_count"),
        ("inturn_appended_bytes", "Bytes stored since the server started.", "appended_bytes"),
    ):
        yield page.counter(
            name, text, labels, (([one.subject, str(one.partition)], getattr(one, attribute)) for one in logs)
        )


def _of_groups(page: _Page, figures: NodeFigures) -> Iterator[Metric]:
    places = sorted(figures.places, key=lambda one: (one.subject, one.group, one.partition))
    groups = sorted(figures.groups, key=lambda one: (one.subject, one.group))
    labels = ["subject", "group", "partition"]
    for name, text, attribute in (
        ("inturn_group_lag_messages", "Messages of a partition that a group has not finished.", "lag"),
        (
            "inturn_group_done_messages",
            "Messages of a partition that a group has finished, counted from offset 0.",
            "done",
        ),
    ):
        yield page.gauge(
            name,
            text,
            labels,
            (([one.subject, one.group, str(one.partition)], getattr(one, attribute)) for one in places),
        )
    for name, text, attribute in (
        ("inturn_group_members", "Members of a group whose heartbeats arrive.", "member_count"),
        ("inturn_group_leases", "Partitions of a group with a live lease.", "lease_count"),
    ):
        yield page.gauge(
            name, text, labels[:2], (([one.subject, one.group], getattr(one, attribute)) for one in groups)
        )
    yield page.gauge(
        "inturn_group_keys",
        "Keys of a group with a problem, by state.",
        [*labels[:2], "state"],
        (([one.subject, one.group, state], one.key_states.get(state, 0)) for one in groups for state in KEY_STATES),
    )
    yield page.counter(
        "inturn_lease_changes",
        "Leases granted and ended, by kind of change.",
        ["change"],
        (([change], figures.lease_changes.get(change, 0)) for change in LEASE_CHANGES),
    )
