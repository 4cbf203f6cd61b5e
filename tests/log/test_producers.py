"""P4: every batch of a producer is stored once and in order."""

from __future__ import annotations

import pytest

from inturn.log.producer_table import RECENT_COUNT, ProducerTable
from inturn.model.errors import OutOfSequence, ProducerFenced


def test_the_next_batch_is_new_and_a_repeated_one_is_not(batch) -> None:
    table = ProducerTable("p")
    first = batch(count=3, producer=1, sequence=0)
    assert table.duplicate_of(first) is None
    table.record(first, 50, 0)
    assert table.duplicate_of(first) == 50
    assert table.duplicate_of(batch(producer=1, sequence=3)) is None


@pytest.mark.parametrize(("sequence", "count"), [(4, 1), (1, 1), (0, 2), (2, 4)])
def test_what_neither_follows_nor_repeats_is_refused(batch, sequence: int, count: int) -> None:
    table = ProducerTable("p")
    table.record(batch(count=3, producer=1, sequence=0), 50, 0)
    with pytest.raises(OutOfSequence) as caught:
        table.duplicate_of(batch(count=count, producer=1, sequence=sequence))
    assert (caught.value.expected, caught.value.got) == (3, sequence)


def test_a_gap_may_be_left_on_purpose_but_only_forwards(batch) -> None:
    table = ProducerTable("p")
    table.record(batch(count=3, producer=1, sequence=0), 50, 0)
    assert table.duplicate_of(batch(producer=1, sequence=9), gap=True) is None
    with pytest.raises(OutOfSequence):
        table.duplicate_of(batch(producer=1, sequence=1), gap=True)


def test_an_older_epoch_is_fenced_and_a_newer_one_starts_at_zero(batch) -> None:
    table = ProducerTable("p")
    table.record(batch(producer=1, sequence=0, epoch=5), 50, 0)
    with pytest.raises(ProducerFenced):
        table.duplicate_of(batch(producer=1, sequence=1, epoch=4))
    with pytest.raises(OutOfSequence):
        table.duplicate_of(batch(producer=1, sequence=1, epoch=6))
    again = batch(producer=1, sequence=0, epoch=6)
    assert table.duplicate_of(again) is None
    table.record(again, 51, 0)
    assert table.duplicate_of(again) == 51
    with pytest.raises(ProducerFenced):
        table.duplicate_of(batch(producer=1, sequence=0, epoch=5))


def test_an_unknown_producer_starts_at_zero_or_with_a_gap(batch) -> None:
    table = ProducerTable("p")
    with pytest.raises(OutOfSequence):
        table.duplicate_of(batch(producer=1, sequence=7))
    assert table.duplicate_of(batch(producer=1, sequence=7), gap=True) is None


def test_batches_of_nobody_are_always_new(batch) -> None:
    table = ProducerTable("p")
    table.record(batch(), 0, 0)
    assert table.duplicate_of(batch()) is None
    assert len(table) == 0


def test_the_last_batches_are_remembered_and_survive_a_snapshot(batch) -> None:
    table = ProducerTable("p")
    for sequence in range(RECENT_COUNT + 4):
        table.record(batch(producer=1, sequence=sequence), 100 + sequence, 0)
    copy = ProducerTable("p")
    copy.restore(table.snapshot())
    for sequence in range(4, RECENT_COUNT + 4):
        assert copy.duplicate_of(batch(producer=1, sequence=sequence)) == 100 + sequence
    with pytest.raises(OutOfSequence):
        copy.duplicate_of(batch(producer=1, sequence=3))


def test_silent_producers_are_forgotten(batch) -> None:
    table = ProducerTable("p")
    table.record(batch(producer=1), 0, 1000)
    table.record(batch(producer=2), 1, 3000)
    table.expire(2000)
    assert len(table) == 1
    assert table.duplicate_of(batch(producer=2)) == 1


@pytest.mark.parametrize("how", ["close", "crash"])
def test_a_repeated_batch_is_recognised_after_a_restart(bench, batch, stored, how: str) -> None:
    log = bench.open(checkpoint_every_bytes=500)
    for sequence in range(10):
        bench.append(log, batch(producer=1, sequence=sequence))
    if how == "close":
        log.close()
    else:
        bench.crash()
    log = bench.open(checkpoint_every_bytes=500)
    assert bench.append(log, batch(producer=1, sequence=9)) == 9
    with pytest.raises(OutOfSequence):
        bench.append(log, batch(producer=1, sequence=11))
    assert bench.append(log, batch(producer=1, sequence=10)) == 10
    assert len(stored(log)) == 11


def test_a_duplicate_is_acknowledged_only_when_the_first_one_is_synced(bench, batch) -> None:
    log = bench.open()
    answers: list[object] = []
    log.append(batch(producer=1, sequence=0), answers.append)
    log.append(batch(producer=1, sequence=0), answers.append)
    assert answers == []
    bench.run_jobs()
    assert len(answers) == 2
    assert answers[0] == answers[1]
    log.append(batch(producer=1, sequence=0), answers.append)
    assert len(answers) == 3, "it is synced already"
    assert not bench.jobs


def test_refusals_keep_their_place_among_the_replies(bench, batch) -> None:
    log = bench.open()
    answers: list[str] = []
    log.append(batch(producer=1, sequence=0), lambda answer: answers.append(type(answer).__name__))
    log.append(batch(producer=1, sequence=5), lambda answer: answers.append(type(answer).__name__))
    assert answers == []
    bench.run_jobs()
    assert answers == ["Appended", "OutOfSequence"]


def test_a_producer_that_was_silent_too_long_comes_back_with_a_gap(bench, batch) -> None:
    log = bench.open(producer_expiry_s=100)
    bench.append(log, batch(producer=1, sequence=0))
    bench.wait(1000)
    log.close()
    log = bench.open(producer_expiry_s=100)
    with pytest.raises(OutOfSequence) as caught:
        bench.append(log, batch(producer=1, sequence=1))
    assert caught.value.expected == 0
    assert bench.append(log, batch(producer=1, sequence=1), gap=True) == 1
    assert bench.append(log, batch(producer=1, sequence=2)) == 2
