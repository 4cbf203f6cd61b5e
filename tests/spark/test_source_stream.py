"""S1: the data source in streams."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery
from structlog.testing import capture_logs

import inturn
from inturn import Connection, ConsumerSettings, Context, LeaseSettings, LogSettings, Message, OnExhausted, slot_of
from inturn.errors import GroupConflict, InvalidInput, LeaseHeld, NotFound
from inturn.protocol.commands import GroupName
from inturn.spark.ordered import task as connections
from inturn.spark.source import ordered as stream_member
from inturn.spark.source.offsets import ByPartition
from inturn.spark.source.source import InturnDataSource, StreamReader
from tests.spark.served import Served, serving
from tests.spark.waiting import wait_until

END_S = 60.0
ALL = ReadAllAvailable()


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    """Close the connections of this process after every test."""
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
    """Run an AvailableNow stream to Parquet."""
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
            time.sleep(0.05)  # the stream starts at the latest offsets and ignores earlier messages
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
    assert time.monotonic() - began_s >= stream_member.IDLE_WAIT_S * 0.9


def test_what_comes_ends_the_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_member, "IDLE_WAIT_S", 30.0)
    send(served.connection, 0, 10)
    reader = reader_of(served.address)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    for first in (10, 20):  # at the second send a long poll is still open
        threading.Timer(0.2, send, (served.connection, first, 1)).start()
        began_s = time.monotonic()
        later = reader.latestOffset(end, ALL)
        assert time.monotonic() - began_s < 20
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
    assert begins(group="audit", startingoffsets="latest") == 10
    assert begins(group="billing", startingoffsets="latest") == 0, "it is there, and stands where it stands"


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
        with pytest.raises(NotFound, match=rf"order.book/0@2'; the first stored offset is {first}"):
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
    monkeypatch.setattr(stream_member, "IDLE_WAIT_S", 0.05)
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


# With a group

LEASE = LeaseSettings(life_s=1.5, renew_s=0.3, margin_s=0.1)
QUICK = ConsumerSettings(heartbeat_s=0.2, commit_interval_s=0.05)
Offsets = dict[str, dict[str, int]]


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Served]:
    """A served folder with short leases."""
    with serving(tmp_path / "brief", lease=LEASE) as opened:
        yield opened


@pytest.fixture
def etl(brief: Served) -> Iterator[StreamReader]:
    """A stream reader in group etl; one partition has ten messages."""
    send(brief.connection, 0, 10, partitions=1)
    reader = reader_of(brief.address, group="etl")
    yield reader
    reader._hand_back()


def rows(reader: StreamReader, start: Offsets, end: Offsets) -> list[int]:
    works = reader.partitions(start, end)
    return [row["offset"] for work in works for batch in reader.read(work) for row in batch.to_pylist()]


def committed(served: Served, group: str = "etl") -> list[tuple[int, int]]:
    """Committed offset and number of finished messages above the offset, by partition."""
    if GroupName("order.book", group) not in served.connection.groups():
        return []
    described = served.connection.group("order.book", group).describe()
    return [(one.committed, one.finished_count) for one in described.partitions]


def vanish(reader: StreamReader) -> None:
    """End the reader as a killed query does."""
    assert reader._holder is not None
    reader._holder.abandon()
    reader._holder = None


def fails(_: Message, __: Context) -> None:
    raise ValueError("on purpose")


def test_a_micro_batch_of_a_query_that_was_killed_is_replayed_when_its_leases_are_over(
    brief: Served, etl: StreamReader
) -> None:
    start = etl.initialOffset()
    end = etl.latestOffset(start, ALL)
    assert rows(etl, start, end) == list(range(10))
    vanish(etl)
    again = reader_of(brief.address, group="etl")
    assert rows(again, start, end) == list(range(10)), "Spark counts the micro-batch as done after this"
    assert committed(brief) == [(0, 0)]
    assert again.latestOffset(end, ALL) == end
    assert committed(brief) == [(10, 0)]
    again.stop()


def test_a_planned_range_that_somebody_else_holds_is_never_passed_by(brief: Served, etl: StreamReader) -> None:
    start = etl.initialOffset()
    end = etl.latestOffset(start, ALL)
    etl._hand_back()
    gate = threading.Event()
    online = brief.connection.consumer(
        "order.book", "etl", lambda message, _: gate.wait(100) and None, order="key", settings=QUICK, name="online"
    )
    online.start()
    wait_until(lambda: online.leases(), "it holds the partition")
    with pytest.raises(LeaseHeld, match=r"partition 0 .*online-"):
        etl.partitions(start, end)
    gate.set()
    wait_until(lambda: committed(brief) == [(10, 0)], "the other has done it")
    assert rows(etl, start, end) == [], "so there is nothing left to wait for"
    online.stop()


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(4)])
def test_a_group_that_was_set_back_is_read_again_from_there(
    brief: Served, etl: StreamReader, limit: ReadAllAvailable | ReadMaxRows
) -> None:
    end = etl.latestOffset(etl.initialOffset(), ALL)
    etl.partitions(etl.initialOffset(), end)
    etl.latestOffset(end, ALL)
    assert committed(brief) == [(10, 0)]
    etl.stop()
    brief.connection.group("order.book", "etl").reset("first")
    reader = reader_of(brief.address, group="etl")  # with the checkpoint from before
    found = []
    while (later := reader.latestOffset(end, limit)) != end:
        found += rows(reader, end, later)
        end = later
    assert found == list(range(10))
    assert committed(brief) == [(10, 0)]
    reader.stop()


def test_what_was_set_back_does_not_wait_until_nothing_is_new_elsewhere(brief: Served) -> None:
    send(brief.connection, 0, 40)
    reader = reader_of(brief.address, group="etl")
    reader.initialOffset()
    wait_until(lambda: len(reader._held_positions()) == 2, "it holds both")
    ends = {str(one.index): one.end_offset for one in brief.connection.describe_subject("order.book").partitions}
    begin = {"order.book": {"0": ends["0"], "1": 0}}  # the checkpoint is ahead of the group in one partition
    end = reader.latestOffset(begin, ALL)
    assert end["order.book"] == ends
    assert len(rows(reader, begin, end)) == 40
    assert reader.latestOffset(end, ALL) == end
    assert sum(offset for offset, _ in committed(brief)) == 40
    reader.stop()


def test_available_now_ends_where_others_have_done_the_work(brief: Served, etl: StreamReader) -> None:
    start = etl.initialOffset()
    etl._hand_back()
    with brief.connection.consumer("order.book", "etl", lambda message, _: None, order="key", settings=QUICK):
        wait_until(lambda: committed(brief) == [(10, 0)], "the other has done it")
    etl.prepareForTriggerAvailableNow()
    end = etl.latestOffset(start, ALL)
    assert rows(etl, start, end) == []
    assert etl.latestOffset(end, ALL) == end
    assert etl._holder is None, "handed back"
    etl.commit(end)
    assert etl._holder is None


def test_what_others_have_finished_is_left_out_and_stays_finished(brief: Served) -> None:
    send(brief.connection, 0, 1, partitions=1)
    with brief.connection.producer() as producer:
        for number in range(1, 10):
            producer.send("order.book", b"%d" % number, key=f"other-{number}" if number != 5 else "k0")

    def handle(message: Message, context: Context) -> None:
        if message.key_text == "k0":
            fails(message, context)

    with brief.connection.consumer("order.book", "etl", handle, order="key", settings=QUICK):
        wait_until(lambda: committed(brief) == [(0, 8)], "all but one key are done")
    reader = reader_of(brief.address, group="etl", minpartitions="2")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(3))
    assert rows(reader, start, end) == [0]
    later = reader.latestOffset(end, ReadMaxRows(3))
    assert committed(brief) == [(5, 4)]
    assert brief.connection.group("order.book", "etl").keys() == [], "what failed went to the sink"
    assert rows(reader, end, later) == [5]
    assert reader.latestOffset(later, ReadMaxRows(3)) == {"order.book": {"0": 10}}
    assert committed(brief) == [(10, 0)]
    reader.stop()


def test_rows_that_are_with_spark_are_not_given_to_a_new_member_at_once(brief: Served) -> None:
    send(brief.connection, 0, 40)
    reader = reader_of(brief.address, group="etl")
    start = reader.initialOffset()
    wait_until(lambda: len(reader._held_positions()) == 2, "it holds both")
    end = reader.latestOffset(start, ALL)
    assert len(rows(reader, start, end)) == 40
    handled: list[int] = []
    online = brief.connection.consumer(
        "order.book", "etl", lambda message, _: handled.append(message.offset), order="key", settings=QUICK
    )
    with online:
        wait_until(lambda: len(reader._held_positions()) == 1, "one is for the other")
        reader.commit(end)
        wait_until(lambda: len(online.leases()) == 1, "now it has it")
    assert handled == []
    assert sum(offset for offset, _ in committed(brief)) == 40
    reader.stop()


def test_a_query_keeps_to_the_order_of_the_members_or_as_it_is_told(brief: Served) -> None:
    send(brief.connection, 0, 1)

    def order_of(**options: str) -> str | None:
        reader = reader_of(brief.address, group="etl", **options)
        reader.initialOffset()
        order = brief.connection.group("order.book", "etl").describe().order
        reader.stop()
        return order

    assert order_of() == "key"
    assert order_of(order="partition") == "partition"
    with brief.connection.consumer("order.book", "etl", lambda message, _: None, order="partition") as online:
        wait_until(lambda: online.leases(), "it is there")
        assert order_of() == "partition"
    with brief.connection.consumer("order.book", "etl", lambda message, _: None, order="none") as online:
        wait_until(lambda: online.leases(), "it is there")
        with pytest.raises(GroupConflict, match="rows have no handler"):
            order_of()


def test_nothing_goes_past_a_parked_key(brief: Served) -> None:
    send(brief.connection, 0, 3, partitions=1)
    parking = ConsumerSettings(heartbeat_s=0.2, commit_interval_s=0.05, max_attempts=1, on_exhausted=OnExhausted.PARK)
    with brief.connection.consumer("order.book", "etl", fails, order="key", settings=parking):
        wait_until(lambda: committed(brief) == [(3, 0)], "all keys are parked")
    send(brief.connection, 3, 7, partitions=1)
    reader = reader_of(brief.address, group="etl")
    with pytest.raises(GroupConflict, match=r"3 of its keys are parked, the first is b'k0' in partition 0"):
        reader.latestOffset(reader.initialOffset(), ALL)
    wait_until(lambda: not brief.connection.group("order.book", "etl").describe().members, "and the group is free")
    assert committed(brief) == [(3, 0)]


def test_a_new_group_at_the_latest_misses_nothing_that_comes_after(brief: Served) -> None:
    send(brief.connection, 0, 10, partitions=1)
    reader = reader_of(brief.address, group="etl", startingoffsets="latest")
    start = reader.initialOffset()
    send(brief.connection, 10, 2, partitions=1)
    assert rows(reader, start, reader.latestOffset(start, ALL)) == [10, 11]
    reader.stop()


def test_available_now_names_what_it_leaves_to_others(brief: Served) -> None:
    gate = threading.Event()
    send(brief.connection, 0, 40)
    online = brief.connection.consumer(
        "order.book", "etl", lambda message, _: gate.wait(100) and None, order="key", settings=QUICK, name="online"
    )
    online.start()
    wait_until(lambda: len(online.leases()) == 2, "it holds both")
    reader = reader_of(brief.address, group="etl")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()  # waits for its share; the online handlers still run
    with capture_logs() as logs:
        assert reader.latestOffset(start, ALL) == start
    (left,) = [one for one in logs if one["event"] == "spark.left_to_others"]
    assert left["owners"] == {0: online.name, 1: online.name}
    gate.set()
    online.stop()


def test_a_stream_of_a_group_goes_on_from_its_checkpoint_after_its_sink_failed(
    spark: SparkSession, brief: Served, tmp_path: Path
) -> None:
    """The sink fails after its write, so the micro-batch is repeated; no message is lost."""
    send(brief.connection, 0, 60)
    batches: list[tuple[int, list[int]]] = []

    def run(*, broken: int | None) -> None:
        def write(frame: DataFrame, number: int) -> None:
            batches.append((number, sorted(int(row.body) for row in frame.select("body").collect())))
            if number == broken:
                raise ValueError("the sink is broken")

        options = {"server": brief.address, "subject": "order.book", "group": "etl", "maxMessagesPerTrigger": "20"}
        query = (
            spark.readStream.format("inturn")
            .options(**options)
            .load()
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        if broken is None:
            assert query.awaitTermination(int(END_S))
        else:
            with pytest.raises(StreamingQueryException, match="the sink is broken"):
                query.awaitTermination(int(END_S))

    run(broken=1)
    assert [number for number, _ in batches] == [0, 1]
    assert sum(offset for offset, _ in committed(brief)) == 20, "of the first micro-batch"
    send(brief.connection, 60, 30)
    run(broken=None)
    assert batches[2] == batches[1]
    first = [body for number, bodies in batches[:1] + batches[2:] for body in bodies]
    assert sorted(first) == list(range(90))
    assert sum(offset for offset, _ in committed(brief)) == 90
