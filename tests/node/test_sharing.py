"""C12, B5: a node and the members of a shared group: receipts, long polls, restarts, durability."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from inturn.broker import pull_filters as cutting
from inturn.broker.shared_delivery import MORE_BYTES
from inturn.consumer.outcome import moved_batch
from inturn.model.batch import StoredBatch, cut, decode, encode, is_intact
from inturn.model.errors import GroupConflict, InvalidInput, NotFound, ReceiptExpired
from inturn.model.message import Message, Origin, Outgoing
from inturn.model.subject import dead_letter_subject
from inturn.protocol.commands import (
    Acknowledge,
    Acknowledged,
    Acquire,
    Append,
    Assignment,
    DescribeGroup,
    Fetch,
    Fetched,
    GroupDescription,
    GroupPartition,
    Heartbeat,
    Leave,
    Move,
    OpenDeadLetters,
    PartitionReceipts,
    Receipt,
    ResetGroup,
    Returned,
    SteerKey,
)
from tests.node.machine import LEASE, Machine, Waiting

VISIBILITY_S = 5.0


class Member:
    """A member of the shared group "crew", with the commands of a consumer."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.ask = self.answered = self.number = 0
        answer = machine.ask(Heartbeat("orders", "crew", name, "none", "first", mode="shared"))
        assert isinstance(answer, Assignment)
        self.assigned = answer.partitions

    def command(self, count: int = 100, wait_s: float = 0.0, visibility_s: float = VISIBILITY_S) -> Fetch:
        self.ask += 1
        return Fetch("orders", "crew", 0, self.name, self.ask, self.answered, count, 1 << 20, visibility_s, wait_s)

    def fetch(self, count: int = 100) -> Fetched:
        fetched = self.machine.ask(self.command(count))
        assert isinstance(fetched, Fetched)
        self.answered = self.ask
        return fetched

    def acknowledge(
        self, fetched: Fetched, offsets: Sequence[int], returned: Sequence[Returned] = (), again: bool = False
    ) -> Acknowledged:
        self.number += not again
        done = tuple(Receipt(one.offset, one.number) for one in fetched.deliveries if one.offset in offsets)
        receipts = (PartitionReceipts(0, fetched.epoch, done, tuple(returned)),)
        answer = self.machine.ask(Acknowledge("orders", "crew", self.name, self.number, receipts))
        assert isinstance(answer, Acknowledged)
        return answer

    def give_back(self, fetched: Fetched, offset: int, delay_s: float = 0.0, error: str | None = None) -> Acknowledged:
        number = next(one.number for one in fetched.deliveries if one.offset == offset)
        return self.acknowledge(fetched, (), [Returned(offset, number, delay_s, error, b"k")])


@pytest.fixture
def ann(machine: Machine) -> Member:
    return Member(machine, "ann")


@pytest.fixture
def bob(machine: Machine) -> Member:
    return Member(machine, "bob")


def offsets(fetched: Fetched) -> list[int]:
    return [one.offset for one in fetched.deliveries]


def messages(fetched: Fetched) -> list[Message]:
    return [one for batch in fetched.pulled.batches for one in decode(batch, Origin("orders", 0))]


def group(machine: Machine) -> GroupPartition:
    described = machine.ask(DescribeGroup("orders", "crew"))
    assert isinstance(described, GroupDescription)
    assert described.mode == "shared"
    return described.partitions[0]


def test_every_member_is_given_all_partitions_and_no_message_is_with_two(
    machine: Machine, ann: Member, bob: Member
) -> None:
    machine.append(10)
    assert ann.assigned == bob.assigned == (0, 1)
    first, second = ann.fetch(4), bob.fetch(4)
    assert (offsets(first), offsets(second)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert group(machine).outstanding == 8


def test_a_part_of_a_batch_is_a_batch_that_can_be_read(machine: Machine, ann: Member, bob: Member) -> None:
    machine.append(10)
    first, second = ann.fetch(3), bob.fetch(100)
    for fetched in (first, second):
        assert all(is_intact(batch) for batch in fetched.pulled.batches)
        assert [one.offset for one in messages(fetched)] == offsets(fetched)
    ann.acknowledge(first, [1])
    machine.wait(VISIBILITY_S)
    again = bob.fetch()
    assert offsets(again) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [one.offset for one in messages(again)] == offsets(again), "what is between is left out"


def test_nothing_is_cut_under_the_lock(machine: Machine, ann: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: decoding a batch takes long. No command waits for the decoding, neither at once nor after a long poll."""
    seen: list[bool] = []

    def watched(batch: StoredBatch, offsets: Sequence[int]) -> StoredBatch:
        seen.append(machine.node.lock._is_owned())  # type: ignore[attr-defined]
        return cut(batch, offsets)

    monkeypatch.setattr(cutting, "cut", watched)
    machine.append(3)
    ann.acknowledge(ann.fetch(2), [0, 1])
    ann.acknowledge(ann.fetch(), [2])
    waiting = machine.submit(ann.command(2, wait_s=5.0))
    machine.append(3)
    machine.run()
    assert isinstance(waiting.answer, Fetched)
    assert [one.offset for one in messages(waiting.answer)] == [3, 4]
    assert seen == [False, False, False]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_parts_of_many_batches_are_no_larger_together_than_an_answer_may_be(
    machine: Machine, ann: Member, compression: str | None
) -> None:
    """C12: a redelivered message may be the large message of a batch. The size is known only after decoding."""
    large = 3 << 20
    for _ in range(12):
        batch = encode([Outgoing(bytes(large)), *[Outgoing(b"x")] * 99], array("H", [1] * 100), compression=compression)
        machine.ask(Append("orders", 0, batch))
    done: list[int] = []
    while len(done) < 12 * 99:
        fetched = ann.fetch(5000)
        small = [offset for offset in offsets(fetched) if offset % 100]
        ann.acknowledge(fetched, small)
        done += small
    machine.wait(VISIBILITY_S)
    again: list[int] = []
    while len(again) < 12:
        fetched = ann.fetch(5000)
        sizes = [len(batch.payload) for batch in fetched.pulled.batches]
        assert 0 < sum(sizes) < MORE_BYTES + 2 * large
        assert [one.offset for one in messages(fetched)] == offsets(fetched)
        again += offsets(fetched)
    assert again == list(range(0, 1200, 100))


def test_what_is_acknowledged_never_comes_again_also_after_a_restart(machine: Machine, ann: Member) -> None:
    machine.append(6)
    fetched = ann.fetch()
    assert ann.acknowledge(fetched, [0, 1, 4]) == Acknowledged()
    machine.restart()
    bob = Member(machine, "bob")
    assert offsets(bob.fetch()) == [2, 3, 5]
    assert (group(machine).committed, group(machine).finished_count) == (2, 1)


def test_a_receipt_that_is_over_is_refused_and_named_while_others_are_taken(
    machine: Machine, ann: Member, bob: Member
) -> None:
    machine.append(1)
    old = ann.fetch()
    machine.wait(VISIBILITY_S - 1)
    machine.append(1)
    new = ann.fetch()
    machine.wait(1)
    ann.number += 1
    receipts = (PartitionReceipts(0, old.epoch, (Receipt(0, 1), Receipt(1, 2))),)
    assert (new.deliveries[0].offset, new.deliveries[0].number) == (1, 2)
    answer = machine.ask(Acknowledge("orders", "crew", "ann", ann.number, receipts))
    assert answer == Acknowledged(((0, 0),))
    assert offsets(bob.fetch()) == [0]


def test_a_receipt_of_before_a_restart_is_over(machine: Machine, ann: Member) -> None:
    machine.append(1)
    fetched = ann.fetch()
    machine.restart()
    ann = Member(machine, "ann")
    again = ann.fetch()
    assert again.epoch > fetched.epoch
    assert again.deliveries == fetched.deliveries, "the same number, in another epoch; a restart is no failure"
    assert ann.acknowledge(fetched, [0]) == Acknowledged(((0, 0),))
    assert ann.acknowledge(again, [0]) == Acknowledged()


def test_an_acknowledgement_whose_answer_was_lost_is_answered_the_same_again(machine: Machine, ann: Member) -> None:
    machine.append(2)
    fetched = ann.fetch()
    first = ann.acknowledge(fetched, [0, 1])
    assert ann.acknowledge(fetched, [0, 1], again=True) == first == Acknowledged()


def test_a_fetch_whose_answer_was_lost_gets_the_same_messages_under_new_receipts(machine: Machine, ann: Member) -> None:
    machine.append(3)
    lost = machine.ask(ann.command())
    assert isinstance(lost, Fetched)
    again = ann.fetch()
    assert offsets(again) == offsets(lost) == [0, 1, 2]
    assert [one.deliveries for one in again.deliveries] == [1, 1, 1]
    assert ann.acknowledge(lost, [0]) == Acknowledged(((0, 0),))


def test_the_count_of_deliveries_is_durable_before_the_message_is_given_out_again(
    machine: Machine, ann: Member, bob: Member
) -> None:
    """So a message that crashes the consumer every time is given up in the end."""
    machine.append(2)
    fetched = ann.fetch()
    ann.give_back(fetched, 1, 0.0, "RuntimeError: no")
    machine.wait(VISIBILITY_S)
    assert [(one.offset, one.deliveries) for one in bob.fetch().deliveries] == [(0, 2), (1, 2)]
    machine.restart()
    carl = Member(machine, "carl")
    assert [(one.offset, one.deliveries) for one in carl.fetch().deliveries] == [(0, 2), (1, 2)]
    machine.wait(VISIBILITY_S)
    assert [(one.offset, one.deliveries) for one in carl.fetch().deliveries] == [(0, 3), (1, 3)]
    assert (group(machine).redeliveries, group(machine).waiting) == (2, 0)


def test_what_is_given_back_unbegun_is_free_at_once_and_not_counted(machine: Machine, ann: Member, bob: Member) -> None:
    machine.append(2)
    fetched = ann.fetch()
    waiting = machine.submit(bob.command(wait_s=30.0))
    assert waiting.answer is None
    ann.give_back(fetched, 1)
    machine.run()
    assert isinstance(waiting.answer, Fetched)
    assert [(one.offset, one.deliveries) for one in waiting.answer.deliveries] == [(1, 1)]


def held_back(machine: Machine, member: Member) -> Waiting:
    waiting = machine.submit(member.command(wait_s=30.0))
    machine.run()
    assert waiting.answer is None
    return waiting


def test_a_long_poll_wakes_for_a_new_message_a_return_and_an_expiry(machine: Machine, ann: Member, bob: Member) -> None:
    waiting = held_back(machine, bob)
    machine.append(1)
    machine.run()
    assert isinstance(waiting.answer, Fetched)
    bob.answered = bob.ask
    waiting = held_back(machine, ann)
    bob.give_back(waiting_answer := bob_has(machine, bob), 0, 2.0, "no")
    assert waiting_answer.deliveries
    machine.wait(1.9)
    assert waiting.answer is None
    machine.wait(0.1)
    assert isinstance(waiting.answer, Fetched), "its delay is over"
    ann.answered = ann.ask
    waiting = held_back(machine, bob)
    machine.wait(VISIBILITY_S)
    assert isinstance(waiting.answer, Fetched), "ann did not acknowledge it"
    assert waiting.answer.deliveries[0].deliveries == 3


def bob_has(machine: Machine, bob: Member) -> Fetched:
    """The messages of bob's last fetch, again under new receipts."""
    bob.answered = bob.ask - 1
    return bob.fetch()


def test_the_node_says_how_long_a_fetch_had_waited_so_that_its_member_counts_no_time_twice(
    machine: Machine, bob: Member
) -> None:
    waiting = held_back(machine, bob)
    machine.wait(3.0)
    machine.append(1)
    machine.run()
    assert isinstance(waiting.answer, Fetched)
    assert waiting.answer.waited_s == pytest.approx(3.0)


def test_a_long_poll_that_its_member_has_given_up_is_given_nothing(machine: Machine, ann: Member) -> None:
    old = held_back(machine, ann)
    new = held_back(machine, ann)
    machine.append(1)
    machine.run()
    assert isinstance(old.answer, Fetched)
    assert not old.answer.deliveries
    assert isinstance(new.answer, Fetched)
    assert offsets(new.answer) == [0]


def test_a_member_that_leaves_gives_everything_back(machine: Machine, ann: Member, bob: Member) -> None:
    machine.append(3)
    ann.fetch()
    waiting = held_back(machine, bob)
    machine.ask(Leave("orders", "crew", "ann"))
    machine.run()
    assert isinstance(waiting.answer, Fetched)
    assert [(one.offset, one.deliveries) for one in waiting.answer.deliveries] == [(0, 1), (1, 1), (2, 1)]


def test_a_silent_member_keeps_what_it_has_until_that_is_over(machine: Machine, ann: Member, bob: Member) -> None:
    machine.append(1)
    fetched = machine.ask(ann.command(visibility_s=3 * LEASE.life_s))
    assert isinstance(fetched, Fetched)
    machine.wait(LEASE.life_s + 1)
    described = machine.ask(DescribeGroup("orders", "crew"))
    assert isinstance(described, GroupDescription)
    assert described.members == ()
    assert offsets(bob.fetch()) == []
    assert ann.acknowledge(fetched, [0]) == Acknowledged()


def test_a_message_is_moved_under_its_receipt_and_not_without(machine: Machine, ann: Member, bob: Member) -> None:
    machine.append(2)
    machine.ask(OpenDeadLetters("orders", "crew"))
    fetched = ann.fetch()
    receipts = tuple(Receipt(one.offset, one.number) for one in fetched.deliveries)
    batch = moved_batch(messages(fetched), [1, 1])
    dead = dead_letter_subject("crew", "orders")
    move = Move("orders", "crew", 0, "ann", fetched.epoch, dead, 0, batch, receipts)
    machine.ask(move)
    ann.acknowledge(fetched, [0])
    with pytest.raises(ReceiptExpired) as caught:
        machine.ask(move)
    assert (caught.value.offsets, caught.value.partition) == ((0,), "0")
    assert "is delivered again" in str(caught.value)
    with pytest.raises(ReceiptExpired):
        machine.ask(Move("orders", "crew", 0, "bob", fetched.epoch, dead, 0, batch, receipts[1:]))
    with pytest.raises(ReceiptExpired):
        machine.ask(Move("orders", "crew", 0, "ann", fetched.epoch, dead, 0, batch))


def test_the_mode_of_a_group_is_that_of_its_first_member(machine: Machine, ann: Member) -> None:
    with pytest.raises(GroupConflict, match="mode='shared', this asks for 'exclusive'"):
        machine.ask(Heartbeat("orders", "crew", "bob", "none", "first"))
    with pytest.raises(GroupConflict, match="'exclusive'"):
        machine.ask(Acquire("orders", "crew", 0, "ann", 1))
    machine.join("x")
    with pytest.raises(GroupConflict, match="'shared'"):
        machine.ask(Fetch("orders", "billing", 0, "x", 1, 0, 10, 100, 1.0))
    with pytest.raises(GroupConflict, match="'shared'"):
        machine.ask(Acknowledge("orders", "billing", "x", 1, ()))
    machine.restart()
    with pytest.raises(GroupConflict, match="mode='shared'"):
        machine.ask(Heartbeat("orders", "crew", "bob", "none", "first"))
    with pytest.raises(InvalidInput, match="mode='sheared'"):
        machine.ask(Heartbeat("orders", "new", "bob", "none", "first", mode="sheared"))


def test_what_makes_no_sense_in_a_shared_group_is_refused_with_a_reason(machine: Machine, ann: Member) -> None:
    with pytest.raises(GroupConflict, match="no partitions to take over"):
        machine.ask(Heartbeat("orders", "crew", "driver", "none", "first", takes_over=True, mode="shared"))
    with pytest.raises(GroupConflict, match="nothing to do"):
        machine.ask(SteerKey("orders", "crew", b"k", "park", "me", ""))
    with pytest.raises(InvalidInput, match="visibility_s"):
        machine.ask(ann.command(visibility_s=0.0))
    with pytest.raises(InvalidInput, match="0 messages"):
        machine.ask(ann.command(count=0))
    with pytest.raises(NotFound):
        machine.ask(Fetch("orders", "crew", 7, "ann", 9, 0, 1, 100, 1.0))
    with pytest.raises(NotFound):
        machine.ask(Acknowledge("orders", "crew", "ann", 1, (PartitionReceipts(7, 1),)))


@pytest.mark.parametrize(
    "bad", [{"delay_s": -1.0}, {"delay_s": float("nan")}, {"delay_s": 1e9}, {"key": b"k" * (2 << 20)}]
)
def test_nonsense_in_an_acknowledgement_changes_nothing(machine: Machine, ann: Member, bad: dict[str, Any]) -> None:
    machine.append(2)
    fetched = ann.fetch()
    first, second = fetched.deliveries
    with pytest.raises(InvalidInput):
        ann.acknowledge(fetched, [first.offset], [Returned(second.offset, second.number, error="no", **bad)])
    assert ann.acknowledge(fetched, [0, 1]) == Acknowledged()


def test_a_reset_needs_that_nobody_consumes_and_ends_all_receipts(machine: Machine, ann: Member) -> None:
    machine.append(3)
    fetched = ann.fetch()
    ann.acknowledge(fetched, [0, 1])
    with pytest.raises(GroupConflict, match="ann"):
        machine.ask(ResetGroup("orders", "crew", "first"))
    machine.ask(Leave("orders", "crew", "ann"))
    machine.ask(ResetGroup("orders", "crew", "first"))
    ann = Member(machine, "ann")
    again = ann.fetch()
    assert offsets(again) == [0, 1, 2]
    assert again.epoch > fetched.epoch


def test_groups_of_any_mode_on_one_subject_do_not_know_of_each_other(machine: Machine, ann: Member) -> None:
    machine.append(2)
    machine.join("x")
    granted = machine.acquire("x")
    fetched = ann.fetch()
    ann.acknowledge(fetched, [0, 1])
    assert granted.offset == 0
    assert machine.acquire("x").offset == 0
