"""S1: rows of messages, as Arrow batches."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

import inturn
from inturn import Connection, slot_of
from inturn.errors import ConnectionLost, InvalidInput, LogDamaged, NotFound
from inturn.model.batch import encode
from inturn.model.message import Outgoing
from inturn.model.routing import SlotSet
from inturn.model.settings import Flush, LogSettings
from inturn.protocol.commands import Answer, Append, Appended, Command, Node, Pulled, Read, Reply
from inturn.protocol.request import ask
from inturn.spark.ordered import task as connections
from inturn.spark.source import rows
from inturn.spark.source.filters import RowFilter
from inturn.spark.source.rows import COLUMNS, OffsetRange, arrow_schema, cut, read_rows

ALL = RowFilter()


class Noting:
    """A node that records commands, with replaceable answers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.reads: list[Read] = []
        self.pulled: list[Pulled] = []

    def submit(self, command: Command, reply: Reply) -> None:
        if isinstance(command, Read):
            self.reads.append(command)
        self._node.submit(command, lambda answer: reply(self._noted(answer)))

    def _noted(self, answer: object) -> Answer:
        if isinstance(answer, Pulled):
            answer = self.changed(answer)
            self.pulled.append(answer)
        return answer  # type: ignore[return-value]

    def changed(self, pulled: Pulled) -> Pulled:
        return pulled


class Damaging(Noting):
    def changed(self, pulled: Pulled) -> Pulled:
        first, *others = pulled.batches
        payload = bytearray(first.payload)
        payload[-1] ^= 1
        return msgspec.structs.replace(
            pulled, batches=(msgspec.structs.replace(first, payload=memoryview(payload)), *others)
        )


@pytest.fixture
def mq(tmp_path: Path) -> Iterator[Connection]:
    with inturn.connect(tmp_path / "data", flush="os") as connection:
        connection.create_subject("s", 1)
        yield connection


def append(mq: Connection, messages: Sequence[Outgoing], partition: int = 0, compression: str | None = None) -> None:
    slots = array("H", [0 if one.key is None else slot_of(one.key) for one in messages])
    ask(mq.node, Append("s", partition, encode(messages, slots, compression=compression)), Appended)


def fill(mq: Connection, count: int, size: int = 10) -> None:
    """Send messages of 7 keys in stored batches of this size."""
    for first in range(0, count, size):
        numbers = range(first, min(first + size, count))
        append(mq, [Outgoing(b"body-%d" % number, b"k%d" % (number % 7), number) for number in numbers])


def read(
    node: Node, start: int, until: int, wanted: RowFilter = ALL, columns: StructType = COLUMNS, fail: bool = True
) -> list[dict[str, object]]:
    batches = list(read_rows(node, "s", OffsetRange(0, start, until), wanted, columns, fail))
    assert all(batch.schema.equals(arrow_schema(columns)) for batch in batches)
    assert all(batch.num_rows for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    found: list[dict[str, object]] = pa.Table.from_batches(batches, arrow_schema(columns)).to_pylist()
    return found


def offsets(found: list[dict[str, object]]) -> list[object]:
    return [row["offset"] for row in found]


def test_a_row_has_all_there_is_of_a_message(mq: Connection) -> None:
    append(mq, [Outgoing(b"one", b"k", 1_700_000_000_123, ("a", "b"), {"x": "1", "y": "é"}), Outgoing(b"")])
    first, second = read(mq.node, 0, 2)
    stored_at = first.pop("stored_at")
    assert stored_at == second.pop("stored_at")
    assert first.pop("born_at").timestamp() == 1_700_000_000.123  # type: ignore[attr-defined]
    assert second.pop("born_at").timestamp() == 0  # type: ignore[attr-defined]
    assert first == {
        "subject": "s",
        "partition": 0,
        "offset": 0,
        "slot": slot_of(b"k"),
        "key": b"k",
        "body": b"one",
        "tags": ["a", "b"],
        "properties": [("x", "1"), ("y", "é")],
    }
    assert second == {
        "subject": "s",
        "partition": 0,
        "offset": 1,
        "slot": 0,
        "key": None,
        "body": b"",
        "tags": [],
        "properties": [],
    }


def test_a_range_is_exact_though_batches_straddle_it(mq: Connection) -> None:
    fill(mq, 50, size=10)
    assert offsets(read(mq.node, 7, 33)) == list(range(7, 33))
    assert offsets(read(mq.node, 12, 13)) == [12]
    assert read(mq.node, 7, 33) == read(mq.node, 7, 33)


def test_many_reads_make_one_range(mq: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "READ_BYTES", 100)
    fill(mq, 500, size=10)
    node = Noting(mq.node)
    assert offsets(read(node, 5, 495)) == list(range(5, 495))
    assert len(node.reads) == 50
    assert all(command.offset < 495 for command in node.reads)


def test_large_stored_batches_become_several_arrow_batches(mq: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_MAX", 30)
    fill(mq, 100, size=100)
    found = list(read_rows(mq.node, "s", OffsetRange(0, 0, 100), ALL, COLUMNS, True))
    assert [batch.num_rows for batch in found] == [30, 30, 30, 10]
    assert offsets(pa.Table.from_batches(found).to_pylist()) == list(range(100))


def test_compressed_batches_are_read(mq: Connection) -> None:
    append(mq, [Outgoing(b"x" * 1000, b"k%d" % (number % 2)) for number in range(10)], compression="zstd")
    assert offsets(read(mq.node, 2, 10)) == list(range(2, 10))
    assert offsets(read(mq.node, 2, 10, RowFilter(slots=SlotSet.of([slot_of(b"k1")])))) == [3, 5, 7, 9]


def test_columns_that_are_not_asked_for_are_not_made(mq: Connection) -> None:
    fill(mq, 3)
    columns = StructType([COLUMNS["body"], COLUMNS["offset"]])
    assert read(mq.node, 1, 3, columns=columns) == [{"body": b"body-1", "offset": 1}, {"body": b"body-2", "offset": 2}]


def test_of_other_slots_nothing_is_sent(mq: Connection) -> None:
    fill(mq, 700, size=100)
    node = Noting(mq.node)
    wanted = RowFilter(slots=SlotSet.of([slot_of(b"k3")]))
    assert offsets(read(node, 5, 690, wanted)) == list(range(10, 690, 7))
    some = sum(len(batch.payload) for pulled in node.pulled for batch in pulled.batches)
    node.pulled.clear()
    read(node, 5, 690)
    assert some < sum(len(batch.payload) for pulled in node.pulled for batch in pulled.batches) / 3


def test_keys_are_exact_within_their_slot(mq: Connection) -> None:
    twin = next(b"t%d" % number for number in range(100_000) if slot_of(b"t%d" % number) == slot_of(b"k"))
    append(mq, [Outgoing(b"1", b"k"), Outgoing(b"2", twin), Outgoing(b"3", b"k")])
    wanted = RowFilter(slots=SlotSet.of([slot_of(b"k")]), keys=frozenset({b"k"}))
    assert [row["body"] for row in read(mq.node, 0, 3, wanted)] == [b"1", b"3"]


def test_a_time_of_birth_that_no_calendar_has_stops_nobody(mq: Connection) -> None:
    append(mq, [Outgoing(b"a", None, 2**64 - 1), Outgoing(b"b", None, -(2**63)), Outgoing(b"c", None, 5)])
    (batch,) = read_rows(mq.node, "s", OffsetRange(0, 0, 3), ALL, COLUMNS, True)
    late, early, right = batch.column("born_at").cast(pa.int64()).to_pylist()
    assert early < 0 < right == 5000 < late


def test_a_damaged_batch_is_told_as_a_reader_does(mq: Connection) -> None:
    fill(mq, 20)
    with pytest.raises(LogDamaged, match=r"s/0.*offset 0"):
        read(Damaging(mq.node), 0, 20)


def test_a_log_that_is_shorter_than_the_range_is_told(mq: Connection) -> None:
    fill(mq, 20)
    with pytest.raises(NotFound, match=r"s/0@30.*ends at 20"):
        read(mq.node, 15, 30)
    assert offsets(read(mq.node, 15, 30, fail=False)) == list(range(15, 20))


def test_what_retention_removes_before_it_is_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = LogSettings(flush=Flush.OS, segment_bytes=2000)
    with inturn.connect(tmp_path / "data", log=small) as mq:
        mq.create_subject("s", 1)
        fill(mq, 500)
    kept = LogSettings(flush=Flush.OS, segment_bytes=2000, retention_bytes=5000)
    with inturn.connect(tmp_path / "data", log=kept) as mq:
        first = mq.describe_subject("s").partitions[0].start_offset
        assert 0 < first < 500
        with pytest.raises(NotFound, match=rf"s/0@3'; the first stored offset is {first}"):
            read(mq.node, 3, 500)
        assert "spark.data_lost" not in caplog.text
        assert offsets(read(mq.node, 3, 500, fail=False)) == list(range(first, 500))
        assert "spark.data_lost" in caplog.text
        assert offsets(read(mq.node, first, 500)) == list(range(first, 500))


def test_a_server_that_is_gone_is_told_with_the_host_that_missed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECT_WAIT_S", 0.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "executor-7")
    with pytest.raises(ConnectionLost, match=r"inturn://127.0.0.1:1.*a task on host 'executor-7'.*Check") as lost:
        connections.connected("inturn://127.0.0.1:1", "a task")
    assert lost.value.address == "inturn://127.0.0.1:1"


def test_one_connection_serves_all_tasks_of_a_process(tmp_path: Path) -> None:
    with inturn.connect(tmp_path / "data", flush="os"):
        target = str(tmp_path / "data")
        first = connections.connected(target, "a task")
        assert connections.connected(target, "a task") is first
        first.close()  # as after a fork
        second = connections.connected(target, "a task")
        assert not second.is_closed
        connections.disconnect(target)
        assert second.is_closed


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nowhere"):
        connections.connected(str(tmp_path / "nowhere"), "the driver")
    assert not (tmp_path / "nowhere").exists()


def test_ranges_are_cut_into_as_many_as_are_wanted() -> None:
    whole = [OffsetRange(0, 0, 90), OffsetRange(1, 5, 15)]
    assert cut(whole, None) == whole
    assert cut(whole, 2) == whole
    pieces = cut(whole, 10)
    assert len(pieces) >= 10
    for partition, start, until in ((0, 0, 90), (1, 5, 15)):
        mine = [one for one in pieces if one.partition == partition]
        assert mine[0].start == start
        assert mine[-1].until == until
        assert all(before.until == after.start for before, after in pairwise(mine))
    assert len(cut([OffsetRange(0, 0, 3)], 10)) == 3
    assert cut([], 10) == []
