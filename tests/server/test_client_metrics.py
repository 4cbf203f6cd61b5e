"""`inturn.metrics`: figures of the consumers and producers of a program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import inturn
from inturn import Context, Message
from inturn.metrics import ClientCollector
from tests.contract.bed import Seen, eventually, quick, send_all
from tests.server.conftest import Figures
from tests.server.test_metrics import REFERENCE, documented, told


def look(registry: CollectorRegistry) -> Figures:
    return Figures(generate_latest(registry).decode())


@pytest.mark.usefixtures("_quiet")
def test_what_consumers_and_producers_did_is_told(tmp_path: Path) -> None:
    def handle(message: Message, context: Context) -> None:
        if message.key == b"key-3" and context.attempt == 1:
            raise RuntimeError("once")

    registry = CollectorRegistry()
    with inturn.connect(tmp_path, flush="os") as mq:
        mq.create_subject("orders", 2)
        collector = ClientCollector(mq)
        registry.register(collector)
        send_all(mq, "orders", 80)
        with mq.producer("writer") as producer:
            producer.send_sync("orders", b"x", key="y")
            who = {"subject": "orders", "group": "billing"}
            settings = quick()
            with mq.consumer("orders", "billing", handle, order="key", settings=settings) as consumer:
                eventually(lambda: consumer.statistics().ok_count == 81, "all are handled")
                figures = look(registry)
                assert figures("inturn_consumer_handled_messages_total", result="ok", **who) == 81
                assert figures("inturn_consumer_handled_messages_total", result="failed", **who) == 10
                assert figures("inturn_consumer_handling_seconds_total", **who) > 0
                assert figures("inturn_consumer_concurrency", **who) == 4
                assert 0 <= figures("inturn_consumer_partitions", **who) <= 2
                assert figures("inturn_producer_messages_total", producer="writer", result="acknowledged") == 1
                # this producer was closed before the first scrape
                assert figures("inturn_producer_messages_total", producer="", result="acknowledged") == 80
                assert figures("inturn_producer_waiting_messages", producer="writer") == 0
                assert told(figures) == documented("Of a program")
        after = look(registry)
    # Counts stay. Figures of closed consumers and producers are gone.
    assert after("inturn_consumer_handled_messages_total", result="ok", **who) == 81
    assert after("inturn_producer_messages_total", producer="writer", result="acknowledged") == 1
    assert after.count("inturn_consumer_partitions") == after.count("inturn_producer_waiting_messages") == 0


def test_counts_go_on_over_one_consumer_after_the_other(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with inturn.connect(tmp_path, flush="os") as mq:
        mq.create_subject("orders", 1)
        registry.register(ClientCollector(mq))
        for round_number in range(1, 4):
            seen = Seen()
            with mq.consumer("orders", "billing", seen, settings=quick()) as consumer:
                look(registry)
                send_all(mq, "orders", 5)
                seen.wait_for(5)
                eventually(lambda: consumer.statistics().ok_count == 5, "counted")
            name = "inturn_consumer_handled_messages_total"
            assert look(registry)(name, subject="orders", group="billing", result="ok") == 5 * round_number


def test_what_was_there_before_the_collector_is_counted_and_many_are_not_kept(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with inturn.connect(tmp_path, flush="os") as mq:
        mq.create_subject("orders", 1)
        with mq.producer("early") as early:
            early.send_sync("orders", b"1")
            collector = ClientCollector(mq)
            registry.register(collector)
            for _ in range(20):
                with mq.producer() as producer:
                    producer.send_sync("orders", b"2")
            assert len(collector._producers) == 2  # the early producer, and the last: closed, but not scraped yet
            figures = look(registry)
    assert figures("inturn_producer_messages_total", producer="early", result="acknowledged") == 1
    assert figures("inturn_producer_messages_total", producer="", result="acknowledged") == 20


def test_registering_asks_nobody_and_a_second_one_is_refused(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with inturn.connect(tmp_path) as mq:
        collector = ClientCollector(mq)
        registry.register(collector)
        assert {family.name for family in collector.describe()} <= {
            name.removesuffix("_total") for name in documented("Of a program")
        }
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(ClientCollector(mq))


def test_nothing_of_this_is_imported_by_those_who_do_not_ask() -> None:
    """Neither Prometheus nor OpenTelemetry is imported by the library, or by a server without metrics."""
    code = (
        "import sys, inturn, inturn.aio, inturn.server.server, inturn.cli.main\n"
        "print([name for name in sys.modules if name.startswith(('prometheus_client', 'opentelemetry'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_the_example_in_the_reference_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    example = example.replace('"inturn://127.0.0.1:7420"', repr(str(tmp_path / "data"))).replace("8000", "0")
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", example], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
