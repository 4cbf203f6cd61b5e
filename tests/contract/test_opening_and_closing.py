"""Opening, closing, and durability."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import inturn
from inturn import Connection, LogSettings
from inturn.model.errors import Closed, FolderInUse, InturnError, InvalidInput, ProducerFenced
from tests.contract.bed import WAIT_S, Bed, Seen, eventually, quick, send_all

LOCK = """
import sys
from inturn.server.folder import Folder
folder = Folder(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""
SEND_FOR_EVER = """
import sys, inturn
mq = inturn.connect(sys.argv[1], flush=sys.argv[2])
mq.create_subject("orders", 2)
producer = mq.producer("writer")
number = 0
while True:
    handles = [producer.send("orders", b"%d" % (number + n), key=b"%d" % (n % 5)) for n in range(20)]
    for n, handle in enumerate(handles):
        stored = handle.result(60)
        print(number + n, stored.partition, stored.offset, flush=True)
    number += 20
"""


def test_a_folder_that_is_locked_but_not_served_names_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example `inturn doctor`, which opens the folder alone."""
    monkeypatch.setattr("inturn.server.folder.OPENING_S", 0.2)
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUse, match=str(holder.pid)) as caught:
            inturn.connect(tmp_path)
        assert caught.value.pid == holder.pid
        assert str(tmp_path) in str(caught.value)
    finally:
        holder.communicate()
    inturn.connect(tmp_path).close()


def test_an_opening_that_failed_leaves_the_folder_free(tmp_path: Path) -> None:
    """The error names the problem."""
    with inturn.connect(tmp_path) as mq:
        mq.create_subject("orders", 1)
    (tmp_path / "log").rename(tmp_path / "away")
    (tmp_path / "log").write_text("not a folder")
    with pytest.raises((InturnError, OSError)):
        inturn.connect(tmp_path)
    (tmp_path / "log").unlink()
    (tmp_path / "away").rename(tmp_path / "log")
    inturn.connect(tmp_path).close()


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file"):
        inturn.connect(tmp_path / "file")


def test_flush_can_be_said_once_only(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not both"):
        inturn.connect(tmp_path, flush="os", log=LogSettings())
    with pytest.raises(InvalidInput, match="'always', 'interval', 'os'"):
        inturn.connect(tmp_path, flush="sometimes")


@pytest.mark.parametrize("flush", ["always", "os"])
def test_everything_acknowledged_survives_kill_9(tmp_path: Path, flush: str) -> None:
    """B1, P3."""
    sender = subprocess.Popen(
        [sys.executable, "-c", SEND_FOR_EVER, str(tmp_path), flush], stdout=subprocess.PIPE, text=True
    )
    assert sender.stdout is not None
    printed = [sender.stdout.readline() for _ in range(300)]
    os.kill(sender.pid, signal.SIGKILL)
    rest, _ = sender.communicate()
    printed += [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    with inturn.connect(tmp_path) as mq:
        stored = {(m.partition, m.offset): int(m.body) for m in mq.reader("orders")}
        for line in printed:
            number, partition, offset = map(int, line.split())
            assert stored[partition, offset] == number
        by_key: dict[bytes | None, list[int]] = {}
        for message in mq.reader("orders"):
            by_key.setdefault(message.key, []).append(int(message.body))
        for key, numbers in by_key.items():
            assert key is not None
            assert numbers == list(range(int(key), numbers[-1] + 1, 5)), "each once, in order, none left out"
        producer = mq.producer("writer")
        ends = [partition.end_offset for partition in mq.describe_subject("orders").partitions]
        place = producer.send_sync("orders", b"after", key=b"0")
        assert place.offset == ends[place.partition], "it goes on behind the last"


def test_a_new_process_takes_over_at_once_from_consumers_of_a_killed_one(tmp_path: Path) -> None:
    """B2: the leases of a dead process need not expire. With the default lease of 15 s."""
    script = """
import sys, time, inturn
mq = inturn.connect(sys.argv[1])
mq.create_subject("line", 1)
with mq.producer() as producer:
    for n in range(10):
        producer.send("line", b"%d" % n, key="k")
def handle(message, context):
    if message.body == b"5":
        print("five", flush=True)
        time.sleep(100)
mq.consumer("line", "g", handle).start()
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "five\n"
    process.kill()
    process.communicate()
    seen = Seen()
    with inturn.connect(tmp_path) as mq, mq.consumer("line", "g", seen, settings=quick()):
        seen.wait_for(5, 10.0)
    assert seen.bodies[-5:] == [b"5", b"6", b"7", b"8", b"9"]


def test_closing_flushes_what_was_sent(bed: Bed) -> None:
    mq = bed.open()
    mq.create_subject("orders", 4)
    producer = mq.producer()
    handles = [producer.send("orders", b"%d" % n, key=f"{n % 9}") for n in range(3000)]
    mq.close()
    assert all(handle.done for handle in handles)
    assert {handle.result(0).subject for handle in handles} == {"orders"}
    mq = bed.reopen()
    assert sorted(int(message.body) for message in mq.reader("orders")) == list(range(3000))


def test_closing_flushes_all_producers_though_one_has_failed(bed: Bed) -> None:
    mq = bed.open()
    mq.create_subject("orders", 4)
    fenced = mq.producer("ledger")
    mq.producer("ledger")
    with pytest.raises(ProducerFenced):
        fenced.send_sync("orders", b"", key="k", timeout_s=WAIT_S)
    good = mq.producer()
    handles = [good.send("orders", b"%d" % n, key=f"{n % 9}") for n in range(3000)]
    with contextlib.suppress(ProducerFenced):
        mq.close()
    with pytest.raises(Closed):
        good.send("orders", b"", key="k")
    assert [handle.result(0).subject for handle in handles] == ["orders"] * 3000


def test_everything_says_closed_after_closing(mq: Connection) -> None:
    producer, reader = mq.producer(), mq.reader("orders")
    consumer = mq.consumer("orders", "g", Seen())
    mq.close()
    mq.close()
    for use in (
        lambda: mq.create_subject("new"),
        lambda: mq.subject("orders"),
        mq.subjects,
        lambda: mq.describe_subject("orders"),
        mq.producer,
        lambda: mq.reader("orders"),
        lambda: mq.consumer("orders", "g", Seen()),
        mq.groups,
        lambda: mq.group("orders", "g").describe(),
        lambda: mq.group("orders", "g").reset("first"),
        lambda: producer.send("orders", b""),
        lambda: reader.read(0),
    ):
        with pytest.raises(Closed, match="is closed; open a new one"):
            use()
    consumer.start()
    with pytest.raises(Closed):
        consumer.wait(WAIT_S)


def test_closing_stops_the_consumers_and_commits(bed: Bed) -> None:
    mq = bed.open()
    mq.create_subject("orders", 4)
    send_all(mq, "orders", 100)
    seen = Seen()
    mq.consumer("orders", "g", seen).start()
    seen.wait_for(100)
    mq = bed.reopen()
    assert sum(partition.committed for partition in mq.group("orders", "g").describe().partitions) == 100


def test_a_consumer_that_was_stopped_cannot_be_started_again(mq: Connection) -> None:
    """The call raises an error instead of doing nothing."""
    consumer = mq.consumer("orders", "g", Seen(), settings=quick())
    consumer.start()
    assert consumer.stop()
    assert consumer.stop(), "stopping twice is stopping once"
    with pytest.raises(Closed):
        consumer.start()


def test_no_threads_are_left_after_closing(bed: Bed) -> None:
    before = set(threading.enumerate())
    mq = bed.open()
    mq.create_subject("orders", 1)
    send_all(mq, "orders", 5)
    seen = Seen()
    with mq.consumer("orders", "g", seen, settings=quick()):
        seen.wait_for(5)
    bed.close()
    eventually(lambda: set(threading.enumerate()) <= before, "all have ended")


def test_run_handles_until_shutdown(mq: Connection) -> None:
    send_all(mq, "orders", 10)
    seen: list[bytes] = []

    @mq.handler("orders", "g", settings=quick(concurrency=1))
    def handle(message, context):
        seen.append(message.body)
        if len(seen) == 10:
            mq.shutdown()

    mq.run(timeout_s=WAIT_S)
    assert len(seen) == 10
    assert sum(partition.committed for partition in mq.group("orders", "g").describe().partitions) == 10


def test_run_needs_a_handler(mq: Connection) -> None:
    with pytest.raises(InvalidInput, match="handler"):
        mq.run()


def test_a_reader_goes_on_where_it_was(mq: Connection) -> None:
    """B1."""
    send_all(mq, "orders", 10, keys=1)
    reader = mq.reader("orders")
    assert len(list(reader)) == 10
    assert list(reader) == []
    send_all(mq, "orders", 3, keys=1)
    assert [message.body for message in reader] == [b"0", b"1", b"2"]
    assert len(list(mq.reader("orders", "last"))) == 0
    assert mq.groups() == [], "it is no group"
