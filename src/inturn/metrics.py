"""Metrics of the consumers and producers of one process, for Prometheus.

from prometheus_client import REGISTRY, start_http_server
REGISTRY.register(inturn.metrics.ClientCollector(mq))
start_http_server(8000, "127.0.0.1")

Values are gathered at every scrape; handling and sending have no extra cost. The server reports lag and leases:
`inturn serve --http`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inturn.client import Connection
from inturn.consumer.consumer import Consumer
from inturn.consumer.statistics import ConsumerStatistics
from inturn.producer.producer import Producer, ProducerStatistics

_CONSUMER = ["subject", "group"]
_PRODUCER = ["producer"]


@dataclass(slots=True)
class _Handled:
    """Sums over consumers of one subject and group, stopped consumers included."""

    ok: int = 0
    failed: int = 0
    slow: int = 0
    handling_s: float = 0.0

    def add(self, one: ConsumerStatistics) -> None:
        self.ok += one.ok_count
        self.failed += one.failed_count
        self.slow += one.slow_count
        self.handling_s += one.handling_s


@dataclass(slots=True)
class _Sent:
    """Sums over producers of one name, closed producers included."""

    acknowledged: int = 0
    failed: int = 0
    resent: int = 0

    def add(self, one: ProducerStatistics) -> None:
        self.acknowledged += one.acknowledged_count
        self.failed += one.failed_count
        self.resent += one.resent_count


@dataclass(slots=True)
class _Snapshot:
    """All values at one moment."""

    handled: dict[tuple[str, str], _Handled] = field(default_factory=lambda: defaultdict(_Handled))
    running: dict[tuple[str, str], list[ConsumerStatistics]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[str, _Sent] = field(default_factory=lambda: defaultdict(_Sent))
    open: dict[str, list[ProducerStatistics]] = field(default_factory=lambda: defaultdict(list))


class ClientCollector:
    """The metrics of one connection; register the collector beside your own metrics.

    Series are by subject and group, or by the name of the producer ("" without a name): as many as the program has of
    these.
    """

    def __init__(self, connection: Connection) -> None:
        self._lock = threading.Lock()
        self._consumers: set[Consumer] = set()
        self._producers: set[Producer] = set()
        # Of stopped consumers and closed producers: a counter must never decrease.
        self._handled: dict[tuple[str, str], _Handled] = defaultdict(_Handled)
        self._sent: dict[str, _Sent] = defaultdict(_Sent)
        connection.when_made(self._made)
        with self._lock:
            self._consumers.update(connection.consumers())
            self._producers.update(connection.producers())

    def _made(self, one: Consumer | Producer) -> None:
        """Counts of former consumers and producers are added up here, too, even if nothing scrapes."""
        with self._lock:
            self._forget_former()
            if isinstance(one, Producer):
                self._producers.add(one)
            else:
                self._consumers.add(one)

    def describe(self) -> list[Metric]:
        """The names, without values: registering sends no command."""
        return list(_families(_Snapshot()))

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            snapshot = self._snapshot()
        yield from _families(snapshot)

    def _snapshot(self) -> _Snapshot:
        self._forget_former()
        snapshot = _Snapshot()
        for consumer in self._consumers:
            key, figures = (consumer.subject, consumer.group), consumer.statistics()
            snapshot.handled[key].add(figures)
            if consumer.is_running:
                snapshot.running[key].append(figures)
        for producer in self._producers:
            name, counted = producer.name or "", producer.statistics()
            snapshot.open[name].append(counted)
            snapshot.sent[name].add(counted)
        self._add_former(snapshot)
        return snapshot

    def _forget_former(self) -> None:
        """Of stopped consumers and closed producers, only the counts stay."""
        for consumer in [one for one in self._consumers if one.is_over]:
            self._consumers.discard(consumer)
            self._handled[consumer.subject, consumer.group].add(consumer.statistics())
        for producer in [one for one in self._producers if one.is_closed]:
            self._producers.discard(producer)
            self._sent[producer.name or ""].add(producer.statistics())

    def _add_former(self, snapshot: _Snapshot) -> None:
        for key, former in self._handled.items():
            handled = snapshot.handled[key]
            handled.ok += former.ok
            handled.failed += former.failed
            handled.slow += former.slow
            handled.handling_s += former.handling_s
        for name, before in self._sent.items():
            sent = snapshot.sent[name]
            sent.acknowledged += before.acknowledged
            sent.failed += before.failed
            sent.resent += before.resent


def _families(snapshot: _Snapshot) -> Iterator[Metric]:
    yield from _of_handling(snapshot)
    yield from _of_consumers(snapshot)
    yield from _of_producers(snapshot)


def _of_handling(snapshot: _Snapshot) -> Iterator[Metric]:
    handled = CounterMetricFamily(
        "inturn_consumer_handled_messages",
        "Messages passed to handlers, by result: ok or failed.",
        labels=[*_CONSUMER, "result"],
    )
    slow = CounterMetricFamily(
        "inturn_consumer_slow_calls", "Handler calls longer than handler_timeout_s.", labels=_CONSUMER
    )
    spent = CounterMetricFamily("inturn_consumer_handling_seconds", "Total time in all handlers.", labels=_CONSUMER)
    for key, one in sorted(snapshot.handled.items()):
        handled.add_metric([*key, "ok"], one.ok)
        handled.add_metric([*key, "failed"], one.failed)
        slow.add_metric(key, one.slow)
        spent.add_metric(key, one.handling_s)
    yield from (handled, slow, spent)


_GAUGES: tuple[tuple[str, str, Callable[[ConsumerStatistics], float]], ...] = (
    ("inturn_consumer_partitions", "Leased partitions.", lambda one: len(one.partitions)),
    ("inturn_consumer_lag_messages", "Unfinished messages of the leased partitions.", lambda one: one.lag),
    ("inturn_consumer_waiting_messages", "Messages pulled and not handled yet.", lambda one: one.waiting_count),
    (
        "inturn_consumer_failing_messages",
        "Failed messages that will be retried or wait for an operator.",
        lambda one: one.failing_count,
    ),
    ("inturn_consumer_parked_keys", "Parked keys.", lambda one: len(one.parked)),
    ("inturn_consumer_paused_partitions", "Partitions paused by flow control.", lambda one: len(one.paused)),
    (
        "inturn_consumer_blocked_partitions",
        "Partitions paused because of a single key.",
        lambda one: len(one.blocking),
    ),
    ("inturn_consumer_missing_messages", "Offsets that retention deleted before reading.", lambda one: one.missing),
    ("inturn_consumer_concurrency", "Maximum of concurrent handlers.", lambda one: one.concurrency),
)


def _of_consumers(snapshot: _Snapshot) -> Iterator[Metric]:
    for name, text, figure in _GAUGES:
        family = GaugeMetricFamily(name, text, labels=_CONSUMER)
        for key, found in sorted(snapshot.running.items()):
            family.add_metric(key, sum(figure(one) for one in found))
        yield family


def _of_producers(snapshot: _Snapshot) -> Iterator[Metric]:
    messages = CounterMetricFamily(
        "inturn_producer_messages",
        "Messages sent, by result: acknowledged or failed.",
        labels=[*_PRODUCER, "result"],
    )
    resent = CounterMetricFamily("inturn_producer_resent_batches", "Resent batches.", labels=_PRODUCER)
    for name, one in sorted(snapshot.sent.items()):
        messages.add_metric([name, "acknowledged"], one.acknowledged)
        messages.add_metric([name, "failed"], one.failed)
        resent.add_metric([name], one.resent)
    waiting = GaugeMetricFamily("inturn_producer_waiting_messages", "Messages not acknowledged yet.", labels=_PRODUCER)
    waiting_bytes = GaugeMetricFamily(
        "inturn_producer_waiting_bytes", "Bytes of messages not acknowledged yet.", labels=_PRODUCER
    )
    for name, found in sorted(snapshot.open.items()):
        waiting.add_metric([name], sum(one.waiting_count for one in found))
        waiting_bytes.add_metric([name], sum(one.waiting_bytes for one in found))
    yield from (messages, resent, waiting, waiting_bytes)
