"""Order by key at the node: hand-over to the next lease holder, key requests, and the key list."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from pyroaring import BitMap64

from inturn.model.errors import Closed, InvalidInput, LimitExceeded, NotFound, StaleEpoch
from inturn.model.routing import slot_of
from inturn.model.settings import Limits
from inturn.protocol.commands import (
    Assignment,
    Commit,
    Committed,
    CreateSubject,
    DescribeGroup,
    DescribeKey,
    DescribeSubject,
    Failure,
    FindRequest,
    GroupDescription,
    Heartbeat,
    KeyDetails,
    KeyList,
    KeyRequest,
    ListKeys,
    Lot,
    LotChange,
    LotContent,
    ParkedMessage,
    Progress,
    ReadLot,
    Release,
    Renew,
    RequestState,
    ResetGroup,
    SteerKey,
    SubjectDescription,
)
from inturn.testing.history import Committed as CommittedEvent
from tests.node.machine import Machine, Waiting

_numbers = count(1)


def key_of(partition: int) -> bytes:
    """A key of the subject "orders" with two partitions."""
    return next(key for key in (b"key-%d" % number for number in count()) if slot_of(key) * 2 // 1024 == partition)


KEY = key_of(0)
OTHER = key_of(1)


@pytest.fixture
def epoch(machine: Machine) -> int:
    """The member "a" holds partition 0."""
    machine.join()
    return machine.acquire("a").epoch


def commit(machine: Machine, epoch: int, **what: Any) -> tuple[int, ...]:
    values = {"offset": 0, "number": next(_numbers), **what}
    answer = machine.ask(Commit("orders", "billing", "a", (Progress(0, epoch, **values),)))
    assert isinstance(answer, Committed)
    return answer.partitions


def park(machine: Machine, epoch: int, *offsets: int, key: bytes = KEY) -> None:
    added = tuple(ParkedMessage(0, offset, b"m") for offset in offsets)
    commit(machine, epoch, lots=(LotChange(key, "parked", "tired", added),))


def steer(machine: Machine, action: str, key: bytes = KEY, **more: Any) -> KeyRequest:
    answer = machine.ask(SteerKey("orders", "billing", key, action, "me", "because", **more))
    assert isinstance(answer, KeyRequest)
    return answer


def find(machine: Machine, request: KeyRequest, wait_s: float = 0.0) -> Waiting:
    return machine.submit(FindRequest("orders", "billing", request.id, wait_s))


def keys(machine: Machine) -> KeyList:
    answer = machine.ask(ListKeys("orders", "billing"))
    assert isinstance(answer, KeyList)
    return answer


def beat(machine: Machine, generation: int = 0, wait_s: float = 0.0) -> Waiting:
    return machine.submit(Heartbeat("orders", "billing", "a", "key", "first", generation, wait_s))


# The hand-over to the next lease holder


def test_the_next_holder_gets_all_that_the_one_before_stored(machine: Machine, epoch: int) -> None:
    failure = Failure(7, KEY, 3, "boom", 2, True)
    finished = BitMap64([8]).serialize()
    request = steer(machine, "park")
    other = steer(machine, "park", OTHER)
    commit(machine, epoch, failed=(failure,))
    park(machine, epoch, 5, key=b"p")
    machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 6, next(_numbers), finished)))
    granted = machine.acquire("b")
    assert (granted.offset, granted.finished) == (6, finished)
    assert granted.failures == (failure,)
    assert granted.lots == (Lot(b"p", "parked"),)
    assert granted.requests == (request,)
    assert granted.request_mark == other.id
    assert machine.acquire("b") == granted, "a lost answer costs nothing"


def test_a_late_copy_counts_as_taken_and_the_observer_does_not_hear_of_it(machine: Machine, epoch: int) -> None:
    progress = Progress(0, epoch, 5, 2, failed=(Failure(7, KEY, 1, ""),))
    late = Progress(0, epoch, 6, 1, failed=(Failure(8, KEY, 1, ""),))
    for one in (progress, progress, late):
        assert machine.ask(Commit("orders", "billing", "a", (one,))) == Committed((0,))
    machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 9, 2)))
    events = [event for event in machine.recorder.history if isinstance(event, CommittedEvent)]
    assert [event.offset for event in events] == [5]
    granted = machine.acquire("b")
    assert (granted.offset, [one.offset for one in granted.failures]) == (5, [7])


def test_progress_of_a_lease_that_is_over_is_not_taken(machine: Machine, epoch: int) -> None:
    machine.wait(10.0)
    machine.acquire("b")
    assert commit(machine, epoch, offset=5, failed=(Failure(7, KEY, 1, ""),)) == ()
    assert keys(machine).keys == ()


def test_a_commit_that_would_free_a_key_with_parked_messages_is_refused(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 1)
    with pytest.raises(InvalidInput, match="cannot be free"):
        commit(machine, epoch, offset=9, lots=(LotChange(KEY, "free"),))
    assert machine.acquire("a").offset == 0


def test_a_release_that_is_refused_keeps_the_lease(machine: Machine, epoch: int) -> None:
    with pytest.raises(InvalidInput):
        machine.ask(Release("orders", "billing", "a", Progress(0, epoch, -1, 1)))
    assert commit(machine, epoch, offset=5) == (0,)


def test_what_is_stored_survives_a_restart(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 1, 2)
    request = steer(machine, "resume")
    before = keys(machine)
    machine.restart()
    machine.join()
    assert keys(machine) == before
    granted = machine.acquire("a")
    assert (granted.lots, granted.requests, granted.request_mark) == ((Lot(KEY, "parked"),), (request,), request.id)


def test_offsets_that_are_parked_are_not_given_out_again(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 41)
    machine.restart()
    assert machine.append() == 42


# Key requests


def test_a_request_is_heard_at_once_by_all_members(machine: Machine, epoch: int) -> None:
    first = beat(machine).answer
    assert isinstance(first, Assignment)
    held = beat(machine, first.generation, 3.0)
    assert held.answer is None
    request = steer(machine, "park")
    assert isinstance(held.answer, Assignment)
    assert held.answer.requests == (request,)
    assert held.answer.partitions == first.partitions
    assert request == KeyRequest(request.id, 0, KEY, "park", None, "me", "because")


def test_a_request_waits_until_a_commit_says_that_it_is_done(machine: Machine, epoch: int) -> None:
    request = steer(machine, "park")
    held = find(machine, request, 5.0)
    machine.wait(1.0)
    assert held.answer is None
    commit(machine, epoch, requests=(request.id,))
    assert isinstance(held.answer, RequestState)
    assert held.answer.request == request
    assert held.answer.done_at_ms is not None
    assignment = beat(machine).answer
    assert isinstance(assignment, Assignment)
    assert assignment.requests == ()
    assert machine.acquire("a").request_mark == request.id
    assert find(machine, request, 5.0).answer == held.answer, "done is done: it is not held back"


def test_a_request_may_be_done_by_a_release(machine: Machine, epoch: int) -> None:
    request = steer(machine, "park")
    held = find(machine, request, 5.0)
    machine.ask(Release("orders", "billing", "a", Progress(0, epoch, 0, 1, requests=(request.id,))))
    assert isinstance(held.answer, RequestState)


def test_a_request_that_nobody_acts_upon_is_answered_when_the_time_is_over(machine: Machine, epoch: int) -> None:
    request = steer(machine, "park")
    held = find(machine, request, 5.0)
    machine.wait(4.999)
    assert held.answer is None
    machine.wait(0.001)
    assert isinstance(held.answer, RequestState)
    assert held.answer.done_at_ms is None
    assert find(machine, request).answer == held.answer, "without a time it is not held back"


def test_closing_answers_who_waits_for_a_request(machine: Machine, epoch: int) -> None:
    held = find(machine, steer(machine, "park"), 5.0)
    machine.node.close()
    assert isinstance(held.answer, Closed)


def test_a_commit_for_another_partition_does_not_do_a_request(machine: Machine, epoch: int) -> None:
    request = steer(machine, "park", OTHER)
    held = find(machine, request, 5.0)
    commit(machine, epoch, requests=(request.id,))
    assert held.answer is None
    assert machine.acquire("a", partition=1).requests == (request,)


@pytest.mark.parametrize("bad", [0, 99, -1, 2**63, 2**70])
def test_an_unknown_request_is_not_waited_for(machine: Machine, epoch: int, bad: int) -> None:
    answer = machine.submit(FindRequest("orders", "billing", bad, 5.0)).answer
    assert isinstance(answer, NotFound | InvalidInput)


def test_a_request_of_another_group_is_not_found(machine: Machine, epoch: int) -> None:
    request = steer(machine, "park")
    machine.join(group="shipping")
    assert isinstance(machine.submit(FindRequest("orders", "shipping", request.id)).answer, NotFound)


def test_the_same_request_is_asked_once_while_it_waits(machine: Machine, epoch: int) -> None:
    first = steer(machine, "park")
    generation = machine.node.membership.generation(machine.node.catalog.group("orders", "billing"))
    assert steer(machine, "park") == first
    assert machine.node.membership.generation(machine.node.catalog.group("orders", "billing")) == generation
    assert steer(machine, "park", OTHER).id > first.id
    commit(machine, epoch, requests=(first.id,))
    assert steer(machine, "park").id > first.id


def test_nothing_can_be_resumed_that_is_not_parked_or_blocked(machine: Machine, epoch: int) -> None:
    with pytest.raises(NotFound, match="handles or retries the key"):
        steer(machine, "resume")
    commit(machine, epoch, failed=(Failure(3, KEY, 1, "boom"),))
    with pytest.raises(NotFound, match="retries the key by itself"):
        steer(machine, "resume")
    assert keys(machine).keys[0].requests == ()


def _exhaust(machine: Machine, epoch: int) -> None:
    commit(machine, epoch, failed=(Failure(3, KEY, 9, "boom", 0, True),))


def _park(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 3)


def _ask_to_park(machine: Machine, _: int) -> None:
    steer(machine, "park")


@pytest.mark.parametrize("make", [_exhaust, _park, _ask_to_park])
def test_a_key_that_waits_for_somebody_can_be_resumed(
    machine: Machine, epoch: int, make: Callable[[Machine, int], None]
) -> None:
    make(machine, epoch)
    assert steer(machine, "resume").offset is None
    with pytest.raises(NotFound):
        steer(machine, "resume", OTHER)


def test_a_skip_names_the_first_message_of_its_key(machine: Machine, epoch: int) -> None:
    with pytest.raises(NotFound, match="ListKeys"):
        steer(machine, "skip")
    commit(machine, epoch, failed=(Failure(8, KEY, 1, ""), Failure(6, KEY, 1, ""), Failure(2, OTHER, 1, "")))
    failing = steer(machine, "skip")
    assert failing.offset == 6
    park(machine, epoch, 6, 8)
    assert steer(machine, "skip") == failing
    commit(machine, epoch, settled=(6,), lots=(LotChange(KEY, "resuming", removed=((0, 6),)),))
    assert steer(machine, "skip").offset == 8, "another head, another request"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"action": "explode"}, InvalidInput),
        ({"key": b""}, InvalidInput),
        ({"key": "text"}, InvalidInput),
        ({"key": None}, InvalidInput),
        ({"key": b"k" * 1025}, LimitExceeded),
        ({"partition": 1}, InvalidInput),
        ({"partition": 2}, NotFound),
        ({"partition": -1}, NotFound),
        ({"by": "x" * 1001}, InvalidInput),
        ({"why": "x" * 1001}, InvalidInput),
        ({"by": None}, InvalidInput),
        ({"subject": "nothing"}, NotFound),
        ({"group": "nobody"}, NotFound),
    ],
)
def test_what_makes_no_sense_is_refused(
    machine: Machine, epoch: int, changes: dict[str, Any], error: type[Exception]
) -> None:
    values = {"subject": "orders", "group": "billing", "key": KEY, "action": "park", "by": "me", "why": "", **changes}
    assert isinstance(machine.submit(SteerKey(**values)).answer, error)
    assert keys(machine).keys == ()


def test_where_the_sender_chooses_the_partition_it_must_be_given(machine: Machine) -> None:
    machine.ask(CreateSubject("chosen", 2, "selector", "strict", Limits()))
    machine.ask(Heartbeat("chosen", "billing", "a", "key", "first"))
    command = SteerKey("chosen", "billing", KEY, "park", "me", "")
    with pytest.raises(InvalidInput, match="partition is missing"):
        machine.ask(command)
    for partition in (0, 1):
        answer = machine.ask(SteerKey("chosen", "billing", KEY, "park", "me", "", partition))
        assert isinstance(answer, KeyRequest)
        assert answer.partition == partition
    with pytest.raises(NotFound):
        machine.ask(SteerKey("chosen", "billing", KEY, "park", "me", "", 2))


def test_requests_are_bounded(machine: Machine, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inturn.broker.keys.WAITING_COUNT_MAX", 1)
    first = steer(machine, "park")
    with pytest.raises(InvalidInput, match="start the group's consumers"):
        steer(machine, "park", OTHER)
    commit(machine, epoch, requests=(first.id,))
    steer(machine, "park", OTHER)


def test_a_reset_takes_back_what_waits(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 1)
    commit(machine, epoch, failed=(Failure(7, b"f", 1, ""),))
    request = steer(machine, "resume")
    held = find(machine, request, 30.0)
    joined = beat(machine).answer
    assert isinstance(joined, Assignment)
    machine.wait(10.0)
    machine.ask(ResetGroup("orders", "billing", "first"))
    assert isinstance(held.answer, NotFound)
    assert keys(machine).keys == ()
    assignment = beat(machine, joined.generation, 5.0).answer
    assert isinstance(assignment, Assignment), "there is news"
    assert assignment.requests == ()
    granted = machine.acquire("a", ask=2)
    assert (granted.lots, granted.failures, granted.requests, granted.finished) == ((), (), (), b"")
    assert granted.request_mark == request.id, "what somebody may still have heard of does not count"


# The key list


def test_keys_are_listed_with_what_is_the_matter(machine: Machine, epoch: int) -> None:
    assert keys(machine).keys == ()
    commit(machine, epoch, failed=(Failure(3, b"f", 2, "boom", 1), Failure(4, None, 1, "keyless")))
    machine.clock.jump_wall(1.0)
    park(machine, epoch, 5, 6)
    machine.clock.jump_wall(1.0)
    request = steer(machine, "park", OTHER)
    found = keys(machine).keys
    assert [(one.key, one.partition, one.state, one.offset, one.waiting) for one in found] == [
        (None, 0, "failing", 4, 0),
        (b"f", 0, "failing", 3, 1),
        (KEY, 0, "parked", 5, 1),
        (OTHER, 1, "requested", None, 0),
    ]
    assert found[3].requests == (request,)
    assert [one.since_ms for one in found] == sorted(one.since_ms for one in found)


def test_a_key_is_described_with_its_messages_and_who_asked_what(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 5, 6, 7)
    request = steer(machine, "resume")
    commit(machine, epoch, requests=(request.id,))
    skip = steer(machine, "skip")
    first = machine.ask(DescribeKey("orders", "billing", KEY, 0, 2))
    assert isinstance(first, KeyDetails)
    assert first.description.requests == (skip,)
    assert ([one.offset for one in first.parked], first.parked_is_end) == ([5, 6], False)
    assert [state.request for state in first.history] == [skip, request]
    assert [state.done_at_ms is None for state in first.history] == [True, False]
    rest = machine.ask(DescribeKey("orders", "billing", KEY, first.parked[-1].position, 2))
    assert isinstance(rest, KeyDetails)
    assert ([one.offset for one in rest.parked], rest.parked_is_end) == ([7], True)


def test_a_key_without_trouble_is_not_described(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 5)
    with pytest.raises(NotFound, match="no message of the key has failed"):
        machine.ask(DescribeKey("orders", "billing", OTHER))
    for bad in (b"", b"k" * 1025):
        with pytest.raises(InvalidInput):
            machine.ask(DescribeKey("orders", "billing", bad))


@pytest.mark.parametrize(("after", "max_bytes"), [(-1, 100), (2**63, 100), (0, 0), (0, 1 << 40)])
def test_bad_bounds_are_refused(machine: Machine, epoch: int, after: int, max_bytes: int) -> None:
    park(machine, epoch, 5)
    for command in (
        DescribeKey("orders", "billing", KEY, after, max_bytes),
        ReadLot("orders", "billing", 0, "a", epoch, KEY, after, max_bytes),
    ):
        assert isinstance(machine.submit(command).answer, InvalidInput)


def test_a_lot_is_read_under_the_lease_only(machine: Machine, epoch: int) -> None:
    park(machine, epoch, 5, 6)
    content = machine.ask(ReadLot("orders", "billing", 0, "a", epoch, KEY, 0, 100))
    assert isinstance(content, LotContent)
    assert ([one.offset for one in content.messages], content.is_end) == ([5, 6], True)
    for partition, member, wrong in ((0, "b", epoch), (0, "a", epoch + 1), (1, "a", epoch), (9, "a", epoch)):
        command = ReadLot("orders", "billing", partition, member, wrong, KEY, 0, 100)
        assert isinstance(machine.submit(command).answer, StaleEpoch)
    machine.wait(10.0)
    machine.acquire("b")
    assert isinstance(machine.submit(ReadLot("orders", "billing", 0, "a", epoch, KEY, 0, 100)).answer, StaleEpoch)


# The group as a whole


def described(machine: Machine) -> GroupDescription:
    answer = machine.ask(DescribeGroup("orders", "billing"))
    assert isinstance(answer, GroupDescription)
    return answer


def test_a_group_is_described_with_the_key_that_holds_back_most(machine: Machine, epoch: int) -> None:
    assert [one.blocking for one in described(machine).partitions] == [None, None]
    failed = (Failure(3, KEY, 2, "no", 8), Failure(5, b"other", 9, "no", 1, True))
    commit(machine, epoch, failed=failed)
    blocking = described(machine).partitions[0].blocking
    assert blocking is not None
    assert (blocking.key, blocking.state, blocking.attempts, blocking.waiting) == (KEY, "failing", 2, 8)
    commit(machine, epoch, settled=(3,))
    blocking = described(machine).partitions[0].blocking
    assert blocking is not None
    assert (blocking.key, blocking.state) == (b"other", "blocked")
    park(machine, epoch, 6, 7, 8)
    blocking = described(machine).partitions[0].blocking
    assert blocking is not None
    assert (blocking.key, blocking.state, blocking.waiting) == (KEY, "parked", 2)


def test_a_group_is_described_with_how_many_are_done_per_second(machine: Machine, epoch: int) -> None:
    """Counts committed offsets and finished offsets above, every offset once."""
    for step in range(1, 41):
        machine.wait(0.25)
        machine.ask(Renew("orders", "billing", "a", ((0, epoch),)))
        machine.join()
        commit(machine, epoch, offset=step, finished=BitMap64([step + 100 + n for n in range(step)]).serialize())
    one, other = described(machine).partitions
    assert one.done_per_s == pytest.approx(8, rel=0.05)
    assert other.done_per_s == 0
    machine.wait(10.0)
    assert described(machine).partitions[0].done_per_s == 0


def test_the_next_holder_does_not_count_what_was_done_before(machine: Machine, epoch: int) -> None:
    commit(machine, epoch, offset=1000)
    machine.wait(11.0)
    machine.join("b")
    epoch = machine.acquire("b").epoch
    machine.ask(Commit("orders", "billing", "b", (Progress(0, epoch, 1003, 1),)))
    assert described(machine).partitions[0].done_per_s < 1


def test_a_subject_is_described_with_how_many_are_appended_per_second(machine: Machine) -> None:
    for _ in range(10):
        machine.append(5)
        machine.wait(0.5)
    answer = machine.ask(DescribeSubject("orders"))
    assert isinstance(answer, SubjectDescription)
    assert answer.partitions[0].appended_per_s == pytest.approx(10, rel=0.15)
    assert answer.partitions[1].appended_per_s == 0
