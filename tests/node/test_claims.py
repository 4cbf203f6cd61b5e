"""Claims: several claimants work on a partition under the same lease, each claimant on different slots."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import count

import pytest
from pyroaring import BitMap64

from inturn.broker.claims import REMEMBERED_LIVES
from inturn.model.batch import decode, encode
from inturn.model.errors import InturnError, InvalidInput, LeaseHeld, NotFound, StaleEpoch
from inturn.model.message import Origin, Outgoing
from inturn.model.routing import SlotSet, slot_of
from inturn.model.subject import dead_letter_subject
from inturn.protocol.commands import (
    Acquire,
    Append,
    Assignment,
    Claim,
    Commit,
    Committed,
    DescribeGroup,
    Done,
    Failure,
    Granted,
    GroupDescription,
    Heartbeat,
    KeyRequest,
    Leave,
    Lot,
    LotChange,
    LotContent,
    Move,
    OpenDeadLetters,
    ParkedMessage,
    Progress,
    Pulled,
    Read,
    ReadLot,
    Release,
    Renew,
    Renewed,
    SteerKey,
)
from inturn.store.groups import Groups
from inturn.store.leases import ProgressRows
from inturn.testing.history import Committed as CommittedEvent
from inturn.testing.history import LeaseEnded
from tests.node.machine import LEASE, Machine, Waiting

LEFT = SlotSet.of(range(256)).to_bytes()  # of partition 0, like all slots here
RIGHT = SlotSet.of(range(256, 512)).to_bytes()
MIDDLE = SlotSet.of(range(150, 400)).to_bytes()
LIFE_S = LEASE.life_s
_numbers = count(1)


def key_in(slots: bytes) -> bytes:
    wanted = SlotSet.from_bytes(slots)
    return next(key for key in (b"key-%d" % number for number in count()) if slot_of(key) in wanted)


class Group:
    """A machine with a lease holder (the keeper) of partition 0."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.join("keeper")
        self.epoch = machine.acquire("keeper").epoch

    def claim(self, member: str, slots: bytes = LEFT, ask: int = 1, epoch: int | None = None) -> Granted:
        answer = self.machine.ask(self.command(member, slots, ask, epoch))
        assert isinstance(answer, Granted)
        return answer

    def wait_for_claim(self, member: str, slots: bytes = LEFT, ask: int = 1, wait_s: float = 60.0) -> Waiting:
        return self.machine.submit(self.command(member, slots, ask, None, wait_s))

    def command(
        self, member: str, slots: bytes, ask: int, epoch: int | None = None, wait_s: float = 0.0, owner: str = "keeper"
    ) -> Claim:
        epoch = self.epoch if epoch is None else epoch
        return Claim("orders", "billing", 0, owner, epoch, member, ask, slots, wait_s)

    def progress(
        self, finished: Iterable[int] = (), ask: int = 1, number: int | None = None, **more: object
    ) -> Progress:
        offsets = BitMap64(finished)
        number = next(_numbers) if number is None else number
        told = offsets.serialize() if offsets else b""
        return Progress(0, self.epoch, 0, number, told, ask=ask, **more)  # type: ignore[arg-type]

    def commit(self, member: str, progress: Progress) -> tuple[int, ...]:
        answer = self.machine.ask(Commit("orders", "billing", member, (progress,)))
        assert isinstance(answer, Committed)
        return answer.partitions

    def finish(self, member: str, *offsets: int, ask: int = 1) -> tuple[int, ...]:
        return self.commit(member, self.progress(offsets, ask))

    def renew(self, member: str) -> Renewed:
        answer = self.machine.ask(Renew("orders", "billing", member, ((0, self.epoch),)))
        assert isinstance(answer, Renewed)
        return answer

    def release(self, member: str, *offsets: int, ask: int = 1) -> None:
        progress = self.progress(offsets, ask)
        assert self.machine.ask(Release("orders", "billing", member, progress)) == Done()

    def hand_back(self, number: int = 0) -> None:
        """The keeper releases the lease, with the progress from the grant."""
        progress = Progress(0, self.epoch, 0, number)
        assert self.machine.ask(Release("orders", "billing", "keeper", progress)) == Done()

    def pulled(self, member: str, offset: int = 0) -> Pulled:
        answer = self.machine.pull(member, self.epoch, offset).answer
        assert isinstance(answer, Pulled), answer
        return answer

    def offsets(self, member: str) -> list[int]:
        return [one.offset for batch in self.pulled(member).batches for one in decode(batch, Origin("orders", 0))]

    def describe(self) -> GroupDescription:
        answer = self.machine.ask(DescribeGroup("orders", "billing"))
        assert isinstance(answer, GroupDescription)
        return answer

    @property
    def place(self) -> tuple[int, list[int]]:
        """Committed offset and finished set, as stored."""
        (group,) = Groups(self.machine.database).all()
        stored = ProgressRows(self.machine.database).of_partition(group.id, 0).place
        return stored.offset, list(BitMap64.deserialize(stored.finished)) if stored.finished else []


@pytest.fixture
def group(machine: Machine) -> Group:
    return Group(machine)


@pytest.fixture
def embedded() -> Iterator[Machine]:
    """Members that are not remote end with the node."""
    made = Machine(local=True)
    yield made
    made.close()


def append(machine: Machine, *keys: bytes) -> None:
    batch = encode([Outgoing(b"x", key) for key in keys], array("H", [slot_of(key) for key in keys]))
    machine.ask(Append("orders", 0, batch))


# Granting


def test_a_claim_has_the_epoch_of_the_lease_and_says_what_it_is(group: Group) -> None:
    granted = group.claim("a")
    assert (granted.epoch, granted.is_claim, granted.life_s) == (group.epoch, True, LIFE_S)


def test_a_lease_is_no_claim(machine: Machine) -> None:
    machine.join("a")
    assert not machine.acquire("a").is_claim


def test_claims_of_other_slots_are_granted_at_once(group: Group) -> None:
    group.claim("a", LEFT)
    group.claim("b", RIGHT)
    assert [(one.claimant, one.slot_count) for one in group.describe().claims] == [("a", 256), ("b", 256)]


def test_claims_of_the_same_slots_are_refused(group: Group) -> None:
    group.claim("a", LEFT)
    group.claim("b", RIGHT)
    with pytest.raises(LeaseHeld) as caught:
        group.claim("c", MIDDLE)
    assert caught.value.owner == "a"


def test_all_slots_overlap_with_any(group: Group) -> None:
    group.claim("a", b"")
    with pytest.raises(LeaseHeld):
        group.claim("b", RIGHT)


def test_a_claim_waits_for_the_release_of_the_slots(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    waiting = group.wait_for_claim("b", MIDDLE)
    machine.run()
    assert waiting.answer is None
    group.release("a")
    machine.run()
    assert isinstance(waiting.answer, Granted)


def test_a_claim_waits_for_the_expiry_of_the_slots(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    waiting = group.wait_for_claim("b", MIDDLE)
    machine.wait(LIFE_S - 0.001)
    assert waiting.answer is None
    machine.wait(0.001)
    assert isinstance(waiting.answer, Granted)


def test_renewing_makes_those_wait_longer_who_want_the_slots(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    waiting = group.wait_for_claim("b", MIDDLE)
    machine.wait(LIFE_S / 2)
    assert group.renew("a") == Renewed((0,))
    machine.wait(LIFE_S - 0.001)
    assert waiting.answer is None
    machine.wait(0.001)
    assert isinstance(waiting.answer, Granted)


def test_one_claim_is_woken_in_time_though_another_waits_for_longer(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    machine.wait(LIFE_S / 2)
    group.claim("b", RIGHT)
    longer = group.wait_for_claim("d", RIGHT)
    shorter = group.wait_for_claim("c", LEFT)
    machine.wait(LIFE_S / 2)
    assert isinstance(shorter.answer, Granted)
    assert longer.answer is None
    machine.wait(LIFE_S / 2)
    assert isinstance(longer.answer, Granted)


def test_a_claim_that_waited_too_long_is_refused(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    waiting = group.wait_for_claim("b", LEFT, wait_s=1.0)
    machine.wait(1.0)
    assert isinstance(waiting.answer, LeaseHeld)


def test_the_same_ask_again_is_the_same_grant(machine: Machine, group: Group) -> None:
    """A lost answer does no harm."""
    first = group.claim("a", ask=3)
    machine.wait(LIFE_S - 1.0)
    assert group.claim("a", ask=3) == first
    machine.wait(LIFE_S - 1.0)
    with pytest.raises(LeaseHeld):
        group.claim("b")  # the second request renewed the claim


def test_an_older_ask_is_refused(group: Group) -> None:
    group.claim("a", ask=3)
    with pytest.raises(StaleEpoch):
        group.claim("a", ask=2)


def test_a_newer_ask_of_the_same_claimant_replaces_its_claim(group: Group) -> None:
    group.claim("a", LEFT, ask=1)
    group.claim("a", RIGHT, ask=2)
    group.claim("b", LEFT)
    assert [one.claimant for one in group.describe().claims] == ["a", "b"]


def test_a_late_copy_of_an_ask_is_refused_when_the_claim_was_given_back(machine: Machine, group: Group) -> None:
    group.claim("a", ask=1)
    group.release("a")
    with pytest.raises(StaleEpoch):
        group.claim("a", ask=1)
    group.claim("b")
    group.release("b")
    with pytest.raises(StaleEpoch):  # even after a different claimant had the slots
        group.claim("a", ask=1)
    group.claim("a", ask=2)


def test_a_late_copy_of_an_ask_is_refused_when_the_claim_was_lost(machine: Machine, group: Group) -> None:
    group.claim("a", ask=1)
    machine.wait(LIFE_S)
    group.claim("b")
    group.release("b")
    with pytest.raises(StaleEpoch):
        group.claim("a", ask=1)


def test_claims_that_are_over_are_not_remembered_for_good(machine: Machine, group: Group) -> None:
    group.claim("a", ask=1)
    group.release("a")
    for _ in range(REMEMBERED_LIVES + 1):
        machine.wait(LIFE_S - 0.1)
        group.renew("keeper")
    machine.wait(LIFE_S - 0.1)
    group.claim("b", RIGHT)
    assert "a" not in {name for claims in machine.node.broker.claims._claims.values() for name in claims}


def test_a_claim_needs_the_lease_with_its_epoch(machine: Machine, group: Group) -> None:
    for command in (
        group.command("a", LEFT, 1, group.epoch + 1),
        group.command("a", LEFT, 1, group.epoch - 1),
        group.command("a", LEFT, 1, owner="somebody"),
    ):
        with pytest.raises(StaleEpoch):
            machine.ask(command)


def test_slots_are_as_many_bytes_as_there_are(group: Group) -> None:
    with pytest.raises(InvalidInput, match="a set of slots in 5 bytes"):
        group.claim("a", b"12345")


def test_a_claim_of_a_partition_or_group_that_is_not_there_is_refused(machine: Machine, group: Group) -> None:
    for command in (
        Claim("orders", "billing", 7, "keeper", 1, "a", 1),
        Claim("orders", "nobody", 0, "keeper", 1, "a", 1),
        Claim("nothing", "billing", 0, "keeper", 1, "a", 1),
    ):
        with pytest.raises(NotFound):
            machine.ask(command)


# Pulls


def test_a_claimant_is_given_its_slots_only(machine: Machine, group: Group) -> None:
    left, right = key_in(LEFT), key_in(RIGHT)
    append(machine, left, right, left)
    append(machine, right, right)
    group.claim("a", LEFT)
    group.claim("b", RIGHT)
    assert group.offsets("a") == [0, 2]
    assert group.offsets("b") == [1, 3, 4]
    assert group.pulled("a").next_offset == 5


def test_a_claimant_of_all_slots_is_given_the_batches_as_they_are(machine: Machine, group: Group) -> None:
    append(machine, key_in(LEFT), key_in(RIGHT))
    group.claim("a", b"")
    (batch,) = group.pulled("a").batches
    (stored,) = machine.node.broker.log(machine.node.catalog.subject("orders"), 0).read(0, 1 << 20)
    assert bytes(batch.payload) == bytes(stored.payload)


def test_reading_can_be_bound_to_slots(machine: Machine) -> None:
    left, right = key_in(LEFT), key_in(RIGHT)
    append(machine, left, right)
    answer = machine.ask(Read("orders", 0, 0, 1 << 20, slots=RIGHT))
    assert isinstance(answer, Pulled)
    assert [one.offset for batch in answer.batches for one in decode(batch, Origin("orders", 0))] == [1]
    with pytest.raises(InvalidInput):
        machine.ask(Read("orders", 0, 0, 1 << 20, slots=b"?"))


def test_the_keeper_pulls_everything_all_the_same(machine: Machine, group: Group) -> None:
    append(machine, key_in(LEFT), key_in(RIGHT))
    group.claim("a", LEFT)
    assert group.offsets("keeper") == [0, 1]


def test_pulling_needs_the_claim(machine: Machine, group: Group) -> None:
    machine.append(3)
    assert isinstance(machine.pull("a", group.epoch).answer, StaleEpoch)
    group.claim("a")
    assert isinstance(machine.pull("a", group.epoch + 1).answer, StaleEpoch)
    assert isinstance(machine.pull("a", group.epoch).answer, Pulled)
    group.release("a")
    assert isinstance(machine.pull("a", group.epoch).answer, StaleEpoch)


# Commits


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_two_claimants_finish_adds_up_in_any_order(machine: Machine, group: Group, first: str) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.claim("b", RIGHT)
    of = {"a": (0, 2, 3), "b": (1, 5)}
    for member in (first, "b" if first == "a" else "a"):
        assert group.finish(member, *of[member]) == (0,)
    assert group.place == (4, [5])


def test_holes_stay_holes_until_somebody_fills_them(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.claim("b", RIGHT)
    group.finish("a", 3, 5)
    assert group.place == (0, [3, 5])
    group.finish("b", 0, 1, 2)
    assert group.place == (4, [5])
    group.finish("b", 4)
    assert group.place == (6, [])


def test_what_was_finished_before_may_be_told_again(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    for _ in range(3):
        group.finish("a", 0, 1, 3)
        assert group.place == (2, [3])


def test_the_offset_that_a_claimant_tells_counts_for_nothing(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.commit("a", Progress(0, group.epoch, 7, next(_numbers), ask=1))
    assert group.place == (0, [])


def test_what_the_group_had_finished_before_the_claims_stays(machine: Machine, group: Group) -> None:
    machine.append(8)
    finished = BitMap64([4]).serialize()
    machine.ask(Commit("orders", "billing", "keeper", (Progress(0, group.epoch, 2, 1, finished),)))
    granted = group.claim("a", LEFT)
    assert (granted.offset, list(BitMap64.deserialize(granted.finished))) == (2, [4])
    group.finish("a", 2, 3)
    assert group.place == (5, [])


def test_a_late_copy_of_a_commit_changes_nothing(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    key = key_in(LEFT)
    early = group.progress([0], number=1, failed=(Failure(1, key, 1, "no"),))
    group.commit("a", early)
    group.commit("a", group.progress([1], number=2, settled=(1,)))
    assert group.commit("a", early) == (0,)
    group.release("a")
    assert group.claim("b").failures == ()


def test_a_late_copy_from_a_former_claim_of_the_same_claimant_is_refused(machine: Machine, group: Group) -> None:
    """All claims under a lease have the same epoch, so the epoch does not tell claims apart."""
    machine.append(8)
    group.claim("a", ask=1)
    late = group.progress([5], ask=1, number=7)
    machine.wait(LIFE_S)
    group.claim("b", ask=1)
    group.release("b")
    group.claim("a", ask=2)
    assert group.commit("a", late) == ()
    assert group.commit("a", group.progress([0], ask=2, number=1)) == (0,)
    with pytest.raises(StaleEpoch):
        machine.ask(Release("orders", "billing", "a", late))
    assert group.place == (1, [])
    with pytest.raises(LeaseHeld):  # the current claim was not given back
        group.claim("b", ask=2)


def test_a_commit_with_another_epoch_is_refused(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a")
    for epoch in (group.epoch - 1, group.epoch + 1):
        progress = Progress(0, epoch, 0, next(_numbers), BitMap64([0]).serialize(), ask=1)
        assert group.commit("a", progress) == ()
    assert group.place == (0, [])


def test_who_lost_its_claim_is_refused_everywhere(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    machine.wait(LIFE_S)
    group.claim("b", MIDDLE)
    assert isinstance(machine.pull("a", group.epoch).answer, StaleEpoch)
    assert group.finish("a", 0) == ()
    assert group.renew("a") == Renewed(())
    with pytest.raises(StaleEpoch):
        group.release("a", 0)
    assert group.place == (0, [])


def test_who_was_silent_for_too_long_goes_on_if_nobody_took_its_slots(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    machine.wait(LIFE_S + 1)
    group.claim("b", RIGHT)
    assert group.finish("a", 0) == (0,)
    assert group.renew("a") == Renewed((0,))
    with pytest.raises(LeaseHeld):
        group.claim("c", LEFT)


def test_a_release_commits(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.release("a", 0, 1, 4)
    assert group.place == (2, [4])


def test_a_late_copy_of_a_release_is_refused_and_changes_nothing(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    late = group.progress([0])
    machine.ask(Release("orders", "billing", "a", late))
    group.claim("a", LEFT, ask=2)
    with pytest.raises(StaleEpoch):
        machine.ask(Release("orders", "billing", "a", late))
    with pytest.raises(LeaseHeld):
        group.claim("b", LEFT)


def test_commits_are_observed_as_the_owners(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.claim("b", RIGHT)
    group.finish("a", 0, 3)
    group.finish("b", 1)
    seen = [event for event in machine.recorder.snapshot() if isinstance(event, CommittedEvent)]
    assert [(one.owner, one.epoch, one.offset, one.finished) for one in seen] == [
        ("keeper", group.epoch, 1, (3,)),
        ("keeper", group.epoch, 2, (3,)),
    ]


def test_what_claimants_have_done_can_be_looked_at(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.finish("a", 0, 3)
    group.finish("a", 5)
    assert [(one.partition, one.claimant, one.slot_count, one.done) for one in group.describe().claims] == [
        (0, "a", 256, 3)
    ]
    group.release("a")
    assert group.describe().claims == ()


def test_finished_sets_that_are_nonsense_are_refused(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a")
    with pytest.raises(InvalidInput, match="cannot be read"):
        group.commit("a", Progress(0, group.epoch, 0, next(_numbers), b"nonsense", ask=1))
    assert group.place == (0, [])


@pytest.mark.parametrize("kind", ["commit", "release"])
def test_finished_sets_beyond_the_end_of_the_log_are_refused_from_other_processes(
    machine: Machine, group: Group, kind: str
) -> None:
    machine.append(8)
    group.claim("a")

    def submit(*offsets: int) -> object:
        answers: list[object] = []
        progress = group.progress(offsets)
        command = (
            Commit("orders", "billing", "a", (progress,))
            if kind == "commit"
            else Release("orders", "billing", "a", progress)
        )
        machine.node.submit_remote(command, answers.append)
        return answers[0]

    assert isinstance(submit(8), InvalidInput)
    assert group.place == (0, [])
    assert not isinstance(submit(7), InturnError)
    assert group.place == (0, [7])


# Data besides the messages: failures, parking lots, key requests, moves


def test_failures_lots_and_requests_are_told_to_whose_slots_they_are_in(machine: Machine, group: Group) -> None:
    left, right = key_in(LEFT), key_in(RIGHT)
    append(machine, left, right, left, right)
    lots = tuple(
        LotChange(key, "parked", "why", (ParkedMessage(0, offset, b"x"),)) for key, offset in ((left, 2), (right, 3))
    )
    failed = (Failure(0, left, 1, "no"), Failure(1, right, 2, "no"))
    machine.ask(Commit("orders", "billing", "keeper", (Progress(0, group.epoch, 0, 1, failed=failed, lots=lots),)))
    for key in (left, right):
        assert isinstance(machine.ask(SteerKey("orders", "billing", key, "resume", "me", "why")), KeyRequest)
    a, b = group.claim("a", LEFT), group.claim("b", RIGHT)
    assert [one.offset for one in a.failures] == [0]
    assert [one.offset for one in b.failures] == [1]
    assert [one.key for one in a.lots] == [left]
    assert [one.key for one in b.lots] == [right]
    assert [one.key for one in a.requests] == [left]
    assert [one.key for one in b.requests] == [right]
    assert a.request_mark == b.request_mark > 0
    assert isinstance(a.lots[0], Lot)


def test_failures_without_a_key_are_told_to_all(machine: Machine, group: Group) -> None:
    machine.append(3)
    failed = (Failure(1, None, 1, "no"),)
    machine.ask(Commit("orders", "billing", "keeper", (Progress(0, group.epoch, 0, 1, failed=failed),)))
    assert [one.offset for one in group.claim("a", LEFT).failures] == [1]
    assert [one.offset for one in group.claim("b", RIGHT).failures] == [1]


def test_failures_of_a_claimant_are_told_to_the_next_one(machine: Machine, group: Group) -> None:
    left = key_in(LEFT)
    append(machine, left)
    group.claim("a", LEFT)
    group.commit("a", group.progress(failed=(Failure(0, left, 2, "no"),)))
    group.release("a")
    (failure,) = group.claim("b", LEFT).failures
    assert (failure.offset, failure.attempts) == (0, 2)


def test_a_claimant_parks_and_reads_what_is_parked(machine: Machine, group: Group) -> None:
    left = key_in(LEFT)
    append(machine, left, left)
    group.claim("a", LEFT)
    change = LotChange(left, "parked", "why", (ParkedMessage(0, 0, b"x"), ParkedMessage(0, 1, b"y")))
    group.commit("a", group.progress([0, 1], lots=(change,)))
    read = ReadLot("orders", "billing", 0, "a", group.epoch, left, 0, 1 << 20)
    answer = machine.ask(read)
    assert isinstance(answer, LotContent)
    assert len(answer.messages) == 2
    assert group.place == (2, [])
    group.release("a")
    with pytest.raises(StaleEpoch):
        machine.ask(read)


def test_what_is_done_has_not_failed_whatever_a_late_copy_says_after_a_restart(machine: Machine, group: Group) -> None:
    """After a restart the node does not remember the accepted commits of a claimant."""
    left = key_in(LEFT)
    append(machine, left, left)
    group.claim("a", LEFT)
    late = group.progress(failed=(Failure(0, left, 1, "no"),), number=1)
    group.commit("a", late)
    group.commit("a", group.progress([0], settled=(0,), number=2))
    machine.restart()
    machine.wait(LIFE_S - 0.1)
    group.renew("keeper")
    machine.wait(0.1)
    group.claim("a", LEFT)
    assert group.commit("a", late) == (0,)
    group.commit("a", group.progress(failed=(Failure(1, left, 1, "no"),)))
    group.release("a")
    assert [one.offset for one in group.claim("b", LEFT).failures] == [1]


def test_moving_needs_the_claim(machine: Machine, group: Group) -> None:
    machine.ask(OpenDeadLetters("orders", "billing"))
    batch = encode([Outgoing(b"x")], array("H", [1]))
    to = dead_letter_subject("billing", "orders")
    move = Move("orders", "billing", 0, "a", group.epoch, to, 0, batch)
    with pytest.raises(StaleEpoch):
        machine.ask(move)
    group.claim("a")
    assert machine.ask(move) == Done()


# The lease under the claims


def test_using_a_claim_keeps_the_lease_though_its_owner_is_silent(machine: Machine, group: Group) -> None:
    machine.append(3)
    group.claim("a", LEFT)
    for use in (group.renew, group.pulled, lambda member: group.claim(member, LEFT)) * 2:
        machine.wait(LIFE_S - 0.5)
        use("a")
    with pytest.raises(LeaseHeld):
        machine.acquire("b")


def test_a_lease_whose_owner_and_claimants_are_silent_is_over_and_its_claims_with_it(
    machine: Machine, group: Group
) -> None:
    machine.append(3)
    group.claim("a", LEFT)
    waiting = machine.submit(Acquire("orders", "billing", 0, "b", 1, 60.0))
    machine.wait(LIFE_S)
    assert isinstance(waiting.answer, Granted)
    assert waiting.answer.epoch > group.epoch
    assert isinstance(machine.pull("a", group.epoch).answer, StaleEpoch)
    assert isinstance(machine.pull("a", waiting.answer.epoch).answer, StaleEpoch)
    assert group.finish("a", 0) == ()
    assert group.renew("a") == Renewed(())
    with pytest.raises(StaleEpoch):
        group.claim("a", ask=2)
    assert group.describe().claims == ()


def test_a_claim_that_waits_hears_that_the_lease_is_over(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    waiting = group.wait_for_claim("b", LEFT)
    group.release("a")
    machine.ask(Leave("orders", "billing", "keeper"))
    machine.wait(LIFE_S)
    machine.acquire("c")
    assert isinstance(waiting.answer, Granted | StaleEpoch)
    assert group.finish("b", 0) == ()


def test_a_lease_with_live_claims_is_not_released(machine: Machine, group: Group) -> None:
    machine.append(3)
    group.claim("a", LEFT)
    with pytest.raises(LeaseHeld) as caught:
        group.hand_back()
    assert caught.value.owner == "a, under the lease"
    group.release("a", 0)
    group.hand_back()
    assert machine.acquire("b").offset == 1


def test_a_lease_with_claims_that_are_over_is_released(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    machine.wait(LIFE_S)
    group.renew("keeper")
    group.hand_back()
    machine.acquire("b")


@pytest.mark.parametrize("refused", [0, 1, 5])
def test_what_the_keeper_says_at_its_release_takes_nothing_back(machine: Machine, group: Group, refused: int) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    for _ in range(refused):
        with pytest.raises(LeaseHeld):
            group.hand_back()
    group.release("a", 0, 2, 5)
    group.hand_back()
    granted = machine.acquire("b")
    assert (granted.offset, list(BitMap64.deserialize(granted.finished))) == (1, [2, 5])


def test_claims_are_called_back_when_the_keeper_wants_to_release(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    assert group.renew("a") == Renewed((0,), ())
    with pytest.raises(LeaseHeld):
        group.hand_back()
    assert group.renew("a") == Renewed((0,), (0,))
    assert group.renew("keeper") == Renewed((0,), ())
    with pytest.raises(StaleEpoch):
        group.claim("b", RIGHT)
    assert group.claim("a", LEFT).is_claim  # the answer to the earlier request
    group.release("a")
    group.hand_back()


def test_the_owner_does_not_get_a_higher_epoch_while_others_work_under_its_lease(
    machine: Machine, group: Group
) -> None:
    machine.append(3)
    group.claim("a", LEFT)
    waiting = machine.submit(Acquire("orders", "billing", 0, "keeper", 2, 60.0))
    assert waiting.answer is None
    assert group.finish("a", 0) == (0,)
    group.release("a")
    machine.run()
    assert isinstance(waiting.answer, Granted)
    assert waiting.answer.epoch > group.epoch


def test_who_leaves_keeps_the_leases_that_others_work_under(machine: Machine, group: Group) -> None:
    machine.append(3)
    other = machine.acquire("keeper", partition=1)
    group.claim("a", LEFT)
    machine.ask(Leave("orders", "billing", "keeper"))
    assert machine.acquire("b", partition=1).epoch > other.epoch
    assert group.finish("a", 0) == (0,)
    with pytest.raises(LeaseHeld):
        machine.acquire("b")
    group.release("a")
    machine.wait(LIFE_S)
    assert machine.acquire("b").offset == 1


def test_a_claimant_that_leaves_gives_back_its_claims(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    waiting = group.wait_for_claim("b", LEFT)
    assert machine.ask(Leave("orders", "billing", "a")) == Done()
    machine.run()
    assert isinstance(waiting.answer, Granted)
    with pytest.raises(StaleEpoch):
        group.claim("a", LEFT, ask=1)


def test_nothing_is_claimed_for_a_claimant_that_left_while_it_waited(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    waiting = group.wait_for_claim("b", LEFT)
    machine.ask(Leave("orders", "billing", "b"))
    machine.run()
    assert isinstance(waiting.answer, LeaseHeld)
    group.release("a")
    group.claim("c", LEFT)


# Restarts


def test_after_a_restart_nothing_is_claimed_for_a_full_life(machine: Machine, group: Group) -> None:
    group.claim("a", LEFT)
    machine.restart()
    waiting = group.wait_for_claim("b", LEFT)
    with pytest.raises(LeaseHeld, match="restart"):
        group.claim("c", RIGHT)
    machine.wait(LIFE_S - 0.001)
    group.renew("keeper")
    assert waiting.answer is None
    machine.wait(0.001)
    assert isinstance(waiting.answer, Granted)
    group.claim("c", RIGHT)


def test_after_a_restart_claimants_are_refused_until_they_ask_again(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.finish("a", 0, 3)
    machine.restart()
    assert group.finish("a", 1) == ()
    assert group.renew("a") == Renewed(())
    assert isinstance(machine.pull("a", group.epoch).answer, StaleEpoch)
    waiting = group.wait_for_claim("a", LEFT, ask=2)
    machine.wait(LIFE_S - 0.001)
    group.renew("keeper")
    machine.wait(0.001)
    assert isinstance(waiting.answer, Granted)
    assert (waiting.answer.offset, list(BitMap64.deserialize(waiting.answer.finished))) == (1, [3])
    assert group.finish("a", 1, ask=2) == (0,)
    assert group.place == (2, [3])


def test_after_a_restart_a_lease_from_then_has_claims_at_once(machine: Machine, group: Group) -> None:
    machine.restart()
    machine.join("keeper")
    group.epoch = machine.acquire("keeper", ask=2).epoch
    group.claim("a", LEFT)


def test_after_a_restart_what_the_keeper_says_at_its_release_takes_nothing_back(machine: Machine, group: Group) -> None:
    machine.append(8)
    group.claim("a", LEFT)
    group.finish("a", 0, 3)
    machine.restart()
    machine.wait(LIFE_S)
    group.hand_back()
    granted = machine.acquire("b")
    assert (granted.offset, list(BitMap64.deserialize(granted.finished))) == (1, [3])


def test_a_lease_is_not_given_back_while_claims_from_before_a_restart_may_live(machine: Machine, group: Group) -> None:
    """The node has forgotten the claims. A task that is cut off from the node starts handlers until the claim ends."""
    machine.append(8)
    group.claim("a", LEFT)
    machine.restart()
    with pytest.raises(LeaseHeld):
        group.hand_back()
    with pytest.raises(LeaseHeld):
        machine.ask(Acquire("orders", "billing", 0, "keeper", 99, keeps=True))
    machine.ask(Leave("orders", "billing", "keeper"))
    with pytest.raises(LeaseHeld):
        machine.acquire("b")
    machine.wait(LIFE_S)
    assert machine.acquire("b").epoch > group.epoch


def test_a_claim_needs_slots_and_a_name_of_its_own(machine: Machine, group: Group) -> None:
    with pytest.raises(InvalidInput, match="at least one slot"):
        group.claim("a", SlotSet(0).to_bytes())
    with pytest.raises(InvalidInput, match="other than the name of the lease's owner"):
        group.claim("keeper", LEFT)


def test_a_lease_ends_with_the_process_of_its_owner_and_of_the_node(embedded: Machine) -> None:
    group = Group(embedded)
    group.claim("a", LEFT)
    embedded.restart()
    assert embedded.acquire("b").epoch > group.epoch


def test_a_lease_does_not_end_with_that_process_if_somebody_elsewhere_works_under_it(embedded: Machine) -> None:
    """The claimant does not know of the restart, and may start handlers until the claim ends."""
    group = Group(embedded)
    answers: list[object] = []
    embedded.node.submit_remote(group.command("a", LEFT, 1), answers.append)
    assert isinstance(answers[0], Granted)
    embedded.restart()
    with pytest.raises(LeaseHeld):
        embedded.acquire("b")
    assert not any(isinstance(event, LeaseEnded) for event in embedded.recorder.snapshot())
    embedded.wait(LIFE_S)
    assert embedded.acquire("b").epoch > group.epoch


def test_a_claim_from_elsewhere_that_is_refused_changes_nothing_about_the_lease(embedded: Machine) -> None:
    group = Group(embedded)
    answers: list[object] = []
    for command in (group.command("a", LEFT, 1, group.epoch + 1), group.command("a", LEFT, 1, owner="somebody")):
        embedded.node.submit_remote(command, answers.append)
    assert [type(answer) for answer in answers] == [StaleEpoch, StaleEpoch]
    embedded.restart()
    embedded.acquire("b")


# Taking over


def test_a_group_tells_who_has_taken_it_over(machine: Machine) -> None:
    machine.join("a")
    taken = machine.ask(Heartbeat("orders", "billing", "taker", "key", "first", takes_over=True))
    assert isinstance(taken, Assignment)
    assert taken.partitions == (0, 1)
    answer = machine.ask(DescribeGroup("orders", "billing"))
    assert isinstance(answer, GroupDescription)
    assert answer.taken_over_by == "taker"
    machine.ask(Leave("orders", "billing", "taker"))
    answer = machine.ask(DescribeGroup("orders", "billing"))
    assert isinstance(answer, GroupDescription)
    assert answer.taken_over_by is None


def test_members_hear_at_once_that_somebody_takes_over_and_hands_back(machine: Machine) -> None:
    joined = machine.join("a")
    assert isinstance(joined, Assignment)
    first = listen(machine, joined.generation)
    assert first.answer is None
    machine.ask(Heartbeat("orders", "billing", "taker", "key", "first", takes_over=True))
    taken = first.answers[0]
    assert isinstance(taken, Assignment)
    assert taken.partitions == ()
    second = listen(machine, taken.generation)
    machine.ask(Leave("orders", "billing", "taker"))
    machine.run()
    handed_back = second.answers[0]
    assert isinstance(handed_back, Assignment)
    assert handed_back.partitions == (0, 1)


def listen(machine: Machine, generation: int) -> Waiting:
    return machine.submit(Heartbeat("orders", "billing", "a", "key", "first", generation, 3.0))
