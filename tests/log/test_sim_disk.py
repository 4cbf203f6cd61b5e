"""The simulated disk really loses data. Otherwise the tests of the log would prove nothing."""

from __future__ import annotations

import errno
import random

import pytest

from simulator.disk import SimCrash, SimDisk

SEEDS = range(200)


def test_what_was_synced_survives_every_crash() -> None:
    for seed in SEEDS:
        disk = SimDisk(random.Random(seed))
        file = disk.open("d/a", create=True)
        file.write_at(0, [b"hello ", b"world"])
        file.sync()
        disk.sync_folder("d")
        disk.crash()
        assert disk.contents("d/a") == b"hello world"


def test_unsynced_writes_survive_wholly_partly_out_of_order_or_not() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(random.Random(seed))
        file = disk.open("d/a", create=True)
        disk.sync_folder("d")
        file.write_at(0, [b"aaaa"])
        file.write_at(4, [b"bbbb"])
        disk.crash()
        outcomes.add(disk.contents("d/a"))
    assert {b"", b"aaaa", b"aaaabbbb", bytes(4) + b"bbbb"} <= outcomes
    assert b"aaaabb" in outcomes, "a torn write"


def test_a_folder_entry_that_was_not_synced_may_be_lost_with_the_synced_file() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(random.Random(seed))
        disk.open("d/a", create=True).sync()
        disk.crash()
        outcomes.add(disk.exists("d/a"))
    assert outcomes == {True, False}


def test_an_unsynced_removal_or_rename_may_be_undone() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(random.Random(seed))
        for path in ("d/a", "d/b"):
            disk.open(path, create=True)
        disk.sync_folder("d")
        disk.remove("d/a")
        disk.rename("d/b", "d/c")
        disk.crash()
        outcomes.add(tuple(disk.paths()))
    assert outcomes == {("d/a", "d/b"), ("d/a", "d/c"), ("d/b",), ("d/c",)}


def test_an_unsynced_truncation_may_be_undone() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(random.Random(seed))
        file = disk.open("d/a", create=True)
        file.write_at(0, [b"12345678"])
        file.sync()
        disk.sync_folder("d")
        file.truncate(3)
        assert disk.contents("d/a") == b"123"
        disk.crash()
        outcomes.add(disk.contents("d/a"))
    assert outcomes == {b"123", b"12345678"}


def test_a_killed_process_loses_nothing_but_a_later_crash_may() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(random.Random(seed))
        file = disk.open("d/a", create=True)
        disk.sync_folder("d")
        file.write_at(0, [b"12"])
        disk.kill()
        assert disk.contents("d/a") == b"12"
        with pytest.raises(OSError, match="before the crash"):
            file.sync()
        disk.crash()
        outcomes.add(disk.contents("d/a"))
    assert {b"", b"1", b"12"} <= outcomes


def test_a_full_disk_writes_what_fits_and_then_says_so() -> None:
    disk = SimDisk(random.Random(0))
    file = disk.open("d/a", create=True)
    disk.set_free(5)
    with pytest.raises(OSError, match="No space") as caught:
        file.write_at(0, [b"12345678"])
    assert caught.value.errno == errno.ENOSPC
    assert disk.contents("d/a") == b"12345"
    file.truncate(2)
    assert disk.free_bytes("d") == 3
    file.write_at(2, [b"abc"])
    file.write_at(0, [b"over"])


def test_a_crash_at_an_operation_stops_everything_until_the_restart() -> None:
    disk = SimDisk(random.Random(0))
    file = disk.open("d/a", create=True)
    disk.crash_at(disk.operations + 2)
    file.write_at(0, [b"1"])
    with pytest.raises(SimCrash):
        file.sync()
    with pytest.raises(SimCrash):
        file.write_at(0, [b"1"])
    disk.crash()
    with pytest.raises(OSError, match="before the crash"):
        file.read_at(0, 1)


def test_failures_hit_the_named_operation_on_the_named_path_once() -> None:
    disk = SimDisk(random.Random(0))
    first, second = disk.open("d/a", create=True), disk.open("d/b", create=True)
    disk.fail_next_sync(OSError(errno.EIO, "broken"), lambda path: path == "d/b")
    first.sync()
    with pytest.raises(OSError, match="broken"):
        second.sync()
    second.sync()
