"""P6: the work for a message does not grow with the number of partitions."""

from __future__ import annotations

import pytest

from inturn.model.errors import DiskFull
from inturn.producer.core import GATHERING_MIN, ProducerCore, SendAttempt
from inturn.producer.partition_queue import PartitionQueue
from inturn.protocol.commands import Appended
from tests.producer.fake_log import bodies_of, key_for, some_core, some_subject

MANY = 64
SUBJECT = some_subject(MANY)
KEYS = [key_for(SUBJECT, index) for index in range(MANY)]


def add(core: ProducerCore, index: int, body: bytes = b"x") -> None:
    core.add("orders", body, KEYS[index], 0)


def places(attempts: list[SendAttempt]) -> list[int]:
    return [attempt.command.partition for attempt in attempts]


def store(core: ProducerCore, attempts: list[SendAttempt]) -> None:
    for attempt in attempts:
        core.answered(attempt, Appended(0), 0.0)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The partitions whose queues were used."""
    found: list[int] = []
    for name in ("poll", "expire", "next_due_s"):
        original = getattr(PartitionQueue, name)

        def noting(self: PartitionQueue, *arguments: object, original: object = original) -> object:
            found.append(self.partition)
            return original(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(PartitionQueue, name, noting)
    return found


def test_only_partitions_with_something_to_send_are_looked_at(looked_at: list[int]) -> None:
    core = some_core(SUBJECT)
    add(core, 7)
    attempts = core.poll(0.0)
    core.next_due_s()
    store(core, attempts)
    assert core.poll(0.0) == []
    assert core.next_due_s() is None
    assert core.is_idle
    assert places(attempts) == [7]
    assert set(looked_at) == {7}
    assert len(looked_at) <= 4


def test_what_waits_for_an_answer_is_not_looked_at_for_what_others_do(looked_at: list[int]) -> None:
    core = some_core(SUBJECT)
    for index in range(MANY):
        add(core, index)
    core.poll(0.0)
    looked_at.clear()
    add(core, 3)
    core.poll(0.1)
    assert set(looked_at) == {3}


def test_partitions_that_waited_are_sent_in_their_order_whatever_came_first() -> None:
    core = some_core(SUBJECT)
    for index in (9, 2, 40):
        add(core, index)
    assert places(core.poll(0.0)) == [2, 9, 40]


def test_an_answer_that_does_not_come_is_noticed_though_the_partition_has_nothing_new() -> None:
    core = some_core(SUBJECT, answer_timeout_s=1.0)
    for index in range(MANY):
        add(core, index)
    first = core.poll(0.0)
    store(core, first[1:])
    add(core, 5)
    core.poll(0.5)
    assert core.poll(0.9) == []
    due_s = core.next_due_s()
    assert due_s == 1.0
    (again,) = [one for one in core.poll(due_s) if one.command.partition == 0]
    assert again.tries == 2


def test_a_partition_that_failed_is_tried_again_when_it_is_due_among_many() -> None:
    core = some_core(SUBJECT, backoff_min_s=0.25, answer_timeout_s=30.0)
    for index in range(MANY):
        add(core, index)
    first = core.poll(0.0)
    core.answered(first[0], DiskFull("orders/0"), 0.0)
    assert core.poll(0.0) == []
    assert core.next_due_s() == 0.25
    assert places(core.poll(0.25)) == [0]


def test_while_many_partitions_are_busy_a_batch_that_is_not_full_waits_for_the_one_before() -> None:
    core = some_core(SUBJECT, batch_count=3)
    for index in range(GATHERING_MIN + 1):
        add(core, index)
    first = core.poll(0.0)
    add(core, 0, b"a")
    add(core, 0, b"b")
    assert core.poll(0.0) == [], "it gathers"
    store(core, first[:1])
    (next_one,) = core.poll(0.0)
    assert bodies_of(next_one.command) == [b"a", b"b"]
    for body in (b"c", b"d", b"e", b"f"):
        add(core, 0, body)
    (full,) = core.poll(0.0)
    assert bodies_of(full.command) == [b"c", b"d", b"e"], "a full one does not wait"


def test_with_few_busy_partitions_nothing_waits() -> None:
    core = some_core(SUBJECT)
    for index in range(GATHERING_MIN):
        add(core, index)
    core.poll(0.0)
    add(core, 0)
    assert places(core.poll(0.0)) == [0]
