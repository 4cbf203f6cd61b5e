"""S3: the lease holder of the driver: leases for tasks, by the rules of every consumer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroaring import BitMap64

from inturn import ConsumerSettings, LeaseSettings
from inturn.model.errors import GroupConflict, LeaseHeld, StaleEpoch
from inturn.model.routing import ALL_SLOTS
from inturn.protocol.commands import Claim, Commit, Committed, Done, Failure, Granted, Progress, Release, Renew, Renewed
from inturn.protocol.request import ask
from inturn.spark.ordered.lease_holder import LeaseHolder
from tests.contract.bed import STEADY_LEASE, is_renewed
from tests.spark.judged import GROUP, SUBJECT, Judged, judging
from tests.spark.noting import Noting
from tests.spark.waiting import wait_until

LEASE = LeaseSettings(life_s=1.5, renew_s=0.2, margin_s=0.1)
BOTH = {0, 1}


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    with judging(tmp_path, lease=LEASE) as opened:
        opened.make_group()
        yield opened


def held(judged: Judged, *, takes_over: bool = True) -> LeaseHolder:
    settings = ConsumerSettings(heartbeat_s=0.2, commit_interval_s=0.05)
    return LeaseHolder(judged.mq, SUBJECT, GROUP, takes_over=takes_over, settings=settings)


def test_all_partitions_are_taken_over_and_given_back(judged: Judged) -> None:
    with judged.online(Noting(judged.folder)) as online:
        wait_until(lambda: online.leases().keys() == BOTH, "the online consumer has both")
        with held(judged) as holder:
            epochs = holder.wait_for(BOTH, 40.0)
            assert epochs.keys() == BOTH
            assert online.leases() == {}
            judged.send(20)
            described = judged.mq.group(SUBJECT, GROUP).describe()
            assert described.taken_over_by == holder.owner
            assert {one.owner for one in described.partitions} == {holder.owner}
            assert judged.lag == 20  # nothing is pulled
        wait_until(lambda: judged.lag == 0, "the online consumer goes on")
        assert all(online.leases()[index].epoch > epoch for index, epoch in epochs.items())
    judged.judge()


def test_whoever_does_not_take_over_has_its_share(judged: Judged) -> None:
    with judged.online(Noting(judged.folder)) as online, held(judged, takes_over=False) as holder:
        wait_until(lambda: len(holder.epochs()) == 1 and len(online.leases()) == 1, "each has one")


def test_leases_live_on_as_long_as_they_are_held(tmp_path: Path) -> None:
    with judging(tmp_path, lease=STEADY_LEASE) as judged:
        judged.make_group()
        with held(judged) as holder:
            before = holder.wait_for(BOTH, 40.0)
            for partition in BOTH:
                is_renewed(judged.mq, SUBJECT, GROUP, partition)
            assert holder.epochs() == before


def test_who_still_has_a_partition_is_named(judged: Judged) -> None:
    stuck = Noting(judged.folder, waits=True)
    with judged.online(stuck):
        judged.send(20)
        wait_until(lambda: judged.noted.starts, "a handler runs, and does not end")
        with held(judged) as holder, pytest.raises(LeaseHeld, match=r"online-\w+"):
            holder.wait_for(BOTH, 0.5)
        stuck.open()
        wait_until(lambda: judged.lag == 0, "the online consumer goes on")


def test_one_at_a_time_takes_over(judged: Judged) -> None:
    with held(judged) as first, held(judged) as second:
        first.wait_for(BOTH, 40.0)
        with pytest.raises(GroupConflict, match="has taken it over already"):
            second.wait_for(BOTH, 40.0)
        assert first.epochs().keys() == BOTH


def test_what_is_done_can_be_committed_by_the_holder(judged: Judged) -> None:
    judged.send(20)
    with held(judged) as holder:
        with pytest.raises(StaleEpoch):
            holder.commit({7: 1}, {7: 1})
        epochs = holder.wait_for(BOTH, 40.0)
        holder.commit({0: 1, 1: 2}, epochs)
        holder.commit({0: 3}, epochs)
        with pytest.raises(StaleEpoch):
            holder.commit({0: 9, 1: 4}, {**epochs, 0: epochs[0] - 1})
    described = judged.mq.group(SUBJECT, GROUP).describe()
    assert [one.committed for one in described.partitions] == [3, 4]


def test_what_is_finished_above_stays_so_and_failures_below_are_over(judged: Judged) -> None:
    judged.send(20)
    with held(judged) as former:
        epoch = former.wait_for(BOTH, 40.0)[0]
        failed = tuple(Failure(offset, b"key", 3, "no") for offset in (1, 7))
        done = Progress(0, epoch, 1, 1, BitMap64([2, 3, 5]).serialize(), failed)
        ask(judged.mq.node, Commit(SUBJECT, GROUP, former.owner, (done,)), Committed)
    with held(judged) as holder:
        epochs = holder.wait_for(BOTH, 40.0)
        place = holder.positions()[0]
        assert place.offset == 1
        assert list(BitMap64.deserialize(place.done_below(4))) == [2, 3]
        assert place.done_below(2) == b""
        holder.commit({0: 2}, epochs)
        assert place.offset == 4, "2 and 3 are done as well"
        described = judged.mq.group(SUBJECT, GROUP).describe().partitions[0]
        assert (described.committed, described.finished_count) == (4, 1)
        assert [one.offset for one in judged.mq.group(SUBJECT, GROUP).keys()] == [7]
        holder.commit({0: 8}, epochs)
        described = judged.mq.group(SUBJECT, GROUP).describe().partitions[0]
        assert (described.committed, described.finished_count) == (8, 0)
        assert judged.mq.group(SUBJECT, GROUP).keys() == []


def test_a_lease_under_which_rows_are_read_goes_to_others_after_the_commit(judged: Judged) -> None:
    judged.send(20)
    with held(judged, takes_over=False) as holder:
        epochs = holder.wait_for(BOTH, 40.0)
        holder.claim(epochs)
        with judged.online(Noting(judged.folder)) as online:
            wait_until(lambda: len(holder.epochs()) == 1, "one of them is wanted back")
            assert online.leases() == {}
            assert not judged.noted.starts
            holder.commit({0: 10, 1: 10}, epochs)
            wait_until(lambda: len(online.leases()) == 1, "it comes")
    described = judged.mq.group(SUBJECT, GROUP).describe()
    assert [one.committed for one in described.partitions] == [10, 10]


def test_a_lease_is_kept_for_rows_no_longer_than_its_life(judged: Judged) -> None:
    with held(judged, takes_over=False) as holder:
        holder.claim(holder.wait_for(BOTH, 40.0))
        with judged.online(Noting(judged.folder)) as online:
            wait_until(lambda: len(online.leases()) == 1, "it comes")


def test_rows_that_were_read_do_not_keep_a_holder_from_going(judged: Judged) -> None:
    holder = held(judged)
    holder.start()
    holder.claim(holder.wait_for(BOTH, 40.0))
    began_s = time.monotonic()
    assert holder.stop()
    assert time.monotonic() - began_s < LEASE.life_s


def test_whoever_stands_back_is_followed_by_the_next_who_takes_over(judged: Judged) -> None:
    first, second = held(judged), held(judged)
    first.start()
    epochs = first.wait_for(BOTH, 40.0)
    claim = Claim(SUBJECT, GROUP, 0, first.owner, epochs[0], "task", 1, ALL_SLOTS.to_bytes(), 0.0)
    first.leave_to_tasks()
    ask(judged.mq.node, claim, Granted)  # the holder's tasks start later
    with second:

        def renewed() -> bool:
            return ask(judged.mq.node, Renew(SUBJECT, GROUP, "task", ((0, epochs[0]),)), Renewed).partitions == (0,)

        wait_until(lambda: renewed() and 1 in second.epochs(), "what nobody works on is free when its life is over")
        assert 0 not in second.epochs()
        ask(judged.mq.node, Release(SUBJECT, GROUP, "task", Progress(0, epochs[0], 0, 1, ask=1)), Done)
        assert second.wait_for(BOTH, 40.0)[0] > epochs[0]


def test_a_holder_that_is_gone_without_a_word_is_waited_for_no_longer_than_its_lease(judged: Judged) -> None:
    judged.send(20)
    holder = held(judged)
    holder.start()
    holder.wait_for(BOTH, 40.0)
    holder.abandon()
    with judged.online(Noting(judged.folder)):
        wait_until(lambda: judged.lag == 0, "the online consumer goes on")
    judged.judge()


def test_whoever_ends_with_what_is_there_now_waits_for_all_that_is_assigned_to_it(judged: Judged) -> None:
    """Leases of a dead member expire one at a time; the first free lease does not prove that there is no work."""
    gone = held(judged)
    gone.start()
    epochs = gone.wait_for(BOTH, 40.0)
    ask(judged.mq.node, Claim(SUBJECT, GROUP, 0, gone.owner, epochs[0], "task", 1, ALL_SLOTS.to_bytes(), 0.0), Granted)
    gone.abandon()
    until_s = time.monotonic() + 1.5 * LEASE.life_s
    while time.monotonic() < until_s:
        ask(judged.mq.node, Renew(SUBJECT, GROUP, "task", ((0, epochs[0]),)), Renewed)
        time.sleep(LEASE.life_s / 5)
    with held(judged) as holder:
        assert holder.wait_at_start(is_bounded=True).keys() == BOTH


def test_a_lease_is_kept_until_those_who_work_under_it_are_done(judged: Judged) -> None:
    """The claim keeps the lease beyond the lease's life. The release does not take a further life."""
    judged.send(20)
    with held(judged) as holder:
        epoch = holder.wait_for(BOTH, 40.0)[0]
        claim = Claim(SUBJECT, GROUP, 0, holder.owner, epoch, "task", 1, ALL_SLOTS.to_bytes(), 0.0)
        ask(judged.mq.node, claim, Granted)
        is_stopped = threading.Event()

        def stop() -> None:
            holder.stop(None)
            is_stopped.set()

        threading.Thread(target=stop, daemon=True).start()
        until_s = time.monotonic() + 1.7 * LEASE.life_s
        while time.monotonic() < until_s:
            renewed = ask(judged.mq.node, Renew(SUBJECT, GROUP, "task", ((0, epoch),)), Renewed)
            assert renewed.partitions == (0,)
            assert not is_stopped.wait(0.2)
        assert [one.owner for one in judged.mq.group(SUBJECT, GROUP).describe().partitions] == [holder.owner, None]
        ask(judged.mq.node, Release(SUBJECT, GROUP, "task", Progress(0, epoch, 0, 1, ask=1)), Done)
        assert is_stopped.wait(40.0)
    assert [one.owner for one in judged.mq.group(SUBJECT, GROUP).describe().partitions] == [None, None]
