"""C11: the messages of a parked key wait in order, apart from all other messages, until an operator resumes the key."""

from __future__ import annotations

import getpass
import random
import threading
import time

import pytest

from inturn import Connection, ConsumerSettings, Context, Message, Result, RetryDelays
from inturn.errors import InvalidInput, NotFound
from inturn.protocol.commands import ReadLot
from tests.contract.bed import (
    SHORT_LEASE,
    STEADY_LEASE,
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
)
from tests.contract.test_failing_keys import Fails, one_key, state
from tests.contract.test_robustness import put_between

pytestmark = pytest.mark.usefixtures("quiet")


def parking(**settings: object) -> ConsumerSettings:
    return quick(**{"max_attempts": 2, "on_exhausted": "park", **settings})


def waiting(mq: Connection) -> int | None:
    found = one_key(mq)
    return None if found is None else found.waiting


def test_an_exhausted_key_is_parked_and_the_others_never_notice(line: Connection) -> None:
    seen = Seen(Fails())
    send(line, "line", "bad:0", "k:1", "bad:2")
    with line.consumer("line", "g", seen, order="key", settings=parking()):
        eventually(lambda: state(line) == "parked", "it is parked")
        send(line, "line", "bad:3", "k:4")
        eventually(lambda: committed(line) == 5, "nothing holds the partition back")
        eventually(lambda: waiting(line) == 2, "the later ones are behind it")
        found = one_key(line)
        assert found is not None
        assert (found.key, found.offset, found.attempts) == (b"bad", 0, 2)
        assert found.error == "RuntimeError: no connection"
        assert "2 times" in found.reason
    assert of_key(seen.messages, "bad") == ["0", "0"]
    assert of_key(seen.messages, "k") == ["1", "4"]
    details = line.group("line", "g").describe_key(b"bad")
    assert [one.offset for one in details.parked] == [0, 2, 3]
    head = line.group("line", "g").key_head("bad")
    assert head is not None
    assert (head.body, head.key, head.subject, head.partition, head.offset) == (b"0", b"bad", "line", 0, 0)


def test_a_parked_key_runs_in_order_when_it_is_resumed(bed: Bed) -> None:
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", "k:1", "bad:2", "bad:3", witness=witness)
    fails = Fails()
    seen = Seen(witness.watch(fails))
    with mq.consumer("line", "g", seen, order="key", settings=parking()):
        eventually(lambda: state(mq) == "parked" and waiting(mq) == 2, "all of it is parked")
        fails.is_mended = True
        witness.recorder.key_resumed("line", "g", 0, b"bad")
        resumed = mq.group("line", "g").resume("bad", why="mended")
        assert resumed.done_at_ms is not None
        assert resumed.request.by.startswith(f"{getpass.getuser()}@")
        eventually(lambda: mq.group("line", "g").keys() == [], "the lot is empty and gone")
        send(mq, "line", "bad:4", witness=witness)
        eventually(lambda: committed(mq) == 5, "an ordinary key again")
    assert of_key(seen.messages, "bad") == ["0", "0", "0", "2", "3", "4"]
    assert fails.attempts == [1, 2, 1, 1, 1, 1]
    witness.judge(order="key")


def test_resuming_keeps_the_order_while_new_messages_arrive(bed: Bed) -> None:
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("line", 1)
    numbers = iter(range(10_000))
    fails = Fails(body=b"0")

    def handle(message: Message, context: Context) -> None:
        time.sleep(random.random() * 0.002)
        fails(message, context)

    seen = Seen(witness.watch(handle))
    send(mq, "line", *(f"bad:{next(numbers)}" for _ in range(100)), witness=witness)
    is_over = threading.Event()
    sent = 100

    def keep_sending() -> None:
        nonlocal sent
        while not is_over.wait(0.003):
            send(mq, "line", f"bad:{next(numbers)}", "k:x", witness=witness)
            sent += 1

    sender = threading.Thread(target=keep_sending)
    with mq.consumer("line", "g", seen, order="key", settings=parking()):
        eventually(lambda: state(mq) == "parked", "it is parked")
        sender.start()
        eventually(lambda: (waiting(mq) or 0) > 130, "more comes to the lot")
        fails.is_mended = True
        witness.recorder.key_resumed("line", "g", 0, b"bad")
        assert mq.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: mq.group("line", "g").keys() == [], "the lot is empty")
        time.sleep(0.05)
        is_over.set()
        sender.join()
        eventually(lambda: committed(mq) == 2 * sent - 100, "all of them")
    bodies = of_key(seen.messages, "bad")
    assert bodies == ["0", "0", *map(str, range(sent))]
    witness.judge(order="key")


def test_anybody_may_park_a_key_that_is_well(line: Connection) -> None:
    is_parked = threading.Event()

    def take_time(message: Message, context: Context) -> None:
        is_parked.wait(0.1)  # all messages together take longer than parking the key

    seen = Seen(take_time)
    send(line, "line", *(f"a:{number}" for number in range(100)), "b:x")
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        seen.wait_for(5)
        parked = line.group("line", "g").park("a", why="its owner asked for it")
        assert parked.done_at_ms is not None
        is_parked.set()
        ran = len(of_key(seen.messages, "a"))
        assert ran < 100
        found = one_key(line)
        assert found is not None
        assert (found.state, found.reason) == ("parked", "its owner asked for it")
        eventually(lambda: committed(line) == 101, "all others are done")
        time.sleep(0.05)
        assert len(of_key(seen.messages, "a")) == ran, "done means: nothing of it runs any more"
        assert line.group("line", "g").resume("a").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the lot is empty")
    assert of_key(seen.messages, "a") == [str(number) for number in range(100)]


def test_a_key_that_has_no_messages_yet_can_be_parked(line: Connection) -> None:
    seen = Seen()
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        eventually(lambda: has_joined(line), "it has joined")
        assert line.group("line", "g").park("later").done_at_ms is not None
        found = one_key(line)
        assert found is not None
        assert (found.state, found.offset, found.waiting) == ("parked", None, 0)
        assert line.group("line", "g").key_head("later") is None
        send(line, "line", "later:0", "now:1")
        eventually(lambda: committed(line) == 2, "neither holds the partition back")
        assert of_key(seen.messages, "later") == []
        assert line.group("line", "g").resume("later").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the lot is empty")
    assert of_key(seen.messages, "later") == ["0"]


def test_an_empty_lot_can_be_resumed(line: Connection) -> None:
    seen = Seen()
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        eventually(lambda: has_joined(line), "it has joined")
        assert line.group("line", "g").park("k").done_at_ms is not None
        assert line.group("line", "g").resume("k").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the lot is gone")
        send(line, "line", "k:0")
        eventually(lambda: of_key(seen.messages, "k") == ["0"], "it runs as ever")


def test_parking_waits_for_the_handler_that_runs(line: Connection) -> None:
    go_on = threading.Event()
    seen = Seen(lambda message, context: go_on.wait(WAIT_S) and None)
    send(line, "line", "k:0", "k:1")
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        seen.wait_for(1)
        asked = line.group("line", "g").park("k", wait_s=0.1)
        assert asked.done_at_ms is None
        assert line.group("line", "g").describe_key("k").description.requests == (asked.request,)
        go_on.set()
        again = line.group("line", "g").park("k")
        assert again.done_at_ms is not None
        eventually(lambda: state(line) == "parked", "it is parked")
    assert seen.bodies == [b"0"]


def test_a_skip_drops_the_head_with_a_record_of_who_and_why(bed: Bed) -> None:
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", "bad:1", "bad:2", witness=witness)
    fails = Fails(body=b"0")
    seen = Seen(witness.watch(fails))
    with mq.consumer("line", "g", seen, order="key", settings=parking()):
        eventually(lambda: state(mq) == "parked" and waiting(mq) == 2, "all of it is parked")
        witness.recorder.key_skipped("line", "g", 0, 0, b"bad")
        skipped = mq.group("line", "g").skip("bad", offset=0, by="ann", why="a test order")
        assert skipped.done_at_ms is not None
        found = one_key(mq)
        assert found is not None
        assert (found.state, found.offset, found.waiting) == ("parked", 1, 1), "a parked key stays parked"
        (record,) = mq.group("line", "g").describe_key("bad").history
        request = record.request
        assert (request.kind, request.by, request.why, request.offset) == ("skip", "ann", "a test order", 0)
        assert mq.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: mq.group("line", "g").keys() == [], "the lot is empty")
    assert of_key(seen.messages, "bad") == ["0", "0", "1", "2"]
    witness.judge(order="key")


def test_what_is_parked_may_be_skipped_to_its_end(line: Connection) -> None:
    seen = Seen(Fails())
    send(line, "line", "bad:0", "bad:1")
    with line.consumer("line", "g", seen, order="key", settings=parking()):
        eventually(lambda: state(line) == "parked" and waiting(line) == 1, "all of it is parked")
        for offset in (0, 1):
            assert line.group("line", "g").skip("bad", offset=offset).done_at_ms is not None
        with pytest.raises(NotFound):
            line.group("line", "g").skip("bad")
        assert line.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the lot is gone")


@pytest.mark.parametrize("how", ["kill", "stop", "reopen"])
def test_a_parked_key_stays_parked_whoever_holds_it(bed: Bed, how: str) -> None:
    mq = bed.open(flush="os", lease=SHORT_LEASE)
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", "k:1", "bad:2")
    consumer = mq.consumer("line", "g", Fails(), order="key", settings=parking())
    consumer.start()
    eventually(lambda: state(mq) == "parked" and waiting(mq) == 1, "it is parked")
    if how == "stop":
        consumer.stop()
    else:
        consumer.kill()
    if how == "reopen":
        mq = bed.reopen(flush="os", lease=SHORT_LEASE)
    seen = Seen()
    send(mq, "line", "bad:3", "k:4")
    with mq.consumer("line", "g", seen, order="key", settings=parking()):
        eventually(lambda: "4" in of_key(seen.messages, "k"), "the other key")
        eventually(lambda: waiting(mq) == 2, "the newer one waits behind the older ones")
        assert of_key(seen.messages, "bad") == []
        assert mq.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: mq.group("line", "g").keys() == [], "the lot is empty")
    assert list(dict.fromkeys(of_key(seen.messages, "bad"))) == ["0", "2", "3"]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lot_that_is_being_resumed_goes_on_with_the_next_holder(bed: Bed, how: str) -> None:
    witness = Witness()
    lease = SHORT_LEASE if how == "kill" else STEADY_LEASE
    mq = bed.open(flush="os", lease=lease, observer=witness.recorder)
    mq.create_subject("line", 1)
    send(mq, "line", *(f"bad:{number}" for number in range(60)), witness=witness)
    fails = Fails(body=b"0")

    def handle(message: Message, context: Context) -> None:
        fails(message, context)
        time.sleep(0.005)

    first, second = Seen(witness.watch(handle)), Seen(witness.watch(handle))
    consumer = mq.consumer("line", "g", first, order="key", settings=parking())
    consumer.start()
    eventually(lambda: state(mq) == "parked" and waiting(mq) == 59, "all of it is parked")
    fails.is_mended = True
    witness.recorder.key_resumed("line", "g", 0, b"bad")
    assert mq.group("line", "g").resume("bad").done_at_ms is not None
    first.wait_for(20)
    if how == "kill":
        witness.kill(consumer)
    else:
        consumer.stop()
    send(mq, "line", "bad:60", witness=witness)
    with mq.consumer("line", "g", second, order="key", settings=parking()):
        eventually(lambda: mq.group("line", "g").keys() == [], "the lot is empty")
        eventually(lambda: committed(mq) == 61, "and the newer one is done")
    bodies = [int(body) for body in dict.fromkeys(of_key(second.messages, "bad"))]
    assert bodies == list(range(bodies[0], 61))
    verdict = witness.judge(order="key")
    assert how == "kill" or verdict.duplicates == 0


def test_a_request_waits_for_the_next_holder(bed: Bed) -> None:
    mq = bed.open(flush="os")
    mq.create_subject("line", 1)
    with mq.consumer("line", "g", Seen(), order="key", settings=quick()):
        eventually(lambda: has_joined(mq), "the group is there")
    asked = mq.group("line", "g").park("k", by="ann", why="for later", wait_s=0.05)
    assert asked.done_at_ms is None
    assert state(mq) == "requested"
    mq = bed.reopen(flush="os")
    send(mq, "line", "k:0", "other:1")
    seen = Seen()
    with mq.consumer("line", "g", seen, order="key", settings=quick()):
        eventually(lambda: state(mq) == "parked", "it is parked")
        eventually(lambda: committed(mq) == 2, "both are off the log")
    assert seen.bodies == [b"1"]
    (record,) = mq.group("line", "g").describe_key("k").history
    assert (record.request.by, record.request.why) == ("ann", "for later")
    assert record.done_at_ms is not None


def test_a_reset_empties_the_lots(line: Connection) -> None:
    send(line, "line", "bad:0", "bad:1")
    with line.consumer("line", "g", Fails(), order="key", settings=parking()):
        eventually(lambda: state(line) == "parked", "it is parked")
    line.group("line", "g").reset("first")
    assert line.group("line", "g").keys() == []
    seen = Seen()
    with line.consumer("line", "g", seen, order="key", settings=parking()):
        eventually(lambda: committed(line) == 2, "all of them again")
    assert seen.bodies == [b"0", b"1"]


def test_where_senders_choose_the_partition_it_has_to_be_said(mq: Connection) -> None:
    mq.create_subject("chosen", 2, routing="selector")
    with mq.producer() as producer:
        for number in range(2):
            producer.send("chosen", b"%d" % number, key="bad", selector=lambda *_: 1)
    fails = Fails()
    with mq.consumer("chosen", "g", fails, order="key", settings=parking()):
        eventually(lambda: state(mq, "chosen") == "parked", "it is parked")
        with pytest.raises(InvalidInput, match="partition"):
            mq.group("chosen", "g").resume("bad")
        fails.is_mended = True
        assert mq.group("chosen", "g").resume("bad", partition=1).done_at_ms is not None
        eventually(lambda: mq.group("chosen", "g").keys() == [], "the lot is empty")


def test_large_lots_are_read_piece_by_piece_and_stay_in_order(line: Connection) -> None:
    fails = Fails(body=b"0")
    count = 300
    with line.producer() as producer:
        producer.send("line", b"0", key="bad")
        for number in range(1, count):
            producer.send("line", b"%d " % number + bytes(1000), key="bad")
    seen = Seen(fails)
    with line.consumer("line", "g", seen, order="key", settings=parking(pull_bytes=20_000)):
        eventually(lambda: state(line) == "parked" and waiting(line) == count - 1, "all of it is parked")
        fails.is_mended = True
        assert line.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the lot is empty")
    assert [int(message.body.split(b" ")[0]) for message in seen.messages] == [0, 0, *range(count)]


def test_many_keys_are_parked_and_resumed_under_load_and_keep_their_order(bed: Bed) -> None:
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("orders", 2)
    names = [f"k{number}" for number in range(20)]
    send(mq, "orders", *(f"{name}:{number}" for number in range(20) for name in names), witness=witness)
    bad = {name.encode() for name in names[:8]}
    mended: set[bytes] = set()

    def handle(message: Message, context: Context) -> None:
        time.sleep(random.random() * 0.003)
        if message.key in bad - mended and message.body == b"5":
            raise RuntimeError("no connection")

    watched = witness.watch(handle)
    settings = parking()
    first = mq.consumer("orders", "g", watched, order="key", settings=settings)
    second = mq.consumer("orders", "g", watched, order="key", settings=settings)
    first.start()
    second.start()
    eventually(lambda: len(mq.group("orders", "g").keys()) == 8, "all bad keys are parked")
    send(mq, "orders", *(f"{name}:{number}" for number in range(20, 30) for name in names), witness=witness)
    for number, key in enumerate(sorted(bad)):
        mended.add(key)
        (partition,) = {one.partition for one in mq.group("orders", "g").keys() if one.key == key}
        witness.recorder.key_resumed("orders", "g", partition, key)
        mq.group("orders", "g").resume(key, wait_s=0.0 if number == 3 else 10.0)
        if number == 3:
            witness.kill(first)
    eventually(lambda: mq.group("orders", "g").keys() == [], "all lots are empty")
    eventually(lambda: committed(mq, subject="orders") == 600, "all of them")
    assert second.stop()
    witness.judge(order="key")


# Several events at once


def test_a_failing_key_can_be_parked_and_keeps_its_attempts_until_it_is_resumed(line: Connection) -> None:
    fails = Fails()
    seen = Seen(fails)
    send(line, "line", "bad:0", "bad:1", "k:2")
    with line.consumer("line", "g", seen, order="key", settings=quick(backoff_max_s=0.02)):
        eventually(lambda: len(fails.attempts) >= 3, "it fails")
        assert line.group("line", "g").park("bad", why="enough").done_at_ms is not None
        tried = len(fails.attempts)
        eventually(lambda: committed(line) == 3, "nothing holds the partition back")
        found = one_key(line)
        assert found is not None
        assert (found.state, found.attempts, found.error) == ("parked", tried, "RuntimeError: no connection")
        fails.is_mended = True
        assert line.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the lot is empty")
    assert fails.attempts == [*range(1, tried + 1), 1, 1]
    assert of_key(seen.messages, "bad")[-2:] == ["0", "1"]


def test_a_blocked_key_can_be_parked_and_resumed(line: Connection) -> None:
    fails = Fails()
    send(line, "line", "bad:0", "bad:1", "k:2")
    with line.consumer("line", "g", fails, order="key", settings=quick(max_attempts=2)):
        eventually(lambda: state(line) == "blocked", "it is blocked")
        assert line.group("line", "g").park("bad").done_at_ms is not None
        eventually(lambda: committed(line) == 3, "nothing holds the partition back")
        assert state(line) == "parked"
        fails.is_mended = True
        assert line.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the lot is empty")
    assert fails.attempts == [1, 2, 1, 1]


@pytest.mark.parametrize("was_blocked", [False, True])
def test_a_resume_is_not_half_done_when_its_consumer_is_killed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, was_blocked: bool
) -> None:
    """Killed after the request is done, before a message of the lot has run: attempts still start again."""
    mq = bed.open(flush="os", lease=SHORT_LEASE)
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", "bad:1")
    fails = Fails()
    settings = quick(max_attempts=2) if was_blocked else parking()
    consumer = mq.consumer("line", "g", fails, order="key", settings=settings)
    consumer.start()
    eventually(lambda: state(mq) == ("blocked" if was_blocked else "parked"), "its attempts are used up")
    if was_blocked:
        assert mq.group("line", "g").park("bad").done_at_ms is not None
    put_between(monkeypatch, mq, ReadLot, lambda command, reply, real: None)
    assert mq.group("line", "g").resume("bad").done_at_ms is not None
    consumer.kill()
    monkeypatch.undo()
    second = Fails(body=b"0")
    with mq.consumer("line", "g", second, order="key", settings=settings):
        eventually(lambda: second.attempts, "it runs")
        eventually(lambda: state(mq) in ("blocked", "parked"), "until its attempts are used up again")
        assert second.attempts[:2] == [1, 2]


def place(mq: Connection) -> tuple[str, int | None, int] | None:
    found = one_key(mq)
    return None if found is None else (found.state, found.offset, found.waiting)


def test_a_failing_lot_is_parked_again_with_its_rest_in_order(bed: Bed) -> None:
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("line", 1)
    send(mq, "line", *(f"bad:{number}" for number in range(6)), witness=witness)
    broken = {b"0", b"3"}

    def handle(message: Message, context: Context) -> None:
        if message.body in broken:
            raise RuntimeError("no connection")

    seen = Seen(witness.watch(handle))
    with mq.consumer("line", "g", seen, order="key", settings=parking()):
        for body in (b"0", b"3"):
            offset = int(body)
            eventually(lambda at=offset: place(mq) == ("parked", at, 5 - at), "it is parked")  # type: ignore[misc]
            broken.discard(body)
            witness.recorder.key_resumed("line", "g", 0, b"bad")
            assert mq.group("line", "g").resume("bad").done_at_ms is not None
            send(mq, "line", "k:x", witness=witness)
        eventually(lambda: mq.group("line", "g").keys() == [], "the lot is empty")
        eventually(lambda: committed(mq) == 8, "all of them")
    assert of_key(seen.messages, "bad") == ["0", "0", "0", "1", "2", "3", "3", "3", "4", "5"]
    witness.judge(order="key")


def test_requests_are_acted_upon_in_the_order_they_were_asked(line: Connection) -> None:
    seen = Seen()
    with line.consumer("line", "g", Seen(), order="key", settings=quick()):
        eventually(lambda: has_joined(line), "the group is there")
    line.group("line", "g").park("k", wait_s=0)
    line.group("line", "g").resume("k", wait_s=0)
    send(line, "line", "k:0", "k:1")
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        eventually(lambda: committed(line) == 2 and line.group("line", "g").keys() == [], "parked, and resumed")
    assert of_key(seen.messages, "k") == ["0", "1"]


@pytest.mark.parametrize("action", ["resume", "skip"])
@pytest.mark.parametrize("was", ["blocked", "parked"])
def test_what_is_asked_while_nobody_consumes_is_done_by_the_next_holder(bed: Bed, action: str, was: str) -> None:
    mq = bed.open(flush="os")
    mq.create_subject("line", 1)
    send(mq, "line", *(f"k:{number}" for number in range(50)), "bad:50", "bad:51", "k:52")
    settings = parking(pull_bytes=500) if was == "parked" else quick(max_attempts=2, pull_bytes=500)
    with mq.consumer("line", "g", Fails(), order="key", settings=settings):
        eventually(lambda: state(mq) == was, "its attempts are used up")
        eventually(lambda: was == "blocked" or waiting(mq) == 1, "all of it is parked")
    mq = bed.reopen(flush="os")
    if action == "skip":
        assert mq.group("line", "g").skip("bad", offset=50, wait_s=0).done_at_ms is None
    else:
        assert mq.group("line", "g").resume("bad", wait_s=0).done_at_ms is None
    seen = Seen()
    with mq.consumer("line", "g", seen, order="key", settings=settings):
        if action == "skip" and was == "parked":
            eventually(lambda: (found := one_key(mq)) is not None and found.offset == 51, "the head is dropped")
            assert mq.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: committed(mq) == 53 and mq.group("line", "g").keys() == [], "all of them")
    assert of_key(seen.messages, "bad") == (["51"] if action == "skip" else ["50", "51"])


@pytest.mark.parametrize("on_exhausted", ["block", "park", "dead-letter"])
def test_a_batch_that_is_given_up_stays_together_and_in_order(line: Connection, on_exhausted: str) -> None:
    calls: list[list[str]] = []
    is_mended = threading.Event()

    def handle(messages: list[Message], context: Context) -> None:
        calls.append([message.body.decode() for message in messages])
        if not is_mended.is_set() and messages[0].body == b"0":
            raise RuntimeError("no connection")

    send(line, "line", *(f"bad:{number}" for number in range(6)))
    settings = parking(batch=3, on_exhausted=on_exhausted, retry=RetryDelays((0.02,), 0))
    with line.consumer("line", "g", handle, order="key", settings=settings):
        if on_exhausted == "dead-letter":
            eventually(lambda: committed(line) == 6, "the rest")
            is_mended.set()
            assert line.group("line", "g").dead_letters().redrive() == 3
        else:
            eventually(lambda: state(line) in ("blocked", "parked"), "its attempts are used up")
            is_mended.set()
            assert line.group("line", "g").resume("bad").done_at_ms is not None
            eventually(lambda: line.group("line", "g").keys() == [] and committed(line) == 6, "all of them")
        eventually(lambda: len(calls) >= 4, "all of them")
    batch, rest = ["0", "1", "2"], ["3", "4", "5"]
    if on_exhausted == "dead-letter":
        assert calls == [batch, batch, rest, batch]
    else:
        assert calls == [batch, batch, batch, rest]


def test_parking_takes_what_was_handled_but_not_committed_along(line: Connection) -> None:
    """With manual acknowledgement: the uncommitted messages are repeated when the key is resumed."""
    answers = {b"0": Result.SUCCESS, b"1": Result.SUCCESS}
    seen = Seen(lambda message, context: answers.get(message.body, Result.COMMIT))
    send(line, "line", "k:0", "k:1")
    with line.consumer("line", "g", seen, order="key", settings=quick(ack="manual")):
        seen.wait_for(2)
        assert line.group("line", "g").park("k").done_at_ms is not None
        send(line, "line", "k:2")
        eventually(lambda: waiting(line) == 2, "all three are parked")
        assert line.group("line", "g").resume("k").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "the last one commits all")
    assert of_key(seen.messages, "k") == ["0", "1", "0", "1", "2"]


def test_a_rollback_counts_as_an_attempt_and_parks_all_that_is_uncommitted(line: Connection) -> None:
    is_mended = threading.Event()

    def handle(message: Message, context: Context) -> Result:
        if message.body != b"1":
            return Result.SUCCESS
        return Result.COMMIT if is_mended.is_set() else Result.ROLLBACK

    seen = Seen(handle)
    send(line, "line", "k:0", "k:1")
    with line.consumer("line", "g", seen, order="key", settings=parking(ack="manual")):
        eventually(lambda: state(line) == "parked" and waiting(line) == 1, "both are parked")
        is_mended.set()
        assert line.group("line", "g").resume("k").done_at_ms is not None
        eventually(lambda: line.group("line", "g").keys() == [], "both are done")
    assert of_key(seen.messages, "k") == ["0", "1", "0", "1", "0", "1"]
