"""Consuming under order by partition."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict

import pytest
from structlog.testing import capture_logs

from inturn import (
    Connection,
    Context,
    FlowControl,
    Hook,
    Message,
    Result,
    ResultKind,
    Strategy,
    suspend,
)
from inturn.model.errors import HandlerError, InvalidInput
from tests.contract.bed import (
    STEADY_LEASE,
    WAIT_S,
    Bed,
    Seen,
    Witness,
    eventually,
    is_renewed,
    quick,
    send_all,
)


@pytest.fixture
def one(mq: Connection) -> Connection:
    """With the subject "line" of a single partition that holds the messages 0 to 4."""
    mq.create_subject("line", 1)
    send_all(mq, "line", 5)
    return mq


def committed(mq: Connection, subject: str = "line", group: str = "g") -> list[int]:
    return [partition.committed for partition in mq.group(subject, group).describe().partitions]


def test_every_message_is_handled_once_and_in_order(mq: Connection) -> None:
    """C1, C4, the contract."""
    witness, seen = Witness(), Seen()
    send_all(mq, "orders", 1000, witness=witness)
    with mq.consumer("orders", "g", seen, settings=quick()):
        seen.wait_for(1000)
    by_key: dict[bytes | None, list[int]] = defaultdict(list)
    for message in seen.messages:
        by_key[message.key].append(int(message.body))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert sorted(map(int, seen.bodies)) == list(range(1000))
    assert sum(committed(mq, "orders")) == 1000


def test_messages_that_come_later_are_handled_at_once(one: Connection) -> None:
    """B1: a pull waits for new messages."""
    seen = Seen()
    with one.consumer("line", "g", seen, settings=quick(pull_wait_s=60.0)), one.producer() as producer:
        seen.wait_for(5)
        began_s = time.monotonic()
        producer.send_sync("line", b"new", key="k")
        seen.wait_for(6)
        assert time.monotonic() - began_s < WAIT_S / 2, "much less than a pull waits"
    assert seen.bodies[-1] == b"new"


def test_two_handlers_of_one_partition_never_run_at_the_same_time(mq: Connection) -> None:
    """C4."""
    running: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    together: list[int] = []
    lock = threading.Lock()

    def handle(message: Message, context: Context) -> None:
        with lock:
            running[context.partition] += 1
            most[context.partition] = max(most[context.partition], running[context.partition])
            together.append(sum(running.values()))
        time.sleep(0.001)
        with lock:
            running[context.partition] -= 1

    seen = Seen(handle)
    send_all(mq, "orders", 200, keys=50)
    with mq.consumer("orders", "g", seen, settings=quick(concurrency=8)):
        seen.wait_for(200)
    assert set(most.values()) == {1}
    assert max(together) > 1, "different partitions do run at the same time"


@pytest.mark.parametrize("answer", [None, Result.SUCCESS])
def test_nothing_and_success_go_on(one: Connection, answer: Result | None) -> None:
    """C9."""
    seen = Seen(lambda message, context: answer)
    with one.consumer("line", "g", seen, settings=quick()):
        seen.wait_for(5)
    assert seen.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert committed(one) == [5]


def fails(times: int, how):
    """Message 2 fails the given number of times."""
    left = [times]

    def handle(message: Message, context: Context) -> object:
        if message.body == b"2" and left[0]:
            left[0] -= 1
            return how()
        return None

    return handle


def raise_one() -> object:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "how",
    [lambda: suspend(0.01), raise_one, lambda: "nonsense", lambda: False, lambda: 7, lambda: Result.COMMIT],
    ids=["suspend", "exception", "text", "False", "number", "commit without manual"],
)
def test_a_message_that_fails_is_repeated_in_place(one: Connection, how) -> None:
    """C9, C10: strict holds back later messages. Attempts are counted, and no message is lost."""
    seen = Seen(fails(3, how))
    with one.consumer("line", "g", seen, settings=quick()) as consumer:
        seen.wait_for(8)
        eventually(lambda: consumer.statistics().ok_count == 5, "all five are done")
        assert consumer.statistics().failed_count == 3
    assert seen.bodies == [b"0", b"1", b"2", b"2", b"2", b"2", b"3", b"4"]
    assert seen.attempts == [1, 1, 1, 2, 3, 4, 1, 1]
    assert committed(one) == [5]


def test_a_result_that_is_none_is_logged_with_what_may_be_returned(one: Connection) -> None:
    """C9."""
    errors: list[BaseException | None] = []

    class Listen(Hook):
        def after(self, messages, context, kind, error):
            errors.append(error)

    seen = Seen(fails(1, lambda: "nonsense"))
    with capture_logs() as logs, one.consumer("line", "g", seen, settings=quick(), hooks=[Listen()]):
        seen.wait_for(6)
    (entry,) = [entry for entry in logs if entry["event"] == "consumer.handler_failed"]
    assert entry["kind"] == "invalid"
    assert "nonsense" in entry["error"]
    assert (entry["subject"], entry["partition"], entry["offset"], entry["group"]) == ("line", 0, 2, "g")
    (error,) = [error for error in errors if error is not None]
    assert isinstance(error, HandlerError)
    assert "suspend(seconds)" in str(error)


def test_a_suspended_message_comes_again_after_its_time_and_not_before(one: Connection) -> None:
    """C9."""
    at_s: list[float] = []

    def handle(message: Message, context: Context) -> object:
        at_s.append(time.monotonic())
        return suspend(0.2) if len(at_s) == 1 else None

    seen = Seen(handle)
    with one.consumer("line", "g", seen, settings=quick()):
        seen.wait_for(6)
    assert 0.2 <= at_s[1] - at_s[0] < WAIT_S / 2


def test_an_exception_waits_twice_as_long_each_time_up_to_a_limit(one: Connection) -> None:
    """C9, C10: exponential back-off, as in the settings. Without the limit the test would take minutes."""
    at_s: list[float] = []

    def handle(message: Message, context: Context) -> object:
        at_s.append(time.monotonic())
        return raise_one() if len(at_s) <= 14 else None

    seen = Seen(handle)
    with one.consumer("line", "g", seen, settings=quick(backoff_min_s=0.02, backoff_max_s=0.05)):
        seen.wait_for(19)
    waited_s = [after - before for before, after in itertools.pairwise(at_s[:15])]
    for waited, wanted in zip(waited_s, [0.02, 0.04, *[0.05] * 12], strict=True):
        assert waited >= wanted


def test_a_handler_may_not_suspend_for_longer_than_allowed(one: Connection) -> None:
    """C9: 10 ms to 30 s. The error is raised in the handler, so the message is repeated."""
    caught: list[BaseException] = []

    def handle(message: Message, context: Context) -> object:
        if not caught:
            try:
                return suspend(31)
            except InvalidInput as error:
                caught.append(error)
                raise
        return None

    seen = Seen(handle)
    with one.consumer("line", "g", seen, settings=quick()):
        seen.wait_for(6)
    assert seen.bodies[:2] == [b"0", b"0"]


def test_a_partition_in_trouble_does_not_stop_the_others(mq: Connection) -> None:
    """C10."""
    with mq.producer() as producer:
        bad = producer.send_sync("orders", b"bad", key="a").partition
        for number in range(100):
            producer.send("orders", b"good", key=f"k{number}")

    def handle(message: Message, context: Context) -> object:
        return suspend(30) if context.partition == bad else None

    seen = Seen(handle)
    with mq.consumer("orders", "g", seen, settings=quick(concurrency=1)):
        seen.wait_for(1)  # the group exists after the consumer has joined
        eventually(
            lambda: all(p.lag == 0 for p in mq.group("orders", "g").describe().partitions if p.partition != bad),
            "the other partitions are done",
        )
    assert mq.group("orders", "g").describe().partitions[bad].committed == 0


def test_a_handler_of_batches_gets_lists_in_order(mq: Connection) -> None:
    """C9, C4."""
    mq.create_subject("line", 1)
    send_all(mq, "line", 25)
    got: list[list[int]] = []
    done = threading.Event()

    def handle(messages: list[Message], context: Context) -> None:
        got.append([int(message.body) for message in messages])
        if got[-1][-1] == 24:
            done.set()

    with mq.consumer("line", "g", handle, settings=quick(batch=10)):
        assert done.wait(WAIT_S)
    assert [number for batch in got for number in batch] == list(range(25))
    assert max(map(len, got)) <= 10
    assert committed(mq) == [25]


def test_a_batch_that_fails_is_repeated_whole(mq: Connection) -> None:
    """C9."""
    mq.create_subject("line", 1)
    with mq.producer() as producer:
        for number in range(6):
            producer.send("line", b"%d" % number, key="k")
    got: list[tuple[int, list[int]]] = []
    done = threading.Event()

    def handle(messages: list[Message], context: Context) -> object:
        got.append((context.attempt, [int(message.body) for message in messages]))
        if len(got) == 1:
            return suspend(0.01)
        if got[-1][1][-1] == 5:
            done.set()
        return None

    with mq.consumer("line", "g", handle, settings=quick(batch=100)):
        assert done.wait(WAIT_S)
    assert got[1][0] == 2
    assert got[0][1] == got[1][1][: len(got[0][1])]
    assert got[-1][1][-1] == 5


def test_a_handler_must_be_callable(mq: Connection) -> None:
    with pytest.raises(InvalidInput, match="function of"):
        mq.consumer("orders", "g", "not a function")  # type: ignore[arg-type]


def test_an_unknown_order_is_refused(mq: Connection) -> None:
    with pytest.raises(InvalidInput, match="'partition'"):
        mq.consumer("orders", "g", Seen(), order="alphabetical")


# Manual acknowledgement


def run_manual(mq: Connection, answers: dict[bytes, list[object]], calls: int, **settings: object) -> Seen:
    """Message → the results of the first, second, … call of the handler; afterwards COMMIT."""

    def handle(message: Message, context: Context) -> object:
        todo = answers.get(message.body, [])
        answer = todo.pop(0) if todo else Result.COMMIT
        if answer == "ack":
            context.ack()
            return None
        return answer

    seen = Seen(handle)
    with mq.consumer("line", "g", seen, settings=quick(ack="manual", **settings)):
        seen.wait_for(calls)
        time.sleep(0.05)  # no more messages may come
    return seen


def test_manual_commit_goes_on_and_commits(one: Connection) -> None:
    """C9."""
    seen = run_manual(one, {}, 5)
    assert seen.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert committed(one) == [5]


def test_manual_success_goes_on_but_commits_nothing(one: Connection) -> None:
    """C9."""
    seen = run_manual(one, {b"%d" % n: [Result.SUCCESS] for n in range(5)}, 5)
    assert seen.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert committed(one) == [0]


def test_manual_commit_commits_what_succeeded_before(one: Connection) -> None:
    """C9."""
    run_manual(one, {b"0": [Result.SUCCESS], b"1": [Result.SUCCESS], b"3": [Result.SUCCESS], b"4": [Result.SUCCESS]}, 5)
    assert committed(one) == [3]


def test_manual_rollback_repeats_everything_since_the_last_commit(one: Connection) -> None:
    """C9."""
    answers: dict[bytes, list[object]] = {
        b"1": [Result.SUCCESS],
        b"2": [Result.SUCCESS],
        b"3": [Result.ROLLBACK],
    }
    seen = run_manual(one, answers, 8)
    assert seen.bodies == [b"0", b"1", b"2", b"3", b"1", b"2", b"3", b"4"]
    assert committed(one) == [5]


def test_manual_rollback_counts_an_attempt_for_every_message_that_is_repeated(one: Connection) -> None:
    """C9: so a handler can give up after some attempts."""
    answers: dict[bytes, list[object]] = {b"0": [Result.SUCCESS] * 3, b"1": [Result.ROLLBACK] * 2}
    seen = run_manual(one, answers, 6)
    assert seen.bodies[:6] == [b"0", b"1"] * 3
    assert seen.attempts[:6] == [1, 1, 2, 2, 3, 3]


def test_manual_suspend_repeats_only_this_message(one: Connection) -> None:
    """C9."""
    seen = run_manual(one, {b"1": [Result.SUCCESS], b"2": [suspend(0.01)]}, 6)
    assert seen.bodies == [b"0", b"1", b"2", b"2", b"3", b"4"]
    assert committed(one) == [5]


def test_manual_acknowledgement_in_the_context_is_a_commit(one: Connection) -> None:
    """C10."""
    seen = run_manual(one, {b"%d" % n: ["ack"] for n in range(5)}, 5)
    assert seen.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert committed(one) == [5]


def test_without_an_acknowledgement_strict_puts_the_message_back(one: Connection) -> None:
    """C10."""
    seen = run_manual(one, {b"2": [None, None]}, 7)
    assert seen.bodies == [b"0", b"1", b"2", b"2", b"2", b"3", b"4"]
    assert seen.attempts[2:5] == [1, 2, 3]


def test_without_an_acknowledgement_best_effort_goes_on(one: Connection) -> None:
    """C10."""
    seen = run_manual(one, {b"2": [None]}, 5, strategy=Strategy.BEST_EFFORT)
    assert seen.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert committed(one) == [5]


def test_an_acknowledgement_does_not_carry_over_to_the_next_message(one: Connection) -> None:
    """C10."""
    seen = run_manual(one, {b"1": ["ack"], b"2": [None]}, 6)
    assert seen.bodies == [b"0", b"1", b"2", b"2", b"3", b"4"]


def test_an_acknowledgement_does_not_carry_over_to_the_next_attempt(one: Connection) -> None:
    """C10: acknowledged, then suspended. The next attempt acknowledges nothing."""
    calls: list[bytes] = []

    def handle(message: Message, context: Context) -> object:
        calls.append(message.body)
        if message.body == b"1" and calls.count(b"1") == 1:
            context.ack()
            return suspend(0.01)
        if message.body == b"1" and calls.count(b"1") == 2:
            return None
        return Result.COMMIT

    seen = Seen(handle)
    with one.consumer("line", "g", seen, settings=quick(ack="manual")):
        seen.wait_for(7)
    assert calls == [b"0", b"1", b"1", b"1", b"2", b"3", b"4"]


def test_what_was_not_committed_by_hand_comes_again_to_the_next_consumer(one: Connection) -> None:
    """C9, C17."""
    run_manual(one, {b"%d" % n: [Result.SUCCESS] for n in range(2, 5)}, 5)
    assert committed(one) == [2]
    seen = run_manual(one, {}, 3)
    assert seen.bodies == [b"2", b"3", b"4"]


# Hooks and statistics


class Noting(Hook):
    def __init__(self) -> None:
        self.notes: list[tuple[str, int, ResultKind | None, type | None]] = []

    def before(self, messages, context):
        self.notes.append(("before", messages[0].offset, None, None))

    def after(self, messages, context, kind, error):
        self.notes.append(("after", messages[0].offset, kind, None if error is None else type(error)))


def kinds_of(mq: Connection, how, calls: int = 6, **settings: object) -> list[tuple[ResultKind | None, type | None]]:
    hook, seen = Noting(), Seen(fails(1, how))
    with mq.consumer("line", "g", seen, settings=quick(**settings), hooks=[hook]):
        seen.wait_for(calls)
    assert [note[:2] for note in hook.notes[::2]] == [("before", note[1]) for note in hook.notes[1::2]]
    return [(kind, error) for when, _, kind, error in hook.notes if when == "after"]


@pytest.mark.parametrize(
    ("how", "kind", "error"),
    [
        (lambda: suspend(0.01), ResultKind.FAILED, None),
        (raise_one, ResultKind.EXCEPTION, RuntimeError),
        (lambda: "nonsense", ResultKind.INVALID, HandlerError),
    ],
    ids=["suspend", "exception", "invalid"],
)
def test_hooks_are_told_what_became_of_each_attempt(one: Connection, how, kind: ResultKind, error: type | None) -> None:
    """C14."""
    good = (ResultKind.SUCCESS, None)
    assert kinds_of(one, how) == [good, good, (kind, error), good, good, good]


def test_hooks_are_told_that_nothing_was_returned(one: Connection) -> None:
    """C14."""
    hook = Noting()
    left = [1]

    def handle(message: Message, context: Context) -> object:
        return None if left and left.pop() else Result.COMMIT

    seen = Seen(handle)
    with one.consumer("line", "g", seen, settings=quick(ack="manual"), hooks=[hook]):
        seen.wait_for(6)
    assert [note[2] for note in hook.notes[1::2]][:2] == [ResultKind.NOTHING, ResultKind.SUCCESS]


def test_hooks_and_statistics_are_told_of_slow_handlers(one: Connection) -> None:
    """C14."""
    hook = Noting()
    seen = Seen(lambda message, context: time.sleep(0.25) if message.body == b"2" else None)
    settings = quick(handler_timeout_s=0.2)
    with one.consumer("line", "g", seen, settings=settings, hooks=[hook]) as consumer:
        seen.wait_for(5)
        eventually(lambda: consumer.statistics().ok_count == 5, "all are done")
        slow_count = consumer.statistics().slow_count
    kinds = [note[2] for note in hook.notes[1::2]]
    assert kinds[2] is ResultKind.TIMEOUT
    # A busy machine makes some other calls slow, too, but not all calls.
    assert ResultKind.SUCCESS in kinds
    assert set(kinds) == {ResultKind.SUCCESS, ResultKind.TIMEOUT}
    assert kinds.count(ResultKind.TIMEOUT) <= slow_count < len(kinds)


def test_a_slow_handler_that_fails_is_counted_as_slow_too(one: Connection) -> None:
    """C14: `slow_count` counts calls that took longer than the setting."""

    def slow() -> object:
        time.sleep(0.25)
        return suspend(0.01)

    hook, seen = Noting(), Seen(fails(1, slow))
    with one.consumer("line", "g", seen, settings=quick(handler_timeout_s=0.2), hooks=[hook]) as consumer:
        seen.wait_for(6)
        eventually(lambda: consumer.statistics().ok_count == 5, "all are done")
        slow_count = consumer.statistics().slow_count
    # A busy machine makes some other calls slow, too: the hook is notified of slow calls that succeed.
    kinds = [note[2] for note in hook.notes[1::2]]
    assert 1 + kinds.count(ResultKind.TIMEOUT) <= slow_count < len(kinds)


def test_a_hook_that_raises_does_no_harm(one: Connection) -> None:
    """C14."""

    class Broken(Hook):
        def before(self, messages, context):
            raise RuntimeError("before")

        def after(self, messages, context, kind, error):
            raise RuntimeError("after")

    hook, seen = Noting(), Seen()
    with capture_logs() as logs, one.consumer("line", "g", seen, settings=quick(), hooks=[Broken(), hook]):
        seen.wait_for(5)
    assert seen.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert len(hook.notes) == 10
    assert sum(entry["event"] == "consumer.hook_failed" for entry in logs) == 10


def test_statistics_tell_what_was_done(one: Connection) -> None:
    """C14."""
    seen = Seen(fails(2, raise_one))
    with one.consumer("line", "g", seen, settings=quick()) as consumer:
        seen.wait_for(7)
        eventually(lambda: consumer.statistics().ok_count == 5, "all are done")
        eventually(lambda: consumer.statistics().failed_count == 2, "so are the failures")
        statistics = consumer.statistics()
    assert (statistics.ok_count, statistics.failed_count, statistics.slow_count) == (5, 2, 0)
    assert (statistics.lag, statistics.waiting_count, statistics.missing) == (0, 0, 0)
    assert statistics.partitions == (0,)
    assert (statistics.paused, statistics.errors) == ((), ())
    assert statistics.ok_per_s == pytest.approx(0.5)
    assert statistics.failed_per_s == pytest.approx(0.2)
    assert 0 < statistics.handling_ms_mean < 1000


# Flow control


@pytest.mark.parametrize(
    "flow", [FlowControl(buffered_count=50), FlowControl(buffered_bytes=5000), FlowControl(span=50)], ids=repr
)
def test_pulling_pauses_while_too_much_waits_and_resumes_by_itself(bed: Bed, flow: FlowControl) -> None:
    """C13, B3: by count, bytes or span; the lease is kept meanwhile."""
    mq = bed.open(flush="os", lease=STEADY_LEASE)
    mq.create_subject("line", 1)
    gate = threading.Event()
    seen = Seen(lambda message, context: gate.wait(WAIT_S) and None)
    with mq.producer() as producer:
        for number in range(500):
            producer.send("line", b"%d" % number + b"x" * 100, key="k")
            if number % 10 == 9:
                producer.flush(WAIT_S)  # batches of ten
    settings = quick(flow=flow, pull_bytes=1000)
    with mq.consumer("line", "g", seen, settings=settings) as consumer:
        seen.wait_for(1)
        eventually(lambda: consumer.statistics().paused == (0,), "the partition is paused")
        before = consumer.statistics().waiting_count
        assert before < 500
        for _ in range(2):
            is_renewed(mq)
        assert consumer.statistics().waiting_count == before
        assert consumer.statistics().partitions == (0,)
        gate.set()
        seen.wait_for(500)
    assert set(seen.epochs) == {1}, "it was never lost"
    assert len(seen.messages) == 500


def test_what_a_slow_handler_has_done_is_committed_meanwhile(one: Connection) -> None:
    """C3: a crash repeats the messages since the last commit, not since the last pull."""
    send_all(one, "line", 20)
    gate = threading.Event()
    seen = Seen(lambda message, context: gate.wait(2 * WAIT_S) and None if message.offset == 10 else None)
    with one.consumer("line", "g", seen, settings=quick(concurrency=1)):
        seen.wait_for(11)
        eventually(lambda: one.group("line", "g").describe().partitions[0].committed == 10, "ten are committed")
        gate.set()


def test_a_killed_consumer_starts_no_other_handler(one: Connection) -> None:
    send_all(one, "line", 50)
    gate = threading.Event()
    seen = Seen(lambda message, context: gate.wait(2 * WAIT_S) and None)
    consumer = one.consumer("line", "g", seen, settings=quick())
    consumer.start()
    seen.wait_for(1)
    consumer.kill()
    gate.set()
    time.sleep(0.1)
    assert len(seen.messages) == 1
