"""S1: the data source in batch queries."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, InputPartition
from pyspark.sql.types import StructType

import inturn
from inturn import Connection, Message, slot_of
from inturn.errors import ConnectionLost, InvalidInput, NotFound
from inturn.spark.ordered import task as connections
from inturn.spark.source.rows import OffsetRange
from inturn.spark.source.source import BatchReader, InturnDataSource
from tests.contract.bed import eventually
from tests.spark.served import Served, serving

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
COUNT = 200
KEYS = 10


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    """Close the connections of this process after every test."""
    yield
    for target in list(connections._connections):
        connections.disconnect(target)


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    with pushing(spark, True):
        yield


@pytest.fixture
def no_pushdown(spark: SparkSession) -> Iterator[None]:
    with pushing(spark, False):
        yield


@contextlib.contextmanager
def pushing(spark: SparkSession, is_on: bool) -> Iterator[None]:
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, is_on)
    yield
    spark.conf.set(PUSHDOWN, str(before))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A filled subject for tests that only read."""
    with serving(tmp_path_factory.mktemp("filled")) as served:
        send(served.connection)
        yield served


def send(mq: Connection, first: int = 0, count: int = COUNT) -> None:
    mq.create_subject("order.book", 4)
    with mq.producer() as producer:
        for number in range(first, first + count):
            tags = ("even",) if number % 2 == 0 else ()
            producer.send("order.book", b"%d" % number, key=f"k{number % KEYS}", tags=tags, properties={"n": "x"})


def load(spark: SparkSession, target: str, **options: object) -> DataFrame:
    reader = spark.read.format("inturn").option("server", target).option("subject", "order.book")
    return reader.options(**options).load()  # type: ignore[arg-type]


def reader_of(target: str, **options: str) -> BatchReader:
    """A reader, created as Spark does in the planning process."""
    made = InturnDataSource({"server": target, "subject": "order.book", **options})
    reader = made.reader(made.schema())
    assert isinstance(reader, BatchReader)
    return reader


def partition_of(key: str) -> int:
    return slot_of(key.encode()) * 4 // 1024


def test_a_query_gives_every_message_once_with_all_columns(spark: SparkSession, served: Served) -> None:
    send(served.connection)
    frame = load(spark, served.address)
    assert frame.schema.simpleString() == (
        "struct<subject:string,partition:int,offset:bigint,slot:int,key:binary,body:binary,tags:array<string>,"
        "properties:map<string,string>,born_at:timestamp,stored_at:timestamp>"
    )
    rows = frame.collect()
    expected = {
        (message.partition, message.offset): (message.key, message.body, message.tags, message.properties)
        for message in served.connection.reader("order.book")
    }
    assert len(rows) == COUNT == len(expected)
    for row in rows:
        place = (row.partition, row.offset)
        assert expected.pop(place) == (bytes(row.key), bytes(row.body), tuple(row.tags), row.properties)
        assert row.slot == slot_of(bytes(row.key))
        assert row.subject == "order.book"
        assert timedelta() <= row.stored_at - row.born_at < timedelta(minutes=1)
    # The slot is the same hash as Spark's own.
    assert frame.where("slot = pmod(xxhash64(key), 1024)").count() == COUNT


def test_offsets_and_times_bound_a_query(spark: SparkSession, served: Served) -> None:
    send(served.connection)
    ends = {str(one.index): one.end_offset for one in served.connection.describe_subject("order.book").partitions}
    ending = {**ends, "1": 9}
    reader = reader_of(
        served.address,
        startingoffsets='{"order.book": {"0": 3, "1": -2, "2": -1, "3": 0}}',
        endingoffsets=str(ending).replace("'", '"'),
    )
    planned = [(one.partition, one.start, one.until) for one in reader.partitions()]
    assert planned == [(0, 3, ends["0"]), (1, 0, 9), (3, 0, ends["3"])]
    now = datetime.now(UTC)
    assert load(spark, served.address, endingTimestamp=(now - timedelta(hours=1)).isoformat()).count() == 0
    hour_ago_ms = round((now - timedelta(hours=1)).timestamp() * 1000)
    assert load(spark, served.address, startingTimestamp=hour_ago_ms).count() == COUNT


def test_a_group_says_where_to_begin(served: Served) -> None:
    send(served.connection)
    seen = []
    with served.connection.consumer("order.book", "billing", lambda message, context: seen.append(message.offset)):
        eventually(lambda: len(seen) == COUNT, "all are handled")
    send(served.connection, COUNT, 5)
    assert sum(one.until - one.start for one in reader_of(served.address, group="billing").partitions()) == 5
    assert sum(one.until - one.start for one in reader_of(served.address, group="new").partitions()) == COUNT + 5


def test_offsets_that_are_not_there_end_the_query(spark: SparkSession, served: Served) -> None:
    send(served.connection)
    asked = '{"0": 9999, "1": 0, "2": 0, "3": 0}'
    with pytest.raises(PySparkException, match=r"order.book/0@9999.*failOnDataLoss"):
        load(spark, served.address, startingOffsets=asked).count()
    in_others = sum(
        one.end_offset for one in served.connection.describe_subject("order.book").partitions if one.index != 0
    )
    assert load(spark, served.address, startingOffsets=asked, failOnDataLoss=False).count() == in_others


def test_a_subject_that_is_not_there_is_told(spark: SparkSession, served: Served) -> None:
    with pytest.raises(PySparkException, match=r"no subject 'order.book'"):
        load(spark, served.address).count()


def test_ranges_become_more_tasks(spark: SparkSession, served: Served) -> None:
    send(served.connection)
    frame = load(spark, served.address, minPartitions=10)
    assert frame.rdd.getNumPartitions() >= 10
    assert frame.selectExpr("count(distinct partition, offset)").first() == (COUNT,)


def test_an_option_that_nobody_knows_is_told_by_load(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match=r"no option 'startingoffset'; did you mean 'startingOffsets'\?"):
        load(spark, "inturn://127.0.0.1:1", startingOffset="earliest")


def test_a_folder_is_read_by_its_path(spark: SparkSession, tmp_path: Path) -> None:
    with inturn.connect(tmp_path / "data", flush="os") as mq:
        send(mq)
        frame = spark.read.format("inturn").option("subject", "order.book").load(str(tmp_path / "data"))
        assert frame.count() == COUNT


def test_a_folder_is_not_looked_for_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = InturnDataSource({"path": str(tmp_path), "subject": "order.book"})
    reader = made.reader(made.schema())
    monkeypatch.setattr(socket, "gethostname", lambda: "executor-7")
    with pytest.raises(InvalidInput, match=r"'executor-7'; folders are for local masters.*inturn serve"):
        reader.read(OffsetRange(0, 0, 1))


def test_some_columns_are_enough(spark: SparkSession, served: Served) -> None:
    send(served.connection)
    reader = spark.read.format("inturn").option("server", served.address).option("subject", "order.book")
    assert set(reader.schema("body binary, slot int").load().first().asDict()) == {"body", "slot"}  # type: ignore[union-attr]
    with pytest.raises(PySparkException, match="no column 'boddy binary'"):
        reader.schema("boddy binary").load().count()
    with pytest.raises(PySparkException, match="no column 'slot bigint'"):
        reader.schema("slot bigint").load().count()


# Filters


@pytest.mark.parametrize(
    ("where", "tasks", "is_wanted"),
    [
        ("partition = 2", 1, lambda row: row.partition == 2),
        ("partition in (0, 3)", 2, lambda row: row.partition in (0, 3)),
        ("partition = 9", 0, lambda row: False),
        ("key = 'k3'", 1, lambda row: row.key == b"k3"),
        ("key in ('k3', 'k5')", len({partition_of("k3"), partition_of("k5")}), lambda row: row.key in (b"k3", b"k5")),
        (f"slot = {slot_of(b'k3')}", 1, lambda row: row.key == b"k3"),
        ("offset >= 5 and offset < 12", 4, lambda row: 5 <= row.offset < 12),
        ("offset > 1000000", 0, lambda row: False),
        ("key = 'k3' and array_contains(tags, 'even')", 1, lambda row: row.key == b"k3" and "even" in row.tags),
        ("partition = 1 or key = 'k3'", 4, lambda row: row.partition == 1 or row.key == b"k3"),
        ("array_contains(tags, 'even')", 4, lambda row: "even" in row.tags),
    ],
)
@pytest.mark.usefixtures("pushdown")
def test_only_what_a_filter_leaves_is_planned(
    spark: SparkSession, filled: Served, where: str, tasks: int, is_wanted: Callable[[Message], bool]
) -> None:
    frame = load(spark, filled.address).where(where)
    assert frame.rdd.getNumPartitions() == max(1, tasks)  # Spark makes one task of an empty plan
    found = {(row.partition, row.offset) for row in frame.collect()}
    messages = filled.connection.reader("order.book")
    assert found == {(message.partition, message.offset) for message in messages if is_wanted(message)}


def test_pushed_filters_leave_out_what_is_read(served: Served) -> None:
    send(served.connection)
    reader = reader_of(served.address)
    filters: list[Any] = [EqualTo(("key",), b"k3"), EqualTo(("body",), b"3")]
    assert reader.pushFilters(filters) == filters[1:]
    (work,) = reader.partitions()
    rows = [row for batch in reader.read(work) for row in batch.to_pylist()]
    assert len(rows) == COUNT // KEYS
    assert {row["key"] for row in rows} == {b"k3"}


@pytest.mark.usefixtures("no_pushdown")
def test_without_pushdown_spark_filters(spark: SparkSession, served: Served) -> None:
    send(served.connection)
    frame = load(spark, served.address).where("key = 'k3'")
    assert frame.rdd.getNumPartitions() == 4
    assert frame.count() == COUNT // KEYS


def test_slots_choose_rows(spark: SparkSession, served: Served) -> None:
    send(served.connection)
    slots = {slot_of(b"k3"), slot_of(b"k4")}
    frame = load(spark, served.address, slots=",".join(map(str, slots)))
    assert {row.slot for row in frame.collect()} == slots
    assert frame.count() == 2 * COUNT // KEYS
    assert frame.rdd.getNumPartitions() == len({partition_of("k3"), partition_of("k4")})


# Readers


def test_a_reader_is_pickled_without_its_connection(served: Served) -> None:
    send(served.connection)
    reader = reader_of(served.address)
    work = reader.partitions()[0]
    copy = pickle.loads(pickle.dumps(reader))
    assert pickle.loads(pickle.dumps(work)) == work
    assert [batch.num_rows for batch in copy.read(work)] == [work.until - work.start]


def test_an_empty_plan_has_no_rows(served: Served) -> None:
    served.connection.create_subject("order.book", 4)
    reader = reader_of(served.address)
    assert list(reader.partitions()) == []
    assert list(reader.read(InputPartition(None))) == []  # Spark's substitute for an empty plan


def test_a_server_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECT_WAIT_S", 0.0)
    reader = reader_of("inturn://127.0.0.1:1")
    with pytest.raises(ConnectionLost, match=r"inturn://127.0.0.1:1: .*the driver on host"):
        reader.partitions()
    with pytest.raises(ConnectionLost, match=r"inturn://127.0.0.1:1: .*a task on host .*Check"):
        list(reader.read(OffsetRange(0, 0, 1)))


def test_a_partition_that_is_not_there_is_told(served: Served) -> None:
    served.connection.create_subject("order.book", 1)
    with pytest.raises(NotFound):
        list(reader_of(served.address).read(OffsetRange(7, 0, 1)))


def test_credentials_are_in_no_plan_and_no_error(spark: SparkSession, served: Served) -> None:
    send(served.connection, count=1)
    frame = load(spark, served.address, token="tok-secret", password="pw-secret").where("slot >= 0")
    plan = frame._jdf.queryExecution().toString()
    assert "inturn" in plan
    assert "secret" not in plan
    with pytest.raises(PySparkException) as failed:
        load(spark, served.address, token="tok-secret", endingOffsets='{"0": 9999, "1": 0, "2": 0, "3": 0}').count()
    assert "9999" in str(failed.value)
    assert "secret" not in str(failed.value)
    assert "secret" not in repr(InturnDataSource({"token": "tok-secret"}))
    assert "secret" not in repr(reader_of(served.address, token="tok-secret")._options)


def test_the_schema_is_no_text() -> None:
    assert isinstance(InturnDataSource({"server": "inturn://h:1", "subject": "s"}).schema(), StructType)
