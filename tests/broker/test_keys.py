"""The key list of an operator: failures, parking lots and key requests of the same key are a single entry."""

from __future__ import annotations

from inturn.broker.keys import blocking_keys, describe_keys
from inturn.protocol.commands import Failure, KeyDescription, KeyRequest, RequestState
from inturn.store.keys import FailureRow
from inturn.store.parking_lots import ParkingLotRow


def failed(
    offset: int, key: bytes | None = b"k", since_ms: int = 10, partition: int = 0, exhausted: bool = False
) -> FailureRow:
    return FailureRow(partition, since_ms, Failure(offset, key, offset * 2, f"error {offset}", 4, exhausted))


def asked(request_id: int, key: bytes = b"k", asked_at_ms: int = 10, partition: int = 0) -> RequestState:
    return RequestState(KeyRequest(request_id, partition, key, "park"), asked_at_ms, None)


def test_nothing_is_the_matter() -> None:
    assert describe_keys([], [], []) == []


def test_a_key_is_failing_until_its_attempts_are_used_up() -> None:
    assert describe_keys([failed(3)], [], []) == [KeyDescription(b"k", 0, "failing", 3, 6, "error 3", 10, 4)]
    assert describe_keys([failed(3, exhausted=True)], [], [])[0].state == "blocked"


def test_of_a_key_that_failed_in_several_places_the_first_is_shown() -> None:
    (one,) = describe_keys([failed(3, since_ms=20), failed(5, exhausted=True)], [], [])
    assert (one.offset, one.since_ms, one.state) == (3, 20, "blocked")


def test_failures_without_a_key_are_separate() -> None:
    assert [one.offset for one in describe_keys([failed(3, None), failed(5, None)], [], [])] == [3, 5]


def test_the_same_key_in_two_partitions_is_two_entries() -> None:
    assert [one.partition for one in describe_keys([failed(3), failed(3, partition=1)], [], [])] == [0, 1]


def test_a_parked_key_shows_its_head_and_what_is_known_of_its_failure() -> None:
    lot = ParkingLotRow(0, b"k", "parked", "used up", 30, 3, 5)
    assert describe_keys([failed(3), failed(9)], [lot], []) == [
        KeyDescription(b"k", 0, "parked", 3, 6, "error 3", 30, 4, "used up")
    ]
    assert describe_keys([], [lot], []) == [KeyDescription(b"k", 0, "parked", 3, 0, "", 30, 4, "used up")]


def test_a_lot_without_messages_has_nothing_waiting() -> None:
    lot = ParkingLotRow(0, b"k", "resuming", "", 30, None, 0)
    assert describe_keys([], [lot], []) == [KeyDescription(b"k", 0, "resuming", None, 0, "", 30, 0)]
    (one,) = describe_keys([failed(3)], [lot], [])
    assert (one.state, one.offset, one.error) == ("resuming", 3, "error 3")


def test_requests_belong_to_their_key() -> None:
    first, second, other = asked(1), asked(2), asked(3, b"other")
    one, two = describe_keys([failed(3)], [], [first, second, other])
    assert (one.state, one.requests) == ("failing", (first.request, second.request))
    assert two == KeyDescription(b"other", 0, "requested", None, 0, "", 10, 0, "", (other.request,))


def test_what_lasts_longest_comes_first() -> None:
    lots = [ParkingLotRow(0, b"lot", "parked", "", 20, 1, 1)]
    failures = [failed(3, b"new", 30), failed(4, b"old", 10), failed(5, None, 15)]
    found = describe_keys(failures, lots, [asked(1, b"asked", 25)])
    assert [one.key for one in found] == [b"old", None, b"lot", b"asked", b"new"]


def described(key: bytes | None, state: str, waiting: int, partition: int = 0) -> KeyDescription:
    return KeyDescription(key, partition, state, 1, 1, "error", 10, waiting)


def test_the_key_behind_which_most_waits_is_the_blocking_one_of_its_partition() -> None:
    keys = [
        described(b"a", "failing", 3),
        described(b"b", "blocked", 7),
        described(b"c", "parked", 7),
        described(b"d", "resuming", 50),
        described(b"e", "requested", 60),
        described(None, "failing", 0, partition=1),
    ]
    assert {partition: one.key for partition, one in blocking_keys(keys).items()} == {0: b"b", 1: None}
    assert blocking_keys([]) == {}
