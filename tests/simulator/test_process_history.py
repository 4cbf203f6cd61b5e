"""Event files of several processes become a single history."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from inturn.testing.checker import check
from inturn.testing.history import (
    Committed,
    ConsumerCrashed,
    Event,
    HandlerEnd,
    HandlerStart,
    LeaseEnded,
    LeaseGranted,
    ProcessRestarted,
    SendAcknowledged,
)
from inturn.testing.verdict import ViolationKind
from simulator.processes.child import JumpingClock
from simulator.processes.history import Death, FileRecorder, StampedEvent, merge, read_lines

PLACE = ("s", "g", 0)


def _file(path: Path, *lines: StampedEvent | Event) -> Path:
    recorder = FileRecorder(path)
    for line in lines:
        recorder._write(line if isinstance(line, StampedEvent) else StampedEvent(line))
    return path


def _granted(owner: str, epoch: int, at_s: float) -> LeaseGranted:
    return LeaseGranted(*PLACE, owner, epoch, at_s=at_s)


def _ended(owner: str, epoch: int, at_s: float) -> LeaseEnded:
    return LeaseEnded(*PLACE, owner, epoch, "expired", at_s=at_s)


def _start(owner: str, epoch: int, at_s: float, offset: int = 0) -> HandlerStart:
    return HandlerStart(*PLACE, offset, b"k", owner, epoch, at_s=at_s)


def _end(owner: str, epoch: int, at_s: float, offset: int = 0) -> HandlerEnd:
    return HandlerEnd(*PLACE, offset, b"k", owner, epoch, None, "success", at_s=at_s)


def test_events_are_put_in_the_order_of_their_stamps(tmp_path: Path) -> None:
    consumer = _file(tmp_path / "c", _start("a", 1, 2.0), _end("a", 1, 3.0))
    producer = _file(tmp_path / "p", SendAcknowledged("s", 0, 0, b"k", at_s=1.5))
    server = _file(tmp_path / "s", _granted("a", 1, 1.0), Committed(*PLACE, "a", 1, 1, at_s=4.0))
    merged = merge([consumer, producer], [server])
    assert [event.at_s for event in merged.history] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert check(merged.history, order="key").ok


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    path = _file(tmp_path / "c", _start("a", 1, 2.0))
    with path.open("ab") as file:
        file.write(b'{"event":{"event":"Handl')
    assert [line.event.at_s for line in read_lines(path)] == [2.0]
    assert read_lines(_file(tmp_path / "empty")) == []


def test_a_killed_consumer_has_crashed_when_it_was_seen_dead(tmp_path: Path) -> None:
    consumer = _file(tmp_path / "c", _start("a", 1, 2.0))
    merged = merge([consumer], [], [Death(consumer, 2.5)])
    assert merged.history[1] == ConsumerCrashed("a", at_s=2.5)


def test_a_start_in_a_process_that_stood_still_counts_from_when_it_was_let_go(tmp_path: Path) -> None:
    lines = [StampedEvent(_start("a", 1, 5.0), let_go_at_s=2.0), StampedEvent(_start("a", 1, 6.0, 1), let_go_at_s=5.95)]
    consumer = _file(tmp_path / "c", *lines)
    server = _file(tmp_path / "s", _granted("a", 1, 1.0), _ended("a", 1, 3.0), _granted("b", 2, 3.0))
    merged = merge([consumer], [server], margin_s=0.1)
    assert merged.late_starts == 1
    verdict = check(merged.history, order="key", complete=False)
    # The first start was released in time. The second was late: the process stood still for less than the margin.
    assert [(one.kind, one.offsets) for one in verdict.violations if one.kind is ViolationKind.STALE_START] == [
        (ViolationKind.STALE_START, (1,))
    ]


def test_a_grant_that_a_killed_server_had_not_told_is_put_in_at_its_death(tmp_path: Path) -> None:
    first = _file(tmp_path / "s1", _granted("a", 1, 1.0))
    second = _file(tmp_path / "s2", _ended("b", 2, 9.0), _granted("c", 3, 9.1))
    merged = merge([], [first, second], [Death(first, 5.0)])
    assert merged.hidden == 1
    assert list(merged.history)[1:4] == [
        ProcessRestarted(at_s=5.0),
        LeaseEnded(*PLACE, "a", 1, "gone", at_s=5.0),
        _granted("b", 2, 5.0),
    ]
    assert check(merged.history, order="key").ok


def test_a_release_that_a_killed_server_had_not_told_is_put_in_at_its_death(tmp_path: Path) -> None:
    first = _file(tmp_path / "s1", _granted("a", 1, 1.0))
    second = _file(tmp_path / "s2", _granted("b", 2, 9.0))
    assert check(merge([], [first, second], [Death(first, 5.0)]).history, order="key").ok


def test_one_kill_hides_one_decision_only(tmp_path: Path) -> None:
    def other(event: LeaseGranted) -> LeaseGranted:
        return LeaseGranted("s", "g", 1, event.owner, event.epoch, at_s=event.at_s)

    first = _file(tmp_path / "s1", _granted("a", 1, 1.0), other(_granted("a", 1, 1.0)))
    second = _file(tmp_path / "s2", _granted("b", 2, 9.0), other(_granted("b", 2, 9.0)))
    merged = merge([], [first, second], [Death(first, 5.0)])
    assert merged.hidden == 1
    assert check(merged.history, order="key").kinds() == {ViolationKind.TWO_OWNERS}


def test_without_a_kill_nothing_is_hidden(tmp_path: Path) -> None:
    server = _file(tmp_path / "s", _granted("a", 1, 1.0), _granted("b", 2, 9.0))
    merged = merge([], [server])
    assert merged.hidden == 0
    assert check(merged.history, order="key").kinds() == {ViolationKind.TWO_OWNERS}


def test_a_jumping_clock_jumps_on_the_wall_only_and_knows_who_looked() -> None:
    clock = JumpingClock(seed=1)
    before_s, before_ms = time.monotonic(), clock.time_ms()
    clock.jump()
    assert abs(clock.time_ms() - before_ms) > 60_000
    looked_at_s = clock.monotonic()
    assert before_s <= looked_at_s < before_s + 60
    assert clock.looked_at_s() == looked_at_s
    others = []
    thread = threading.Thread(target=lambda: others.append(clock.looked_at_s()))
    thread.start()
    thread.join()
    assert others == [0.0]
    clock.forget_look()
    assert clock.looked_at_s() == 0.0
