from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import inturn
from inturn.model.settings import LogSettings
from inturn.server.folder_doctor import Finding, Level, examine, log_bytes
from tests.cli.conftest import Cli


def _fingerprint(folder: Path) -> dict[str, tuple[int, str]]:
    """All files of the folder: names, times of change, contents."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *folder.rglob("*")]
    }


def _examine(folder: Path) -> list[Finding]:
    """The findings that are not ok. The doctor must not change the folder."""
    before = _fingerprint(folder)
    findings = examine(folder)
    assert _fingerprint(folder) == before
    return [one for one in findings if one.level is not Level.OK]


def _segment(folder: Path, name: str) -> Path:
    (segment,) = (folder / "log" / name).glob("*.log")
    return segment


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """A folder with a partition of ten batches, a single message each."""
    with inturn.connect(tmp_path / "data") as connection:
        connection.create_subject("orders", partitions=1)
        with connection.producer() as producer:
            for number in range(10):
                producer.send_sync("orders", f"message {number}".encode(), key="k")
    return tmp_path / "data"


def test_a_healthy_folder_is_well(orders: Cli) -> None:
    orders("consume", "orders", "--group", "billing")
    assert _examine(orders.data) == []
    ran = orders("doctor", "--json")
    assert ran.code == 0
    assert ran.json["ok"] is True
    checks = {one["check"] for one in ran.json["findings"]}
    assert checks == {"lock", "state", "schema", "log", "offsets", "leases", "folders", "disk"}
    assert "all is well" in orders("doctor").out


def test_a_flipped_bit_anywhere_is_found_and_its_offset_is_named(batches: Path) -> None:
    segment = _segment(batches, "p1")
    original = segment.read_bytes()
    size = len(original) // 10
    for number in range(10):
        for at in (number * size + 3, number * size + 30, (number + 1) * size - 1):
            _flip(segment, at)
            (found,) = _examine(batches)
            assert (found.check, found.level) == ("log", Level.ERROR)
            assert (found.partition, found.offset) == ("orders/0", number)
            assert "orders/0 is damaged at offset" in found.what
            assert "restore" in found.next_step
            segment.write_bytes(original)
    assert _examine(batches) == []


def test_all_damaged_places_are_listed(batches: Path) -> None:
    segment = _segment(batches, "p1")
    size = segment.stat().st_size // 10
    for number in (2, 5, 7):
        _flip(segment, number * size + size - 1)
    assert [one.offset for one in _examine(batches)] == [2, 5, 7]


def test_damage_makes_the_command_fail_and_tells_people(orders: Cli) -> None:
    _flip(_segment(orders.data, "p2"), 200)
    ran = orders("doctor")
    assert ran.code == 1
    assert "orders/1 is damaged at offset 0" in ran.out
    assert "restore" in ran.out
    assert "1 error, 0 warnings" in ran.out
    ran = orders("doctor", "--json")
    assert (ran.code, ran.json["ok"], ran.json["counts"]["error"]) == (1, False, 1)


def test_other_partitions_are_printed_before_damage_is_told(orders: Cli) -> None:
    _flip(_segment(orders.data, "p2"), 200)
    for options in ([], ["--group", "g"]):
        ran = orders("consume", "orders", "--json", *options)
        assert ran.code == 1
        assert {one["partition"] for one in ran.json_lines} == {0, 2}
        assert "damaged at offset 0" in ran.err


@pytest.mark.parametrize("tail", [b"\0" * 50, b"iT" + b"\1" * 500, b"x"])
def test_a_torn_tail_is_a_warning_and_gone_after_the_next_open(batches: Path, tail: bytes) -> None:
    with _segment(batches, "p1").open("ab") as segment:
        segment.write(tail)
    (found,) = _examine(batches)
    assert (found.level, found.partition, found.offset) == (Level.WARNING, "orders/0", 10)
    assert "will be cut at the next open" in found.next_step
    inturn.connect(batches).close()
    assert _examine(batches) == []


def test_a_log_that_lost_what_was_synced_is_damaged(batches: Path) -> None:
    segment = _segment(batches, "p1")
    os.truncate(segment, segment.stat().st_size // 10 * 6)
    (found,) = _examine(batches)
    assert (found.level, found.offset) == (Level.ERROR, 6)
    segment.unlink()
    (found,) = _examine(batches)
    assert (found.level, found.offset) == (Level.ERROR, 0)
    assert "all segments are gone" in found.what


def test_a_log_that_is_gone_is_an_error_if_it_was_read(orders: Cli) -> None:
    shutil.rmtree(orders.data / "log" / "p1")
    (found,) = _examine(orders.data)
    assert (found.level, found.partition) == (Level.WARNING, "orders/0")
    orders("subject", "list")  # creates the log again, empty
    orders("consume", "orders", "--group", "billing")
    shutil.rmtree(orders.data / "log" / "p2")
    (found,) = _examine(orders.data)
    assert (found.level, found.partition) == (Level.ERROR, "orders/1")
    assert "gone" in found.what


def test_a_file_in_the_place_of_a_log_is_an_error(orders: Cli) -> None:
    shutil.rmtree(orders.data / "log" / "p1")
    (orders.data / "log" / "p1").write_text("?")
    (found,) = _examine(orders.data)
    assert (found.level, found.partition) == (Level.ERROR, "orders/0")
    assert orders("subject", "list", "--json").error["type"] == "StorageError"


def test_a_folder_of_no_subject_is_a_warning(orders: Cli) -> None:
    (orders.data / "log" / "p99").mkdir()
    (found,) = _examine(orders.data)
    assert (found.check, found.level) == ("folders", Level.WARNING)
    assert "p99" in found.what


def test_little_room_is_told(orders: Cli) -> None:
    for reserve_bytes, level in ((2**60, Level.ERROR), (1, Level.OK)):
        findings = examine(orders.data, settings=LogSettings(reserve_bytes=reserve_bytes))
        assert [one.level for one in findings if one.check == "disk"] == [level]


def test_a_database_that_is_none_is_an_error_and_the_logs_are_checked_all_the_same(orders: Cli) -> None:
    (orders.data / "state.db").write_bytes(b"junk" * 1000)
    (found,) = _examine(orders.data)
    assert (found.check, found.level) == ("state", Level.ERROR)
    assert any("3 of 3 partitions" in one.what for one in examine(orders.data))
    _flip(_segment(orders.data, "p3"), 200)
    assert {one.partition for one in _examine(orders.data)} == {None, "p3"}


def test_a_newer_schema_is_an_error(orders: Cli) -> None:
    import sqlite3

    connection = sqlite3.connect(orders.data / "state.db")
    connection.execute("UPDATE schema_version SET version = 99")
    connection.commit()
    connection.close()
    (found,) = _examine(orders.data)
    assert (found.check, found.level) == ("schema", Level.ERROR)
    assert "99" in found.what


def test_offsets_outside_the_log_are_told(batches: Path) -> None:
    assert Cli(batches)("consume", "orders", "--group", "billing").code == 0
    (batches / "log" / "p1" / "checkpoint").unlink()
    segment = _segment(batches, "p1")
    os.truncate(segment, segment.stat().st_size // 10 * 6)
    (found,) = _examine(batches)
    assert (found.check, found.level, found.offset) == ("offsets", Level.WARNING, 10)
    assert "billing is at offset 10 of partition orders/0; the log has 0 to 6" in found.what


_HOLDER = """
import sys, time, inturn
connection = inturn.connect(sys.argv[1])
consumer = connection.consumer("orders", "billing", lambda message, context: None)
consumer.start()
while not consumer.statistics().partitions:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(orders: Cli) -> subprocess.Popen[bytes]:
    """A process that has the folder open, with a running consumer."""
    process = subprocess.Popen([sys.executable, "-c", _HOLDER, str(orders.data)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_folder_that_is_open_is_checked_as_it_stands(orders: Cli, holder: subprocess.Popen[bytes]) -> None:
    try:
        findings = examine(orders.data)
        assert all(one.level is Level.OK for one in findings)
        assert f"process {holder.pid} has the folder open" in findings[0].what
        assert any(one.check == "leases" and "billing" in one.what for one in findings)
    finally:
        _kill(holder)


def test_the_leases_of_a_dead_process_are_told(orders: Cli, holder: subprocess.Popen[bytes]) -> None:
    _kill(holder)
    (found,) = _examine(orders.data)
    assert (found.check, found.level) == ("leases", Level.WARNING)
    assert str(holder.pid) in found.what
    assert "the next open releases the leases" in found.next_step
    orders("subject", "list")
    assert _examine(orders.data) == []


def test_progress_counts_every_byte(orders: Cli) -> None:
    read: list[int] = []
    examine(orders.data, advance=read.append)
    assert sum(read) >= log_bytes(orders.data) > 0


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(inturn.errors.InvalidInput, match="no folder of inturn"):
        examine(tmp_path)
