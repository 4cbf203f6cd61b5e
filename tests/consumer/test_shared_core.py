"""C12: the core of a shared consumer. The test is the node and the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from inturn.consumer.decoder import decode_fetch
from inturn.consumer.member_core import DAMAGE_RETRY_S
from inturn.consumer.outcome import Next, Outcome
from inturn.consumer.shared_core import SharedCore
from inturn.model.errors import AccessDenied, ConnectionLost, GroupConflict, InturnError, ReceiptExpired
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings, RetryDelays, Strategy
from inturn.protocol.commands import (
    Acknowledge,
    Acknowledged,
    Assignment,
    Command,
    Delivery,
    Done,
    Fetch,
    Fetched,
    Heartbeat,
    Leave,
    Move,
    PartitionReceipts,
    Pulled,
    Receipt,
)
from tests.consumer.fake_node import LEASE, SUBJECT, batch_of, damaged

_Wanted = TypeVar("_Wanted", bound=Command)
RAISED = Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, RuntimeError("no"))
DENIED = AccessDenied("shop", "consume on subject 'orders' for group 'g'", "ask for a rule")
SUSPENDED = Outcome(Next.REPEAT, ResultKind.FAILED, 3.0)


class Bench:
    def __init__(self, **settings: Any) -> None:
        chosen = {"concurrency": 2, "visibility_s": 10.0, "pull_wait_s": 5.0, **settings}
        self.core = SharedCore("orders", "g", "ann", "first", ConsumerSettings(**chosen), LEASE)
        self.now_s = 100.0
        self.sent: list[Command] = []
        self.poll()
        self.answer(self.only(Heartbeat), Assignment(1, (0,), SUBJECT, 10.0))
        self.poll()

    def poll(self) -> list[Command]:
        commands = self.core.poll(self.now_s)
        self.sent += commands
        return commands

    def only(self, kind: type[_Wanted]) -> _Wanted:
        """The only command of the kind that waits for an answer."""
        found = {id(one): one for one in self.sent if isinstance(one, kind) and self.core.awaits(one)}
        assert len(found) == 1, found
        return next(iter(found.values()))

    def has(self, kind: type[Command]) -> bool:
        return any(isinstance(command, kind) and self.core.awaits(command) for command in self.sent)

    def answer(self, command: Command, answer: object) -> None:
        self.core.answered(command, answer, self.now_s)

    def wait(self, seconds: float) -> list[Command]:
        self.now_s += seconds
        return self.poll()

    def deliver(
        self, *offsets: int, tries: int = 1, epoch: int = 1, waited_s: float = 0.0, fetch: Fetch | None = None
    ) -> Fetch:
        """Answer the fetch with the given messages.

        The number of a receipt is the offset + 1000 × the number of deliveries.
        """
        fetch = self.only(Fetch) if fetch is None else fetch
        batches = (batch_of(0, max(offsets) + 1),) if offsets else ()
        deliveries = tuple(Delivery(offset, offset + 1000 * tries, tries) for offset in offsets)
        fetched = Fetched(epoch, deliveries, Pulled(batches, 50, 60), waited_s)
        self.answer(fetch, decode_fetch(fetched, "orders", 0))
        return fetch

    def work(self, outcome: Callable[[Message], Outcome | None] = lambda message: None) -> list[tuple[int, int]]:
        """Run all ready messages. Return offsets and attempts."""
        done = []
        while (run := self.core.take(self.now_s)) is not None:
            for given in run.calls(lambda: self.now_s, self.core._settings.batch):
                done += [(message.offset, run.context.attempt) for message in given]
                failed = outcome(given[0])
                if failed is not None:
                    run.settle(failed)
            self.core.finish(run, self.now_s)
        return done

    def acknowledged(self, seconds: float = 0.2) -> Acknowledge:
        self.wait(seconds)
        command = self.only(Acknowledge)
        self.answer(command, Acknowledged())
        return command


def done(*offsets: int, tries: int = 1, epoch: int = 1) -> tuple[PartitionReceipts, ...]:
    return (PartitionReceipts(0, epoch, tuple(Receipt(offset, offset + 1000 * tries) for offset in offsets)),)


def returned(acknowledge: Acknowledge) -> list[tuple[int, float, str | None]]:
    return [(one.offset, one.delay_s, one.error) for part in acknowledge.receipts for one in part.returned]


def test_it_fetches_handles_and_acknowledges() -> None:
    bench = Bench()
    fetch = bench.deliver(3, 4)
    assert (fetch.ask, fetch.answered, fetch.max_count, fetch.visibility_s) == (1, 0, 2, 10.0)
    assert bench.work() == [(3, 1), (4, 1)]
    assert bench.acknowledged().receipts == done(3, 4)
    assert (bench.only(Fetch).ask, bench.only(Fetch).answered) == (2, 1)


def test_a_fetch_without_an_answer_is_asked_anew_and_its_late_answer_counts_for_nothing() -> None:
    bench = Bench(answer_timeout_s=2.0)
    lost = bench.only(Fetch)
    bench.wait(7.1)
    assert (bench.only(Fetch).ask, bench.only(Fetch).answered) == (2, 0)
    bench.deliver(0, fetch=lost)
    assert bench.work() == []
    bench.deliver(0, tries=2)
    assert bench.work() == [(0, 2)]


def test_nothing_is_started_after_its_receipt_is_over() -> None:
    bench = Bench()
    bench.deliver(0, 1)
    bench.now_s += 10.0 - LEASE.margin_s
    assert bench.work() == []
    bench.wait(1.0)
    assert not bench.has(Acknowledge)
    assert bench.core.waiting_count == 0


def test_the_time_that_a_fetch_had_waited_at_the_node_is_not_lost() -> None:
    bench = Bench()
    bench.now_s += 5.0
    bench.deliver(0, waited_s=5.0)
    bench.now_s += 8.0
    assert bench.work() == [(0, 1)]


def test_an_acknowledgement_is_said_word_for_word_until_it_is_answered() -> None:
    bench = Bench(answer_timeout_s=1.0)
    bench.deliver(0, 1)
    bench.work()
    bench.wait(0.2)
    first = bench.only(Acknowledge)
    bench.deliver(5)
    bench.work()
    bench.answer(first, ConnectionLost("there", "gone"))
    bench.wait(0.1)
    assert not bench.has(Acknowledge)
    bench.wait(0.2)
    assert bench.only(Acknowledge) == first
    bench.wait(1.1)
    assert bench.only(Acknowledge) == first, "no answer in time"
    bench.answer(bench.only(Acknowledge), Acknowledged())
    later = bench.acknowledged()
    assert (later.number, later.receipts) == (first.number + 1, done(5))


def test_what_cannot_be_said_before_all_receipts_are_over_is_given_up() -> None:
    bench = Bench()
    bench.deliver(0)
    bench.work()
    bench.wait(0.2)
    bench.now_s += 20.0
    bench.poll()
    bench.answer(bench.only(Acknowledge), ConnectionLost("there", "gone"))
    bench.core.stop(bench.now_s)
    bench.wait(0.3)
    assert bench.has(Leave)


def test_what_raises_goes_back_with_a_growing_delay_and_what_is_suspended_with_its_own() -> None:
    bench = Bench(backoff_min_s=0.5)
    bench.deliver(0, 1)
    bench.work(lambda message: RAISED if message.offset == 0 else SUSPENDED)
    assert returned(bench.acknowledged(0.0)) == [(0, 0.5, "RuntimeError: no"), (1, 3.0, "failed")]
    bench.deliver(0, tries=3)
    bench.work(lambda message: RAISED)
    assert returned(bench.acknowledged(0.0)) == [(0, 2.0, "RuntimeError: no")]


def test_under_best_effort_what_raises_is_moved_and_then_acknowledged() -> None:
    bench = Bench(strategy=Strategy.BEST_EFFORT, retry=RetryDelays((1.0, 5.0, 9.0), 1))
    bench.deliver(0, 1)
    bench.work(lambda message: RAISED if message.offset == 1 else None)
    bench.wait(0.2)
    move = bench.only(Move)
    assert (move.to_subject, move.to_partition, move.receipts) == ("%retry%g%orders", 1, (Receipt(1, 1001),))
    bench.answer(bench.only(Acknowledge), Acknowledged())
    bench.answer(move, Done())
    assert bench.acknowledged().receipts == done(1)


def test_a_move_whose_receipts_are_over_goes_on_with_the_others() -> None:
    bench = Bench(strategy=Strategy.BEST_EFFORT, concurrency=4)
    bench.deliver(0, 1, 2)
    bench.work(lambda message: RAISED)
    bench.poll()
    bench.answer(bench.only(Move), ReceiptExpired("g", "0", (1,)))
    bench.poll()
    move = bench.only(Move)
    assert [receipt.offset for receipt in move.receipts] == [0, 2]
    assert bench.core.refused == [(0, 1)]
    bench.answer(move, Done())
    assert bench.acknowledged().receipts == done(0, 2)
    assert bench.core.waiting_count == 0


def test_a_move_that_fails_is_tried_again() -> None:
    bench = Bench(strategy=Strategy.BEST_EFFORT)
    bench.deliver(0)
    bench.work(lambda message: RAISED)
    bench.poll()
    move = bench.only(Move)
    bench.answer(move, ConnectionLost("there", "gone"))
    bench.wait(0.3)
    assert bench.only(Move) == move


def test_after_max_attempts_it_goes_to_the_dead_letters() -> None:
    bench = Bench(max_attempts=3)
    bench.deliver(0, tries=3)
    assert bench.work(lambda message: RAISED) == [(0, 3)]
    bench.poll()
    assert bench.only(Move).to_subject == "%dead%g%orders"


def test_what_was_given_out_too_often_is_given_up_unseen() -> None:
    bench = Bench(max_attempts=3)
    bench.deliver(0, tries=4)
    assert bench.work() == []
    bench.poll()
    assert bench.only(Move).to_subject == "%dead%g%orders"


def test_a_stop_gives_back_what_was_not_begun_and_waits_for_what_runs() -> None:
    bench = Bench(concurrency=1)
    bench.deliver(0, 1)
    run = bench.core.take(bench.now_s)
    assert run is not None
    calls = run.calls(lambda: bench.now_s)
    assert [message.offset for message in next(calls)] == [0]
    bench.core.stop(bench.now_s)
    assert returned(bench.acknowledged(0.0)) == [(1, 0.0, None)]
    bench.poll()
    assert not bench.has(Leave)
    assert next(calls, None) is None
    bench.core.finish(run, bench.now_s)
    assert bench.acknowledged(0.0).receipts == done(0)
    bench.poll()
    bench.answer(bench.only(Leave), Done())
    assert bench.core.is_stopped


def test_what_arrives_after_a_stop_is_given_back() -> None:
    bench = Bench()
    fetch = bench.only(Fetch)
    bench.core.stop(bench.now_s)
    bench.deliver(0, fetch=fetch)
    assert bench.work() == []
    assert returned(bench.acknowledged(0.0)) == [(0, 0.0, None)]


def test_a_server_that_is_about_to_stop_gets_back_what_was_not_begun() -> None:
    bench = Bench()
    bench.deliver(0, 1)
    bench.wait(0.0)
    bench.answer(bench.only(Heartbeat), Assignment(2, (), SUBJECT, 10.0))
    assert bench.work() == []
    assert returned(bench.acknowledged(0.0)) == [(0, 0.0, None), (1, 0.0, None)]


def test_what_is_damaged_is_given_back_and_told_and_the_rest_is_handled() -> None:
    """C12: messages behind the damage are handled, too, although every delivery contains the damage."""
    bench = Bench(concurrency=8)
    batches = (batch_of(0, 2), damaged(batch_of(2, 2)), batch_of(4, 1), damaged(batch_of(5, 1)), batch_of(6, 2))
    deliveries = tuple(Delivery(offset, offset + 1000) for offset in range(8))
    fetched = Fetched(1, deliveries, Pulled(batches, 8, 8))
    bench.answer(bench.only(Fetch), decode_fetch(fetched, "orders", 0))
    assert [offset for offset, _ in bench.work()] == [0, 1, 4, 6, 7]
    assert [one.offset for one in bench.core.damage] == [2, 5]
    assert sorted(returned(bench.acknowledged(0.0))) == [(offset, DAMAGE_RETRY_S, None) for offset in (2, 3, 5)]


def test_what_came_beside_the_deliveries_is_not_handled() -> None:
    bench = Bench()
    bench.deliver(2)
    assert bench.work() == [(2, 1)]


def test_a_message_that_comes_again_while_it_still_runs_is_another_one() -> None:
    bench = Bench(concurrency=2)
    bench.deliver(0)
    slow = bench.core.take(bench.now_s)
    assert slow is not None
    calls = slow.calls(lambda: bench.now_s)
    next(calls)
    bench.wait(10.0)
    bench.deliver(0, tries=2, epoch=1)
    assert bench.work() == [(0, 2)]
    assert bench.acknowledged().receipts == done(0, tries=2)
    assert next(calls, None) is None
    bench.core.finish(slow, bench.now_s)
    command = bench.wait(0.2)
    late = next(one for one in command if isinstance(one, Acknowledge))
    assert late.receipts == done(0), "the node decides whether that is too late"
    bench.answer(late, Acknowledged(((0, 0),)))
    assert bench.core.refused == [(0, 0)]
    assert bench.core.waiting_count == 0


def test_it_asks_for_as_many_as_it_can_handle_soon() -> None:
    bench = Bench(concurrency=2)
    assert bench.only(Fetch).max_count == 2, "nothing is known yet"
    bench.deliver(0, 1)
    run = bench.core.take(bench.now_s)
    assert run is not None
    for _ in run.calls(lambda: bench.now_s):
        bench.now_s += 0.01
    bench.core.finish(run, bench.now_s)
    bench.work()
    bench.poll()
    assert 50 < bench.only(Fetch).max_count < 200, "about half a second of two workers that take 10 ms"


def test_partitions_that_come_later_are_fetched_from() -> None:
    bench = Bench()
    bench.wait(0.0)
    bench.answer(bench.only(Heartbeat), Assignment(2, (0, 1, 2), SUBJECT, 10.0))
    bench.poll()
    assert sorted(one.partition for one in bench.sent if isinstance(one, Fetch)) == [0, 1, 2]


def test_a_loop_that_ends_is_no_failure_of_its_messages() -> None:
    bench = Bench(max_attempts=1)
    bench.deliver(0)
    bench.work(lambda message: Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, asyncio.CancelledError()))
    assert returned(bench.acknowledged(0.0)) == [(0, 0.0, None)]


@pytest.mark.parametrize("error", [GroupConflict("g", "no"), DENIED, ConnectionLost("there", "gone")])
def test_a_heartbeat_that_is_refused_ends_it_and_one_that_is_lost_does_not(error: InturnError) -> None:
    bench = Bench()
    bench.wait(0.0)
    bench.answer(bench.only(Heartbeat), error)
    assert (bench.core.error is error) == (not error.retriable)


def test_a_fetch_that_is_not_allowed_ends_it() -> None:
    bench = Bench()
    bench.answer(bench.only(Fetch), DENIED)
    assert bench.core.error is DENIED


def test_an_acknowledgement_that_is_not_allowed_ends_it() -> None:
    bench = Bench()
    bench.deliver(0)
    bench.work()
    bench.wait(0.2)
    bench.answer(bench.only(Acknowledge), DENIED)
    assert bench.core.error is DENIED


def test_a_stop_does_not_wait_for_a_leave_that_is_not_allowed() -> None:
    bench = Bench()
    bench.core.stop(bench.now_s)
    bench.poll()
    bench.answer(bench.only(Leave), DENIED)
    assert bench.core.is_stopped
    assert bench.core.error is None


def test_lists_are_given_back_whole_with_the_error_for_each() -> None:
    bench = Bench(batch=2, concurrency=4)
    bench.deliver(0, 1, 2)
    assert [offset for offset, _ in bench.work(lambda message: RAISED if message.offset == 0 else None)] == [0, 1, 2]
    acknowledge = bench.acknowledged(0.0)
    assert [(one[0], one[2]) for one in returned(acknowledge)] == [(0, "RuntimeError: no"), (1, "RuntimeError: no")]
    assert acknowledge.receipts[0].done == (Receipt(2, 1002),)
