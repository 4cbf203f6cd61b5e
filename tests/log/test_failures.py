"""B1: failing syncs, failing writes, full disks."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from inturn.model.errors import Closed, DiskFull, LogStopped, OutOfSequence
from inturn.protocol.commands import Appended


def is_segment(path: str) -> bool:
    return path.endswith(".log")


def test_a_failed_sync_fails_every_acknowledgement_that_waits_and_stops_the_log(bench, batch, stored) -> None:
    log, other = bench.open(), bench.open(name="p2")
    bench.append(log, batch("synced"))
    answers: list[object] = []
    for _ in range(3):
        log.append(batch("unsure"), answers.append)
    bench.disk.fail_next_sync(OSError(errno.EIO, "broken"), is_segment)
    bench.run_jobs()
    assert len(answers) == 3
    assert all(isinstance(answer, LogStopped) for answer in answers)
    syncs = bench.disk.sync_count
    with pytest.raises(LogStopped, match=r"b/p1.*broken"):
        bench.append(log, batch("refused"))
    bench.wait(60)
    log.close()
    assert bench.disk.sync_count == syncs, "a failed sync is never tried again"
    assert bench.append(other, batch("goes on")) == 0


def test_a_stopped_log_still_reads_what_was_synced(bench, batch, stored) -> None:
    log = bench.open()
    bench.append(log, batch("synced"))
    bench.disk.fail_next_sync(OSError(errno.EIO, "broken"), is_segment)
    with pytest.raises(LogStopped):
        bench.append(log, batch("unsure"))
    assert list(stored(log)) == [0]
    assert log.end_offset == 1


def test_a_failed_sync_in_the_background_stops_the_log_too(bench, batch) -> None:
    log = bench.open(flush="interval", flush_interval_s=0.5)
    assert bench.append(log, batch()) == 0
    bench.disk.fail_next_sync(OSError(errno.EIO, "broken"), is_segment)
    bench.wait(1)
    with pytest.raises(LogStopped):
        bench.append(log, batch())


def test_what_a_failed_sync_left_in_the_cache_is_written_again_when_it_is_opened(bench, batch) -> None:
    """The system may consider the pages clean: a later sync alone would prove nothing."""
    log = bench.open()
    bench.append(log, batch("synced"))
    bench.disk.fail_next_sync(OSError(errno.EIO, "broken"), is_segment)
    with pytest.raises(LogStopped):
        bench.append(log, batch("unsure"))
    bench.disk._files[bench.segment_path()].pending.clear()  # lost for good, as on Linux
    log = bench.open()
    assert log.end_offset == 2
    bench.crash()
    assert bench.open().end_offset == 2


def test_a_folder_that_cannot_be_synced_stops_the_log_before_acknowledging(bench, batch) -> None:
    log = bench.open(segment_bytes=150)
    bench.append(log, batch())
    bench.disk.fail_next("sync_folder", OSError(errno.EIO, "broken"))
    with pytest.raises(LogStopped):
        bench.append(log, batch())


def test_a_full_disk_refuses_and_appends_resume_by_themselves(bench, batch, stored) -> None:
    log = bench.open()
    bench.append(log, batch())
    size = bench.disk.size(bench.segment_path())
    for room in (0, 1, 50, size - 1):
        bench.disk.set_free(room)
        with pytest.raises(DiskFull) as caught:
            bench.append(log, batch())
        assert caught.value.retriable
        assert bench.disk.size(bench.segment_path()) == size, "the part that was written is taken back"
    assert list(stored(log)) == [0]
    bench.disk.set_free(None)
    assert bench.append(log, batch()) == 1
    bench.crash()
    assert list(stored(bench.open())) == [0, 1]


def test_appends_stop_while_less_than_the_reserve_is_free(bench, batch) -> None:
    bench.disk.set_free(10_000)
    log = bench.open(reserve_bytes=9_000)
    bench.append(log, batch())
    bench.disk.set_free(8_000)
    log._since_free_check_bytes = 1 << 20  # as after a MiB
    with pytest.raises(DiskFull, match="8000 bytes left"):
        bench.append(log, batch())
    bench.disk.set_free(9_500)
    assert bench.append(log, batch()) == 1


def test_a_refused_batch_leaves_no_trace_in_its_producers_order(bench, batch) -> None:
    log = bench.open()
    bench.append(log, batch(producer=1, sequence=0))
    bench.disk.set_free(0)
    with pytest.raises(DiskFull):
        bench.append(log, batch(producer=1, sequence=1))
    bench.disk.set_free(None)
    with pytest.raises(OutOfSequence):
        bench.append(log, batch(producer=1, sequence=2))
    assert bench.append(log, batch(producer=1, sequence=1)) == 1


def test_a_full_disk_at_a_new_segment_refuses_and_recovers(bench, batch) -> None:
    log = bench.open(segment_bytes=150)
    bench.append(log, batch())
    bench.disk.fail_next("create", OSError(errno.ENOSPC, "full"))
    with pytest.raises(DiskFull):
        bench.append(log, batch())
    assert bench.append(log, batch()) == 1


def test_no_room_for_a_checkpoint_is_no_harm(bench, batch, stored) -> None:
    log = bench.open(checkpoint_every_bytes=1)
    bench.disk.fail_next("write", OSError(errno.ENOSPC, "full"), lambda path: path.endswith("checkpoint.tmp"))
    bench.append(log, batch())
    bench.append(log, batch())
    bench.crash()
    assert list(stored(bench.open())) == [0, 1]


def test_a_write_error_that_is_not_about_room_stops_the_log(bench, batch) -> None:
    log = bench.open()
    bench.disk.fail_next("write", OSError(errno.EIO, "broken"))
    with pytest.raises(LogStopped):
        bench.append(log, batch())
    with pytest.raises(LogStopped):
        bench.append(log, batch())


def test_a_part_of_a_batch_that_cannot_be_taken_back_stops_the_log(bench, batch, stored) -> None:
    log = bench.open()
    bench.append(log, batch())
    bench.disk.set_free(30)
    bench.disk.fail_next("truncate", OSError(errno.EIO, "broken"))
    with pytest.raises(LogStopped):
        bench.append(log, batch())
    bench.disk.set_free(None)
    with pytest.raises(LogStopped):
        bench.append(log, batch())
    assert list(stored(bench.open())) == [0]


def test_a_closed_log_refuses(bench, batch) -> None:
    log = bench.open()
    answers: list[object] = []
    log.append(batch(), answers.append)
    log.close()
    assert answers == [Appended(0)], "what waited is synced and answered"
    with pytest.raises(Closed):
        bench.append(log, batch())
    with pytest.raises(Closed):
        log.read(0, 10)
    bench.run_jobs()


REAL = """
import errno, os, resource, sys
from array import array
from inturn.log.embedded import EmbeddedEngine
from inturn.model.batch import encode
from inturn.model.message import Outgoing
from inturn.model.errors import DiskFull
from inturn.model.routing import Partition
from inturn.model.settings import LogSettings
from inturn.model.time import Timers

batch = encode([Outgoing(b"x" * 10_000)], array("H", [0]))
engine = EmbeddedEngine(sys.argv[1], LogSettings(reserve_bytes=0), Timers())
log = engine.open(Partition("b", "p1"), 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (95_000, resource.RLIM_INFINITY))
answers = []
for _ in range(12):
    log.append(batch, answers.append, inline=True)
assert [type(answer).__name__ for answer in answers] == ["Appended"] * 9 + ["DiskFull"] * 3, answers
assert len(log.read(0, 1 << 20)) == 9
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.append(batch, answers.append, inline=True)
assert answers[-1].base_offset == 9
engine.close()
engine = EmbeddedEngine(sys.argv[1], LogSettings(), Timers())
log = engine.open(Partition("b", "p1"), 0)
assert log.end_offset == 10 and not list(log.verify())
engine.close()
print("fine")
"""


def test_a_real_file_that_may_not_grow_refuses_and_recovers(tmp_path: Path) -> None:
    """A limit on the file size acts like a full disk on any machine: a short write first, then an error."""
    assert resource.RLIMIT_FSIZE >= 0
    run = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.stdout == "fine\n", run.stderr
