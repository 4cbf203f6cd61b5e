"""C12: a partition of a shared group.

No message has two valid receipts at a time. An acknowledged message is never delivered again; every other message is.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inturn.broker.shared_partition import SharedPartition
from inturn.protocol.commands import Failure, Receipt

VISIBILITY_S = 10.0


def part_with(count: int, member: str = "a", now_s: float = 0.0) -> tuple[SharedPartition, list[Receipt]]:
    part = SharedPartition(1, 0)
    part.hear(member, 1, 0, now_s)
    given = [part.give(offset, member, 1, now_s + VISIBILITY_S) for offset in range(count)]
    return part, [Receipt(one.offset, one.number) for one in given]


def again(part: SharedPartition, now_s: float, member: str = "b", ask: int = 1) -> list[tuple[int, int]]:
    """Deliver the messages that are due. Return the offsets with the number of deliveries."""
    part.expire(now_s)
    part.hear(member, ask, ask - 1, now_s)
    given = [part.give(offset, member, ask, now_s + VISIBILITY_S) for offset in part.due(now_s, 100)]
    return [(one.offset, one.deliveries) for one in given]


def test_what_is_not_acknowledged_in_time_is_due_again_and_counted() -> None:
    part, receipts = part_with(3)
    part.acknowledge(1)
    assert again(part, 9.9) == []
    assert again(part, 10.0) == [(0, 2), (2, 2)]
    assert not part.holds(receipts[0], "a", 10.0)
    assert part.redeliveries == 2
    assert [(one.offset, one.attempts, one.error) for one in part.failed.values()] == [
        (0, 1, "not acknowledged in time"), (2, 1, "not acknowledged in time"),
    ]  # fmt: skip


def test_a_receipt_holds_for_its_member_its_number_and_its_time_only() -> None:
    part, (receipt,) = part_with(1)
    assert part.holds(receipt, "a", 9.9)
    assert not part.holds(receipt, "b", 9.9)
    assert not part.holds(Receipt(0, receipt.number + 1), "a", 9.9)
    assert not part.holds(receipt, "a", 10.0), "over, although nobody else has it yet"
    assert again(part, 10.0) == [(0, 2)]
    assert not part.holds(receipt, "a", 10.0)


def test_what_is_given_back_waits_for_its_time_and_counts_only_with_an_error() -> None:
    part, _ = part_with(2)
    part.give_back(0, 3.0, None)
    part.give_back(1, 5.0, "RuntimeError: no", b"key")
    assert again(part, 2.9) == []
    assert part.next_due_s() == 3.0
    assert again(part, 3.0, ask=2) == [(0, 1)], "it was never begun"
    assert again(part, 5.0, "c") == [(1, 2)]
    assert part.failed == {1: Failure(1, b"key", 1, "RuntimeError: no")}


def test_what_was_given_for_an_answer_that_did_not_arrive_is_free_and_no_failure() -> None:
    part, receipts = part_with(2)
    assert part.hear("a", 2, 0, 1.0), "the answer to 1 did not come"
    assert part.due(1.0, 10) == [0, 1]
    assert not part.holds(receipts[0], "a", 1.0)
    assert part.attempts == {}


def test_an_answer_that_arrived_keeps_what_came_with_it() -> None:
    part, receipts = part_with(2)
    assert part.hear("a", 2, 1, 1.0)
    assert part.due(1.0, 10) == []
    assert part.holds(receipts[0], "a", 1.0)


def test_a_late_copy_of_an_older_ask_is_not_heard() -> None:
    part, _ = part_with(1)
    assert part.hear("a", 3, 1, 1.0)
    assert not part.hear("a", 2, 1, 1.0)
    assert part.hear("a", 3, 1, 1.0), "the same again, after a lost stream"
    assert part.is_newest("a", 3)


def test_a_member_that_leaves_frees_what_it_has_and_one_that_is_silent_keeps_it() -> None:
    part, receipts = part_with(1)
    part.forget("a")
    assert part.due(1.0, 10) == []
    assert part.holds(receipts[0], "a", 1.0)
    part.free("a", 1.0)
    assert part.due(1.0, 10) == [0]


def test_nothing_is_given_out_twice() -> None:
    part, _ = part_with(1)
    with pytest.raises(ValueError, match="offset 0"):
        part.give(0, "b", 1, 20.0)
    part.acknowledge(0)
    with pytest.raises(ValueError, match="offset 0"):
        part.give(0, "b", 1, 20.0)


def test_what_was_finished_before_a_restart_is_no_new_message() -> None:
    before, _ = part_with(6)
    for offset in (0, 1, 3, 5):
        before.acknowledge(offset)
    low, finished = before.tracker.snapshot()
    part = SharedPartition(2, low, finished, [Failure(4, None, 3, "no")])
    assert part.new_ones(0, 9, 3) == [2, 4, 6]
    assert part.new_ones(0, 9, 100) == [2, 4, 6, 7, 8]
    part.hear("a", 1, 0, 0.0)
    assert [part.give(offset, "a", 1, 9.0).deliveries for offset in (2, 4)] == [1, 4]


def test_what_failed_is_settled_when_it_is_done() -> None:
    part = SharedPartition(2, 0, b"", [Failure(0, None, 3, "no")])
    part.hear("a", 1, 0, 0.0)
    part.give(0, "a", 1, 9.0)
    part.acknowledge(0)
    assert (part.settled, part.failed) == ({0}, {})


def test_what_is_acknowledged_leaves_nothing_behind_however_long_the_visibility() -> None:
    part = SharedPartition(1, 0)
    for ask in range(100):
        part.hear("a", ask + 1, ask, float(ask))
        for offset in range(10 * ask, 10 * ask + 10):
            part.give(offset, "a", ask + 1, ask + 40_000.0)
        for offset in range(10 * ask, 10 * ask + 10):
            part.acknowledge(offset)
        assert part.next_due_s() == float("inf")
    assert (part.given, part._terms, part._due, part._waiting) == ({}, [], [], {})


class Sharing(RuleBasedStateMachine):
    """Members fetch, acknowledge, return, lose answers, leave; time passes; the node restarts."""

    members = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.epoch = 0
        self.end = 3
        self.acknowledged: set[int] = set()
        self.stored: tuple[int, bytes, dict[int, Failure]] = (0, b"", {})
        self.asks = dict.fromkeys(self.members, 0)
        self.answered = dict.fromkeys(self.members, 0)
        # Per member: the receipts that the member considers valid, with epoch and end of visibility.
        self.believed: dict[str, dict[Receipt, tuple[int, float]]] = {member: {} for member in self.members}
        self.restart()

    @rule(luck=st.integers(0, 5))
    def restart(self, luck: int = 0) -> None:
        if luck:  # rarely, or no delivery would ever expire
            return
        self.epoch += 1
        low, finished, failures = self.stored
        self.part = SharedPartition(self.epoch, low, finished, failures.values())

    def store(self) -> None:
        failures = self.stored[2] | self.part.failed
        for offset in self.part.settled:
            failures.pop(offset, None)
        self.part.failed.clear()
        self.part.settled.clear()
        self.stored = (*self.part.tracker.snapshot(), failures)

    @rule()
    def append(self) -> None:
        self.end += 1

    @rule(
        member=st.sampled_from(members),
        count=st.integers(1, 3),
        arrives=st.booleans(),
        after_s=st.sampled_from([0.0, 3.0, 7.0, VISIBILITY_S]),
    )
    def fetch(self, member: str, count: int, arrives: bool, after_s: float) -> None:
        self.now_s += after_s
        self.asks[member] += 1
        ask, part = self.asks[member], self.part
        part.expire(self.now_s)
        assert part.hear(member, ask, self.answered[member], self.now_s)
        offsets = part.due(self.now_s, count)
        offsets += part.new_ones(0, self.end, count - len(offsets))
        live = {offset for offset, one in part.given.items() if one.term.ends_at_s > self.now_s}
        assert not live & set(offsets), "somebody has it"
        assert not self.acknowledged & set(offsets), "it was acknowledged"
        given = [part.give(offset, member, ask, self.now_s + VISIBILITY_S) for offset in offsets]
        self.store()
        for one in given:
            assert one.deliveries == 1 + (self.stored[2][one.offset].attempts if one.offset in self.stored[2] else 0)
        if arrives:
            self.answered[member] = ask
            until_s = self.now_s + VISIBILITY_S
            self.believed[member] |= {Receipt(one.offset, one.number): (self.epoch, until_s) for one in given}

    @precondition(lambda self: any(self.believed.values()))
    @rule(data=st.data(), error=st.sampled_from([None, "no", "acknowledge"]), delay_s=st.sampled_from([0.0, 4.0]))
    def settle(self, data: st.DataObject, error: str | None, delay_s: float) -> None:
        member = data.draw(st.sampled_from([one for one in self.members if self.believed[one]]))
        receipt = data.draw(st.sampled_from(sorted(self.believed[member], key=lambda one: one.number)))
        epoch, until_s = self.believed[member].pop(receipt)
        self.part.expire(self.now_s)
        holds = epoch == self.epoch and self.part.holds(receipt, member, self.now_s)
        assert holds == (epoch == self.epoch and self.now_s < until_s)
        if holds and error == "acknowledge":
            self.part.acknowledge(receipt.offset)
            self.store()
            self.acknowledged.add(receipt.offset)
        elif holds:
            self.part.give_back(receipt.offset, self.now_s + delay_s, error)
            self.store()

    @rule(member=st.sampled_from(members), luck=st.integers(0, 3))
    def leave(self, member: str, luck: int) -> None:
        if luck:
            return
        self.part.free(member, self.now_s)
        self.believed[member].clear()

    @invariant()
    def nobody_has_what_another_has(self) -> None:
        live = [
            receipt.offset
            for some in self.believed.values()
            for receipt, (epoch, until_s) in some.items()
            if epoch == self.epoch and self.now_s < until_s
        ]
        assert len(live) == len(set(live))

    def teardown(self) -> None:
        """A single member that acknowledges every delivery finishes the partition."""
        self.now_s += 2 * VISIBILITY_S
        part = self.part
        part.expire(self.now_s)
        part.hear("z", 1, 0, self.now_s)
        rest = [*part.due(self.now_s, self.end), *part.new_ones(0, self.end, self.end)]
        assert not self.acknowledged & set(rest)
        assert self.acknowledged | set(rest) == set(range(self.end)), "something would never be given out again"
        for offset in rest:
            part.give(offset, "z", 1, self.now_s + 1)
            part.acknowledge(offset)
        assert part.tracker.low == self.end
        assert part.attempts == {}


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
