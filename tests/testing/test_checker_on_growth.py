"""The order checker on subjects that grow: older messages of a key are in a different partition."""

from __future__ import annotations

import pytest
from msgspec import structs

from inturn.model.routing import SlotSet, slot_of
from inturn.testing.checker import Verdict, ViolationKind, check
from inturn.testing.history import (
    Committed,
    Event,
    GroupFiltered,
    Grown,
    HandlerEnd,
    HandlerStart,
    LeaseEnded,
    LeaseGranted,
    SendAcknowledged,
)

KEY = b"k"
SLOTS = SlotSet.of([slot_of(KEY)]).to_bytes()
# The key was in partition 0, then in 2, now in 4.
GROWN = Grown("s", ((2, 0, SLOTS, 2), (4, 2, SLOTS, 1)))
SENT = [SendAcknowledged("s", *place, KEY, str(place)) for place in ((0, 0), (0, 1), (2, 0), (4, 0))]


def granted(partition: int, epoch: int = 1) -> LeaseGranted:
    return LeaseGranted("s", "g", partition, f"c{partition}", epoch)


def starts(partition: int, offset: int, under: int | None = None) -> HandlerStart:
    holder = partition if under is None else under
    place = str((partition, offset))
    return HandlerStart("s", "g", partition, offset, KEY, f"c{holder}", 1, place, under=under)


def ends(partition: int, offset: int, under: int | None = None) -> HandlerEnd:
    holder = partition if under is None else under
    return HandlerEnd("s", "g", partition, offset, KEY, f"c{holder}", 1, str((partition, offset)), "success")


def run(partition: int, offset: int, under: int | None = None) -> list[Event]:
    return [starts(partition, offset, under), ends(partition, offset, under)]


def judge(*events: Event, order: str = "key") -> Verdict:
    return check([*SENT, GROWN, *events], order=order, complete=False)  # type: ignore[arg-type]


LEASES = [granted(0), granted(2), granted(4)]


@pytest.mark.parametrize("order", ["key", "partition"])
def test_parents_before_children_is_right(order: str) -> None:
    judge(*LEASES, *run(0, 0), *run(0, 1), *run(2, 0), *run(4, 0), order=order).raise_if_bad()


@pytest.mark.parametrize("order", ["key", "partition"])
def test_a_child_before_its_parent_is_found(order: str) -> None:
    verdict = judge(*LEASES, *run(0, 0), *run(2, 0), *run(0, 1), order=order)
    assert ViolationKind.SKIPPED in verdict.kinds()
    assert "offset 1 of partition 0" in str(verdict)


def test_a_grandparent_is_not_forgotten() -> None:
    assert judge(*LEASES, *run(0, 0), *run(2, 0), *run(4, 0)).kinds() == {ViolationKind.SKIPPED}


def test_what_the_group_does_not_want_holds_no_child_back() -> None:
    others = GroupFiltered("s", "g", "paid", {0: (1,)})
    history = (*LEASES, *run(0, 0), *run(2, 0), *run(4, 0))
    tagged = [structs.replace(one, tags=("paid",)) for one in SENT]
    check([*tagged, GROWN, others, *history], order="key", complete=False).raise_if_bad()


@pytest.mark.parametrize("order", ["key", "partition"])
def test_a_child_beside_a_handler_of_its_parent_is_found(order: str) -> None:
    verdict = judge(*LEASES, *run(0, 0), starts(0, 1), starts(2, 0), ends(0, 1), ends(2, 0), order=order)
    assert {ViolationKind.OVERLAP, ViolationKind.SKIPPED} <= verdict.kinds()


def test_a_handler_whose_lease_was_lost_may_still_run() -> None:
    """The next lease holder finished the message. A running handler cannot be recalled."""
    again = HandlerStart("s", "g", 0, 1, KEY, "other", 2, str((0, 1)))
    over = HandlerEnd("s", "g", 0, 1, KEY, "other", 2, str((0, 1)), "success")
    lost: list[Event] = [LeaseEnded("s", "g", 0, "c0", 1, "expired"), LeaseGranted("s", "g", 0, "other", 2)]
    judge(*LEASES, *run(0, 0), starts(0, 1), *lost, again, over, *run(2, 0)).raise_if_bad()


def parked(*places: tuple[int, int]) -> Committed:
    return Committed("s", "g", 0, "c0", 1, 2, (), places)


def test_what_is_parked_moves_on_with_its_key() -> None:
    unparked = Committed("s", "g", 2, "c2", 1, 0, (), (), ((0, 0), (0, 1)))
    judge(*LEASES, parked((0, 0), (0, 1)), *run(0, 0, 2), *run(0, 1, 2), unparked, *run(2, 0)).raise_if_bad()


def test_a_message_that_overtakes_what_is_parked_of_its_key_is_found() -> None:
    verdict = judge(*LEASES, parked((0, 0), (0, 1)), *run(2, 0))
    assert verdict.kinds() == {ViolationKind.SKIPPED}
    assert "waited in the parking lot" in str(verdict)


def test_what_runs_on_under_a_lost_lease_of_the_child_is_no_overlap_of_what_was_parked() -> None:
    """The epochs belong to the partition of the lease, not to the partition of the log."""
    newer = LeaseGranted("s", "g", 2, "other", 2)
    gone = LeaseEnded("s", "g", 2, "c2", 1, "expired")
    again = structs.replace(starts(0, 0, 2), consumer="other", epoch=2)
    verdict = judge(*LEASES, parked((0, 0), (0, 1)), starts(0, 0, 2), gone, newer, again)
    verdict.raise_if_bad()
    assert verdict.overlaps_after_lease_loss == 1
    both = judge(*LEASES, parked((0, 0), (0, 1)), starts(0, 0, 2), starts(0, 1, 2))
    assert ViolationKind.OVERLAP in both.kinds(), "under one lease they overlap"


def test_what_runs_on_under_the_parents_lost_lease_is_no_overlap_of_what_was_parked_since() -> None:
    gone = LeaseEnded("s", "g", 0, "c0", 1, "expired")
    verdict = judge(*LEASES, starts(0, 0), gone, parked((0, 0), (0, 1)), starts(0, 0, 2))
    assert ViolationKind.OVERLAP not in verdict.kinds()
    held = judge(*LEASES, starts(0, 0), parked((0, 0), (0, 1)), starts(0, 0, 2))
    assert ViolationKind.OVERLAP in held.kinds(), "its lease is not over"


def test_a_parked_message_that_runs_under_a_lease_that_is_over_is_found() -> None:
    newer = LeaseGranted("s", "g", 2, "other", 2)
    gone = LeaseEnded("s", "g", 2, "c2", 1, "expired")
    verdict = judge(*LEASES, parked((0, 0), (0, 1)), gone, newer, *run(0, 0, 2))
    assert ViolationKind.STALE_START in verdict.kinds()
