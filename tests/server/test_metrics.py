"""/metrics of a server: the figures are correct and documented, and a scrape delays no command."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

import inturn
from inturn import Connection
from inturn.protocol.commands import Done, Ping
from inturn.protocol.request import ask
from inturn.server import metrics as server_collector
from inturn.server.http import KEPT_S
from inturn.server.metrics import Histogram
from inturn.server.server import Server
from inturn.transport.address import Address
from tests.cli.conftest import Cli
from tests.contract.bed import Seen, eventually, quick, send_all
from tests.server.conftest import Figures, get, scrape

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference" / "metrics.md"


def fresh(service: Server) -> Figures:
    """A new scrape: the server keeps a scrape for a moment."""
    assert service.http_url is not None
    service._endpoint._page._kept.clear()  # type: ignore[union-attr]
    return scrape(service.http_url)


def documented(heading: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Name → type and labels, as listed in the reference under the heading."""
    section = REFERENCE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = {}
    for name, kind, labels in re.findall(r"^\| `(inturn_\w+)` \| (\w+) \| ([^|]*)\|", section, re.MULTILINE):
        found[name] = (kind, frozenset(re.findall(r"`(\w+)`", labels)))
    return found


def told(figures: Figures) -> dict[str, tuple[str, frozenset[str]]]:
    found = {}
    for family in figures.families.values():
        if family.name.startswith("inturn_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, frozenset(labels))
    return found


def fail(message: inturn.Message, context: inturn.Context) -> None:
    if message.key == b"key-3":
        raise RuntimeError("no")


def busy(mq: Connection, partitions: int = 2) -> None:
    """A subject with messages, and a group that has finished all messages except for a parked key."""
    mq.create_subject("orders", partitions)
    send_all(mq, "orders", 40)
    settings = quick(max_attempts=1, on_exhausted="park")
    with mq.consumer("orders", "billing", fail, order="key", settings=settings):
        eventually(mq.groups, "somebody has joined")
        eventually(lambda: [one.state for one in mq.group("orders", "billing").keys()] == ["parked"], "parked")
        eventually(lambda: mq.group("orders", "billing").describe().lag == 0, "done")


@pytest.mark.usefixtures("_quiet")
def test_what_is_told_is_what_happened(service: Server) -> None:
    with inturn.connect(str(service.address)) as mq:
        busy(mq)
        send_all(mq, "orders", 10)
        figures = fresh(service)
        described = mq.describe_subject("orders")
        group = mq.group("orders", "billing").describe()
    assert 0 < figures("inturn_append_seconds_count") <= figures("inturn_commands_total", command="Append")
    assert figures("inturn_commit_seconds_count") > 0
    assert figures("inturn_commit_seconds_sum") > 0
    for one in described.partitions:
        where = {"subject": "orders", "partition": str(one.index)}
        assert figures("inturn_log_end_offset", **where) == one.end_offset
        assert figures("inturn_log_size_bytes", **where) == one.size_bytes
        assert figures("inturn_appended_messages_total", **where) == one.end_offset
        assert figures("inturn_appended_bytes_total", **where) == one.size_bytes
        lag = figures("inturn_group_lag_messages", group="billing", **where)
        assert lag == group.partitions[one.index].lag
    assert group.lag == 10
    who = {"subject": "orders", "group": "billing"}
    assert [figures("inturn_group_keys", state=state, **who) for state in ("parked", "failing", "blocked")] == [1, 0, 0]
    assert figures("inturn_group_members", **who) == figures("inturn_group_leases", **who) == 0
    changes = {one: figures("inturn_lease_changes_total", change=one) for one in ("granted", "released", "expired")}
    assert changes["granted"] == changes["released"] >= 2
    assert changes["expired"] == 0
    # The retry and dead-letter subjects have logs, too.
    assert figures("inturn_logs", state="ok") >= 2
    assert figures("inturn_logs", state="stopped") == figures("inturn_logs", state="damaged") == 0
    assert figures("inturn_connections") == 1
    assert figures("inturn_disk_free_bytes") > figures("inturn_disk_reserve_bytes") > 0
    assert figures("inturn_info", version=inturn.__version__) == 1
    assert abs(figures("inturn_start_time_seconds") - time.time()) < 100
    assert all(figures("inturn_ready", part=part) == 1 for part in ("work", "logs", "state"))
    assert figures("inturn_series_left_out") == 0
    assert figures("process_resident_memory_bytes") > 1e6


def test_what_runs_is_told_while_it_runs(service: Server) -> None:
    with inturn.connect(str(service.address)) as mq:
        mq.create_subject("orders", 4)
        seen = Seen()
        with mq.consumer("orders", "billing", seen, settings=quick(pull_wait_s=60.0)) as consumer:
            send_all(mq, "orders", 8)
            seen.wait_for(8)
            eventually(lambda: len(consumer.statistics().partitions) == 4, "all are held")
            eventually(lambda: service._opened.node.statistics.take().held.get("Pull") == 4, "all wait for more")
            eventually(lambda: fresh(service)("inturn_held_commands", command="Pull") == 4, "it is told")
            figures = fresh(service)
    who = {"subject": "orders", "group": "billing"}
    assert figures("inturn_group_members", **who) == 1
    assert figures("inturn_group_leases", **who) == 4
    assert figures("inturn_unanswered_commands") >= 1
    assert 0 <= figures("inturn_loop_delay_seconds") < 60


def test_errors_are_told_by_name_and_what_was_refused_is_not_appended(service: Server) -> None:
    with inturn.connect(str(service.address)) as mq:
        mq.create_subject("orders", 1)
        first = mq.producer("writer")
        first.send_sync("orders", b"1")
        with mq.producer("writer"):
            with pytest.raises(inturn.errors.ProducerFenced):
                first.send_sync("orders", b"2")
            figures = fresh(service)
    assert figures("inturn_errors_total", error="ProducerFenced") == 1
    assert figures("inturn_appended_messages_total", subject="orders", partition="0") == 1


def test_a_damaged_log_is_told_by_name(cli: Cli) -> None:
    with inturn.connect(cli.data) as mq:
        mq.create_subject("orders", partitions=2, routing="selector")
        with mq.producer() as producer:
            for number in range(10):
                producer.send_sync("orders", b"x", selector=lambda partitions, message, arg: 0, arg=number)
    (segment,) = (cli.data / "log" / "p1").glob("*.log")
    os.truncate(segment, segment.stat().st_size // 10 * 6)
    with cli.serve("--http", "0") as served:
        figures = scrape(served.ready["http"])
        ready = get(f"{served.ready['http']}/readyz")
    assert figures("inturn_logs", state="damaged") == figures("inturn_logs", state="ok") == 1
    assert figures("inturn_log_trouble", subject="orders", partition="0", state="damaged") == 1
    assert figures.count("inturn_log_trouble") == 1
    assert ready.status == 200  # the other partition works
    assert "1 of 2 logs" in ready.text


def test_every_metric_is_documented_with_its_type_and_its_labels(cli: Cli) -> None:
    """In a separate process, with a value in every metric."""
    with cli.serve("--http", "127.0.0.1:0") as served, inturn.connect(served.address) as mq:
        mq.create_subject("orders", 1)
        producer = mq.producer("writer")
        producer.send_sync("orders", b"1")
        with mq.producer("writer"), pytest.raises(inturn.errors.ProducerFenced):
            producer.send_sync("orders", b"2")
        with mq.consumer("orders", "billing", lambda message, context: None, settings=quick()):
            eventually(lambda: mq.groups() and mq.group("orders", "billing").describe().lag == 0, "done")
            eventually(lambda: scrape(served.ready["http"]).count("inturn_held_commands") > 0, "something is held back")
            found = told(scrape(served.ready["http"]))
    expected = documented("Of a server")
    # There is no series for healthy logs. The test above has a log with trouble.
    assert found["inturn_log_trouble"] == ("gauge", frozenset())
    assert expected["inturn_log_trouble"] == ("gauge", frozenset({"subject", "partition", "state"}))
    del found["inturn_log_trouble"], expected["inturn_log_trouble"]
    assert found == expected


def test_both_formats_of_prometheus_are_spoken(service: Server) -> None:
    url = f"{service.http_url}/metrics"
    plain, newer = get(url), get(url, accept="application/openmetrics-text; version=1.0.0")
    assert plain.content_type.startswith("text/plain")
    assert newer.content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in open_metrics(newer.text)}  # type: ignore[no-untyped-call]
    assert {"inturn_logs", "inturn_append_seconds", "inturn_lease_changes"} <= names


def test_asking_again_at_once_asks_nobody(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = service._opened.node.statistics
    calls: list[int] = []
    take = type(survey).take

    def counted(self: Any) -> Any:
        calls.append(1)
        return take(self)

    monkeypatch.setattr(type(survey), "take", counted)
    began_s = time.monotonic()
    for _ in range(20):
        assert get(f"{service.http_url}/metrics").status == 200
    took_s = time.monotonic() - began_s
    assert 1 <= len(calls) <= 2 + took_s / KEPT_S


def test_series_are_bounded_and_what_is_left_out_is_counted(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_collector, "SERIES_MAX", 5)
    with inturn.connect(str(service.address)) as mq:
        mq.create_subject("a", 4)
        mq.create_subject("b", 4)
        figures = fresh(service)
    assert figures.count("inturn_log_end_offset") == 5
    assert figures("inturn_log_end_offset", subject="b", partition="0") == 0  # by name: a/0 to a/3, b/0
    assert figures("inturn_series_left_out") == 5 * 3  # of five metrics by log


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((0.1, 1.0))
    for took_s in (0.05, 0.1, 0.5, 7.0):
        histogram.add(took_s)
    buckets, sum_s = histogram.snapshot()
    assert buckets == [("0.1", 2.0), ("1", 3.0), ("+Inf", 4.0)]
    assert sum_s == pytest.approx(7.65)


def test_nobody_measures_unless_asked(tmp_path: Path) -> None:
    service = Server(tmp_path / "data", address=Address("127.0.0.1"))
    try:
        assert service.http_url is None
        assert service._server.node is service._opened.node
    finally:
        service.close(grace_s=0.0)


def test_the_wire_answers_pings_without_the_node(service: Server) -> None:
    """So pings are not counted as commands."""
    with inturn.connect(str(service.address)) as mq:
        ask(mq.node, Ping(), Done)
        assert ("inturn_commands_total", frozenset({("command", "Ping")})) not in fresh(service).samples
