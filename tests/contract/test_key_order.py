"""Order by key, and finished sets after a crash."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from inturn import Connection, Context, FlowControl, Message, Result, RetryDelays
from inturn.errors import InvalidInput
from tests.contract.bed import (
    SHORT_LEASE,
    WAIT_S,
    Bed,
    Seen,
    Witness,
    committed,
    eventually,
    has_joined,
    of_key,
    quick,
    send,
    send_all,
)

pytestmark = pytest.mark.usefixtures("quiet")


class Together:
    """A handler that returns only when the given number of handlers run at the same time. Records the maximum."""

    def __init__(self, count: int) -> None:
        self._all_there = threading.Barrier(count)
        self.keys: set[str | None] = set()
        self.is_broken = False

    def __call__(self, message: Message, context: Context) -> None:
        try:
            self._all_there.wait(WAIT_S)
        except threading.BrokenBarrierError:
            self.is_broken = True
        self.keys.add(message.key_text)


# C5: different keys run at the same time, messages of the same key in sequence


def test_keys_of_one_partition_run_at_the_same_time(line: Connection) -> None:
    """C5."""
    send(line, "line", *(f"k{number}:x" for number in range(16)))
    together = Together(16)
    with line.consumer("line", "g", together, order="key", settings=quick(concurrency=16)):
        eventually(lambda: committed(line) == 16, "all of them")
    assert len(together.keys) == 16
    assert not together.is_broken


def test_messages_of_one_key_never_overlap_and_stay_in_order(bed: Bed) -> None:
    """C5."""
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("orders", 3)
    send_all(mq, "orders", 600, keys=20, witness=witness)
    running: Counter[bytes | None] = Counter()
    most = 0

    def handle(message: Message, context: Context) -> None:
        nonlocal most
        running[message.key] += 1
        most = max(most, sum(running.values()))
        assert running[message.key] == 1
        time.sleep(random.random() * 0.004)
        running[message.key] -= 1

    seen = Seen(witness.watch(handle))
    with mq.consumer("orders", "g", seen, order="key", settings=quick(concurrency=12)):
        eventually(lambda: committed(mq, subject="orders") == 600, "all of them")
    assert witness.judge(order="key").duplicates == 0
    assert most > 3, "more than there are partitions"
    for key in range(20):
        assert of_key(seen.messages, f"key-{key}") == [str(number) for number in range(key, 600, 20)]


def test_messages_without_a_key_are_independent_of_each_other(line: Connection) -> None:
    """C5."""
    send(line, "line", *"abcdefgh")
    together = Together(8)
    with line.consumer("line", "g", together, order="key", settings=quick(concurrency=8)):
        eventually(lambda: committed(line) == 8, "all of them")
    assert not together.is_broken


def test_messages_without_a_key_wait_in_one_lane_if_the_subject_asks_for_it(bed: Bed) -> None:
    """C5."""
    mq = bed.open(flush="os")
    assert mq.create_subject("line", 1, keyless="one-lane").keyless == "one-lane"
    mq = bed.reopen(flush="os")
    assert mq.subject("line").keyless == "one-lane"
    running = threading.Lock()
    overlaps = 0

    def handle(message: Message, context: Context) -> None:
        nonlocal overlaps
        if message.key is not None:
            return
        overlaps += not running.acquire(blocking=False)
        time.sleep(0.002)
        running.release()

    seen = Seen(handle)
    send(mq, "line", *(text for number in range(30) for text in (str(number), f"k{number}:x")))
    with mq.consumer("line", "g", seen, order="key", settings=quick(concurrency=8)):
        eventually(lambda: committed(mq) == 60, "all of them")
    assert overlaps == 0
    assert [message.body for message in seen.messages if message.key is None] == [
        b"%d" % number for number in range(30)
    ]


def test_an_unknown_keyless_is_refused(mq: Connection) -> None:
    """C5."""
    with pytest.raises(InvalidInput, match="'independent', 'one-lane'"):
        mq.create_subject("other", keyless="alone")


def test_empty_and_binary_keys_are_keys_like_others(line: Connection) -> None:
    """C5."""
    keys = [b"", b"\0", b"\xff\xfe", "ä".encode()]
    with line.producer() as producer:
        for number in range(40):
            producer.send("line", b"%d" % number, key=keys[number % 4])
    seen = Seen(lambda message, context: time.sleep(0.001))
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        eventually(lambda: committed(line) == 40, "all of them")
    for at, key in enumerate(keys):
        assert [int(one.body) for one in seen.messages if one.key == key] == list(range(at, 40, 4))


# C6: an idle worker takes the next key


def test_two_busy_keys_never_share_a_worker_while_another_idles(line: Connection) -> None:
    """C6: for any hash of the keys: with as many workers as keys, all keys run at once."""
    names = [f"key-{number}" for number in range(6)]
    send(line, "line", *(f"{name}:{number}" for number in range(20) for name in names))
    together = Together(6)
    with line.consumer("line", "g", together, order="key", settings=quick(concurrency=6)):
        eventually(lambda: committed(line) == 120, "all of them")
    assert not together.is_broken, "two of them shared a worker"


def test_a_slow_message_holds_back_only_its_own_key(line: Connection) -> None:
    """C6."""
    go_on = threading.Event()
    seen = Seen(lambda message, context: go_on.wait(WAIT_S) and None if message.key == b"slow" else None)
    send(line, "line", "slow:first", "slow:second", *(f"k{number % 50}:{number}" for number in range(500)))
    with line.consumer("line", "g", seen, order="key", settings=quick(concurrency=2)):
        seen.wait_for(501)
        assert of_key(seen.messages, "slow") == ["first"]
        go_on.set()
        seen.wait_for(502)


# C7: a crash repeats only unfinished messages


def test_after_a_kill_only_unfinished_messages_are_repeated(bed: Bed) -> None:
    """C7."""
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("line", 1)
    send(mq, "line", "stuck:0", *(f"k{number % 40}:{number}" for number in range(400)), "stuck:1", witness=witness)
    go_on = threading.Event()

    def block(message: Message, context: Context) -> None:
        if message.key == b"stuck":
            go_on.wait(WAIT_S)

    first = Seen(witness.watch(block))
    consumer = mq.consumer("line", "g", first, order="key", settings=quick())
    consumer.start()
    first.wait_for(401)
    eventually(lambda: mq.group("line", "g").describe().lag == 2, "it is stored what is finished")
    assert committed(mq) == 0
    witness.kill(consumer)
    go_on.set()
    second = Seen(witness.watch(lambda message, context: None))
    with mq.consumer("line", "g", second, order="key", settings=quick()):
        eventually(lambda: committed(mq) == 402, "all of them")
    assert list(dict.fromkeys(second.bodies)) == [b"0", b"1"]
    assert {message.key for message in second.messages} == {b"stuck"}
    verdict = witness.judge(order="key")
    assert verdict.duplicates < verdict.lease_grants, "each holder but the first repeats one"


def test_the_finished_set_survives_closing_and_opening_the_folder(bed: Bed) -> None:
    """C7."""
    mq = bed.open(flush="os")
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", *(f"k{number}:{number}" for number in range(1, 300)), "bad:300")

    def fail(message: Message, context: Context) -> None:
        if message.key == b"bad":
            raise RuntimeError("not now")

    first = Seen(fail)
    with mq.consumer("line", "g", first, order="key", settings=quick(backoff_min_s=30)):
        first.wait_for(300)
    assert committed(mq) == 0
    mq = bed.reopen(flush="os")
    second = Seen()
    with mq.consumer("line", "g", second, order="key", settings=quick()):
        eventually(lambda: committed(mq) == 301, "all of them")
    assert second.bodies == [b"0", b"300"]


def test_a_hand_over_takes_the_finished_set_along(bed: Bed) -> None:
    """C7."""
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("orders", 4)
    send_all(mq, "orders", 800, keys=50, witness=witness)

    def slow(message: Message, context: Context) -> None:
        time.sleep(random.random() * 0.005)

    seen = Seen(witness.watch(slow))
    with mq.consumer("orders", "g", seen, order="key", settings=quick(concurrency=6)):
        seen.wait_for(100)
        with mq.consumer("orders", "g", seen, order="key", settings=quick(concurrency=6)):
            seen.wait_for(300)
        eventually(lambda: committed(mq, subject="orders") == 800, "all of them")
    assert witness.judge(order="key").duplicates == 0
    assert len(seen.messages) == 800


def test_kills_and_hand_overs_under_load_keep_the_order_of_every_key(bed: Bed) -> None:
    """C7."""
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("orders", 4)
    send_all(mq, "orders", 1500, keys=60, witness=witness)
    failed: set[tuple[int, int]] = set()

    def handle(message: Message, context: Context) -> None:
        time.sleep(random.random() * 0.004)
        place = message.partition, message.offset
        if random.random() < 0.05 and place not in failed:
            failed.add(place)
            raise RuntimeError("not now")

    seen = Seen(witness.watch(handle))
    settings = quick(concurrency=5)
    consumers = [mq.consumer("orders", "g", seen, order="key", settings=settings) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    seen.wait_for(300)
    witness.kill(consumers[0])
    seen.wait_for(600)
    assert consumers[1].stop()
    with mq.consumer("orders", "g", seen, order="key", settings=settings):
        eventually(lambda: committed(mq, subject="orders") == 1500, "all of them")
        assert consumers[2].stop()
    verdict = witness.judge(order="key")
    assert verdict.duplicates <= 250, (
        "those that ran when it was killed, and what was not committed yet: not all of its 500"
    )
    assert failed


# C8: no order


def test_without_order_even_one_key_runs_at_the_same_time(line: Connection) -> None:
    """C8."""
    send(line, "line", *(f"same:{number}" for number in range(8)))
    together = Together(8)
    with line.consumer("line", "g", together, order="none", settings=quick(concurrency=8)):
        eventually(lambda: committed(line) == 8, "all of them")
    assert not together.is_broken


def test_without_order_what_failed_comes_back_through_the_retry_subject(bed: Bed) -> None:
    """C8."""
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("line", 1)
    send(mq, "line", *(f"same:{number}" for number in range(100)), witness=witness)

    def fail_once(message: Message, context: Context) -> None:
        if context.attempt == 1 and int(message.body) % 10 == 3:
            raise RuntimeError("not now")

    seen = Seen(fail_once)
    settings = quick(retry=RetryDelays((0.05, 0.1), first_level=1))
    with mq.consumer("line", "g", seen, order="none", settings=settings):
        seen.wait_for(110)
        eventually(lambda: committed(mq, subject="%retry%g%line") == 10, "the retries")
        eventually(lambda: committed(mq) == 100, "all of them")
    again = [message for message in seen.messages if message.subject != "line"]
    assert sorted(int(message.body) for message in again) == list(range(3, 100, 10))
    assert {message.properties["%attempts"] for message in again} == {"1"}
    assert Counter(seen.attempts) == {1: 100, 2: 10}


def test_without_order_a_kill_repeats_only_what_was_unfinished(bed: Bed) -> None:
    """C8."""
    mq = bed.open(flush="os", lease=SHORT_LEASE)
    mq.create_subject("line", 1)
    send(mq, "line", *(str(number) for number in range(200)))
    go_on = threading.Event()
    first = Seen(lambda message, context: go_on.wait(WAIT_S) and None if message.body == b"0" else None)
    settings = quick(retry=RetryDelays((0.05,), 0))
    consumer = mq.consumer("line", "g", first, order="none", settings=settings)
    consumer.start()
    first.wait_for(200)
    eventually(lambda: mq.group("line", "g").describe().lag == 1, "it is stored what is finished")
    consumer.kill()
    go_on.set()
    second = Seen()
    with mq.consumer("line", "g", second, order="none", settings=settings):
        eventually(lambda: committed(mq) == 200, "all of them")
    assert set(second.bodies) == {b"0"}


# C9: batches and manual acknowledgement, per key


def test_a_batch_has_messages_of_one_key_in_their_order(line: Connection) -> None:
    """C9."""
    send(line, "line", *(f"k{number % 7}:{number}" for number in range(210)))
    calls: list[list[Message]] = []

    def handle(messages: list[Message], context: Context) -> None:
        calls.append(messages)
        time.sleep(0.001)

    with line.consumer("line", "g", handle, order="key", settings=quick(batch=10)):
        eventually(lambda: committed(line) == 210, "all of them")
    assert all(len({message.key for message in messages}) == 1 for messages in calls)
    assert max(len(messages) for messages in calls) == 10
    every = [message for messages in calls for message in messages]
    for key in range(7):
        assert of_key(every, f"k{key}") == [str(number) for number in range(key, 210, 7)]


def test_a_rollback_repeats_the_uncommitted_messages_of_its_key_only(line: Connection) -> None:
    """C9."""
    send(line, "line", "a:1", "b:1", "a:2", "b:2", "a:3", "b:3")
    rolled_back = threading.Event()

    def handle(message: Message, context: Context) -> Result:
        if message.body != b"3":
            return Result.SUCCESS
        if message.key == b"a" and not rolled_back.is_set():
            rolled_back.set()
            return Result.ROLLBACK
        return Result.COMMIT

    seen = Seen(handle)
    with line.consumer("line", "g", seen, order="key", settings=quick(ack="manual")):
        eventually(lambda: committed(line) == 6, "all of them")
    assert of_key(seen.messages, "a") == ["1", "2", "3", "1", "2", "3"]
    assert of_key(seen.messages, "b") == ["1", "2", "3"]


def test_what_one_key_keeps_does_not_keep_another_from_being_committed(line: Connection) -> None:
    """C9."""
    send(line, "line", "keeps:0", "a:1", "b:2", "a:3")
    seen = Seen(lambda message, context: Result.SUCCESS if message.key == b"keeps" else Result.COMMIT)
    consumer = line.consumer("line", "g", seen, order="key", settings=quick(ack="manual"))
    with consumer:
        seen.wait_for(4)
        time.sleep(0.1)
        assert committed(line) == 0
    again = Seen(lambda message, context: Result.COMMIT)
    with line.consumer("line", "g", again, order="key", settings=quick(ack="manual")):
        eventually(lambda: committed(line) == 4, "the one that was kept")
    assert again.bodies == [b"0"]


def test_manual_acknowledgement_in_batches_of_a_key(line: Connection) -> None:
    """C9."""
    send(line, "line", *(f"k{number % 3}:{number}" for number in range(60)))
    calls: list[list[bytes]] = []

    def handle(messages: list[Message], context: Context) -> None:
        calls.append([message.body for message in messages])
        context.ack()

    with line.consumer("line", "g", handle, order="key", settings=quick(ack="manual", batch=8)):
        eventually(lambda: committed(line) == 60, "all of them")
    assert sum(len(bodies) for bodies in calls) == 60


def test_a_group_keeps_to_one_order(line: Connection) -> None:
    with line.consumer("line", "g", Seen(), order="key", settings=quick()):
        eventually(lambda: has_joined(line), "it has joined")
        other = line.consumer("line", "g", Seen(), order="partition", settings=quick())
        other.start()
        eventually(lambda: other.error is not None, "the other one is refused")
        assert "order='key'" in str(other.error)


def test_a_group_may_change_its_order_when_nobody_is_in_it(line: Connection) -> None:
    send(line, "line", *(f"k{number % 5}:{number}" for number in range(50)))
    seen = Seen()
    for limit, order in ((10, "key"), (25, "partition"), (40, "none"), (50, "key")):
        settings = quick(concurrency=1, flow=FlowControl(buffered_count=5), retry=RetryDelays((1.0,), 0))
        with line.consumer("line", "g", seen, order=order, settings=settings):
            seen.wait_for(limit)
    eventually(lambda: committed(line) == len(seen.bodies), "what is done is committed")
    assert len(set(seen.bodies)) == len(seen.bodies)
