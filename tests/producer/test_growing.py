"""M4, P4: a subject grows while a producer sends: no message is lost, doubled or overtaken."""

from __future__ import annotations

from dataclasses import replace

from inturn.model.errors import InturnError, RouteChanged
from inturn.model.settings import ProducerSettings, Strategy
from inturn.model.subject import Subject
from inturn.producer.core import ProducerCore, SendAttempt
from inturn.producer.fallback import FallbackQueue
from inturn.producer.send_batch import SendHandle
from inturn.protocol.commands import Append, Appended
from tests.producer.fake_log import FakeLog, bodies_of, key_for, some_core, some_subject

BEFORE = some_subject(1)
AFTER = replace(BEFORE, route=BEFORE.route.grown(2, {0: 0}))
STAYS, MOVES = key_for(AFTER, 0), key_for(AFTER, 1)
REFUSED = RouteChanged("orders", 1, 2)


def add(core: ProducerCore, *bodies: bytes, key: bytes) -> list[SendHandle]:
    handles = []
    for body in bodies:
        batch = core.add("orders", body, key, 0)
        handles.append(SendHandle(batch, len(batch.messages) - 1))
    return handles


def sent(attempts: list[SendAttempt]) -> list[tuple[int, int, list[bytes]]]:
    """Partition, route version and bodies of every append."""
    commands = [attempt.command for attempt in attempts]
    return [(one.partition, one.batch.route_version, bodies_of(one)) for one in commands]


def answer(core: ProducerCore, attempts: list[SendAttempt], log: FakeLog, sealed: int, now_s: float = 0.0) -> None:
    for attempt in attempts:
        core.answered(attempt, _stored(log, attempt.command, sealed), now_s)


def _stored(log: FakeLog, command: Append, sealed: int) -> Appended | InturnError:
    known = log.producers._states.get(command.batch.producer_id)
    is_new = known is None or command.batch.first_sequence >= known.next_sequence
    return REFUSED if is_new and command.batch.route_version != sealed else log.append(command)


def test_what_was_refused_is_divided_and_goes_on_in_order() -> None:
    core = some_core(BEFORE, batch_count=10)
    stays, moves = add(core, b"a", b"c", key=STAYS), add(core, b"b", b"d", key=MOVES)
    first = core.poll(0.0)
    later = add(core, b"e", key=MOVES)
    core.answered(first[0], REFUSED, 0.0)
    assert core.take_outdated() == {"orders"}
    assert core.take_outdated() == set()
    core.learn(AFTER)
    attempts = core.poll(0.0)
    assert sent(attempts) == [(0, 2, [b"a", b"c"]), (1, 2, [b"b", b"d"]), (1, 2, [b"e"])]
    assert [one.command.batch.first_sequence for one in attempts] == [0, 0, 2]
    waiting = core.waiting_bytes
    for attempt, offset in zip(attempts, (7, 0, 2), strict=True):
        core.answered(attempt, Appended(offset), 0.0)
    assert [one.result(0).offset for one in stays] == [7, 8]
    assert [(one.result(0).partition, one.result(0).offset) for one in (*moves, *later)] == [(1, 0), (1, 1), (1, 2)]
    assert waiting > 0
    assert core.waiting_bytes == 0
    assert core.is_idle


def test_nothing_goes_to_a_child_before_it_is_known_what_became_of_what_was_sent() -> None:
    """An answer was lost: the batch may be stored, or not."""
    core = some_core(BEFORE, batch_count=1, answer_timeout_s=1.0)
    log = FakeLog()
    (lost,) = add(core, b"a", key=MOVES)
    first = core.poll(0.0)
    log.append(first[0].command)  # the answer is lost
    add(core, b"b", key=MOVES)
    core.learn(AFTER)
    assert core.poll(0.5) == [], "what is new waits"
    again = core.poll(1.0)
    assert sent(again) == [(0, 1, [b"a"])]
    answer(core, again, log, sealed=2, now_s=1.0)
    assert lost.result(0).partition == 0
    assert sent(core.poll(1.0)) == [(1, 2, [b"b"])]


def test_what_was_sent_and_is_not_there_goes_to_the_child_with_all_behind_it() -> None:
    core = some_core(BEFORE, batch_count=1, in_flight=3, answer_timeout_s=1.0)
    log = FakeLog()
    for body in (b"a", b"b", b"c"):
        add(core, body, key=MOVES)
    core.poll(0.0)
    core.learn(AFTER)
    again = core.poll(1.0)
    assert sent(again) == [(0, 1, [body]) for body in (b"a", b"b", b"c")]
    answer(core, again, log, sealed=2, now_s=1.0)
    assert sent(core.poll(1.0)) == [(1, 2, [body]) for body in (b"a", b"b", b"c")]


def test_a_late_answer_to_what_was_divided_changes_nothing() -> None:
    core = some_core(BEFORE, batch_count=1, in_flight=2)
    add(core, b"a", b"b", key=MOVES)
    attempts = core.poll(0.0)
    core.answered(attempts[0], REFUSED, 0.0)
    core.learn(AFTER)
    now = core.poll(0.0)
    core.answered(attempts[1], REFUSED, 0.0)
    core.answered(attempts[0], Appended(3), 0.0)
    assert not core.is_idle
    for attempt, offset in zip(now, (0, 1), strict=True):
        core.answered(attempt, Appended(offset), 0.0)
    assert core.is_idle


def test_a_partition_that_waits_holds_up_no_other() -> None:
    before = some_subject(2)
    after = replace(before, route=before.route.grown(4, {0: 0, 1: 0}))
    core = some_core(before, answer_timeout_s=60.0)
    add(core, b"a", key=key_for(after, 2))
    core.poll(0.0)  # to partition 0, without an answer
    core.learn(after)
    add(core, b"b", key=key_for(after, 3))
    assert sent(core.poll(0.0)) == [(3, 2, [b"b"])]


def test_growing_twice_leads_to_the_newest_route() -> None:
    last: Subject = replace(AFTER, route=AFTER.route.grown(4, {0: 0, 1: 0}))
    core = some_core(BEFORE)
    add(core, b"a", key=key_for(last, 3))
    first = core.poll(0.0)
    core.learn(AFTER)
    core.learn(last)
    core.learn(AFTER)
    core.answered(first[0], REFUSED, 0.0)
    assert sent(core.poll(0.0)) == [(3, 3, [b"a"])]


def test_a_route_that_is_not_there_yet_is_asked_for_again() -> None:
    core = some_core(BEFORE, backoff_min_s=0.1)
    add(core, b"a", key=MOVES)
    core.answered(core.poll(0.0)[0], REFUSED, 0.0)
    core.take_outdated()
    core.learn(BEFORE)
    again = core.poll(1.0)
    assert sent(again) == [(0, 1, [b"a"])]
    core.answered(again[0], REFUSED, 1.0)
    assert core.take_outdated() == {"orders"}


def kept_while_it_grows(*keys: bytes) -> tuple[ProducerCore, list[SendHandle]]:
    """Messages of keys that were in the outbox at the send.

    Since then the subject has grown and the keys have left the outbox.
    """
    before = replace(BEFORE, strategy=Strategy.BEST_EFFORT)
    core = some_core(before, batch_count=10)
    core.fallback = FallbackQueue([("orders", key, row) for row, key in enumerate(keys)], ProducerSettings())
    handles = [handle for key in keys for handle in add(core, b"1 " + key, key=key)]
    core.learn(replace(before, route=AFTER.route))
    handles += [handle for key in keys for handle in add(core, b"2 " + key, key=key)]
    batches = core.fallback.take()
    core.fallback.forget(set(range(len(keys))))
    assert all(core.release(batch) for batch in batches)
    assert core.fallback.is_idle
    return core, handles


def test_what_the_outbox_need_not_take_any_more_goes_by_the_new_route() -> None:
    """M5, P7: in the parent the message would be above the barrier, without order to the messages of the child."""
    core, handles = kept_while_it_grows(MOVES)
    attempts = core.poll(0.0)
    assert sent(attempts) == [(1, 2, [b"1 " + MOVES]), (1, 2, [b"2 " + MOVES])]
    log = FakeLog()
    answer(core, attempts, log, sealed=2)
    assert [(one.result(0).partition, one.result(0).offset) for one in handles] == [(1, 0), (1, 1)]


def test_what_the_outbox_need_not_take_any_more_is_divided_where_its_keys_have_parted() -> None:
    """M5, P7."""
    core, handles = kept_while_it_grows(STAYS, MOVES)
    attempts = core.poll(0.0)
    assert sent(attempts) == [(0, 2, [b"1 " + STAYS, b"2 " + STAYS]), (1, 2, [b"1 " + MOVES]), (1, 2, [b"2 " + MOVES])]
    logs = FakeLog("p0"), FakeLog("p1")
    for attempt in attempts:
        answer(core, [attempt], logs[attempt.command.partition], sealed=2)
    places = [(one.result(0).partition, one.result(0).offset) for one in handles]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert core.waiting_bytes == 0
    assert core.is_idle


def test_a_partition_that_takes_nothing_keeps_all_of_a_flight_in_the_outbox() -> None:
    """P7: a part of the send batch must not be sent while the rest is put."""
    before = replace(BEFORE, strategy=Strategy.BEST_EFFORT)
    core = some_core(before)
    core.fallback = FallbackQueue([("orders", key, row) for row, key in enumerate((STAYS, MOVES))], ProducerSettings())
    add(core, b"1", key=STAYS)
    add(core, b"1", key=MOVES)
    core.learn(replace(before, route=AFTER.route))
    core._queues["orders"][1].error = InturnError("it has stopped")
    (batch,) = core.fallback.take()
    core.fallback.forget({0, 1})
    assert not core.release(batch)
    assert core.poll(0.0) == []
    assert len(core.fallback_rows(batch)) == 2
