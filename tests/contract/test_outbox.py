"""P7, P8: outboxes, on every kind of connection. Tests with databases are in tests/outbox."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from inturn import Connection, Kept, Outbox, OutboxSettings, ProducerSettings, Stored, aio
from tests.contract.bed import STEADY_LEASE, Bed, Seen, eventually

SETTINGS = OutboxSettings(poll_s=0.01, lease=STEADY_LEASE)


@pytest.fixture
def shop(tmp_path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(tmp_path / "shop.db")
    Outbox().create_table(connection)
    connection.commit()
    return connection


def put(shop: sqlite3.Connection, numbers: range) -> None:
    with shop:
        for number in numbers:
            Outbox().put(shop, "orders", b"%d" % number, key=f"key-{number % 7}")


def test_what_is_committed_reaches_handlers_in_the_order_of_its_keys(
    mq: Connection, shop: sqlite3.Connection, tmp_path: Path
) -> None:
    outbox, seen = Outbox(tmp_path / "shop.db", settings=SETTINGS), Seen()
    with mq.consumer("orders", "g", seen, order="key"), outbox.scan(mq):
        put(shop, range(100))
        put(shop, range(100, 200))
        seen.wait_for(200)
    shop.close()
    for key in range(7):
        numbers = [int(message.body) for message in seen.messages if message.key == b"key-%d" % key]
        assert numbers == list(range(key, 200, 7))


def test_a_scanner_goes_on_when_everything_was_restarted(
    bed: Bed, mq: Connection, shop: sqlite3.Connection, tmp_path: Path
) -> None:
    outbox = Outbox(tmp_path / "shop.db", settings=SETTINGS)
    put(shop, range(50))
    assert outbox.scan(mq).run_once().sent == 50
    put(shop, range(50, 100))
    again = bed.reopen(flush="os")
    assert outbox.scan(again).run_once().sent == 50
    shop.close()
    assert sorted(int(message.body) for message in again.reader("orders")) == list(range(100))


def test_a_producer_with_an_outbox_sends_as_any_other(mq: Connection, tmp_path: Path) -> None:
    mq.create_subject("loose", partitions=2, strategy="best-effort")
    outbox = Outbox(tmp_path / "kept.db", settings=SETTINGS)
    with mq.producer(settings=ProducerSettings(tries_max=2), outbox=outbox) as producer:
        assert type(producer.send_sync("loose", b"1", key="k")) is Stored
    assert outbox.status().waiting == 0


def test_what_an_earlier_program_kept_is_sent_by_the_next_producer(mq: Connection, tmp_path: Path) -> None:
    mq.create_subject("loose", partitions=2, strategy="best-effort")
    outbox = Outbox(tmp_path / "kept.db", settings=SETTINGS)
    left = sqlite3.connect(tmp_path / "kept.db")
    outbox.create_table(left)
    with left:
        outbox.put(left, "loose", b"1", key="k")
    left.close()
    with mq.producer(outbox=outbox) as producer:
        result = producer.send_sync("loose", b"2", key="k")
        assert isinstance(result, Stored | Kept)
        eventually(lambda: outbox.status().waiting == 0, "the outbox is empty")
    assert [message.body for message in mq.reader("loose")] == [b"1", b"2"]


async def test_asyncio_programs_have_it_too(bed: Bed, tmp_path: Path) -> None:
    blocking = bed.open(flush="os")
    blocking.create_subject("loose", partitions=2, strategy="best-effort")
    outbox = Outbox(tmp_path / "kept.db", settings=SETTINGS)
    async with aio.connect(blocking.target) as mq, mq.producer(outbox=outbox) as producer:
        stored = await producer.send("loose", b"1", key="k")
    assert type(stored) is Stored
