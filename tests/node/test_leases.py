"""Leases and epochs, also through restarts."""

from __future__ import annotations

from itertools import count

import pytest

from inturn.model.errors import GroupConflict, LeaseHeld, NotFound, StaleEpoch
from inturn.protocol.commands import (
    Acquire,
    Commit,
    Committed,
    DescribeGroup,
    GroupDescription,
    Heartbeat,
    Leave,
    Progress,
    Pulled,
    Release,
    Renew,
    Renewed,
    ResetGroup,
)
from tests.node.machine import Machine

_numbers = count(1)


def commit(machine: Machine, member: str, epoch: int, offset: int) -> tuple[int, ...]:
    progress = Progress(0, epoch, offset, number=next(_numbers))
    answer = machine.ask(Commit("orders", "billing", member, (progress,)))
    assert isinstance(answer, Committed)
    return answer.partitions


def committed(machine: Machine, group: str = "billing") -> list[int]:
    answer = machine.ask(DescribeGroup("orders", group))
    assert isinstance(answer, GroupDescription)
    return [one.committed for one in answer.partitions]


def test_a_lease_has_one_owner(machine: Machine) -> None:
    """B2."""
    machine.join()
    machine.acquire("a")
    with pytest.raises(LeaseHeld) as caught:
        machine.acquire("b")
    assert caught.value.owner == "a"
    assert caught.value.retriable


def test_the_same_ask_again_is_the_same_grant(machine: Machine) -> None:
    """B2: a lost answer does no harm."""
    machine.join()
    first = machine.acquire("a", ask=3)
    machine.wait(6.0)
    assert machine.acquire("a", ask=3) == first
    machine.wait(6.0)
    with pytest.raises(LeaseHeld):
        machine.acquire("b")  # the second request renewed the lease


def test_an_older_ask_is_refused(machine: Machine) -> None:
    machine.join()
    epoch = machine.acquire("a", ask=3).epoch
    with pytest.raises(StaleEpoch):
        machine.acquire("a", ask=2)
    assert isinstance(machine.pull("a", epoch).answer, Pulled)


def test_a_newer_ask_has_a_higher_epoch(machine: Machine) -> None:
    machine.join()
    first = machine.acquire("a", ask=1)
    second = machine.acquire("a", ask=2)
    assert second.epoch > first.epoch
    assert isinstance(machine.pull("a", first.epoch).answer, StaleEpoch)


def test_groups_do_not_know_of_each_others_leases(machine: Machine) -> None:
    """B2."""
    machine.join("a")
    machine.join("b", "shipping")
    machine.acquire("a")
    assert machine.acquire("b", group="shipping").epoch == 1


def test_only_the_owner_with_its_epoch_can_pull_commit_renew_and_release(machine: Machine) -> None:
    """B4."""
    machine.join("a")
    machine.append(9)
    old = machine.acquire("a").epoch
    machine.wait(10.0)
    machine.join("b")
    new = machine.acquire("b").epoch
    assert new > old
    assert isinstance(machine.pull("a", old).answer, StaleEpoch)
    assert isinstance(machine.pull("a", new).answer, StaleEpoch)
    assert isinstance(machine.pull("b", old).answer, StaleEpoch)
    assert commit(machine, "a", old, 5) == ()
    assert commit(machine, "a", new, 5) == ()
    assert machine.ask(Renew("orders", "billing", "a", ((0, old),))) == Renewed(())
    with pytest.raises(StaleEpoch):
        machine.ask(Release("orders", "billing", "a", Progress(0, old, 5, number=1_000)))
    assert committed(machine) == [0, 0]
    assert commit(machine, "b", new, 4) == (0,)
    assert committed(machine) == [4, 0]


def test_a_pull_renews_the_lease(machine: Machine) -> None:
    """B3."""
    machine.join()
    epoch = machine.acquire("a").epoch
    for _ in range(5):
        machine.wait(9.0)
        machine.pull("a", epoch)
    with pytest.raises(LeaseHeld):
        machine.acquire("b")


def test_a_pull_that_is_held_back_renews_once_and_not_for_ever(machine: Machine) -> None:
    """B2: a consumer that died during the wait must lose the lease."""
    machine.join()
    epoch = machine.acquire("a").epoch
    machine.pull("a", epoch, wait_s=60.0)
    machine.wait(5.0)
    machine.append(partition=1)
    machine.wait(5.0)
    assert machine.acquire("b").epoch > epoch


def test_committed_offsets_never_go_back(machine: Machine) -> None:
    """B5."""
    machine.join()
    epoch = machine.acquire("a").epoch
    commit(machine, "a", epoch, 5)
    commit(machine, "a", epoch, 3)
    assert committed(machine) == [5, 0]


def test_a_release_commits(machine: Machine) -> None:
    """C17."""
    machine.join()
    epoch = machine.acquire("a").epoch
    machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 6, number=1_000)))
    assert machine.acquire("b").offset == 6
    assert commit(machine, "a", epoch, 9) == (), "later acknowledgements are refused"


def test_epochs_never_repeat(machine: Machine) -> None:
    """B4: through grants, releases, leaving, expiry, resets and restarts."""
    seen: list[int] = []
    machine.join()
    for number in range(1, 30):
        epoch = machine.acquire("a", ask=number).epoch
        seen.append(epoch)
        match number % 5:
            case 0:
                machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 0, number=1_000)))
            case 1:
                machine.ask(Leave("orders", "billing", "a"))
                machine.join()
            case 2:
                machine.wait(11.0)
            case 3:
                machine.restart()
                machine.wait(11.0)
                machine.join()
            case 4:
                machine.wait(11.0)
                machine.ask(ResetGroup("orders", "billing", "first"))
    assert seen == sorted(set(seen))


def test_after_a_restart_a_lease_counts_as_just_renewed(machine: Machine) -> None:
    """B4: the owner may be alive and working."""
    machine.join()
    epoch = machine.acquire("a").epoch
    machine.wait(9.0)
    machine.restart()
    machine.join("b")
    machine.wait(9.999)
    with pytest.raises(LeaseHeld):
        machine.acquire("b")
    assert isinstance(machine.pull("a", epoch).answer, Pulled), "it just goes on"
    machine.wait(10.0)
    assert machine.acquire("b").epoch > epoch


def test_after_a_restart_consumers_of_the_dead_process_are_gone() -> None:
    """The leases of consumers that lived in the process of the node are free at once, with a higher epoch."""
    machine = Machine(local=True)
    machine.join()
    epoch = machine.acquire("a").epoch
    commit(machine, "a", epoch, 3)
    machine.restart()
    machine.join("b")
    granted = machine.acquire("b")
    assert granted.epoch > epoch
    assert granted.offset == 3
    assert commit(machine, "a", epoch, 9) == ()
    assert [type(event).__name__ for event in machine.recorder.history if "Lease" in type(event).__name__] == [
        "LeaseGranted",
        "LeaseEnded",
        "LeaseGranted",
    ]
    machine.close()


def test_the_same_ask_is_the_same_grant_after_a_restart_too(machine: Machine) -> None:
    """A late copy of the request must not take the lease from the working consumer."""
    machine.join()
    epoch = machine.acquire("a", ask=1).epoch
    machine.restart()
    machine.join()
    assert machine.acquire("a", ask=1).epoch == epoch
    assert machine.acquire("a", ask=2).epoch > epoch


def test_a_reset_is_refused_while_a_lease_is_live(machine: Machine) -> None:
    """C15."""
    machine.join()
    machine.acquire("a", partition=1)
    with pytest.raises(GroupConflict, match="a holds the lease of partition 1"):
        machine.ask(ResetGroup("orders", "billing", "first"))


def test_a_reset_moves_all_partitions_and_refuses_older_epochs(machine: Machine) -> None:
    """C15."""
    machine.append(4, 0)
    machine.append(6, 1)
    machine.join()
    epoch = machine.acquire("a").epoch
    machine.wait(10.0)
    machine.ask(ResetGroup("orders", "billing", "last"))
    assert committed(machine) == [4, 6]
    assert commit(machine, "a", epoch, 9) == ()
    machine.ask(ResetGroup("orders", "billing", "5"))
    assert committed(machine) == [4, 5], "not beyond the end"
    machine.ask(ResetGroup("orders", "billing", "first"))
    assert committed(machine) == [0, 0]


def test_a_group_starts_where_its_first_member_says_in_all_partitions(machine: Machine) -> None:
    """C15."""
    machine.append(4, 0)
    machine.append(6, 1)
    machine.ask(Heartbeat("orders", "late", "a", "partition", "last"))
    assert committed(machine, "late") == [4, 6]
    machine.ask(Heartbeat("orders", "late", "b", "partition", "first"))
    assert committed(machine, "late") == [4, 6], "it exists already"


def test_an_unknown_group_is_not_made_by_asking_for_a_lease(machine: Machine) -> None:
    with pytest.raises(NotFound):
        machine.ask(Acquire("orders", "nobody", 0, "a", 1))


def test_the_wall_clock_ends_no_lease(machine: Machine) -> None:
    machine.join()
    machine.acquire("a")
    machine.clock.jump_wall(1_000_000.0)
    machine.run()
    with pytest.raises(LeaseHeld):
        machine.acquire("b")


def test_a_late_copy_of_an_ask_gets_nothing_once_its_lease_was_given_back(machine: Machine) -> None:
    """Otherwise the partition would belong to a member that released the lease, for a whole life of the lease."""
    machine.join()
    granted = machine.acquire("a", ask=1)
    machine.submit(Release("orders", "billing", "a", Progress(0, granted.epoch, 0, number=1_000)))
    late = machine.submit(Acquire("orders", "billing", 0, "a", 1))
    assert isinstance(late.answer, StaleEpoch)
    assert machine.acquire("a", ask=2).epoch > granted.epoch
