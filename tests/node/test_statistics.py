"""Statistics of a whole node: correct, and read without delaying other commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyroaring import BitMap64

from inturn.broker.leases import GRANTS_KEPT, UNSTABLE_GRANTS, WITHIN_S
from inturn.node.statistics import PlaceFigures
from inturn.protocol.commands import (
    Commit,
    DescribeNode,
    DiskRoom,
    Failure,
    Heartbeat,
    LotChange,
    NodeDescription,
    ParkedMessage,
    Progress,
    ReadyPart,
    Release,
    RestlessLease,
)
from inturn.store.database import Database
from inturn.store.statistics import PAGE_COUNT
from inturn.version import SOFTWARE
from tests.node.machine import LEASE, Machine


def describe(machine: Machine) -> NodeDescription:
    answer = machine.ask(DescribeNode())
    assert isinstance(answer, NodeDescription)
    return answer


def test_lag_counts_what_is_finished_above_the_committed_offset(machine: Machine) -> None:
    machine.append(10)
    machine.join()
    epoch = machine.acquire().epoch
    finished = BitMap64([5, 7]).serialize()
    machine.ask(Commit("orders", "billing", "a", (Progress(0, epoch, 3, 1, finished),)))
    places = machine.node.statistics.take().places
    assert places == [PlaceFigures("orders", "billing", 0, 5, 5), PlaceFigures("orders", "billing", 1, 0, 0)]


def test_what_a_broadcast_group_has_done_is_not_guessed(machine: Machine) -> None:
    """Only the members know the progress. A lag at the node would grow for ever, even for healthy members."""
    machine.append(10)
    machine.join()
    machine.ask(Heartbeat("orders", "caches", "b", "key", "first", mode="broadcast"))
    figures = machine.node.statistics.take()
    assert [(one.group, one.partition) for one in figures.places] == [("billing", 0), ("billing", 1)]
    assert [(one.group, one.member_count) for one in figures.groups] == [("billing", 1), ("caches", 1)]


def test_members_leases_and_what_is_held_back_are_counted(machine: Machine) -> None:
    machine.join("a")
    machine.join("b", group="shipping")
    epoch = machine.acquire().epoch
    machine.pull("a", epoch, wait_s=1.0)
    figures = machine.node.statistics.take()
    counts = [(one.group, one.member_count, one.lease_count) for one in figures.groups]
    assert counts == [("billing", 1, 1), ("shipping", 1, 0)]
    assert figures.held == {"Pull": 1}
    assert figures.lease_changes == {"granted": 1}


def test_keys_are_counted_by_state_and_what_has_no_key_one_by_one(machine: Machine) -> None:
    machine.append(20)
    machine.join()
    epoch = machine.acquire().epoch
    failed = (
        Failure(0, b"failing", 1, "no"),
        Failure(1, b"failing", 1, "no"),
        Failure(2, b"blocked", 3, "no", is_exhausted=True),
        Failure(3, None, 1, "no"),
        Failure(4, None, 1, "no"),
        Failure(5, b"parked", 3, "no", is_exhausted=True),
    )
    lots = (
        LotChange(b"parked", "parked", added=(ParkedMessage(0, 5, b"x"),)),
        LotChange(b"resuming", "resuming", added=(ParkedMessage(0, 6, b"x"),)),
    )
    machine.ask(Commit("orders", "billing", "a", (Progress(0, epoch, 0, 1, failed=failed, lots=lots),)))
    (billing,) = machine.node.statistics.take().groups
    assert billing.key_states == {"failing": 3, "blocked": 1, "parked": 1, "resuming": 1}


class Watched:
    """Records the transactions of a read, and whether the node could answer other commands meanwhile."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_free: list[bool] = []
        self._lock = machine.node.lock
        transaction = Database.transaction

        @contextlib.contextmanager
        def watched(database: Database) -> Iterator[Any]:
            with ThreadPoolExecutor(1) as elsewhere:
                self.is_free.append(elsewhere.submit(self._try).result())
            with transaction(database) as connection:
                yield connection

        monkeypatch.setattr(Database, "transaction", watched)

    def _try(self) -> bool:
        is_free = self._lock.acquire(blocking=False)
        if is_free:
            self._lock.release()
        return is_free


def test_the_database_is_read_in_pages_and_without_the_nodes_lock(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_count = PAGE_COUNT + 50
    for number in range(group_count):
        machine.join(group=f"g{number:04}")
    watched = Watched(machine, monkeypatch)
    figures = machine.node.statistics.take()
    assert len(figures.places) == 2 * group_count
    assert len({(one.group, one.partition) for one in figures.places}) == 2 * group_count
    assert watched.is_free == [True] * 4  # three pages of partitions, and a query for failing groups


# Readiness


def test_a_node_is_ready_says_its_clock_and_how_long_it_is_up(machine: Machine) -> None:
    machine.wait(7.0)
    described = describe(machine)
    assert described.is_ready
    assert described.parts == (ReadyPart("work", True), ReadyPart("logs", True), ReadyPart("state", True))
    assert (described.software, described.now_ms, described.up_s) == (SOFTWARE, machine.clock.time_ms(), 7.0)
    assert described.disk is None


def test_the_disk_is_told_where_there_is_one(machine: Machine) -> None:
    machine.node._room = lambda: DiskRoom(10, 20)
    assert describe(machine).disk == DiskRoom(10, 20)


def test_a_node_that_stops_is_not_ready_and_still_says_so(machine: Machine) -> None:
    machine.node.stop_gently()
    described = describe(machine)
    assert [part.name for part in described.parts if not part.is_ready] == ["work"]
    assert "stopping" in described.parts[0].why


def test_logs_are_not_ready_only_when_none_takes_appends(machine: Machine) -> None:
    first, second = (machine.node.broker.log(machine.node.catalog.subjects["orders"], index) for index in (0, 1))
    with first._lock:  # type: ignore[attr-defined]
        first._stop("a sync failed")  # type: ignore[attr-defined]
    logs = machine.node.readiness()[1]
    assert (logs.is_ready, logs.why) == (True, "1 of 2 logs are stopped or damaged")
    with second._lock:  # type: ignore[attr-defined]
        second._stop("a sync failed")  # type: ignore[attr-defined]
    assert not machine.node.readiness()[1].is_ready


def test_a_database_that_does_not_answer_is_not_ready(machine: Machine) -> None:
    machine.database._stopped = "the disk is gone"
    state = machine.node.readiness()[2]
    assert (state.name, state.is_ready) == ("state", False)
    assert "the disk is gone" in state.why
    machine.database._stopped = None


# Unstable leases


def change_hands(machine: Machine, times: int) -> None:
    machine.join()
    for ask in range(1, times + 1):
        epoch = machine.acquire(ask=ask).epoch
        machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 0, 1)))


def test_a_lease_that_is_granted_again_and_again_is_restless_for_a_while(machine: Machine) -> None:
    change_hands(machine, UNSTABLE_GRANTS - 1)
    assert describe(machine).restless == ()
    epoch = machine.acquire(ask=100).epoch
    assert describe(machine).restless == (RestlessLease("orders", "billing", 0, UNSTABLE_GRANTS),)
    machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 0, 1)))
    machine.wait(WITHIN_S + 1)
    assert describe(machine).restless == ()


def test_what_is_remembered_of_a_lease_is_bounded(machine: Machine) -> None:
    change_hands(machine, 2 * GRANTS_KEPT)
    assert describe(machine).restless == (RestlessLease("orders", "billing", 0, GRANTS_KEPT),)


def test_changes_of_leases_are_counted_by_what_happened(machine: Machine) -> None:
    machine.join("a")
    machine.join("b")
    machine.acquire("a")
    machine.wait(LEASE.life_s + 0.1)
    epoch = machine.acquire("b").epoch
    machine.ask(Release("orders", "billing", "b", Progress(0, epoch, 0, 1)))
    changes = machine.node.statistics.take().lease_changes
    assert changes == {"granted": 2, "expired": 1, "released": 1}


def test_leases_that_went_with_their_process_are_counted() -> None:
    machine = Machine(local=True)
    machine.join()
    machine.acquire()
    machine.restart()
    assert machine.node.statistics.take().lease_changes == {"gone": 1}
    machine.close()
