from __future__ import annotations

import threading

import pytest
from pyroaring import BitMap64

from inturn.model.errors import InvalidInput
from inturn.protocol.commands import LotChange, ParkedMessage, Progress
from inturn.protocol.observer import Observer
from inturn.testing.checker import check
from inturn.testing.clock import FakeClock
from inturn.testing.history import (
    Committed,
    HandlerEnd,
    HandlerStart,
    KeyResumed,
    KeySkipped,
    OffsetsReset,
    ProcessRestarted,
)
from inturn.testing.recorder import Recorder


def test_a_recorded_life_of_one_message_is_judged() -> None:
    clock = FakeClock()
    recorder = Recorder(clock)
    observer: Observer = recorder
    recorder.sent("s", 0, 0, b"k", "m0")
    observer.lease_granted("s", "g", 0, "a", 1)
    recorder.started("s", "g", 0, 0, b"k", "a", 1, "m0")
    recorder.crashed("a")
    observer.lease_ended("s", "g", 0, "a", 1, "gone")
    observer.lease_granted("s", "g", 0, "b", 2)
    clock.advance(1.5)
    recorder.started("s", "g", 0, 0, b"k", "b", 2, "m0")
    recorder.ended("s", "g", 0, 0, b"k", "b", 2, "m0", result="success")
    observer.committed("s", "g", "b", Progress(0, 2, 1))
    verdict = check(recorder.snapshot(), order="key")
    verdict.raise_if_bad()
    assert (verdict.sent, verdict.started, verdict.finished, verdict.lease_grants, verdict.commits) == (1, 2, 1, 2, 1)
    assert recorder.history[-1].at_s == 1.5


def test_a_commit_is_recorded_with_what_is_finished_and_what_changed_in_the_parking_lots() -> None:
    recorder = Recorder(FakeClock())
    lots = (
        LotChange(b"x", "parked", added=(ParkedMessage(3, 8, b""), ParkedMessage(1, 9, b""))),
        LotChange(b"y", "resuming", added=(ParkedMessage(3, 11, b""),), removed=((1, 4), (3, 6))),
    )
    finished = BitMap64([9, 2**40]).serialize()
    recorder.committed("s", "g", "a", Progress(3, 7, 8, finished=finished, lots=lots))
    recorder.committed("s", "g", "a", Progress(3, 7, 8))
    assert list(recorder.history) == [
        Committed("s", "g", 3, "a", 7, 8, (9, 2**40), ((3, 8), (1, 9), (3, 11)), ((1, 4), (3, 6))),
        Committed("s", "g", 3, "a", 7, 8),
    ]


def test_attempts_and_what_operators_did_are_recorded() -> None:
    recorder = Recorder(FakeClock())
    recorder.started("s", "g", 0, 5, b"k", "a", 1, "m5", attempt=3)
    recorder.key_skipped("s", "g", 0, 5, b"k")
    recorder.key_resumed("s", "g", 0, b"k")
    assert list(recorder.history) == [
        HandlerStart("s", "g", 0, 5, b"k", "a", 1, "m5", 3),
        KeySkipped("s", "g", 0, 5, b"k"),
        KeyResumed("s", "g", 0, b"k"),
    ]


def test_resets_and_restarts_are_recorded() -> None:
    recorder = Recorder(FakeClock())
    recorder.offsets_reset("s", "g", {0: 5})
    recorder.restarted()
    assert list(recorder.history) == [OffsetsReset("s", "g", {0: 5}), ProcessRestarted()]


def test_results_and_reasons_that_do_not_exist_are_refused() -> None:
    recorder = Recorder(FakeClock())
    with pytest.raises(InvalidInput, match="'perhaps': use one of exception, failed, moved, rollback, success"):
        recorder.ended("s", "g", 0, 0, None, "a", 1, result="perhaps")
    with pytest.raises(InvalidInput, match="'lost': use one of expired, gone, released"):
        recorder.lease_ended("s", "g", 0, "a", 1, "lost")
    assert len(recorder.history) == 0


def test_a_snapshot_does_not_grow() -> None:
    recorder = Recorder(FakeClock())
    snapshot = recorder.snapshot()
    recorder.crashed("a")
    assert (len(snapshot), len(recorder.history)) == (0, 1)


def test_many_threads_record_without_losing_or_mixing_anything() -> None:
    recorder = Recorder(FakeClock())

    def handle(partition: int) -> None:
        for offset in range(500):
            recorder.started("s", "g", partition, offset, None, "a", 1)
            recorder.ended("s", "g", partition, offset, None, "a", 1, result="success")

    threads = [threading.Thread(target=handle, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = recorder.snapshot()
    assert sum(isinstance(event, HandlerStart) for event in history) == 4000
    assert sum(isinstance(event, HandlerEnd) for event in history) == 4000
    check(history, order="partition").raise_if_bad()
