"""The data source in streams."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

import inturn
from inturn import Connection, LogSettings, slot_of
from inturn.errors import InvalidInput, NotFound
from inturn.spark import connections, source
from inturn.spark.offsets import ByPartition
from inturn.spark.source import InturnDataSource, StreamReader
from tests.spark.served import Served

END_S = 60.0
ALL = ReadAllAvailable()


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    """Connections that a test made in this process are not left to the next."""
    yield
    for target in list(connections._connections):
        connections.disconnect(target)


def send(mq: Connection, first: int, count: int, partitions: int = 2) -> None:
    mq.create_subject("order.book", partitions)
    with mq.producer() as producer:
        for number in range(first, first + count):
            producer.send("order.book", b"%d" % number, key=f"k{number % 10}")


def reader_of(target: str, **options: str) -> StreamReader:
    where = "server" if target.startswith("inturn:") else "path"
    made = InturnDataSource({where: target, "subject": "order.book", "startingoffsets": "earliest", **options})
    reader = made.streamReader(made.schema())
    assert isinstance(reader, StreamReader)
    return reader


def run_now(spark: SparkSession, target: str, folder: Path, **options: object) -> StreamingQuery:
    """A stream to Parquet, of all that is there now."""
    options = {"server": target, "subject": "order.book", "startingOffsets": "earliest", **options}
    stream = spark.readStream.format("inturn").options(**options).load()  # type: ignore[arg-type]
    query = (
        stream.writeStream.format("parquet")
        .option("path", str(folder / "rows"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(int(END_S))
    return query


def written(spark: SparkSession, folder: Path) -> list[int]:
    return sorted(int(row.body) for row in spark.read.parquet(str(folder / "rows")).select("body").collect())


def test_a_stream_takes_what_is_there_in_bites_and_goes_on_after_a_restart(
    spark: SparkSession, served: Served, tmp_path: Path
) -> None:
    send(served.connection, 0, 250)
    query = run_now(spark, served.address, tmp_path, maxMessagesPerTrigger=100)
    assert [progress["numInputRows"] for progress in query.recentProgress] == [100, 100, 50]
    first = query.recentProgress[0]["sources"][0]
    ends = {str(one.index): one.end_offset for one in served.connection.describe_subject("order.book").partitions}
    assert json.loads(first["latestOffset"]) == {"order.book": ends}, "whatever was admitted"
    assert sum(json.loads(first["endOffset"])["order.book"].values()) == 100
    assert written(spark, tmp_path) == list(range(250))
    send(served.connection, 250, 30)
    query = run_now(spark, served.address, tmp_path)
    assert [progress["numInputRows"] for progress in query.recentProgress] == [30]
    assert written(spark, tmp_path) == list(range(280))


def test_a_stream_follows_what_comes(spark: SparkSession, served: Served, tmp_path: Path) -> None:
    send(served.connection, 0, 5)
    slots = sorted({slot_of(b"k%d" % number) for number in range(10)})
    stream = (
        spark.readStream.format("inturn")
        .option("server", served.address)
        .option("subject", "order.book")
        .option("slots", ",".join(str(slot) for slot in slots if slot != slot_of(b"k3")))
        .load()
    )
    query = stream.writeStream.format("memory").queryName("followed").start()
    try:
        until_s = time.monotonic() + END_S
        while not query.recentProgress and time.monotonic() < until_s:
            time.sleep(0.05)  # it begins at the latest: what was there before is not its business
        send(served.connection, 5, 20)
        while spark.table("followed").count() < 18 and time.monotonic() < until_s:
            time.sleep(0.05)
        bodies = sorted(int(row.body) for row in spark.table("followed").collect())
        assert bodies == [number for number in range(5, 25) if number % 10 != 3]
    finally:
        query.stop()


def test_a_failed_micro_batch_is_read_again_as_it_was(served: Served) -> None:
    send(served.connection, 0, 100)
    reader = reader_of(served.address)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(30))
    send(served.connection, 100, 100)
    runs = []
    for again in (reader, pickle.loads(pickle.dumps(reader)), reader_of(served.address)):
        works = again.partitions(start, end)
        runs.append([row for work in works for batch in again.read(work) for row in batch.to_pylist()])
    assert len(runs[0]) == 30
    assert runs[0] == runs[1] == runs[2]


def test_nothing_new_is_waited_for_not_asked_for_again(served: Served) -> None:
    send(served.connection, 0, 10)
    reader = reader_of(served.address)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    began_s = time.monotonic()
    assert reader.latestOffset(end, ALL) == end
    assert time.monotonic() - began_s >= source.IDLE_WAIT_S * 0.9


def test_what_comes_ends_the_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "IDLE_WAIT_S", 30.0)
    send(served.connection, 0, 10)
    reader = reader_of(served.address)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    for first in (10, 20):  # the second finds a long poll that is still held
        threading.Timer(0.2, send, (served.connection, first, 1)).start()
        began_s = time.monotonic()
        later = reader.latestOffset(end, ALL)
        assert time.monotonic() - began_s < 10
        assert sum(later["order.book"].values()) == sum(end["order.book"].values()) + 1
        end = later


def test_available_now_is_what_was_there_when_it_began(served: Served) -> None:
    send(served.connection, 0, 100)
    reader = reader_of(served.address, maxmessagespertrigger="60")
    assert reader.getDefaultReadLimit() == ReadMaxRows(60)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    send(served.connection, 100, 100)
    first = reader.latestOffset(start, ReadMaxRows(60))
    second = reader.latestOffset(first, ReadMaxRows(60))
    assert sum(first["order.book"].values()) == 60
    assert sum(second["order.book"].values()) == 100
    assert reader.latestOffset(second, ReadMaxRows(60)) == second
    latest = reader.reportLatestOffset()
    assert latest is not None
    assert sum(latest["order.book"].values()) == 200


def test_a_stream_begins_at_the_latest_unless_a_group_or_an_option_says_more(served: Served) -> None:
    send(served.connection, 0, 10)

    def begins(**options: str) -> int:
        made = InturnDataSource({"server": served.address, "subject": "order.book", **options})
        return sum(made.streamReader(made.schema()).initialOffset()["order.book"].values())

    assert begins() == 10
    assert begins(group="billing") == 0
    assert begins(group="billing", startingoffsets="latest") == 10


def test_a_checkpoint_that_is_ahead_of_the_log_is_told(served: Served) -> None:
    send(served.connection, 0, 10)
    ahead = {"order.book": {"0": 500, "1": 0}}
    with pytest.raises(NotFound, match=r"order.book/0@500.*ends at"):
        reader_of(served.address).latestOffset(ahead, ALL)
    end = reader_of(served.address, failondataloss="false").latestOffset(ahead, ALL)
    assert end["order.book"]["0"] == 500, "it never goes back"


def test_a_checkpoint_that_retention_overtook_is_told(tmp_path: Path) -> None:
    with inturn.connect(tmp_path / "data", log=LogSettings(flush=inturn.Flush.OS, segment_bytes=2000)) as mq:
        mq.create_subject("order.book", 1)
        for first in range(0, 500, 10):
            send(mq, first, 10, partitions=1)
    kept = LogSettings(flush=inturn.Flush.OS, segment_bytes=2000, retention_bytes=5000)
    with inturn.connect(tmp_path / "data", log=kept) as mq:
        first = mq.describe_subject("order.book").partitions[0].start_offset
        assert first > 0
        target = str(tmp_path / "data")
        start, end = {"order.book": {"0": 2}}, {"order.book": {"0": 500}}
        with pytest.raises(NotFound, match=rf"order.book/0@2'; the first that is there is {first}"):
            reader_of(target).partitions(start, end)
        (work,) = reader_of(target, failondataloss="false").partitions(start, end)
        assert (work.start, work.until) == (first, 500)
        connections.disconnect(target)


def test_a_checkpoint_of_another_subject_is_told(served: Served) -> None:
    send(served.connection, 0, 1)
    with pytest.raises(InvalidInput, match="checkpointLocation"):
        reader_of(served.address).latestOffset({"other": {"0": 1}}, ALL)


def test_a_partition_that_came_later_is_read_from_its_beginning(served: Served) -> None:
    send(served.connection, 0, 100)
    reader = reader_of(served.address)
    start = {"order.book": {"0": 5}}
    end = reader.latestOffset(start, ALL)
    assert set(end["order.book"]) == {"0", "1"}
    assert [(work.partition, work.start) for work in reader.partitions(start, end)] == [(0, 5), (1, 0)]


def test_ranges_of_a_micro_batch_become_more_tasks(served: Served) -> None:
    send(served.connection, 0, 100)
    reader = reader_of(served.address, minpartitions="8")
    start = reader.initialOffset()
    assert len(reader.partitions(start, reader.latestOffset(start, ALL))) >= 8
    assert list(reader.partitions(start, start)) == []


def test_a_holder_is_told_what_is_done(served: Served) -> None:
    class Noting(StreamReader):
        def _done_below(self, offsets: ByPartition) -> None:
            told.append(offsets)

    told: list[ByPartition] = []
    send(served.connection, 0, 10)
    plain = reader_of(served.address)
    reader = Noting(plain._options, plain._columns)
    start = reader.initialOffset()
    assert told == []
    end = reader.latestOffset(start, ALL)
    reader.commit(end)
    assert told == [{0: 0, 1: 0}, {int(one): offset for one, offset in end["order.book"].items()}]


def test_a_reader_that_waits_is_pickled_and_stopped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "IDLE_WAIT_S", 0.05)
    send(served.connection, 0, 10)
    reader = reader_of(served.address)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    reader.latestOffset(end, ALL)
    connection = connections.connected(served.address, "the driver")
    copy = pickle.loads(pickle.dumps(reader))
    reader.stop()
    assert connection.is_closed
    assert copy.latestOffset(end, ALL) == end


def test_credentials_are_in_no_plan_of_a_stream(spark: SparkSession, served: Served) -> None:
    served.connection.create_subject("order.book", 1)
    options = {"server": served.address, "subject": "order.book", "token": "tok-secret", "password": "pw-secret"}
    stream = spark.readStream.format("inturn").options(**options).load()
    plan = stream._jdf.queryExecution().toString()
    assert "inturn" in plan
    assert "secret" not in plan


def test_an_end_is_nothing_for_a_stream(served: Served) -> None:
    with pytest.raises(InvalidInput, match="endingOffsets"):
        reader_of(served.address, endingoffsets="latest")
