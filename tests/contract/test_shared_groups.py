"""C12, B5: shared groups. All members take messages of all partitions.

Every message is acknowledged separately, and delivered again without an acknowledgement.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from inturn import (
    Connection,
    ConsumerSettings,
    Context,
    GroupMode,
    Message,
    OnExhausted,
    Result,
    RetryDelays,
    aio,
    suspend,
)
from inturn.consumer.options import Scope
from inturn.errors import GroupConflict, InvalidInput
from tests.contract.bed import (
    SHORT_LEASE,
    WAIT_S,
    Bed,
    Seen,
    Witness,
    eventually,
    flip_byte_of,
    has_joined,
    in_one_of,
    quick,
    send,
    send_all,
)


def shared(**settings: Any) -> ConsumerSettings:
    return quick(**{"visibility_s": 20.0, "backoff_min_s": 0.01, **settings})


def waits_for(event: threading.Event) -> Seen:
    """A handler that waits for the event."""

    def handle(message: Message, context: Context) -> None:
        event.wait(WAIT_S)

    return Seen(handle)


def crashing(**settings: Any) -> ConsumerSettings:
    """For consumers that vanish without a kill of the process: long polls stay for a while."""
    return shared(pull_wait_s=0.05, **settings)


def lag(mq: Connection, subject: str = "orders") -> int:
    return mq.group(subject, "g").describe().lag


def done(mq: Connection, subject: str = "orders") -> bool:
    """All messages are acknowledged."""
    return has_joined(mq, subject) and mq.group(subject, "g").describe().lag == 0


def test_several_consumers_work_on_one_partition_at_once_and_each_message_is_handled_once(line: Connection) -> None:
    send_all(line, "line", 200)
    both = threading.Barrier(2)
    met = threading.Event()

    def meet(message: Message, context: Context) -> None:
        if not met.is_set():
            both.wait(WAIT_S)  # only a second consumer can release the barrier
            met.set()

    one, other = Seen(meet), Seen(meet)
    settings = shared(concurrency=1)
    with (
        line.consumer("line", "g", one, mode="shared", settings=settings),
        line.consumer("line", "g", other, mode=GroupMode.SHARED, settings=settings),
    ):
        eventually(lambda: len(one.messages) + len(other.messages) == 200, "all are handled")
        eventually(lambda: done(line, "line"), "all are acknowledged")
    assert Counter(one.bodies + other.bodies) == Counter(b"%d" % number for number in range(200))
    assert set(one.attempts + other.attempts) == {1}
    assert one.messages
    assert other.messages


def test_the_order_checker_finds_nothing_lost(mq: Connection) -> None:
    witness = Witness()
    send_all(mq, "orders", 400, witness=witness)
    fails = set(range(0, 400, 7))

    def handle(message: Message, context: Context) -> object:
        return suspend(0.01) if int(message.body) in fails and context.attempt == 1 else None

    members = [mq.consumer("orders", "g", witness.watch(handle), mode="shared", settings=shared()) for _ in range(3)]
    for member in members:
        member.start()
    eventually(lambda: done(mq), "all are acknowledged")
    assert all(member.stop() for member in members)
    verdict = witness.judge(order="none")
    assert (verdict.sent, verdict.finished) == (400, 400)


def test_what_fails_comes_again_to_anybody_and_nothing_waits_for_it(line: Connection, quiet: None) -> None:
    send(line, "line", *(f"k:{number}" for number in range(10)))

    def handle(message: Message, context: Context) -> None:
        if message.body == b"3" and context.attempt < 4:
            raise RuntimeError("not now")

    seen = Seen(handle)
    with line.consumer("line", "g", seen, mode="shared", settings=shared()):
        seen.wait_for(13)
        eventually(lambda: done(line, "line"), "all are acknowledged")
        assert line.group("line", "g").describe().partitions[0].redeliveries == 3
    assert sorted(seen.bodies) == sorted([b"%d" % number for number in range(10)] + 3 * [b"3"])
    tries = [attempt for attempt, body in zip(seen.attempts, seen.bodies, strict=True) if body == b"3"]
    assert tries == [1, 2, 3, 4]


def test_a_suspended_message_comes_again_after_the_time_it_asked_for(line: Connection) -> None:
    send(line, "line", "only")
    at_s: list[float] = []

    def handle(message: Message, context: Context) -> object:
        at_s.append(time.monotonic())
        return suspend(0.3) if context.attempt == 1 else None

    seen = Seen(handle)
    with line.consumer("line", "g", seen, mode="shared", settings=shared()):
        seen.wait_for(2)
    assert at_s[1] - at_s[0] >= 0.29


def test_what_is_not_acknowledged_in_time_goes_to_another_and_the_late_one_is_refused(
    line: Connection, quiet: None
) -> None:
    send(line, "line", "only")
    may_end = threading.Event()
    slow, quick_one = waits_for(may_end), Seen()
    first = line.consumer("line", "g", slow, mode="shared", settings=shared(visibility_s=0.4, concurrency=1))
    with first:
        slow.wait_for(1)
        with line.consumer("line", "g", quick_one, mode="shared", settings=shared()):
            quick_one.wait_for(1)
            eventually(lambda: done(line, "line"), "the second one has acknowledged it")
        may_end.set()
        eventually(lambda: first.statistics().refused_count == 1, "the first one is told that it was too late")
    assert quick_one.bodies == [b"only"]
    assert quick_one.attempts[0] >= 2


def test_a_slow_consumer_does_not_hold_up_others(mq: Connection) -> None:
    send_all(mq, "orders", 100)
    may_end = threading.Event()
    slow, fast = waits_for(may_end), Seen()
    with mq.consumer("orders", "g", slow, mode="shared", settings=shared(concurrency=2, visibility_s=60.0)):
        slow.wait_for(2)
        with mq.consumer("orders", "g", fast, mode="shared", settings=shared()):
            had = 8  # the slow consumer may have fetched a message per worker, and a message per other partition
            fast.wait_for(100 - had)
        may_end.set()
        eventually(lambda: done(mq), "the rest is handled")


def test_a_consumer_that_stops_gives_back_what_it_has_not_begun_and_nothing_is_counted(line: Connection) -> None:
    send_all(line, "line", 50)
    may_end = threading.Event()
    running = waits_for(may_end)
    first = line.consumer("line", "g", running, mode="shared", settings=shared(concurrency=2, visibility_s=60.0))
    first.start()
    running.wait_for(2)
    stopping = threading.Thread(target=first.stop)
    stopping.start()
    seen = Seen()
    with line.consumer("line", "g", seen, mode="shared", settings=shared()):
        seen.wait_for(48)  # while the first consumer still runs two messages
        may_end.set()
        stopping.join(WAIT_S)
        eventually(lambda: done(line, "line"), "all are acknowledged")
    assert len(seen.bodies) == 48
    assert set(seen.attempts) == {1}


def test_a_consumer_that_vanishes_repeats_only_what_it_had_not_acknowledged(line: Connection) -> None:
    send_all(line, "line", 20)
    stuck = threading.Event()

    def handle(message: Message, context: Context) -> None:
        if message.body == b"5":
            stuck.wait(WAIT_S)

    first = Seen(handle)
    consumer = line.consumer("line", "g", first, mode="shared", settings=crashing(visibility_s=0.6))
    consumer.start()
    first.wait_for(20)
    eventually(lambda: lag(line, "line") == 1, "all others are acknowledged")
    consumer.kill()
    seen = Seen()
    with line.consumer("line", "g", seen, mode="shared", settings=shared()):
        seen.wait_for(1)
        eventually(lambda: done(line, "line"), "it is acknowledged")
    stuck.set()
    assert seen.bodies == [b"5"]
    assert seen.attempts[0] >= 2


def test_what_is_acknowledged_never_comes_again_and_the_rest_does_after_a_restart(bed: Bed) -> None:
    mq = bed.open(flush="os", lease=SHORT_LEASE)
    mq.create_subject("line", partitions=1)
    send_all(mq, "line", 30)
    stuck = threading.Event()

    def handle(message: Message, context: Context) -> None:
        if int(message.body) % 10 == 0:
            stuck.wait(WAIT_S)

    first = Seen(handle)
    consumer = mq.consumer("line", "g", first, mode="shared", settings=shared(concurrency=8))
    consumer.start()
    first.wait_for(30)
    eventually(lambda: lag(mq, "line") == 3, "all others are acknowledged")
    consumer.kill()
    stuck.set()
    later = bed.reopen(flush="os", lease=SHORT_LEASE)
    seen = Seen()
    with later.consumer("line", "g", seen, mode="shared", settings=shared()):
        seen.wait_for(3)
        eventually(lambda: done(later, "line"), "all are acknowledged")
    assert sorted(seen.bodies) == [b"0", b"10", b"20"]
    with later.consumer("line", "g", seen, mode="shared", settings=shared()):
        send(later, "line", "new")
        seen.wait_for(4)
    assert seen.bodies[3] == b"new"


def test_what_stands_behind_damage_is_handled(bed: Bed, quiet: None) -> None:
    """C12: no message waits for a different message. Unreadable messages are returned, and are the only rest."""
    mq = bed.open(flush="os")
    mq.create_subject("line", 1)
    with mq.producer() as producer:
        for number in range(6):  # every message in a separate batch
            producer.send_sync("line", b"the one that is damaged" if number == 2 else b"%d" % number)
    bed.close()
    flip_byte_of(bed.path, b"the one that is damaged")
    mq, seen = bed.open(flush="os"), Seen()
    with mq.consumer("line", "g", seen, mode="shared", settings=shared(concurrency=8)):
        seen.wait_for(5)
        eventually(lambda: lag(mq, "line") == 1, "the others are acknowledged")
    assert sorted(seen.bodies) == [b"0", b"1", b"3", b"4", b"5"]


def test_after_max_attempts_a_message_is_a_dead_letter_and_can_be_driven_again(line: Connection, quiet: None) -> None:
    send(line, "line", "k:good", "k:bad", "k:fine")
    works = False

    def handle(message: Message, context: Context) -> None:
        if message.body == b"bad" and not works:
            raise RuntimeError("never")

    seen = Seen(handle)
    settings = shared(max_attempts=3, retry=RetryDelays((0.05,), 0))
    with line.consumer("line", "g", seen, mode="shared", settings=settings):
        seen.wait_for(5)
        eventually(lambda: len(list(line.group("line", "g").dead_letters().list())) == 1, "it is given up")
        eventually(lambda: done(line, "line"), "it is over here")
        (letter,) = line.group("line", "g").dead_letters().list()
        assert (letter.message.body, letter.message.key) == (b"bad", b"k")
        assert seen.bodies.count(b"bad") == 3
        works = True
        line.group("line", "g").dead_letters().redrive()
        eventually(lambda: seen.bodies.count(b"bad") == 4, "it comes through the retry subject")


def test_a_message_that_was_given_out_too_often_in_vain_is_given_up_without_being_tried(
    line: Connection, quiet: None
) -> None:
    """For example, a message that crashes the consumer every time."""
    send(line, "line", "deadly")
    stuck = threading.Event()
    seen = waits_for(stuck)
    consumer = line.consumer("line", "g", seen, mode="shared", settings=crashing(visibility_s=0.3, concurrency=1))
    consumer.start()
    seen.wait_for(1)
    consumer.kill()
    stuck.set()
    never = Seen()
    with line.consumer("line", "g", never, mode="shared", settings=shared(max_attempts=1)):
        eventually(lambda: done(line, "line"), "it is given up")
    assert never.bodies == []
    (letter,) = line.group("line", "g").dead_letters().list()
    assert letter.message.body == b"deadly"


def test_with_best_effort_what_raised_waits_in_the_retry_subject(line: Connection, quiet: None) -> None:
    """C8, B6: the message is finished in the partition, even with a long delay."""
    send(line, "line", "0", "1", "2")

    def handle(message: Message, context: Context) -> None:
        if message.body == b"1" and context.attempt < 3:
            raise RuntimeError("not now")

    seen = Seen(handle)
    settings = shared(strategy="best-effort", retry=RetryDelays((0.05, 0.1), 0))
    with line.consumer("line", "g", seen, mode="shared", settings=settings):
        seen.wait_for(5)
        eventually(lambda: done(line, "line"), "all are acknowledged")
        assert line.group("line", "g").describe().partitions[0].redeliveries == 0
    called = list(zip(seen.messages, seen.attempts, strict=True))
    assert sorted(message.body for message, _ in called if message.subject == "line") == [b"0", b"1", b"2"]
    again = [(message.body, attempt) for message, attempt in called if message.subject != "line"]
    assert again == [(b"1", 2), (b"1", 3)]
    assert seen.messages[-1].properties["%subject"] == "line"


def test_a_handler_may_take_lists_and_what_fails_comes_again_as_it_was(line: Connection, quiet: None) -> None:
    send_all(line, "line", 40)
    calls: list[list[bytes]] = []
    gate = threading.Lock()

    def handle(messages: list[Message], context: Context) -> None:
        with gate:
            calls.append([message.body for message in messages])
        if context.attempt == 1 and b"7" in calls[-1]:
            raise RuntimeError("not now")

    with line.consumer("line", "g", handle, mode="shared", settings=shared(batch=4, concurrency=1)):
        eventually(lambda: done(line, "line"), "all are acknowledged")
    assert max(map(len, calls)) == 4
    counts = Counter(body for call in calls for body in call)
    assert set(counts) == {b"%d" % number for number in range(40)}
    assert counts[b"7"] == 2


def test_with_manual_acknowledgement_what_is_not_acknowledged_comes_again(line: Connection) -> None:
    send(line, "line", "commit", "ack", "nothing", "success", "rollback")

    def handle(message: Message, context: Context) -> object:
        if context.attempt > 1:
            return Result.COMMIT
        match message.body:
            case b"commit":
                return Result.COMMIT
            case b"ack":
                context.ack()
            case b"success":
                return Result.SUCCESS
            case b"rollback":
                return Result.ROLLBACK
        return None

    groups = iter(["g1", "g2", "g3", "g4"])

    def comes_again() -> None:
        seen, group = Seen(handle), next(groups)
        settings = shared(ack="manual", visibility_s=0.5, concurrency=1)
        with line.consumer("line", group, seen, mode="shared", settings=settings):
            seen.wait_for(8)
            eventually(lambda: line.group("line", group).describe().lag == 0, "all are acknowledged")
        assert Counter(seen.bodies) == {b"commit": 1, b"ack": 1, b"nothing": 2, b"success": 2, b"rollback": 2}

    # The bound: an acknowledgement arrives within `visibility_s`. A message with a later acknowledgement is delivered
    # again, too.
    in_one_of(4, comes_again)


def test_handlers_may_be_coroutines(line: Connection) -> None:
    send_all(line, "line", 100)
    seen = Seen()
    running, most = 0, 0

    async def handle(message: Message, context: Context) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        seen(message, context)

    with line.consumer("line", "g", handle, mode="shared", settings=shared(concurrency=20)):
        seen.wait_for(100)
        eventually(lambda: done(line, "line"), "all are acknowledged")
    assert most > 1
    assert Counter(seen.bodies) == Counter(b"%d" % number for number in range(100))


async def test_the_asyncio_connection_knows_modes(bed: Bed) -> None:
    mq = bed.open(flush="os")
    mq.create_subject("line", partitions=1)
    send_all(mq, "line", 10)
    seen = asyncio.Queue[bytes]()

    async def handle(message: Message, context: Context) -> None:
        await seen.put(message.body)

    async with (
        aio.connect(mq.target) as other,
        other.consumer("line", "g", handle, mode="shared", settings=shared()),
    ):
        got = [await asyncio.wait_for(seen.get(), WAIT_S) for _ in range(10)]
    assert len(set(got)) == 10


def test_concurrency_can_be_changed_while_running(line: Connection) -> None:
    send_all(line, "line", 8)
    together = threading.Barrier(4)

    def meet(message: Message, context: Context) -> None:
        together.wait(WAIT_S)

    seen = Seen(meet)
    with line.consumer("line", "g", seen, mode="shared", settings=shared(concurrency=1)) as consumer:
        seen.wait_for(1)
        consumer.concurrency = 4
        eventually(lambda: done(line, "line"), "four at once")


def test_a_group_is_described_with_its_mode_and_what_is_outstanding(line: Connection) -> None:
    send(line, "line", "a", "b")
    may_end = threading.Event()
    seen = waits_for(may_end)
    with line.consumer("line", "g", seen, mode="shared", settings=shared()) as consumer:
        seen.wait_for(2)
        found = line.group("line", "g").describe()
        assert (found.mode, found.order, found.members) == ("shared", "none", (consumer.name,))
        assert (found.partitions[0].outstanding, found.partitions[0].owner, found.lag) == (2, None, 2)
        assert consumer.leases() == {}
        may_end.set()
        eventually(lambda: line.group("line", "g").describe().partitions[0].outstanding == 0, "both are acknowledged")


def test_members_of_another_mode_are_refused(line: Connection) -> None:
    with line.consumer("line", "g", Seen(), mode="shared", settings=shared()):
        eventually(lambda: [one.group for one in line.groups()] == ["g"], "the group is made")
    other = line.consumer("line", "g", Seen(), settings=quick())
    other.start()
    with pytest.raises(GroupConflict, match="mode='shared'"):
        other.wait(WAIT_S)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "shared", "order": "key"}, "keeps no order"),
        ({"mode": "shared", "order": "partition"}, "keeps no order"),
        ({"mode": "sharded"}, "mode='sharded': use 'exclusive', 'shared', 'broadcast'"),
        ({"mode": "shared", "offsets": "x"}, "leave offsets out"),
        ({"mode": "shared", "settings": ConsumerSettings(trace="x")}, "audit"),
        ({"mode": "shared", "settings": ConsumerSettings(max_attempts=1, on_exhausted=OnExhausted.PARK)}, "park"),
        ({"mode": "shared", "duty": Scope(keeps_only=True)}, "duty"),
    ],
)
def test_what_a_shared_group_cannot_do_is_said_at_once(
    line: Connection, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        line.consumer("line", "g", Seen(), **options)


@pytest.mark.parametrize("seconds", [0, 0.01, -1, 1e6, float("nan"), "5"])
def test_the_visibility_is_checked(seconds: Any) -> None:
    with pytest.raises(InvalidInput, match="visibility_s"):
        ConsumerSettings(visibility_s=seconds)


def test_a_group_starts_where_it_is_told_and_can_be_reset(line: Connection) -> None:
    send_all(line, "line", 5)
    seen = Seen()
    with line.consumer("line", "g", seen, mode="shared", start="last", settings=shared()):
        eventually(lambda: [one.group for one in line.groups()] == ["g"], "the group is made")
        send(line, "line", "new")
        seen.wait_for(1)
    assert seen.bodies == [b"new"]
    line.group("line", "g").reset("first")
    with line.consumer("line", "g", seen, mode="shared", settings=shared()):
        seen.wait_for(7)
        eventually(lambda: done(line, "line"), "all are acknowledged")
    assert len(seen.bodies) == 7
