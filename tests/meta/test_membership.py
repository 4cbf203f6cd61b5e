"""Living members: deadlines in memory, and a write to the database when a member joins or leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inturn.meta.membership import Membership
from inturn.model.errors import GroupConflict, InvalidInput
from inturn.model.settings import AssignmentStrategy, LeaseSettings, Limits, Routing, Strategy
from inturn.model.subject import Subject
from inturn.protocol.commands import Heartbeat, MemberDescription
from inturn.store.database import Database
from inturn.store.groups import GroupRecord, Groups, Members
from inturn.store.subjects import Subjects
from inturn.testing.clock import FakeClock

LEASE = LeaseSettings(life_s=10.0, renew_s=2.0, margin_s=0.5)


class Bench:
    def __init__(self, database: Database) -> None:
        self.clock = FakeClock()
        self.subject: Subject = Subjects(database).create("orders", 4, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
        group_id = Groups(database).create("orders", "billing", "first", [0] * 4, 1)
        self.group = GroupRecord("orders", "billing", group_id, "first")
        self.rows = Members(database)
        self.holders: dict[str, tuple[int, ...]] = {}
        self.restart()

    def restart(self) -> None:
        self.membership = Membership(self.rows, self.clock, LEASE, lambda group: self.holders)

    def beat(self, member: str, order: str = "partition", assignment: str = "sticky") -> bool:
        command = Heartbeat("orders", "billing", member, order, "first", assignment=assignment)
        return self.membership.heartbeat(self.group, self.subject, command)

    def drop_silent(self) -> list[str]:
        gone = [member for _, member in self.membership.silent(self.clock.monotonic())]
        for member in gone:
            self.membership.leave(self.group, self.subject, member)
        return gone

    def assigned(self, member: str) -> tuple[int, ...]:
        return self.membership.answer(self.group, self.subject, member).partitions

    def online(self) -> list[str]:
        return [one.member for one in self.rows.online()]


@pytest.fixture
def database() -> Iterator[Database]:
    opened = Database.open(None)
    yield opened
    opened.close()


@pytest.fixture
def bench(database: Database) -> Bench:
    return Bench(database)


def test_the_first_heartbeat_joins_and_the_next_ones_change_nothing(bench: Bench) -> None:
    assert bench.beat("a")
    generation = bench.membership.generation(bench.group)
    assert not bench.beat("a")
    assert bench.membership.generation(bench.group) == generation
    assert bench.assigned("a") == (0, 1, 2, 3)


def test_a_newcomer_gets_its_share_at_once(bench: Bench) -> None:
    """M7."""
    bench.beat("a")
    assert bench.beat("b")
    assert sorted(bench.assigned("a") + bench.assigned("b")) == [0, 1, 2, 3]
    assert len(bench.assigned("b")) == 2


def test_a_silent_member_is_gone_after_a_full_life_and_not_before(bench: Bench) -> None:
    """M7."""
    bench.beat("a")
    bench.clock.advance(4.0)
    bench.beat("b")
    assert bench.membership.next_deadline_s() == 10.0
    bench.clock.advance(5.999)
    assert bench.drop_silent() == []
    bench.clock.advance(0.001)
    assert bench.drop_silent() == ["a"]
    assert bench.membership.members(bench.group) == ("b",)
    assert bench.assigned("b") == (0, 1, 2, 3)
    assert bench.assigned("a") == ()


def test_heartbeats_keep_a_member_alive(bench: Bench) -> None:
    bench.beat("a")
    for _ in range(20):
        bench.clock.advance(9.9)
        bench.beat("a")
    assert bench.drop_silent() == []


def test_every_change_has_a_new_generation(bench: Bench) -> None:
    seen = [bench.membership.generation(bench.group)]
    for member, leaves in (("a", False), ("b", False), ("a", True), ("a", False)):
        if leaves:
            bench.membership.leave(bench.group, bench.subject, member)
        else:
            bench.beat(member)
        seen.append(bench.membership.generation(bench.group))
    assert seen == sorted(set(seen))


def test_an_announcement_has_a_new_generation_and_the_same_assignment(bench: Bench) -> None:
    bench.membership.announce(bench.group)
    assert bench.membership.generation(bench.group) == 0, "nobody is there to hear it"
    bench.beat("a")
    bench.beat("b")
    generation = bench.membership.generation(bench.group)
    before = (bench.assigned("a"), bench.assigned("b"))
    bench.membership.announce(bench.group)
    assert bench.membership.generation(bench.group) > generation
    assert (bench.assigned("a"), bench.assigned("b")) == before


def test_the_database_is_written_when_somebody_comes_or_goes(bench: Bench) -> None:
    """M7."""
    bench.beat("a")
    bench.beat("b")
    assert bench.online() == ["a", "b"]
    bench.membership.leave(bench.group, bench.subject, "a")
    assert bench.online() == ["b"]


def test_leaving_twice_is_leaving_once(bench: Bench) -> None:
    bench.beat("a")
    assert bench.membership.leave(bench.group, bench.subject, "a")
    assert not bench.membership.leave(bench.group, bench.subject, "a")
    assert bench.membership.next_deadline_s() is None


def test_members_must_ask_for_the_same_order(bench: Bench) -> None:
    bench.beat("a", "partition")
    with pytest.raises(GroupConflict, match="use the same for all"):
        bench.beat("b", "key")
    assert bench.membership.members(bench.group) == ("a",)
    bench.membership.leave(bench.group, bench.subject, "a")
    assert bench.beat("b", "key"), "nobody is there to disagree"


def test_members_must_ask_for_the_same_assignment_strategy(bench: Bench) -> None:
    """M8."""
    bench.beat("a", assignment="circle")
    with pytest.raises(GroupConflict, match=r"assignment='circle', this one asks for 'sticky'; use the same for all"):
        bench.beat("b")
    assert bench.membership.members(bench.group) == ("a",)
    bench.membership.leave(bench.group, bench.subject, "a")
    assert bench.beat("b"), "nobody is there to disagree"


def test_an_unknown_assignment_strategy_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidInput, match="'average', 'circle', 'consistent-hash', 'sticky'"):
        bench.beat("a", assignment="fair")
    assert bench.membership.members(bench.group) == ()


def test_partitions_are_divided_as_the_members_ask(bench: Bench) -> None:
    """M8."""
    for member in ("a", "b"):
        bench.beat(member, assignment="circle")
    assert (bench.assigned("a"), bench.assigned("b")) == ((0, 2), (1, 3))
    assert bench.membership.strategy(bench.group) is AssignmentStrategy.CIRCLE


def test_the_assignment_is_made_anew_for_the_subject_as_it_is_now(bench: Bench, database: Database) -> None:
    """M7."""
    bench.beat("a")
    generation = bench.membership.generation(bench.group)
    assert not bench.membership.reassign(bench.group, bench.subject)
    assert bench.membership.generation(bench.group) == generation, "nothing changed: nobody is woken"
    wider = Subjects(database).create("wider", 6, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
    assert bench.membership.reassign(bench.group, wider)
    assert bench.membership.generation(bench.group) > generation
    assert bench.assigned("a") == (0, 1, 2, 3, 4, 5)


def test_members_are_described_with_what_they_should_have_and_what_they_hold(bench: Bench) -> None:
    bench.beat("a")
    bench.clock.advance(2.0)
    bench.beat("b")
    bench.holders = {"a": (0, 1, 2, 3)}
    since_ms = bench.clock.time_ms()
    assert bench.membership.describe(bench.group) == (
        MemberDescription("a", since_ms - 2000, (0, 1), (0, 1, 2, 3)),
        MemberDescription("b", since_ms, (2, 3), ()),
    )


# After a restart


def test_whoever_comes_back_keeps_what_it_holds(bench: Bench) -> None:
    """M8."""
    bench.holders = {"a": (1, 3), "b": (0, 2)}
    bench.restart()
    bench.beat("b")
    assert bench.assigned("b") == (0, 2), "the others are only late"
    generation = bench.membership.generation(bench.group)
    assert bench.beat("a")
    assert (bench.assigned("a"), bench.assigned("b")) == ((1, 3), (0, 2))
    assert bench.membership.generation(bench.group) == generation, "nobody has to be told"
    assert bench.online() == ["a", "b"]


def test_a_holder_that_does_not_come_back_is_waited_for_as_long_as_its_lease_lives(bench: Bench) -> None:
    bench.holders = {"a": (1, 3), "b": (0, 2)}
    bench.restart()
    bench.clock.advance(6.0)
    bench.beat("b")
    assert bench.membership.members(bench.group) == ("b",), "the other was not heard"
    assert bench.membership.next_deadline_s() == 10.0
    bench.clock.advance(4.0)
    bench.holders = {"b": (0, 2)}
    assert bench.drop_silent() == ["a"]
    assert bench.assigned("b") == (0, 1, 2, 3)
    assert bench.online() == ["b"]


def test_long_after_the_restart_nobody_is_waited_for(bench: Bench) -> None:
    bench.holders = {"a": (1, 3)}
    bench.restart()
    bench.clock.advance(10.0)
    bench.beat("b")
    assert bench.assigned("b") == (0, 1, 2, 3)


def test_one_that_is_waited_for_has_no_say_in_the_order(bench: Bench) -> None:
    bench.holders = {"a": (1, 3)}
    bench.restart()
    bench.beat("b", "key")
    bench.membership.leave(bench.group, bench.subject, "b")
    assert bench.membership.order(bench.group) is None
    assert bench.beat("c", "partition")


def test_the_wall_clock_decides_nothing(bench: Bench) -> None:
    bench.beat("a")
    bench.clock.jump_wall(1_000_000)
    assert bench.drop_silent() == []


# Taking over


def take_over(bench: Bench, member: str, order: str = "partition", assignment: str = "sticky") -> bool:
    command = Heartbeat("orders", "billing", member, order, "first", assignment=assignment, takes_over=True)
    return bench.membership.heartbeat(bench.group, bench.subject, command)


def test_who_takes_over_is_given_everything(bench: Bench) -> None:
    bench.beat("a")
    bench.beat("b")
    generation = bench.membership.generation(bench.group)
    assert take_over(bench, "taker")
    assert bench.assigned("taker") == (0, 1, 2, 3)
    assert bench.assigned("a") == bench.assigned("b") == ()
    assert bench.membership.generation(bench.group) == generation + 1
    assert bench.membership.taken_over_by(bench.group) == "taker"
    assert bench.membership.members(bench.group) == ("a", "b", "taker")


@pytest.mark.parametrize("strategy", [one.value for one in AssignmentStrategy])
def test_all_get_back_what_they_had_when_it_hands_back(bench: Bench, strategy: str) -> None:
    for member in ("c", "a", "b"):
        bench.beat(member, assignment=strategy)
    bench.membership.leave(bench.group, bench.subject, "b")
    before = {member: bench.assigned(member) for member in ("a", "c")}
    take_over(bench, "aa-taker", assignment=strategy)
    bench.membership.leave(bench.group, bench.subject, "aa-taker")
    assert {member: bench.assigned(member) for member in ("a", "c")} == before
    assert bench.membership.taken_over_by(bench.group) is None


def test_all_get_back_what_they_had_when_it_is_silent_for_too_long(bench: Bench) -> None:
    bench.beat("a")
    bench.beat("b")
    before = bench.assigned("a"), bench.assigned("b")
    take_over(bench, "taker")
    bench.clock.advance(6.0)
    bench.beat("a")
    bench.beat("b")
    assert bench.assigned("taker") == (0, 1, 2, 3)
    bench.clock.advance(4.0)
    assert bench.drop_silent() == ["taker"]
    assert (bench.assigned("a"), bench.assigned("b")) == before


def test_who_comes_meanwhile_has_its_share_afterwards(bench: Bench) -> None:
    bench.beat("a")
    take_over(bench, "taker")
    bench.beat("b")
    assert bench.assigned("a") == bench.assigned("b") == ()
    assert bench.assigned("taker") == (0, 1, 2, 3)
    bench.membership.leave(bench.group, bench.subject, "taker")
    assert sorted(bench.assigned("a") + bench.assigned("b")) == [0, 1, 2, 3]
    assert len(bench.assigned("b")) == 2


def test_what_those_had_who_go_meanwhile_is_for_the_others(bench: Bench) -> None:
    bench.beat("a")
    bench.beat("b")
    of_a = bench.assigned("a")
    take_over(bench, "taker")
    bench.membership.leave(bench.group, bench.subject, "b")
    assert bench.assigned("taker") == (0, 1, 2, 3)
    bench.membership.leave(bench.group, bench.subject, "taker")
    assert bench.assigned("a") == (0, 1, 2, 3)
    assert set(of_a) <= set(bench.assigned("a"))


def test_only_one_takes_over_at_a_time(bench: Bench) -> None:
    bench.beat("a")
    take_over(bench, "taker")
    with pytest.raises(GroupConflict, match="taker has taken it over already; wait until it hands back"):
        take_over(bench, "second")
    assert bench.membership.members(bench.group) == ("a", "taker")
    assert not take_over(bench, "taker")
    bench.membership.leave(bench.group, bench.subject, "taker")
    assert take_over(bench, "second")


def test_who_takes_over_must_ask_for_the_same_order_and_assignment(bench: Bench) -> None:
    bench.beat("a", order="key")
    with pytest.raises(GroupConflict, match="order='key'"):
        take_over(bench, "taker", order="partition")
    with pytest.raises(GroupConflict, match="assignment='sticky'"):
        take_over(bench, "taker", order="key", assignment="circle")
    assert bench.assigned("a") == (0, 1, 2, 3)


def test_a_member_that_only_joins_has_its_share(bench: Bench) -> None:
    bench.beat("a")
    bench.beat("keeper")
    assert len(bench.assigned("keeper")) == 2
    assert bench.membership.taken_over_by(bench.group) is None


def test_who_had_taken_over_before_a_restart_has_everything_when_it_is_heard_again(bench: Bench) -> None:
    bench.beat("a")
    take_over(bench, "taker")
    bench.holders = {"taker": (0, 1, 2, 3)}
    bench.restart()
    bench.beat("a")
    assert take_over(bench, "taker")
    assert bench.assigned("taker") == (0, 1, 2, 3)
    assert bench.assigned("a") == ()
    bench.membership.leave(bench.group, bench.subject, "taker")
    assert bench.assigned("a") == (0, 1, 2, 3)


def test_a_group_without_members_is_taken_over_by_nobody(bench: Bench) -> None:
    assert bench.membership.taken_over_by(bench.group) is None
