"""The queue of a partition, step by step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from inturn.model.errors import Closed, DiskFull, InturnError, LogStopped, OutOfSequence, ProducerFenced, SendFailed
from inturn.model.settings import Strategy
from inturn.producer.core import ProducerCore, SendAttempt
from inturn.producer.send_batch import SendHandle
from inturn.protocol.commands import Appended
from tests.producer.fake_log import FakeLog, bodies_of, key_for, some_core, some_subject

FULL = DiskFull("p0")
FENCED = ProducerFenced("7", 0, 1)


def add(core: ProducerCore, *bodies: bytes, key: bytes | None = b"k") -> list[SendHandle]:
    handles = []
    for body in bodies:
        batch = core.add("orders", body, key, 0)
        handles.append(SendHandle(batch, len(batch.messages) - 1))
    return handles


def bodies(attempts: list[SendAttempt]) -> list[list[bytes]]:
    return [bodies_of(attempt.command) for attempt in attempts]


def test_messages_that_wait_together_are_sent_together() -> None:
    core = some_core()
    add(core, b"a", b"b", b"c")
    assert bodies(core.poll(0.0)) == [[b"a", b"b", b"c"]]
    assert core.poll(0.0) == []


def test_a_batch_is_closed_by_count_and_by_bytes() -> None:
    core = some_core(batch_count=2)
    add(core, b"a", b"b", b"c")
    assert bodies(core.poll(0.0)) == [[b"a", b"b"], [b"c"]]
    core = some_core(batch_bytes=100)
    add(core, b"x" * 60, b"y" * 60, b"z" * 200)
    assert [len(batch) for batch in bodies(core.poll(0.0))] == [1, 1, 1]


def test_no_more_batches_are_on_their_way_than_allowed() -> None:
    core = some_core(batch_count=1, in_flight=2)
    add(core, b"a", b"b", b"c")
    first = core.poll(0.0)
    assert bodies(first) == [[b"a"], [b"b"]]
    core.answered(first[0], Appended(0), 0.0)
    assert bodies(core.poll(0.0)) == [[b"c"]]


def test_handles_tell_partition_and_offset() -> None:
    """P3."""
    core = some_core()
    handles = add(core, b"a", b"b")
    (attempt,) = core.poll(0.0)
    core.answered(attempt, Appended(40), 0.0)
    stored = [handle.result(0) for handle in handles]
    assert [(one.subject, one.partition, one.offset) for one in stored] == [("orders", 0, 40), ("orders", 0, 41)]


def test_after_a_failure_everything_goes_again_in_order_and_nothing_new_before_it() -> None:
    core = some_core(batch_count=1, in_flight=3, backoff_min_s=0.1)
    add(core, b"a", b"b", b"c", b"d")
    a, b, c = core.poll(0.0)
    core.answered(a, FULL, 0.0)
    assert core.poll(10.0) == [], "b and c are still on their way"
    core.answered(b, OutOfSequence("p0", 0, 1), 0.0)
    core.answered(c, OutOfSequence("p0", 0, 2), 0.0)
    assert core.poll(0.0) == [], "it waits a little first"
    due_s = core.next_due_s()
    assert due_s is not None
    assert due_s > 0
    again = core.poll(due_s)
    assert bodies(again) == [[b"a"], [b"b"], [b"c"]]
    assert [one.command.batch for one in again] == [one.command.batch for one in (a, b, c)]


def test_the_wait_between_tries_grows_and_stays_within_its_bounds() -> None:
    core = some_core(backoff_min_s=0.05, backoff_max_s=2.0)
    add(core, b"a")
    now_s, waits = 1000.0, []
    for _ in range(40):
        (attempt,) = core.poll(now_s)
        core.answered(attempt, FULL, now_s)
        due_s = core.next_due_s()
        assert due_s is not None
        waits.append(due_s - now_s)
        now_s = due_s
    assert all(0.05 - 1e-9 <= wait_s <= 2.0 + 1e-9 for wait_s in waits)
    assert waits[0] == pytest.approx(0.05)
    assert waits[-1] == pytest.approx(2.0)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(waits))


def test_strict_never_gives_up_on_what_may_succeed_later() -> None:
    """P7."""
    core = some_core(tries_max=2)
    (handle,) = add(core, b"a")
    now_s = 0.0
    for _ in range(50):
        (attempt,) = core.poll(now_s)
        core.answered(attempt, FULL, now_s)
        now_s += 10
    assert not handle.done
    (attempt,) = core.poll(now_s)
    core.answered(attempt, Appended(3), now_s)
    assert handle.result(0).offset == 3


def test_an_answer_that_does_not_come_is_asked_for_again() -> None:
    core = some_core(answer_timeout_s=5.0)
    add(core, b"a")
    (first,) = core.poll(0.0)
    assert core.next_due_s() == 5.0
    assert core.poll(4.9) == []
    (second,) = core.poll(5.0)
    assert second.command.batch == first.command.batch


def test_an_answer_to_an_earlier_try_still_counts_if_it_says_stored() -> None:
    core = some_core(answer_timeout_s=5.0)
    (handle,) = add(core, b"a")
    (first,) = core.poll(0.0)
    core.poll(5.0)
    core.answered(first, Appended(9), 6.0)
    assert handle.result(0).offset == 9
    assert core.is_idle


def test_a_failure_of_an_earlier_try_changes_nothing() -> None:
    core = some_core(answer_timeout_s=5.0)
    (handle,) = add(core, b"a")
    (first,) = core.poll(0.0)
    (second,) = core.poll(5.0)
    core.answered(first, FENCED, 6.0)
    assert not handle.done
    core.answered(second, Appended(1), 6.0)
    core.answered(second, FENCED, 6.0)
    assert handle.result(0).offset == 1
    assert add(core, b"b")


def test_what_waits_is_sent_when_late_answers_have_settled_everything() -> None:
    """P4: a time-out, then both answers arrive late. Queued messages must not wait for the next send."""
    core = some_core(batch_count=1, in_flight=2, answer_timeout_s=5.0)
    add(core, b"a")
    (a,) = core.poll(0.0)
    add(core, b"b", b"c")
    (b,) = core.poll(1.0)
    assert core.poll(5.0) == [], "a has timed out, b is still waited for"
    core.answered(a, Appended(0), 5.5)
    core.answered(b, Appended(1), 5.6)
    assert bodies(core.poll(5.7)) == [[b"c"]]


def test_a_failure_that_cannot_pass_stops_the_queue_and_fails_everything_behind_it() -> None:
    """P5, P7."""
    core = some_core(batch_count=1, in_flight=2)
    handles = add(core, b"a", b"b", b"c")
    a, _b = core.poll(0.0)
    core.answered(a, FENCED, 0.0)
    for handle in handles:
        with pytest.raises(ProducerFenced):
            handle.result(0)
    with pytest.raises(ProducerFenced):
        add(core, b"d")
    assert core.waiting_bytes == 0
    assert core.is_idle
    assert core.poll(100.0) == []


def test_a_partition_that_stopped_does_not_stop_another() -> None:
    """P6."""
    subject = some_subject(2)
    core = some_core(subject)
    (lost,) = add(core, b"a", key=key_for(subject, 0))
    (fine,) = add(core, b"b", key=key_for(subject, 1))
    a, b = core.poll(0.0)
    core.answered(a, LogStopped("p0", "a sync failed"), 0.0)
    core.answered(b, Appended(0), 0.0)
    with pytest.raises(LogStopped):
        lost.result(0)
    assert fine.result(0).partition == 1
    with pytest.raises(LogStopped):
        add(core, b"c", key=key_for(subject, 0))
    assert add(core, b"d", key=key_for(subject, 1))


def test_a_partition_without_answers_does_not_hold_up_another() -> None:
    """P6."""
    subject = some_subject(2)
    core = some_core(subject, batch_count=1, in_flight=1)
    for number in range(10):
        add(core, b"slow %d" % number, key=key_for(subject, 0))
        add(core, b"fast %d" % number, key=key_for(subject, 1))
    log, now_s = FakeLog("p1"), 0.0
    while len(log.bodies) < 10:
        attempts = [one for one in core.poll(now_s) if one.command.partition == 1]
        assert attempts
        for one in attempts:
            core.answered(one, log.append(one.command), now_s)
    assert log.bodies == [b"fast %d" % number for number in range(10)]


def test_abandoning_fails_everything_with_the_reason() -> None:
    core = some_core(batch_count=1, in_flight=1)
    handles = add(core, b"a", b"b")
    core.poll(0.0)
    assert core.abandon(Closed("producer")) == 2
    for handle in handles:
        with pytest.raises(Closed):
            handle.result(0)
    assert core.waiting_bytes == 0


def test_a_log_that_forgot_the_producer_is_told_that_nothing_is_missing() -> None:
    """P4: the producer's state expires after a week of silence. The next message must still be stored."""
    core, log = some_core(), FakeLog()
    add(core, b"a")
    (attempt,) = core.poll(0.0)
    core.answered(attempt, log.append(attempt.command), 0.0)
    log.producers.expire(1)
    (handle,) = add(core, b"b")
    now_s = 0.0
    for _ in range(5):
        for attempt in core.poll(now_s):
            core.answered(attempt, log.append(attempt.command), now_s)
        now_s += 10
    assert handle.done
    assert log.bodies == [b"a", b"b"]


# Best effort


def best_effort(partitions: int = 2, **settings: object) -> tuple[ProducerCore, list[bytes]]:
    subject = some_subject(partitions, Strategy.BEST_EFFORT)
    return some_core(subject, **settings), [key_for(subject, index) for index in range(partitions)]


def fail_until_moved(core: ProducerCore, tries: int, error: InturnError = FULL) -> float:
    now_s = 0.0
    for _ in range(tries):
        (attempt,) = [one for one in core.poll(now_s) if one.command.partition == 0]
        core.answered(attempt, error, now_s)
        now_s += 100.0
    return now_s


def test_best_effort_moves_to_another_partition_after_its_tries() -> None:
    """P7."""
    core, keys = best_effort(tries_max=3)
    (handle,) = add(core, b"a", key=keys[0])
    now_s = fail_until_moved(core, 3)
    (attempt,) = core.poll(now_s)
    assert attempt.command.partition == 1
    assert not attempt.command.gap
    assert attempt.command.batch.first_sequence == 0
    core.answered(attempt, Appended(5), now_s)
    assert (handle.result(0).partition, handle.result(0).offset) == (1, 5)


def test_best_effort_moves_at_once_from_a_log_that_stopped() -> None:
    """P7."""
    core, keys = best_effort(tries_max=100)
    add(core, b"a", key=keys[0])
    now_s = fail_until_moved(core, 1, LogStopped("p0", "a sync failed"))
    assert [one.command.partition for one in core.poll(now_s)] == [1]


def test_best_effort_moves_from_a_partition_that_never_answers() -> None:
    """P7: a try without an answer counts as a try."""
    core, keys = best_effort(tries_max=3, answer_timeout_s=5.0)
    add(core, b"a", key=keys[0])
    partitions = [attempt.command.partition for second in range(0, 100, 5) for attempt in core.poll(float(second))]
    assert partitions.count(0) == 3
    assert 1 in partitions


def test_best_effort_fails_when_no_partition_takes_it() -> None:
    """P7."""
    core, keys = best_effort(partitions=3, tries_max=2)
    (handle,) = add(core, b"a", key=keys[0])
    now_s, seen = 0.0, []
    while not handle.done and now_s < 10_000:
        for attempt in core.poll(now_s):
            seen.append(attempt.command.partition)
            core.answered(attempt, FULL, now_s)
        now_s += 100.0
    with pytest.raises(SendFailed, match="disk is full"):
        handle.result(0)
    assert sorted(set(seen)) == [0, 1, 2]
    assert len(seen) == 6
    assert core.is_idle
    assert core.waiting_bytes == 0


def test_what_comes_after_a_given_up_batch_says_that_the_gap_is_meant() -> None:
    """P7."""
    core, keys = best_effort(tries_max=2, batch_count=1, in_flight=2)
    add(core, b"a", b"b", b"c", key=keys[0])
    log, now_s = FakeLog(), 0.0
    for _ in range(2):
        a, b = [one for one in core.poll(now_s) if one.command.partition == 0]
        core.answered(a, FULL, now_s)
        core.answered(b, DiskFull("p0") if a.tries == 1 else OutOfSequence("p0", 0, 1), now_s)
        now_s += 100.0
    stored: list[bytes] = []
    other = FakeLog("p1")
    while not core.is_idle and now_s < 10_000:
        for one in core.poll(now_s):
            target = log if one.command.partition == 0 else other
            core.answered(one, target.append(one.command), now_s)
        now_s += 100.0
    stored = log.bodies + other.bodies
    assert sorted(stored) == [b"a", b"b", b"c"]
    assert b"c" in log.bodies


def test_what_waits_behind_a_message_that_failed_finally_is_sent() -> None:
    """P7: with a single partition there is no other target. The rest continues without the failed message."""
    core, keys = best_effort(partitions=1, tries_max=1, batch_count=1, in_flight=1)
    failed, waiting = add(core, b"a", b"b", key=keys[0])
    (attempt,) = core.poll(0.0)
    core.answered(attempt, FULL, 0.0)
    assert failed.done
    assert not waiting.done
    attempts = core.poll(100.0)
    assert bodies(attempts) == [[b"b"]]
    assert attempts[0].command.gap


def test_a_fenced_best_effort_producer_refuses_what_is_sent_later() -> None:
    """P5: a message for a stopped queue must fail, not wait for ever."""
    core, keys = best_effort(partitions=1)
    (handle,) = add(core, b"a", key=keys[0])
    (attempt,) = core.poll(0.0)
    core.answered(attempt, FENCED, 0.0)
    with pytest.raises(ProducerFenced):
        handle.result(0)
    with pytest.raises(ProducerFenced):
        add(core, b"b", key=keys[0])
    assert core.is_idle


def test_best_effort_uses_another_partition_while_one_has_stopped() -> None:
    """P7: a fence holds in all partitions. After all other errors, messages may go to other partitions."""
    core, keys = best_effort()
    add(core, b"a", key=keys[0])
    (attempt,) = core.poll(0.0)
    core.answered(attempt, Closed("node"), 0.0)
    add(core, b"b", key=keys[0])
    assert [one.command.partition for one in core.poll(100.0)] == [1]
