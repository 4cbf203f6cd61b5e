"""C15: the start position of a group, and resets."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from inturn import Connection, Position
from inturn.model.errors import GroupConflict, InvalidInput
from tests.contract.bed import Bed, Seen, eventually, has_joined, quick, send_all


@pytest.fixture
def line(mq: Connection) -> Connection:
    mq.create_subject("line", 1)
    send_all(mq, "line", 3)
    return mq


def handled(mq: Connection, count: int, group: str = "g", **options) -> list[bytes]:
    seen = Seen()
    with mq.consumer("line", group, seen, settings=quick(), **options):
        seen.wait_for(count)
    return seen.bodies


def test_a_new_group_starts_at_the_first_message_unless_told(line: Connection) -> None:
    assert handled(line, 3) == [b"0", b"1", b"2"]


def test_a_new_group_can_start_behind_the_last_message(line: Connection) -> None:
    seen = Seen()
    with line.consumer("line", "g", seen, start="last", settings=quick()):
        eventually(
            lambda: has_joined(line) and line.group("line", "g").describe().partitions[0].owner, "it has the lease"
        )
        send_all(line, "line", 1)
        seen.wait_for(1)
    assert [message.offset for message in seen.messages] == [3]


def test_a_new_group_can_start_at_a_time(line: Connection) -> None:
    time.sleep(0.02)
    moment = datetime.now(UTC)
    time.sleep(0.02)
    send_all(line, "line", 2)
    for group, start in (("a", moment), ("b", moment.isoformat()), ("c", Position("timestamp", _ms(moment)))):
        seen = Seen()
        with line.consumer("line", group, seen, start=start, settings=quick()):
            seen.wait_for(2)
        assert [message.offset for message in seen.messages] == [3, 4]


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


@pytest.mark.parametrize("start", [2, "2", Position("offset", 2)])
def test_a_new_group_can_start_at_an_offset(line: Connection, start: int | str | Position) -> None:
    assert handled(line, 1, start=start) == [b"2"]


def test_a_group_that_exists_goes_on_where_it_was(line: Connection) -> None:
    """C3."""
    assert len(handled(line, 3)) == 3
    send_all(line, "line", 2)
    for start in ("first", "last", 0):
        assert line.group("line", "g").describe().partitions[0].committed >= 3
        seen = Seen()
        with line.consumer("line", "g", seen, start=start, settings=quick()):
            if start == "first":
                seen.wait_for(2)
            else:
                eventually(lambda: line.group("line", "g").describe().partitions[0].owner, "it has the lease")
        assert [message.offset for message in seen.messages] == ([3, 4] if start == "first" else [])


def test_groups_are_remembered(bed: Bed) -> None:
    """B5."""
    mq = bed.open()
    mq.create_subject("line", 1)
    send_all(mq, "line", 3)
    assert len(handled(mq, 3)) == 3
    mq = bed.reopen()
    assert [(name.subject, name.group) for name in mq.groups()] == [("line", "g")]
    assert mq.group("line", "g").describe().partitions[0].committed == 3
    send_all(mq, "line", 1)
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=quick()):
        seen.wait_for(1)
    assert [message.offset for message in seen.messages] == [3]


@pytest.mark.parametrize("nonsense", ["now", -1, 1.5, True, "9999-12-31T23:59:59.999999", "9" * 5000], ids=repr)
def test_nonsense_is_no_start(line: Connection, nonsense: str) -> None:
    """Refused in the call, not later in a thread."""
    with pytest.raises(InvalidInput, match="'first'"):
        line.consumer("line", "g", Seen(), start=nonsense)


def test_a_reset_is_refused_while_a_consumer_is_at_work(line: Connection) -> None:
    seen = Seen()
    with line.consumer("line", "g", seen, settings=quick(), name="worker"):
        seen.wait_for(3)
        with pytest.raises(GroupConflict, match="stop the group's consumers"):
            line.group("line", "g").reset("first")
    line.group("line", "g").reset("first")


def test_a_reset_moves_all_partitions_and_consumption_starts_there(mq: Connection) -> None:
    send_all(mq, "orders", 40, keys=20)
    ends = [partition.end_offset for partition in mq.describe_subject("orders").partitions]
    seen = Seen()
    with mq.consumer("orders", "g", seen, settings=quick()):
        seen.wait_for(40)
    for position, expected in (("first", [0] * 4), ("last", ends), (1, [1] * 4)):
        mq.group("orders", "g").reset(position)
        assert [p.committed for p in mq.group("orders", "g").describe().partitions] == expected
    again = Seen()
    with mq.consumer("orders", "g", again, settings=quick()):
        again.wait_for(36)
    assert sorted({message.offset for message in again.messages})[0] == 1


def test_a_reset_to_a_time_moves_back_to_what_came_then(line: Connection) -> None:
    time.sleep(0.02)
    moment = datetime.now(UTC)
    time.sleep(0.02)
    send_all(line, "line", 2)
    assert len(handled(line, 5)) == 5
    line.group("line", "g").reset(moment)
    assert handled(line, 2) == [b"0", b"1"]


def test_a_reset_does_not_touch_other_groups(line: Connection) -> None:
    for group in ("a", "b"):
        handled(line, 3, group)
    line.group("line", "a").reset("first")
    assert line.group("line", "b").describe().partitions[0].committed == 3


def test_nonsense_is_no_reset(line: Connection) -> None:
    handled(line, 3)
    with pytest.raises(InvalidInput):
        line.group("line", "g").reset("yesterday")
