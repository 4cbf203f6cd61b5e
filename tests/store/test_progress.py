"""A commit is stored completely or not at all; and the part of a commit that the next lease holder gets."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError

from inturn.model.errors import InvalidInput, NotFound, StaleEpoch
from inturn.protocol.commands import Failure, KeyRequest, Lot, LotChange, ParkedMessage, Progress
from inturn.store.database import KEY_BYTES_MAX, Database
from inturn.store.groups import Groups
from inturn.store.keys import ERROR_LENGTH_MAX, Failures, KeyRequests
from inturn.store.leases import LeaseRows, ProgressRows, StoredProgress
from inturn.store.offsets import CommittedPlace, OffsetRows
from inturn.store.parking_lots import ParkingLots

NOTHING = StoredProgress(CommittedPlace(), (), ())


def failure(offset: int = 3, attempts: int = 1, **more: Any) -> Failure:
    return Failure(offset, b"k", attempts, "boom", **more)


def message(offset: int, content: bytes = b"m", partition: int = 0) -> ParkedMessage:
    return ParkedMessage(partition, offset, content)


def everything(epoch: int, request_id: int, number: int = 1) -> Progress:
    return Progress(
        0,
        epoch,
        5,
        number,
        b"7",
        failed=(failure(6),),
        settled=(9,),
        lots=(LotChange(b"p", "parked", "tired", (message(2),)),),
        requests=(request_id,),
    )


def ask(database: Database, group_id: int) -> int:
    return KeyRequests(database).add(group_id, KeyRequest(0, 0, b"p", "park", None, "me", "because"), 1).id


def waiting(database: Database) -> list[int]:
    return [state.request.id for _, state in KeyRequests(database).waiting()]


def test_all_of_a_commit_is_stored(database: Database, group_id: int) -> None:
    rows, request_id = ProgressRows(database), ask(database, group_id)
    rows.store(group_id, [Progress(0, 1, 0, 1, failed=(failure(9),))], 1)
    stored = everything(1, request_id, 2)
    assert rows.store(group_id, [stored], 2) == [stored]
    assert rows.of_partition(group_id, 0) == StoredProgress(
        CommittedPlace(5, b"7"), (failure(6),), (Lot(b"p", "parked"),)
    )
    assert [one.offset for one in ParkingLots(database).read(group_id, 0, b"p", 0, 100).messages] == [2]
    assert waiting(database) == []
    assert rows.of_partition(group_id, 1) == NOTHING


def test_a_late_copy_changes_nothing_at_all(database: Database, group_id: int) -> None:
    rows, request_id = ProgressRows(database), ask(database, group_id)
    rows.store(group_id, [Progress(0, 1, 4, 2, failed=(failure(9),))], 1)
    before = rows.of_partition(group_id, 0)
    for number in (2, 1, 0):
        assert rows.store(group_id, [everything(1, request_id, number)], 1) == []
    assert rows.of_partition(group_id, 0) == before
    assert ParkingLots(database).of_group(group_id) == []
    assert waiting(database) == [request_id]


def test_progress_with_an_epoch_that_was_passed_on_changes_nothing_at_all(database: Database, group_id: int) -> None:
    rows, leases, request_id = ProgressRows(database), LeaseRows(database), ask(database, group_id)
    old = leases.grant(group_id, 0, "m", False, 1)
    leases.grant(group_id, 0, "n", False, 1)
    with pytest.raises(StaleEpoch):
        rows.store(group_id, [everything(old, request_id, 1_000)], 1)
    assert rows.of_partition(group_id, 0) == NOTHING
    assert waiting(database) == [request_id]


def test_if_one_partition_is_refused_none_is_stored(database: Database, group_id: int) -> None:
    rows = ProgressRows(database)
    LeaseRows(database).grant(group_id, 2, "m", False, 1)
    with pytest.raises(StaleEpoch):
        rows.store(group_id, [Progress(0, 1, 5, 1, failed=(failure(),)), Progress(2, 0, 6, 1)], 1)
    assert OffsetRows(database).committed(group_id) == {0: 0, 1: 0, 2: 0}
    assert rows.of_partition(group_id, 0) == NOTHING


@pytest.mark.parametrize("table", ["failures", "lots", "parked", "key_requests", "offsets"])
@pytest.mark.parametrize("is_release", [False, True])
def test_what_fails_half_way_is_rolled_back(database: Database, group_id: int, table: str, is_release: bool) -> None:
    rows, leases, request_id = ProgressRows(database), LeaseRows(database), ask(database, group_id)
    epoch = leases.grant(group_id, 0, "m", False, 1)
    change = "UPDATE" if table in ("key_requests", "offsets") else "INSERT"
    with database.transaction() as connection:
        connection.execute(
            text(f"CREATE TRIGGER fail AFTER {change} ON {table} BEGIN SELECT RAISE(ABORT, 'injected'); END")
        )
    progress = everything(epoch, request_id)

    def store() -> None:
        if is_release:
            leases.release_with(group_id, progress, 1)
        else:
            rows.store(group_id, [progress], 1)

    with pytest.raises(IntegrityError, match="injected"):
        store()
    assert rows.of_partition(group_id, 0) == NOTHING
    assert ParkingLots(database).of_group(group_id) == []
    assert waiting(database) == [request_id]
    assert leases.all()[0].owner == "m"
    with database.transaction() as connection:
        connection.execute(text("DROP TRIGGER fail"))
    assert rows.store(group_id, [progress], 1), "the same number is still to come"


def test_an_ordinary_commit_is_one_statement(database: Database, group_id: int) -> None:
    """Every consumer commits every 100 ms."""
    rows = ProgressRows(database)
    rows.store(group_id, [Progress(0, 1, 1, 1)], 1)
    said: list[str] = []
    with database.transaction() as connection:
        event.listen(connection, "before_cursor_execute", lambda *arguments: said.append(arguments[2]))
        rows.store(group_id, [Progress(0, 1, 2, 2, b"7")], 1)
    assert len(said) == 1, said


def test_a_reset_forgets_everything_of_its_group_and_nothing_of_others(database: Database, group_id: int) -> None:
    rows, offsets = ProgressRows(database), OffsetRows(database)
    other = Groups(database).create("orders", "shipping", "first", [0, 0, 0], 1)
    for one in (group_id, other):
        done, _ = ask(database, one), ask(database, one)
        rows.store(one, [everything(1, done)], 1)
    offsets.reset(group_id, {0: 0, 1: 0, 2: 0}, 1)
    assert rows.of_partition(group_id, 0) == NOTHING
    assert ParkingLots(database).of_group(group_id) == []
    assert ParkingLots(database).read(group_id, 0, b"p", 0, 100).messages == ()
    assert [group for group, _ in KeyRequests(database).waiting()] == [other]
    assert [state.done_at_ms for state in KeyRequests(database).history(group_id, 0, b"p", 9)] == [1], (
        "the record stays"
    )
    assert rows.of_partition(other, 0).place == CommittedPlace(5, b"7")
    assert len(ParkingLots(database).of_group(other)) == 1


def test_a_reset_that_fails_forgets_nothing(database: Database, group_id: int) -> None:
    rows = ProgressRows(database)
    rows.store(group_id, [everything(1, ask(database, group_id))], 1)
    before = rows.of_partition(group_id, 0)
    with pytest.raises(InvalidInput):
        OffsetRows(database).reset(group_id, {0: 0, 1: 0, 2: -1}, 1)
    assert rows.of_partition(group_id, 0) == before
    assert len(ParkingLots(database).of_group(group_id)) == 1


def test_the_highest_offset_is_above_what_is_parked_or_failed_also_after_a_reset(
    database: Database, group_id: int
) -> None:
    """The offset was delivered. A different message at the offset would inherit the failures or the parking."""
    rows, offsets = ProgressRows(database), OffsetRows(database)
    rows.store(group_id, [Progress(0, 1, 0, 1, lots=(LotChange(b"k", "parked", added=(message(8),)),))], 1)
    rows.store(group_id, [Progress(1, 1, 0, 1, failed=(failure(6),))], 1)
    assert [offsets.highest(f"p{number}") for number in (1, 2, 3)] == [9, 7, 0]
    offsets.reset(group_id, {0: 0, 1: 0, 2: 0}, 1)
    assert [offsets.highest(f"p{number}") for number in (1, 2, 3)] == [9, 7, 0]


# Failures


def test_a_failure_that_fails_again_keeps_when_it_failed_first(database: Database, group_id: int) -> None:
    rows, failures = ProgressRows(database), Failures(database)
    rows.store(group_id, [Progress(0, 1, 0, 1, failed=(failure(attempts=1),))], 10)
    rows.store(group_id, [Progress(0, 1, 0, 2, failed=(failure(attempts=2, waiting=4, is_exhausted=True),))], 20)
    (row,) = failures.of_group(group_id)
    assert (row.partition, row.first_at_ms) == (0, 10)
    assert row.failure == failure(attempts=2, waiting=4, is_exhausted=True)
    with database.transaction() as connection:
        assert connection.execute(text("SELECT last_at_ms FROM failures")).scalar() == 20


def test_of_one_offset_given_twice_the_last_counts(database: Database, group_id: int) -> None:
    rows = ProgressRows(database)
    rows.store(group_id, [Progress(0, 1, 0, 1, failed=(failure(attempts=1), failure(attempts=2)))], 1)
    assert rows.of_partition(group_id, 0).failures == (failure(attempts=2),)


def test_what_failed_and_was_settled_since_the_last_commit_is_over(database: Database, group_id: int) -> None:
    rows = ProgressRows(database)
    rows.store(group_id, [Progress(0, 1, 0, 1, failed=(failure(3), failure(4)), settled=(3, 99))], 1)
    assert [one.offset for one in rows.of_partition(group_id, 0).failures] == [4]


def test_failures_come_by_offset_and_by_key(database: Database, group_id: int) -> None:
    keyless = Failure(2, None, 1, "")
    ProgressRows(database).store(group_id, [Progress(0, 1, 0, 1, failed=(failure(5), keyless, failure(4)))], 1)
    failures = Failures(database)
    assert [one.offset for one in failures.of_partition(group_id, 0)] == [2, 4, 5]
    assert [one.offset for one in failures.of_key(group_id, 0, b"k")] == [4, 5]
    assert failures.of_key(group_id, 1, b"k") == ()
    assert failures.of_partition(group_id, 0)[0] == keyless


@pytest.mark.parametrize("error", ["x" * 5_000, "half \udc80 a character", "a \0 zero"])
def test_any_error_can_be_stored(database: Database, group_id: int, error: str) -> None:
    rows = ProgressRows(database)
    rows.store(group_id, [Progress(0, 1, 0, 1, failed=(Failure(0, None, 1, error),))], 1)
    (stored,) = rows.of_partition(group_id, 0).failures
    assert stored.error[:2] == error[:2]
    assert len(stored.error) <= ERROR_LENGTH_MAX
    assert "\0" not in stored.error


# Values that do not fit into a row

BAD: list[dict[str, Any]] = [
    {"failed": (failure(-1),)},
    {"failed": (failure(2**63),)},
    {"failed": (failure(0, 2**64),)},
    {"failed": (failure(0, waiting=-1),)},
    {"failed": (Failure(0, b"k" * (KEY_BYTES_MAX + 1), 1, ""),)},
    {"failed": (Failure(0, "text", 1, ""),)},  # type: ignore[arg-type]
    {"failed": (Failure(0, None, 1, None),)},  # type: ignore[arg-type]
    {"settled": (2**63,)},
    {"lots": (LotChange(b"k", "nonsense"),)},
    {"lots": (LotChange(b"k" * (KEY_BYTES_MAX + 1), "parked"),)},
    {"lots": (LotChange(b"k", "parked", added=(message(-1),)),)},
    {"lots": (LotChange(b"k", "parked", added=(message(1, None),)),)},  # type: ignore[arg-type]
    {"lots": (LotChange(b"k", "parked", removed=((0, 2**63),)),)},
    {"lots": (LotChange(b"k", "parked", None),)},  # type: ignore[arg-type]
    {"requests": (2**63,)},
    {"finished": "text"},
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: next(iter(bad)))
def test_what_no_row_can_hold_is_refused_and_nothing_is_stored(
    database: Database, group_id: int, bad: dict[str, Any]
) -> None:
    rows = ProgressRows(database)
    with pytest.raises(InvalidInput):
        rows.store(group_id, [Progress(0, 1, 5, 1, **bad)], 1)
    assert rows.of_partition(group_id, 0) == NOTHING
    assert ParkingLots(database).of_group(group_id) == []


@pytest.mark.parametrize("partition", [-1, 3])
def test_a_parked_message_of_a_partition_that_is_not_there_is_refused(
    database: Database, group_id: int, partition: int
) -> None:
    rows = ProgressRows(database)
    for change in (
        LotChange(b"k", "parked", added=(message(1, partition=partition),)),
        LotChange(b"k", "parked", removed=((partition, 1),)),
    ):
        with pytest.raises(NotFound):
            rows.store(group_id, [Progress(0, 1, 5, 1, lots=(change,))], 1)
    assert rows.of_partition(group_id, 0) == NOTHING
