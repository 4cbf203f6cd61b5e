"""B1: how a log recovers from a crash, or from damage of the files."""

from __future__ import annotations

import pytest

from inturn.log.checkpoint import CHECKPOINT
from inturn.model.batch import HEADER_BYTES
from inturn.model.errors import LogDamaged

NEVER = 1 << 60  # no checkpoint by size


def test_a_torn_tail_is_cut_at_every_byte(new_bench, batch, stored) -> None:
    bench = new_bench(1)
    log = bench.open()
    for number in range(3):
        bench.append(log, batch(f"kept {number}", 2))
    bench.crash()
    path = bench.segment_path()
    good = bench.disk.contents(path)
    last = batch("torn", 3).header(6, 5, 6, log._seed) + batch("torn", 3).payload
    for length in range(1, len(last)):
        bench.disk.cut(path, len(good))
        bench.disk.poke(path, len(good), last[:length])
        if bench.disk.exists(f"{bench.folder}/checkpoint"):
            bench.disk.erase(f"{bench.folder}/checkpoint")
        log = bench.open()
        assert log.end_offset == 6
        assert list(stored(log)) == [0, 2, 4]
        assert bench.disk.contents(path) == good, length
    assert bench.append(log, batch("next")) == 6


def test_stale_bytes_with_a_valid_checksum_are_cut(bench, batch, stored) -> None:
    log = bench.open()
    for number in range(3):
        bench.append(log, batch(f"number {number}"))
    path = bench.segment_path()
    whole = bench.disk.contents(path)
    bench.crash()
    bench.disk.poke(path, len(whole), whole[: len(whole) // 3])  # the first batch again
    log = bench.open()
    assert list(stored(log)) == [0, 1, 2]
    assert bench.disk.contents(path) == whole
    assert bench.append(log, batch("next")) == 3


def test_zeros_after_the_tail_are_cut(bench, batch, stored) -> None:
    log = bench.open()
    bench.append(log, batch())
    path = bench.segment_path()
    size = bench.disk.size(path)
    bench.crash()
    bench.disk.poke(path, size, bytes(5000))
    log = bench.open()
    assert list(stored(log)) == [0]
    assert bench.disk.size(path) == size


def test_a_flipped_bit_in_the_middle_stops_the_log_loudly_and_no_other(bench, batch, stored) -> None:
    log, other = bench.open(), bench.open(name="p2")
    for number in range(4):
        bench.append(log, batch(f"number {number}", 2))
        bench.append(other, batch(f"number {number}"))
    path = bench.segment_path()
    whole = bench.disk.contents(path)
    bench.crash()
    each = len(whole) // 4
    for position in range(each, 2 * each):
        bench.disk.poke(path, position, bytes([whole[position] ^ 0x10]))
        log = bench.open()
        assert log.read(0, 1 << 20)[0].header.base_offset == 0, "below the damage reading goes on"
        with pytest.raises(LogDamaged, match=r"b/p1.*offset 2") as caught:
            log.read(2, 1 << 20)
        assert caught.value.offset == 2
        with pytest.raises(LogDamaged):
            bench.append(log, batch("refused"))
        assert [problem.offset for problem in log.verify()] == [2]
        log.close()
        changed = bench.disk.contents(path)
        bench.disk.poke(path, position, whole[position : position + 1])
        assert len(changed) == len(whole), "nothing is cut"
    other = bench.open(name="p2")
    assert bench.append(other, batch("goes on")) == 4
    assert len(stored(other)) == 5


def test_damage_below_the_checkpoint_at_the_very_end_is_not_taken_for_a_torn_tail(bench, batch) -> None:
    log = bench.open()
    for _ in range(3):
        bench.append(log, batch())
    log.close()
    bench.disk.cut(bench.segment_path(), bench.disk.size(bench.segment_path()) - 1)
    log = bench.open()
    with pytest.raises(LogDamaged) as caught:
        log.read(2, 100)
    assert caught.value.offset == 2
    assert len(log.read(0, 1 << 20)) == 2


def test_a_missing_segment_is_damage(bench, batch, stored) -> None:
    log = bench.open(segment_bytes=400, checkpoint_every_bytes=NEVER)
    for _ in range(12):
        bench.append(log, batch())
    bench.crash()
    bench.disk.erase(bench.segment_path(1))
    log = bench.open(segment_bytes=400)
    with pytest.raises(LogDamaged, match="the next segment begins"):
        stored(log)
    assert len(list(log.verify())) == 1


def test_segments_that_vanished_altogether_are_damage(bench, batch) -> None:
    log = bench.open()
    bench.append(log, batch())
    log.close()
    bench.disk.erase(bench.segment_path())
    log = bench.open()
    with pytest.raises(LogDamaged, match="all segments are gone"):
        log.read(0, 100)
    with pytest.raises(LogDamaged):
        bench.append(log, batch())


def test_damage_in_a_sealed_segment_is_found_by_reading_and_by_verify(bench, batch) -> None:
    log = bench.open(segment_bytes=1000)
    for _ in range(30):
        bench.append(log, batch())
    each = len(batch().payload) + HEADER_BYTES
    log.close()
    path = bench.segment_path(0)
    bench.disk.poke(path, each + 20, b"\xff\xff\xff")
    log = bench.open(segment_bytes=1000)
    assert bench.append(log, batch()) == 30, "the end is whole, so appends go on"
    with pytest.raises(LogDamaged) as caught:
        log.read(1, 100)
    assert caught.value.offset == 1
    assert len(log.read(0, 1 << 20)) == 1, "reading stops before it"
    assert [problem.offset for problem in log.verify()] == [1]
    # Only the payload is damaged: a read returns the batch; `is_intact` and verify find the damage.
    bench.disk.poke(bench.segment_path(1), each + HEADER_BYTES + 5, b"\xff")
    assert len(list(log.verify())) == 2


def test_the_cut_is_synced_before_anything_is_accepted(new_bench, batch, stored) -> None:
    """Cut, append a shorter batch, crash: the old tail must not come back behind the new batch."""
    for seed in range(60):
        bench = new_bench(seed)
        log = bench.open(flush="os")
        bench.append(log, batch("first"))
        log.sync()
        bench.append(log, batch("lost " * 20))
        path = bench.segment_path()
        size = bench.disk.size(path)
        bench.disk.poke(path, size - 1, b"\xff")  # torn, and durable
        bench.crash()
        log = bench.open(flush="os")
        after_cut = bench.disk.size(path)
        assert after_cut < size
        bench.crash()
        assert bench.disk.size(path) == after_cut, "the cut survived"
        log = bench.open(flush="os")
        bench.append(log, batch("second"))
        bench.crash()
        log = bench.open(flush="os")
        assert log.trouble is None
        assert list(stored(log))[:1] == [0]
        assert len(list(stored(log))) <= 2


def test_the_cut_right_behind_a_checkpoint_is_synced_too(new_bench, batch) -> None:
    for seed in range(20):
        bench = new_bench(seed)
        log = bench.open()
        bench.append(log, batch("first"))
        log.close()
        path = bench.segment_path()
        size = bench.disk.size(path)
        bench.disk.poke(path, size, b"torn tail")
        assert bench.open().end_offset == 1
        bench.crash()
        assert bench.disk.size(path) == size


def test_an_uncut_tail_would_be_found_by_these_tests(new_bench, batch) -> None:
    """Without syncing the cut, some seed fails: so the simulation can find the bug."""
    came_back = 0
    for seed in range(60):
        bench = new_bench(seed)
        log = bench.open(flush="os")
        bench.append(log, batch("first"))
        log.sync()
        path = bench.segment_path()
        size = bench.disk.size(path)
        bench.disk.poke(path, size, b"torn tail")
        bench.disk.open(path).truncate(size)
        bench.crash()
        came_back += bench.disk.size(path) != size
    assert came_back > 5


@pytest.mark.parametrize("harm", ["lost", "corrupt"])
def test_a_lost_or_corrupt_index_is_built_again(bench, batch, stored, harm: str) -> None:
    settings = {"segment_bytes": 2000, "index_every_bytes": 100}
    log = bench.open(**settings)
    for number in range(60):
        bench.append(log, batch(f"number {number}"))
    expected = stored(log)
    log.close()
    indexes = [path for path in bench.disk.paths() if path.endswith(".index")]
    assert len(indexes) > 3
    for path in indexes:
        if harm == "lost":
            bench.disk.erase(path)
        else:
            bench.disk.poke(path, 60, b"\x55\x55")
    log = bench.open(**settings)
    for offset in range(60):
        (found,) = log.read(offset, 1)
        assert bytes(found.payload) == expected[offset]
    assert [path for path in bench.disk.paths() if path.endswith(".index")] != []


def test_an_index_that_lies_with_a_valid_checksum_is_not_believed(bench, batch) -> None:
    settings = {"segment_bytes": 2000, "index_every_bytes": 100}
    log = bench.open(**settings)
    for number in range(60):
        bench.append(log, batch(f"number {number}"))
    log.close()
    log = bench.open(**settings)
    first = log._segments[0]
    first.know()
    for at in range(1, len(first.index)):
        first.index._positions[at] += 3
    assert [log.read(offset, 1)[0].header.base_offset for offset in range(60)] == list(range(60))


@pytest.mark.parametrize("harm", ["lost", "corrupt", "cut"])
def test_without_a_whole_checkpoint_everything_is_scanned(bench, batch, stored, harm: str) -> None:
    log = bench.open(segment_bytes=1000)
    for number in range(30):
        bench.append(log, batch(f"number {number}", producer=9, sequence=number))
    expected = stored(log)
    log.close()
    path = f"{bench.folder}/{CHECKPOINT}"
    if harm == "lost":
        bench.disk.erase(path)
    elif harm == "corrupt":
        bench.disk.poke(path, 30, b"\xee\xee\xee")
    else:
        bench.disk.cut(path, 11)
    log = bench.open(segment_bytes=1000)
    assert log.scanned_bytes > 3000
    assert stored(log) == expected
    assert log.end_offset == 30
    assert bench.append(log, batch("number 29", producer=9, sequence=29)) == 29, "producers are known again"


def test_after_a_clean_close_nothing_is_scanned(bench, batch, stored) -> None:
    log = bench.open(segment_bytes=1000)
    for number in range(30):
        bench.append(log, batch(f"number {number}"))
    expected = stored(log)
    log.close()
    log = bench.open(segment_bytes=1000)
    assert log.scanned_bytes == 0
    assert stored(log) == expected
    operations = bench.disk.operations
    log.close()
    bench.open(segment_bytes=1000).close()
    assert bench.disk.operations <= operations + 4, "a log nobody wrote to writes no checkpoint, it only syncs"


def test_only_what_comes_after_the_checkpoint_is_scanned(bench, batch) -> None:
    log = bench.open(checkpoint_every_bytes=2000)
    for _ in range(100):
        bench.append(log, batch())
    bench.crash()
    log = bench.open()
    assert 0 <= log.scanned_bytes < 2300
    assert log.end_offset == 100


def test_offsets_are_never_reused_after_an_unsynced_tail_was_lost(new_bench, batch, stored) -> None:
    """Readers may have seen the lost offsets. Commits make no difference."""
    lost = 0
    for seed in range(40):
        bench = new_bench(seed)
        log = bench.open(flush="os")
        for _ in range(3):
            bench.append(log, batch("synced"))
        log.sync()
        for _ in range(5):
            bench.append(log, batch("lost", producer=5, sequence=0) if log.end_offset == 3 else batch("lost"))
        bench.crash()
        log = bench.open(flush="os")
        kept = list(stored(log))
        assert kept[:3] == [0, 1, 2]
        lost += len(kept) < 8
        new = bench.append(log, batch("new"))
        assert new >= 8
        assert log.read(len(kept), 1000)[0].header.base_offset == new, "reading goes over the gap"
        log.sync()
        bench.crash()
        log = bench.open(flush="os")
        assert log.trouble is None
        assert list(stored(log)) == [*kept, new]
        assert not list(log.verify())
        assert bench.append(log, batch("newer")) > new
    assert lost > 10


def test_committed_offsets_are_a_floor_for_new_ones(bench, batch, stored) -> None:
    log = bench.open()
    for _ in range(3):
        bench.append(log, batch("synced"))
    bench.crash()
    log = bench.open(floor=8)
    assert bench.append(log, batch("new")) == 8
    assert list(stored(log)) == [0, 1, 2, 8]


@pytest.mark.parametrize("flush", ["os", "interval"])
def test_a_killed_process_leaves_no_gap_because_the_machine_went_on(bench, batch, flush) -> None:
    log = bench.open(flush=flush)
    for _ in range(3):
        bench.append(log, batch())
    bench.disk.kill()
    log = bench.open(flush=flush)
    assert bench.append(log, batch()) == 3


def test_a_clean_close_leaves_no_gap_even_when_the_machine_is_started_anew(bench, batch) -> None:
    log = bench.open(flush="os")
    bench.append(log, batch())
    log.close()
    bench.crash()
    assert bench.append(bench.open(flush="os"), batch()) == 1


def test_a_new_log_starts_at_the_floor(bench, batch) -> None:
    log = bench.open(floor=100)
    assert (log.start_offset, log.end_offset) == (100, 100)
    assert bench.append(log, batch()) == 100
    log.close()
    assert bench.open(floor=50).end_offset == 101
    log = bench.open(floor=500)
    log.close()
    log = bench.open(floor=700)
    assert bench.append(log, batch()) == 700
    assert [found.header.base_offset for found in log.read(0, 10) + log.read(101, 10)] == [100, 700]


def test_a_batch_lost_between_two_segments_is_no_gap(new_bench, batch, stored) -> None:
    """The end of a segment can be lost while the next segment survives. Then the next segment is dropped, too."""
    for seed in range(80):
        bench = new_bench(seed)
        log = bench.open(flush="os", segment_bytes=400, checkpoint_every_bytes=NEVER)
        answers: list[object] = []
        for number in range(9):
            log.append(batch(f"number {number}", producer=4, sequence=number), answers.append)
        bench.crash()
        log = bench.open(flush="os", segment_bytes=400)
        assert log.trouble is None
        offsets = list(stored(log))
        assert offsets == list(range(len(offsets)))
        for number in range(len(offsets), 9):
            assert bench.append(log, batch(f"number {number}", producer=4, sequence=number)) >= 9
