"""B1: Flush.ALWAYS on a machine that stops at every possible operation. Every acknowledged message survives."""

from __future__ import annotations

import contextlib
import random

import pytest

from inturn.protocol.commands import Appended
from simulator.disk import SimCrash

SETTINGS = {"segment_bytes": 700, "checkpoint_every_bytes": 900, "index_every_bytes": 200}
BATCHES = 14


def work(bench, batch, rng: random.Random, acknowledged: dict[int, bytes], next_sequence: int) -> None:
    """Open, repeat the unacknowledged batches, continue. Jobs run at random moments."""
    log = bench.open(**SETTINGS)
    for sequence in range(next_sequence, BATCHES):
        one = batch(f"message {sequence} " * (1 + sequence * 5 % 6), 1, producer=3, sequence=sequence)

        def reply(answer: object, payload: bytes = one.payload) -> None:
            assert isinstance(answer, Appended), answer
            assert answer.base_offset < log.end_offset, "an acknowledged message can be read"
            assert acknowledged.setdefault(answer.base_offset, payload) == payload

        log.append(one, reply)
        while bench.jobs and rng.random() < 0.6:
            bench.jobs.popleft()()
    bench.run_jobs()
    if rng.random() < 0.5:
        log.close()


def operations_of(new_bench, batch, seed: int) -> int:
    bench = new_bench(seed)
    work(bench, batch, random.Random(seed), {}, 0)
    return int(bench.disk.operations)


@pytest.mark.parametrize("seed", range(40))
def test_everything_acknowledged_survives_a_crash_at_every_operation(new_bench, batch, stored, seed: int) -> None:
    for operation in range(1, operations_of(new_bench, batch, seed) + 1):
        bench = new_bench(seed * 1000 + operation)
        bench.disk.crash_at(operation)
        acknowledged: dict[int, bytes] = {}
        with pytest.raises(SimCrash):
            work(bench, batch, random.Random(seed), acknowledged, 0)
        bench.crash()
        log = bench.open(**SETTINGS)
        there = stored(log)
        assert log.trouble is None, (operation, log.trouble)
        assert acknowledged.items() <= there.items(), operation
        assert list(there) == list(range(len(there))), "a prefix, each offset once"
        assert not list(log.verify())


@pytest.mark.parametrize("seed", range(200))
def test_many_crashes_and_kills_lose_nothing_that_was_acknowledged_or_seen(new_bench, batch, stored, seed: int) -> None:
    rng = random.Random(seed)
    bench = new_bench(seed)
    acknowledged: dict[int, bytes] = {}
    seen: dict[int, bytes] = {}
    for _ in range(10):
        bench.disk.crash_at(bench.disk.operations + rng.randint(1, 50))
        with contextlib.suppress(SimCrash):
            # The producer knows only the acknowledged batches, and repeats all later batches. The sequence is the
            # offset here: a single producer, and a single message in a batch.
            work(bench, batch, random.Random(rng.random()), acknowledged, len(acknowledged))
        if rng.random() < 0.5:
            bench.crash()
        else:
            bench.kill()
        assert sorted(acknowledged) == list(range(len(acknowledged)))
        if rng.random() < 0.5:
            seen |= stored(bench.open(**SETTINGS))
    bench.crash()
    log = bench.open(**SETTINGS)
    there = stored(log)
    assert log.trouble is None
    assert acknowledged.items() <= there.items()
    assert seen.items() <= there.items()
    assert list(there) == list(range(len(there))), "each once, in order"
    assert len(there) <= BATCHES


def test_readers_never_see_what_is_not_synced(bench, batch) -> None:
    log = bench.open()
    log.append(batch(), lambda answer: None)
    assert log.end_offset == 0
    assert log.read(0, 1000) == []
    assert log.offset_at(0) == 0
    bench.run_jobs()
    assert log.end_offset == 1
    assert len(log.read(0, 1000)) == 1


def test_one_sync_is_in_flight_and_the_next_covers_all_that_wait(bench, batch) -> None:
    log = bench.open()
    answers: list[Appended] = []
    before = bench.disk.sync_count
    log.append(batch(), answers.append)
    assert len(bench.jobs) == 1
    for _ in range(100):
        log.append(batch(), answers.append)
    assert len(bench.jobs) == 1
    assert not answers
    bench.run_jobs()
    assert [answer.base_offset for answer in answers] == list(range(101))
    assert bench.disk.sync_count - before == 1

    log.append(batch(), answers.append)
    job = bench.jobs.popleft()
    sync = bench.disk.open(bench.segment_path()).__class__.sync

    def append_meanwhile(file) -> None:
        for _ in range(50):
            log.append(batch(), answers.append)
        sync(file)

    bench.disk.open(bench.segment_path()).__class__.sync = append_meanwhile
    try:
        job()
    finally:
        bench.disk.open(bench.segment_path()).__class__.sync = sync
    assert len(answers) == 102, "what came during the sync does not ride on it"
    bench.run_jobs()
    assert len(answers) == 152
    assert bench.disk.sync_count - before == 3


def test_an_inline_append_syncs_in_the_thread_of_the_caller(bench, batch) -> None:
    log = bench.open()
    answers: list[Appended] = []
    log.append(batch(), answers.append, inline=True)
    assert len(answers) == 1
    assert not bench.jobs
    log.append(batch(), answers.append)
    log.append(batch(), answers.append, inline=True)
    assert len(answers) == 1, "one sync is under way already, so it waits for that"
    bench.run_jobs()
    assert len(answers) == 3


def test_a_reply_may_append_again_and_order_is_kept(bench, batch) -> None:
    log = bench.open(flush="os")
    seen: list[int] = []

    def reply(answer: Appended) -> None:
        if answer.base_offset < 5:
            log.append(batch(), reply)
        seen.append(answer.base_offset)

    log.append(batch(), reply)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_growth_is_announced_when_readers_may_read(bench, batch) -> None:
    log = bench.open()
    ends: list[int] = []
    log.on_grown(lambda: ends.append(log.end_offset))
    log.append(batch(), lambda answer: None)
    assert ends == []
    bench.run_jobs()
    assert ends == [1]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_segment_left_by_a_killed_process_is_made_durable_before_it_is_used(new_bench, batch, stored, before) -> None:
    settings = {"segment_bytes": 150, "checkpoint_every_bytes": 1 << 60}
    for seed in range(30):
        bench = new_bench(seed)
        bench.disk.crash_at(2)
        with contextlib.suppress(SimCrash):
            bench.open(**settings)  # killed while creating the first segment
        bench.kill()
        log = bench.open(**settings)
        for _ in range(before):
            bench.append(log, batch())
        bench.disk.crash_at(bench.disk.operations + 2)
        with contextlib.suppress(SimCrash):
            bench.append(log, batch("killed"))  # killed after creating the next segment
        bench.kill()
        log = bench.open(**settings)
        acknowledged = bench.append(log, batch("acknowledged"))
        bench.crash()
        assert acknowledged in stored(bench.open(**settings))
