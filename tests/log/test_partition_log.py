"""B1: reading, flushing, retention, and the engine on a real disk."""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path

import pytest

from inturn.log.embedded import EmbeddedEngine
from inturn.model.errors import Closed, RouteChanged
from inturn.model.routing import Partition
from inturn.model.settings import Flush, LogSettings
from inturn.model.time import Timers
from inturn.protocol.commands import Appended
from simulator.disk import SimCrash


def test_reading_gives_whole_batches_from_the_one_with_the_offset(bench, batch) -> None:
    log = bench.open()
    for _ in range(5):
        bench.append(log, batch(count=3))
    found = log.read(4, 1 << 20)
    assert [one.header.base_offset for one in found] == [3, 6, 9, 12]
    assert [one.header.base_offset for one in log.read(4, 1)] == [3], "one, even if it is larger than asked for"
    assert [one.header.base_offset for one in log.read(14, 1 << 20)] == [12]
    assert log.read(15, 100) == []
    assert log.read(1000, 100) == []


def test_a_sealed_log_takes_one_route_only_and_knows_what_it_has(bench, batch) -> None:
    """M4: check for duplicates before checking the route. Otherwise a message would be stored twice."""
    log = bench.open()
    old = batch("old", 2, producer=5)
    assert bench.append(log, old) == 0
    assert log.seal("orders", 2) == 2
    assert bench.append(log, old) == 0
    with pytest.raises(RouteChanged, match="'orders' is at route version 2"):
        bench.append(log, batch("late", 1, producer=5, sequence=2))
    assert bench.append(log, batch("new", 1, producer=5, sequence=2, route=2)) == 2


@pytest.mark.parametrize("max_bytes", [1, 100, 333, 1000, 1 << 20])
def test_reading_on_is_right_across_segments_with_and_without_hints(bench, batch, stored, max_bytes: int) -> None:
    settings = {"flush": "os", "segment_bytes": 1500, "index_every_bytes": 300}
    log = bench.open(**settings)
    expected = {}
    for number in range(80):
        one = batch(f"number {number} " * (number % 7 + 1), number % 3 + 1)
        expected[bench.append(log, one)] = one.payload
        if number % 10 == 0:
            assert stored(log, 0, max_bytes) == expected
    assert stored(log, 0, max_bytes) == expected
    log._hints.clear()
    assert stored(log, 0, max_bytes) == expected
    for offset in range(log.end_offset):
        log._hints.clear()
        header = log.read(offset, max_bytes)[0].header
        assert header.base_offset <= offset < header.next_offset


def test_a_reader_at_the_end_goes_on_after_a_new_segment(bench, batch) -> None:
    log = bench.open(segment_bytes=150)
    offset = 0
    for number in range(10):
        bench.append(log, batch(f"number {number}"))
        (found,) = log.read(offset, 1000)
        assert found.header.base_offset == number
        offset = found.header.next_offset
        assert log.read(offset, 1000) == []


def test_a_time_leads_to_the_first_offset_stored_then_or_later(bench, batch) -> None:
    log = bench.open(segment_bytes=500, index_every_bytes=150)
    for _ in range(20):
        bench.append(log, batch(count=2))
        bench.wait(10)
    for reopened in (False, True):
        if reopened:
            log.close()
            log = bench.open(segment_bytes=500, index_every_bytes=150)
        for number in range(20):
            stored_at_ms = 1_000_000 + number * 10_000
            assert log.offset_at(stored_at_ms) == 2 * number
            assert log.offset_at(stored_at_ms - 1) == 2 * number
            assert log.offset_at(stored_at_ms + 1) == 2 * number + 2
        assert log.offset_at(0) == 0
        assert log.offset_at(1 << 50) == 40


def test_times_never_go_back(bench, batch) -> None:
    log = bench.open()
    bench.append(log, batch())
    bench.clock.now_s -= 500
    bench.append(log, batch())
    first, second = log.read(0, 1 << 20)
    assert second.header.stored_at_ms == first.header.stored_at_ms


def test_flush_interval_answers_at_once_and_syncs_by_the_timer(bench, batch) -> None:
    log = bench.open(flush="interval", flush_interval_s=0.5)
    bench.append(log, batch())  # the first append reserves offsets for very many appends
    before = bench.disk.sync_count
    for _ in range(9):
        bench.append(log, batch())
    assert (log.end_offset, log.synced_offset) == (10, 0)
    assert bench.disk.sync_count == before
    bench.wait(0.4)
    assert log.synced_offset == 0
    bench.wait(0.2)
    assert log.synced_offset == 10
    assert bench.disk.sync_count == before + 1
    bench.wait(5)
    assert bench.disk.sync_count == before + 1, "nothing new, nothing to sync"
    bench.append(log, batch())
    bench.wait(0.6)
    assert log.synced_offset == 11


def test_flush_os_answers_at_once_and_syncs_only_for_checkpoints(bench, batch) -> None:
    log = bench.open(flush="os", checkpoint_every_bytes=5000, checkpoint_interval_s=5.0)
    bench.append(log, batch())  # the first append reserves offsets for very many appends
    before = bench.disk.sync_count
    for _ in range(19):
        bench.append(log, batch())
    assert log.end_offset == 20
    for _ in range(60):
        bench.append(log, batch())
    assert bench.disk.sync_count == before, "enough bytes, but not yet time"
    bench.clock.now_s += 5.0
    bench.append(log, batch())
    assert bench.disk.sync_count > before


def test_retention_by_size_deletes_the_oldest_segments_and_the_start_survives(bench, batch, stored) -> None:
    settings = {"segment_bytes": 500, "retention_bytes": 1600}
    log = bench.open(**settings)
    for _ in range(40):
        bench.append(log, batch())
    assert log.start_offset == 0
    deleted = log.apply_retention(bench.clock.time_ms())
    start = log.start_offset
    assert deleted >= 5
    assert start > 0
    assert sum(bench.disk.size(path) for path in bench.disk.paths() if path.endswith(".log")) <= 1600
    assert log.read(0, 10)[0].header.base_offset == start, "reading from before starts at the oldest"
    assert list(stored(log)) == list(range(start, 40))
    bench.crash()
    log = bench.open(**settings)
    assert log.start_offset == start
    assert list(stored(log)) == list(range(start, 40))
    assert log.apply_retention(bench.clock.time_ms()) == 0
    assert not list(log.verify())


def test_retention_by_age_counts_from_the_last_batch_of_a_segment(bench, batch) -> None:
    log = bench.open(segment_bytes=500, retention_s=100)
    for _ in range(40):
        bench.append(log, batch())
        bench.wait(10)
    log.apply_retention(bench.clock.time_ms())
    assert 24 <= log.start_offset <= 30  # the last 100 s are 10 messages; a segment has 4 at most
    bench.wait(10_000)
    log.apply_retention(bench.clock.time_ms())
    assert 35 <= log.start_offset < 40, "the active segment stays"
    assert bench.append(log, batch()) == 40


def test_retention_stays_below_the_checkpoint(bench, batch) -> None:
    settings = {"segment_bytes": 500, "retention_bytes": 1}
    log = bench.open(**settings)
    for number in range(40):
        if number > 10:
            full = OSError(errno.ENOSPC, "full")
            bench.disk.fail_next("write", full, lambda path: path.endswith("checkpoint.tmp"))
        bench.append(log, batch())
    log.apply_retention(0)
    assert 0 < log.start_offset < 12
    bench.crash()
    log = bench.open(**settings)
    assert log.trouble is None
    assert log.end_offset == 40


def test_nothing_is_deleted_without_a_retention(bench, batch) -> None:
    log = bench.open(segment_bytes=500)
    for _ in range(40):
        bench.append(log, batch())
    assert log.apply_retention(1 << 60) == 0
    assert log.start_offset == 0


def test_a_retention_that_crashes_at_any_operation_leaves_no_hole(new_bench, batch, stored) -> None:
    settings = {"segment_bytes": 500, "retention_bytes": 1000}
    for operation in range(1, 30):
        bench = new_bench(operation)
        log = bench.open(**settings)
        for _ in range(24):
            bench.append(log, batch())
        bench.disk.crash_at(bench.disk.operations + operation)
        with contextlib.suppress(SimCrash):
            log.apply_retention(0)
        bench.crash()
        log = bench.open(**settings)
        assert log.trouble is None
        assert not list(log.verify())
        assert list(stored(log)) == list(range(log.start_offset, 24))


def test_threads_that_append_at_once_share_syncs_and_are_answered_in_order(tmp_path: Path, batch) -> None:
    engine = EmbeddedEngine(tmp_path, LogSettings(segment_bytes=20_000, reserve_bytes=0), Timers())
    log = engine.open(Partition("b", "p1"), 0)
    answers: list[int] = []
    done = threading.Event()

    def reply(answer: object) -> None:
        assert isinstance(answer, Appended)
        answers.append(answer.base_offset)
        if len(answers) == 800:
            done.set()

    def produce(producer: int) -> None:
        for sequence in range(200):
            log.append(batch(producer=producer, sequence=sequence), reply, inline=producer % 2 == 0)

    threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(1, 5)]
    for thread in threads:
        thread.start()
    seen = 0
    while not done.wait(0.001):
        for found in log.read(seen, 10_000):
            assert found.header.base_offset == seen
            seen = found.header.next_offset
    for thread in threads:
        thread.join()
    assert answers == list(range(800))
    assert log.end_offset == 800
    assert not list(log.verify())
    engine.close()
    engine.close()
    with pytest.raises(Closed):
        engine.open(Partition("b", "p1"), 0)


def test_a_process_that_was_killed_finds_everything_again(tmp_path: Path, batch, stored) -> None:
    partition = Partition("b", "p1")
    engine = EmbeddedEngine(tmp_path / "deep" / "down", LogSettings(flush=Flush.OS, reserve_bytes=0), Timers())
    log = engine.open(partition, 0)
    for number in range(50):
        log.append(batch(f"number {number}"), lambda answer: None)
    expected = stored(log)
    again = EmbeddedEngine(tmp_path / "deep" / "down", LogSettings(reserve_bytes=0), Timers())
    log = again.open(partition, 0)
    assert stored(log) == expected
    assert log.scanned_bytes > 0
    assert again.open(partition, 0) is log
    again.close()
