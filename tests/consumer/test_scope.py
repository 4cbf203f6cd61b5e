"""The scope of a consumer: bounds, holding leases for other members, and working under the lease of a holder."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest
from pyroaring import BitMap64

from inturn.consumer.claimant import ClaimedPart, ClaimingNode
from inturn.consumer.core import CLAIM_RENEW_S, ConsumerCore
from inturn.consumer.options import EVERYTHING, Scope
from inturn.consumer.partition_lease import Stage
from inturn.model.batch import StoredBatch, chosen, decode
from inturn.model.errors import ConnectionLost, InturnError, LeaseHeld, LogDamaged, StaleEpoch
from inturn.model.message import Origin, Outgoing
from inturn.model.routing import ALL_SLOTS, SlotSet, slot_of
from inturn.model.settings import Order
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Assignment,
    Claim,
    Command,
    Commit,
    Done,
    Granted,
    Heartbeat,
    KeyRequest,
    Leave,
    Lot,
    LotContent,
    ParkedMessage,
    Pull,
    Pulled,
    ReadLot,
    Release,
    Renew,
    Renewed,
    Reply,
)
from tests.consumer.fake_node import LEASE, SUBJECT, Bench, batch_of, damaged


def bench_with(scope: Scope, order: Order = Order.KEY, **settings: object) -> Bench:
    made = Bench(order=order, **settings)  # type: ignore[arg-type]
    made.core = ConsumerCore("orders", "billing", "m1", order, "first", made.settings, LEASE, scope=scope)
    return made


def test_the_usual_duty_is_everything() -> None:
    assert Scope() == EVERYTHING
    assert (EVERYTHING.until, EVERYTHING.keeps_only, EVERYTHING.takes_over) == ({}, False, False)


# Bounds


@pytest.mark.parametrize("cuts", [[6], [1, 5], [3, 3], [1, 1, 1, 1, 1, 1], [2, 3, 1]])
@pytest.mark.parametrize("until", range(8))
def test_nothing_at_or_above_the_bound_is_handled_or_said_to_be_finished(cuts: Sequence[int], until: int) -> None:
    bench = bench_with(Scope(until={0: until}))
    for count in cuts:
        bench.store(0, count)
    bench.settle()
    below = min(until, 6)
    assert bench.handle_all() == list(range(below))
    bench.live(1.0)
    assert bench.committed() == below
    assert bench.node.partitions[0].finished == b""
    assert bench.core.is_through() is (until <= 6)


def test_a_gap_reaches_up_to_the_bound_only() -> None:
    bench = bench_with(Scope(until={0: 10}))
    bench.logs[0] += [batch_of(0, 3), batch_of(20, 5)]
    bench.settle()
    assert bench.handle_all() == [0, 1, 2]
    bench.live(1.0)
    assert bench.committed() == 10
    assert bench.core.is_through()


def test_a_gap_below_the_bound_is_gone_over() -> None:
    bench = bench_with(Scope(until={0: 22}))
    bench.logs[0] += [batch_of(0, 3), batch_of(20, 5)]
    bench.settle()
    assert bench.handle_all() == [0, 1, 2, 20, 21]
    bench.live(1.0)
    assert bench.committed() == 22


def test_nothing_is_pulled_when_all_that_is_to_be_handled_is() -> None:
    bench = bench_with(Scope(until={0: 4}))
    bench.store(0, 6)
    bench.settle()
    bench.handle_all()
    pulls = len(bench.sent(Pull))
    bench.live(130.0, 1.0)  # longer than `idle_s_max`
    assert len(bench.sent(Pull)) == pulls
    assert bench.state.lease.stage is Stage.ACTIVE
    assert bench.sent(Renew)


def test_it_is_not_through_while_a_handler_runs_or_a_message_is_to_be_repeated() -> None:
    bench = bench_with(Scope(until={0: 2}))
    bench.store(0, 2)
    assert not bench.core.is_through()
    bench.settle()
    job = bench.job()
    assert job.next() is not None
    assert not bench.core.is_through()
    job.end()
    bench.handle_all()
    assert bench.core.is_through()


def test_damage_behind_the_bound_does_not_matter() -> None:
    bench = bench_with(Scope(until={0: 3}))
    bench.logs[0] += [batch_of(0, 3), damaged(batch_of(3, 2))]
    bench.settle()
    assert bench.handle_all() == [0, 1, 2]
    assert bench.core.is_through()


def test_a_node_that_is_away_for_a_moment_holds_nothing_up() -> None:
    """A consumer that is stuck gives up. Only problems that do not pass by themselves count."""
    bench = bench_with(Scope(until={0: 3}))
    bench.poll()
    bench.answer(bench.take_command(Heartbeat), Assignment(1, (0,), SUBJECT, 1e9))
    bench.poll()
    bench.answer(bench.take_command(Acquire), ConnectionLost("node", "it went away"))
    assert not bench.core.is_held_up
    bench.now_s += 1.0
    bench.poll()
    bench.answer(bench.take_command(Acquire), Granted(5, 0, LEASE.life_s))
    assert bench.state.lease.error is None
    bench.poll()
    bench.answer(bench.take_command(Pull), ConnectionLost("node", "it went away"))
    assert not bench.core.is_held_up
    bench.now_s += 1.0
    bench.poll()
    bench.answer(bench.take_command(Pull), LogDamaged("orders/0", 0, "a flipped byte"))
    assert bench.core.is_held_up


def test_it_is_not_through_before_a_lot_that_is_resumed_is_empty() -> None:
    """Although there is nothing to pull."""
    bench = bench_with(Scope(until={0: 0}))
    bench.poll()
    bench.answer(bench.take_command(Heartbeat), Assignment(1, (0,), SUBJECT, 1e9))
    bench.poll()
    request = KeyRequest(1, 0, b"a", "resume")
    lots = (Lot(b"a", "parked"),)
    granted = Granted(5, 0, LEASE.life_s, lots=lots, requests=(request,), request_mark=1, is_claim=True)
    bench.answer(bench.take_command(Acquire), granted)
    bench.poll()
    assert not bench.core.is_through()
    assert not bench.core.is_held_up, "what is asked for may be something to run"
    content = msgspec.msgpack.encode(Outgoing(b"x", b"a"))
    bench.answer(bench.take_command(ReadLot), LotContent((ParkedMessage(0, 0, content, 1),), True))
    job = bench.job()
    assert job.next() is not None
    assert not bench.core.is_through()
    job.end()
    bench.poll()
    assert bench.core.is_through()
    assert not bench.has(Pull)


def test_a_request_that_has_to_wait_keeps_it_from_being_through() -> None:
    bench = bench_with(Scope(until={0: 2}))
    bench.store(0, 2)
    bench.settle()
    bench.handle_all()
    assert bench.core.is_through()
    bench.state.progress.key_requests.append(KeyRequest(1, 0, b"a", "park"))
    assert not bench.core.is_through()
    bench.poll()
    assert bench.core.is_through()


def test_what_was_pulled_and_not_finished_is_known_after_the_end() -> None:
    bench = bench_with(Scope(until={0: 5}))
    bench.store(0, 5)
    bench.settle()
    job = bench.job()
    assert job.next() is not None
    bench.core.stop(bench.now_s)
    job.end()
    bench.settle()
    assert bench.core.is_stopped
    assert bench.core.left == {0: 4}


# Holding leases


def test_a_keeper_holds_and_renews_and_pulls_nothing() -> None:
    bench = bench_with(Scope(keeps_only=True))
    bench.store(0, 6)
    bench.live(300.0, 1.0)
    assert bench.state.lease.stage is Stage.ACTIVE
    assert bench.state.lease.epoch == 1
    assert not bench.sent(Pull)
    assert not bench.sent(Commit)
    assert len(bench.sent(Renew)) > 100


def test_a_keeper_says_whether_it_takes_over() -> None:
    for takes_over in (True, False):
        bench = bench_with(Scope(keeps_only=True, takes_over=takes_over))
        bench.settle()
        (beat,) = [one for one in bench.seen if isinstance(one, Heartbeat)][:1]
        assert beat.takes_over is takes_over


def test_what_a_keeper_says_at_its_release_is_older_than_all_that_others_committed() -> None:
    bench = bench_with(Scope(keeps_only=True))
    stored = bench.node.partitions[0]
    stored.offset, stored.finished = 3, BitMap64([5]).serialize()
    bench.settle()
    bench.core.stop(bench.now_s)
    for _ in range(5):
        bench.poll()
        release = bench.take_command(Release)
        assert isinstance(release, Release)
        assert release.progress == msgspec.structs.replace(
            release.progress, offset=3, number=0, finished=stored.finished, failed=(), lots=()
        )
        bench.answer(release, LeaseHeld("billing", "0", "a task"))
        assert not bench.sent(Leave)
        bench.wait(1.0)
    bench.settle()
    assert bench.core.is_stopped


# Claiming


class Told:
    """A node that records commands and gives the answers of the test."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.replies: list[Reply] = []

    def submit(self, command: Command, reply: Reply) -> None:
        self.commands.append(command)
        self.replies.append(reply)


LEFT = SlotSet.of(range(512))
HEARTBEAT = Heartbeat("orders", "billing", "m1", "key", "first", 0, 1.0, "sticky")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def claiming(told: Told) -> ClaimingNode:
    parts = {2: ClaimedPart("keeper", 7, LEFT), 0: ClaimedPart("keeper", 5, LEFT)}
    return ClaimingNode(told, SUBJECT, parts)


def answers_to(claiming: ClaimingNode, command: Command) -> list[Answer | InturnError]:
    answers: list[Answer | InturnError] = []
    claiming.submit(command, answers.append)
    return answers


def test_whoever_joins_is_given_its_parts_and_the_node_hears_nothing(claiming: ClaimingNode, told: Told) -> None:
    (answer,) = answers_to(claiming, HEARTBEAT)
    assert isinstance(answer, Assignment)
    assert answer.partitions == (0, 2)
    assert (answer.subject, answer.order, answer.assignment) == (SUBJECT, "key", "sticky")
    assert answer.authorised_s > 1e8
    again = msgspec.structs.replace(HEARTBEAT, generation=answer.generation)
    assert answers_to(claiming, again) == []
    assert told.commands == []


def test_acquiring_is_claiming(claiming: ClaimingNode, told: Told) -> None:
    answers = answers_to(claiming, Acquire("orders", "billing", 2, "m1", 9, 3.0))
    assert told.commands == [Claim("orders", "billing", 2, "keeper", 7, "m1", 9, LEFT.to_bytes(), 3.0)]
    granted = Granted(7, 0, 10.0, is_claim=True)
    told.replies[0](granted)
    assert answers == [granted]


def test_everything_else_goes_on_as_it_is(claiming: ClaimingNode, told: Told) -> None:
    commands = [
        Pull("orders", "billing", 0, "m1", 5, 0, 100),
        Renew("orders", "billing", "m1", ((0, 5),)),
        Commit("orders", "billing", "m1", ()),
        Leave("orders", "billing", "m1"),
    ]
    for command in commands:
        answers = answers_to(claiming, command)
        told.replies[-1](Done())
        assert answers == [Done()]
    assert told.commands == commands


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_batch_that_the_node_could_not_cut_is_cut_by_the_claimant(
    claiming: ClaimingNode, told: Told, compression: str | None
) -> None:
    """S3, C5: a server without zstd cannot decode a batch. Two claimants must not handle the same messages."""
    whole = keyed_batch(0, "abcdefgh", compression)
    cut = keyed_batch(8, "abcdefgh")
    answers = answers_to(claiming, Pull("orders", "billing", 2, "m1", 7, 0, 100, tags="*"))
    told.replies[0](Pulled((whole, chosen(cut, LEFT)), 16, 20, 3, b"bits"))
    (pulled,) = answers
    assert pulled == Pulled((chosen(whole, LEFT), chosen(cut, LEFT)), 16, 20, 3, b"bits")
    found = [one.key for batch in pulled.batches for one in decode(batch, Origin("orders", 2))]
    expected = [key for key in (b"%c" % code for code in b"abcdefgh") if slot_of(key) in LEFT]
    assert 0 < len(expected) < 8
    assert found == expected * 2


def test_a_claimant_of_all_slots_is_given_batches_as_they_are(told: Told) -> None:
    claiming = ClaimingNode(told, SUBJECT, {2: ClaimedPart("keeper", 7, ALL_SLOTS)})
    answers = answers_to(claiming, Pull("orders", "billing", 2, "m1", 7, 0, 100))
    pulled = Pulled((keyed_batch(0, "ab"),), 2, 2)
    told.replies[0](pulled)
    assert answers == [pulled]


def test_a_lease_that_is_over_is_not_assigned_any_more(claiming: ClaimingNode, told: Told) -> None:
    (joined,) = answers_to(claiming, HEARTBEAT)
    assert isinstance(joined, Assignment)
    waiting = answers_to(claiming, msgspec.structs.replace(HEARTBEAT, generation=joined.generation))
    answers = answers_to(claiming, Acquire("orders", "billing", 2, "m1", 9, 3.0))
    stale = StaleEpoch("billing", "2", 7, 8)
    told.replies[0](stale)
    assert answers == [stale]
    (news,) = waiting
    assert isinstance(news, Assignment)
    assert news.partitions == (0,)
    assert news.generation > joined.generation


def test_a_refusal_of_an_ask_before_the_last_one_says_nothing(claiming: ClaimingNode, told: Told) -> None:
    answers_to(claiming, Acquire("orders", "billing", 2, "m1", 1, 3.0))
    answers_to(claiming, Acquire("orders", "billing", 2, "m1", 2, 3.0))
    told.replies[0](StaleEpoch("billing", "2", 1, 2))
    (answer,) = answers_to(claiming, HEARTBEAT)
    assert isinstance(answer, Assignment)
    assert answer.partitions == (0, 2)


# Working under a claim


def keyed_batch(base_offset: int, keys: str, compression: str | None = None) -> StoredBatch:
    from inturn.model.batch import encode, parse_header, partition_seed

    messages = [Outgoing(b"x", key.encode()) for key in keys]
    packed = encode(messages, array("H", [slot_of(key.encode()) for key in keys]), compression=compression)
    seed = partition_seed("p")
    header = parse_header(packed.header(base_offset, 0, 0, seed), 0, seed)
    assert header is not None
    return StoredBatch(header, memoryview(packed.payload))


class Claimed:
    """A core with a claim of the slots of some keys."""

    def __init__(self, keys: str, until: int, finished: Sequence[int] = (), offset: int = 0) -> None:
        self.slots = SlotSet.of(slot_of(key.encode()) for key in keys)
        self.bench = bench_with(Scope(until={0: until}), commit_interval_s=0.2)
        self.bench.poll()
        beat = self.bench.take_command(Heartbeat)
        self.bench.answer(beat, Assignment(1, (0,), SUBJECT, 1e9))
        self.bench.poll()
        ask = self.bench.take_command(Acquire)
        told = BitMap64(finished).serialize() if finished else b""
        self.bench.answer(ask, Granted(5, offset, LEASE.life_s, told, is_claim=True))
        self.bench.poll()

    def pull(self, *batches: StoredBatch) -> None:
        pull = self.bench.take_command(Pull)
        picked = tuple(chosen(batch, self.slots) for batch in batches)
        last = batches[-1].header.next_offset
        self.bench.answer(pull, Pulled(picked, last, last))
        self.bench.poll()

    def commit(self) -> list[int]:
        """The finished offsets of the next commit. The commit gets no answer."""
        self.bench.wait(1.0)
        self.bench.poll()
        self.last = self.bench.take_command(Commit)
        assert isinstance(self.last, Commit)
        (progress,) = self.last.progress
        assert progress.ask == 1
        assert progress.offset == 0
        return list(BitMap64.deserialize(progress.finished)) if progress.finished else []


def committed(command: Command) -> object:
    from inturn.protocol.commands import Committed

    assert isinstance(command, Commit)
    return Committed(tuple(one.partition for one in command.progress))


def test_a_claimant_handles_its_own_and_tells_of_its_own_only() -> None:
    one = Claimed("ac", until=6)
    one.pull(keyed_batch(0, "abc"), keyed_batch(3, "bba"))
    assert sorted(one.bench.handle_all()) == [0, 2, 5]
    assert one.commit() == [0, 2, 5]
    one.bench.answer(one.last, committed(one.last))
    assert one.bench.core.is_through()


def test_to_pass_over_what_others_do_is_nothing_to_commit() -> None:
    one = Claimed("a", until=4)
    one.pull(keyed_batch(0, "bb"))
    one.pull(keyed_batch(2, "bb"))
    one.bench.wait(1.0)
    one.bench.poll()
    assert one.bench.core.is_through()
    assert not one.bench.sent(Commit)


def test_what_was_told_is_told_again_until_it_is_stored() -> None:
    one = Claimed("a", until=4)
    one.pull(keyed_batch(0, "aa"))
    one.bench.handle_all()
    assert one.commit() == [0, 1]
    one.pull(keyed_batch(2, "aa"))
    one.bench.handle_all()
    one.bench.wait(60.0)  # the consumer stops waiting for the answer
    one.bench.core.partitions[0].lease.ends_s = one.bench.now_s + 100.0
    assert one.commit() == [0, 1, 2, 3]
    one.bench.answer(one.last, committed(one.last))
    assert not one.bench.core.partitions[0].progress.has_changes


def test_what_is_stored_is_not_told_again() -> None:
    one = Claimed("a", until=4)
    one.pull(keyed_batch(0, "aa"))
    one.bench.handle_all()
    one.commit()
    one.bench.answer(one.last, committed(one.last))
    one.pull(keyed_batch(2, "ab"))
    one.bench.handle_all()
    assert one.commit() == [2]


def test_a_bound_cuts_a_batch_that_was_chosen_from() -> None:
    one = Claimed("a", until=2)
    one.pull(keyed_batch(0, "abaa"), keyed_batch(4, "aa"))
    assert one.bench.handle_all() == [0]
    assert one.bench.core.is_through()
    assert one.commit() == [0]


def test_what_others_had_finished_is_not_handled_again() -> None:
    one = Claimed("a", until=4, finished=[1, 2])
    one.pull(keyed_batch(0, "aaba"))
    assert one.bench.handle_all() == [0, 3]


def test_a_claimant_renews_often_so_that_it_hears_when_it_is_called_back() -> None:
    one = Claimed("a", until=4)
    assert one.bench.core._renew_s == min(CLAIM_RENEW_S, LEASE.renew_s, LEASE.life_s / 4)


def test_what_is_called_back_is_finished_committed_and_given_back() -> None:
    one = Claimed("a", until=4)
    one.pull(keyed_batch(0, "aaaa"))
    job = one.bench.job()
    assert job.next() is not None
    one.bench.wait(2.0)
    one.bench.poll()
    renew = one.bench.take_command(Renew)
    one.bench.answer(renew, Renewed((0,), (0,)))
    one.bench.poll()
    assert one.bench.state.lease.stage is Stage.DRAINING
    assert not one.bench.has(Release)
    job.end()
    one.bench.poll()
    release = one.bench.take_command(Release)
    assert isinstance(release, Release)
    assert list(BitMap64.deserialize(release.progress.finished)) == [0]
    one.bench.answer(release, Done())
    one.bench.poll()
    assert one.bench.core.is_through()
    assert not one.bench.has(Acquire)


def test_who_lost_its_claim_asks_again_and_says_by_which_ask_it_has_it() -> None:
    one = Claimed("a", until=4)
    one.pull(keyed_batch(0, "aaaa"))
    one.bench.wait(2.0)
    one.bench.poll()
    one.bench.answer(one.bench.take_command(Renew), Renewed(()))
    one.bench.poll()
    one.bench.poll()
    ask = one.bench.take_command(Acquire)
    assert isinstance(ask, Acquire)
    assert ask.ask == 2
    one.bench.answer(ask, Granted(5, 0, LEASE.life_s, is_claim=True))
    one.bench.poll()
    one.pull(keyed_batch(0, "aaaa"))
    one.bench.handle_all()
    one.bench.wait(1.0)
    one.bench.poll()
    commit = one.bench.take_command(Commit)
    assert isinstance(commit, Commit)
    assert [(progress.ask, progress.number) for progress in commit.progress] == [(2, 1)]


def test_an_owner_says_nothing_of_asks() -> None:
    bench = bench_with(EVERYTHING)
    bench.store(0, 1)
    bench.settle()
    bench.handle_all()
    bench.live(10.0)
    commits = [one for one in bench.sent(Commit) if isinstance(one, Commit)]
    assert {progress.ask for commit in commits for progress in commit.progress} == {0}
