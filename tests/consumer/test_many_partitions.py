"""C1, C2, M9: a partition that only waits for a pull costs no work until an event."""

from __future__ import annotations

import pytest

from inturn.consumer.core import ConsumerCore
from inturn.consumer.decoder import decode_pull
from inturn.consumer.partition_lease import Stage
from inturn.consumer.partition_state import PartitionState
from inturn.model.routing import Partition, Route, even_ranges
from inturn.model.settings import ConsumerSettings, LeaseSettings, Order
from inturn.model.subject import Subject
from inturn.protocol.commands import (
    Acquire,
    Assignment,
    Command,
    Commit,
    Granted,
    Heartbeat,
    Pull,
    Pulled,
    Release,
    Renew,
    Renewed,
)
from tests.consumer.fake_node import batch_of

COUNT = 100
LIFE_S = 20.0
SUBJECT = Subject(
    "orders", Route("orders", 1, tuple(Partition("local", f"p{n}") for n in range(COUNT)), even_ranges(COUNT))
)
SETTINGS = ConsumerSettings(pull_wait_s=5.0, answer_timeout_s=1.0, heartbeat_s=3.0)


class Member:
    """A consumer that holds all partitions. At 0.0 every partition has a pull in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lease = LeaseSettings(life_s=LIFE_S, renew_s=2.0, margin_s=1.0)
        self.core = ConsumerCore("orders", "billing", "m1", Order.PARTITION, "first", SETTINGS, lease)
        self.looked_at: list[int] = []
        self.pulls: dict[int, Pull] = {}
        self._watch(monkeypatch)
        (self.beat,) = self.poll(0.0)
        self.assign(range(COUNT), 0.0)
        for command in self.poll(0.0):
            if isinstance(command, Acquire):
                self.core.answered(command, Granted(1, 0, LIFE_S), 0.0)
        self.poll(0.0)
        self.renew = next(one for one in self.poll(2.0) if isinstance(one, Renew))
        assert len(self.pulls) == COUNT
        self.looked_at.clear()

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = ConsumerCore._poll_partition

        def noting(core: ConsumerCore, state: PartitionState, commands: list[Command], now_s: float) -> None:
            self.looked_at.append(state.index)
            original(core, state, commands, now_s)

        monkeypatch.setattr(ConsumerCore, "_poll_partition", noting)

    def poll(self, now_s: float) -> list[Command]:
        commands = self.core.poll(now_s)
        for command in commands:
            if isinstance(command, Pull):
                self.pulls[command.partition] = command
            elif isinstance(command, Heartbeat):
                self.beat = command
        return commands

    def assign(self, partitions: range, now_s: float) -> None:
        answer = Assignment(1, tuple(partitions), SUBJECT, LIFE_S, order="partition", assignment="sticky")
        self.core.answered(self.beat, answer, now_s)

    def give(self, index: int, now_s: float) -> None:
        """Deliver a single message."""
        pulled = decode_pull(Pulled((batch_of(0, 1),), 1, 1, 0), "orders", index)
        self.core.answered(self.pulls[index], pulled, now_s)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(monkeypatch)


def test_a_message_of_one_partition_is_nothing_to_the_others(member: Member) -> None:
    member.give(42, 2.1)
    member.poll(2.1)
    run = member.core.take(2.1)
    assert run is not None
    assert [message.offset for given in run.calls(lambda: 2.1, 1) for message in given] == [0]
    member.core.finish(run, 2.1)
    (commit,) = [one for one in member.poll(2.3) if isinstance(one, Commit)]
    assert [(one.partition, one.offset) for one in commit.progress] == [(42, 1)]
    assert set(member.looked_at) == {42}


def test_a_pull_that_is_not_answered_is_sent_again_in_time(member: Member) -> None:
    member.give(42, 2.1)
    member.poll(2.1)
    member.looked_at.clear()
    assert not any(isinstance(one, Pull) for one in member.poll(5.9))
    due_s = member.core.next_due_s(5.9)
    assert due_s <= 6.0, "wait_s and answer_timeout_s after it was sent"
    again = [one.partition for one in member.poll(6.0) if isinstance(one, Pull)]
    assert sorted(again) == [index for index in range(COUNT) if index != 42]


def test_a_lease_that_a_renewal_does_not_find_is_given_up_at_once(member: Member) -> None:
    alive = tuple(index for index in range(COUNT) if index != 7)
    member.core.answered(member.renew, Renewed(alive), 2.1)
    assert member.core.partitions[7].lease.stage is Stage.LOST
    assert [one.partition for one in member.poll(2.1) if isinstance(one, Acquire)] == [7], "it asks for it anew"


def test_what_is_wanted_back_is_released_at_once(member: Member) -> None:
    member.core.answered(member.renew, Renewed(tuple(range(COUNT)), (7,)), 2.1)
    assert [one.partition for one in member.poll(2.1) if isinstance(one, Release)] == [7]


def test_what_is_taken_away_is_released_at_once(member: Member) -> None:
    member.poll(9.0)
    member.assign(range(1, COUNT), 9.1)
    assert [one.partition for one in member.poll(9.1) if isinstance(one, Release)] == [0]


def test_all_is_given_back_when_it_stops(member: Member) -> None:
    member.core.stop(2.1)
    released = [one.partition for one in member.poll(2.1) if isinstance(one, Release)]
    assert sorted(released) == list(range(COUNT))


def test_without_a_newer_authorisation_all_is_given_back_when_it_is_over(member: Member) -> None:
    member.core.answered(member.renew, Renewed(tuple(range(COUNT))), 2.1)
    for at_s in (5.0, 6.0, 11.0, 13.0, 17.0):
        member.poll(at_s)
    assert member.core.next_due_s(18.9) <= 19.0
    member.poll(19.0)
    stages = {state.lease.stage for state in member.core.partitions.values()}
    assert stages <= {Stage.RELEASING, Stage.LOST}
