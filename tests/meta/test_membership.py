"""Who is alive (M7): deadlines in memory, the database written when somebody comes or goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inturn.meta.membership import Membership
from inturn.model.commands import Heartbeat
from inturn.model.errors import GroupConflict
from inturn.model.settings import LeaseSettings, Limits, Routing, Strategy
from inturn.model.subject import Subject
from inturn.state.database import Database
from inturn.state.groups import GroupRecord, Groups
from inturn.state.members import Members
from inturn.state.subjects import Subjects
from inturn.testing.clock import FakeClock

LEASE = LeaseSettings(life_s=10.0, renew_s=2.0, margin_s=0.5)


class Bench:
    def __init__(self, database: Database) -> None:
        self.clock = FakeClock()
        self.subject: Subject = Subjects(database).create("orders", 4, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
        group_id = Groups(database).create("orders", "billing", "first", [0] * 4, 1)
        self.group = GroupRecord("orders", "billing", group_id, "first")
        self.rows = Members(database)
        self.membership = Membership(self.rows, self.clock, LEASE)

    def beat(self, member: str, order: str = "partition") -> bool:
        command = Heartbeat("orders", "billing", member, order, "first")
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
def bench() -> Iterator[Bench]:
    database = Database.open(None)
    yield Bench(database)
    database.close()


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


def test_the_wall_clock_decides_nothing(bench: Bench) -> None:
    bench.beat("a")
    bench.clock.jump_wall(1_000_000)
    assert bench.drop_silent() == []
