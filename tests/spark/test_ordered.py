"""S1, S2: the source with a handler and a group: streams as members, batches under leases."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.streaming.query import StreamingQuery
from structlog.testing import capture_logs

from inturn import LeaseSettings
from inturn.model.errors import InvalidInput, NotFound
from inturn.spark.ordered import task as connections
from inturn.spark.ordered.for_each import for_each_stream
from inturn.spark.source.options import parse_options
from inturn.spark.source.ordered import OrderedBatchReader, OrderedStreamReader, TaskFailed
from tests.contract.bed import eventually
from tests.spark.served import Served, serving

KEYS = 20


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    """Close the connections of this process after every test."""
    yield
    for target in list(connections._connections):
        connections.disconnect(target)


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, int, str]]]:
    """The calls of the handler in `tests.spark.noting_handler`: key, offset, time."""
    # Tasks run in processes with the environment of the session's start, so message properties name the folder.

    def read() -> list[tuple[str, int, str]]:
        found = []
        for file in sorted(tmp_path.glob("calls-*")):
            for line in file.read_text().splitlines():
                key, offset, when = line.split("\t")
                found.append((key, int(offset), when))
        return sorted(found, key=lambda one: one[2])

    return read


def send(served: Served, subject: str, count: int, folder: Path, first: int = 0) -> None:
    with served.connection.producer() as producer:
        for number in range(first, first + count):
            producer.send(subject, b"%d" % number, key=f"key-{number % KEYS}", properties={"folder": str(folder)})


def in_order(calls: list[tuple[str, int, str]]) -> bool:
    by_key: dict[str, list[int]] = defaultdict(list)
    for key, offset, _ in calls:
        by_key[key].append(offset)
    return all(offsets == sorted(set(offsets)) for offsets in by_key.values())


def wait_until(condition: Callable[[], bool]) -> None:
    eventually(condition, "it comes about", 60.0, 0.05)


def lag(served: Served, subject: str, group: str) -> int:
    try:
        return served.connection.group(subject, group).describe().lag
    except NotFound:
        return -1


HANDLER = "tests.spark.noting_handler:note"


def test_a_batch_with_a_handler_does_the_work_of_its_group(
    spark: SparkSession, served: Served, tmp_path: Path, noted: Callable[[], list[tuple[str, int, str]]]
) -> None:
    served.connection.create_subject("orders", 2)
    send(served, "orders", 300, tmp_path)
    rows = (
        spark.read.format("inturn")
        .options(server=served.address, subject="orders", group="notify", handler=HANDLER, minPartitions="3")
        .load()
        .collect()
    )
    assert sum(row.handled for row in rows) == 300
    assert len(rows) == 3, "more tasks than partitions"
    assert all(row.is_through and row.error is None for row in rows)
    assert len(noted()) == 300
    assert in_order(noted())
    assert lag(served, "orders", "notify") == 0


def test_a_stream_with_a_handler_is_a_member_of_its_group(
    spark: SparkSession, served: Served, tmp_path: Path, noted: Callable[[], list[tuple[str, int, str]]]
) -> None:
    """The stream shares the partitions with an online consumer, and hands over at its stop."""
    served.connection.create_subject("orders", 2)
    online_calls: list[tuple[str, int]] = []
    online = served.connection.consumer(
        "orders", "notify", lambda message, _: online_calls.append((message.key_text, message.offset)), order="key"
    )
    with online:
        wait_until(lambda: len(online.leases()) == 2)
        query = for_each_stream(
            spark, served.address, "orders", "notify", HANDLER, checkpoint=str(tmp_path / "checkpoint")
        )
        try:
            wait_until(lambda: len(online.leases()) == 1)
            send(served, "orders", 200, tmp_path)
            wait_until(lambda: lag(served, "orders", "notify") == 0)
            assert noted()
            assert online_calls
            assert len(noted()) + len(online_calls) == 200
            assert in_order(noted())
            send(served, "orders", 100, tmp_path, first=200)
            wait_until(lambda: len(noted()) + len(online_calls) == 300)
        finally:
            query.stop()
        wait_until(lambda: len(online.leases()) == 2)
        before = len(online_calls)
        send(served, "orders", 50, tmp_path, first=300)
        wait_until(lambda: len(online_calls) == before + 50)
    assert in_order(noted())


def test_what_is_asked_of_a_key_is_done_where_nothing_else_waits(
    spark: SparkSession, served: Served, tmp_path: Path, noted: Callable[[], list[tuple[str, int, str]]]
) -> None:
    mq = served.connection
    mq.create_subject("orders", 1)
    query = for_each_stream(spark, served.address, "orders", "notify", HANDLER, checkpoint=str(tmp_path / "checkpoint"))
    try:
        wait_until(lambda: lag(served, "orders", "notify") == 0)
        mq.group("orders", "notify").park("key-3", why="a test", by="me")
        wait_until(lambda: [one.state for one in mq.group("orders", "notify").keys()] == ["parked"])
        send(served, "orders", 2 * KEYS, tmp_path)
        wait_until(lambda: len(noted()) == 2 * KEYS - 2)
        mq.group("orders", "notify").resume("key-3", why="a test", by="me")
        wait_until(lambda: len(noted()) == 2 * KEYS)
    finally:
        query.stop()
    assert in_order(noted())


def test_available_now_ends_with_what_was_there(
    spark: SparkSession, served: Served, tmp_path: Path, noted: Callable[[], list[tuple[str, int, str]]]
) -> None:
    served.connection.create_subject("orders", 2)
    send(served, "orders", 120, tmp_path)
    for number in range(2):
        query = for_each_stream(
            spark,
            served.address,
            "orders",
            "notify",
            HANDLER,
            checkpoint=str(tmp_path / "checkpoint"),
            max_messages_per_trigger=50,
            trigger={"availableNow": True},
        )
        assert query.awaitTermination(100)
        assert len(noted()) == 120, f"run {number}: the second has nothing left to do"
    assert in_order(noted())


def test_rows_of_a_group_are_committed_when_the_sink_has_them(
    spark: SparkSession, served: Served, tmp_path: Path
) -> None:
    served.connection.create_subject("orders", 2)
    send(served, "orders", 100, tmp_path)

    def run() -> None:
        query = (
            spark.readStream.format("inturn")
            .options(server=served.address, subject="orders", group="etl", startingOffsets="earliest")
            .load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(100)

    run()
    assert spark.read.parquet(str(tmp_path / "out")).count() == 100
    assert lag(served, "orders", "etl") == 0
    send(served, "orders", 40, tmp_path, first=100)
    run()
    assert spark.read.parquet(str(tmp_path / "out")).count() == 140
    assert lag(served, "orders", "etl") == 0


LEASE = LeaseSettings(life_s=2.0, renew_s=0.4, margin_s=0.2)


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Served]:
    """A served folder with short leases."""
    with serving(tmp_path / "brief", lease=LEASE) as opened:
        yield opened


def test_one_batch_query_comes_after_the_other(
    spark: SparkSession, brief: Served, tmp_path: Path, noted: Callable[[], list[tuple[str, int, str]]]
) -> None:
    """The first query does not keep the group taken over; the leases of the first query expire."""
    brief.connection.create_subject("orders", 2)
    for number in range(2):
        send(brief, "orders", 100, tmp_path, first=100 * number)
        rows = (
            spark.read.format("inturn")
            .options(server=brief.address, subject="orders", group="notify", handler=HANDLER)
            .load()
            .collect()
        )
        assert sum(row.handled for row in rows) == 100
    assert in_order(noted())
    online = brief.connection.consumer("orders", "notify", lambda message, _: None, order="key")
    with online:
        wait_until(lambda: len(online.leases()) == 2)


def batch_reader(served: Served) -> OrderedBatchReader:
    given = {"server": served.address, "subject": "orders", "group": "notify", "handler": HANDLER, "minPartitions": "1"}
    return OrderedBatchReader(parse_options(given, is_streaming=False))


def test_a_batch_is_not_over_before_its_work_is(brief: Served, tmp_path: Path) -> None:
    brief.connection.create_subject("orders", 1)
    send(brief, "orders", 10, tmp_path)
    (part,) = batch_reader(brief).partitions()
    assert part.plan.round_s == math.inf


def test_tasks_of_a_batch_that_come_too_late_fail(
    brief: Served, tmp_path: Path, noted: Callable[[], list[tuple[str, int, str]]]
) -> None:
    """Spark had no free cores for the tasks, and a different member got the leases."""
    brief.connection.create_subject("orders", 1)
    send(brief, "orders", 10, tmp_path)
    reader = batch_reader(brief)
    (part,) = reader.partitions()
    gate = threading.Event()
    online = brief.connection.consumer("orders", "notify", lambda message, _: gate.wait(100) and None, order="key")
    with online:
        wait_until(lambda: len(online.leases()) == 1)
        with pytest.raises(TaskFailed, match=r"task 0 of 'orders' for group 'notify'.*run the query again"):
            list(reader.read(part))
        gate.set()
        wait_until(lambda: lag(brief, "orders", "notify") == 0)
    assert noted() == []


def test_available_now_names_what_it_leaves_to_others(brief: Served, tmp_path: Path) -> None:
    brief.connection.create_subject("orders", 2)
    send(brief, "orders", 40, tmp_path)
    gate = threading.Event()
    online = brief.connection.consumer("orders", "notify", lambda message, _: gate.wait(100) and None, order="key")
    with online:
        wait_until(lambda: len(online.leases()) == 2)
        given = {"server": brief.address, "subject": "orders", "group": "notify", "handler": HANDLER}
        reader = OrderedStreamReader(parse_options(given, is_streaming=True))
        reader.prepareForTriggerAvailableNow()
        with capture_logs() as logs:
            assert reader.latestOffset({"round": 3}, ReadAllAvailable()) == {"round": 3}
        (left,) = [one for one in logs if one["event"] == "spark.left_to_others"]
        assert left["owners"] == {0: online.name, 1: online.name}
        gate.set()
    assert reader.reportLatestOffset() is not None


def test_a_stream_with_a_handler_goes_on_from_its_checkpoint(
    spark: SparkSession, brief: Served, tmp_path: Path, noted: Callable[[], list[tuple[str, int, str]]]
) -> None:
    """The stream is stopped during a round: uncommitted messages are handled again, all others once, in order."""
    brief.connection.create_subject("orders", 2)
    send(brief, "orders", 400, tmp_path)

    def start() -> StreamingQuery:
        checkpoint = str(tmp_path / "checkpoint")
        return for_each_stream(
            spark, brief.address, "orders", "notify", HANDLER, checkpoint=checkpoint, max_messages_per_trigger=50
        )

    query = start()
    wait_until(lambda: len(noted()) > 60)
    query.stop()
    assert len(noted()) < 400
    send(brief, "orders", 100, tmp_path, first=400)
    query = start()
    try:
        wait_until(lambda: lag(brief, "orders", "notify") == 0)
    finally:
        query.stop()
    calls = noted()
    first: dict[tuple[str, int], tuple[str, int, str]] = {}
    for call in calls:
        first.setdefault(call[:2], call)
    assert len(first) == 500
    assert in_order(list(first.values()))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"handler": "a:b"}, "group"),
        ({"order": "key"}, "handler"),
        ({"handler": "a:b", "group": "g", "order": "fast"}, "order"),
        ({"handler": "a:b", "group": "g", "consumerSettings": "{"}, "consumerSettings"),
        ({"handler": "a:b", "group": "g", "consumerSettings": '{"concurrency": 0}'}, "concurrency"),
        ({"handler": "a:b", "group": "g", "slots": "1-5"}, "slots"),
        ({"handler": "a:b", "group": "g", "startingOffsets": '{"0": 5}'}, "group reset"),
        ({"handler": "a:b", "group": "g", "roundSeconds": "-1"}, "roundSeconds"),
    ],
)
def test_wrong_options_are_named(more: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_options({"server": "inturn://localhost:1", "subject": "orders", **more})
