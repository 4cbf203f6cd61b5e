"""The source with a handler (S2), and with a group (S1): streams that are members, batches under leases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from inturn.model.errors import InvalidInput, NotFound
from inturn.spark.for_each import for_each_stream
from inturn.spark.options import parse_options
from tests.spark.served import Served

KEYS = 20


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, int, str]]]:
    """What the handler in `tests.spark.noting_handler` was called with: key, offset, where."""
    # Tasks run in other processes, which have the environment of the session's start: the place goes by the properties.

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


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.05)


def lag(served: Served, subject: str, group: str) -> int:
    try:
        return served.connection.describe_group(subject, group).lag
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
    """It shares the partitions with an online consumer, and hands over when it stops."""
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
